"""Weights with more rows in the embedding and the head than their file has, for added tokens.

New rows are the mean of the file's (Hewitt 2021, "Initializing new word embeddings for pretrained language models"), a
pure function of the file: the same on every rank and under every strategy.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from shardwise.checkpoint.added_tokens import AddedTokens
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.matching import MODEL
from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.readers.reader import Source, TensorInfo
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.checkpoint.weights import row_blocks
from shardwise.model.read import clean_name


def embedding_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of the input embedding and the output head, all names of tied ones."""
    owners = [getattr(module, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output")]
    ids = {id(p) for owner in owners if isinstance(owner, nn.Module) for p in owner.parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return [clean_name(name) for name, parameter in named if id(parameter) in ids]


def open_with_rows(place: str | Folder, module: nn.Module, added: AddedTokens | None) -> Source:
    """Open weights for ``module``, with new rows where tokens were added.

    Raises:
        UserError: there are no such weights.
    """
    source = open_source(place)
    return source if added is None else SourceWithAddedRows(source, embedding_names(module), added)


class SourceWithAddedRows:
    """A `Source` whose ``names`` with `AddedTokens.old` rows have the new number; all else is ``inner``'s."""

    def __init__(self, inner: Source, names: Collection[str], added: AddedTokens) -> None:
        self.inner, self.added = inner, added
        self.kind, self.place = inner.kind, inner.place
        self.aliases: Mapping[str, str] = inner.aliases
        self.optimizer: Mapping[str, Any] | None = inner.optimizer
        self.step: int | None = inner.step
        self.notes: Sequence[str] = inner.notes
        wanted = {f"{MODEL}{name}" for name in names}
        wanted |= {inner.aliases[name] for name in wanted & inner.aliases.keys()}
        self.grown = {n for n in wanted & inner.tensors.keys() if inner.tensors[n].shape[:1] == (added.old,)}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(info.dtype, (added.new, *info.shape[1:])) if name in self.grown else info
            for name, info in inner.tensors.items()
        }
        self._means: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.inner.__exit__(*exc)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        if name not in self.grown:
            return self.inner.read(name, box)
        kept = min(max(self.added.old - box.offsets[0], 0), box.lengths[0])
        parts = [torch.empty((0, *box.lengths[1:]), dtype=self.tensors[name].dtype)]
        if kept:
            parts.append(self.inner.read(name, Box(box.offsets, (kept, *box.lengths[1:]))))
        if box.lengths[0] > kept:
            columns = [slice(at, at + n) for at, n in zip(box.offsets[1:], box.lengths[1:], strict=True)]
            row = self._mean(name)[tuple(columns)].to(self.tensors[name].dtype)
            parts.append(row.expand(box.lengths[0] - kept, *row.shape))
        return torch.cat(parts)

    def _mean(self, name: str) -> torch.Tensor:
        """Return the mean of a tensor's own rows, in float64."""
        with self._lock:
            if name not in self._means:
                info = self.inner.tensors[name]
                total = torch.zeros(info.shape[1:], dtype=torch.float64)
                for box, _ in row_blocks(info.full, info.dtype.itemsize):
                    total += self.inner.read(name, box).sum(0, dtype=torch.float64)
                self._means[name] = total / self.added.old
            return self._means[name]
