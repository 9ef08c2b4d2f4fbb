"""Effects receipt: observed effects of the plan, compared with it after the second step.

`EffectsRecorder` observes one step of a session on every rank. Observations come from live tensors and from PyTorch's
dispatcher; expectations come from the plan and the model's structure. A rank's finding is sent to all ranks, so
that all of them continue or all of them stop.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from torch import nn

from shardwise.cost.memory.estimate_memory import local_elements
from shardwise.distributed.process_group import gather_ints, gather_text
from shardwise.measure import state
from shardwise.model.facts import ModelSpec
from shardwise.parallel.apply import parameter_names
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.parallel.ownership import ownership_of
from shardwise.plan.plan import Plan
from shardwise.plan.stored_types import gradient_dtype, reduced_dtype, stored_dtype, stores_low
from shardwise.receipts.expected_experts import expert_names, expert_shape
from shardwise.receipts.expected_part import shard_dim_of, shard_rank, used_spec
from shardwise.receipts.lines.deepspeed_lines import SeenGradients, engine_lines
from shardwise.receipts.lines.expert_lines import ExpertLines
from shardwise.receipts.lines.fp8_lines import fp8_lines
from shardwise.receipts.lines.lora_lines import adapter_lines
from shardwise.receipts.lines.optimizer_lines import state_lines, stepping_lines
from shardwise.receipts.lines.option_lines import compute_line, option_lines
from shardwise.receipts.lines.rounding_lines import RoundingLines
from shardwise.receipts.lines.sample_lines import digest, sample_lines
from shardwise.receipts.lines.structure_lines import offload_lines, replica_lines, structure_lines, tied_lines
from shardwise.receipts.lines.traffic_lines import is_reduction, traffic_lines
from shardwise.receipts.receipt import Line, Receipt
from shardwise.receipts.recorder import StepRecorder
from shardwise.train.optimizer import workload_of
from shardwise.train.session import Session
from shardwise.train.step import Step

PROBED_STEP = 2  # counted from the start of this process: the first step still allocates
_COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}
_FACTORS = ("bfloat16", "float16", "float32", "float64")
_AS_REAL = {"complex64": "float32", "complex128": "float64"}  # dtypes in which DDP sends them


class LineSource(Protocol):
    """Observer of the recorded step that has lines of its own."""

    def start(self, session: Session, step: Step) -> None:
        """Begin to observe, before the first forward."""

    def stop(self) -> None:
        """Stop; the records stay."""

    def lines(self, session: Session, step: Step) -> Iterator[Line]:
        """Yield the lines, after the update."""


class EffectsRecorder:
    """Observer of a session's second step that creates the effects receipt.

    Args:
        on_receipt: called on rank 0 with the receipt, before a false line raises.
        strict: raise `ReceiptError` on all ranks if a line is false on any.
        told: lines about the run that cannot be checked here.

    ``more`` are other sources of lines.
    """

    def __init__(
        self, on_receipt: Callable[[Receipt], None] | None = None, *, strict: bool = True, notes: tuple[Line, ...] = ()
    ) -> None:
        self.notes = notes
        self.more: list[LineSource] = []
        self.receipt: Receipt | None = None
        self._on_receipt = on_receipt
        self._strict = strict
        self._seen = 0
        self._watch: StepRecorder | None = None
        self._before: set[str] = set()
        self._gradients: SeenGradients | None = None
        self._scale = 0.0
        self._experts: ExpertLines | None = None

    def on_prepared(self, session: Session) -> None:
        """Add the lines of layers of experts, and of weights in bf16."""
        if session.routing.layers and session.applied.engine is None:
            self._experts = ExpertLines(session.routing)
            self.more.append(self._experts)
        if stores_low(session.plan) and session.plan.weights == "compute":
            self.more.append(RoundingLines())

    def on_step_start(self, session: Session, step: Step) -> None:
        """Start recording in the observed step; if fp16's scaler skips it, observe the next one."""
        self._stop_recording()
        self._seen += 1
        if self._seen < PROBED_STEP:
            self._before = {digest(micro) for micro in step.micros}
        if self.receipt is not None or self._seen < PROBED_STEP:
            return
        reshard(session.applied.outer)  # an evaluation may have left parameters gathered
        self._scale = 0.0 if session.scaler is None else session.scaler.get_scale()
        for source in self.more:
            source.start(session, step)
        self._watch = StepRecorder(session, step)

    def on_gradients(self, session: Session, step: Step) -> None:
        """Record an engine's gradients, which are gone at the end of the step."""
        if self._watch is not None and session.applied.engine is not None:
            self._gradients = SeenGradients.of(session.applied.engine)
        if self._watch is not None and self._experts is not None:
            self._experts.gradients(session)

    def on_step_end(self, session: Session, step: Step) -> None:
        """Stop recording, compare, and report."""
        if self._watch is None:
            return
        recorder = self._watch
        self._stop_recording()
        skipped = _skipped(session, self._scale)
        if all(skipped):
            return
        if session.applied.engine is not None:
            own = [*engine_lines(session, step, recorder, self._gradients)]
        else:
            own = effects_lines(session, step, recorder)
        lines = [*own, *sample_lines(session, step.micros, self._before)]
        lines += tied_lines(session)
        lines += [*replica_lines(session), *self.notes]
        lines += [line for source in self.more for line in source.lines(session, step)]
        if any(skipped):
            found = f"rank {', '.join(str(rank) for rank, skips in enumerate(skipped) if skips)} alone"
            lines.append(Line(name="an overflow skips the step on", planned="every rank", found=found, ok=False))
        self.receipt = agree(session, "effects", lines)
        if self._on_receipt is not None and session.ranks.is_main:
            self._on_receipt(self.receipt)
        if self._strict:
            self.receipt.require()

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Stop recording; observe a later step instead."""
        self._stop_recording()

    def _stop_recording(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            for source in self.more:
                source.stop()
            self._seen -= 1
        self._watch = None


def _skipped(session: Session, before: float) -> list[bool]:
    """Return per rank whether fp16's scaler has just skipped a step, seen by a smaller scale."""
    if session.scaler is None:
        return [False]
    return [bool(row[0]) for row in gather_ints([int(session.scaler.get_scale() < before)], session.ranks)]


def agree(session: Session, title: str, lines: list[Line]) -> Receipt:
    """Return rank 0's lines; a line that is false on another rank takes that rank's finding.

    Pipeline stages may have lines that rank 0 does not have.
    """
    texts = gather_text(json.dumps([line.model_dump() for line in lines]), session.ranks)
    numbers, firsts = Counter(texts), {text: rank for rank, text in reversed([*enumerate(texts)])}
    # most ranks have found the same: each finding counts once, under the first rank that has it
    everyone = [
        (firsts[text], count, {row["name"]: row for row in json.loads(text)}) for text, count in numbers.items()
    ]
    merged = []
    for name in dict.fromkeys(name for _, _, rows in everyone for name in rows):
        versions = [(rank, rows[name], count) for rank, count, rows in everyone if name in rows]
        wrong = [(rank, version, count) for rank, version, count in versions if version["ok"] is False]
        first, chosen, _ = versions[0]
        if (wrong or first) and len(texts) > 1:
            rank, version, _ = (wrong or versions)[0]
            apart = sum(count for _, _, count in wrong)
            others = f" and {apart - 1} more" if apart > 1 else ""
            chosen = {**version, "found": f"{version['found']} (rank {rank}{others})"}
        merged.append(Line(**chosen))
    return Receipt(title=title, lines=tuple(merged))


def effects_lines(session: Session, step: Step, recorder: StepRecorder) -> list[Line]:
    """Return every line that this rank can check alone."""
    return [
        *_batch_lines(session, step),
        *_dtype_lines(session, recorder),
        *_share_lines(session),
        *traffic_lines(session, step, recorder),
        *structure_lines(session, step, recorder.forwards),
        *option_lines(session, step, recorder),
        *offload_lines(session),
        *stepping_lines(session, recorder.optimizer),
        *adapter_lines(session),
        *fp8_lines(session, recorder),
    ]


def _same(name: str, planned: str, found: str) -> Line:
    return Line(name=name, planned=planned, found=found, ok=planned == found)


def _batch_lines(session: Session, step: Step) -> Iterator[Line]:
    planned, found = session.plan.grad_accum, len(step.micros)
    ok = None if found < planned else found == planned  # fewer only in the last, partial window of the data
    yield Line(name="micro batches per step", planned=str(planned), found=str(found), ok=ok)


def _dtype_lines(session: Session, recorder: StepRecorder) -> Iterator[Line]:
    plan, spec, module, calls = session.plan, used_spec(session), session.module, recorder.recorder
    own = ", ".join(sorted({stored_dtype(plan, p.dtype) for p in spec.parameters}))
    trained = ", ".join(sorted({gradient_dtype(plan, p.dtype) for p in spec.parameters if p.trainable}))
    yield _same("parameter dtype", own, state.dtypes(_planned(session)))
    if calls.matmul_dtypes:
        lower = _COMPUTE.get(plan.precision)
        narrow = {lower} if lower else _computed(plan, spec, calls.matmul_dtypes)
        casts = plan.precision == "fp32" or plan.parsed.shards_parameters or stores_low(plan)
        yield compute_line(narrow, calls, casts_weights=casts)
    early, late = recorder.optimizer.gradient_dtypes, state.dtypes(state.gradients(module))
    yield _same("gradient dtype", trained, ", ".join(sorted(early)) if plan.optimizer_in_backward else late)
    reducing = {item.dtype for item in calls.collectives if is_reduction(session, item)}
    if plan.dims.dp * plan.dims.cp > 1:
        sent = {_AS_REAL.get(p.dtype, reduced_dtype(plan, p.dtype)) for p in spec.parameters if p.trainable}
        sent |= {"int32"} if plan.marks_used_parameters else set()
        yield _same("reduction dtype", ", ".join(sorted(sent)), ", ".join(sorted(reducing)) or "none")


def _computed(plan: Plan, spec: ModelSpec, found: Collection[str]) -> set[str]:
    """Return product dtypes without a low-precision plan: the weights', fp32 if quantized.

    Integers, bytes and 8-bit floats are frozen and not factors; a complex parameter may be a factor or not.
    """
    kinds = {p.dtype for p in spec.parameters if p.dtype in _FACTORS or p.dtype in found}
    return kinds | {"float32"} if plan.parsed.adapter == "qlora" else kinds


def _share_lines(session: Session) -> Iterator[Line]:
    plan, spec, module = session.plan, used_spec(session), session.module
    rank, tp_rank, spread = shard_rank(session), session.place.tp, expert_names(session)
    local = {
        p.name: math.prod(expert_shape(session, p))
        if p.name in spread
        else local_elements(p, plan, rank, shard_dim=shard_dim_of(session, p.name), tp_rank=tp_rank)
        for p in spec.parameters
    }
    trained = [p for p in spec.parameters if p.trainable]
    full = spec.num_parameters
    yield _share("parameters held", sum(local.values()), state.local_elements(_planned(session)), full)
    expected = 0 if plan.optimizer_in_backward else sum(local[p.name] for p in trained)
    found = state.local_elements(state.gradients(module))
    yield _share("gradients held", expected, found, spec.num_trainable)
    yield from state_lines(session, workload_of(session.optimizer, canonical_names(session)))


def _planned(session: Session) -> list[nn.Parameter]:
    """Return the parameters that `prepare` has seen; others may have been added since."""
    known = {name for p in session.spec.parameters for name in (p.name, *p.aliases)}
    names = canonical_names(session)
    return [p for p in session.module.parameters() if names[id(p)] in known]


def canonical_names(session: Session) -> dict[int, str]:
    """Map each parameter's id to its name in the full model; tied ones to their first name."""
    ownership, names = ownership_of(session.module), parameter_names(session.module)
    return names if ownership is None else {key: ownership.canonical(name) for key, name in names.items()}


def _share(name: str, planned: int, found: int, full: int) -> Line:
    def text(elements: int) -> str:
        return f"{elements} of {full} ({elements / full:.1%})" if full else str(elements)

    return Line(name=name, planned=text(planned), found=text(found), ok=planned == found)
