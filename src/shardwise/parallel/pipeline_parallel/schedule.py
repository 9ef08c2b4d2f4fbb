"""Pipeline parallel: stages of a model, and their schedule of micro batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.distributed.mesh import Meshes
from shardwise.errors import PlanError
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name
from shardwise.model.wiring import Wiring
from shardwise.parallel.pipeline_parallel.stage_module import Receive, StageContainer, build_stage, copies
from shardwise.parallel.pipeline_parallel.stage_runtime import LossFunction, RunStage, StageSpan, StageWork
from shardwise.parallel.precision import DTYPES
from shardwise.plan.plan import Plan, stage_problems

_SEVERAL = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
_TORCH_LOG = logging.getLogger("torch.distributed.pipelining.schedules")
_ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv")


@dataclass(frozen=True)
class Stages:
    """Stages of this rank, as modules with the user's names.

    One stage without pipeline parallel.

    ``container`` is what the session trains: the model itself without pipeline parallel, else a module whose children
    ``_stage_K`` are the stages. ``own`` are the blocks of each of ``parts``, ``indices`` their numbers, ``receives``
    the module where each receives its input. ``shared_from_stage`` are tied parameters and buffers that are here and
    owned by another stage, ``tied`` the names, in each, of parameters that the first and the last stage use.
    """

    container: nn.Module
    parts: tuple[nn.Module, ...]
    own: tuple[frozenset[str], ...]
    shared_from_stage: frozenset[str] = frozenset()
    indices: tuple[int, ...] = (0,)
    number: int = 1
    receives: tuple[Receive | None, ...] = (None,)
    tied: tuple[tuple[str, str], ...] = ()

    def blocks_of(self, stage: nn.Module) -> frozenset[str]:
        """Return the names of the blocks that ``stage`` computes."""
        return self.own[self._at(stage)]

    def is_last(self, stage: nn.Module) -> bool:
        """True for the stage that computes the loss."""
        return self.indices[self._at(stage)] == self.number - 1

    def _at(self, stage: nn.Module) -> int:
        return next(at for at, part in enumerate(self.parts) if part is stage)


def stage_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the pipeline rank of each stage: round robin, or there and back for ``zbv``."""
    pp, number = plan.dims.pp, plan.dims.pp * plan.virtual_stages
    ranks = [index % pp for index in range(number)]
    if plan.pipeline_schedule == "zbv":
        ranks = [index if index < pp else number - 1 - index for index in range(number)]
    return tuple(ranks)


def check_pipeline(plan: Plan, num_blocks: int) -> None:
    """Check that the plan's schedule can run a model of ``num_blocks`` blocks.

    Nothing is started.

    Raises:
        PlanError: lists all obstacles, with what would work.
    """
    pp, virtual, name = plan.dims.pp, plan.virtual_stages, plan.pipeline_schedule
    if pp == 1:
        return
    problems = []
    needed = {"gpipe": (1, 1), "1f1b": (1, 1), "zbv": (2, 2)}.get(name, (2, 1 << 30))
    if not needed[0] <= virtual <= needed[1]:
        rule = f"{needed[0]}" if needed[0] == needed[1] else f"{needed[0]} or more"
        other = ", or pipeline_schedule to interleaved-1f1b" if needed == (1, 1) else ""
        problems.append(
            f"pipeline_schedule {name} needs virtual_stages {rule}, got {virtual}; set it to {needed[0]}{other}"
        )
    if num_blocks and pp * virtual > num_blocks:
        equation = f"pp {pp}" + (f" × virtual_stages {virtual} = {pp * virtual}" if virtual > 1 else "")
        problems.append(
            f"{equation} stages need as many blocks, and the model has {num_blocks}; "
            f"use +pp{max(1, num_blocks // virtual)}"
        )
    problems += stage_problems(plan)
    placed = sum(plan.stage_blocks or ())
    if num_blocks and placed not in (0, num_blocks):
        problems.append(
            f"stage_blocks {list(plan.stage_blocks or ())} place {placed} blocks, and the model has {num_blocks}; "
            "remove stage_blocks from the plan, or make a new plan for this model"
        )
    count = padded_count(plan, plan.grad_accum)
    if count != plan.grad_accum:
        below = max((n for n in range(1, plan.grad_accum) if padded_count(plan, n) == n), default=count)
        problems.append(
            f"pipeline_schedule {name} over pp {pp} cannot run {plan.grad_accum} micro batches a step; set grad_accum "
            f"to {below} or {count}"
        )
    if name in _ZERO_BUBBLE and plan.parsed.reshards_after_forward:
        base = plan.parsed.base
        problems.append(
            f"pipeline_schedule {name} with {base}: weights get their gradients in a separate pass, after {base} has "
            f"freed them; use zero2+pp{pp}, which keeps weights gathered, or pipeline_schedule interleaved-1f1b"
        )
    if name in _ZERO_BUBBLE and plan.recompute != "none":
        problems.append(
            f"pipeline_schedule {name} goes backward through a block twice, which selective recompute cannot and full "
            "recompute pays for with one more forward each time; set recompute to none, or pipeline_schedule to "
            "interleaved-1f1b"
        )
    if name in _ZERO_BUBBLE and plan.compile:
        problems.append(
            f"pipeline_schedule {name} splits the backward, and the backward of a compiled block cannot be split; "
            "set compile to false, or pipeline_schedule to interleaved-1f1b"
        )
    if problems:
        raise PlanError(*problems)


def check_tied(spec: ModelSpec, wiring: Wiring, plan: Plan) -> None:
    """Check that the plan supports parameters shared by the first and the last stage.

    Nothing is started.

    Raises:
        PlanError: one rank would have both stages, and data parallel would split one parameter into two there.
    """
    tied, ranks = _tied(spec, wiring), stage_ranks(plan)
    if tied and ranks[0] == ranks[-1] and _is_wrapped(plan):
        raise PlanError(
            f"pipeline_schedule {plan.pipeline_schedule} puts the first and the last stage on one rank, and both use "
            f"'{tied[0][0]}' (tied), of which data parallel would make two there; use interleaved-zero-bubble"
        )


def _is_wrapped(plan: Plan) -> bool:
    """True if FSDP2 wraps the stages, and casts weights before they compute."""
    return plan.parsed.shards_parameters or plan.dims.dp * plan.dims.cp > 1


def padded_count(plan: Plan, micro_batches: int) -> int:
    """Return the smallest number of micro batches, at least the given, for the schedule."""
    if plan.pipeline_schedule in ("interleaved-1f1b", "interleaved-zero-bubble"):
        while micro_batches % max(1, micro_batches // plan.dims.pp):
            micro_batches += 1
    return micro_batches


def split_stages(module: nn.Module, spec: ModelSpec, wiring: Wiring | None, plan: Plan, pp_rank: int) -> Stages:
    """Build this rank's stages, with the blocks that ``plan.stage_blocks`` gives each.

    Without pipeline parallel ``wiring`` is ``None`` and the model is one stage.

    Raises:
        PlanError: the schedule does not support the plan, the number of blocks, or a tied parameter.
        ModelError: several stages on a rank need copies of the model, and it cannot be copied.
    """
    if wiring is None:
        return Stages(module, (module,), (frozenset(spec.blocks),))
    check_pipeline(plan, len(spec.blocks))
    check_tied(spec, wiring, plan)
    tied, ranks = _tied(spec, wiring), stage_ranks(plan)
    number = len(ranks)
    counts = plan.stage_blocks or ()
    starts = [sum(counts[:index]) for index in range(number)]
    indices = [index for index, rank in enumerate(ranks) if rank == pp_rank]
    parts = copies(module, len(indices))
    device = torch.device(plan.device)
    dtype = DTYPES[plan.precision] if _is_wrapped(plan) and plan.precision != "fp32" else None
    receives, own = [], []
    for index, part in zip(indices, parts, strict=True):
        mine = range(starts[index], starts[index] + counts[index])
        receives.append(build_stage(part, spec.blocks, mine, wiring, dtype, device))
        own.append(frozenset(spec.blocks[at] for at in mine))
    shared_from_stage = set()
    if 0 not in indices:
        canonical = {alias: p.name for p in spec.parameters for alias in (p.name, *p.aliases)}
        shared_from_stage |= _outer_buffers(parts[0], spec)
        shared_from_stage |= {canonical[after] for _, after in tied} if number - 1 in indices else set()
    return Stages(
        container=StageContainer(dict(zip(indices, parts, strict=True))),
        parts=tuple(parts),
        own=tuple(own),
        shared_from_stage=frozenset(shared_from_stage),
        indices=tuple(indices),
        number=number,
        receives=tuple(receives),
        tied=tied,
    )


def _tied(spec: ModelSpec, wiring: Wiring) -> tuple[tuple[str, str], ...]:
    """Return parameters used before the first and after the last block, by name in each."""
    found = []
    for parameter in spec.parameters:
        names = (parameter.name, *parameter.aliases)
        before = [name for name in names if name in wiring.before]
        after = [name for name in names if name in wiring.after]
        if before and after:
            found.append((before[0], after[0]))
    return tuple(found)


def _outer_buffers(module: nn.Module, spec: ModelSpec) -> set[str]:
    """Return persistent buffers outside of the blocks: on every stage, owned by the first."""
    found = set()
    for prefix, part in module.named_modules():
        for key in part._buffers:
            name = clean_name(f"{prefix}.{key}".lstrip("."))
            inside = any(name.startswith(f"{block}.") for block in spec.blocks)
            if not inside and key not in part._non_persistent_buffers_set:
                found.add(name)
    return found


@dataclass(frozen=True)
class _Sample:
    """Micro batch that is not a `Micro`: of an evaluation, or one that pads a step."""

    inputs: Any
    labels: Any
    padding: bool = False
    num_tokens: int = 0


@dataclass
class Pipeline:
    """Run the micro batches of a step through the stages of all ranks.

    If ``spans`` is a list (``None`` costs nothing), every forward and backward of this rank's stages is recorded there.
    """

    stages: tuple[RunStage, ...]
    plan: Plan
    group: dist.ProcessGroup
    device: torch.device
    tied: tuple[tuple[str, str], ...] = ()
    spans: list[StageSpan] | None = None
    _schedules: dict[int, Any] = field(default_factory=dict)

    def train(self, micros: Sequence[Any], loss_fn: LossFunction, weight: Callable[[Any], float]) -> torch.Tensor:
        """Run forward and backward of a step's micro batches.

        Reduce gradients over the data-parallel ranks.

        ``loss_fn(outputs, labels)`` is a summed loss, 0-d; it is multiplied by ``weight(micro)`` for backward. Returns
        the sum of the unweighted losses of micro batches that are not padding: on the last stage, zero elsewhere.
        """
        number = padded_count(self.plan, len(micros))
        fill = _Sample(micros[-1].inputs, micros[-1].labels, padding=True)
        work = self._begin([*micros, *[fill] * (number - len(micros))], loss_fn, weight, has_backward=True)
        schedule, nothing = self._schedule(number), [None] * number
        _TORCH_LOG.disabled = True  # it logs a table of the full schedule for an error in the user's code
        try:
            schedule._step_microbatches([()] * number, [{} for _ in nothing], nothing, return_outputs=False)
        except BaseException:
            self._schedules.clear()  # an interrupted schedule cannot resume
            for stage in self.stages:
                stage.clear()
            raise
        finally:
            _TORCH_LOG.disabled = False
        for stage in self.stages:
            stage.end()
        return work.loss_sum

    def evaluate(self, inputs: Sequence[Any], labels: Sequence[Any], loss_fn: LossFunction) -> torch.Tensor:
        """Run forward only, without gradients: the summed loss on the last stage, zero elsewhere."""
        samples = [_Sample(*pair) for pair in zip(inputs, labels, strict=True)]
        with torch.no_grad():
            work = self._begin(samples, loss_fn, None, has_backward=False)
            here = {stage.stage_index: stage for stage in self.stages}
            sent: list[tuple[dist.Work, dist.P2POp]] = []
            for index, stage in sorted(here.items()):
                for micro in range(len(samples)):
                    for op in stage.get_fwd_recv_ops(micro):
                        _start(op).wait()
                    found = stage.forward_one_chunk(micro)
                    if index + 1 in here:
                        here[index + 1].set_local_fwd_input(found, micro)
                    sent += [(_start(op), op) for op in stage.get_fwd_send_ops(micro)]
            for started, _ in sent:
                started.wait()
            for stage in self.stages:
                stage.end()
        return work.loss_sum

    def finish_gradients(self) -> None:
        """Sum the gradients of parameters that several stages use (a tied embedding).

        Collective over the stages.
        """
        first, last = (
            self.stages[0].stage_index_to_group_rank[0],
            max(self.stages[0].stage_index_to_group_rank.items())[1],
        )
        rank = dist.get_rank(self.group)
        if first == last or rank not in (first, last):
            return
        for before, after in self.tied:
            stage, name, peer = (self.stages[0], before, last) if rank == first else (self.stages[-1], after, first)
            parameter = _parameter(stage.module, name)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            mine = mine.detach()
            theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
            ops = [
                dist.P2POp(dist.isend, mine.contiguous(), group=self.group, group_peer=peer),
                dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer),
            ]
            with COMM_TIMER.part("pipeline"):
                for started in dist.batch_isend_irecv(ops):
                    started.wait()
            mine.add_(theirs)

    def _begin(
        self, micros: Sequence[Any], loss_fn: LossFunction, weight: Callable[[Any], float] | None, *, has_backward: bool
    ) -> StageWork:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        work = StageWork(micros, loss_fn, weight, total, self.spans)
        for stage in self.stages:
            stage.begin(work, has_backward=has_backward)
        return work

    def _schedule(self, number: int) -> Any:
        """Return torch's schedule for a number of micro batches."""
        if number not in self._schedules:
            options: dict[str, Any] = {"n_microbatches": number, "loss_fn": _as_it_is, "scale_grads": False}
            kind = _SEVERAL.get(self.plan.pipeline_schedule)
            if kind is not None:
                self._schedules[number] = kind(list(self.stages), **options)
            else:  # with fewer micro batches than stages both are the same, and torch's 1F1B refuses
                gpipe = self.plan.pipeline_schedule == "gpipe" or number < len(stage_ranks(self.plan))
                single = ScheduleGPipe if gpipe else Schedule1F1B
                self._schedules[number] = single(self.stages[0], **options)
        return self._schedules[number]


def make_pipeline(stages: Stages, plan: Plan, meshes: Meshes, device: torch.device) -> Pipeline:
    """Build the schedule that ``plan`` names, over ``stages``. Collective."""
    assert meshes.pp is not None
    group = meshes.pp.get_group()
    control = None if "gloo" in str(dist.get_backend_config()) else dist.new_group(backend="gloo")
    ranks = stage_ranks(plan)
    keeps = plan.parsed.base == "zero2" or plan.pipeline_schedule in _ZERO_BUBBLE
    made = []
    for part, receive, index in zip(stages.parts, stages.receives, stages.indices, strict=True):
        stage = RunStage(part, receive, index, stages.number, device, group, control, keeps_weights=keeps)
        stage.stage_index_to_group_rank = dict(enumerate(ranks))
        if plan.pipeline_schedule in _ZERO_BUBBLE:
            stage.keep_gathered()
        made.append(stage)
    return Pipeline(tuple(made), plan, group, device, stages.tied)


def _start(op: dist.P2POp) -> dist.Work:
    peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
    started: dist.Work = op.op(op.tensor, group=op.group, **peer)
    return started


def _as_it_is(loss: torch.Tensor, _: Any) -> torch.Tensor:
    return loss


def _parameter(stage: nn.Module, name: str) -> nn.Parameter:
    return next(p for known, p in stage.named_parameters(remove_duplicate=False) if clean_name(known) == name)
