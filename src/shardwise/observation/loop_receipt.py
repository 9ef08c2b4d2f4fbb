"""Judge the facts of all ranks: one receipt, the same on each rank."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.observation.expectation import Expectation
from shardwise.observation.loop_facts import LoopFacts
from shardwise.observation.rank_lines import rank_lines
from shardwise.observation.setup_lines import UNSTATED, setup_lines
from shardwise.receipts.receipt import Line, Receipt
from shardwise.units import counted


def loop_receipt(expected: Expectation, ranks: Sequence[LoopFacts]) -> Receipt:
    """Return the receipt of ``ranks``, in rank order."""
    planned = expected.source or UNSTATED
    steps = Line(name="expectation", planned=planned, found=f"step 2 of {counted(len(ranks), 'rank')}", ok=None)
    lines = (steps, *setup_lines(expected, ranks), *rank_lines(expected, ranks))
    return Receipt(title="observed loop", lines=lines)
