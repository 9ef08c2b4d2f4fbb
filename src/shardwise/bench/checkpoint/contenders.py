"""Contenders of ``bench checkpoint``: ways to save a training state, raw writes and ours.

Each writes the same model and optimizer under the same strategy, durably, and can read back its files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.format import hash_text, hasher, newest
from shardwise.checkpoint.layout import engine_of, local_of, slots_of
from shardwise.checkpoint.load import load_checkpoint
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage.direct_io import BLOCK, aligned
from shardwise.checkpoint.storage.local_storage import CHUNK, RangeReader
from shardwise.errors import CheckpointError
from shardwise.plan.plan import Plan

RAW, RAW_DIRECT, OURS, OURS_ASYNC = "raw write", "raw direct", "ours", "ours async"
KEPT = 1_000_000  # nothing is pruned during the timing: the bench removes the files of every contender alike

Digests = dict[str, str]


class Contender(Protocol):
    """Way to save a training state. All methods are collective.

    Attributes:
        folder: its output folder; the bench empties it between two saves.
        seconds: from the call of `save` until the last one was durable, on this rank; known after `finish`.
    """

    name: str
    folder: Path
    seconds: float

    def save(self, number: int) -> None:
        """Save into `folder`, for the ``number``-th time; returns when the training may continue."""

    def before_update(self) -> None:
        """Handle the moment before the optimizer changes the weights."""

    def finish(self) -> None:
        """Wait until the last save is durable."""

    def restored(self) -> Digests:
        """Digests of this rank's tensors, read back from `folder`."""

    def close(self) -> None:
        """Release all resources."""


class Raw:
    """Raw disk write: one file for each rank, from an existing buffer, then fsync.

    It goes through the system's page cache, as any program's writes, or past it if ``direct``.
    """

    def __init__(self, folder: Path, num_bytes: int, *, direct: bool) -> None:
        self.name = RAW_DIRECT if direct else RAW
        self.folder = folder
        self.seconds = 0.0
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        self._buffer = aligned(-(-num_bytes // BLOCK) * BLOCK)
        self._buffer[:] = np.random.default_rng(dist.get_rank()).integers(0, 256, len(self._buffer), dtype=np.uint8)

    def save(self, number: int) -> None:
        """See `Contender`."""
        begin = time.perf_counter()
        view = self._buffer.data
        handle = os.open(self._file, self._flags, 0o666)
        try:
            done = 0
            while done < len(view):
                done += os.write(handle, view[done : done + CHUNK])
            os.fsync(handle)
        finally:
            os.close(handle)
        self.seconds = time.perf_counter() - begin

    def before_update(self) -> None:
        """Do nothing: no write is in progress."""

    def finish(self) -> None:
        """Do nothing: no write is in progress."""

    def restored(self) -> Digests:
        """Digest of the file; `written` is the expected one."""
        with RangeReader(self._file) as reader:
            return {"raw": tensor_digest(torch.frombuffer(bytearray(reader.read(0, reader.size)), dtype=torch.uint8))}

    def written(self) -> Digests:
        """Digest of the buffer."""
        return {"raw": tensor_digest(torch.from_numpy(self._buffer))}

    def close(self) -> None:
        """Do nothing: the buffer is freed with the object."""

    @property
    def _file(self) -> Path:
        return self.folder / f"rank-{dist.get_rank():05d}"


class Ours:
    """`Saver`, with the settings of ``shardwise train``."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer, plan: Plan, *, background: bool) -> None:
        self.name = OURS_ASYNC if background else OURS
        self.folder = folder
        self.seconds = 0.0
        self.share_bytes = 0
        self._state = (model, optimizer, plan)
        self._saver = Saver(folder, keep=KEPT, async_save=background, guarded=True)
        self._called_s = 0.0

    def save(self, number: int) -> None:
        """See `Contender`."""
        model, optimizer, plan = self._state
        begin = time.perf_counter()
        self._saver.save(number, model=model, optimizer=optimizer, plan=plan, state={})
        self._called_s = time.perf_counter() - begin

    def before_update(self) -> None:
        """See `Contender`."""
        self._saver.before_update()

    def finish(self) -> None:
        """See `Contender`."""
        self._saver.wait()
        report = self._saver.reports[-1]
        self.share_bytes = report.num_bytes
        self.seconds = self._called_s + (report.write_s if report.background else 0.0)

    def restored(self) -> Digests:
        """See `Contender`; the live state was saved afterwards."""
        model, optimizer, _ = self._state
        path = newest(self.folder)
        if path is None:
            raise CheckpointError(f"'{self.folder}' holds no checkpoint")
        load_checkpoint(path, model=model, optimizer=optimizer)
        return live_digests(model, optimizer)

    def close(self) -> None:
        """See `Contender`."""
        self._saver.close()


def live_digests(model: nn.Module, optimizer: Optimizer) -> Digests:
    """Digests of every local tensor of the model and the optimizer."""
    return tensor_digests(live_tensors(model, optimizer))


def live_tensors(model: nn.Module, optimizer: Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield name and tensor of the model's and the optimizer's local tensors."""
    slots = slots_of(model)
    names = {id(slot.tensor): slot.name for slot in slots}
    for slot in slots:
        yield f"model/{slot.name}", slot.tensor
    for parameter, state in engine_of(optimizer).state.items():
        for key, value in state.items():
            yield f"optimizer/{names[id(parameter)]}/{key}", value


def tensor_digests(tensors: Iterable[tuple[str, Any]]) -> Digests:
    """Hash the local part of each tensor."""
    return {name: tensor_digest(local_of(tensor)) for name, tensor in tensors if isinstance(tensor, torch.Tensor)}


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor: dtype, shape and a hash of the bytes."""
    made = hasher()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    made.update(flat.view(torch.uint8).numpy().data)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hash_text(made)}"
