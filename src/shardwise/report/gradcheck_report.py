"""Results of ``shardwise verify``, as a table for people and as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.gradcheck.run import StrategyResult
from shardwise.gradcheck.shrink import Shrunk
from shardwise.train.config import Config
from shardwise.units import count_text, counted

_MARKS = {"verified": "[green]✓[/]", "failed": "[red]✗[/]", "refused": "·"}
_WORDS = {"verified": "verified", "failed": "NOT the gradient of one process", "refused": "not for this model"}


def print_heading(shrunk: Shrunk, seq_len: int, micro_batch: int, config: Config, console: Console) -> None:
    """Print the subject of the check, and what was changed or left out for it."""

    def log(text: str) -> None:
        console.print(text, markup=False)

    log(
        f"model: {count_text(shrunk.num_parameters)} parameters in float64 instead of "
        f"{count_text(shrunk.was_parameters)}, the same structure"
    )
    for line in shrunk.changes:
        log(f"       {line}")
    for line in shrunk.kept:
        log(f"       kept: {line}")
    parallel = config.parallel
    left = [f"precision {parallel.precision}"] if parallel.precision not in ("auto", "fp32") else []
    left += ["compile"] if parallel.compile else []
    left += ["async_tp"] if parallel.async_tp else []
    if left:
        log(f"       left out: {', '.join(left)} (rounding would hide a wrong gradient; receipts of a run check these)")
    log(
        f"batch: micro batch {micro_batch} × {seq_len} tokens of the config's data; a step with samples of all "
        "lengths, and one with full ones"
    )


def print_rows(rows: Sequence[StrategyResult], console: Console) -> None:
    """Print one row for each strategy, and below the table the reasons of failures."""
    table = Table(title="the gradient of one process, in float64", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("strategy", no_wrap=True)
    table.add_column("ranks", justify="right")
    table.add_column("gradient", justify="right", no_wrap=True)
    table.add_column("norm", justify="right", no_wrap=True)
    table.add_column("effects", justify="center")
    table.add_column("fit", justify="center")
    table.add_column("verdict", overflow="fold")
    for row in rows:
        verdict = row.verdict
        table.add_row(
            _MARKS[row.status],
            row.strategy,
            str(row.ranks),
            "" if verdict is None else error_text(verdict.error),
            "" if verdict is None else error_text(verdict.norm_error),
            *(_receipt_mark(row, name) for name in ("effects", "fit")),
            escape(_words(row)),
        )
    console.print(table)
    for row in rows:
        if row.status == "failed":
            _print_failure(row, console)


def _words(row: StrategyResult) -> str:
    if row.status == "failed" and row.verdict is not None and row.verdict.ok:
        return "the gradient is right, a receipt is not"
    return f"{_WORDS[row.status]}{': ' + row.reason if row.reason else ''}"


def _receipt_mark(row: StrategyResult, name: str) -> str:
    receipt = row.receipts.get(name)
    return "" if receipt is None else _MARKS["verified" if receipt.ok else "failed"]


def _print_failure(row: StrategyResult, console: Console) -> None:
    console.print(f"{row.strategy} on {counted(row.ranks, 'rank')}:", markup=False)
    verdict = row.verdict
    if verdict is not None and verdict.first is not None:
        first = verdict.first
        how = "has no gradient" if first.missing else f"is off by {error_text(first.error)} of its largest element"
        times = "" if first.factor is None else f", {first.factor:.6g} × what one process computes"
        more = f"; {verdict.differing} parameters differ" if verdict.differing > 1 else ""
        console.print(f"  first: {first.name} {how}{times}{more}", markup=False)
    for line in row.explanations:
        console.print(f"  {line}", markup=False)


def error_text(value: float) -> str:
    """Format a relative error as ``3e-16``."""
    return "none" if math.isinf(value) else f"{value:.0e}"


def to_document(rows: Sequence[StrategyResult], shrunk: Shrunk, seq_len: int, failure: str | None) -> dict[str, object]:
    """Build the JSON document, schema 1; an infinite error (no gradient) is ``null``."""
    return {
        "schema": 1,
        "verified": failure is None
        and any(row.status == "verified" for row in rows)
        and not any(row.status == "failed" for row in rows),
        "failure": failure,
        "model": {
            "parameters": shrunk.num_parameters,
            "own_parameters": shrunk.was_parameters,
            "changes": list(shrunk.changes),
            "kept": list(shrunk.kept),
            "seq_len": seq_len,
        },
        "rows": [_row(row) for row in rows],
    }


def _row(row: StrategyResult) -> dict[str, object]:
    verdict = row.verdict
    first = None if verdict is None else verdict.first
    return {
        "strategy": row.strategy,
        "ranks": row.ranks,
        "dims": row.dims,
        "status": row.status,
        "reason": row.reason,
        "gradient_error": None if verdict is None else _finite(verdict.error),
        "norm_error": None if verdict is None else _finite(verdict.norm_error),
        "tolerance": None if verdict is None else verdict.tolerance,
        "differing": 0 if verdict is None else verdict.differing,
        "first": None
        if first is None
        else {
            "name": first.name,
            "error": _finite(first.error),
            "factor": first.factor,
            "missing": first.missing,
        },
        "explanations": list(row.explanations),
        "receipts": {name: receipt.to_dict() for name, receipt in row.receipts.items()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
