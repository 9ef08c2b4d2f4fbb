"""Lines on the options of a plan that show in nothing else: each turns false when its option did not take effect."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.parallel.context import first_sequence
from shardwise.train.session import Session, Step
from shardwise.verify.receipt import Line
from shardwise.verify.watch import StepWatch


def option_lines(session: Session, step: Step, watch: StepWatch) -> Iterator[Line]:
    """What this rank can judge alone."""
    if session.plan.dims.tp > 1:
        yield from _tensor_lines(session, step, watch)


def _same(name: str, planned: str, found: str) -> Line:
    return Line(name=name, planned=planned, found=found, ok=planned == found)


def _tensor_lines(session: Session, step: Step, watch: StepWatch) -> Iterator[Line]:
    plan, decision = session.plan, session.applied.decision
    layout = None if decision is None else decision.layout
    if layout is None:
        return
    lengths = {tokens.shape[1] for micro in step.micros if (tokens := first_sequence(micro.inputs)) is not None}
    seen = {length for length, _ in watch.hidden}
    whole = {length for length in seen if length in lengths}
    inner = [name for name in session.spec.blocks[1:] if name in {n for n in session.spec.blocks}]
    if inner and seen:
        cut = {length // plan.dims.tp for length in lengths}
        found = "on" if seen & cut - lengths or (seen <= cut and not whole) else "off"
        yield _same("sequence parallel", "on" if plan.sequence_parallel else "off", found)
    if watch.logits and layout.vocab:
        widths = ", ".join(str(width) for width in sorted(watch.logits))
        found = "off" if layout.vocab in watch.logits else "on"
        planned = "on" if plan.loss_parallel else "off"
        yield Line(
            name="loss parallel",
            planned=planned,
            found=f"{found} (logits of {widths} of {layout.vocab} on a rank)",
            ok=planned == found,
        )
