"""Other tools' ways to save a training state, each one as its own users write it, for ``bench checkpoint``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.bench.checkpoint.contenders import Contender, Digests, live_tensors, tensor_digest, tensor_digests
from shardwise.checkpoint.layout import box_of
from shardwise.checkpoint.readers.torch_file import StoredTensor, TorchFile
from shardwise.checkpoint.storage.local_storage import sync_folder
from shardwise.plan.plan import Plan

DCP, DCP_ASYNC, TORCH_SAVE = "dcp", "dcp async", "torch.save"


def peers(
    room: Callable[[str], Path], model: nn.Module, optimizer: Optimizer, plan: Plan
) -> list[Callable[[], Contender]]:
    """Makers of all of them; ``room`` gives each its folder."""
    return [
        lambda: Dcp(room("dcp"), model, optimizer, background=False),
        lambda: Dcp(room("dcp-async"), model, optimizer, background=True),
        lambda: TorchSave(room("torch-save"), model, optimizer, sharded=plan.parsed.shards_parameters),
    ]


class Dcp:
    """``torch.distributed.checkpoint``: ``save``, or ``async_save`` in a thread.

    In the background in the way that stops the training least: the copy, too, is made beside it, into memory that is
    used again, and the training waits for it before the weights change.
    """

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer, *, background: bool) -> None:
        self.name = DCP_ASYNC if background else DCP
        self.folder = folder
        self.seconds = 0.0
        self._state = (model, optimizer)
        self._group = dist.new_group(backend="gloo") if background else None  # the training has its own
        self._stager: Any = None
        self._begin = 0.0
        self._staged: Future[None] | None = None
        self._upload: Future[None] | None = None
        self._timed = threading.Event()
        if background:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            self._stager = DefaultStager(
                StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False)
            )

    def save(self, number: int) -> None:
        """See `Contender`."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

        self._begin = time.perf_counter()
        state = self._state_dict()
        if self._group is None:
            save(state, checkpoint_id=self.folder)
            self.seconds = time.perf_counter() - self._begin
            return
        found = async_save(state, checkpoint_id=self.folder, process_group=self._group, async_stager=self._stager)
        assert isinstance(found, AsyncSaveResponse)  # it is one where the copy is made in the background
        self._staged, self._upload = found.staging_completion, found.upload_completion
        self._timed.clear()
        self._upload.add_done_callback(self._durable)

    def before_update(self) -> None:
        """See `Contender`."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def finish(self) -> None:
        """See `Contender`."""
        if self._upload is not None:
            self._upload.result()
            self._timed.wait()  # a future tells those who wait for it first
            self._upload = None

    def restored(self) -> Digests:
        """See `Contender`; the live state is what was saved afterwards."""
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state_dict()
        load(state, checkpoint_id=self.folder)
        return tensor_digests(_named(state))

    def close(self) -> None:
        """See `Contender`."""
        if self._stager is not None:
            self._stager.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _durable(self, _: Future[Any]) -> None:
        self.seconds = time.perf_counter() - self._begin
        self._timed.set()

    def _state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(*self._state)
        return {"model": model, "optimizer": optimizer}


class TorchSave:
    """``torch.save`` of everything by rank 0, gathered there where it is sharded; brought to the disk, too."""

    name = TORCH_SAVE

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer, *, sharded: bool) -> None:
        self.folder = folder
        self.seconds = 0.0
        self._state = (model, optimizer)
        self._sharded = sharded

    def save(self, number: int) -> None:
        """See `Contender`."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        begin = time.perf_counter()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True) if self._sharded else None
        model, optimizer = get_state_dict(*self._state, options=options)
        if dist.get_rank() == 0:
            torch.save({"model": model, "optimizer": optimizer}, self._file)
            handle = os.open(self._file, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            sync_folder(self.folder)
        dist.barrier()
        self.seconds = time.perf_counter() - begin

    def before_update(self) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Nothing is under way."""

    def restored(self) -> Digests:
        """See `Contender`; nothing in the file is run."""
        live = dict(live_tensors(*self._state))
        with TorchFile(self._file) as file:
            saved = {name: held for name, held in _named(file.content) if isinstance(held, StoredTensor)}
            return {
                name: tensor_digest(file.read(saved[name], box_of(live[name]))) for name in saved.keys() & live.keys()
            }

    def close(self) -> None:
        """Nothing was taken."""

    @property
    def _file(self) -> Path:
        return self.folder / "state.pt"


def _named(state: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """The tensors of a state dict of torch's, by our names."""
    for name, tensor in state["model"].items():
        yield f"model/{name}", tensor
    for name, values in state["optimizer"]["state"].items():
        for key, value in values.items():
            yield f"optimizer/{name}/{key}", value
