"""Fit receipt: predicted bytes against the bytes of live tensors and of the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.distributed.fsdp import FSDPModule

from shardwise.cost.memory.estimate import Estimate
from shardwise.distributed.process_group import gather_ints
from shardwise.measure import state
from shardwise.measure.peaks import PHASES, PeakRecorder, peak_watch
from shardwise.measure.state import Measurement, Peaks, measure_engine, measure_state
from shardwise.receipts.effects import PROBED_STEP, agree
from shardwise.receipts.receipt import Line, Receipt
from shardwise.train.session import Session
from shardwise.train.step import Step
from shardwise.units import bytes_text

EXACT = ("parameters", "gradients", "optimizer")
PEAK_STEP = PROBED_STEP + 1  # the second step moves DDP's buckets, and other receipts inspect it
_NEVER = "not measured: fewer than three steps"
_UNSEEN = "not measured: another profiler is on"
_MIXED = "not measured: micro batches of a pipeline come and go in turn"


class FitRecorder:
    """Observer that compares bytes at rest after the second step, and the peaks of the third.

    Parameters, gradients and optimizer state must match the prediction, to the byte, on the rank that has most.
    The peaks of forward, backward and optimizer are reported, with their ratio to the prediction, and the bytes saved
    for backward when it begins, beside the predicted maximum of activations and logits.
    Until a third step is done, or if the run ends before it, the receipt is without them.
    """

    def __init__(self, estimate: Estimate, on_receipt: Callable[[Receipt], None] | None = None) -> None:
        self.receipt: Receipt | None = None
        self.measurement: Measurement | None = None
        self.peaks: Peaks | None = None
        self._estimate = estimate
        self._on_receipt = on_receipt
        self._seen = 0
        self._watch: PeakRecorder | None = None
        self._blind = False
        self._final = False
        self._kept: Step | None = None
        self._gradients = 0

    def on_prepared(self, session: Session) -> None:
        """Do nothing."""

    def on_step_start(self, session: Session, step: Step) -> None:
        """Count steps, and record the one whose peaks are compared."""
        self._seen += 1
        if self._seen < PEAK_STEP or self._final or not self._complete(session):
            return
        recorder = peak_watch(session.device)
        if recorder.start(session):
            self._watch = recorder
        self._blind = any(row[0] for row in gather_ints([int(self._watch is None)], session.ranks))

    def on_gradients(self, session: Session, step: Step) -> None:
        """Measure an engine's gradients, which are gone at the end of the step."""
        engine = session.applied.engine
        if engine is not None and not self._final:
            self._gradients = state.local_bytes(engine.local_tensors().gradients)

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Use a later step instead."""
        if self._watch is not None:
            self._watch.stop(session, step)
            self._watch = None

    def on_step_end(self, session: Session, step: Step) -> None:
        """Measure, and report."""
        recorder, self._watch = self._watch, None
        peaks = recorder.stop(session, step) if recorder is not None else None
        if self._final or self._seen < PROBED_STEP:
            return
        if peaks is not None and not self._blind:
            self.peaks = fullest_peaks(peaks, session)
        self._final = self.peaks is not None or self._blind
        self._kept = None if self._final else step  # the next step would otherwise free it unseen
        if self.receipt is not None and not self._final:
            return
        engine = session.applied.engine
        if engine is None:
            measured = measure_state(session.module, session.optimizer)
        else:
            measured = measure_engine(engine, self._gradients)
        self.measurement = measured.model_copy(update={"peaks": self.peaks})
        local = [getattr(self.measurement, name) for name in EXACT]
        most = [max(column) for column in zip(*gather_ints(local, session.ranks), strict=True)]
        fullest = self.measurement.model_copy(update=dict(zip(EXACT, most, strict=True)))
        stepped = set() if session.in_backward is None else session.in_backward.stepped
        trained = (p for p in session.module.parameters() if p.requires_grad)
        unused = any(p.grad is None and id(p) not in stepped for p in trained)
        lines = [
            *self._exact_lines(fullest, lenient=session.scaler is not None or unused, engine=engine is not None),
            *self._told_lines(session),
            *self._device_lines(fullest),
        ]
        self.receipt = agree(session, "fit (bytes on the fullest rank)", lines)
        if self._on_receipt is not None and session.ranks.is_main:
            self._on_receipt(self.receipt)
        self.receipt.require()

    def _complete(self, session: Session) -> bool:
        """Return False if fp16's scaler has skipped every step and no optimizer state exists yet."""
        if session.scaler is None:
            return True
        mine = any(True for _ in state.optimizer_tensors(session.optimizer))
        return any(row[0] for row in gather_ints([int(mine)], session.ranks))

    def _exact_lines(self, found: Measurement, *, lenient: bool, engine: bool) -> Iterator[Line]:
        """Compare to the byte under PyTorch; an engine's alignment and buffers are only reported."""
        for name in EXACT:
            planned, seen = getattr(self._estimate, name), getattr(found, name)
            ok: bool | None = planned == seen
            if planned is None or engine or (lenient and name != "parameters" and seen < planned):
                ok = None  # unknown optimizer, fp16's scaler has skipped every step, or unused parameters
            ratio = f" ({seen / planned:.2f} × plan)" if engine and planned else ""
            yield Line(name=name, planned=bytes_text(planned), found=f"{bytes_text(seen)}{ratio}", ok=ok)

    def _told_lines(self, session: Session) -> Iterator[Line]:
        estimate, peaks = self._estimate, self.peaks
        allocated, reserved = (peaks.allocated, peaks.reserved) if peaks is not None else ({}, {})
        pipelined = session.applied.pipeline is not None
        narrow = session.plan.precision != "fp32" and not any(
            isinstance(m, FSDPModule) for m in session.module.modules()
        )
        parts = [estimate.activations, estimate.logits, *([estimate.buffers] if narrow else [])]
        planned = None if None in parts else sum(part or 0 for part in parts)
        name = "activations, logits, narrow weights" if narrow else "activations, logits"
        bound = "not predicted" if planned is None else f"≤ {bytes_text(planned)}"  # each at its own peak
        saved = self._unjudged(name, None, peaks.saved if peaks is not None else None)
        changes = {"planned": bound, "found": _MIXED} if pipelined and peaks is not None else {"planned": bound}
        yield saved.model_copy(update=changes)
        brief = estimate.temporaries + (0 if narrow else estimate.buffers)
        label = "temporaries" if narrow else "buffers, temporaries"
        yield Line(name=label, planned=bytes_text(brief), found="part of the peaks", ok=None)
        by_phase = {str(phase.name): phase.allocated for phase in estimate.phases}
        early = session.plan.optimizer_in_backward
        for phase in (phase for phase in PHASES if not (early and phase == "optimizer")):
            if not pipelined or phase == "optimizer":
                yield self._unjudged(f"peak in {phase}", by_phase.get(phase), allocated.get(phase))
            elif phase == "backward":
                both = [by_phase[name] for name in ("forward", "backward") if name in by_phase]
                yield self._unjudged("peak in forward and backward", max(both, default=None), allocated.get(phase))
        full = estimate.device_bytes if estimate.allocated is None else estimate.allocated
        yield self._unjudged("peak allocated", full, max(allocated.values(), default=None))
        if session.device.type == "cuda":
            yield self._unjudged("peak reserved", estimate.reserved, max(reserved.values(), default=None))

    def _unjudged(self, name: str, planned: int | None, found: int | None) -> Line:
        text = bytes_text(found)
        if found is None:
            text = _UNSEEN if self._blind else _NEVER
        elif planned:
            text += f" ({found / planned:.2f} × plan)"
        message = "not predicted" if planned is None else bytes_text(planned)
        return Line(name=name, planned=message, found=text, ok=None)

    def _device_lines(self, found: Measurement) -> Iterator[Line]:
        if self.peaks is not None and self.peaks.device is not None:
            yield self._unjudged("taken of the device", self._estimate.device, self.peaks.device)
        yield Line(
            name="process peak (with libraries)", planned="not predicted", found=bytes_text(found.process_peak), ok=None
        )


def fullest_peaks(peaks: Peaks, session: Session) -> Peaks:
    """Return each figure's maximum over ranks; collective."""
    names = [*(f"allocated {phase}" for phase in PHASES), *(f"reserved {phase}" for phase in PHASES)]
    mine = [
        peaks.start,
        -1 if peaks.saved is None else peaks.saved,
        peaks.gathered,
        -1 if peaks.device is None else peaks.device,
        *(getattr(peaks, kind).get(phase, -1) for kind, _, phase in (name.partition(" ") for name in names)),
    ]
    start, saved, gathered, device, *rest = (
        max(column) for column in zip(*gather_ints(mine, session.ranks), strict=True)
    )
    found = dict(zip(names, rest, strict=True))
    return Peaks(
        start=start,
        saved=None if saved < 0 else saved,
        gathered=gathered,
        device=None if device < 0 else device,
        allocated={phase: found[f"allocated {phase}"] for phase in PHASES if found[f"allocated {phase}"] >= 0},
        reserved={phase: found[f"reserved {phase}"] for phase in PHASES if found[f"reserved {phase}"] >= 0},
    )
