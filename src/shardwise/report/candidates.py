"""Answer of ``shardwise plan`` for people: candidates, recommendation, batch equation."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.price import Prices, offers
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import Plan
from shardwise.plan.traffic import sent_bytes, traffic_text
from shardwise.plan.workload import Workload
from shardwise.report.plan_sentences import options_text, recompute_text, sentences
from shardwise.search.candidate import Candidate, SearchResult
from shardwise.search.expert_reasons import experts_text
from shardwise.search.explain_plan import memory_arithmetic, time_parts
from shardwise.search.problem import usable_bytes
from shardwise.units import bytes_text, count_text, counted, money_text, seconds_text

ROWS, REASONS = 12, 8
BAR, NARROW_BAR = 16, 10
WIDE = 100  # columns of a terminal
RECOMPUTE = {"none": "–", "selective": "selective", "full": "full"}
MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "?"}
PLANNED = "◇"  # of a plan that this version does not run
AXES = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "pipeline",
}


def print_candidates(profile: ModelProfile, cluster: ClusterSpec, result: SearchResult, console: Console) -> None:
    """Print facts, table, reasons against other strategies, and fixes if nothing fits."""
    print_facts(profile, cluster, console)
    shown = _shown(result)
    _print_options(result, shown, console)
    console.print(_table(shown, result, cluster, console.width))
    left = len(result.candidates) - len(shown)
    console.print(
        f"{counted(result.considered, 'plan')} considered"
        + (f", {left} more {'strategy' if left == 1 else 'strategies'} in --json" if left else "")
        + ("; a bar ends at the device's memory │" if cluster.device_memory_bytes else "")
    )
    if any(not c.runnable for c in shown):
        console.print(f"{PLANNED} planned, but not run by this version (--any recommends it like all others)")
    best = None if result.recommended is None else result.candidates[result.recommended]
    for candidate in [c for c in shown if c is not best][:REASONS]:
        console.print(f"  not {candidate.plan.strategy}: {candidate.reason}", markup=False)


def print_facts(profile: ModelProfile, cluster: ClusterSpec, console: Console) -> None:
    """Print one line for the model, one for the cluster, one for each unknown."""
    frozen = profile.num_parameters - profile.num_trainable
    length = f", {profile.seq_len} token{'s' * (profile.seq_len > 1)} a sample" if profile.seq_len else ""
    console.print(
        f"model: {profile.name}, {count_text(profile.num_parameters)} parameters"
        + (f", {count_text(round(profile.num_active))} of them for one token" if profile.experts else "")
        + (f", {count_text(frozen)} of them frozen" if frozen else "")
        + f", {counted(profile.num_blocks, 'block')}{length}",
        markup=False,
    )
    link = cluster.link.kind if cluster.link else "link unknown"
    nodes = f", {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    inside = f", {link}" if cluster.devices_per_node > 1 and cluster.device != "cpu" else ""
    console.print(
        f"cluster: {cluster.world_size} × {cluster.device_name}, {bytes_text(cluster.device_memory_bytes)} each, "
        f"{bytes_text(usable_bytes(cluster))} usable{nodes}{inside}",
        markup=False,
    )
    for line in profile.unknown:
        console.print(f"unknown: {line}", markup=False, style="yellow")


def _print_options(result: SearchResult, shown: Sequence[Candidate], console: Console) -> None:
    """Print the options that the rows have beside their strategies, and which rows, where not all."""
    if result.optimizer is not None:
        console.print(f"nothing fits with AdamW: planned with {result.optimizer}, whose updates differ", markup=False)
    by_options: dict[str, list[str]] = {}
    for candidate in shown:
        by_options.setdefault(options_text(candidate.plan), []).append(candidate.plan.strategy)
    for options, names in by_options.items():
        if options:
            console.print(f"with: {options}" + (f" ({', '.join(names)})" if len(by_options) > 1 else ""), markup=False)


def _shown(result: SearchResult) -> list[Candidate]:
    """Select rows: the best, the plain strategies, then the next best; in their order."""
    plain = [c for c in result.candidates if not c.plan.dims.splits_model and c.plan.dims.ep == 1]
    first = list(result.candidates[:1])
    wanted = first + [c for c in plain if c not in first]
    wanted += [c for c in result.candidates if c not in wanted]
    kept = wanted[: max(ROWS, len(plain) + 4)]
    return [c for c in result.candidates if any(c is one for one in kept)]


def _table(shown: Sequence[Candidate], result: SearchResult, cluster: ClusterSpec, width: int) -> Table:
    """Build a row per strategy; narrow terminals get a shorter bar and no price."""
    priced = width >= WIDE and any(c.cost is not None for c in shown)
    timed = width >= WIDE and any(c.hours is not None for c in shown)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0) if width < WIDE else (0, 2, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column("strategy", overflow="ellipsis", no_wrap=True)
    for name in ("batch", "recompute"):
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    bars = BAR if width >= WIDE else NARROW_BAR
    table.add_column("device memory" if bars >= BAR else "memory", no_wrap=True, min_width=bars + 1)
    for name, least in (("", 9), ("step", 7), ("MFU", 3)):
        table.add_column(name, justify="right", no_wrap=True, min_width=least)
    unit, per_hour = _length_unit(shown)
    for name in ([unit] if timed else []) + (["cost"] if priced else []):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    limit = cluster.device_memory_bytes
    most = max([limit or 0, *(min(c.memory.device_bytes, 2 * (limit or 1 << 62)) for c in shown)])
    for candidate in shown:
        plan, time = candidate.plan, candidate.time
        best = result.recommended is not None and candidate is result.candidates[result.recommended]
        mark = "[bold green]▶[/]" if best else MARKS[candidate.fits]
        if not candidate.runnable:
            mark = "[bold yellow]▶[/]" + PLANNED if best else MARKS[False] if candidate.fits is False else PLANNED
        row: list[str | Text] = [
            mark,
            f"[bold]{plan.strategy}[/]" if best else plan.strategy,
            f"{plan.micro_batch}×{plan.grad_accum}",
            _recompute(plan),
            bar(candidate.memory, limit, most, bars),
            f"{bytes_text(candidate.memory.device_bytes)}{'+?' if candidate.memory.unknown else ''}",
            seconds_text(time.step_s) if time else "unknown",
            f"{time.mfu:.0%}" if time and time.mfu is not None else "–",
        ]
        row += ["–" if candidate.hours is None else _column(candidate.hours * per_hour)] if timed else []
        row += ["–" if candidate.cost is None else money_text(candidate.cost)] if priced else []
        table.add_row(*row)
    return table


def _recompute(plan: Plan) -> str:
    layers = plan.recompute_layers
    return RECOMPUTE[plan.recompute] if layers is None else f"{RECOMPUTE[plan.recompute]} {layers}"


def bar(memory: Estimate, limit: int | None, most: int, cells: int = BAR) -> Text:
    """Draw a bar of the required memory, with a line at the device's; excess is red."""
    needed = memory.device_bytes
    cell = max(1, most) / cells
    line = None if limit is None else min(cells, round(limit / cell))
    length = min(cells, max(1, round(needed / cell)))
    if line is not None and needed > (limit or 0) and length <= line:
        length = min(cells, line + 1)
    text = Text()
    for place in range(cells + 1):
        if place == line:
            text.append("│", "bold")
        if place < length and place < cells:
            text.append("█", "red" if line is not None and place >= line else "cyan")
        elif place < cells:
            text.append(" ")
    return text


def _column(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _length_unit(shown: Sequence[Candidate]) -> tuple[str, float]:
    """Return the largest unit of which the shortest run takes one, and how many are an hour."""
    least = min((c.hours for c in shown if c.hours is not None), default=0.0)
    units = (("days", 1 / 24), ("hours", 1.0), ("minutes", 60.0))
    return next((unit for unit in units if least * unit[1] >= 1), ("seconds", 3600.0))


def print_recommendation(
    profile: ModelProfile, cluster: ClusterSpec, result: SearchResult, prices: Prices, console: Console
) -> None:
    """Print the recommendation in three sentences and the batch equation; or what would fit."""
    console.print()
    if result.recommended is None:
        console.print(f"[bold red]nothing fits[/] {cluster.world_size} × {escape(cluster.device_name)}. What would:")
        for line in result.advice:
            console.print(f"  {line}", markup=False)
        return
    best = result.candidates[result.recommended]
    for sentence in sentences(best, cluster, result, profile.num_blocks):
        console.print(sentence, markup=False)
    console.print(best.plan.batch_equation(), markup=False)
    for line in result.other_trainings:
        console.print(f"cheaper: {line}", markup=False)
    for offer in () if best.hours is None else offers(best.hours, cluster, prices):
        console.print(f"  {offer.kind:<9} {money_text(offer.dollars):>9}  {offer.assumption}", markup=False)


def print_explanation(
    profile: ModelProfile, cluster: ClusterSpec, best: Candidate, console: Console, workload: Workload
) -> None:
    """Print the arithmetic of one plan: categories with formulas, phases, time parts, traffic."""
    plan, memory, time = best.plan, best.memory, best.time
    recompute = recompute_text(plan, profile.num_blocks)
    console.print(f"plan: {plan.strategy} ({plan.dims}), {plan.precision}, {recompute}", markup=False)
    if options := options_text(plan):
        console.print(f"      with {options}", markup=False)
    console.print(f"      {plan.reason}", markup=False)
    console.print(f"batch: {plan.batch_equation()}", markup=False)
    if routed := experts_text(profile, plan, workload):
        console.print(f"experts: {routed}", markup=False)
    table = Table(title="memory of the fullest device", title_justify="left", title_style="bold", box=None)
    for name in ("category", "bytes", "from"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for name, value, formula in memory_arithmetic(profile, plan, memory, workload.program):
        table.add_row(name, bytes_text(value), escape(formula))
    for name in ("allocated", "reserved", "device"):
        table.add_row(f"[bold]{name}[/]", bytes_text(getattr(memory, name)), _PEAKS[name])
    console.print(table)
    if memory.uses_host or memory.host_bytes:
        away = bytes_text(memory.offloaded_bytes + memory.offloaded_activations)
        console.print(f"host memory of a node: {bytes_text(memory.host_bytes)}; a rank has offloaded {away}")
    for phase in memory.phases:
        console.print(f"  {phase.name:<11} {bytes_text(phase.allocated):>11}  reserved {bytes_text(phase.reserved)}")
    for note in memory.notes:
        console.print(f"  {note}", markup=False)
    if time is None:
        console.print("time: unknown, because the device's or a link's speed is")
    else:
        span = f"{seconds_text(time.low_s)} to {seconds_text(time.high_s)} in 8 of 10 cases"
        console.print(f"time of a step: {seconds_text(time.step_s)} ({span})")
        for part, seconds in time_parts(time):
            console.print(f"  {part:<11} {seconds_text(seconds):>9}  {seconds / time.step_s:.0%}")
        console.print(f"calibration: {time.calibrated or 'none of this machine; published measurements'}", markup=False)
    for axis, sent in sent_bytes(profile, plan, workload.program, per_node=cluster.devices_per_node).items():
        console.print(f"sent in a step, {AXES[axis]}: {bytes_text(sent)} {traffic_text(axis, plan, cluster)}")


_PEAKS = {
    "allocated": "peak of live bytes; the categories do not peak together",
    "reserved": "what the caching allocator takes for them",
    "device": "reserved + context",
}
