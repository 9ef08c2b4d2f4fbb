"""`watch_loop`: the watchdog beside anybody's training loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.distributed.process_group import Ranks, drain_at_exit, join
from shardwise.environment import record_collectives
from shardwise.errors import UserError
from shardwise.watch.rank_watch import RankWatch


@dataclass
class WatchedLoop:
    """A loop that hooks look at; `close` removes them."""

    ranks: Ranks
    device: torch.device
    phase_watchers: list[Callable[[str], None]] = field(default_factory=list)
    at_close: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _in_step: bool = False

    def close(self) -> None:
        """Stop watching: what comes after the loop has no deadline."""
        self.at_close.close()

    def before_forward(self, model: nn.Module, *_: Any) -> None:
        """Begin a step with its first forward."""
        if model.training and not self._in_step:
            self._in_step = True
            self._tell("data")
        self._tell("forward" if model.training else "evaluation")

    def before_update(self, *_: Any) -> None:
        """Begin the optimizer's part."""
        self._tell("optimizer")

    def after_update(self, *_: Any) -> None:
        """End the step."""
        self._in_step = False
        self._tell("other")

    def _tell(self, phase: str) -> None:
        for watcher in self.phase_watchers:
            watcher(phase)


def watch_loop(model: nn.Module, optimizer: Any, output: str | Path = ".") -> WatchedLoop:
    """Watch the ranks of any training loop, and name the rank that the others wait for; see docs/when-it-hangs.md.

    Call it on every rank, after the process group is there and the model is wrapped, before the first step. Hooks tell
    the step and its phase: a forward of ``model`` begins one, a step of ``optimizer`` (of several, the last) ends it.
    Ranks that cannot go on are ended with exit code 3. ``output`` is the folder of ``watch.json``. It ends with the
    process, or at `WatchedLoop.close`; close it before work that one rank does alone for long.

    Raises:
        UserError: there is no process group, or no optimizer with hooks.
    """
    if not dist.is_initialized():
        raise UserError("watch_loop: there is no process group; call it after torch.distributed.init_process_group")
    last: Any = optimizer[-1] if isinstance(optimizer, list | tuple) and optimizer else optimizer
    last = getattr(last, "optimizer", last)  # Accelerate's wrapper
    if not hasattr(last, "register_step_post_hook"):
        raise UserError("watch_loop: optimizer has no step hooks; give torch.optim optimizers, or wrappers around them")
    record_collectives()
    drain_at_exit()  # the loop may destroy its groups itself
    ranks = join("cpu")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    loop = WatchedLoop(ranks, device)
    RankWatch(loop, Path(output), beside=True)
    if ranks.is_main and not _records():
        logging.getLogger("shardwise").warning(
            "watch_loop: torch's flight recorder is off, so no collective is named; set TORCH_FR_BUFFER_SIZE=256 "
            "before the process group is made"
        )
    hooks = [
        model.register_forward_pre_hook(loop.before_forward),
        last.register_step_pre_hook(loop.before_update),
        last.register_step_post_hook(loop.after_update),
    ]
    for hook in hooks:
        loop.at_close.callback(hook.remove)
    return loop


def _records() -> bool:
    """Whether the flight recorder has anything of the collectives that `watch_loop` itself has made."""
    from shardwise.watch.rank_state import collectives

    return bool(collectives())
