"""A model whose forward does what goes wrong in real runs, on one rank, at one step."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.models import ByteDecoder

FOREVER_S = 1000.0


class Faulty(nn.Module):
    """Bytes decoder that comes to harm in the forward of step ``step`` on rank ``rank``."""

    def __init__(self, kind: str, rank: int, step: int, mark: str) -> None:
        super().__init__()
        self.inner = ByteDecoder(0.0)
        self.kind, self.rank, self.step, self.mark = kind, rank, step, mark
        self.forwards = 0
        self.groups: list[Any] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled() and dist.is_initialized():
            self.forwards += 1
            mine = dist.get_rank() == self.rank and self.forwards == self.step
            if mine and self.mark:
                Path(self.mark).write_text(str(time.time()))
            getattr(self, f"_{self.kind}")(mine)
        return self.inner(ids)

    def _none(self, mine: bool) -> None: ...

    def _stop(self, mine: bool) -> None:
        if mine:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _kill(self, mine: bool) -> None:
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)

    def _segfault(self, mine: bool) -> None:
        if mine:
            os.kill(os.getpid(), signal.SIGSEGV)

    def _exception(self, mine: bool) -> None:
        if mine:
            raise ValueError("the model came to harm")

    def _exit(self, mine: bool) -> None:
        if mine:
            os._exit(0)

    def _leave(self, mine: bool) -> None:
        if mine:
            sys.exit(0)

    def _sleep(self, mine: bool) -> None:
        if mine:
            time.sleep(FOREVER_S)

    def _spin(self, mine: bool) -> None:
        while mine:
            pass

    def _native(self, mine: bool) -> None:
        if mine:
            ctypes.PyDLL(None).sleep(int(FOREVER_S))  # it holds the interpreter

    def _skip(self, mine: bool) -> None:
        if not mine:
            dist.all_reduce(torch.ones(3))

    def _extra(self, mine: bool) -> None:
        if mine:
            dist.all_reduce(torch.ones(3))

    def _shape(self, mine: bool) -> None:
        dist.all_reduce(torch.ones(5 if mine else 3))

    def _collective(self, mine: bool) -> None:
        if mine:
            dist.all_gather([torch.ones(3) for _ in range(dist.get_world_size())], torch.ones(3))
        else:
            dist.all_reduce(torch.ones(3))

    def _order(self, mine: bool) -> None:
        if not self.groups:
            self.groups = [dist.new_group(), dist.new_group()]
        for group in reversed(self.groups) if mine else self.groups:
            dist.all_reduce(torch.ones(3), group=group)

    def _slow_first(self, mine: bool) -> None:
        if mine:
            time.sleep(3.0)

    def _disk(self, mine: bool) -> None:
        """The disk of the checkpoints is full already."""

    def _cut(self, mine: bool) -> None:
        """Somebody cuts a link when the mark is there; before, the monitors have time to meet."""
        if self.forwards == self.step - 1:
            time.sleep(6.0)

    def _memory(self, mine: bool) -> None:
        """Take memory until the kernel ends this process."""
        kept = []
        while mine:
            kept.append(bytearray(os.urandom(1 << 16)) * (1 << 10))

    def _slow(self, mine: bool) -> None:
        """From then on ten times as slow as the others' step, and at least so slow that it is none of noise."""
        if dist.get_rank() == self.rank and self.forwards >= self.step:
            time.sleep(0.5)

    def _loader(self, mine: bool) -> None:
        """The next batch never comes."""
        if mine:
            from shardwise.train.data import samples

            for kind in vars(samples).values():
                if isinstance(kind, type) and "batch" in vars(kind):
                    kind.batch = lambda *_: time.sleep(FOREVER_S)  # type: ignore[attr-defined]


def model(kind: str = "none", rank: int = 1, step: int = 6, mark: str = "") -> Faulty:
    """``mark``: a file for the time of the fault."""
    return Faulty(kind, rank, step, mark)
