"""Shardwise: the simplest way to train a PyTorch model on the GPUs you have, with a receipt for every claim."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.cli.own_loop import start as start
    from shardwise.cost.estimate import Estimate as Estimate
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.measure.state import Measurement as Measurement
    from shardwise.plan.dims import ParallelDims as ParallelDims
    from shardwise.plan.plan import Plan as Plan
    from shardwise.spec.cluster import ClusterSpec as ClusterSpec
    from shardwise.spec.model import ModelSpec as ModelSpec
    from shardwise.spec.workload import Workload as Workload
    from shardwise.train.loss import token_loss_sum as token_loss_sum
    from shardwise.train.session import Session as Session
    from shardwise.verify.receipt import Receipt as Receipt

_HOMES = {
    "ClusterSpec": "shardwise.spec.cluster",
    "Estimate": "shardwise.cost.estimate",
    "Measurement": "shardwise.measure.state",
    "ModelSpec": "shardwise.spec.model",
    "Receipt": "shardwise.verify.receipt",
    "Workload": "shardwise.spec.workload",
    "Session": "shardwise.train.session",
    "token_loss_sum": "shardwise.train.loss",
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
