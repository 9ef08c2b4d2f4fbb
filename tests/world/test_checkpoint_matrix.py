"""Any strategy into any other, as a user gets them from a session; layouts of plans to come; parts of replicas."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise.checkpoint import save_plan as share_module
from shardwise.checkpoint.format import read_manifest
from shardwise.checkpoint.layout import engine_of
from shardwise.checkpoint.load import load_checkpoint, newest_of_all
from shardwise.checkpoint.save import save_checkpoint
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.run.start import start
from tests.turns import by_turns
from tests.worlds import run_world

IDS = torch.tensor([[0, 1, 2, 6, 3]])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Zoo(nn.Module):
    """Tied, frozen, uneven rows, fewer rows than ranks, one element; buffers of three kinds; ``odd``: 0-d, empty."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, odd: bool = False, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.short = nn.Parameter(torch.zeros(2, width))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        if odd:
            self.number = nn.Parameter(torch.tensor(1.0))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.to(dtype)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("running", torch.zeros(3, dtype=torch.float16))
        self.register_buffer("empty", torch.zeros(2, 0))
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x) + self.short.sum(0)
        if hasattr(self, "number"):
            x = x * self.number + self.nothing.sum()
        return self.head(self.frozen(x))


def plan_for(strategy: str, world: int) -> Plan:
    """The plan of a strategy for so many ranks."""
    dims = ParallelDims(dp_shard=world)
    if strategy in ("one", "ddp", "zero1"):
        dims = ParallelDims(dp_replicate=world)
    if strategy.startswith("hsdp"):
        dims = ParallelDims(dp_replicate=2, dp_shard=world // 2)
    return Plan(strategy="ddp" if strategy == "one" else strategy, dims=dims)


def prepared(strategy: str, **options):
    """A session with a model, and an optimizer of four groups; frozen parameters are in it, as users leave them."""
    torch.manual_seed(7)
    model = Zoo(**options)
    matrices = [p for p in model.parameters() if p.dim() > 1 and p is not model.short]
    vectors = [p for p in model.parameters() if p.dim() <= 1 and p is not model.frozen.bias]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    groups += [{"params": [model.frozen.bias], "eps": 1e-3}, {"params": [model.short], "lr": 0.5}]
    session = start(plan_for(strategy, dist.get_world_size()), device="cpu", receipts=False)
    return session, *session.prepare(model, torch.optim.AdamW(groups, lr=0.125))


def step(session, outer: nn.Module, optimizer) -> None:
    for one in session.steps([(IDS, IDS)] * session.ranks.world_size, limit=1):
        for micro in one:
            one.backward(outer(micro.inputs).float().square().sum())
        one.update(optimizer)


@functools.cache
def full_value(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor that ``name`` must hold: a function of its name, shape and dtype alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).mul(100).to(dtype)


def expected(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What this rank must hold of it, as torch itself cuts it."""
    if name.endswith("/step"):
        return torch.tensor(17.0)
    full = full_value(name, tensor.shape, tensor.dtype)
    if isinstance(tensor, DTensor):
        return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    return full


def here(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def tensors_of(session, optimizer) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds of this rank, by name."""
    named = dict(session.module.named_parameters())
    names = {id(p): name for name, p in named.items()}
    buffers = {name: buffer for name, buffer in session.module.named_buffers() if name != "mask"}
    found = {**named, **buffers}
    for p, state in engine_of(optimizer).state.items():
        found |= {f"{names[id(p)]}/{key}": value for key, value in state.items()}
    return found


def groups_of(optimizer) -> list[dict]:
    """Hyperparameters as the user sees them and as the optimizer inside does, which must be the same."""
    outer = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    inner = [{k: v for k, v in group.items() if k != "params"} for group in engine_of(optimizer).param_groups]
    assert [{k: group[k] for k in inner[0]} for group in outer] == inner
    return outer


def set_all(session, optimizer, *, scrambled: bool = False) -> None:
    """Give every tensor the value that its name demands, and each group odd hyperparameters; or all another one."""
    with torch.no_grad():
        for name, tensor in tensors_of(session, optimizer).items():
            here(tensor).copy_(torch.full_like(expected(name, tensor), 3) if scrambled else expected(name, tensor))
    for groups in (optimizer.param_groups, engine_of(optimizer).param_groups):
        for number, group in enumerate(groups):
            rng_state = 0.5 if scrambled else 0.001 * (number + 1) / 3
            group.update(
                lr=rng_state, betas=(0.8, 0.9 + rng_state / 10), weight_decay=rng_state / 7, initial_lr=rng_state * 2
            )


def assert_all(session, optimizer, where: str) -> None:
    """Every tensor is there and has the value that its name demands, bit for bit; every group too."""
    found = tensors_of(session, optimizer)
    for name, tensor in found.items():
        assert torch.equal(here(tensor), expected(name, tensor)), f"{where}: {name}"
    trained = {n for n, p in session.module.named_parameters() if p.requires_grad}
    engine = engine_of(optimizer)
    mine = {id(p) for group in engine.param_groups for p in group["params"]}
    names = {n for n in trained if id(session.module.get_parameter(n)) in mine}
    keys = {f"{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {name for name in found if "/" in name} == keys, where
    assert engine is not optimizer or names == trained, where
    for number, group in enumerate(groups_of(optimizer)):
        rng_state = 0.001 * (number + 1) / 3
        options = (group["lr"], group["betas"], group["weight_decay"], group["initial_lr"])
        assert options == (rng_state, (0.8, 0.9 + rng_state / 10), rng_state / 7, rng_state * 2), (
            f"{where}: group {number}"
        )
    assert session.module.head.weight is session.module.embed.weight


SAVED = {
    1: ["one", "fsdp"],
    2: ["ddp", "zero2", "hsdp", "fsdp+offload"],
    3: ["zero1", "fsdp"],
    4: ["hsdp", "hsdp+offload", "ddp"],
}
LOADED = {
    1: ["one", "zero1"],
    2: ["ddp", "zero1", "hsdp", "fsdp+offload"],
    3: ["ddp", "zero2", "fsdp"],
    4: ["fsdp", "hsdp", "zero1", "hsdp+offload"],
}
SPLIT = {"ddp": 16, "hsdp": 16}  # strategies whose replicas cut what they share from so many bytes on


def save_each(root: str, strategies: list[str], options: dict) -> None:
    for strategy in strategies:
        share_module.SPLIT = SPLIT.get(strategy, 1 << 22)
        session, outer, optimizer = prepared(strategy, **options)
        step(session, outer, optimizer)
        set_all(session, optimizer)
        if strategy == "zero2":
            with torch.no_grad():
                outer(IDS)  # an evaluation leaves whole parameters behind
        name = f"{strategy}@{dist.get_world_size()}"
        saved = {"model": session.module, "optimizer": optimizer, "plan": session.plan, "state": {}, "rng": None}
        save_checkpoint(Path(root) / name, 20, **saved, keep=1)
        assert_all(session, optimizer, f"saving changed {name}")


def load_each(root: str, strategies: list[str], options: dict) -> int:
    pairs = 0
    for strategy in strategies:
        session, outer, optimizer = prepared(strategy, **options)
        for source in sorted(Path(root).iterdir()):
            path = newest_of_all(source)
            where = f"{source.name} into {strategy}@{dist.get_world_size()}"
            manifest = load_checkpoint(path, model=session.module, optimizer=optimizer)
            assert_all(session, optimizer, where)
            assert f"{manifest.plan['strategy']}@{manifest.ranks}" == source.name.replace("one", "ddp")
            set_all(session, optimizer, scrambled=True)
            pairs += 1
        load_checkpoint(path, model=session.module, optimizer=optimizer)
        step(session, outer, optimizer)  # the state made here is one that the optimizer can use
        steps = {float(t) for name, t in tensors_of(session, optimizer).items() if name.endswith("/step")}
        assert steps <= {18.0}, where
    return pairs


def cuts(folder: Path, name: str) -> int:
    return len(read_manifest(folder / "step-00000020").tensors[name].shards)


def stored_bytes(path: Path) -> int:
    return sum(t.nbytes for file in path.glob("*.safetensors") for t in load_file(file).values())


@pytest.mark.turns(1)
def test_any_strategy_into_any_other_through_a_session(tmp_path: Path) -> None:
    for world, strategies in SAVED.items():
        run_world(save_each, world, str(tmp_path), strategies, {})
    weight = "optimizer/blocks.0.up.weight/exp_avg"  # 11 rows
    assert cuts(tmp_path / "ddp@2", weight) == 2
    assert cuts(tmp_path / "ddp@4", weight) == 4
    assert cuts(tmp_path / "hsdp@2", weight) == 2
    assert cuts(tmp_path / "hsdp@4", weight) == 4  # each of two shards by both that hold it
    assert cuts(tmp_path / "hsdp+offload@4", weight) == 2
    loaded = {world: by_turns(names, 2, f"{world} ranks") for world, names in LOADED.items()}
    pairs = sum(run_world(load_each, world, str(tmp_path), names, {})[0] for world, names in loaded.items())
    assert pairs == 11 * sum(map(len, loaded.values()))
    stored = {folder.name: stored_bytes(folder / "step-00000020") for folder in tmp_path.iterdir()}
    assert stored == dict.fromkeys(stored, stored["one@1"])  # every element once, whoever had it


def test_half_precision_and_odd_shapes(tmp_path: Path) -> None:
    half, odd = {"dtype": torch.bfloat16}, {"odd": True}
    run_world(save_each, 3, str(tmp_path / "half"), ["fsdp", "ddp"], half)
    run_world(save_each, 3, str(tmp_path / "odd"), ["ddp"], odd)
    for world in (1, 2):
        run_world(load_each, world, str(tmp_path / "half"), ["ddp", "zero1", "fsdp"], half)
        run_world(load_each, world, str(tmp_path / "odd"), ["ddp"], odd)


class Pair(nn.Module):
    """Two linear layers as tensor parallel plans cut them, and what they leave whole."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, rows)
        self.down = nn.Linear(rows, width)
        self.norm = nn.LayerNorm(width)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.hollow = nn.Parameter(torch.zeros(3, 0))


def filled(rows: int, width: int) -> nn.Module:
    """The model in one process, every element another number."""
    model = Pair(rows, width)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(full_value(name, p.shape, p.dtype))
    return model


def optimizer_of(model: nn.Module, *, doubled: bool) -> torch.optim.Optimizer:
    """AdamW with state made by hand: what is doubled, element by element, is laid out as the parameter is."""
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters() if doubled else ():
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": p.detach() * 2, "exp_avg_sq": p.detach() * 4}
    return optimizer


def cut(model: nn.Module, layout: str) -> nn.Module:
    """The model in a layout; torch cuts what is there."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    world = dist.get_world_size()
    if layout == "tp":
        return parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    if layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_shard", "tp"))
        return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp_shard"])
    shape = (2, world // 4, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp_replicate", "dp_shard"])


def save_and_load_layouts(root: str, layouts: list[str], shapes: list[tuple[int, int]]) -> list[str]:
    share_module.SPLIT = 16
    seen = set()
    for rows, width in shapes:
        for layout in layouts:
            model = cut(filled(rows, width), layout)
            optimizer = optimizer_of(model, doubled=True)
            folder = Path(root) / f"{layout}@{dist.get_world_size()}-{rows}x{width}"
            saved = {"model": model, "optimizer": optimizer, "plan": Plan(), "state": {}, "rng": None}
            path = save_checkpoint(folder, 1, **saved, keep=1)
            seen |= {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
            for source in (path, Path(root) / f"one-{rows}x{width}" / "step-00000001"):
                again = cut(Pair(rows, width), layout)
                other = optimizer_of(again, doubled=False)
                load_checkpoint(source, model=again, optimizer=other)
                for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
                    assert torch.equal(here(a), here(b)), f"{source}: {name}"
                    for key, value in optimizer.state[a].items():
                        assert torch.equal(here(value), here(other.state[b][key])), f"{source}: {name}/{key}"
    return sorted(seen)


@pytest.mark.turns(2)
def test_layouts_of_plans_to_come(tmp_path: Path) -> None:
    shapes = [(8, 4), (7, 5), (3, 2), (9, 3)]  # even, uneven, fewer rows than ranks, uneven twice
    for rows, width in shapes:
        one = filled(rows, width)
        saved = {"model": one, "optimizer": optimizer_of(one, doubled=True), "plan": Plan(), "state": {}, "rng": None}
        save_checkpoint(tmp_path / f"one-{rows}x{width}", 1, **saved, keep=1)
    seen = run_world(save_and_load_layouts, 4, str(tmp_path), ["tp", "fsdp+tp"], shapes[:3])[0]
    assert {"(Shard(dim=1),)", "(Shard(dim=0), Shard(dim=1))", "(_StridedShard(dim=0, sf=2), Shard(dim=0))"} <= {*seen}
    seen = run_world(save_and_load_layouts, 8, str(tmp_path), ["hsdp+tp", "fsdp+tp"], shapes[3:])[0]
    assert "(Replicate(), _StridedShard(dim=0, sf=2), Shard(dim=0))" in seen
    for folder in tmp_path.iterdir():
        rows, width = map(int, folder.name.rsplit("-", 1)[1].split("x"))
        model = Pair(rows, width)
        optimizer = optimizer_of(model, doubled=False)
        load_checkpoint(folder / "step-00000001", model=model, optimizer=optimizer)
        for name, p in model.named_parameters():
            full = full_value(name, p.shape, p.dtype)
            assert torch.equal(p, full), f"{folder.name}: {name}"
            assert torch.equal(optimizer.state[p]["exp_avg"], full * 2), f"{folder.name}: {name}"
