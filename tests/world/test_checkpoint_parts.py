"""Pipeline stages made by hand: every name once whoever holds it, groups of the whole model, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.checkpoint import save_plan as share_module
from shardwise.checkpoint.format import Manifest, read_manifest
from shardwise.checkpoint.load import load_checkpoint
from shardwise.checkpoint.save import Saver, save_checkpoint
from shardwise.checkpoint.weights import load_weights
from shardwise.errors import CheckpointError, CheckpointMismatch, ModelError
from shardwise.model.read import clean_name
from shardwise.parallel.ownership import StageOwnership, set_ownership
from shardwise.plan.plan import Plan
from tests.worlds import run_world

LAYERS, WIDTH, ROWS = 4, 6, 7


class Layer(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)
        self.shared = shared
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("mask", torch.ones(2), persistent=False)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(5))


class Model(nn.Module):
    """Tied ends; buffers of blocks, of the outside, and one that all blocks share; parameters that only one end has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.places = nn.Parameter(torch.zeros(3, WIDTH))
        shared = Table()
        self.layers = nn.ModuleList(Layer(shared) for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(0.0))


ALIASES = {"head.weight": "embed.weight"} | {f"layers.{n}.shared.table": "layers.0.shared.table" for n in (1, 2, 3)}


def value_of(name: str, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 31 + len(name))
    return torch.randn(shape, generator=generator)


def filled() -> Model:
    model = Model()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(value_of(name, tensor.shape))
    return model


def names_of(model: nn.Module) -> tuple[str, ...]:
    buffers = (n for n, _ in model.named_buffers() if not n.endswith("mask"))
    return (*(n for n, _ in model.named_parameters()), *buffers)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices everywhere, vectors everywhere, one group that only the first stage has and one of the last."""
    named = dict(model.named_parameters())
    plain = [n for n in named if not n.startswith(("places", "last", "stranger"))]
    return [
        {"params": [named[n] for n in plain if named[n].dim() > 1], "lr": 0.1},
        {"params": [named["places"]], "lr": 0.2, "weight_decay": 0.0},
        {"params": [named[n] for n in plain if named[n].dim() == 1], "lr": 0.3},
        {"params": [named["last.weight"], named["last.bias"]], "lr": 0.4},
    ]


def with_state(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> torch.optim.Optimizer:
    """AdamW's state by hand: what a name demands, laid out as the parameter is."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {"step": torch.tensor(5.0)}
            for key in ("exp_avg", "exp_avg_sq"):
                full = value_of(f"{names[id(p)]}/{key}", p.shape)
                optimizer.state[p][key] = laid_out(full, p)
    return optimizer


def laid_out(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def stage_of(model: Model, stage: int, stages: int) -> nn.Module:
    """The part of ``model`` that a stage computes, under the names of the whole; both ends keep the tied weight."""
    each = LAYERS // stages
    own = range(stage * each, (stage + 1) * each)
    model.layers = nn.ModuleDict({str(n): model.layers[n] for n in own})
    if stage:
        model.embed = None
        del model.places
    if stage < stages - 1:
        model.head = model.last = None
    return model


def cut(model: Model, stages: int, inner: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[int, str]]:
    """This rank's container, its optimizer as a session leaves it, and the names of its parameters."""
    world, rank = dist.get_world_size(), dist.get_rank()
    names, groups = names_of(model), groups_of(model)
    each = world // stages
    at = rank // each
    in_groups = [[n for n, p in model.named_parameters() if any(p is q for q in group["params"])] for group in groups]
    part = stage_of(model, at, stages)
    mesh = init_device_mesh("cpu", (stages, each), mesh_dim_names=("pp", "in"))["in"]
    if inner == "tp":
        for module in part.modules():
            for key, p in module._parameters.items():
                placement = (
                    Shard(key == "weight" and p.shape[1] == 9) if p is not None and p.dim() == 2 else Replicate()
                )
                if p is not None and not isinstance(p, DTensor):
                    module._parameters[key] = nn.Parameter(distribute_tensor(p.data, mesh, [placement]))
    if inner == "fsdp":
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(part, mesh=mesh)
    container = nn.Module()
    container.add_module(f"_stage_{at}", part)
    shared_from_stage = frozenset({"embed.weight"}) if at == stages - 1 else frozenset()
    transient = frozenset(f"layers.{n}.mask" for n in range(LAYERS))
    ranks = tuple(range(at * each, (at + 1) * each))
    set_ownership(container, StageOwnership(ranks, names, ALIASES, shared_from_stage, transient))
    live = {ALIASES.get(n, n): p for n, p in part.named_parameters(remove_duplicate=False)}
    for group, members in zip(groups, in_groups, strict=True):
        group["params"] = [live[n] for n in members if n in live]
    return container, torch.optim.AdamW([dict(g) for g in groups]), {id(p): n for n, p in live.items()}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    rng = {"torch": torch.full((4,), dist.get_rank() if dist.is_initialized() else 0, dtype=torch.uint8)}
    return save_checkpoint(
        folder, 5, model=model, optimizer=optimizer, plan=Plan(), state={"from": "rank 0"}, rng=rng, keep=1
    )


def check(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Everything that is here has the value that its name demands; every group its options."""
    names = {}
    for full, tensor in (*model.named_parameters(), *model.named_buffers()):
        name = clean_name(full)
        name = ALIASES.get(name, name)
        names[id(tensor)] = name
        if not name.endswith("mask"):
            assert same(tensor, value_of(name, tensor.shape)), f"{where}: {full}"
    for group in optimizer.param_groups:
        for p in group["params"]:
            held = optimizer.state[p]
            assert {*held} == {"step", "exp_avg", "exp_avg_sq"}, f"{where}: {names[id(p)]}"
            for key in ("exp_avg", "exp_avg_sq"):
                assert same(held[key], value_of(f"{names[id(p)]}/{key}", p.shape)), f"{where}: {names[id(p)]}/{key}"
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2, 0.3, 0.4], where
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.01, 0.0, 0.01, 0.01], where


def same(tensor: torch.Tensor, full: torch.Tensor) -> bool:
    expected = laid_out(full, tensor)
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            return torch.equal(tensor.to_local(), expected.to_local())
        return torch.equal(tensor, expected)


def fresh(stages: int, inner: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An untrained model whose groups have other options."""
    model, optimizer, _ = cut(Model(), stages, inner)
    for group in optimizer.param_groups:
        group.update(lr=9.0, weight_decay=9.0)
    return model, optimizer


def one(*, with_values: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = filled() if with_values else Model()
    optimizer = torch.optim.AdamW(groups_of(model))
    if with_values:
        with_state(optimizer, {id(p): n for n, p in model.named_parameters()})
    else:
        for group in optimizer.param_groups:
            group.update(lr=9.0, weight_decay=9.0)
    return model, optimizer


def save_and_load(root: str, layouts: list[tuple[int, str]]) -> None:
    share_module.SPLIT = 16  # what replicas share is cut
    for stages, inner in layouts:
        where = f"{stages} stages, {inner}, {dist.get_world_size()} ranks"
        model, optimizer, names = cut(filled(), stages, inner)
        with_state(optimizer, names)
        path = save(Path(root) / f"{stages}-{inner}-{dist.get_world_size()}", model, optimizer)
        check(model, optimizer, f"{where}: saving changed it")
        for source in sorted({path, Path(root) / "one" / path.name}):
            again, other = fresh(stages, inner)
            load_checkpoint(source, model=again, optimizer=other)
            check(again, other, f"{where} from {source}")


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint put together, generators left out; each file holds what the manifest says."""
    manifest = read_manifest(path)
    files = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    told = sum(len(entry.shards) for entry in manifest.tensors.values())
    assert told == sum(map(len, files.values())), "a file holds what the manifest does not name"
    found = {}
    for name, entry in manifest.tensors.items():
        full = torch.full(entry.shape, float("nan"))
        for shard in entry.shards:
            at = tuple(slice(a, a + n) for a, n in zip(shard.offsets, shard.lengths, strict=True))
            full[at] = files[shard.file][shard.key]
        found[name] = full
    return {name: tensor for name, tensor in found.items() if not name.startswith("rng/")}


def test_stages_write_what_one_process_would(tmp_path: Path) -> None:
    path = save(tmp_path / "one", *one(with_values=True))
    run_world(save_and_load, 2, str(tmp_path), [(2, "plain")])
    run_world(save_and_load, 4, str(tmp_path), [(2, "plain"), (2, "fsdp"), (2, "tp"), (4, "plain")])
    expected, manifest = stored(path), read_manifest(path)
    for folder in tmp_path.iterdir():
        found, other = stored(folder / path.name), read_manifest(folder / path.name)
        assert found.keys() == expected.keys(), folder.name
        wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not wrong, f"{folder.name}: {wrong[:5]}"
        assert other.aliases == manifest.aliases == {f"model/{a}": f"model/{n}" for a, n in ALIASES.items()}
        assert [g.options for g in other.optimizer.groups] == [g.options for g in manifest.optimizer.groups]
        order = list(names_of(Model())).index
        mine = [tuple(sorted(g.params, key=order)) for g in manifest.optimizer.groups]
        assert [g.params for g in other.optimizer.groups] == mine, folder.name
        model, optimizer = one(with_values=False)
        load_checkpoint(folder / path.name, model=model, optimizer=optimizer)
        check(model, optimizer, f"{folder.name} into one process")


def writers(manifest: Manifest, name: str) -> list[str]:
    return [shard.file for shard in manifest.tensors[name].shards]


def test_work_is_dealt_within_each_stage(tmp_path: Path) -> None:
    run_world(save_and_load_plain, 4, str(tmp_path))
    manifest = read_manifest(tmp_path / "step-00000005")
    for layer, files in ((0, ["rank-00000", "rank-00001"]), (3, ["rank-00002", "rank-00003"])):
        assert writers(manifest, f"model/layers.{layer}.up.weight") == [f"{f}.safetensors" for f in files]
        assert writers(manifest, f"model/layers.{layer}.seen") == [f"{files[0]}.safetensors"]
    assert writers(manifest, "model/embed.weight") == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert writers(manifest, "model/count") == writers(manifest, "model/layers.0.shared.table")
    assert writers(manifest, "model/count") == ["rank-00000.safetensors"]
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("step-*/*.safetensors"))]
    assert max(sizes[:2]) < 1.3 * min(sizes[:2])
    assert max(sizes[2:]) < 1.3 * min(sizes[2:])


def save_and_load_plain(root: str) -> None:
    share_module.SPLIT = 16
    model, optimizer, names = cut(filled(), 2, "plain")
    save(Path(root), model, with_state(optimizer, names))


def wrong_saves(root: str) -> list[str]:
    texts = []
    with Saver(root, keep=1) as saver:

        def attempt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            with pytest.raises(CheckpointError) as caught:
                saver.save(5, model=model, optimizer=optimizer, plan=Plan(), state={})
            texts.append(str(caught.value))

        stage = dist.get_rank() // 2
        model, optimizer, _ = cut(filled(), 2, "plain")
        optimizer.param_groups[2]["lr"] += stage
        optimizer.param_groups[1]["lr"] += stage  # empty on the second stage
        attempt(model, optimizer)
        model, optimizer, _ = cut(filled(), 2, "plain")
        if stage:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            model.register_parameter("more", optimizer.param_groups[-1]["params"][0])
        attempt(model, optimizer)
        model, optimizer, _ = cut(filled(), 2, "plain")
        if stage:
            part = next(model.children())
            del part.layers["2"]
            optimizer = torch.optim.AdamW([{**g, "params": []} for g in optimizer.param_groups])
        attempt(model, optimizer)
        model, optimizer, _ = cut(filled(), 2, "plain")
        if dist.get_rank() == 3:
            next(model.children()).register_parameter("odd", nn.Parameter(torch.zeros(3)))
        attempt(model, optimizer)
        model, optimizer, _ = cut(filled(), 2, "plain")
        saver.save(5, model=model, optimizer=optimizer, plan=Plan(), state={})
    return texts


def test_what_stages_cannot_save(tmp_path: Path) -> None:
    results = run_world(wrong_saves, 4, str(tmp_path))
    assert results == [results[0]] * 4
    options, number, missing, odd = results[0]
    assert "options differ between pipeline stages: group 2 has lr 0.3 on rank 0 and 1.3 on rank 2" in options
    assert "group 1" not in options
    assert "4 parameter groups on rank 0 and 5 on rank 2" in number
    assert "model/layers.2.up.weight: no rank has it" in missing
    assert "model/layers.3" not in missing
    assert "ranks 3 have other unsharded tensors than rank 2" in odd
    assert read_manifest(tmp_path / "step-00000005").step == 5


def wrong_loads(root: str) -> list[str]:
    texts = []
    for name in ("alien", "lacking", "mixed"):
        model, optimizer = fresh(2, "plain")
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(CheckpointMismatch) as caught:
            load_checkpoint(Path(root) / name / "step-00000005", model=model, optimizer=optimizer)
        texts.append(str(caught.value).replace(root, "ROOT"))
        assert all(map(torch.equal, before, model.parameters())), "a load that is refused changes nothing"
    model, optimizer = fresh(2, "plain")
    load_checkpoint(Path(root) / "permuted" / "step-00000005", model=model, optimizer=optimizer)
    check(model, optimizer, "groups in another order")
    return texts


def test_what_stages_do_not_load_and_what_they_do(tmp_path: Path) -> None:
    model, optimizer = one(with_values=True)
    permuted = torch.optim.AdamW([groups_of(model)[at] for at in (3, 1, 0, 2)])
    permuted.state = optimizer.state
    save(tmp_path / "permuted", model, permuted)
    mixed = torch.optim.AdamW([{"params": list(model.layers[:2].parameters())}])
    rest = [p for p in model.parameters() if all(p is not q for q in mixed.param_groups[0]["params"])]
    mixed.add_param_group({"params": rest})
    for _ in range(2):
        mixed.add_param_group({"params": []})
    save(tmp_path / "mixed", model, mixed)
    model.stranger = nn.Parameter(torch.zeros(2))
    save(tmp_path / "alien", model, torch.optim.AdamW([*groups_of(model), {"params": [model.stranger]}]))
    del model.stranger
    del model.layers[0].up, model.layers[3].up
    save(tmp_path / "lacking", model, torch.optim.AdamW(groups_of(model)))
    results = run_world(wrong_loads, 4, str(tmp_path))
    assert results == [results[0]] * 4
    alien, lacking, mixed_text = results[0]
    assert "model/stranger: in the checkpoint, not in the model" in alien
    assert "optimizer/stranger: in the checkpoint, not in the optimizer" in alien
    assert "optimizer: 5 parameter groups in the checkpoint, 4 here" in alien
    assert alien.count("\n") == 3
    for layer in (0, 3):  # of both stages, in one message
        assert f"model/layers.{layer}.up.weight: not in the checkpoint" in lacking
        assert f"optimizer/layers.{layer}.up.bias: not in the checkpoint" in lacking
    assert "layers.1" not in lacking
    assert "optimizer: group 0 mixes the groups [0, 1] of the checkpoint" in mixed_text


def fill_from(source: str) -> str:
    model, _ = fresh(2, "tp")
    load_weights(model, source)
    for full, tensor in (*model.named_parameters(), *model.named_buffers()):
        name = clean_name(full)
        if not name.endswith("mask"):
            assert same(tensor, value_of(ALIASES.get(name, name), tensor.shape)), full
    with pytest.raises(ModelError) as caught:
        load_weights(model, str(Path(source).with_name("bad")))
    return str(caught.value)


def test_weights_of_others_into_stages(tmp_path: Path) -> None:
    model = filled()
    full = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    for folder, tensors in (("good", full), ("bad", {**full, "layers.9.seen": torch.zeros(3)})):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
    assert "layers.0.mask" in full  # kept by the file, of no use to either stage
    texts = run_world(fill_from, 4, str(tmp_path / "good"))
    for text in texts:
        assert "layers.9.seen" in text
        assert "layers.1" not in text
        assert "layers.3" not in text


def resaved(root: str) -> None:
    model, optimizer = fresh(2, "plain")
    load_checkpoint(Path(root) / "one" / "step-00000005", model=model, optimizer=optimizer)
    with Saver(Path(root) / "again", keep=1, async_save=True, guarded=True) as saver:
        saver.save(5, model=model, optimizer=optimizer, plan=Plan(), state={})
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()  # waits until the copy is made


def test_saved_in_the_background_while_stages_step(tmp_path: Path) -> None:
    path = save(tmp_path / "one", *one(with_values=True))
    run_world(resaved, 4, str(tmp_path))
    expected, found = stored(path), stored(tmp_path / "again" / path.name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_manifest_of_stages_is_plain_schema_2(tmp_path: Path) -> None:
    path = save(tmp_path / "one", *one(with_values=True))
    run_world(save_and_load_plain, 4, str(tmp_path / "stages"))
    documents = [json.loads((p / "manifest.json").read_text()) for p in (path, tmp_path / "stages" / path.name)]
    assert documents[0].keys() == documents[1].keys()
    assert [d["schema"] for d in documents] == [2, 2]
