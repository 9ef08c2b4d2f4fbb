"""Shardwise: train a PyTorch model on the GPUs you have, with a receipt for every claim."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.cost.memory.estimate import Estimate as Estimate
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.hardware.cluster import ClusterSpec as ClusterSpec
    from shardwise.measure.state import Measurement as Measurement
    from shardwise.model.facts import ModelSpec as ModelSpec
    from shardwise.observation.expectation import Expectation as Expectation
    from shardwise.observation.gradient_check import check_gradients as check_gradients
    from shardwise.observation.observer import observe as observe
    from shardwise.observation.saved_weights import check_saved as check_saved
    from shardwise.plan.dims import ParallelDims as ParallelDims
    from shardwise.plan.plan import Plan as Plan
    from shardwise.plan.router_terms import RouterTerms as RouterTerms
    from shardwise.plan.workload import Workload as Workload
    from shardwise.receipts.receipt import Receipt as Receipt
    from shardwise.run.start import start as start
    from shardwise.train.loss import token_loss_sum as token_loss_sum
    from shardwise.train.session import Session as Session
    from shardwise.watch.watched_loop import watch_loop as watch_loop

_HOMES = {
    "check_gradients": "shardwise.observation.gradient_check",
    "check_saved": "shardwise.observation.saved_weights",
    "ClusterSpec": "shardwise.hardware.cluster",
    "Expectation": "shardwise.observation.expectation",
    "Estimate": "shardwise.cost.memory.estimate",
    "Measurement": "shardwise.measure.state",
    "ModelSpec": "shardwise.model.facts",
    "RouterTerms": "shardwise.plan.router_terms",
    "Receipt": "shardwise.receipts.receipt",
    "Workload": "shardwise.plan.workload",
    "Session": "shardwise.train.session",
    "observe": "shardwise.observation.observer",
    "token_loss_sum": "shardwise.train.loss",
    "start": "shardwise.run.start",
    "watch_loop": "shardwise.watch.watched_loop",
    "ParallelDims": "shardwise.plan.dims",
    "Plan": "shardwise.plan.plan",
    "ShardwiseError": "shardwise.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``shardwise --help`` never loads torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
