"""Facts from a profiler's trace file: events, self times, kinds of work, gaps. No torch.

The input is Chrome's trace format as ``torch.profiler`` writes it: complete events (``"ph": "X"``) with ``ts`` and
``dur`` in microseconds, whose category is their kind (``cpu_op``, ``user_annotation``, ``cuda_runtime``, ``kernel``,
``gpu_memcpy``, ``gpu_memset``), and whose ``External id`` joins a kernel with the operator that launched it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["product", "attention", "convolution", "communication", "memory", "optimizer", "other"]
MARK = "shardwise: "
"""Prefixes of the annotations that name a step's phase."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_WORDS: tuple[tuple[Kind, str], ...] = (
    ("communication", r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|sendrecv"),
    ("optimizer", r"optimizer|adam|multi_tensor|_foreach|_fused_sgd|addcdiv|addcmul|lerp"),
    ("memory", r"nchw_?to|nhwc_?to|memcpy|memset"),  # a convolution's copies are not products
    ("attention", r"attention|flash|fmha|sdpa"),
    ("convolution", r"conv|winograd|implicit_gemm|[dw]grad|fprop|[sh]cudnn"),
    (
        "product",
        r"gemm|gemv|::(add|b|baddb)?mm\b|::linear\b|cutlass|xmma|nvjet|splitk|matmul|scaled_mm|cijk_",
    ),
    (
        "memory",
        r"elementwise|copy|cat|fill|zero|reduce|sum|mean|norm|\bbn_|softmax|gelu|silu|relu|sigmoid|tanh|dropout"
        r"|::(add|mul|div|sub|neg|pow|exp|log|sqrt|rsqrt|square|where|clone|to|cos|sin)_?\b|embedding|index|gather"
        r"|scatter|nll_loss|cross_entropy|triton|transpose|masked|stack|split|clamp|pool",
    ),
)
_KINDS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _WORDS)
_ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "c10::Float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Complete event; times in seconds from the file's first.

    ``link`` joins kernels and operators.
    """

    name: str
    category: str
    start_s: float
    end_s: float
    thread: str
    link: int | None = None
    dims: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""

    @property
    def seconds(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(slots=True)
class KernelGroup:
    """Work of one name: calls, own seconds, and its products' FLOPs and bytes, if known."""

    name: str
    kind: Kind
    calls: int = 0
    self_s: float = 0.0
    flops: float = 0.0
    operand_bytes: float = 0.0
    by: dict[str, float] = field(default_factory=dict)


def read_events(path: Path) -> list[TraceEvent]:
    """Read a trace file's complete events (``.json`` or ``.json.gz``) in order of their start.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file.
    """
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(raw)
    return parse_events(document["traceEvents"] if isinstance(document, dict) else document)


def parse_events(rows: Iterable[dict[str, Any]]) -> list[TraceEvent]:
    """Parse events as `read_events`, from the list of events."""
    kept = [row for row in rows if row.get("ph") == "X" and row.get("cat") not in (None, "Trace", "overhead")]
    if not kept:
        return []
    origin = min(float(row["ts"]) for row in kept)
    events = []
    for row in kept:
        begin, arguments = (float(row["ts"]) - origin) * 1e-6, row.get("args") or {}
        types = arguments.get("Input type") or [""]
        events.append(
            TraceEvent(
                name=str(row["name"]),
                category=str(row["cat"]),
                start_s=begin,
                end_s=begin + float(row.get("dur", 0.0)) * 1e-6,
                thread=f"{row.get('pid')}/{row.get('tid')}",
                link=arguments.get("External id"),
                dims=_dims(arguments.get("Input Dims")),
                dtype=str(types[0]),
            )
        )
    return sorted(events, key=lambda event: (event.start_s, -event.end_s))


def _dims(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        return ()
    return tuple(tuple(row) if isinstance(row, list) and all(isinstance(n, int) for n in row) else () for row in value)


def kind_of(name: str) -> Kind:
    """Classify a name's kind of work by its words; ``other`` if none is known."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def product_size(event: TraceEvent) -> tuple[float, float] | None:
    """Return FLOPs (a multiply-add is two) and operand and result bytes of a product, by shapes.

    ``None`` if it is not a product, or if the trace lacks its shapes or type.
    """
    dims = [row for row in event.dims if len(row) in (2, 3)]
    size = _ITEM_BYTES.get(event.dtype)
    if event.name not in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm") or len(dims) < 2 or size is None:
        return None
    left, right = dims[-2], dims[-1]
    if len(left) != len(right) or left[-1] != right[-2]:
        return None
    batch = left[0] if len(left) == 3 else 1
    m, k, n = left[-2], left[-1], right[-1]
    return 2.0 * batch * m * k * n, float(size * batch * (m * k + k * n + m * n))


def self_seconds(events: Sequence[TraceEvent]) -> list[float]:
    """Return each event's seconds without nested events, on its own thread.

    In the order of ``events``,
    which is that of `read_events`.
    """
    own = [event.seconds for event in events]
    stacks: dict[str, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        stack = stacks[event.thread]
        while stack and events[stack[-1]].end_s <= event.start_s:
            stack.pop()
        if stack:
            own[stack[-1]] -= min(event.end_s, events[stack[-1]].end_s) - event.start_s
        stack.append(index)
    return [max(0.0, seconds) for seconds in own]


def outermost(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return the events that are not nested in another one of their thread."""
    ends: dict[str, float] = {}
    found = []
    for event in events:
        if event.start_s >= ends.get(event.thread, -1.0):
            found.append(event)
            ends[event.thread] = event.end_s
    return found


Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Join spans that overlap or touch; in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def covered(spans: Sequence[Span]) -> float:
    """Sum the seconds of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def holes(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the parts of ``window`` that no span covers; ``spans`` are those of `union`."""
    found, at = [], window[0]
    for begin, end in spans:
        if begin > at:
            found.append((at, min(begin, window[1])))
        at = max(at, end)
    if at < window[1]:
        found.append((at, window[1]))
    return [(begin, end) for begin, end in found if end > begin]


def overlap(event: TraceEvent, span: Span) -> float:
    """Return seconds of ``event`` inside of ``span``."""
    return max(0.0, min(event.end_s, span[1]) - max(event.start_s, span[0]))
