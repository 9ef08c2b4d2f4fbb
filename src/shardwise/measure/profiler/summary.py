"""Summarize a profiler's trace: busiest operations, gaps, and bounds of the work. No torch.

On a GPU the device is analysed: it is busy while a kernel or a copy runs on any of its streams, and idle otherwise. On
a CPU the thread that runs the steps is analysed: it is busy while an operator runs, and else in Python or waiting.
Times are those of a traced step, which is slower than others; shares are less affected than seconds.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from shardwise.measure.profiler.events import (
    DEVICE_WORK,
    MARK,
    KernelGroup,
    Kind,
    Span,
    TraceEvent,
    covered,
    holes,
    kind_of,
    outermost,
    overlap,
    product_size,
    self_seconds,
    union,
)

MOST_OPERATIONS, MOST_GAPS = 10, 3
LEAST_GAP_S = 5e-6
"""Longest gap that is normal between two kernels or operators."""
SHORT_KERNEL_S = 10e-6
"""Time that a host needs to launch a kernel from eager PyTorch, roughly (cost/time/kernels.py)."""
_ENGINE = "autograd::engine::evaluate_function: "
_SYNCHRONISES = ("Synchronize", "aten::item", "aten::_local_scalar_dense", "aten::nonzero")
_MOVES: tuple[Kind, ...] = ("memory", "optimizer")
_COMPUTES: tuple[Kind, ...] = ("product", "attention", "convolution")


class Operation(BaseModel):
    """Work of one name. ``share`` is of the busy seconds.

    ``flops_per_s`` of its products, if known.

    ``operator`` is the one that launched most of a kernel's time. ``intensity`` is FLOPs per byte of operands.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    kind: Kind
    calls: int
    self_s: float
    share: float
    operator: str = ""
    flops_per_s: float | None = None
    intensity: float | None = None


class Gap(BaseModel):
    """Idle span: the work around it, its phase, and the host's activity ("" is unknown)."""

    model_config = ConfigDict(frozen=True)

    start_s: float
    seconds: float
    before: str
    after: str
    phase: str
    meanwhile: str


class Overhead(BaseModel):
    """Cost of the trace: a step without and with it, start, and writing. ``None``: not measured."""

    model_config = ConfigDict(frozen=True)

    plain_step_s: float | None = None
    traced_step_s: float | None = None
    start_s: float | None = None
    write_s: float | None = None


class TraceSummary(BaseModel):
    """Trace of ``steps`` steps on one rank.

    ``window_s`` is from its first to its last moment, ``busy_s`` the part in which
    something ran, ``waiting_s`` the idle part in which a collective ran elsewhere (CPU) or the busy part in which only
    communication ran (GPU). ``kinds`` are shares of the work's own seconds. ``mean_gap_s`` is over ``gaps`` gaps.
    """

    model_config = ConfigDict(frozen=True)

    device: str
    rank: int = 0
    first_step: int = 0
    steps: int = 1
    file: str = ""
    window_s: float
    busy_s: float
    waiting_s: float
    gaps: int
    gap_s: float
    longest: tuple[Gap, ...]
    operations: tuple[Operation, ...]
    kinds: dict[str, float]
    phases_s: dict[str, float]
    launches: int
    median_launch_s: float | None
    overhead: Overhead = Overhead()

    @property
    def idle_s(self) -> float:
        """Seconds in which nothing ran."""
        return self.window_s - self.busy_s


def summarise(events: Sequence[TraceEvent]) -> TraceSummary:
    """Summarize the events of one rank's trace, in the order of `read_events`.

    Raises:
        ValueError: there are no events.
    """
    device = [event for event in events if event.category in DEVICE_WORK]
    operators = [event for event in events if event.category == "cpu_op"]
    if not operators and not device:
        raise ValueError("the trace has no operators and no kernels")
    view = _device_view(events, device, operators) if device else _host_view(events, operators)
    spans = union((event.start_s, event.end_s) for event in view.running)
    gaps = [span for span in holes(spans, view.window) if span[1] - span[0] >= LEAST_GAP_S]
    own = sum(work.self_s for work in view.work)
    kinds: dict[str, float] = defaultdict(float)
    for work in view.work:
        kinds[work.kind] += work.self_s / own if own else 0.0
    lengths = [event.seconds for event in device if event.category == "kernel"]
    longest = sorted(gaps, key=lambda span: span[0] - span[1])[:MOST_GAPS]
    ends = sorted(view.running, key=lambda event: event.end_s)
    return TraceSummary(
        device="cuda" if device else "cpu",
        window_s=view.window[1] - view.window[0],
        busy_s=covered(spans),
        waiting_s=view.waiting_s(gaps),
        gaps=len(gaps),
        gap_s=covered(gaps),
        longest=tuple(_gap(span, view, ends) for span in longest),
        operations=tuple(_operation(work, own) for work in _busiest(view.work)),
        kinds=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        phases_s=_phases(view.marks),
        launches=len(device) or len(operators),
        median_launch_s=statistics.median(lengths) if lengths else None,
    )


@dataclass
class _View:
    """View of a trace: ``running`` is busy time, ``host`` the host's work, ``marks`` the phases."""

    window: Span
    running: list[TraceEvent]
    work: list[KernelGroup]
    host: list[TraceEvent]
    marks: list[TraceEvent]
    communication: list[Span]
    on_device: bool

    def waiting_s(self, gaps: Sequence[Span]) -> float:
        """Return waiting seconds; see `TraceSummary`."""
        if not self.on_device:
            return sum(covered(_inside(self.communication, gap)) for gap in gaps)
        others = union((e.start_s, e.end_s) for e in self.running if kind_of(e.name) != "communication")
        full = union((e.start_s, e.end_s) for e in self.running)
        return covered(full) - covered(others)


def _inside(spans: Sequence[Span], window: Span) -> list[Span]:
    return [(max(a, window[0]), min(b, window[1])) for a, b in spans if a < window[1] and b > window[0]]


def _marks(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    return [event for event in events if event.category == "user_annotation" and event.name.startswith(MARK)]


def _window(events: Sequence[TraceEvent], marks: Sequence[TraceEvent]) -> Span:
    inner = marks or events
    return min(event.start_s for event in inner), max(event.end_s for event in inner)


def _device_view(events: Sequence[TraceEvent], device: list[TraceEvent], operators: list[TraceEvent]) -> _View:
    marks = _marks(events)
    launched = {event.link: event for event in operators if event.link is not None}
    found: dict[str, KernelGroup] = {}
    counted: set[int] = set()  # an operator may launch several kernels, but is one product
    for event in device:
        operator = launched.get(event.link) if event.link is not None else None
        kind, name = kind_of(event.name), short_name(event.name)
        if kind == "other" and operator is not None:
            kind = kind_of(operator.name)
        work = found.setdefault(name, KernelGroup(name, kind))
        work.calls += 1
        work.self_s += event.seconds
        if operator is not None and event.link is not None:
            work.by[operator.name] = work.by.get(operator.name, 0.0) + event.seconds
            if event.link not in counted and _add_product(work, operator):
                counted.add(event.link)
    start, end = _window(device, marks)
    window = start, max(end, max(event.end_s for event in device))
    host = [event for event in events if event.category in ("cuda_runtime", "cuda_driver", "cpu_op")]
    return _View(window, device, list(found.values()), host, marks, [], True)


def _host_view(events: Sequence[TraceEvent], operators: list[TraceEvent]) -> _View:
    marks = _marks(events)
    counted = Counter(event.thread for event in (marks or operators))
    main = counted.most_common(1)[0][0]
    mine = [event for event in operators if event.thread == main and _computes(event.name)]
    found: dict[str, KernelGroup] = {}
    for event, seconds in zip(mine, self_seconds(mine), strict=True):
        work = found.setdefault(event.name, KernelGroup(event.name, kind_of(event.name)))
        work.calls += 1
        work.self_s += seconds
        _add_product(work, event)
    elsewhere = [e for e in events if e.thread != main and kind_of(e.name) == "communication"]
    labels = [e for e in events if e.category == "user_annotation" and not e.name.startswith(MARK)]
    labels += [event for event in operators if not _computes(event.name)]
    return _View(
        window=_window(mine or operators, marks),
        running=outermost(mine),
        work=list(found.values()),
        host=[*(e for e in labels if e.thread == main), *elsewhere],
        marks=marks,
        communication=union((e.start_s, e.end_s) for e in elsewhere),
        on_device=False,
    )


def _computes(name: str) -> bool:
    """Return whether a CPU operator computes itself; autograd nodes contain operators and waits."""
    return "::" in name and not name.startswith(("autograd::", "torch::autograd::"))


def _add_product(work: KernelGroup, operator: TraceEvent) -> bool:
    size = product_size(operator)
    if size is None or work.kind != "product":
        return False
    work.flops += size[0]
    work.operand_bytes += size[1]
    return True


def _busiest(work: Iterable[KernelGroup]) -> list[KernelGroup]:
    return sorted(work, key=lambda one: -one.self_s)[:MOST_OPERATIONS]


def _operation(work: KernelGroup, own: float) -> Operation:
    by = max(work.by, key=lambda name: work.by[name], default="")
    known = work.flops > 0 and work.self_s > 0
    return Operation(
        name=work.name,
        kind=work.kind,
        calls=work.calls,
        self_s=work.self_s,
        share=work.self_s / own if own else 0.0,
        operator=by,
        flops_per_s=work.flops / work.self_s if known else None,
        intensity=work.flops / work.operand_bytes if known else None,
    )


def _gap(span: Span, view: _View, ends: Sequence[TraceEvent]) -> Gap:
    before = next((e for e in reversed(ends) if e.end_s <= span[0] + 1e-9), None)
    after = next((e for e in view.running if e.start_s >= span[1] - 1e-9), None)
    phase = max(view.marks, key=lambda mark: overlap(mark, span), default=None)
    least = 0.5 * (span[1] - span[0])
    doing = [e for e in view.host if overlap(e, span) >= least]
    inner = min(doing, key=_tells_most, default=None)
    return Gap(
        start_s=span[0] - view.window[0],
        seconds=span[1] - span[0],
        before=_plain(before),
        after=_plain(after),
        phase=phase.name.removeprefix(MARK) if phase is not None and overlap(phase, span) > 0 else "",
        meanwhile=_plain(inner),
    )


def _tells_most(event: TraceEvent) -> tuple[bool, bool, float]:
    """Rank events by information: a collective or a device wait first, else the innermost event."""
    waits = any(word in event.name for word in _SYNCHRONISES)
    return kind_of(event.name) != "communication", not waits, event.seconds


def _plain(event: TraceEvent | None) -> str:
    return "" if event is None else short_name(event.name.removeprefix(_ENGINE))


def _phases(marks: Iterable[TraceEvent]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for mark in marks:
        seconds[mark.name.removeprefix(MARK)] += mark.seconds
    return dict(seconds)


def short_name(name: str) -> str:
    """Shorten a kernel's name (no return type, namespace arguments, templates); truncate others."""
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    if "<" in text:
        text = text[: text.index("<")]
    elif "(" in text:
        text = text[: text.index("(")]
    text = text.strip()
    return text if len(text) <= 60 else f"{text[:57]}..."


def bound_of(intensity: float | None, peak_flops: float | None, bytes_per_s: float | None) -> str:
    """Return ``compute`` or ``memory`` by the roofline: intensity against FLOP/s over bytes/s.

    (S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009.) "" if a figure is unknown.
    """
    if intensity is None or not peak_flops or not bytes_per_s or math.isnan(intensity):
        return ""
    return "compute" if intensity >= peak_flops / bytes_per_s else "memory"


def share_that(kinds: dict[str, float], *, computes: bool) -> float:
    """Return the share of own seconds in products, attention and convolutions.

    Or in moving memory.
    """
    return sum(kinds.get(kind, 0.0) for kind in (_COMPUTES if computes else _MOVES))
