"""Lower part of the page: time, memory, measurements, receipts, plan, environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwise.measure.step_time.timing import BETWEEN, Timing
from shardwise.plan.plan import Plan
from shardwise.receipts.receipt import Receipt
from shardwise.report.html.figures import Figure
from shardwise.report.html.layout_parts import ordered, words
from shardwise.report.html.run_record import BenchSamples, RunRecord
from shardwise.report.html.text import (
    Safe,
    chart,
    el,
    joined,
    milliseconds,
    number,
    pairs,
    percent,
    sampled,
    section,
    size,
    span,
    table,
)

MARKS = {True: ("✓", "holds", "yes"), False: ("✗", "false", "no"), None: ("·", "told, not checked", "told")}
SAVES = 12
"""Number of checkpoints that are listed: the last ones."""
PLANNED = ("strategy", "device", "precision", "recompute", "micro_batch", "grad_accum", "seq_len")
"""Plan keys that are always shown; others only if they differ from the default."""


def time_section(record: RunRecord, charts: dict[str, Figure]) -> Safe:
    """Show the run's time: over steps, by rank, and by part."""
    timing = record.timing
    parts: list[Safe] = []
    if record.series.parts_s:
        text = "Where a step's time went, over the run: computing at the bottom, waiting on top of it."
        found = charts.get("parts")
        if found is not None and found["off_scale"]:
            text += f" Off the scale: {found['off_scale']}."
        keys = () if found is None else found["keys"]
        parts.append(chart("parts", text, _parts_over_time(record), drawn=found is not None, keys=keys))
    if timing is None:
        parts.append(el("p", "How an average step of each rank was spent is unknown.", class_="none"))
    else:
        parts += _timing_parts(timing, charts)
    parts += [_saves(record)] if record.saves else []
    return section("time", "Where the time went", *parts)


def _parts_over_time(record: RunRecord) -> Safe | None:
    series = record.series
    names = ordered(series.parts_s)
    if not names:
        return None
    rows = [
        (f"{series.step[i]:,}", *(_or_dash(series.parts_s[part][i]) for part in names))
        for i in sampled(len(series.step))
    ]
    return table(("step", *(words(part) for part in names)), rows, numbers=range(1, len(names) + 1))


def _or_dash(seconds: float | None) -> str:
    return "–" if seconds is None else milliseconds(seconds)


def _timing_parts(timing: Timing, charts: dict[str, Figure]) -> list[Safe]:
    parts: list[Safe] = []
    if "ranks" in charts:
        found = charts["ranks"]
        above = "parts" in charts
        text = f"An average step of {found['whose']}, in {found['unit']}{', coloured as above' if above else ''}."
        parts.append(chart("ranks", text, keys=() if above else found["keys"]))
    rows = [_part_row(part, timing) for part in ordered(timing.parts) if timing.parts[part] is not None]
    rows += [
        (f"between steps: {words(name)}", milliseconds(timing.between_s[name]), "–", "–", "–")
        for name in BETWEEN
        if timing.between_s.get(name)
    ]
    title = f"An average step of {milliseconds(timing.step_s)}, over {timing.steps:,} steps"
    parts.append(table(("part", "mean", "share", "of a rank", "longest on"), rows, numbers=(1, 2, 3), caption=title))
    parts += [el("p", line) for line in _timing_facts(timing)]
    return parts


def _part_row(part: str, timing: Timing) -> tuple[str, str, str, str, str]:
    spread = timing.parts[part]
    if spread is None:
        return words(part), "–", "–", "–", "–"
    least, most = milliseconds(spread.low_s), milliseconds(spread.high_s)
    same = least == most
    span_of = most if same else f"{least} to {most}"
    whose = "–" if same else f"rank {spread.highest_rank}"
    return words(part), milliseconds(spread.mean_s), percent(timing.share(part)), span_of, whose


def _timing_facts(timing: Timing) -> Iterable[str]:
    if timing.stopwatch_s is not None:
        full = timing.step_s + sum(timing.between_s.values())
        both = f"{milliseconds(full)}; by stopwatch {milliseconds(timing.stopwatch_s)}"
        yield f"Parts and the time between steps add up to {both}."
    if timing.warm_up:
        yield f"Left out are the first {timing.warm_up} steps, in which things warm up."
    if timing.late_rank is not None and timing.world_size > 1:
        yield f"Rank {timing.late_rank} came last most often: in {percent(timing.late_share)} of the steps."
    if timing.cpu_wait_s is not None:
        seconds = milliseconds(timing.cpu_wait_s.mean_s)
        yield f"A rank was ready to run and had no core for {seconds} a step; the parts above contain that time."
    if timing.early_reduces:
        seconds = milliseconds(timing.early_reduce_s)
        yield (
            f"Gradients were reduced before the last micro batch {number(timing.early_reduces, 3)} times a step, "
            f"which took {seconds}."
        )
    absent = [part for part in ordered(timing.parts) if timing.parts[part] is None]
    if absent:
        why = [f"{words(part)} ({timing.unmeasured[part]})" for part in absent if part in timing.unmeasured]
        rest = [words(part) for part in absent if part not in timing.unmeasured]
        yield f"Not in this run, or not separated: {', '.join([*why, *rest])}."


def _saves(record: RunRecord) -> Safe:
    rows = [(f"{s.step:,}", size(s.num_bytes), span(s.stall_s), span(s.write_s)) for s in record.saves[-SAVES:]]
    more = f", the last {SAVES} of {len(record.saves)}" if len(record.saves) > SAVES else ""
    title = f"Checkpoints{more}: how long ranks stood still, and until all was on disk"
    return table(("after step", "size", "ranks stood still", "written in"), rows, numbers=range(1, 4), caption=title)


def memory(record: RunRecord, charts: dict[str, Figure]) -> Safe:
    """Show the predicted and the measured memory of a rank."""
    found = record.memory
    parts: list[Safe] = []
    if found.peaks:
        text = "Peak of live bytes in each phase of a step, on the fullest rank: measured, and what the plan predicted."
        parts.append(chart("memory", text, None, drawn="memory" in charts))
        most, has = max(found.peaks.values()), found.device_memory_bytes
        parts += [el("p", f"The highest peak is {percent(most / has)} of the {size(has)} of a device.")] if has else []
    else:
        parts.append(el("p", "No peak was measured.", class_="none"))
    if found.predicted is None:
        return section("memory-section", "Memory", *parts)
    predicted_peaks = {str(phase.name): phase.allocated for phase in found.predicted.phases}
    rows = [
        (
            f"peak in {phase.replace('_', ' ')}",
            _size_or_dash(predicted_peaks.get(phase)),
            _size_or_dash(found.peaks.get(phase)),
            _ratio(found.peaks.get(phase), predicted_peaks.get(phase)),
        )
        for phase in dict.fromkeys([*predicted_peaks, *found.peaks])
    ]
    for name in ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "temporaries"):
        planned, seen = getattr(found.predicted, name), found.at_rest.get(name)
        if planned is not None or seen is not None:
            rows.append((name, _size_or_dash(planned), _size_or_dash(seen), _ratio(seen, planned)))
    head = ("bytes on the fullest rank", "predicted", "measured", "measured / predicted")
    parts.append(table(head, rows, numbers=(1, 2, 3)))
    if any("–" in row[1:3] for row in rows):
        parts.append(el("p", "–: not predicted, or not measured apart from the rest.", class_="soft"))
    facts = [
        ("the process with its libraries", found.process_peak_bytes),
        ("taken of the device", found.device_used_bytes),
    ]
    known = [f"{name} {size(value)}" for name, value in facts if value is not None]
    parts += [el("p", f"Measured, too: {', '.join(known)}.")] if known else []
    return section("memory-section", "Memory", *parts)


def _size_or_dash(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else size(num_bytes)


def _ratio(found: int | None, planned: int | None) -> str:
    return "–" if found is None or not planned else f"{found / planned:.2f} ×"


def samples(key: str, title: str, found: BenchSamples | None, text: str, charts: dict[str, Figure]) -> Safe | None:
    """Show measurements of another command; nothing if none were given."""
    if found is None:
        return None
    rows = table(found.columns, found.rows, numbers=range(1, len(found.columns))) if found.rows else None
    notes = joined(el("p", f"{note}.") for note in found.notes)
    shown = chart(key, text, rows, drawn=key in charts, keys=charts[key]["keys"] if key in charts else ())
    return section(f"{key}-section", title, shown, notes, el("p", f"From {found.source}.", class_="soft"))


def receipts(record: RunRecord) -> Safe:
    """Show every claim of the plan that was checked, and those only reported."""
    if not record.receipts:
        return section("receipts", "Receipts", el("p", "No receipt is in the folder.", class_="none"))
    return section("receipts", "Receipts", *(_receipt(name, found) for name, found in record.receipts.items()))


def _receipt(name: str, receipt: Receipt | None) -> Safe:
    if receipt is None:
        return joined([el("h3", name), el("p", "Not checked: the run ended before it could be.", class_="none")])
    wrong = sum(line.ok is False for line in receipt.lines)
    checked = sum(line.ok is not None for line in receipt.lines)
    word = f"{wrong} of {checked} checked claims are false" if wrong else f"checked claims hold: {checked} of {checked}"
    rows = []
    for line in receipt.lines:
        mark, label, tone = MARKS[line.ok]
        rows.append(
            (joined([el("span", mark, class_=f"mark {tone}", title=label), " ", line.name]), line.planned, line.found)
        )
    title = joined([f"{name}: ", el("span", word, class_="no" if wrong else "yes")])
    return table(("what", "planned", "found"), rows, caption=title, class_="receipt")


def plan(record: RunRecord) -> Safe:
    """Show the plan and the batch equation; the config below it."""
    parts: list[Safe] = []
    if record.plan is None:
        parts.append(el("p", "The plan is unknown.", class_="none"))
    else:
        parts.append(el("p", record.plan.batch_equation(), class_="equation"))
        facts = record.plan.model_dump(mode="json", exclude={"schema_version", "dims", "reason"})
        usual = Plan().model_dump(mode="json")
        shown = [key for key in facts if key in PLANNED or facts[key] != usual[key]]
        rows = [(key.replace("_", " "), _value(facts[key])) for key in sorted(shown, key=_planned_place)]
        more = [("degrees", str(record.plan.dims)), ("fingerprint", record.plan.fingerprint)]
        parts += [el("p", f"Why this plan: {record.plan.reason}.")] if record.plan.reason else []
        parts.append(pairs([*rows[:1], *more, *rows[1:]]))
    if record.config:
        lines = [
            (f"{group}.{key}", _value(value)) for group, keys in record.config.items() for key, value in keys.items()
        ]
        parts.append(el("details", el("summary", "the config"), pairs(lines)))
    return section("plan", "Plan", *parts)


def _planned_place(key: str) -> int:
    return PLANNED.index(key) if key in PLANNED else len(PLANNED)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def environment(record: RunRecord) -> Safe:
    """Show versions, system and devices."""
    if not record.environment:
        return section("environment", "Environment", el("p", "What the run ran on is unknown.", class_="none"))
    return section("environment", "Environment", pairs(list(record.environment.items())))
