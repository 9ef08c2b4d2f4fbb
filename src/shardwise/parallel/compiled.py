"""``torch.compile`` on each repeated block, in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.plan.plan import Plan


def apply_compile(blocks: Sequence[nn.Module], plan: Plan) -> None:
    """Compile each block on its own (names and parameters stay); equal blocks share what was compiled."""
    if not plan.compile:
        return
    for block in blocks:
        block.compile()


def check_options(plan: Plan) -> None:
    """Whether the plan's options can be had on its device.

    Raises:
        PlanError: what cannot, and what it needs.
    """
