"""Output of `shardwise doctor`: a table for people, a document for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.doctor.check import Check
from shardwise.doctor.machine_facts import HostFacts
from shardwise.doctor.rank_self_test import RanksTest
from shardwise.hardware.topology import Topology, explain_topology
from shardwise.units import counted

COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red", "unknown": "dim"}
MOST_GPUS = 16
"""A larger matrix is described in words only: it would not fit a terminal."""


def print_doctor(checks: Sequence[Check], facts: HostFacts | None, console: Console) -> None:
    """Print the machine, its GPUs' matrix, every check with its fix, and the summary."""
    if facts is not None:
        system = f"{facts.system} {facts.kernel}, Python {facts.python}, torch {facts.versions.get('torch', 'unknown')}"
        console.print(f"{facts.host}: {system}; looked at for {counted(facts.ranks, 'rank')}", markup=False)
        if facts.topology is not None and len(facts.topology.paths) > 1:
            print_topology(facts.topology, console)
        console.print()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    several = len({check.host for check in checks if check.host}) > 1
    for check in checks:
        lines = [escape(check.text)]
        if check.level in ("warning", "error") and check.name != "topology":  # printed once, above
            lines += [f"[dim]{escape(line)}[/]" for line in check.evidence if line not in check.text]
        if check.fix:
            lines.append(f"[cyan]fix:[/] {escape(check.fix)}")
        name = f"{check.host}: {check.name}" if several and check.host else check.name
        table.add_row(f"[{COLOURS[check.level]}]{check.level}[/]", escape(name), "\n".join(lines))
    console.print(table)
    console.print()
    console.print(summary(checks), markup=False)


def print_topology(topology: Topology, console: Console) -> None:
    """Print the matrix of paths between the GPUs, and its legend."""
    size = len(topology.paths)
    if size <= MOST_GPUS:
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("")
        for column in range(size):
            table.add_column(f"GPU{column}", justify="right")
        for row, paths in enumerate(topology.paths):
            table.add_row(f"GPU{row}", *paths)
        console.print(table)
    for line in explain_topology(topology):
        console.print(f"  {line}", markup=False)


def summary(checks: Sequence[Check]) -> str:
    """Format ``1 error, 2 warnings, 12 ok``."""
    counts = Counter(check.level for check in checks)
    words = []
    for level, singular in (("error", "error"), ("warning", "warning"), ("unknown", "unknown"), ("ok", "ok")):
        count = counts[level]  # type: ignore[index]
        if count:
            plural = "s" if count > 1 and level in ("error", "warning") else ""
            words.append(f"{count} {singular}{plural}")
    return ", ".join(words)


def to_document(checks: Sequence[Check], facts: HostFacts | None, test: RanksTest | None) -> dict[str, Any]:
    """Build the JSON of `--json`; ``healthy`` is false where a check is an error."""
    counts = Counter(check.level for check in checks)
    topology = None if facts is None or facts.topology is None else explain_topology(facts.topology)
    return {
        "schema": 1,
        "healthy": not counts["error"],
        "counts": {level: counts[level] for level in COLOURS},  # type: ignore[index]
        "checks": [check.model_dump(mode="json") for check in checks],
        "machine": None if facts is None else facts.model_dump(mode="json", exclude={"topology"}),
        "topology": topology,
        "ranks": None if test is None else test.model_dump(mode="json"),
    }
