"""Receipts and plans as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.receipts.receipt import Receipt


def receipt_table(receipt: Receipt) -> Table:
    """Build one row for each claim: planned, found, and a mark."""
    table = Table(title=f"receipt: {receipt.title}", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("what")
    table.add_column("planned", overflow="fold")
    table.add_column("found", overflow="fold")
    marks = {True: "[green]✓[/]", False: "[red]✗[/]", None: "·"}
    for line in receipt.lines:
        table.add_row(marks[line.ok], escape(line.name), escape(line.planned), escape(line.found))
    return table


def print_receipt(receipt: Receipt, console: Console | None = None) -> None:
    """Print a receipt to standard error, which programs do not parse."""
    (console or Console(stderr=True)).print(receipt_table(receipt))
