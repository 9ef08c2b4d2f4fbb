"""Checkpoints among real gloo ranks: any strategy into any other, crashes, full disks, Hugging Face weights."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint import commit as commit_module
from shardwise.checkpoint import save as save_module
from shardwise.checkpoint import shard_files as shards_module
from shardwise.checkpoint.format import newest, read_manifest
from shardwise.checkpoint.load import load_checkpoint, newest_of_all, rng_for
from shardwise.checkpoint.save import save_checkpoint
from shardwise.checkpoint.storage import local_storage as storage_module
from shardwise.checkpoint.weights import load_weights
from shardwise.errors import CheckpointError, ModelError, UserError
from shardwise.plan.plan import Plan
from tests.worlds import WorldError, run_world

STATE = {"position": 123456789012, "scheduler": {"last_lr": [0.1, 1e-7]}, "best": float("inf")}


class Tiny(nn.Module):
    """Tied, frozen, uneven, short (two rows), 0-d; buffers of three kinds."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.frozen = nn.Linear(width, 3).requires_grad_(False)
        self.short = nn.Parameter(torch.zeros(2, width))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("running", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.short.sum(0)
        return self.head(x * self.scale).square().mean() + self.frozen(x).mean()


def shard(model: nn.Module, strategy: str) -> nn.Module:
    """The model under ``strategy`` on all the ranks, done with plain PyTorch."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if strategy == "one":
        return model
    if strategy in ("ddp", "zero1"):
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    if strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    kwargs = {"mesh": mesh, "reshard_after_forward": strategy != "zero2"}
    if strategy == "offload":
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in getattr(model, "blocks", []):
        fully_shard(block, **kwargs)
    fully_shard(model, ignored_params={p for p in model.parameters() if not p.dim()}, **kwargs)
    return model


def build(strategy: str, model: nn.Module | None = None, kind: type = torch.optim.AdamW):
    """A model under ``strategy``, with an optimizer of two groups."""
    torch.manual_seed(7)
    model = shard(Tiny() if model is None else model, strategy)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "lr": 0.5}, {"params": others, "lr": 0.25}]
    if strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(groups, optimizer_class=kind, lr=0.125)
    return model, kind(groups, lr=0.125)


def step(model: nn.Module, optimizer) -> None:
    model(torch.tensor([0, 1, 2, 3, 6])).backward()
    optimizer.step()
    optimizer.zero_grad()


def full_value(name: str, like: torch.Tensor) -> torch.Tensor:
    """The whole tensor that ``name`` must hold: a function of its name and shape alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator).mul(100).to(like.dtype)


def put(tensor: torch.Tensor, full: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
            tensor = tensor.to_local()
        tensor.copy_(full)


def full(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def plain_names(model: nn.Module):
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return dict(inner.named_parameters()), {n: b for n, b in inner.named_buffers() if n != "mask"}


def held_state(model: nn.Module, optimizer):
    """(name of the parameter, key, tensor) for all the state of this rank, in the order of names on every rank."""
    names = {id(p): n for n, p in plain_names(model)[0].items()}
    engine = getattr(optimizer, "optim", optimizer)
    found = [(names[id(p)], key, value) for p, values in engine.state.items() for key, value in values.items()]
    return sorted(found, key=lambda item: item[:2])


def set_all(model: nn.Module, optimizer) -> None:
    """Give every tensor the value that its name demands, and the groups odd hyperparameters."""
    parameters, buffers = plain_names(model)
    for name, tensor in {**parameters, **buffers}.items():
        put(tensor, full_value(name, tensor))
    for name, key, tensor in held_state(model, optimizer):
        put(tensor, torch.tensor(17.0) if key == "step" else full_value(f"{name}/{key}", tensor))
    engine = getattr(optimizer, "optim", optimizer)
    for number, group in [*enumerate(optimizer.param_groups), *enumerate(engine.param_groups)]:
        group.update(lr=0.001 * (number + 1) / 3, betas=(0.8, 0.9 + number / 100), initial_lr=0.3)


def assert_all(model: nn.Module, optimizer, where: str) -> None:
    """Every tensor has the value that its name demands, bit for bit."""
    parameters, buffers = plain_names(model)
    for name, tensor in {**parameters, **buffers}.items():
        assert torch.equal(full(tensor), full_value(name, tensor)), f"{where}: {name}"
    held = defaultdict(set)
    for name, key, tensor in held_state(model, optimizer):
        expected = torch.tensor(17.0) if key == "step" else full_value(f"{name}/{key}", tensor)
        assert torch.equal(full(tensor), expected), f"{where}: {name}/{key}"
        assert tensor.dtype == expected.dtype, f"{where}: {name}/{key}"
        held[name].add(key)
    engine = getattr(optimizer, "optim", optimizer)
    names = {id(p): n for n, p in parameters.items()}
    owned = {names[id(p)] for g in engine.param_groups for p in g["params"]} - {"frozen.weight", "frozen.bias"}
    assert dict(held) == {name: {"step", "exp_avg", "exp_avg_sq"} for name in owned}, where
    for groups in (optimizer.param_groups, engine.param_groups):
        for number, group in enumerate(groups):
            found = (group["lr"], group["betas"], group["initial_lr"])
            assert found == (0.001 * (number + 1) / 3, (0.8, 0.9 + number / 100), 0.3), where


def save(folder: Path, number: int, model: nn.Module, optimizer, *, keep: int = 2, **more) -> Path:
    arguments = {"plan": Plan(reason="test"), "state": STATE, "rng": None} | more
    return save_checkpoint(folder, number, model=model, optimizer=optimizer, keep=keep, **arguments)


SAVED = {1: ["one"], 2: ["ddp", "zero2"], 3: ["zero1", "fsdp"], 4: ["hsdp"]}
LOADED = {1: ["one", "fsdp"], 2: ["zero1", "hsdp"], 3: ["zero2", "ddp", "offload"]}


def save_each(root: str, strategies: list[str]) -> None:
    for strategy in strategies:
        model, optimizer = build(strategy)
        step(model, optimizer)
        set_all(model, optimizer)
        if strategy == "zero2":
            with torch.no_grad():
                model(torch.tensor([0, 1]))  # an evaluation leaves whole parameters behind
            assert not all(isinstance(p, DTensor) for p in model.parameters() if p.dim())
        rank = dist.get_rank()
        rng = {"torch": torch.full((16,), rank, dtype=torch.uint8)}
        for buffer in plain_names(model)[1].values():
            buffer += rank  # each rank has its own: those of rank 0 are saved
        path = save(Path(root) / strategy, 20, model, optimizer, rng=rng)
        assert path == Path(root) / strategy / "step-00000020"
        for name, buffer in plain_names(model)[1].items():
            assert torch.equal(buffer, full_value(name, buffer) + rank)
            put(buffer, full_value(name, buffer))
        assert_all(model, optimizer, f"saving changed {strategy}")


def load_each(root: str, strategies: list[str]) -> None:
    world = dist.get_world_size()
    for strategy in strategies:
        for source in sorted(Path(root).iterdir()):
            model, optimizer = build(strategy)
            if source.name == "ddp":  # a live state is overwritten too
                step(model, optimizer)
            read = count_reads()
            load_checkpoint(source / "step-00000020", model=model, optimizer=optimizer, verify=False)
            num_read = read()
            manifest = load_checkpoint(source / "step-00000020", model=model, optimizer=optimizer)
            where = f"{source.name} into {strategy} of {world}"
            assert_all(model, optimizer, where)
            assert (manifest.step, manifest.state, manifest.plan_fingerprint) == (20, STATE, Plan().fingerprint)
            tensors = [*plain_names(model)[0].values(), *plain_names(model)[1].values()]
            tensors += [tensor for _, _, tensor in held_state(model, optimizer)]
            local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
            assert num_read == sum(t.numel() * t.element_size() for t in local), where
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            assert inner.head.weight is inner.embed.weight
            step(model, optimizer)  # the state made here is one that the optimizer can use
            assert all(float(t) == 18 for _, key, t in held_state(model, optimizer) if key == "step"), where


def count_reads():
    """From now on count the bytes that this rank takes out of checkpoint files."""
    total = [0]
    original = COUNTED.setdefault("read", shards_module._fill_range)

    def fill_range(reader, begin, buffer, made):
        total[0] += len(buffer)
        original(reader, begin, buffer, made)

    shards_module._fill_range = fill_range
    return lambda: total[0]


COUNTED: dict = {}


def test_any_strategy_into_any_other(tmp_path: Path) -> None:
    for world, strategies in SAVED.items():
        run_world(save_each, world, str(tmp_path), strategies)
    sizes = {}
    for source in tmp_path.iterdir():
        folder = source / "step-00000020"
        manifest = read_manifest(folder)
        world = next(w for w, strategies in SAVED.items() if source.name in strategies)
        assert manifest.ranks == world
        assert manifest.aliases == {"model/head.weight": "model/embed.weight"}
        assert not any(n.startswith("optimizer/frozen") for n in manifest.tensors)
        assert not any("mask" in n for n in manifest.tensors)
        assert torch.equal(rng_for(folder, world - 1)["torch"], torch.full((16,), world - 1, dtype=torch.uint8))
        assert rng_for(folder, world) is None
        files = {f.name: load_file(f) for f in folder.glob("*.safetensors")}  # safetensors itself reads them
        sizes[source.name] = [sum(t.nbytes for t in tensors.values()) - 16 for tensors in files.values()]
        named = {(s.file, s.key) for e in manifest.tensors.values() for s in e.shards}
        assert named == {(file, key) for file, tensors in files.items() for key in tensors}
    once = sizes["one"][0]
    assert {name: sum(each) for name, each in sizes.items()} == dict.fromkeys(sizes, once)  # each byte once
    assert {name: len(each) for name, each in sizes.items()} == {n: w for w, names in SAVED.items() for n in names}
    assert max(sizes["ddp"]) <= 0.6 * once
    assert max(sizes["hsdp"]) <= 0.4 * once
    for world, strategies in LOADED.items():
        run_world(load_each, world, str(tmp_path), strategies)


def test_what_schema_1_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "step-00000020"
    shutil.copytree(Path(__file__).parents[1] / "golden" / "checkpoint-schema-1" / "step-00000020", path)
    assert json.loads((path / "manifest.json").read_bytes())["schema"] == 1
    model, optimizer = build("one")
    manifest = load_checkpoint(path, model=model, optimizer=optimizer)
    assert_all(model, optimizer, "from schema 1")
    assert (manifest.step, manifest.state, manifest.model) == (20, STATE, None)
    file = path / "rank-00000.safetensors"
    flipped = bytearray(file.read_bytes())
    flipped[-40] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(CheckpointError, match="not those that were saved"):
        load_checkpoint(path, model=model, optimizer=optimizer)


class Narrow(nn.Module):
    """One row: most ranks hold nothing."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 6, dtype=dtype))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.row * x).sum()


class Factored(torch.optim.Optimizer):
    """Keeps one number a row, and words: state that has neither the shape of the parameter nor one of a tensor."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    state = self.state[p]
                    row = state.get("row", p.new_zeros(p.shape[:1])) + p.grad.square().sum(-1)
                    state.update(row=row, seen={"steps": [1, 2.5, None]})
                    p.data = p.data - group["lr"] * p.grad / (1 + row.unsqueeze(-1))


def held_values(model: nn.Module, optimizer) -> dict:
    held = {(name, key): value for name, key, value in held_state(model, optimizer)}
    return {at: full(v).tolist() if isinstance(v, torch.Tensor) else v for at, v in held.items()}


def narrow_and_half(root: str) -> None:
    rank = dist.get_rank()
    model, optimizer = build("fsdp", Narrow(torch.bfloat16))
    model(torch.ones(6, dtype=torch.bfloat16)).backward()
    optimizer.step()
    before = full(model.row)
    path = save(Path(root) / "narrow", 1, model, optimizer)
    model, optimizer = build("ddp", Narrow(torch.bfloat16))
    load_checkpoint(path, model=model, optimizer=optimizer)
    assert torch.equal(model.module.row, before)
    assert optimizer.state[model.module.row]["exp_avg"].dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=r"model/row: BF16 in the checkpoint, F32 in the model"):
        load_checkpoint(path, model=Narrow(), optimizer=None)
    # a factored state: its shapes differ from the parameter's
    for kind in ("fsdp", "ddp"):
        model, optimizer = build(kind, kind=Factored)
        step(model, optimizer)
        path = save(Path(root) / f"factored-{kind}", 1, model, optimizer)
        saved = held_values(model, optimizer)
        for other in ("ddp", "fsdp"):
            model, optimizer = build(other, kind=Factored)
            load_checkpoint(path, model=model, optimizer=optimizer)
            assert held_values(model, optimizer) == saved
            step(model, optimizer)
    # state that is different on each rank under one name is refused, on all ranks
    model, optimizer = build("fsdp", Narrow())
    optimizer.state[model.row]["mine"] = torch.zeros_like(model.row.to_local())
    with pytest.raises(CheckpointError, match=r"rank 1.*plain tensor with the shape of the local shard"):
        save(Path(root) / "local", 1, model, optimizer)
    assert not names_in(Path(root) / "local")
    # what is not sharded must be the same everywhere, or it would not be known who writes it
    model, optimizer = build("ddp")
    step(model, optimizer)
    if rank == 1:
        optimizer.state[model.module.short]["mine"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"ranks 1 have other unsharded tensors than rank 0: model and optimizer"):
        save(Path(root) / "odd", 1, model, optimizer)
    assert not names_in(Path(root) / "odd")
    # all go on from what rank 0 sees, or none
    assert newest_of_all(Path(root) / "narrow") == Path(root) / "narrow" / "step-00000001"
    assert newest_of_all(Path(root) / "local") is None
    with pytest.raises(CheckpointError, match=r"rank 1 does not see '.*local/step-00000001', which rank 0 resumes"):
        newest_of_all(Path(root) / "narrow" if rank == 0 else Path(root) / "local")


def test_ranks_without_rows_bf16_and_factored_state(tmp_path: Path) -> None:
    run_world(narrow_and_half, 3, str(tmp_path))
    files = [path.name for path in (tmp_path / "narrow" / "step-00000001").iterdir()]
    shard_files = [name for name in files if name.endswith(".safetensors")]
    assert len(shard_files) < 3  # who holds nothing writes nothing
    assert read_manifest(tmp_path / "narrow" / "step-00000001").tensors["model/nothing"].shards == ()


def names_in(folder: Path) -> list[str]:
    """What is there beside the lock and the pointer to the last one."""
    return sorted(p.name for p in folder.iterdir() if p.name not in (".lock", "latest"))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(root: str, where: str) -> None:
    model, optimizer = build("ddp")
    step(model, optimizer)
    set_all(model, optimizer)
    save(Path(root), 10, model, optimizer)
    for parameter in model.parameters():
        put(parameter, torch.zeros(()).expand(parameter.shape))
    if where == "shards" and dist.get_rank() == 1:
        storage_module.FileWriter.close = die  # the file is written and not durable
    if where == "manifest" and dist.get_rank() == 0:
        save_module.commit = die
    if where == "rename" and dist.get_rank() == 0:
        commit_module.rename_folder = die
    save(Path(root), 20, model, optimizer)


@pytest.mark.parametrize("where", ["shards", "manifest", "rename"])
def test_a_kill_before_the_commit_leaves_the_earlier_checkpoint(tmp_path: Path, where: str) -> None:
    with pytest.raises(WorldError, match=r"exit code -9"):
        run_world(save_and_die, 2, str(tmp_path), where)
    assert names_in(tmp_path) == [".tmp-step-00000020", "step-00000010"]
    assert list((tmp_path / ".tmp-step-00000020").iterdir())  # it was under way
    assert newest(tmp_path) == tmp_path / "step-00000010"
    model, optimizer = build("one")
    load_checkpoint(tmp_path / "step-00000010", model=model, optimizer=optimizer)
    assert_all(model, optimizer, "after the kill")
    save(tmp_path, 20, model, optimizer)
    assert names_in(tmp_path) == ["step-00000010", "step-00000020"]


def save_on_full_disk(root: str, limit: bool) -> tuple[str, str]:
    model, optimizer = build("ddp", nn.Linear(100, 100))
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    save(Path(root), 1, model, optimizer)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit and dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    try:
        save(Path(root), 2, model, optimizer)
    except CheckpointError as error:
        return str(error), type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    return "", "saved"


def assert_first_survives(folder: Path, results: list[tuple[str, str]], why: str) -> None:
    assert results[0] == results[1]
    text, kind = results[0]
    assert kind == "CheckpointError"
    assert why in text
    assert f"'{folder}/.tmp-step-00000002/rank-0000" in text
    assert "the checkpoint needs 118.37 KiB and " in text  # (100*100 + 100) * 4 bytes * 3, and two steps
    assert "KiB are free" in text or "MiB are free" in text or "GiB are free" in text
    assert names_in(folder) == ["step-00000001"]
    load_checkpoint(folder / "step-00000001", model=nn.Linear(100, 100), optimizer=None)


def test_one_rank_that_cannot_write_fails_all(tmp_path: Path) -> None:
    results = run_world(save_on_full_disk, 2, str(tmp_path), True)
    assert_first_survives(tmp_path, results, "rank 1 could not write")
    assert "File too large" in results[0][0]


def mount(path: Path, *options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_disk_full(tmp_path: Path) -> None:
    if not mount(tmp_path, "size=200k"):
        pytest.skip("a small file system needs root")
    try:
        results = run_world(save_on_full_disk, 2, str(tmp_path), False)
        assert_first_survives(tmp_path, results, "No space left on device")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def save_where_not_allowed(root: str) -> str:
    model, optimizer = build("ddp")
    with pytest.raises(UserError, match=r"rank 0 cannot write checkpoints to '.*choose a folder") as caught:
        save(Path(root), 1, model, optimizer)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    mounted = mount(tmp_path, "ro")
    if not mounted:
        tmp_path.chmod(0o500)
    try:
        texts = run_world(save_where_not_allowed, 2, str(tmp_path))
    finally:
        if mounted:
            subprocess.run(["umount", str(tmp_path)], check=True)
    assert texts[0] == texts[1]
    assert f"'{tmp_path}'" in texts[0]


def hugging_face(root: str) -> None:
    folder = Path(root)
    for strategy in ("fsdp", "ddp", "hsdp"):
        for source in (folder / "index", folder / "single", folder / "single" / "model.safetensors"):
            model, _ = build(strategy)
            read = count_reads()
            load_weights(model, source)
            parameters, buffers = plain_names(model)
            for name, tensor in {**parameters, **buffers}.items():
                expected = full_value(name, tensor).to(torch.bfloat16).to(tensor.dtype)
                assert torch.equal(full(tensor), expected), f"{source.name} into {strategy}: {name}"
            tensors = [*parameters.values(), *buffers.values()]
            local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
            assert read() == sum(t.numel() * (8 if t.dtype == torch.int64 else 2) for t in local)


def test_hugging_face_weights(tmp_path: Path) -> None:
    parameters, buffers = plain_names(Tiny())
    values = {name: full_value(name, t) for name, t in {**parameters, **buffers}.items()}
    values = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in values.items()}
    values["mask"] = torch.ones(4)  # not saved by this model, and skipped
    (tmp_path / "single").mkdir()
    save_file(values, tmp_path / "single" / "model.safetensors")
    values["head.weight"] = values.pop("embed.weight")  # the other name of the tied two
    (tmp_path / "index").mkdir()
    names = sorted(values)
    places = {name: f"model-{1 + (i >= len(names) // 2):05d}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: values[name] for name in names if places[name] == file}, tmp_path / "index" / file)
    (tmp_path / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    run_world(hugging_face, 2, str(tmp_path))


def test_hugging_face_weights_that_do_not_fit(tmp_path: Path) -> None:
    parameters, buffers = plain_names(Tiny())
    values = {name: t.detach().clone() for name, t in {**parameters, **buffers}.items()}
    del values["embed.weight"], values["short"]
    values |= {"shorts": torch.zeros(2, 5), "running": torch.zeros(4)}
    save_file(values, tmp_path / "model.safetensors")
    model = Tiny()
    before = model.blocks[0].weight.clone()
    with pytest.raises(ModelError) as caught:
        load_weights(model, tmp_path)
    text = "\n".join(caught.value.problems)
    assert text.count("\n  ") == 4
    assert "embed.weight (nor its tied names head.weight): not in" in text
    assert "short: not in" in text
    assert "did you mean 'shorts'?" in text
    assert "shorts: in" in text
    assert "running: (4,) in" in text
    assert torch.equal(model.blocks[0].weight, before)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):  # safetensors under a wrong name
            load_weights(model, source)
    with pytest.raises(UserError, match="does not exist"):
        load_weights(model, tmp_path / "absent")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build("one")
    step(model, optimizer)
    set_all(model, optimizer)
    return model, optimizer


def test_the_same_step_twice_and_pruning(tmp_path: Path) -> None:
    model, optimizer = trained()
    assert newest(tmp_path / "absent") is None
    for number in (10, 20, 30):
        save(tmp_path, number, model, optimizer, keep=2)
    assert names_in(tmp_path) == ["step-00000020", "step-00000030"]
    (tmp_path / "step-00000099").mkdir()  # no manifest: no checkpoint
    assert newest(tmp_path) == tmp_path / "step-00000030"
    before = (tmp_path / "step-00000030" / "manifest.json").stat().st_mtime_ns
    put(model.short, torch.zeros(2, 5))
    assert save(tmp_path, 30, model, optimizer) == tmp_path / "step-00000030"
    assert (tmp_path / "step-00000030" / "manifest.json").stat().st_mtime_ns == before
    save(tmp_path, 15, model, optimizer, keep=1)  # after going back to an earlier step
    assert names_in(tmp_path) == ["step-00000015", "step-00000099"]
    with pytest.raises(UserError, match="keep 0"):
        save(tmp_path, 40, model, optimizer, keep=0)
    with pytest.raises(CheckpointError, match=r"'.*step-00000099' exists but has no manifest.json; remove it"):
        save(tmp_path, 99, model, optimizer)
    with pytest.raises(CheckpointError, match=r"state\.x holds a object"):
        save(tmp_path, 50, model, optimizer, state={"x": object()})
    assert not list(tmp_path.glob(".tmp-*"))


def test_going_on_is_as_if_never_stopped(tmp_path: Path) -> None:
    model, optimizer = build("one")
    step(model, optimizer)
    path = save(tmp_path, 1, model, optimizer)
    step(model, optimizer)
    again, other = build("one")
    load_checkpoint(path, model=again, optimizer=other)
    step(again, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


class Compiled(nn.Module):
    """What ``torch.compile`` puts around a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_wrappers_change_no_name(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, optimizer = trained()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = Compiled(model.blocks[1])
    path = save(tmp_path, 1, Compiled(model), optimizer)
    model, optimizer = build("one")
    load_checkpoint(path, model=model, optimizer=optimizer)
    assert_all(model, optimizer, "from the wrapped one")
    again, other = build("one")
    load_checkpoint(path, model=Compiled(again), optimizer=other)
    assert_all(again, other, "into the wrapped one")


class Secretive(nn.Linear):
    def get_extra_state(self) -> dict:
        return {}


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    _, optimizer = trained()
    with pytest.raises(CheckpointError, match="complex128 cannot be stored as safetensors"):
        one = nn.Linear(2, 2, dtype=torch.complex128)
        save(tmp_path, 1, one, torch.optim.SGD(one.parameters(), lr=0.1))
    with pytest.raises(ModelError, match=r"get_extra_state cannot be checkpointed: 0;"):
        save(tmp_path, 1, nn.Sequential(Secretive(2, 2)), optimizer)
    with pytest.raises(ModelError, match=r"0\.weight is on the meta device"):
        load_weights(nn.Sequential(nn.Linear(2, 2, device="meta")), _weights(tmp_path))
    with pytest.raises(CheckpointError, match=r"rng 'x' is torch.float32"):
        save(tmp_path, 1, *trained(), rng={"x": torch.zeros(2)})
    assert not list(tmp_path.glob("*step-*"))


def _weights(folder: Path) -> Path:
    save_file({"0.weight": torch.zeros(2, 2), "0.bias": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def test_hyperparameters_keep_their_form_and_how_stays(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.3), foreach=False)
    path = save(tmp_path, 1, model, optimizer)
    live = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), betas=(0.5, 0.5), foreach=True, capturable=True)
    lr = live.param_groups[0]["lr"]
    live.state[model.weight]["step"] = torch.tensor(3.0)  # the checkpoint has none: it goes
    load_checkpoint(path, model=model, optimizer=live)
    group = live.param_groups[0]
    assert group["lr"] is lr
    assert torch.equal(lr, torch.tensor(0.3))
    assert group["betas"] == (0.9, 0.999)
    assert (group["foreach"], group["capturable"]) == (True, True)
    assert not live.state


def test_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save(tmp_path, 1, model, optimizer)
    other = Tiny(6)
    other.more = nn.Linear(2, 2)
    del other.short
    untouched = other.blocks[0].weight.clone()
    kind = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model=other, optimizer=kind)
    lines = str(caught.value).split("\n")
    assert len(lines) == 12
    assert "model/embed.weight: (7, 5) in the checkpoint, (7, 6) in the model" in lines[1]
    assert "model/more.weight: not in the checkpoint" in str(caught.value)
    assert "model/short: in the checkpoint, not in the model" in str(caught.value)
    assert lines[-1].strip().startswith("and ")
    assert torch.equal(other.blocks[0].weight, untouched)
    model, _ = build("one")
    with pytest.raises(CheckpointError, match="optimizer: AdamW in the checkpoint, SGD here"):
        load_checkpoint(path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = build("one")
    optimizer.param_groups[0]["amsgrad"] = True
    step(model, optimizer)
    with pytest.raises(CheckpointError, match=r"optimizer/short: keys .* in the checkpoint, .*max_exp_avg_sq"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    model, optimizer = build("one")
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    with pytest.raises(CheckpointError, match=r"group 0 mixes the groups \[0, 1\]"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    model.head.weight = nn.Parameter(torch.zeros(7, 5))  # untied: the model fits, the optimizer does not
    load_checkpoint(path, model=model, optimizer=None)
    assert torch.equal(model.head.weight, model.embed.weight)
    with pytest.raises(CheckpointError, match="parameters that the model does not"):
        save(tmp_path, 2, Tiny(), optimizer)


def test_damage_is_found(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save(tmp_path, 1, model, optimizer)
    file = path / "rank-00000.safetensors"
    good = file.read_bytes()
    model, optimizer = build("one")
    flipped = bytearray(good)
    flipped[-1] ^= 1
    file.write_bytes(flipped)
    load_checkpoint(path, model=model, optimizer=optimizer, verify=False)
    with pytest.raises(CheckpointError, match=r"not those that were saved: .*rank-00000\.safetensors'; remove this"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    file.write_bytes(good[:-8])
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors' is damaged: .*; remove this"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors' is missing; remove this"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    file.write_bytes(good)
    load_checkpoint(path, model=model, optimizer=optimizer)
    assert_all(model, optimizer, "after the repair")


def damage_seen_by_one(root: str) -> str:
    model, optimizer = build("fsdp", nn.Linear(4, 4), torch.optim.SGD)  # rank 0 needs nothing of rank 1's file
    path = save(Path(root), 1, model, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "rank-00001.safetensors").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors' is missing") as caught:
        load_checkpoint(path, model=model, optimizer=optimizer)
    return str(caught.value)


def test_damage_that_one_rank_sees_is_raised_by_all(tmp_path: Path) -> None:
    texts = run_world(damage_seen_by_one, 2, str(tmp_path))
    assert texts[0] == texts[1]
