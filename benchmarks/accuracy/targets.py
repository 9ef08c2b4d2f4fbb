"""What the accuracy report counts: summaries of errors, what a choice costs, targets and whether they are met."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Document = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
NEEDED = (
    "published_memory",
    "published_speed",
    "left_out",
    "held_back",
    "kernels",
    "collectives",
    "cpu_peak",
    "persistent",
    "planner_speed",
)
OPTIONAL = ("estimate_cpu", "recorded")
ALIKE = ("allocated", "active", "reserved")  # kinds that the allocator itself counts
NOISE = 1e-3  # errors below it have no sign
CHANCE = 0.05  # of a sign test, below which a sign is systematic
GIB = 1024**3
MARKS = {True: "pass", False: "MISS", None: "–"}
PEAKS = {"cpu_peak": "rehearsal of `--prove`", "estimate_cpu": "estimate of `plan` and `train`"}


@dataclass(frozen=True)
class Errors:
    """Summary of relative errors, predicted / measured − 1; ``bias`` is the median with its sign."""

    rows: int
    median: float
    p90: float
    worst: float
    bias: float

    @staticmethod
    def of(errors: Iterable[float]) -> Errors | None:
        """Summarise; ``None`` without errors. ``worst`` keeps its sign."""
        found = list(errors)
        if not found:
            return None
        size = [abs(error) for error in found]
        return Errors(
            len(found), statistics.median(size), quantile(size, 0.9), max(found, key=abs), statistics.median(found)
        )


@dataclass(frozen=True)
class Target:
    """What was aimed at, what was found, and whether it is enough; ``ok`` is None where there is nothing to say."""

    what: str
    aim: str
    found: str
    ok: bool | None


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which ``share`` of them lie, between neighbours by straight line."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def sign_chance(errors: Iterable[float]) -> float:
    """Two-sided sign test: how likely so uneven a split of signs would be by chance; errors below `NOISE` are out."""
    signs = [error > 0 for error in errors if abs(error) > NOISE]
    few = min(sum(signs), len(signs) - sum(signs))
    return min(1.0, 2 * sum(math.comb(len(signs), k) for k in range(few + 1)) / 2 ** len(signs))


def worst_first(rows: Iterable[Document], key: str = "error") -> list[Document]:
    """Rows by how far prediction and measurement are apart as a ratio, over and under alike; those without last."""

    def far(row: Document) -> float:
        return -abs(math.log1p(row[key])) if row.get(key) is not None and row[key] > -1 else math.inf

    return sorted(rows, key=far)


def choose(members: Sequence[Mapping[str, Any]]) -> Document:
    """One group of plans for the same work: what each way of choosing costs over the best, as time / best − 1.

    ``random`` is the mean over the plans, which is all that a constant MFU can do: it gives them one time.
    """
    best = min(one["measured_s"] for one in members)
    ways = {"model": "predicted_s", "untold": "untold_s", "rule": "rule"}
    by = {name: min(members, key=lambda one, key=key: one[key]) for name, key in ways.items()}  # type: ignore[misc]
    return {
        "plans": len(members),
        "best_s": best,
        **{name: one["measured_s"] / best - 1 for name, one in by.items()},
        "random": statistics.fmean(one["measured_s"] for one in members) / best - 1,
        "chosen": by["model"]["label"],
        "best": min(members, key=lambda one: one["measured_s"])["label"],
    }


def read_results(folder: Path = RESULTS) -> dict[str, Document]:
    """All documents by name; those of `OPTIONAL` where they are there."""
    names = [*NEEDED, *(name for name in OPTIONAL if (folder / f"{name}.json").exists())]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def part(value: float | None, signed: bool = False) -> str:
    """A share in percent."""
    if value is None:
        return "–"
    return f"{100 * value:+.1f} %" if signed and round(value, 3) else f"{100 * abs(value):.1f} %"


def alike(rows: Iterable[Document], key: str = "error") -> list[float]:
    """Errors of the rows whose source gives what the allocator counts."""
    return [row[key] for row in rows if row["kind"] in ALIKE and row.get(key) is not None]


def verdicts(rows: Sequence[Document], key: str = "fits") -> tuple[list[Document], list[Document], int, int]:
    """OOM rows that are called fits, rows that ran and are called does not fit, and how many of each kind there are."""
    oom = [row for row in rows if row["outcome"] == "oom"]
    ran = [row for row in rows if row["outcome"] == "ran"]
    return [row for row in oom if row[key]], [row for row in ran if row[key] is False], len(oom), len(ran)


def memory_targets(rows: Sequence[Document]) -> list[Target]:
    """Published memory against its targets, told and untold."""
    found = []
    for told, error, fits in (("told", "error", "fits"), ("untold", "untold_error", "untold_fits")):
        errors = Errors.of(alike(rows, error))
        missed, refused, oom, ran = verdicts(rows, fits)
        if errors:
            found.append(
                Target(
                    f"published memory, {told}: median error ({errors.rows} rows)",
                    "≤ 8 %",
                    part(errors.median),
                    errors.median <= 0.08,
                )
            )
        tuned = Errors.of(alike([row for row in rows if is_tuned(row)], error))
        if tuned:
            found.append(
                Target(
                    f"LoRA, QLoRA and offload memory, {told}: median error ({tuned.rows} rows)",
                    "≤ 10 %",
                    part(tuned.median),
                    tuned.median <= 0.1,
                )
            )
        if oom:
            found.append(
                Target(f"published OOM rows called “fits”, {told}", "0", f"{len(missed)} of {oom}", not missed)
            )
        if ran:
            found.append(
                Target(
                    f"rows that ran called “does not fit”, {told}",
                    "≤ 10 %",
                    f"{len(refused)} of {ran} ({part(len(refused) / ran)})",
                    len(refused) <= 0.1 * ran,
                )
            )
    return found


def each_once(rows: Iterable[Document], key: str = "error") -> float | None:
    """The median over sources of the median error of each: no source counts for more because it has more rows."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.get(key) is not None:
            groups[row["source"]].append(abs(row[key]))
    return statistics.median(map(statistics.median, groups.values())) if groups else None


def is_tuned(row: Document) -> bool:
    """Whether adapters were trained, or weights were kept in host memory."""
    return "lora" in row["label"] or "offload" in row["label"]


def is_megatron(row: Document) -> bool:
    """Whether Megatron or what is built on it ran."""
    return any(word in row["framework"] for word in ("Megatron", "NeMo"))


def speed_targets(
    rows: Sequence[Document], groups: Sequence[Document], coverage: Document | None = None
) -> list[Target]:
    """Published step times and choices against their targets."""
    found = []
    for name, key, members in (
        ("told, all rows", "error", list(rows)),
        ("told, without the source that has most", "error", without_largest(rows)),
        ("untold, all rows", "untold_error", list(rows)),
        ("untold, without the source that has most", "untold_error", without_largest(rows)),
    ):
        errors = Errors.of(row[key] for row in members)
        if errors:
            found.append(
                Target(
                    f"step time, {name}: median error ({errors.rows} rows)",
                    "≤ 10 %",
                    part(errors.median),
                    errors.median <= 0.1,
                )
            )
    if coverage is not None:
        words = f"80 % interval, made without the source that is asked: rows in it, mean of {coverage['groups']}"
        found.append(Target(words, "75 to 85 %", part(coverage["mean"]), 0.75 <= coverage["mean"] <= 0.85))
    tables: dict[str, list[Document]] = defaultdict(list)
    for row in rows:
        if is_megatron(row):
            tables["all Megatron-type rows"].append(row)
            tables[row["source"]].append(row)
    against = [(name, "told", "error", members) for name, members in tables.items()]
    against += [(name, "untold", "untold_error", tables[name]) for name in [*tables][:1]]
    for name, told, key, members in against:
        model, null = (statistics.median(abs(row[k]) for row in members) for k in (key, "null_error"))
        found.append(
            Target(
                f"step time against the null model, {told}, {name} ({len(members)} rows)",
                f"≤ half of {part(null)}",
                part(model),
                model <= null / 2,
            )
        )
    found += [
        target for told, key in (("told", "model"), ("untold", "untold")) for target in _regret(groups, told, key)
    ]
    return found


def _regret(groups: Sequence[Document], told: str, key: str) -> list[Target]:
    if not groups:
        return []
    regrets = [group[key] for group in groups]
    figures = (("mean", statistics.fmean(regrets), 0.02), ("p90", quantile(regrets, 0.9), 0.05))
    return [
        Target(
            f"regret of the choice, {told}, {name} of {len(groups)} groups",
            f"≤ {100 * limit:.0f} %",
            part(value),
            value <= limit,
        )
        for name, value, limit in (*figures, ("worst", max(regrets), 0.15))
    ]


def without_largest(rows: Sequence[Document]) -> list[Document]:
    """All but the rows of the source that has most of them."""
    sizes: dict[str, int] = defaultdict(int)
    for row in rows:
        sizes[row["source"]] += 1
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return [row for row in rows if row["source"] != largest]


def peak_targets(name: str, rows: Sequence[Document]) -> list[Target]:
    """Peaks on real CPU ranks against their targets."""
    errors = Errors.of(row["error"] for row in rows)
    if errors is None:
        return []
    signed = [row["error"] for row in rows if abs(row["error"]) > NOISE]
    over, chance = sum(error > 0 for error in signed), sign_chance(row["error"] for row in rows)
    return [
        Target(f"CPU peak, {name}: configurations", "≥ 60", str(errors.rows), errors.rows >= 60),
        Target(f"CPU peak, {name}: median error", "≤ 2 %", f"{100 * errors.median:.2f} %", errors.median <= 0.02),
        Target(f"CPU peak, {name}: worst error", "≤ 8 %", part(errors.worst, True), abs(errors.worst) <= 0.08),
        Target(
            f"CPU peak, {name}: no systematic sign",
            f"chance ≥ {100 * CHANCE:.0f} %",
            f"{over} over, {len(signed) - over} under, chance {chance:.2g}",
            chance >= CHANCE,
        ),
    ]


def each_plan(rows: Iterable[Document], key: str = "error") -> list[float]:
    """Of each plan of a source the median error of its rows, with its sign: releases print the same plan again."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row["label"]].append(row[key])
    return [statistics.median(errors) for errors in groups.values()]


def source_targets(speed_rows: Sequence[Document], left_out: Document, held_back: Document) -> list[Target]:
    """Sources left out of the fit, and the source that is kept apart; GB300's rate is from it."""
    null: dict[str, list[float]] = defaultdict(list)
    for row in speed_rows:
        null[row["source"]].append(abs(row["null_error"]))
    under = [one for one in left_out["rows"] if one["left_out"] < statistics.median(null[one["source"]])]
    number, least = len(left_out["rows"]), math.ceil(2 * len(left_out["rows"]) / 3)
    unseen = [row for row in held_back["rows"] if row["gpu"] != "GB300"]
    errors, stated = Errors.of(each_plan(unseen)), [row for row in held_back["rows"] if row["fits"] is not None]
    refused = [row for row in stated if row["fits"] is False]
    assert errors is not None
    return [
        Target(
            "step time, each source left out: median error",
            "≤ 10 %",
            part(left_out["median"]),
            left_out["median"] <= 0.1,
        ),
        Target(
            "step time, each source left out: sources under the null model",
            f"≥ {least}",
            f"{len(under)} of {number}",
            len(under) >= least,
        ),
        Target(
            f"step time, told, a source kept apart, without GB300: median error of {errors.rows} plans",
            "≤ 10 %",
            part(errors.median),
            errors.median <= 0.1,
        ),
        Target(
            "its rows that ran called “does not fit”, told",
            "≤ 5 %",
            f"{len(refused)} of {len(stated)} ({part(len(refused) / len(stated))})",
            len(refused) <= 0.05 * len(stated),
        ),
    ]


def quantity(found: Document, value: float) -> str:
    """Seconds or GiB, as the figure is."""
    return f"{value:.2f} s" if "processor_s" in found else f"{value / GIB:.2f} GiB"


def planner_targets(document: Document) -> list[Target]:
    """The planner's own speed and memory against their targets."""
    found = []
    for one in document["figures"].values():
        if one["target"] is not None:
            value = quantity(one, one["value"])
            value += f" ({one['processor_s']:.2f} s of CPU)" if "processor_s" in one else ""
            ok = one["value"] <= one["target"]
            found.append(Target(one["what"], f"≤ {quantity(one, one['target'])}", value, ok))
    if "prove_wall_s" not in document["figures"]:
        found.append(Target("`--prove` of a 70B model at 128 ranks", "≤ 60 s", "not measured", None))
    return found


def all_targets(documents: Mapping[str, Document]) -> list[Target]:
    """All targets, in the order of the report."""
    persistent = documents["persistent"]
    equal, all_of = persistent["equal"], persistent["configurations"]
    found = [Target("persistent bytes equal to the byte", "all", f"{equal} of {all_of}", equal == all_of)]
    for name, title in PEAKS.items():
        if name in documents:
            found += peak_targets(title, documents[name]["rows"])
    found += memory_targets(documents["published_memory"]["rows"])
    speed = documents["published_speed"]
    found += speed_targets(speed["rows"], speed["groups"], speed["coverage"])
    found += source_targets(speed["rows"], documents["left_out"], documents["held_back"])
    found += [Target("peaks of one GPU, allocated and reserved: median error", "≤ 3 %", "not measured", None)]
    return found + planner_targets(documents["planner_speed"])
