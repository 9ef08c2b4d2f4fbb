"""Commands that resume a run: the same again, or under another plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from shardwise.checkpoint.format import saved_steps
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.errors import ShardwiseError
from shardwise.plan.plan import Plan
from shardwise.plan.tensor_types import TYPE_FIELDS
from shardwise.train.config import Config

_REPLACED = ("--strategy", "--plan")


def with_plan(command: Sequence[str], config: Config, plan: Plan) -> str:
    """Return ``command`` with the options of ``plan`` in place of its own."""
    words = list(_without(command, _REPLACED))
    keys = ["micro_batch", *(["grad_accum"] if config.train.grad_accum or config.train.global_batch is None else [])]
    words += ["--strategy", plan.strategy] + [f"train.{key}={getattr(plan, key)}" for key in keys]
    for name in ("recompute", "recompute_layers", "offload_activations", *TYPE_FIELDS, "fp8_emulate"):
        value = getattr(plan, name)
        if value != getattr(config.parallel, name):
            words.append(f"parallel.{name}={'all' if value is None else str(value).lower()}")
    return shlex.join(words)


def _without(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return ``command`` without these options and their values."""
    kept, skips = [], False
    for word in command:
        if not skips and word.partition("=")[0] not in options:
            kept.append(word)
        skips = not skips and word in options
    return kept


def how_to_resume(config: Config, command: Sequence[str]) -> str:
    """Return what is saved, and the command that resumes from it."""
    again = shlex.join(command)
    try:
        steps = saved_steps(folder_of(config.checkpoints))
    except (OSError, ShardwiseError):
        return f"checkpoints are in '{config.checkpoints}'; resume with: {again}"
    if not steps:
        return f"no checkpoint was saved yet; start again with: {again}"
    return f"checkpoints are untouched, the newest is '{steps[0][1]}'; resume with: {again}"
