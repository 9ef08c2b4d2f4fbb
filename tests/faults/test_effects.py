"""The effects receipt: silent on everything that is right, and loud on each kind of silent wrongness."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import shardwise.parallel.activation_offload as offload_module
import shardwise.parallel.apply as apply_module
import shardwise.parallel.chunked_loss as loss_chunks_module
import shardwise.parallel.data_parallel.ddp as ddp_module
import shardwise.parallel.data_parallel.fsdp as shard_module
import shardwise.train.data.position as stream_module
import shardwise.train.session as session_module
from shardwise.errors import ReceiptError
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from shardwise.train.structure import StructureRecorder
from tests.models import decoder, ragged_batches
from tests.turns import by_turns
from tests.worlds import run_each, run_world

ATTACH = offload_module.SavedOnHost.attach
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "zero2+offload", "fsdp+offload", "hsdp+offload")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True, "tied": True},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "recompute": "full", "tied": True},
}


def run(strategy: str | Plan, accum: int, variant: str, after: Callable[[Session], None] | None = None) -> Any:
    """Some steps with AdamW; returns the receipt's false lines."""
    options = dict(VARIANTS[variant])
    start_options = {key: options.pop(key) for key in ("recompute", "precision") if key in options}
    session = start(strategy, grad_accum=accum, receipts=False, **start_options)
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    model = decoder(**options).float()
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if after is not None:
        after(session)
    number = 2  # the second is looked at
    if variant in ("plain", "fp16"):  # and one after it; fp16's scaler skips steps until its scale fits
        number = 12 if variant == "fp16" else 3
    batches = ragged_batches(number * accum * session.ranks.world_size)
    for step in session.steps(batches):
        done = probe.receipt is not None  # one more step, and no more
        for micro in step:
            step.backward(token_loss_sum(model(micro.inputs), micro.labels), count=micro.num_tokens)
        step.update(optimizer, clip_norm=1.0)
        if done:
            break
    assert probe.receipt is not None
    assert len(probe.receipt.lines) > 7
    session.close()
    return [
        f"{line.name}: planned {line.planned}, found {line.found}" for line in probe.receipt.lines if line.ok is False
    ]


PLACES = ((1, 1), (2, 1), (2, 3), (4, 3))
"""Ranks and accumulation."""


def cases(strategy: str, world: int) -> list[tuple[int, str]]:
    """Accumulations and variants: all for ddp and fsdp, whose code the others share; of those each pair of any two."""
    turn = STRATEGIES.index(strategy)
    return [
        (accum, variant)
        for (i, (ranks, accum)), (j, variant) in itertools.product(enumerate(PLACES), enumerate(VARIANTS))
        if ranks == world and (strategy in ("ddp", "fsdp") or (turn + j) % len(PLACES) == i)
    ]


def clean(strategy: str) -> dict[str, Any]:
    return {f"{a} {v}": run(strategy, a, v) for a, v in cases(strategy, dist.get_world_size())}


@pytest.mark.turns(1)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_alarm_when_all_is_right(world: int) -> None:
    strategies = by_turns(STRATEGIES, 3, f"{world} ranks")
    found = run_each(clean, world, [(strategy,) for strategy in strategies], timeout_s=170)
    assert all(ranks[0] for ranks in found)
    rows = [(s, alarms) for s, ranks in zip(strategies, found, strict=True) for alarms in ranks]
    wrong = {f"{strategy} {case}": lines for strategy, alarms in rows for case, lines in alarms.items() if lines}
    assert not wrong


def test_every_pair_is_covered() -> None:
    rows = {
        (s, (world, accum), variant) for s in STRATEGIES for world in (1, 2, 4) for accum, variant in cases(s, world)
    }
    for one, other in itertools.combinations(range(3), 2):
        axes = (STRATEGIES, PLACES, tuple(VARIANTS))
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(axes[one], axes[other]))


def sabotage_no_sync(strategy: str) -> list[str]:
    """Every micro batch synchronises: three times the traffic, the same loss curve."""
    session_module.set_gradient_sync = lambda outer, enabled: None
    return run(strategy, 3, "plain")


def sabotage_never_synced(strategy: str) -> list[str]:
    apply_module.set_gradient_sync(nn.Module(), True)
    original = apply_module.set_gradient_sync
    session_module.set_gradient_sync = lambda outer, enabled: original(outer, False)
    return run(strategy, 3, "plain")


def sabotage_only_the_last_syncs(strategy: str) -> list[str]:
    """Reduction after every micro batch was planned, and gradients wait whole for the last."""
    original = session_module.set_gradient_sync
    session_module.set_gradient_sync = lambda outer, enabled: original(outer, enabled and next(turn) % 3 == 2)
    turn = itertools.count()
    dims = dims_for(parse_strategy(strategy), dist.get_world_size())
    return run(Plan(strategy=strategy, dims=dims, grad_accum=3, gradient_sync="every"), 3, "plain")


def sabotage_dropped_upcast(strategy: str) -> list[str]:
    """Gradients are reduced in bf16 although fp32 was planned."""
    shard_module.mixed_precision_policy = lambda plan, is_root: MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )
    return run(strategy, 1, "bf16")


def sabotage_compute_dtype(strategy: str) -> list[str]:
    """bf16 was asked for and ignored."""
    shard_module.mixed_precision_policy = lambda plan, is_root: MixedPrecisionPolicy()
    apply_module.apply_autocast = lambda module, plan: None
    return run(strategy, 1, "bf16")


def sabotage_untied(strategy: str) -> list[str]:
    def untie(session: Session) -> None:
        watches = [
            one for one in session.observers if isinstance(one, StructureRecorder)
        ]  # stops before the receipt does
        session.observers[:] = [one for one in session.observers if one not in watches]
        session.module.head.weight = nn.Parameter(session.module.head.weight.detach().clone())

    return run(strategy, 1, "tied", untie)


def sabotage_one_unit(strategy: str) -> list[str]:
    """Everything is one sharding unit: right gradients, no memory saved."""
    original = apply_module.apply_shard
    apply_module.apply_shard = lambda module, blocks, *rest: original(module, [], *rest)
    return run(strategy, 1, "plain")


def sabotage_optimizer_dtype(strategy: str) -> list[str]:
    def narrow(session: Session) -> None:
        inner = getattr(session.optimizer, "optim", session.optimizer)

        def cast(optimizer: Any, args: Any, kwargs: Any) -> None:
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].bfloat16()

        def widen(optimizer: Any, args: Any, kwargs: Any) -> None:
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].float()

        inner.register_step_post_hook(cast)
        inner.register_step_pre_hook(widen)

    return run(strategy, 1, "plain", narrow)


def sabotage_whole_optimizer(strategy: str) -> list[str]:
    """ZeRO-1 was asked for, and each rank keeps the whole optimizer state."""
    apply_module.shard_optimizer = lambda optimizer, memory: optimizer
    return run(strategy, 1, "plain")


def sabotage_same_samples(strategy: str) -> list[str]:
    """Two ranks with the same sampler."""
    stream_module.rank_batches = lambda loader, ranks, share, **skip: loader
    return run(strategy, 1, "plain")


def sabotage_recompute(strategy: str) -> list[str]:
    apply_module.apply_recompute = lambda module, mode, blocks, **_: [module.get_submodule(name) for name in blocks]
    return run(strategy, 1, "recompute")


def sabotage_all_layers(strategy: str) -> list[str]:
    """Recompute of one block was asked for, and all are wrapped."""
    plain = apply_module.apply_recompute
    apply_module.apply_recompute = lambda module, mode, blocks, layers, **more: plain(module, mode, blocks, **more)
    return run(planned(strategy, recompute="full", recompute_layers=1), 1, "plain")


def sabotage_kept_activations(strategy: str) -> list[str]:
    """Activations were to be offloaded, and the hook keeps the tensors that it is given."""
    offload_module.to_host = lambda flat: flat
    return run(planned(strategy, offload_activations=True), 1, "plain")


def sabotage_no_hooks(strategy: str) -> list[str]:
    apply_module.SavedOnHost.attach = lambda self, block: None
    try:
        return run(planned(strategy, offload_activations=True), 1, "plain")
    finally:
        apply_module.SavedOnHost.attach = ATTACH


def sabotage_offload(strategy: str) -> list[str]:
    from torch.distributed.fsdp import OffloadPolicy

    shard_module.CPUOffloadPolicy = lambda **options: OffloadPolicy()
    return run(strategy, 1, "plain")


def sabotage_resharding(strategy: str) -> list[str]:
    """fsdp was asked for, and the parameters stay gathered (that is zero2)."""

    def stay(session: Session) -> None:
        for module in session.module.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False)

    return run(strategy, 1, "plain", stay)


def sabotage_last_block(strategy: str) -> list[str]:
    """The last block was to stay gathered until its backward, and is freed as the others are."""
    shard_module.keeps_last_block = lambda plan: False
    return run(strategy, 1, "plain")


class AdaptiveBlocks(nn.Module):
    """One block runs as often as its rank's samples ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + 2 * int(x[0, 0] > 0)):
            x = x + self.blocks[0](x)
        return self.head(self.blocks[1](x))


def adaptive(strategy: str, extra: bool) -> list[str]:
    """In the second step rank 1 runs a block once, and the others three times; ``extra`` gathers it once more."""
    session = start(strategy, receipts=False)
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    model = AdaptiveBlocks()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    signs = [1.0] * dist.get_world_size() + [-1.0 if rank == 1 else 1.0 for rank in range(dist.get_world_size())]
    data = [(torch.full((2, 8), sign), torch.full((2, 8), float(at))) for at, sign in enumerate(signs)]
    for step in session.steps(data):
        for micro in step:
            step.backward((model(micro.inputs) - micro.labels).square().sum())
            for _ in range(int(extra)):
                session.phase = "backward"
                block = session.module.blocks[0]
                assert isinstance(block, FSDPModule)
                block.unshard()
                block.reshard()
                session.phase = "other"
        step.update(optimizer)
    session.close()
    assert probe.receipt is not None
    return [f"{line.name}: {line.found}" for line in probe.receipt.lines if line.ok is False]


@pytest.mark.parametrize("extra", [False, True])
def test_gathers_for_other_ranks_are_no_alarm_and_one_more_is(extra: bool) -> None:
    for alarms in run_world(adaptive, 2, "fsdp", extra):
        assert [alarm.split(":")[0] for alarm in alarms] == (["all_gather per step"] if extra else []), alarms


def sabotage_chunks(strategy: str) -> list[str]:
    """The loss was to be computed in chunks, and the head makes all logits at once."""
    apply_module.apply_loss_chunks = lambda module, head, chunks: None
    return run(chunked(strategy), 1, "tied")


def sabotage_one_chunk(strategy: str) -> list[str]:
    """The loss makes its logits itself, and all at once."""
    loss_chunks_module.chunk_rows = lambda tokens, chunks: tokens
    return run(chunked(strategy), 1, "plain")


def chunked(strategy: str) -> Plan:
    return planned(strategy, loss_chunks=3)


def planned(strategy: str, **options: Any) -> Plan:
    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), dist.get_world_size()), **options)


def sabotage_plain_ddp(strategy: str) -> list[str]:
    """Options of DDP were asked for, and it is built without them."""
    original = ddp_module.Replicated
    mine = ("find_unused_parameters", "static_graph", "bucket_cap_mb")

    class Plain(original):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **{key: value for key, value in options.items() if key not in mine})

    ddp_module.Replicated = Plain
    return run(planned(strategy, static_graph=True, find_unused_parameters=True, bucket_cap_mb=2), 1, "plain")


SABOTAGES: list[tuple[Callable[[str], list[str]], str, str]] = [
    (sabotage_no_sync, "ddp", "all_reduce per step"),
    (sabotage_no_sync, "zero1", "all_reduce per step"),
    (sabotage_no_sync, "zero2", "reduce_scatter per step"),
    (sabotage_no_sync, "fsdp", "reduce_scatter per step"),
    (sabotage_never_synced, "ddp", "all_reduce per step"),
    (sabotage_never_synced, "fsdp", "reduce_scatter per step"),
    (sabotage_only_the_last_syncs, "fsdp", "reduce_scatter per step"),
    (sabotage_only_the_last_syncs, "zero2", "reduce_scatter per step"),
    (sabotage_dropped_upcast, "fsdp", "reduction dtype"),
    (sabotage_dropped_upcast, "zero2", "reduction dtype"),
    (sabotage_compute_dtype, "ddp", "compute dtype"),
    (sabotage_compute_dtype, "fsdp", "compute dtype"),
    (sabotage_untied, "ddp", "tied parameters"),
    (sabotage_one_unit, "fsdp", "sharding units"),
    (sabotage_one_unit, "zero2", "sharding units"),
    (sabotage_optimizer_dtype, "ddp", "optimizer state dtype"),
    (sabotage_optimizer_dtype, "zero1", "optimizer state dtype"),
    (sabotage_optimizer_dtype, "fsdp", "optimizer state dtype"),
    (sabotage_whole_optimizer, "zero1", "optimizer state held"),
    (sabotage_same_samples, "ddp", "samples across ranks"),
    (sabotage_same_samples, "fsdp", "samples across ranks"),
    (sabotage_recompute, "ddp", "block forwards per step"),
    (sabotage_recompute, "fsdp", "block forwards per step"),
    (sabotage_all_layers, "ddp", "blocks recomputed"),
    (sabotage_all_layers, "fsdp", "block forwards per step"),
    (sabotage_kept_activations, "ddp", "activations offloaded"),
    (sabotage_kept_activations, "fsdp", "activations offloaded"),
    (sabotage_no_hooks, "fsdp", "activations offloaded"),
    (sabotage_offload, "fsdp+offload", "state lives on"),
    (sabotage_resharding, "fsdp", "all_gather per step"),
    (sabotage_last_block, "fsdp", "all_gather per step"),
    (sabotage_chunks, "ddp", "logits at once"),
    (sabotage_chunks, "fsdp", "logits at once"),
    (sabotage_one_chunk, "zero2", "logits at once"),
    (sabotage_plain_ddp, "ddp", "unused parameters looked for"),
    (sabotage_plain_ddp, "ddp", "static graph"),
    (sabotage_plain_ddp, "zero1", "largest bucket"),
]


def clean_chunks(strategy: str) -> tuple[list[str], int]:
    return run(chunked(strategy), 1, "tied"), dist.get_world_size()


@pytest.mark.parametrize(("strategy", "world"), [("zero1", 2), ("hsdp", 4)])  # on 2 ranks hsdp cuts nothing
def test_no_alarm_where_the_loss_is_in_chunks(strategy: str, world: int) -> None:
    assert run_world(clean_chunks, world, strategy) == [([], world)] * world


DDP_OPTIONS = (
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"find_unused_parameters": True, "static_graph": True},
    {"bucket_cap_mb": 1},
)


def clean_ddp(strategy: str, accum: int, options: dict[str, Any]) -> list[str]:
    return run(planned(strategy, grad_accum=accum, **options), accum, "plain")


def test_no_alarm_under_the_options_of_ddp() -> None:
    calls = [(s, accum, options) for s in ("ddp", "zero1") for accum in (1, 3) for options in DDP_OPTIONS]
    calls = [call for call in calls if call[1] == 1 or "static_graph" not in call[2]]
    assert run_each(clean_ddp, 2, calls) == [[[], []]] * len(calls)


PATCHED = (apply_module, offload_module, ddp_module, loss_chunks_module, shard_module, session_module, stream_module)


def and_back(sabotage: Callable[[str], list[str]], strategy: str) -> list[str]:
    """The false lines under a sabotage, which is undone for the next one."""
    before = [dict(vars(module)) for module in PATCHED]
    try:
        return sabotage(strategy)
    finally:
        for module, names in zip(PATCHED, before, strict=True):
            vars(module).update(names)


def test_each_sabotage_is_caught() -> None:
    calls = [(sabotage, strategy) for sabotage, strategy, _ in SABOTAGES]
    missed = {
        f"{sabotage.__name__} {strategy}": alarms
        for (sabotage, strategy, line), ranks in zip(
            SABOTAGES, run_each(and_back, 2, calls, timeout_s=170), strict=True
        )
        for alarms in ranks
        if not any(alarm.startswith(f"{line}:") for alarm in alarms)
    }
    assert not missed


def strict_on_every_rank() -> str:
    """Only rank 1 sees something wrong; all ranks must stop, and say that it was rank 1."""
    if dist.get_rank() == 1:
        session_module.Session.begin_micro = _begin_and_touch
    session = start("ddp", receipts=False)
    session.observers.append(EffectsRecorder())
    model = decoder(tied=True).float()
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    try:
        for step in session.steps(ragged_batches(6)):
            for micro in step:
                step.backward(token_loss_sum(model(micro.inputs), micro.labels))
            step.update(optimizer)
    except ReceiptError as error:
        return str(error)
    return "no alarm"


def _begin_and_touch(self: Session, *, last: bool, padding: bool = False) -> None:
    for block in self.applied.blocks[:1]:
        block(torch.zeros(1, 1, 12))  # one more forward than planned
    session_module.set_gradient_sync(self.applied.outer, last)
    self.phase = "forward"


def test_a_finding_on_one_rank_stops_all() -> None:
    for text in run_world(strict_on_every_rank, 2):
        assert "block forwards per step" in text
        assert "rank 1" in text
