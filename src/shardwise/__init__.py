"""Shardwise: the simplest way to train a PyTorch model on the GPUs you have, with a receipt for every claim."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.cli.own_loop import start as start
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.plan.dims import ParallelDims as ParallelDims
    from shardwise.plan.plan import Plan as Plan
    from shardwise.train.session import Session as Session

_HOMES = {
    "Session": "shardwise.train.session",
    "start": "shardwise.cli.own_loop",
    "ParallelDims": "shardwise.plan.dims",
    "Plan": "shardwise.plan.plan",
    "ShardwiseError": "shardwise.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that ``shardwise --help`` never loads torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
