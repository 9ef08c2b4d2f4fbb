"""Weights, gradients and optimizer state in bf16: bytes as planned, and the bits of a loop by hand."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from shardwise.cost.memory.estimate_memory import estimate, estimate_memory
from shardwise.errors import PlanError, ReceiptError, ShardwiseError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.measure.state import measure_state
from shardwise.model.read import clean_name, read_model
from shardwise.model.trace import trace_module
from shardwise.parallel.apply import parameter_names
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.changed_types import DtypeRecorder
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.optimizer import workload_of
from tests.kept import kept
from tests.models import LENGTH, decoder, ragged_batches
from tests.worlds import run_world

NEAREST = {"weights": "compute"}
KAHAN, STOCHASTIC = NEAREST | {"rounding": "kahan"}, NEAREST | {"rounding": "stochastic"}
MASTERS, LOW_GRADIENTS = {"weights": "masters"}, {"weights": "masters", "accumulate": "compute"}
REDUCE = {"reduce": "compute"}
TYPES: dict[str, dict[str, str]] = {
    "nearest": NEAREST,
    "kahan": KAHAN,
    "stochastic": STOCHASTIC,
    "masters": MASTERS,
    "low gradients": LOW_GRADIENTS,
    "reduced low": REDUCE,
    "all low": NEAREST | REDUCE,
    "masters, reduced low": MASTERS | REDUCE,
    "masters, all low": LOW_GRADIENTS | REDUCE,
}
Bits = dict[str, torch.Tensor]
STEPS, LR, BETAS, DECAY = 3, 3e-3, (0.9, 0.95), 0.1
OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}


def plan_for(strategy: str, types: dict[str, str], **options: Any) -> Plan:
    dims = dims_for(parse_strategy(strategy), dist.get_world_size(), devices_per_node=2)
    return Plan.model_validate({"strategy": strategy, "dims": dims, "precision": "bf16"} | types | options)


def built(seed: int = 0) -> nn.Module:
    return decoder(seed).float()


def prepared(plan: Plan, kind: Any = torch.optim.AdamW, seed: int = 0) -> tuple[Any, nn.Module, Any]:
    session = start(plan, device="cpu", receipts=False)
    model = built(seed)
    options = {"lr": LR, "momentum": 0.9} if kind is torch.optim.SGD else {**OPTIONS, "fused": True}
    return session, *session.prepare(model, kind(model.parameters(), **options))


def bits(module: nn.Module) -> Bits:
    whole = ((name, p.full_tensor() if isinstance(p, DTensor) else p) for name, p in module.named_parameters())
    return {clean_name(name): p.detach().clone() for name, p in whole}


# bytes


class Bytes:
    """Measures bytes at rest at the end of a step, while gradients exist."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def on_step_end(self, session: Any, step: Any) -> None:
        found = measure_state(session.module, session.optimizer)
        self.found = [found.parameters, found.gradients, found.optimizer]


def planned(plan: Plan, optimizer: Any, module: nn.Module) -> list[list[int | None]]:
    """Bytes of parameters, gradients and state by both models of memory."""
    workload = workload_of(optimizer, parameter_names(module))
    plan = plan.model_copy(update={"micro_batch": 2, "seq_len": LENGTH})
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    profile = kept(("low precision",), lambda: trace_module(module, inputs=ids, precision="bf16", device="cpu"))
    exact = estimate_memory(read_model(module), plan, workload)
    known = workload.model_copy(update={"optimizer": "adamw"})
    return [
        [one.parameters, one.gradients, one.optimizer]
        for one in (exact, estimate(profile, plan, known, parse_cluster("cpu")))
    ]


def held(strategy: str, types: dict[str, str], **options: Any) -> tuple[Any, list[Any], list[str]]:
    """Bytes as planned and as found, and the false lines of a receipt."""
    plan = plan_for(strategy, types, grad_accum=2, **options)
    model = built()
    expected = planned(plan, torch.optim.AdamW(model.parameters(), **OPTIONS), model)
    session = start(plan, device="cpu", receipts=False)
    effects, measured, watch = EffectsRecorder(strict=False), Bytes(), DtypeRecorder.attach(session)
    session.observers += [effects, measured]
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True))
    for step in session.steps(ragged_batches(2 * 2 * session.ranks.world_size)):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
    assert watch.steps == (2 if plan.weights != "fp32" else 0)
    assert effects.receipt is not None
    false = [f"{one.name}: {one.planned}, not {one.found}" for one in effects.receipt.lines if one.ok is False]
    session.close()
    return expected, measured.found, false


def held_by_all(strategies: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for strategy in strategies:
        for name, types in TYPES.items():
            try:
                found[f"{strategy} {name}"] = held(strategy, types)
            except PlanError as error:
                found[f"{strategy} {name}"] = str(error)
        if strategy in ("ddp", "fsdp"):
            more = {"recompute": "full", "loss_chunks": 2}
            found[f"{strategy} kahan with options"] = held(strategy, KAHAN, **more)
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("world", "strategies"), [(2, ("ddp", "zero1", "zero2", "fsdp")), (4, ("hsdp", "zero1"))])
def test_bytes_at_rest_are_the_plans_and_every_line_is_true(world: int, strategies: tuple[str, ...]) -> None:
    ranks = run_world(held_by_all, world, strategies, timeout_s=180)
    for case, first in ranks[0].items():
        strategy, name = case.split(maxsplit=1)
        if strategy in ("ddp", "zero1") and name in ("masters", "masters, reduced low"):
            assert "DDP's buckets have the weights' type" in first
            continue
        expected, _, _ = first
        fullest = [max(row[case][1][at] for row in ranks) for at in range(3)]
        assert [fullest, fullest] == expected, case
        assert not [line for row in ranks for line in row[case][2]], case


# by hand


def uniform(key: int, index: np.ndarray) -> np.ndarray:
    """The 16 bits of noise of each element: a hash of key + index (lowbias32), written out for numpy."""
    x = (index.astype(np.uint32) + np.uint32(key)).astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> np.uint32(shift))) * np.uint32(factor)).astype(np.uint32)
    return x & np.uint32(0xFFFF)


def stochastically(wide: torch.Tensor, name: str, step: int) -> torch.Tensor:
    """bf16 numbers below or above fp32 ones."""
    start = (step * 0x9E3779B9 + zlib.crc32(name.encode())) & 0xFFFFFFFF
    x = np.array([start], np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> np.uint32(shift))) * np.uint32(factor)).astype(np.uint32)
    flat = wide.detach().flatten().numpy().view(np.uint32)
    rounded = (flat.astype(np.uint64) + uniform(int(x[0]), np.arange(flat.size))).astype(np.uint32) & 0xFFFF0000
    return torch.from_numpy(rounded.astype(np.uint32).view(np.float32).copy()).view_as(wide).bfloat16()


def stepped(
    weight: nn.Parameter, gradient: torch.Tensor, kept: dict[str, Any], types: dict[str, str], name: str
) -> None:
    """One step of AdamW in fp32, and what each way keeps of it."""
    masters, kahan = types["weights"] == "masters", types.get("rounding") == "kahan"
    dtype = torch.float32 if masters else torch.bfloat16
    if not kept:
        kept |= {"m": torch.zeros_like(weight, dtype=dtype), "v": torch.zeros_like(weight, dtype=dtype)}
        kept |= {"n": torch.zeros(()), "rest": torch.zeros_like(weight), "master": weight.detach().float()}
    wide = kept["master"] if masters else weight.detach().float() + kept["rest"].float() * kahan
    m, v = kept["m"].float(), kept["v"].float()
    adamw(
        [wide], [gradient.float()], [m], [v], [], [kept["n"]],
        fused=True, amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=LR, weight_decay=DECAY, eps=1e-8, maximize=False,
    )  # fmt: skip
    kept |= {"m": m.to(dtype), "v": v.to(dtype)}
    if types.get("rounding") == "stochastic":
        weight.data.copy_(stochastically(wide, name, int(kept["n"])))
    else:
        weight.data.copy_(wide.bfloat16())
    kept["rest"] = (wide - weight.detach().float()).bfloat16()


def by_hand(types: dict[str, str], ranks: int) -> Bits:
    """Plain torch in one process: each rank's micro batch in turn, their mean in fp32 or bf16, and the step."""
    model, state = built().bfloat16(), {}
    named = dict(model.named_parameters())
    wide = types["weights"] == "masters" and types.get("accumulate") != "compute"
    plain = (
        torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True) if types in (NEAREST, NEAREST | REDUCE) else None
    )
    batches = ragged_batches(STEPS * ranks)
    for number in range(STEPS):
        given, rows = batches[number * ranks : (number + 1) * ranks], []
        tokens = sum(int((labels != -100).sum()) for _, labels in given)
        for ids, labels in given:
            model.zero_grad()
            loss = token_loss_sum(model(ids).float(), labels)
            (loss * (ranks / tokens if tokens else 0.0)).backward()
            rows.append({name: p.grad.clone() for name, p in named.items()})
        for name, weight in named.items():
            low = types.get("reduce") == "compute"
            each = [row[name] if low else row[name].float() for row in rows]
            mean = sum(one / ranks for one in each[1:]) + each[0] / ranks if ranks > 1 else each[0]
            weight.grad = mean.bfloat16()
            if plain is None:
                gradient = mean if wide else mean.bfloat16()
                stepped(weight, gradient, state.setdefault(name, {}), types, name)
        if plain is not None:
            plain.step()
    return bits(model)


def trained(strategy: str, types: dict[str, str]) -> Bits:
    session, model, optimizer = prepared(plan_for(strategy, types))
    for step in session.steps(ragged_batches(STEPS * session.ranks.world_size)):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    found = bits(session.module)
    session.close()
    return found


def cases(world: int) -> Iterator[tuple[str, str]]:
    names = ("nearest", "kahan", "stochastic", "low gradients", "all low")
    for strategy in ("ddp",) if world == 1 else ("ddp", "zero1", "zero2", "fsdp"):
        yield from ((strategy, name) for name in names)
        if strategy in ("zero2", "fsdp"):
            yield from ((strategy, name) for name in ("masters", "masters, reduced low"))


def several(world: int) -> dict[tuple[str, str], Bits]:
    return {(strategy, name): trained(strategy, TYPES[name]) for strategy, name in cases(world)}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_those_of_a_loop_by_hand_bit_for_bit(world: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on a rank: sums in bf16 depend on it
    expected = {name: by_hand(types, world) for name, types in TYPES.items() if "weights" in types}
    torch.set_num_threads(threads)
    began = built().bfloat16()
    for (strategy, name), found in run_world(several, world, world, timeout_s=150)[0].items():
        for key, value in found.items():
            assert value.dtype == torch.bfloat16, (strategy, name, key)
            assert torch.equal(value, expected[name][key]), (strategy, name, key)
        assert any(not torch.equal(value, began.get_parameter(key)) for key, value in found.items())
    apart = [expected[name] for name in ("nearest", "kahan", "stochastic", "low gradients")]
    assert all(
        any(not torch.equal(one[key], other[key]) for key in one)
        for one in apart
        for other in apart
        if one is not other
    )


# checkpoints


def rest_of(session: Any, model: nn.Module, optimizer: Any, folder: str, steps: int, save_at: int | None) -> Bits:
    for step in session.steps(ragged_batches(6 * session.ranks.world_size), limit=steps):
        step.run(model, token_loss_sum)
        step.update(optimizer)
        if step.number == save_at:
            session.save(folder)
    found = bits(session.module)
    session.close()
    return found


def resumed(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("kahan", "stochastic", "masters"):
        types, where = TYPES[name], f"{folder}/{name}"
        whole = rest_of(*prepared(plan_for("fsdp", types)), where, 4, 2)
        for strategy in ("fsdp", "zero2") if name == "masters" else ("fsdp", "zero1"):
            session, model, optimizer = prepared(plan_for(strategy, types), seed=7)
            session.load(where)
            again = rest_of(session, model, optimizer, where, 2, None)
            found[f"{name} {strategy}"] = [key for key in whole if not torch.equal(whole[key], again[key])]
    session, model, _ = prepared(plan_for("fsdp", KAHAN), seed=7)
    try:
        session.load(f"{folder}/stochastic")
    except ShardwiseError as error:
        found["another rounding"] = str(error)
    session.close()
    return found


@pytest.mark.timeout(200)
def test_a_resumed_run_has_the_same_bits_under_another_strategy_too(tmp_path: Path) -> None:
    for found in run_world(resumed, 2, str(tmp_path), timeout_s=150):
        said = found.pop("another rounding", "")
        assert len(found) == 6 and not any(found.values()), found
        assert "norm.bias: state of stochastic in the checkpoint, of kahan here" in said


# refusals and later steps


def refused() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, kind in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)):
        try:
            prepared(plan_for("ddp", KAHAN), kind)
        except PlanError as error:
            found[key] = str(error)
    session, model, optimizer = prepared(plan_for("ddp", NEAREST), torch.optim.SGD)
    rest_of(session, model, optimizer, "", 2, None)
    for strategy, types in (
        ("fsdp+tp2", NEAREST),
        ("zero2+offload", MASTERS),
        ("deepspeed-zero2", REDUCE),
        ("auto", NEAREST),
    ):
        try:
            start(strategy, precision="bf16", types=types)
        except PlanError as error:
            found[strategy] = str(error)
    try:
        start("fsdp", types={"weight": "compute", "reduce": "bf16"}, precision="bf16")
    except PlanError as error:
        found["values"] = error.problems
    return found


def test_what_is_not_run_is_refused_by_name() -> None:
    found = run_world(refused, 1)[0]
    assert "rounding = 'kahan' is run with torch.optim.AdamW, not with SGD; use AdamW" in found["sgd"]
    assert "not with Adam;" in found["adam"]
    assert "runs under ddp, zero1, zero2, fsdp, hsdp, and is only planned for fsdp+tp2" in found["fsdp+tp2"]
    assert "only planned for zero2+offload" in found["zero2+offload"]
    assert "only planned for deepspeed-zero2" in found["deepspeed-zero2"]
    assert "belongs to a named strategy" in found["auto"]
    assert len(found["values"]) == 2 and "did you mean 'weights'" in found["values"][0]


def changed_later(what: str) -> str:
    """A type that changes in the third step on the last rank, seen by all when the fourth begins."""
    session = start(plan_for("ddp", KAHAN), device="cpu", receipts=False)
    DtypeRecorder.attach(session)
    model = built()
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), **OPTIONS))
    try:
        for step in session.steps(ragged_batches(6 * session.ranks.world_size)):
            step.run(model, token_loss_sum)
            if step.number == 3 and session.ranks.rank == 1:
                head = session.module.head.weight
                if what == "parameter":
                    scale = session.module.scale
                    scale.grad = None
                    scale.data = scale.data.float()
                else:
                    state = optimizer.state[head]
                    state["exp_avg"] = state["exp_avg"].float()
            step.update(optimizer)
    except ReceiptError as error:
        return str(error)
    finally:
        session.close()
    return "not seen"


def both_changes() -> dict[str, str]:
    return {what: changed_later(what) for what in ("parameter", "optimizer state")}


def test_a_type_that_changes_later_stops_all_ranks() -> None:
    for found in run_world(both_changes, 2):
        for what, said in found.items():
            assert said == f"effects: {what} dtype: planned bfloat16, found float32 after step 3 (rank 1)"
