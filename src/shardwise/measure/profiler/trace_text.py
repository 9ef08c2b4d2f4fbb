"""Describe a trace in sentences: work, gaps and their causes, and bounds. No torch here."""

from __future__ import annotations

from shardwise.measure.profiler.summary import SHORT_KERNEL_S, Gap, TraceSummary, bound_of, share_that
from shardwise.units import number_text

IDLE_SHARE = 0.1
"""Smallest idle share that is worth a sentence of advice."""


def words(summary: TraceSummary, peak_flops: float | None = None, bytes_per_s: float | None = None) -> list[str]:
    """Describe a summary; ``peak_flops`` and ``bytes_per_s`` are the device's, if known."""
    return [
        *_what(summary),
        *_busiest(summary),
        *_gaps(summary),
        *_hints(summary, peak_flops, bytes_per_s),
        *_overhead(summary),
    ]


def short_time(seconds: float) -> str:
    """Format ``12 µs``, ``3.4 ms`` or ``1.2 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def rate_text(flops_per_s: float | None) -> str:
    """Format ``1.20 TFLOP/s``; ``unknown`` for ``None``."""
    if flops_per_s is None:
        return "unknown"
    for size, name in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if abs(flops_per_s) >= size:
            return f"{number_text(flops_per_s / size)} {name}"
    return f"{flops_per_s:.0f} FLOP/s"


def _percent(part: float, full: float) -> str:
    if not full:
        return "unknown"
    share = part / full
    return f"{share:.0%}" if share == 0 or share >= 0.01 else f"{share:.1%}"


def _some(number: int, one: str) -> str:
    return f"{number} {one}{'' if number == 1 else 's'}"


def _what(summary: TraceSummary) -> list[str]:
    last = summary.first_step + summary.steps - 1
    which = f"Step {summary.first_step}" if summary.steps == 1 else f"Steps {summary.first_step} to {last}"
    who = "the GPU was" if summary.device == "cuda" else "operators ran"
    busy = "busy " if summary.device == "cuda" else ""
    return [
        f"{which} on rank {summary.rank}: {who} {busy}{_percent(summary.busy_s, summary.window_s)} of "
        f"{short_time(summary.window_s)}, in "
        f"{_some(summary.launches, 'device operation' if summary.device == 'cuda' else 'operator call')}."
    ]


def _busiest(summary: TraceSummary) -> list[str]:
    top = summary.operations[:3]
    if not top:
        return []
    named = [
        f"{one.name}{f' (of {one.operator})' if one.operator else ''} {one.share:.0%} in {_some(one.calls, 'call')}"
        + (f" at {rate_text(one.flops_per_s)}" if one.flops_per_s else "")
        for one in top
    ]
    return [f"Busiest, of the time that something ran: {'; '.join(named)}."]


def _gaps(summary: TraceSummary) -> list[str]:
    if not summary.gaps:
        return ["There were no gaps."]
    idle = "Nothing ran on the GPU" if summary.device == "cuda" else "No operator ran"
    sentences = [
        f"{idle} in {_some(summary.gaps, 'gap')}, {short_time(summary.gap_s)} together "
        f"({_percent(summary.gap_s, summary.window_s)}), {short_time(summary.gap_s / summary.gaps)} each on average."
    ]
    if summary.waiting_s > 0:
        share = _percent(summary.waiting_s, summary.window_s)
        if summary.device == "cuda":
            sentences.append(f"For {share} of the time only communication ran, which nothing else covered.")
        else:
            sentences.append(f"For {share} of the time no operator ran while a collective was under way.")
    return [*sentences, *(_one_gap(gap, rank, summary.device) for rank, gap in enumerate(summary.longest))]


def _one_gap(gap: Gap, rank: int, device: str) -> str:
    which = "The longest gap" if rank == 0 else "Another one"
    between = f"between {gap.before or 'the start'} and {gap.after or 'the end'}"
    phase = f", in {gap.phase}" if gap.phase else ""
    doing = f"; meanwhile: {gap.meanwhile}"
    if not gap.meanwhile:
        unknown = "the host ran no operator" if device == "cuda" else "the thread was in Python, or without a core"
        doing = f"; {unknown}"
    return f"{which}: {short_time(gap.seconds)}, {between}{phase}{doing}."


def _hints(summary: TraceSummary, peak_flops: float | None, bytes_per_s: float | None) -> list[str]:
    sentences = []
    computes, moves = (share_that(summary.kinds, computes=value) for value in (True, False))
    sentences.append(
        f"Of the work {computes:.0%} is products, attention and convolutions, {moves:.0%} moves memory (element by "
        f"element, copies, norms, optimizer), {summary.kinds.get('communication', 0.0):.0%} is communication."
    )
    if moves > computes:
        sentences.append("More is moved than computed: fused kernels (parallel.compile) and bf16 would move less.")
    for one in summary.operations[:3]:
        if one.flops_per_s and (bound := bound_of(one.intensity, peak_flops, bytes_per_s)):
            share = _percent(one.flops_per_s, peak_flops or 0.0)
            sentences.append(
                f"{one.name}: {one.intensity:.0f} FLOPs a byte make it {bound} bound; it reached {share} of the peak."
            )
    idle = summary.window_s - summary.busy_s
    if summary.device == "cuda" and idle > IDLE_SHARE * summary.window_s:
        if summary.median_launch_s is not None and summary.median_launch_s < SHORT_KERNEL_S:
            sentences.append(
                f"Half of the kernels take less than {short_time(summary.median_launch_s)}: the host cannot launch "
                "them as fast as they run; a larger micro batch or parallel.compile would help."
            )
        if any("ynchronize" in gap.meanwhile or "item" in gap.meanwhile for gap in summary.longest):
            sentences.append("The host waited for the device and had nothing queued: a value was read in the loop.")
    if summary.device == "cpu" and idle - summary.waiting_s > IDLE_SHARE * summary.window_s:
        sentences.append("The rest of the gaps is Python between operators: larger micro batches have fewer of them.")
    return sentences


def _overhead(summary: TraceSummary) -> list[str]:
    cost = summary.overhead
    if cost.traced_step_s is None:
        return []
    plain = ""
    if cost.plain_step_s:
        plain = f" ({cost.traced_step_s / cost.plain_step_s:.2f} × one without)"
    extra = [
        f"{what} {short_time(value)}"
        for what, value in (("starting it", cost.start_s), ("writing it", cost.write_s))
        if value is not None
    ]
    more = f"; {' and '.join(extra)} came on top" if extra else ""
    return [f"A traced step took {short_time(cost.traced_step_s)}{plain}{more}."]
