"""Upper part of the page: verdict, key figures, loss and throughput."""

from __future__ import annotations

from typing import Any

from shardwise.diagnosis.finding import Finding
from shardwise.diagnosis.weight import HINT
from shardwise.measure.profiler.trace_text import rate_text
from shardwise.measure.step_time.timing import Timing
from shardwise.measure.utilisation import utilisation_lines
from shardwise.report.html.layout_parts import colour, families, ordered, words
from shardwise.report.html.run_record import Figures, RunRecord
from shardwise.report.html.text import (
    UNKNOWN,
    Safe,
    chart,
    colour_keys,
    el,
    fixed,
    joined,
    milliseconds,
    number,
    percent,
    sampled,
    section,
    size,
    span,
    table,
)
from shardwise.units import count_text, counted, money_text

LEVELS = {"alarm": "costs time", "hint": "worth checking", "fine": "healthy"}
NO_LEARNING = ("loss-at-chance", "loss-rises")
STATES = {"finished": "finished", "unfinished": "not finished", "running": "running", "unknown": "state unknown"}


def header(record: RunRecord) -> Safe:
    """Show the run's name, its subject, and its state."""
    plan = record.plan
    facts = []
    if plan is not None:
        ranks = plan.dims.world_size
        facts.append(f"{plan.strategy} on {counted(ranks, 'rank')} ({plan.device})")
        facts.append(plan.precision)
    facts.append(f"{record.figures.steps:,} steps")
    badge = el("span", STATES[record.state], class_=f"badge {record.state}")
    return el(
        "header",
        el("div", el("span", "Shardwise", class_="brand"), el("button", "dark page", id="theme", type="button")),
        el("h1", record.name, " ", badge),
        el("p", " · ".join(facts), class_="lead"),
        el("p", f"{_sentence(record.state_text)} Report of {record.made_at}, {record.made_by}.", class_="soft"),
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def verdict(record: RunRecord) -> Safe:
    """Show what the run loses time to; then the average step's parts."""
    timing = record.timing
    cards = [_finding(finding) for finding in record.findings or ()]
    if not cards:
        cards = [el("p", f"No verdict: {_no_verdict(record)}.", class_="none")]
    if timing is None:
        return section("verdict", "Verdict", *cards)
    split = [el("h3", "Where an average step goes"), el("p", _split_sentence(timing)), _split_bar(timing)]
    split += [el("p", _step_times(timing), class_="soft")]
    return section("verdict", "Verdict", *cards, *split)


def _no_verdict(record: RunRecord) -> str:
    """Explain why there are no findings: not computed, or too little data."""
    if record.findings is None:
        return "no diagnosis was made for this run"
    steps = record.figures.steps if record.timing is None else record.timing.steps
    return f"{steps} {'step is' if steps == 1 else 'steps are'} too few to judge what this run loses time to"


def _finding(finding: Finding) -> Safe:
    costs = []
    if finding.seconds is not None:
        share = "" if finding.share is None else f" ({percent(finding.share)})"
        costs.append(f"{milliseconds(finding.seconds)} of a step{share}")
    if finding.money is not None:
        costs.append(f"{money_text(finding.money)} an hour")
    if finding.rank is not None:
        costs.append(f"rank {finding.rank}")
    evidence = el("ul", *(el("li", line) for line in finding.evidence)) if finding.evidence else None
    return el(
        "article",
        el(
            "p",
            el("span", "does not learn" if finding.kind in NO_LEARNING else LEVELS[finding.level], class_="level"),
            " ".join(["", *costs[:0]]),
            _costs(costs),
            class_="top",
        ),
        el("h3", finding.text),
        evidence,
        el("p", el("b", "Fix: "), finding.fix, class_="fix") if finding.fix else None,
        class_=f"finding {finding.level}",
    )


def _costs(costs: list[str]) -> Safe | None:
    return el("span", " · ".join(costs), class_="costs") if costs else None


def _split_sentence(timing: Timing) -> str:
    parts = [f"{percent(seconds / timing.step_s)} {name}" for name, seconds in families(timing) if timing.step_s]
    waited = 0.0 if timing.cpu_wait_s is None else timing.cpu_wait_s.mean_s
    text = f"Of an average step of {milliseconds(timing.step_s)}: {', '.join(parts)}."
    if timing.step_s and waited >= HINT * timing.step_s:
        text += (
            f" For {milliseconds(waited)} of it ({percent(waited / timing.step_s)}) a rank was ready to run and had no "
            "core; this time counts as the part in which it waited, so not all that is called computing is."
        )
    return text


def _step_times(timing: Timing) -> str:
    """Say which step time of the page is which."""
    full = timing.step_s + sum(timing.between_s.values())
    text = (
        f"A step has several times on this page: {milliseconds(timing.median_step_s)} is the median (key figures), "
        f"{milliseconds(timing.step_s)} the mean"
    )
    if full > timing.step_s:
        text += f", {milliseconds(full)} the mean with the checkpoints and evaluations between steps (findings)"
    counted_steps = f"{counted(timing.steps, 'step')} after {timing.warm_up} of warm-up"
    return f"{text}; all over {counted_steps}."


def _split_bar(timing: Timing) -> Safe:
    """Draw one bar for a step, and the meaning of its colours with their shares."""
    known = [part for part in ordered(timing.parts) if timing.seconds(part) > 0]
    total = sum(timing.seconds(part) for part in known) or 1.0
    pieces = []
    for part in known:
        style = f"width:{timing.seconds(part) / total * 100:.3f}%;background:var(--{colour(part)})"
        pieces.append(el("span", style=style, title=f"{words(part)}: {milliseconds(timing.seconds(part))}"))
    keys = [(colour(part), joined([f"{words(part)} ", el("b", percent(timing.share(part)))])) for part in known]
    return joined([el("div", *pieces, class_="split", aria_hidden="true"), colour_keys(keys)])


def missing(record: RunRecord) -> Safe | None:
    """List what the folder lacks; nothing if it is complete."""
    if not record.missing:
        return None
    lines = (el("li", line) for line in record.missing)
    return el("section", el("h2", "Missing from this report"), el("ul", *lines), class_="notice", id="missing")


def _heldout_tile(figures: Figures) -> tuple[str, str, str]:
    """Return the tile of the held-out result: bits per byte, or the accuracy and loss of labels."""
    found = dict(figures.heldout)
    if not found:
        return "held out", fixed(figures.heldout_bits_per_byte), "bits per byte"
    loss = fixed(found.get("loss"))
    return (
        ("held out", percent(found["accuracy"]), f"right, loss {loss}")
        if "accuracy" in found
        else ("held out", loss, "loss")
    )


def key_figures(record: RunRecord) -> Safe:
    """Show tiles: a large number, and its comparison below it."""
    f = record.figures
    ranks = None if record.plan is None else record.plan.dims.world_size
    rate, noun = (f.tokens_per_s, "tokens") if f.samples_per_s is None else (f.samples_per_s, "samples")
    each = None if rate is None or not ranks else rate / ranks
    share = None if not f.tokens or f.labels is None else f.labels / f.tokens
    trained = "" if share is None or share >= 1 else f", {percent(share)} with a loss,"
    tiles = [
        ("loss", fixed(f.last_loss), "" if f.first_loss is None else f"from {fixed(f.first_loss)} at the first step"),
        _heldout_tile(f),
        ("throughput", count_text(rate), f"{noun}/s, {count_text(each)} a device" if each else f"{noun}/s"),
        ("median step", milliseconds(f.step_s), _against(f.step_s, f.step_predicted_s, milliseconds)),
        ("MFU", percent(f.mfu), _mfu_note(record)),
        ("peak memory", size(f.peak_bytes), _against(f.peak_bytes, f.peak_predicted_bytes, size)),
        ("cost", money_text(f.cost), _cost_note(record)),
        ("trained on", count_text(f.tokens), f"tokens{trained} in {span(f.step_seconds)} of steps"),
    ]
    boxes = (
        el(
            "div",
            el("span", name, class_="name"),
            el("span", value, class_="value unknown" if value == UNKNOWN else "value"),
            el("span", note, class_="note"),
            class_="tile",
        )
        for name, value, note in tiles
    )
    return section("key-figures", "Key figures", el("div", *boxes, class_="tiles"))


def _against(found: float | None, planned: float | None, text: Any) -> str:
    if planned is None:
        return "not predicted"
    ratio = "" if found is None else f", {found / planned:.2f} × that"
    return f"predicted {text(planned)}{ratio}"


def _mfu_note(record: RunRecord) -> str:
    f = record.figures
    achieved = "" if f.flops_per_s is None else f"{rate_text(f.flops_per_s)} a device; "
    if f.mfu is None:
        return f"{achieved}the device's peak is not known"
    return f"{achieved}predicted {percent(f.mfu_predicted)}" if f.mfu_predicted is not None else achieved.rstrip("; ")


def _cost_note(record: RunRecord) -> str:
    f = record.figures
    hours = "device hours unknown" if f.device_hours is None else f"{number(f.device_hours, 3)} device hours"
    if f.price_per_device_hour is None:
        return f"no price known; {hours}"
    return f"{hours} at {money_text(f.price_per_device_hour)}"


def loss(record: RunRecord, drawn: set[str]) -> Safe:
    """Show training loss and held-out bits per byte."""
    series, f = record.series, record.figures
    rows = [
        (
            f"{series.step[i]:,}",
            number(series.loss[i], 5),
            number(series.learning_rate[i], 3),
            number(series.grad_norm[i], 3),
        )
        for i in sampled(len(series.step))
    ]
    numbers = table(("step", "loss", "learning rate", "gradient norm"), rows, numbers=range(1, 4)) if rows else None
    each = f" A point is the mean of {series.lines_per_row} logged steps." if series.lines_per_row > 1 else ""
    parts: list[Safe] = []
    if rows:
        text = f"Training loss, {fixed(f.first_loss)} at first and {fixed(f.last_loss)} at last.{each}"
        parts.append(chart("loss", text, numbers, drawn="loss" in drawn))
    else:
        parts.append(el("p", "No step was logged.", class_="none"))
    if len(record.evaluations) > 1:
        cells = [(f"{e.step:,}", number(e.heldout_bits_per_byte, 5)) for e in record.evaluations]
        numbers = table(("step", "bits per byte"), cells, numbers=(1,))
        text = f"Held-out bits per byte, {fixed(record.evaluations[-1].heldout_bits_per_byte)} at last."
        parts.append(chart("heldout", text, numbers, drawn="heldout" in drawn))
    elif record.evaluations:
        one = record.evaluations[0]
        parts.append(el("p", f"Held out after step {one.step:,}: {fixed(one.heldout_bits_per_byte)} bits per byte."))
    return section("loss-section", "Loss", *parts)


def throughput(record: RunRecord, drawn: set[str]) -> Safe | None:
    """Show tokens per second over the run, and its checkpoints."""
    series, f = record.series, record.figures
    if not series.step:
        return None
    rows = [
        (f"{series.step[i]:,}", count_text(series.tokens_per_s[i]), milliseconds(series.step_time_s[i]))
        for i in sampled(len(series.step))
    ]
    numbers = table(("step", "tokens/s", "step time"), rows, numbers=(1, 2))
    marks = " Triangles are checkpoints, whose time is not in it." if record.saves else ""
    text = f"Tokens a second of all devices together; the run's own figure is {count_text(f.tokens_per_s)}.{marks}"
    shown = [chart("throughput", text, numbers, drawn="throughput" in drawn)]
    if record.utilisation is not None:
        lines = [el("li", line) for line in utilisation_lines(record.utilisation)]
        shown += [el("h3", "How much of the devices is used"), el("ul", *lines)] if lines else []
    return section("throughput", "Throughput", *shown)
