"""The fit receipt: bytes predicted by the plan against bytes that live tensors and the allocator really take."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.cost.estimate import Estimate
from shardwise.measure.state import Measurement, measure_state
from shardwise.parallel.group import gather_ints
from shardwise.train.session import Session, Step
from shardwise.units import bytes_text
from shardwise.verify.effects import PROBED_STEP, agree
from shardwise.verify.receipt import Line, Receipt

EXACT = ("parameters", "gradients", "optimizer")
TOLD = ("activations", "logits", "buffers")


class FitProbe:
    """Observes the memory at the end of the second step, when the state is complete.

    Parameters, gradients and optimizer state must be what was predicted, to the byte, on the rank that holds most.
    Peaks are compared where the device has an allocator that counts, and told otherwise.
    """

    def __init__(self, estimate: Estimate, on_receipt: Callable[[Receipt], None] | None = None) -> None:
        self.receipt: Receipt | None = None
        self.measurement: Measurement | None = None
        self._estimate = estimate
        self._on_receipt = on_receipt
        self._seen = 0

    def on_prepared(self, session: Session) -> None:
        """Nothing yet."""

    def on_step_start(self, session: Session, step: Step) -> None:
        """Count steps."""
        self._seen += 1

    def on_gradients(self, session: Session, step: Step) -> None:
        """Nothing: the optimizer's state is not there before the first step has ended."""

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Nothing."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """Measure once, and tell."""
        if self.receipt is not None or self._seen < PROBED_STEP:
            return
        self.measurement = measure_state(session.module, session.optimizer, session.device)
        held = [getattr(self.measurement, name) for name in EXACT]
        most = [max(column) for column in zip(*gather_ints(held, session.ranks), strict=True)]
        fullest = self.measurement.model_copy(update=dict(zip(EXACT, most, strict=True)))
        unused = any(p.requires_grad and p.grad is None for p in session.module.parameters())
        lines = list(self._lines(fullest, told=session.scaler is not None or unused))
        self.receipt = agree(session, "fit (bytes on the fullest rank)", lines)
        if self._on_receipt is not None and session.ranks.is_main:
            self._on_receipt(self.receipt)
        self.receipt.require()

    def _lines(self, found: Measurement, *, told: bool) -> Iterator[Line]:
        for name in EXACT:
            planned, seen = getattr(self._estimate, name), getattr(found, name)
            ok: bool | None = planned == seen
            if planned is None or (told and name != "parameters" and seen < planned):
                ok = None  # an unknown optimizer, fp16's scaler has skipped every step, or parameters are unused
            yield Line(name=name, planned=bytes_text(planned), found=bytes_text(seen), ok=ok)
        for name in TOLD:
            planned, seen = getattr(self._estimate, name), getattr(found, name)
            text = "not measured here" if seen is None else bytes_text(seen)
            yield Line(name=name, planned=bytes_text(planned), found=text, ok=None)
        if found.device_peak is not None:
            planned = self._estimate.device_bytes
            text = f"{bytes_text(found.device_peak)} ({found.device_peak / max(planned, 1):.2f} of planned)"
            yield Line(name="device peak", planned=bytes_text(planned), found=text, ok=None)
        yield Line(
            name="process peak (with libraries)", planned="not predicted", found=bytes_text(found.process_peak), ok=None
        )
