"""Facts of the page that are more than a value of the record: comparisons, tables, and sentences that depend on them.

Plain texts and rows of text; ``report.html.j2`` lays them out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardwise.diagnosis.finding import Finding
from shardwise.diagnosis.weight import HINT, MIN_STEPS
from shardwise.measure.profiler.trace_text import rate_text
from shardwise.measure.step_time.timing import BETWEEN, Timing
from shardwise.measure.utilisation import utilisation_lines
from shardwise.plan.plan import Plan
from shardwise.report.html.figures import SMOOTHED, colour, families, ordered, words
from shardwise.report.html.run_record import Column, Figures, Memory, RunRecord, SavedCheckpoint, Series
from shardwise.report.html.text import fixed, milliseconds, number, percent, sampled
from shardwise.units import bytes_text, count_text, counted, money_text, number_text, seconds_text

SAVES = 12
"""Number of checkpoints that are listed: the last ones."""
PLANNED = ("strategy", "device", "precision", "recompute", "micro_batch", "grad_accum", "seq_len")
"""Plan keys that are always shown; others only if they differ from the default."""
_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "temporaries")
_NOTHING = "–"
_PHASES = {"optimizer": "the optimizer", "other": "the loop's own code"}


class PageTable(NamedTuple):
    """Table of texts; columns after the first are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Tile(NamedTuple):
    """Key figure: a large number, and its comparison below it."""

    name: str
    value: str
    note: str


def of_record(record: RunRecord, drawn: Collection[str]) -> dict[str, Any]:
    """Return the facts by the names that the template knows; ``drawn`` are the charts that it has."""
    series, timing, use = record.series, record.timing, record.utilisation
    return {
        "findings": [(finding, _costs(finding)) for finding in record.findings or ()],
        "why_no_verdict": _why_no_verdict(record),
        "split": () if timing is None else _split(timing),
        "split_text": None if timing is None else _split_text(timing),
        "step_times": None if timing is None else _step_times(timing),
        "tiles": _tiles(record),
        "loss_caption": _loss_caption(record, drawn),
        "loss_table": _loss_table(series),
        "heldout_table": _heldout_table(record),
        "throughput_caption": _throughput_caption(record, drawn),
        "throughput_table": _throughput_table(record),
        "use_lines": [] if use is None else utilisation_lines(use),
        "parts_table": _parts_table(series),
        "timing_table": None if timing is None else _timing_table(timing),
        "timing_lines": [] if timing is None else list(_timing_lines(timing)),
        "collectives_table": _collectives_table(record),
        "saves_table": _saves_table(record.saves[-SAVES:]),
        "memory_table": _memory_table(record.memory),
        "also_measured": _also_measured(record.memory),
        "plan_pairs": [] if record.plan is None else _plan_pairs(record.plan),
        "config_pairs": [
            (f"{group}.{key}", _value(v)) for group, keys in record.config.items() for key, v in keys.items()
        ],
    }


def _costs(finding: Finding) -> list[str]:
    costs = []
    if finding.seconds is not None:
        share = "" if finding.share is None else f" ({percent(finding.share)})"
        costs.append(f"{milliseconds(finding.seconds)} of a step{share}")
    if finding.money is not None:
        costs.append(f"{money_text(finding.money)} an hour")
    if finding.rank is not None:
        costs.append(f"rank {finding.rank}")
    return costs


def _why_no_verdict(record: RunRecord) -> str:
    """Explain why there are no findings: not computed, or too little data."""
    steps = record.figures.steps if record.timing is None else record.timing.steps
    if record.findings is None and (record.timing is None or steps >= MIN_STEPS):
        return "no diagnosis was made for this run"
    if record.not_judged:
        return "no cause that is seen here takes 5 % of a step; what is not judged is listed below"
    return f"{steps} {'step is' if steps == 1 else 'steps are'} too few to judge what this run loses time to"


def _split(timing: Timing) -> list[dict[str, Any]]:
    """Return the parts of a step, and the width of each in a bar."""
    known = [part for part in ordered(timing.parts) if timing.seconds(part) > 0]
    total = sum(timing.seconds(part) for part in known) or 1.0
    return [
        {
            "name": words(part),
            "colour": colour(part),
            "width": f"{timing.seconds(part) / total * 100:.3f}%",
            "seconds": timing.seconds(part),
            "share": timing.share(part),
        }
        for part in known
    ]


def _split_text(timing: Timing) -> str:
    parts = [f"{percent(seconds / timing.step_s)} {name}" for name, seconds in families(timing) if timing.step_s]
    waited = 0.0 if timing.cpu_wait_s is None else timing.cpu_wait_s.mean_s
    text = f"Of an average step of {milliseconds(timing.step_s)}: {', '.join(parts)}."
    if timing.step_s and waited >= HINT * timing.step_s:
        text += (
            f" For {milliseconds(waited)} of it ({percent(waited / timing.step_s)}) an average rank was ready to run "
            "and had no core; this time counts as the part in which it waited, so not all that is called computing is."
        )
    return text


def _step_times(timing: Timing) -> str:
    """Say which step time of the page is which."""
    median, average, whole = map(milliseconds, (timing.median_step_s, timing.step_s, timing.whole_s))
    between = f", {whole} the average with the checkpoints and evaluations between steps (findings)"
    return (
        f"A step has several times on this page: {median} is the median (key figures), {average} the average "
        f"(where it goes){between if timing.whole_s > timing.step_s else ''}; all over "
        f"{counted(timing.steps, 'step')} after {timing.warm_up} of warm-up."
    )


def _tiles(record: RunRecord) -> list[Tile]:
    f = record.figures
    ranks = None if record.plan is None else record.plan.dims.world_size
    rate, noun = record.per_s, record.noun
    trained_on = (f.tokens, "tokens") if f.labels is None or f.tokens is not None else (f.labels, "labels")
    share = None if not f.tokens or f.labels is None else f.labels / f.tokens
    with_loss = "" if share is None or share >= 1 else f", {percent(share)} with a loss,"
    each = None if rate is None or not ranks else rate / ranks
    achieved = "" if f.flops_per_s is None else f"{rate_text(f.flops_per_s)} a device"
    mfu = f"predicted {percent(f.mfu_predicted)}" if f.mfu_predicted is not None else ""
    mfu = "the device's peak is not known" if f.mfu is None else mfu
    hours = "device hours unknown" if f.device_hours is None else f"{number_text(f.device_hours)} device hours"
    price = f.price_per_device_hour
    return [
        Tile(
            "loss", fixed(f.last_loss), "" if f.first_loss is None else f"from {fixed(f.first_loss)} at the first step"
        ),
        _heldout_tile(f),
        Tile("throughput", count_text(rate), f"{noun}/s, {count_text(each)} a device" if each else f"{noun}/s"),
        Tile("median step", milliseconds(f.step_s), _against(f.step_s, f.step_predicted_s, milliseconds)),
        Tile("MFU", percent(f.mfu), "; ".join(filter(None, [achieved, mfu]))),
        Tile("peak memory", bytes_text(f.peak_bytes), _against(f.peak_bytes, f.peak_predicted_bytes, bytes_text)),
        Tile(
            "cost",
            money_text(f.cost),
            f"no price known; {hours}" if price is None else f"{hours} at {money_text(price)}",
        ),
        Tile(
            "trained on",
            count_text(trained_on[0]),
            f"{trained_on[1]}{with_loss} in {seconds_text(f.step_seconds)} of steps",
        ),
    ]


def _heldout_tile(figures: Figures) -> Tile:
    """Return the held-out result: bits per byte, or the accuracy and loss of labels."""
    found = figures.heldout
    if not found:
        return Tile("held out", fixed(figures.heldout_bits_per_byte), "bits per byte")
    loss = fixed(found.get("loss"))
    if "accuracy" in found:
        return Tile("held out", percent(found["accuracy"]), f"right, loss {loss}")
    return Tile("held out", loss, "loss")


def _against(found: float | None, planned: float | None, text: Callable[[float], str]) -> str:
    if planned is None:
        return "not predicted"
    ratio = "" if found is None else f", {found / planned:.2f} × that"
    return f"predicted {text(planned)}{ratio}"


def _over_run(series: Series, *columns: tuple[str, Column, Callable[[Any], str]]) -> PageTable:
    """Return rows of steps over the run; a column has its head, its values and their format."""
    rows = [
        (f"{series.step[i]:,}", *(_known(values[i], text) for _, values, text in columns))
        for i in sampled(len(series.step))
    ]
    return PageTable(("step", *(head for head, _, _ in columns)), rows)


def _loss_caption(record: RunRecord, drawn: Collection[str]) -> str:
    f, lines = record.figures, record.series.lines_per_row
    each = f" A point is the mean of {lines} logged steps." if lines > 1 else ""
    smoothed = _smoothed(record) if "loss" in drawn else ""
    return f"Training loss, {fixed(f.first_loss)} at first and {fixed(f.last_loss)} at last.{each}{smoothed}"


def _smoothed(record: RunRecord) -> str:
    """Say which line is which, where a running median is drawn over the points."""
    return " Thin: the points; thick: their running median." if len(record.series.step) >= SMOOTHED else ""


def _throughput_caption(record: RunRecord, drawn: Collection[str]) -> str:
    text = f"{record.noun.capitalize()} a second of all devices together."
    if "throughput" not in drawn:
        return text
    if record.per_s is not None:
        timed = record.timing is not None and record.per_s == record.timing.tokens_per_s
        kind = "their average after the warm-up" if timed else "their median"
        text += f" Dashed: {kind}, {count_text(record.per_s)}."
    marks = " Triangles: checkpoints, whose time is not in it." if record.saves else ""
    return f"{text}{_smoothed(record)}{marks}"


def _loss_table(series: Series) -> PageTable:
    return _over_run(
        series,
        ("loss", series.loss, "{:.5g}".format),
        ("learning rate", series.learning_rate, "{:.3g}".format),
        ("gradient norm", series.grad_norm, "{:.3g}".format),
    )


def _heldout_table(record: RunRecord) -> PageTable:
    rows = [(f"{found.step:,}", number(found.heldout_bits_per_byte, 5)) for found in record.evaluations]
    return PageTable(("step", "bits per byte"), rows)


def _throughput_table(record: RunRecord) -> PageTable:
    rate = (f"{record.noun}/s", record.logged_per_s, count_text)
    return _over_run(record.series, rate, ("step time", record.series.step_time_s, milliseconds))


def _parts_table(series: Series) -> PageTable:
    """Return seconds of each part over the run."""
    return _over_run(series, *((words(part), series.parts_s[part], milliseconds) for part in ordered(series.parts_s)))


def _known(value: Any, text: Callable[[Any], str]) -> str:
    return _NOTHING if value is None else text(value)


def _timing_table(timing: Timing) -> PageTable:
    """Return the parts of an average step, and those between steps."""
    rows = []
    for part in ordered(timing.parts):
        spread = timing.parts[part]
        if spread is not None:
            least, most = milliseconds(spread.low_s), milliseconds(spread.high_s)
            between = (most, _NOTHING) if least == most else (f"{least} to {most}", f"rank {spread.highest_rank}")
            rows.append((words(part), milliseconds(spread.mean_s), percent(timing.share(part)), *between))
    rows += [
        (f"between steps: {words(name)}", milliseconds(timing.between_s[name]), _NOTHING, _NOTHING, _NOTHING)
        for name in BETWEEN
        if timing.between_s.get(name)
    ]
    return PageTable(("part", "average", "share", "of a rank", "longest on"), rows)


def _timing_lines(timing: Timing) -> Iterator[str]:
    if timing.stopwatch_s is not None:
        both = f"{milliseconds(timing.whole_s)}; by stopwatch {milliseconds(timing.stopwatch_s)}"
        yield f"Parts and the time between steps add up to {both}."
    if timing.warm_up:
        left = "is the first step" if timing.warm_up == 1 else f"are the first {timing.warm_up} steps"
        yield f"Left out {left}, in which things warm up."
    if timing.late_rank is not None and timing.world_size > 1:
        often = "" if timing.steps == 1 else f" most often: in {percent(timing.late_share)} of the steps"
        yield f"Rank {timing.late_rank} came last{often}."
    if timing.cpu_wait_s is not None:
        waited = timing.cpu_wait_s.mean_s
        share = f" ({percent(waited / timing.step_s)})" if timing.step_s else ""
        yield (
            f"An average rank was ready to run and had no core for {milliseconds(waited)} a step{share}; that time is "
            "in the parts above, also in those that compute."
        )
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


def _collectives_table(record: RunRecord) -> PageTable:
    """Return how long collectives of an observed loop were in flight."""
    rows = [
        (
            f"{one.name} in {_PHASES.get(one.phase, one.phase)}, rank {one.rank}",
            f"{one.calls:,}",
            bytes_text(one.num_bytes),
            f"unknown: {one.unknown}" if one.seconds is None else milliseconds(one.seconds),
        )
        for one in record.collectives
    ]
    return PageTable(("collective", "calls", "size", "in flight"), rows)


def _saves_table(saves: Iterable[SavedCheckpoint]) -> PageTable:
    rows = [(f"{s.step:,}", bytes_text(s.num_bytes), seconds_text(s.stall_s), seconds_text(s.write_s)) for s in saves]
    return PageTable(("after step", "size", "ranks stood still", "written in"), rows)


def _memory_table(memory: Memory) -> PageTable | None:
    """Return predicted and measured bytes; ``None`` without a prediction."""
    if memory.predicted is None:
        return None
    predicted_peaks = {str(phase.name): phase.allocated for phase in memory.predicted.phases}
    categories = [
        (f"peak in {phase.replace('_', ' ')}", predicted_peaks.get(phase), memory.peaks.get(phase))
        for phase in dict.fromkeys([*predicted_peaks, *memory.peaks])
    ]
    categories += [(name, getattr(memory.predicted, name), memory.at_rest.get(name)) for name in _CATEGORIES]
    rows = []
    for name, predicted, measured in categories:
        if predicted is not None or measured is not None:
            ratio = f"{measured / predicted:.2f} ×" if measured is not None and predicted else _NOTHING
            rows.append((name, _known(predicted, bytes_text), _known(measured, bytes_text), ratio))
    return PageTable(("bytes on the fullest rank", "predicted", "measured", "measured / predicted"), rows)


def _also_measured(memory: Memory) -> list[str]:
    known = {
        "the process with its libraries": memory.process_peak_bytes,
        "taken of the device": memory.device_used_bytes,
    }
    return [f"{name} {bytes_text(value)}" for name, value in known.items() if value is not None]


def _plan_pairs(plan: Plan) -> list[tuple[str, str]]:
    facts = plan.model_dump(mode="json", exclude={"schema_version", "dims", "reason"})
    usual = Plan().model_dump(mode="json")
    shown = [*PLANNED, *(key for key in facts if key not in PLANNED and facts[key] != usual[key])]
    rows = [(key.replace("_", " "), _value(facts[key])) for key in shown]
    return [rows[0], ("degrees", str(plan.dims)), ("fingerprint", plan.fingerprint), *rows[1:]]


def _value(value: Any) -> str:
    if value is None:
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
