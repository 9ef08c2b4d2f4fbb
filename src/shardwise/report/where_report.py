"""Answers over several clusters: ``plan --where`` by money and time, and several ``--cluster`` side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

from shardwise.cost.price import price_sources
from shardwise.cost.price_catalogue import READ_ON
from shardwise.hardware.cluster import ClusterSpec
from shardwise.report.plan_json import Facts, PlanDocument
from shardwise.search.candidate import Candidate
from shardwise.search.where import Offered, SpotRuns
from shardwise.units import bytes_text, hours_text, listed, money_text, number_text, seconds_text

ROWS = 12
OTHER_PRICES = f"plan --where takes SkyPilot's catalogue, as read on {READ_ON}, whose prices are others"
PLANNED = "◇"  # of a plan that this version does not run
GOOD, BAD = "[green]✓[/]", "[red]✗[/]"


class OfferEntry(Facts):
    """One way to pay for the run at one place; unknown is null."""

    place: str
    gpu: str
    nodes: int
    devices_per_node: int
    paid: str
    strategy: str | None
    step_time_s: float | None
    hours: float | None = Field(description="of spot with the expected restarts, where their rate is given")
    dollars: float | None
    why_not: str = Field(description="empty where it would do")
    break_even_interruptions_per_day: float | None = Field(description="of one instance: spot costs as much from there")


class WhereDocument(Facts):
    """Full answer of ``--where``; offers that would do come first, the cheapest before the fastest."""

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    model: str
    tokens: float
    prices: str
    answer: list[str]
    offers: list[OfferEntry]
    notes: list[str]


class ComparedDocument(Facts):
    """Answers for several clusters, in the order of the command line."""

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    clusters: list[PlanDocument]


def print_offers(offers: Sequence[Offered], notes: Sequence[str], console: Console) -> None:
    """Print the sentence, the cheapest offers, how many others there are and why not, and what is assumed."""
    for line in where_answer(offers):
        console.print(line, markup=False)
    console.print()
    table = _columns("", "where", "GPUs", "plan", "step", "hours", "paid", "cost", "not")
    for offer in [one for one in offers if one.best is not None][:ROWS]:
        table.add_row(*_offer_row(offer, best=offer is offers[0] and not offer.why_not))
    console.print(table)
    shown = sum(1 for one in offers if one.best is not None)
    if shown > ROWS:
        console.print(f"{shown - ROWS} more in --json")
    reasons = Counter(one.why_not for one in offers if one.why_not)
    if reasons:
        console.print("not: " + ", ".join(f"{reason} ({number})" for reason, number in reasons.items()), markup=False)
    for note in notes:
        console.print(note, markup=False)


def where_answer(offers: Sequence[Offered]) -> list[str]:
    """Say which offer is the cheapest, which the fastest, and which the cheapest without interruptions."""
    good = [offer for offer in offers if not offer.why_not]
    if not good:
        return ["No offer does what was asked."]
    lines = [f"Cheapest: {_offer_text(good[0])}."]
    steady = next((offer for offer in good if offer.kind != "spot"), None)
    if steady is not None and steady is not good[0]:
        lines.append(f"Cheapest that is not interrupted: {_offer_text(steady)}.")
    fastest = min(good, key=lambda offer: (offer.hours or 0.0, offer.dollars or 0.0))
    if fastest is not good[0]:
        lines.append(f"Fastest: {_offer_text(fastest)}.")
    return lines


def _offer_text(offer: Offered) -> str:
    assert offer.best is not None
    cluster = offer.place.cluster
    even = (
        ""
        if offer.break_even is None
        else f", as cheap as on demand at {number_text(offer.break_even)} interruptions a day"
    )
    return (
        f"{offer.place.label} ({cluster.world_size} × {cluster.device_name}) with {offer.best.plan.strategy}, "
        f"{offer.kind}: {money_text(offer.dollars)} in {hours_text(offer.hours)}{even}"
    )


def where_notes(source: str, runs: SpotRuns, unknown: Sequence[str], *, nodes: bool) -> list[str]:
    """Say what the prices are and what is assumed."""
    notes = [
        f"prices: {source}; dollars an hour, without tax, storage and traffic",
        "plan --cluster takes others, the hardware table's (shardwise plan --list gpus)",
    ]
    each = f"a save every {runs.save_minutes:g} minutes and {runs.restart_minutes:g} minutes to restart"
    if runs.interruptions_per_day is None:
        notes.append(f"spot is priced as if never interrupted; break-even rates assume {each}")
    else:
        rate = f"{runs.interruptions_per_day:g} interruptions a day of each instance"
        notes.append(f"spot runs are longer by expected restarts: {rate}, {each}")
    if nodes:
        notes.append(
            "several instances are planned with the network of the GPU's typical node, which theirs may not be, and "
            "left out where that is unknown"
        )
    if unknown:
        notes.append(f"left out, because the hardware table lacks them: {listed(list(unknown))}")
    return notes


def _offer_row(offer: Offered, *, best: bool) -> list[str]:
    cluster, plan = offer.place.cluster, offer.best
    assert plan is not None
    mark = "[bold green]▶[/]" if best else BAD if offer.why_not else GOOD
    return [
        mark,
        offer.place.label,
        f"{cluster.world_size} × {cluster.device_name}",
        plan.plan.strategy + ("" if plan.runnable else f" {PLANNED}"),
        seconds_text(plan.time.step_s) if plan.time else "unknown",
        number_text(offer.hours),
        offer.kind,
        money_text(offer.dollars),
        offer.why_not,
    ]


def where_document(
    model: str, tokens: float, source: str, offers: Sequence[Offered], notes: Sequence[str]
) -> WhereDocument:
    """Build the document."""
    return WhereDocument(
        model=model,
        tokens=tokens,
        prices=source,
        answer=where_answer(offers),
        offers=[_entry(offer) for offer in offers],
        notes=list(notes),
    )


def _entry(offer: Offered) -> OfferEntry:
    cluster, best = offer.place.cluster, offer.best
    return OfferEntry(
        place=offer.place.label,
        gpu=cluster.device_name,
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        paid=offer.kind,
        strategy=None if best is None else best.plan.strategy,
        step_time_s=None if best is None or best.time is None else best.time.step_s,
        hours=offer.hours,
        dollars=offer.dollars,
        why_not=offer.why_not,
        break_even_interruptions_per_day=offer.break_even,
    )


def print_compared(
    names: Sequence[str], found: Sequence[Candidate | None], notes: Sequence[str], console: Console
) -> None:
    """Print the best plan of each cluster, one row each, which is fastest and cheapest, and ``notes`` below."""
    timed = [n for n, best in enumerate(found) if best is not None and best.time is not None]
    fastest = min(timed, key=lambda n: _step_s(found[n]), default=None)
    priced = [n for n in timed if _cost(found[n]) is not None]
    cheapest = min(priced, key=lambda n: _cost(found[n]) or 0.0, default=None)
    if fastest is not None:
        console.print(f"Fastest: {names[fastest]}, {seconds_text(_step_s(found[fastest]))} a step.", markup=False)
    if cheapest is not None:
        console.print(f"Cheapest: {names[cheapest]}, {money_text(_cost(found[cheapest]))} in total.", markup=False)
    without = [name for name, best in zip(names, found, strict=True) if best is None]
    if without:
        console.print(
            f"Nothing fits {listed(without)}: shardwise plan with that cluster alone says what would.", markup=False
        )
    console.print()
    table = _columns("", "cluster", "plan", "batch", "memory", "step", "MFU", "hours", "cost")
    for number, (name, best) in enumerate(zip(names, found, strict=True)):
        table.add_row(*_compared_row(name, best, first=number == fastest))
    console.print(table)
    for note in notes:
        console.print(note, markup=False)


def compared_notes(
    names: Sequence[str], clusters: Sequence[ClusterSpec], found: Sequence[Candidate | None], *, tokens: bool
) -> list[str]:
    """Say what is missing for hours and costs, and where the prices are from.

    ``tokens`` says whether the length of the training is known, or has no effect on the model.
    """
    rows = [one for one in zip(names, clusters, found, strict=True) if one[2] is not None and one[2].time is not None]
    without = [name for name, cluster, _ in rows if cluster.price_per_device_hour is None]
    notes = []
    if rows and not tokens:
        also = f", and costs on {listed(without)} a price (--price)" if without else ""
        notes.append(f"hours need --tokens{also}" if also else "hours and costs need --tokens")
    elif without:
        notes.append(f"costs on {listed(without)} need a price (--price)")
    tabled = [one.gpu for _, one, _ in rows if one.gpu and one.price_per_device_hour == one.gpu.price_per_hour]
    if tokens and (source := price_sources(tabled)):
        notes.append(f"prices: {source}; {OTHER_PRICES}")
    return notes


def _compared_row(name: str, best: Candidate | None, *, first: bool) -> list[str]:
    if best is None:
        return [BAD, name, "nothing fits", *[""] * 6]
    mark = "[bold green]▶[/]" if first else GOOD if best.runnable else PLANNED
    return [
        mark,
        name,
        best.plan.strategy,
        f"{best.plan.micro_batch}×{best.plan.grad_accum}",
        bytes_text(best.memory.device_bytes),
        "unknown" if best.time is None else seconds_text(best.time.step_s),
        "–" if best.time is None or best.time.mfu is None else f"{best.time.mfu:.0%}",
        "–" if best.hours is None else number_text(best.hours),
        "–" if best.cost is None else money_text(best.cost),
    ]


def _step_s(best: Candidate | None) -> float:
    return float("inf") if best is None or best.time is None else best.time.step_s


def _cost(best: Candidate | None) -> float | None:
    return None if best is None else best.cost


def _columns(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < 3 else "right", no_wrap=True)
    return table
