"""Staging copy of a rank's save plan, so that training can continue while it is written."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shardwise.checkpoint.save_plan import SavePlan, ShardWrite
from shardwise.checkpoint.shard_files import file_order
from shardwise.checkpoint.storage.direct_io import aligned
from shardwise.errors import CheckpointError


class Stage:
    """Reusable staging memory for one save plan: pinned where the tensors are on a GPU.

    It is allocated outside of torch's CPU allocator, so that memory measurements of the training do not change, and
    laid out as the file, so that it is written in place.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def begin(self, share: SavePlan) -> Copy:
        """Copy the tensors that may change at any time; return a handle that copies the rest.

        Raises:
            MemoryError: there is not enough memory.
        """
        devices = {piece.tensor.device for piece in share.pieces.values() if piece.tensor.device.type != "cpu"}
        copy = Copy(share, next(iter(devices), None), self)
        copy.take(steady=False)
        copy.hold_back()
        return copy

    def room(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Return at least ``num_bytes`` of staging memory."""
        if self._room.numel() < num_bytes:
            self._room = torch.empty(0, dtype=torch.uint8)  # free the old one first
            if pinned:
                self._room = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._room = torch.from_numpy(aligned(num_bytes))
        return self._room


@dataclass
class Copy:
    """Copy in progress of a save plan into a `Stage`."""

    share: SavePlan
    device: torch.device | None
    stage: Stage

    def __post_init__(self) -> None:
        self._versions = {name: _version(piece) for name, piece in self.share.pieces.items()}
        self._done: dict[str, ShardWrite] = {}
        self._stream: torch.cuda.Stream | None = None
        if self.device is not None:
            self._stream = torch.cuda.Stream(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def finish(self) -> SavePlan:
        """Copy the rest; return the plan as it was at the start of the copy, in staging memory.

        Raises:
            CheckpointError: a tensor was changed in the meantime.
        """
        self.take(steady=True)
        if self._stream is not None:
            self._stream.synchronize()
        steady = [(name, piece) for name, piece in self.share.pieces.items() if piece.steady]
        changed = [name for name, piece in steady if _version(piece) != self._versions[name]]
        if changed:
            raise CheckpointError(
                f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} changed while being saved in the "
                "background; change weights only by the optimizer's step, or set checkpoint.async_save to false"
            )
        return replace(self.share, pieces={name: self._done[name] for name in self.share.pieces})

    def hold_back(self) -> None:
        """Make later device work wait for the copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def take(self, *, steady: bool) -> None:
        """Copy the steady tensors, or the others."""
        places, total = {}, 0
        for name in file_order({name: piece.tensor.element_size() for name, piece in self.share.pieces.items()}):
            places[name] = total
            total += self.share.pieces[name].tensor.nbytes
        room = self.stage.room(total, pinned=self.device is not None)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for name, piece in self.share.pieces.items():
                if piece.steady == steady:
                    flat = room[places[name] : places[name] + piece.tensor.nbytes]
                    copy = flat.view(piece.tensor.dtype).view(piece.tensor.shape)
                    copy.copy_(piece.tensor, non_blocking=True)
                    self._done[name] = replace(piece, tensor=copy)


def _version(piece: ShardWrite) -> tuple[int, ...]:
    """Return the in-place version of a tensor, as far as it is counted (not through ``.data``)."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in (piece.tensor, piece.owner))
