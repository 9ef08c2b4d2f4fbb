"""Plans that cut the model itself, as a session makes them: any into any other, bit for bit, model and optimizer."""

from __future__ import annotations

import functools
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.format import read_manifest
from shardwise.checkpoint.layout import engine_of
from shardwise.checkpoint.load import load_checkpoint, newest_of_all
from shardwise.checkpoint.save import Saver, save_checkpoint
from shardwise.checkpoint.weights import load_weights
from shardwise.model.read import clean_name, read_model
from shardwise.parallel.ownership import ownership_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.checkpoints import save_as_many
from tests.cli.test_checkpoint_command import answer
from tests.contract import both_here, decided_once, here
from tests.families import VOCAB, configuration, family
from tests.turns import by_turns
from tests.worlds import run_world

Run = tuple[dict[int, float], dict[str, torch.Tensor]]  # the loss of each step, and all tensors at the end

LAYERS, LENGTH, MICROS = 4, 8, 8
LIMIT_S = 160.0
OPTIONS = ({"lr": 0.001 / 3, "weight_decay": 0.1}, {"lr": 0.002 / 3, "weight_decay": 0.0})


def plan_for(text: str, world: int) -> Plan:
    """The plan of a strategy, and of a schedule with two stages a rank where one follows after a blank."""
    strategy, _, schedule = text.partition(" ")
    dims = dims_for(parse_strategy(strategy), world)
    options = {"pipeline_schedule": schedule, "virtual_stages": 2} if schedule else {}
    return Plan(strategy=strategy, dims=dims, grad_accum=MICROS // dims.dp, **options)


def prepared(name: str, strategy: str, *, buffers: bool = True):
    """A session with a model of a family, and AdamW in two groups, as users make them."""
    model = family(name, layers=LAYERS)
    if buffers:
        add_buffers(model)
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
    groups += [{"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]
    session = start(plan_for(strategy, dist.get_world_size()), device="cpu", receipts=False)
    ids = torch.arange(LENGTH)[None]
    with decided_once(f"{name}, buffers {buffers}"):
        return session, *session.prepare(model, torch.optim.AdamW(groups, lr=0.125), ids)


def add_buffers(model: nn.Module) -> None:
    """One outside of the blocks, one in each, and one in a module that all of them share."""
    shared = nn.Module()
    shared.register_buffer("table", torch.zeros(5))
    for number, block in enumerate(read_model(model).blocks):
        model.get_submodule(block).register_buffer("kept", torch.tensor([number, 0]))
        model.get_submodule(block).shared = shared
    model.register_buffer("steps_seen", torch.tensor(0.0))


def step(session: Any, outer: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """The loss of one optimizer step over the same samples, whatever the plan."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(VOCAB, (1, LENGTH), generator=generator) for _ in range(MICROS)]
    for one in session.steps([(ids, ids) for ids in batches], limit=1):
        one.run(outer, token_loss_sum)
        result = one.update(optimizer)
    return result.loss


def named(session: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds and that is here, by its name in the whole model."""
    home = ownership_of(session.module)
    names: dict[int, str] = {}
    found: dict[str, torch.Tensor] = {}
    for full, tensor in (*session.module.named_parameters(), *session.module.named_buffers()):
        name = clean_name(full) if home is None else home.canonical(clean_name(full))
        if isinstance(tensor, nn.Parameter) or name.endswith(("steps_seen", "kept", "table")):
            found[name], names[id(tensor)] = tensor, name
    for parameter, state in engine_of(optimizer).state.items():
        found |= {f"{names[id(parameter)]}/{key}": value for key, value in state.items()}
    return found


@functools.cache
def full(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that ``name`` must hold: a function of its name and shape alone."""
    if name.endswith("/step"):
        return torch.tensor(17.0)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    width = 1 if dtype.is_floating_point else 100
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(width).to(dtype)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, put together by torch itself; collective over the ranks that hold parts."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether it has these elements: this rank's, where torch can say which they are, else all."""
    with torch.no_grad():
        return torch.equal(*both_here(here(tensor), expected))


def set_all(session: Any, optimizer: torch.optim.Optimizer, *, scrambled: bool = False) -> None:
    """Give every tensor the value that its name demands and each group odd options; or all another one."""
    with torch.no_grad():
        for name, tensor in named(session, optimizer).items():
            tensor.copy_(placed(full(name, tensor.shape, tensor.dtype) * (0 if scrambled else 1), tensor))
    for groups in (optimizer.param_groups, engine_of(optimizer).param_groups):
        for group, options in zip(groups, OPTIONS, strict=True):
            group.update({key: value * (3 if scrambled else 1) for key, value in options.items()})


def placed(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor cut as ``like`` is: from its own places, which torch is asked for by a tensor of indices."""
    if not isinstance(like, DTensor):
        return full
    from shardwise.checkpoint.layout import box_of

    box = box_of(like)
    cut = full[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))]
    return DTensor.from_local(
        cut.contiguous(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def check_all(session: Any, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Every tensor has the value that its name demands; nothing is left out."""
    found = named(session, optimizer)
    for name, tensor in found.items():
        assert same(tensor, full(name, tensor.shape, tensor.dtype)), f"{where}: {name}"
    engine = engine_of(optimizer)
    live = {id(tensor): name for name, tensor in found.items()}
    mine = {live[id(p)] for group in engine.param_groups for p in group["params"]}
    keys = {f"{name}/{key}" for name in mine for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {name for name in found if "/" in name} == keys, where
    for group, options in zip(optimizer.param_groups, OPTIONS, strict=True):
        assert {key: group[key] for key in options} == options, where


def save_each(root: str, name: str, strategies: list[str]) -> None:
    for number, strategy in enumerate(strategies):
        save_as_many(number % 2 == 1)
        session, outer, optimizer = prepared(name, strategy)
        step(session, outer, optimizer)
        set_all(session, optimizer)
        check_all(session, optimizer, "the values that were set")
        where = f"{strategy}@{dist.get_world_size()}"
        saved = {"model": session.module, "optimizer": optimizer, "plan": session.plan, "state": {}, "rng": None}
        save_checkpoint(Path(root) / where, 20, **saved, keep=1)
        check_all(session, optimizer, f"saving changed {where}")
        session.close()


def load_each(root: str, name: str, strategies: list[str]) -> list[float]:
    """Load every checkpoint that there is; the loss of one step afterwards, for each strategy."""
    losses = []
    for strategy in strategies:
        session, outer, optimizer = prepared(name, strategy)
        for source in sorted(Path(root).iterdir()):
            path, where = newest_of_all(source), f"{source.name} into {strategy}@{dist.get_world_size()}"
            load_checkpoint(path, model=session.module, optimizer=optimizer)
            check_all(session, optimizer, where)
            set_all(session, optimizer, scrambled=True)
        load_weights(session.module, path)
        for part, tensor in named(session, optimizer).items():
            if "/" not in part:
                assert same(tensor, full(part, tensor.shape, tensor.dtype)), f"{where}: {part}"
        load_checkpoint(path, model=session.module, optimizer=optimizer)
        losses.append(step(session, outer, optimizer))
        steps = {float(t) for name, t in named(session, optimizer).items() if name.endswith("/step")}
        assert steps <= {18.0}, "the state made by the load is one that the optimizer goes on with"
        session.close()
    return losses


def save_and_load(root: str, name: str, strategies: list[str]) -> list[float]:
    save_each(root, name, strategies)
    dist.barrier()
    return load_each(root, name, strategies)


def stored(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint put together; every file holds what the manifest says and no more."""
    manifest = read_manifest(path)
    files = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    assert sum(len(e.shards) for e in manifest.tensors.values()) == sum(map(len, files.values())), path
    found = {}
    for name, entry in manifest.tensors.items():
        tensor = torch.full(entry.shape, -77, dtype=files[entry.shards[0].file][name].dtype)
        for shard in entry.shards:
            at = tuple(slice(a, a + n) for a, n in zip(shard.offsets, shard.lengths, strict=True))
            tensor[at] = files[shard.file][shard.key]
        found[name] = tensor
    return found


PLANS = [  # family, and its plans by the number of ranks; transformers is slow to load, so most is done with "own"
    pytest.param("llama", {1: ["ddp"], 2: ["ddp+pp2"], 4: ["fsdp+tp2"]}, id="llama", marks=pytest.mark.turns(2)),
    # a fused projection; tied ends on two stages, on two ranks or (zbv) on one
    pytest.param("gpt2", {1: ["ddp"], 2: ["ddp+tp2", "ddp+pp2", "ddp+pp2 zbv"]}, id="gpt2", marks=pytest.mark.turns(1)),
    pytest.param(
        "own",
        {1: ["fsdp"], 2: ["ddp+cp2", "zero1+cp2", "ddp+pp2 interleaved-1f1b"]},
        id="own-two-ranks",
        marks=pytest.mark.turns(1),
    ),
    pytest.param(
        "own",
        {1: ["ddp"], 4: ["ddp+tp2", "fsdp+pp2", "fsdp+cp2", "fsdp", "ddp+tp2+pp2"]},
        id="own-four-ranks",
        marks=pytest.mark.turns(1),
    ),
    pytest.param("own", {1: ["zero2"], 8: ["fsdp+tp2+pp2"]}, id="own-eight-ranks", marks=pytest.mark.turns(2)),
    pytest.param("own", {1: ["zero2"], 8: ["hsdp+tp2"]}, id="own-eight-ranks-copies", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("name", "plans"), PLANS)
def test_any_plan_into_any_other(tmp_path: Path, name: str, plans: dict[int, list[str]]) -> None:
    plans = {world: strategies[:1] + by_turns(strategies[1:], 2, name) for world, strategies in plans.items()}
    losses: list[float] = []
    for world, strategies in list(plans.items())[:-1]:
        run_world(save_each, world, str(tmp_path), name, strategies, timeout_s=LIMIT_S)
    for world, strategies in reversed(plans.items()):  # the ranks that save last have everything to load, too
        act = load_each if losses else save_and_load
        losses += run_world(act, world, str(tmp_path), name, strategies, timeout_s=2 * LIMIT_S)[0]
    assert len(losses) == sum(map(len, plans.values()))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-12)
    paths = {folder.name: folder / "step-00000020" for folder in tmp_path.iterdir()}
    alone = paths.pop(f"{plans[1][0]}@1")
    expected, manifest = stored(alone), read_manifest(alone)
    for where, path in paths.items():
        found, other = stored(path), read_manifest(path)
        assert found.keys() == expected.keys(), where
        wrong = [n for n, t in found.items() if t.dtype != expected[n].dtype or not torch.equal(t, expected[n])]
        assert not wrong, f"{where}: {wrong[:5]}"
        assert (other.aliases, other.optimizer) == (manifest.aliases, manifest.optimizer), where


STEPS = 6


def loop(folder: str, strategy: str, stop_after: int | None, *, async_save: bool = False) -> Run:
    """A loop of one's own, over two passes, that saves every other step and may be left; the loss of each step."""
    session, outer, optimizer = prepared("own", strategy)
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(VOCAB, (1, LENGTH), generator=generator) for _ in range(MICROS * STEPS // 2)]
    found = session.load(folder)
    assert found == ({"done": session.steps_done} if session.steps_done else None)
    losses: dict[int, float] = {}
    for _ in range(2):
        for one in session.steps([(ids, ids) for ids in batches]):
            one.run(outer, token_loss_sum)
            losses[one.number] = one.update(optimizer, clip_norm=0.5).loss
            if one.number % 2 == 0 or one.number == stop_after:
                session.save(folder, state={"done": one.number}, async_save=async_save)
            if one.number == stop_after:
                session.close()
                return losses, {}
    ends = {name: gathered(tensor).clone() for name, tensor in named(session, optimizer).items()}
    session.close()
    return losses, ends


def stopped_and_whole(root: str, strategies: list[str]) -> None:
    for strategy in strategies:
        losses, ends = loop(f"{root}/{strategy}/whole", strategy, None)
        first, _ = loop(f"{root}/{strategy}/run", strategy, 3, async_save=True)
        rest, others = loop(f"{root}/{strategy}/run", strategy, None, async_save=True)
        assert first | rest == losses, strategy
        assert sorted(rest) == [4, 5, 6]
        assert ends.keys() == others.keys()
        wrong = [name for name, tensor in ends.items() if not torch.equal(tensor, others[name])]
        assert not wrong, f"{strategy}: {wrong[:5]}"


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("world", "strategies"), [(2, ["ddp+cp2", "ddp+tp2", "ddp+pp2"]), (4, ["fsdp+tp2", "fsdp+pp2"])]
)
def test_a_loop_of_ones_own_goes_on_bit_identically(tmp_path: Path, world: int, strategies: list[str]) -> None:
    run_world(stopped_and_whole, world, str(tmp_path), by_turns(strategies, len(strategies), f"{world} ranks"))


@pytest.mark.turns(2)
def test_a_loop_of_ones_own_goes_on_under_another_plan(tmp_path: Path) -> None:
    full = run_world(loop, 1, str(tmp_path / "whole"), "ddp", None)[0][0]
    assert sorted(full) == [1, 2, 3, 4, 5, 6]
    found: dict[int, float] = {}
    legs = ((4, "fsdp+tp2", 1), (2, "ddp+pp2", 2), (2, "ddp+cp2", 4), (4, "fsdp+pp2", 5), (1, "ddp", None))
    for world, strategy, stop in legs:
        results = [losses for losses, _ in run_world(loop, world, str(tmp_path / "run"), strategy, stop)]
        assert results == [results[0]] * world
        found |= results[0]
    assert found == pytest.approx(full, rel=1e-9)


def save_for_others(root: str, strategies: list[str]) -> None:
    for strategy in strategies:
        session, outer, optimizer = prepared("gpt2", strategy, buffers=False)
        step(session, outer, optimizer)
        set_all(session, optimizer)
        with Saver(Path(root) / strategy, keep=1) as saver:
            facts = {"kind": "transformers", "config": json.loads(configuration("gpt2", LAYERS).to_json_string())}
            saved = {"model": session.module, "optimizer": optimizer, "plan": session.plan, "state": {}}
            saver.save(20, **saved, model_facts=facts)


@pytest.mark.turns(2)
def test_the_commands_know_nothing_of_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_world(save_for_others, 2, str(tmp_path), ["ddp+pp2", "ddp+tp2"], timeout_s=LIMIT_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())  # transformers sets some when it is first used
        model = family("gpt2", layers=LAYERS)
        for strategy in ("ddp+pp2", "ddp+tp2"):
            for words in (["inspect"], ["verify"], ["convert", "hf"], ["convert", "own"]):
                target = [str(tmp_path / f"{words[1]}-{strategy}")] if words[1:] else []
                to = ["--to", "hf" if words[1] == "hf" else "shardwise"] if target else []
                found = answer(capsys, words[0], str(tmp_path / strategy), *target, *to)
                assert words[0] != "convert" or found["verified"] is True, found
            hf = load_file(tmp_path / f"hf-{strategy}" / "model.safetensors")
            names = dict(model.named_parameters())
            assert hf.keys() == names.keys()
            wrong = [name for name, t in hf.items() if not torch.equal(t, full(name, t.shape, t.dtype))]
            assert not wrong, f"{strategy}: {wrong[:5]}"
            optimizer = torch.optim.AdamW(
                [{"params": [p for p in names.values() if (p.dim() > 1) == matrices]} for matrices in (True, False)]
            )
            load_checkpoint(newest_of_all(tmp_path / f"own-{strategy}"), model=model, optimizer=optimizer)
            for name, p in names.items():
                assert torch.equal(p, full(name, p.shape, p.dtype)), name
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(optimizer.state[p][key], full(f"{name}/{key}", p.shape, p.dtype)), name
