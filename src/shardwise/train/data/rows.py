"""Rows of labelled data on disk: text with its labels, sources with targets, images with classes; memory-mapped.

A row is a dict of arrays. Values of one name are stored one after the other: of one shape (a class, an image), or of
any length (tokens). Which rows are trained on and which are held out are two lists of row numbers.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.train.task_names import TaskName

FACTS = "rows.json"
Row = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RowColumn:
    """Values of one name: ``values`` is [rows, ...], or [elements] with ``starts``, int64 [rows + 1]."""

    values: NDArray[Any]
    starts: NDArray[np.int64] | None = None

    def padded(self, rows: NDArray[np.int64], width: int, fill: int) -> NDArray[np.int64]:
        """Return values of any length, int64 [len(rows), width]; row -1 is empty."""
        assert self.starts is not None
        found = np.full((len(rows), width), fill, np.int64)
        for place, row in enumerate(rows):
            if row >= 0:
                part = self.values[self.starts[row] : self.starts[row + 1]][:width]
                found[place, : len(part)] = part
        return found

    def of(self, rows: NDArray[np.int64], empty: int = 0) -> NDArray[Any]:
        """Return values of one shape, [len(rows), ...]; row -1 is ``empty`` everywhere."""
        found = np.asarray(self.values[np.maximum(rows, 0)])
        found[rows < 0] = empty
        return found

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of elements of each row; row -1 has none."""
        assert self.starts is not None
        return np.where(rows < 0, 0, self.starts[rows + 1] - self.starts[rows])


@dataclass(frozen=True)
class RowSide:
    """One side of the data: ``index`` are the row numbers of its samples, ``content`` a hash of all values."""

    columns: Mapping[str, RowColumn]
    index: NDArray[np.int64]
    content: str

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.index)

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row numbers of samples; -1 stays -1.

        Raises:
            IndexError: an id is below -1 or not below the number of samples.
        """
        if len(ids) and not -1 <= ids.min() <= ids.max() < len(self):
            raise IndexError(f"sample ids {ids.min()} to {ids.max()} are not all in -1 to {len(self) - 1}")
        return np.where(ids < 0, -1, self.index[np.maximum(ids, 0)])


@dataclass(frozen=True)
class RowData:
    """Prepared data of a task that is not causal language modelling, and its location.

    ``vocab_size`` is the number of different inputs (0 for images), ``classes`` the names of the labels if they have
    some, ``num_classes`` how many there are; ``left_out`` the number of rows that were skipped, with the first of them.
    ``facts`` are those that a task needs to make batches.
    """

    folder: Path
    task: TaskName
    train: RowSide
    heldout: RowSide | None
    vocab_size: int
    num_classes: int
    fingerprint: str
    classes: tuple[str, ...] = ()
    left_out: int = 0
    left_out_first: tuple[str, ...] = ()
    facts: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        """What the rows hold."""
        return self.task


class RowWriter(ExitStack):
    """Writes rows to ``folder``: a file for the values of each name, and facts about all."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.files: dict[str, BinaryIO] = {}
        self.kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...] | None]] = {}
        self.lengths: dict[str, list[int]] = {}
        self.hashes: list[int] = []

    def add(self, row: Row) -> None:
        """Append a row; a one-dimensional value may have any length."""
        content = hashlib.blake2b(digest_size=8)
        for name, value in row.items():
            if name not in self.files:
                self.files[name] = self.enter_context((self.folder / f"{name}.bin").open("w+b"))
                self.kinds[name] = (value.dtype, None if value.ndim == 1 else value.shape)
                self.lengths[name] = []
            assert self.kinds[name] == (value.dtype, None if value.ndim == 1 else value.shape), name
            data = np.ascontiguousarray(value).tobytes()
            self.files[name].write(data)
            self.lengths[name].append(value.size)
            content.update(data)
        self.hashes.append(int.from_bytes(content.digest(), "big"))

    def renumber(self, name: str, order: NDArray[np.int64]) -> None:
        """Replace each label ``i`` of a column by ``order[i]``; negative ones stay."""
        self.files[name].flush()
        labels = np.memmap(self.folder / f"{name}.bin", self.kinds[name][0], "r+")
        labels[:] = np.where(labels < 0, labels, order[np.maximum(labels, 0)])
        labels.flush()

    def finish(self, sides: Mapping[str, NDArray[np.int64]], facts: Mapping[str, Any]) -> None:
        """Write the facts, and the row numbers of each side."""
        columns: dict[str, Any] = {}
        content = hashlib.blake2b(digest_size=16)
        for name, file in self.files.items():
            file.flush()
            dtype, shape = self.kinds[name]
            columns[name] = {"dtype": dtype.str, "shape": shape}
            if shape is None:
                starts = np.concatenate([[0], np.cumsum(self.lengths[name], dtype=np.int64)]).astype(np.int64)
                np.save(self.folder / f"{name}_starts.npy", starts)
                content.update(starts.data)
            file.seek(0)
            while piece := file.read(1 << 22):
                content.update(piece)
        hashes = {}
        for side, index in sides.items():
            np.save(self.folder / f"{side}.npy", index)
            own = content.copy()
            own.update(np.ascontiguousarray(index).data)
            hashes[side] = own.hexdigest()
        (self.folder / FACTS).write_text(json.dumps({"columns": columns, "sides": hashes, "data": facts}, indent=1))


def open_rows(folder: Path) -> RowData:
    """Memory-map rows that `RowWriter` wrote.

    Raises:
        DataError: the folder is missing or damaged.
    """
    try:
        found = json.loads((folder / FACTS).read_text())
        columns = {name: _column(folder, name, **facts) for name, facts in found["columns"].items()}
        sides = {}
        for side, content in found["sides"].items():
            index = np.load(folder / f"{side}.npy", allow_pickle=False)
            number = min(_count(column) for column in columns.values())
            if len(index) and not 0 <= index.min() <= index.max() < number:
                raise ValueError(f"{side}.npy names rows that are not there")
            sides[side] = RowSide(columns, index, content)
        facts = {**found["data"]}
        for name in ("classes", "left_out_first"):
            facts[name] = tuple(facts.get(name, ()))
        return RowData(folder=folder, train=sides["train"], heldout=sides.get("heldout"), **facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"the data in '{folder}' cannot be opened: {reason}; delete it and run again") from None


def _count(column: RowColumn) -> int:
    return len(column.values) if column.starts is None else len(column.starts) - 1


def _column(folder: Path, name: str, dtype: str, shape: list[int] | None) -> RowColumn:
    file = folder / f"{name}.bin"
    with file.open("rb") as opened:
        size = file.stat().st_size
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    values: NDArray[Any] = np.frombuffer(data, np.dtype(dtype))
    if shape is not None:
        return RowColumn(values.reshape(-1, *shape))
    starts = np.load(folder / f"{name}_starts.npy", allow_pickle=False)
    if starts[-1] != len(values):
        raise ValueError(f"{file.name} has {len(values)} elements instead of {starts[-1]}")
    return RowColumn(values, starts)
