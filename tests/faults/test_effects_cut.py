"""The effects receipt of plans that cut the model: silent where all is right, loud where an option did nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import ScheduleGPipe

import shardwise.parallel.apply as apply_module
import shardwise.parallel.context_parallel.attention as context_module
import shardwise.parallel.data_parallel.fsdp as shard_module
import shardwise.parallel.decide as decide_module
import shardwise.parallel.pipeline_parallel.schedule as pipeline_module
import shardwise.parallel.split_parameters as split_module
import shardwise.parallel.tensor_parallel.tp_forwards as tensor_forward
import shardwise.plan.stage_balance as balance_module
import shardwise.train.data.position as stream_module
import shardwise.train.group_samples as grouping
import shardwise.train.session as session_module
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.contract import decided_once
from tests.families import VOCAB, family
from tests.turns import by_turns
from tests.worlds import run_each, run_world

LENGTH = 16
Case = tuple[str, str, int, dict[str, Any]]
Alarms = list[str]

# what is right: strategy, model, micro batches, options
RIGHT: dict[int, list[Case]] = {
    2: [
        ("ddp+tp2", "llama", 2, {}),
        ("ddp+tp2", "gpt2", 1, {"sequence_parallel": False, "recompute": "full"}),
        ("ddp+tp2", "qwen3", 2, {"loss_parallel": True, "recompute": "full"}),
        ("fsdp+tp2", "own", 2, {"recompute": "selective"}),
        ("ddp+tp2", "bert", 1, {"precision": "bf16"}),
        ("ddp+pp2", "llama", 4, {}),
        ("ddp+pp2", "llama", 2, {"stage_blocks": (1, 3)}),
        ("fsdp+pp2", "gemma", 3, {"precision": "bf16"}),
        ("ddp+pp2", "gpt2", 3, {"pipeline_schedule": "gpipe", "recompute": "full"}),
        ("ddp+pp2", "own", 4, {"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2}),
        ("zero1+cp2", "gpt2", 3, {}),
        ("fsdp+cp2", "llama", 2, {"recompute": "full", "prefetch": 2}),
    ],
    4: [
        ("fsdp+tp2", "qwen3", 3, {"loss_parallel": True}),
        ("fsdp+tp2", "gemma", 2, {"gradient_sync": "every"}),
        ("ddp+tp2", "gemma", 1, {"precision": "bf16"}),
        ("fsdp+pp2", "qwen3", 3, {"prefetch": 2}),
        ("zero2+pp2", "mistral", 4, {"pipeline_schedule": "interleaved-zero-bubble", "virtual_stages": 2}),
        ("hsdp+cp2", "gpt2", 2, {}),
        ("ddp+tp2+pp2", "gpt2", 2, {"loss_parallel": True}),
        ("ddp+tp2+cp2", "llama", 2, {"loss_parallel": True}),
        ("ddp+pp2+cp2", "llama", 2, {}),
    ],
}


def run(
    strategy: str, model: str = "llama", accum: int = 2, options: dict[str, Any] | None = None, windows: int = 2
) -> Alarms:
    """Steps with AdamW, of which the second is looked at; returns the receipt's false lines."""
    dims = dims_for(parse_strategy(strategy), dist.get_world_size())
    plan = Plan(strategy=strategy, dims=dims, grad_accum=accum, **(options or {}))
    session = start(plan, receipts=False, device="cpu")
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    module = family(model).float()
    module, optimizer = session.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    for step in session.steps(batches(windows * accum * dims.dp)):
        step.run(module, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
    assert probe.receipt is not None
    assert len(probe.receipt.lines) > 9
    session.close()
    return [
        f"{line.name}: planned {line.planned}, found {line.found}" for line in probe.receipt.lines if line.ok is False
    ]


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCAB, (2, LENGTH + 1), generator=generator) for _ in range(number)]
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]


def right(world: int) -> dict[str, Alarms]:
    found = {}
    for strategy, model, accum, options in by_turns(RIGHT[world], 2, f"{world} ranks"):
        with decided_once(f"{model} in float"):
            found[f"{strategy} {model} {options}"] = run(strategy, model, accum, options)
    return found


@pytest.mark.turns(1)
@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize("world", [2, 4])
def test_no_alarm_when_all_is_right(world: int) -> None:
    for alarms in run_world(right, world, world, timeout_s=170):
        assert not {case: lines for case, lines in alarms.items() if lines}


def otherwise(**changes: Any) -> None:
    """The model is put under another plan."""
    apply = session_module.apply
    session_module.apply = lambda module, plan, *rest: replace(
        apply(module, plan.model_copy(update=changes), *rest), plan=plan
    )


def no_sequence_parallel() -> Alarms:
    otherwise(sequence_parallel=False)
    return run("ddp+tp2")


def no_loss_parallel() -> Alarms:
    otherwise(loss_parallel=False)
    return run("ddp+tp2", options={"loss_parallel": True})


def unasked_loss_parallel() -> Alarms:
    otherwise(loss_parallel=True)
    return run("ddp+tp2")


def no_tensor_parallel() -> Alarms:
    """Every rank keeps and computes all of it."""
    from torch.distributed.tensor import DTensor, Replicate

    apply_module.apply_tensor = lambda *_: None
    split_module.distribute = lambda name, full, layout, mesh: DTensor.from_local(
        full, mesh, [Replicate()], run_check=False
    )
    read = nn.Module.__getattr__

    def plain(self: nn.Module, name: str) -> Any:
        found = read(self, name)
        return found.to_local() if isinstance(found, DTensor) else found

    nn.Module.__getattr__ = plain
    return run("ddp+tp2")


def no_partial_sums() -> Alarms:
    """Each rank steps norms by its own tokens."""
    session_module.finish_partial = lambda parameters: None
    return run("ddp+tp2")


def drifting_replicas() -> Alarms:
    """What is held whole gets another gradient on each rank."""
    finish = session_module.finish_partial

    def drift(parameters: Any) -> None:
        parameters = list(parameters)
        finish(parameters)
        for parameter in parameters:
            if parameter.grad is not None and parameter.ndim == 1:
                parameter.grad.to_local().mul_(1.0 + 0.1 * dist.get_rank())

    session_module.finish_partial = drift
    return run("ddp+tp2")


def no_row_sums() -> Alarms:
    """What each rank has of a sum is taken for the sum."""
    tensor_forward.reduce_from_tp = lambda tensor, group: tensor
    return run("ddp+tp2", options={"sequence_parallel": False})


def tensor_ranks_differ() -> Alarms:
    """Each rank of a tensor-parallel group has samples of its own."""
    grouping.check_same_batches = lambda *_: None  # it would say so before
    stream_module.rank_batches = lambda loader, ranks, share, **skip: list(loader)[ranks.rank :: ranks.world_size]
    return run("ddp+tp2", accum=1, windows=4)


def no_recompute() -> Alarms:
    apply_module.apply_recompute = lambda module, mode, blocks, **_: [module.get_submodule(name) for name in blocks]
    return run("ddp+tp2", options={"recompute": "full"})


def other_schedule() -> Alarms:
    pipeline_module.Schedule1F1B = ScheduleGPipe
    return run("ddp+pp2", accum=4)


def other_order() -> Alarms:
    """The class has the right name, and runs all forwards first."""
    pipeline_module.Schedule1F1B = type("Schedule1F1B", (ScheduleGPipe,), {})
    return run("ddp+pp2", accum=4)


INTERLEAVED: dict[str, Any] = {"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2}


def no_virtual_stages() -> Alarms:
    otherwise(virtual_stages=1, pipeline_schedule="1f1b")
    return run("ddp+pp2", accum=4, options={**INTERLEAVED, "stage_blocks": (1, 1, 1, 1)})


def uneven_stages() -> Alarms:
    """The model is split between other blocks than those that the plan names."""
    otherwise(stage_blocks=(3, 1))
    return run("ddp+pp2", options={"stage_blocks": (2, 2)})


def wrong_balance() -> Alarms:
    """What balances stages is wrong wherever it is asked on a rank, and the split asks it instead of the plan."""
    for place in (balance_module, decide_module):
        place.balanced_stages = lambda *_: (3, 1)
    split = apply_module.split_stages
    apply_module.split_stages = lambda module, spec, wiring, plan, rank: split(
        module, spec, wiring, decide_module.with_stages(plan.model_copy(update={"stage_blocks": None}), wiring), rank
    )
    return run("ddp+pp2", options={"stage_blocks": (2, 2)})


def untied_stages() -> Alarms:
    """A tied embedding gets the gradient of its own stage only."""
    pipeline_module.Pipeline.finish_gradients = lambda self: None
    return run("ddp+pp2", "gemma")


def reduced_every_time() -> Alarms:
    """Gradients are reduced after every micro batch of a pipeline."""
    keep = FSDPModule.set_requires_gradient_sync
    FSDPModule.set_requires_gradient_sync = lambda self, _, **more: keep(self, True, **more)
    return run("fsdp+pp2", accum=4)


def stages_differ() -> Alarms:
    """The last stage has labels of other samples."""
    grouping.check_same_batches = lambda *_: None  # it would say so before
    stream_module.rank_batches = lambda loader, ranks, share, **skip: list(loader)[ranks.rank :: ranks.world_size]
    return run("ddp+pp2", windows=4)


def no_exchange() -> Alarms:
    """Each rank attends to its own chunk."""
    context_module.exchange_in = lambda *_: None
    return run("ddp+cp2")


def no_chunks() -> Alarms:
    """Each rank of a context-parallel group has whole samples."""
    session_module.sequence_share = lambda tree, *rest, **more: tree
    return run("ddp+cp2")


def not_compiled() -> Alarms:
    apply_module.apply_compile = lambda *_, **__: None
    return run("ddp+cp2", options={"compile": True})


def not_gathered_ahead() -> Alarms:
    shard_module.gather_ahead = lambda *_: None
    return run("fsdp+cp2", options={"prefetch": 2})


SABOTAGES: list[tuple[Callable[[], Alarms], int, str]] = [
    (no_sequence_parallel, 2, "sequence parallel"),
    (no_sequence_parallel, 2, "all_gather over tp per step"),
    (no_loss_parallel, 2, "loss parallel"),
    (unasked_loss_parallel, 2, "loss parallel"),
    (no_tensor_parallel, 2, "parameters held"),
    (no_partial_sums, 2, "all_reduce over tp per step"),
    (drifting_replicas, 2, "replicas over tp"),
    (no_row_sums, 2, "all_reduce over tp per step"),
    (tensor_ranks_differ, 2, "samples within model groups"),
    (no_recompute, 2, "block forwards per step"),
    (other_schedule, 2, "pipeline schedule"),
    (other_order, 2, "pipeline schedule"),
    (no_virtual_stages, 2, "stages here"),
    (no_virtual_stages, 2, "pipeline schedule"),
    (uneven_stages, 2, "stages here"),
    (wrong_balance, 2, "stages here"),
    (untied_stages, 2, "tied over stages"),
    (untied_stages, 2, "send over pp per step"),
    (reduced_every_time, 4, "reduce_scatter over dp per step"),
    (stages_differ, 2, "samples within model groups"),
    (no_exchange, 2, "all_to_all over cp per step"),
    (no_chunks, 2, "samples across ranks"),
    (not_compiled, 2, "blocks compiled"),
    (not_gathered_ahead, 2, "blocks gathered ahead"),
]


PATCHED = (
    *(
        apply_module,
        balance_module,
        decide_module,
        context_module,
        pipeline_module,
        session_module,
        shard_module,
        split_module,
        stream_module,
    ),
    *(tensor_forward, nn.Module, FSDPModule, pipeline_module.Pipeline),
)


def and_back(sabotage: Callable[[], Alarms]) -> Alarms:
    """The false lines under a sabotage, which is undone for the next one."""
    before = [dict(vars(place)) for place in PATCHED]
    try:
        return sabotage()
    finally:
        for place, names in zip(PATCHED, before, strict=True):
            for name, was in names.items():
                if vars(place)[name] is not was:
                    setattr(place, name, was)


@pytest.mark.parametrize("world", [2, 4])
def test_each_sabotage_is_caught(world: int) -> None:
    sabotages = list(dict.fromkeys(sabotage for sabotage, ranks, _ in SABOTAGES if ranks == world))
    found = run_each(and_back, world, [(sabotage,) for sabotage in sabotages], timeout_s=170)
    alarms = dict(zip(sabotages, found, strict=True))
    missed = [
        (sabotage.__name__, line, rank, lines)
        for sabotage, ranks, line in SABOTAGES
        if ranks == world
        for rank, lines in enumerate(alarms[sabotage])
        if not any(alarm.startswith(f"{line}:") for alarm in lines)
    ]
    assert not missed
