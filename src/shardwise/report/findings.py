"""Findings for people, most expensive first: evidence, cost and fix of each lost time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from shardwise.diagnosis.finding import Finding

_MARKS = {"alarm": "[bold red]alarm[/]", "hint": "[yellow]hint[/]", "fine": "[green]fine[/]"}


def print_findings(findings: Sequence[Finding], console: Console, *, nothing: str = "") -> None:
    """Print findings.

    ``nothing`` is printed if there are none (`shardwise.diagnosis.diagnose.why_nothing`).
    """
    if not findings:
        if nothing:
            console.print(escape(nothing))
        return
    for finding in findings:
        for line in lines_of(finding):
            console.print(line, soft_wrap=True)


def lines_of(finding: Finding) -> list[str]:
    """Format one finding as rich's markup: the sentence, its evidence, its cost, and the fix."""
    text = escape(finding.text)
    lines = [f"{_MARKS[finding.level]}  {f'[bold]{text}[/]' if finding.level == 'alarm' else text}"]
    lines += [f"       [dim]{escape(line)}[/]" for line in finding.evidence]
    if finding.money is not None:
        lines.append(f"       cost: {money_text(finding.money)} an hour, of all devices")
    if finding.fix:
        lines.append(f"       fix: {escape(finding.fix)}")
    return lines


def money_text(dollars: float) -> str:
    """Format ``$12.40``, and ``$0.004`` if cents are too coarse."""
    return f"${dollars:,.2f}" if dollars >= 0.1 else f"${dollars:.3f}"
