"""Receipt lines on collectives, beside those that the plan expects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from shardwise.measure.collectives import OTHER, Collective
from shardwise.parallel.data_parallel.ddp import Replicated
from shardwise.plan.traffic import shares_memory
from shardwise.receipts.expected import Traffic, expected_traffic
from shardwise.receipts.expected_collectives import model_parallel_traffic
from shardwise.receipts.expected_part import names_axes, part_of, run_micros, used_spec
from shardwise.receipts.lines.fp8_lines import gathered_in_fp8
from shardwise.receipts.lines.optimizer_lines import with_optimizer_traffic
from shardwise.receipts.receipt import Line
from shardwise.receipts.recorder import StepRecorder
from shardwise.train.session import Session
from shardwise.train.step import Step
from shardwise.units import bytes_text, counted

_OWN_AXES = ("tp", "cp", "pp", "ep")


def traffic_lines(session: Session, step: Step, recorder: StepRecorder) -> Iterator[Line]:
    """Yield a line per expected or observed collective, and per axis if the model is split."""
    stepped, reduced = used_spec(session), part_of(session)  # parameters without a gradient are reduced as zeros
    if names_axes(session.plan):
        sent = model_parallel_traffic(session, reduced, run_micros(session, step), recorder)
        found = _model_parallel_totals(session, recorder.recorder.collectives)
    else:
        calls = recorder.forwards.of_units(reduced.blocks)
        sent = expected_traffic(reduced, session.plan, len(step.micros), calls=calls, in_fp8=gathered_in_fp8(session))
        found = recorder.recorder.totals()
    expected = with_optimizer_traffic(session, stepped, sent)
    for name in sorted({*expected, *found}):
        line = _line(name, expected.get(name), *found.get(name, (0, 0)))
        fused = session.plan.async_tp and " over tp " in line.name  # inside of kernels that multiply, too
        yield line.model_copy(update={"ok": None}) if fused else line
    outer, ranks = session.applied.outer, session.ranks
    alone = isinstance(outer, Replicated) and outer.memory is None and not outer.sparse
    if alone and shares_memory(session.plan, ranks.local_world_size):
        yield Line(name="between ranks", planned="shared memory", found="gloo: it cannot be shared here", ok=None)


def _line(name: str, expected: Traffic | None, calls: int, size: int) -> Line:
    found = f"{counted(calls, 'call')}, {bytes_text(size)}"
    if expected is None:
        return Line(name=f"{name} per step", planned="none", found=found, ok=False)
    parts, ok = [], True
    if expected.calls is not None:
        least, most = expected.calls
        parts.append(("" if least == most else f"{least:,} to ") + counted(most, "call"))
        ok = least <= calls <= most
    if expected.num_bytes is not None:
        parts.append(range_text(expected.num_bytes, bytes_text))
        ok = ok and expected.num_bytes[0] <= size <= expected.num_bytes[1]
    planned = ", ".join(parts)
    return Line(name=f"{name} per step", planned=planned, found=found, ok=ok)


def range_text(ends: tuple[int, int], text: Callable[[int], str]) -> str:
    """Format one number, or a range from least to most."""
    return text(ends[0]) if ends[0] == ends[1] else f"{text(ends[0])} to {text(ends[1])}"


def _model_parallel_totals(session: Session, collectives: list[Collective]) -> dict[str, tuple[int, int]]:
    """Sum calls and bytes by collective and axis."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for item in collectives:
        if is_planned(session, item):
            name = f"{item.name} over {item.axis}"
            calls, size = found[name]
            found[name] = (calls + 1, size + item.num_bytes)
    return dict(found)


def is_planned(session: Session, item: Collective) -> bool:
    """Return whether a collective belongs to the plan, not to the session or a user's forward.

    A pipeline runs forwards and backwards in turn, as one phase; DDP's book-keeping is in forward.
    """
    if item.phase in ("backward", "optimizer"):
        return True
    if item.phase != "forward" or item.axis == OTHER:
        return False
    return item.axis in _OWN_AXES or item.name == "all_gather" or session.applied.pipeline is not None


def is_reduction(session: Session, item: Collective) -> bool:
    """Return whether a collective reduces gradients over data-parallel ranks."""
    if item.name == "all_gather" or item.axis in _OWN_AXES:
        return False
    return item.phase == "backward" or (item.phase == "forward" and is_planned(session, item))
