"""Shards of a tensor as the cells of a grid: a few numbers, however many ranks wrote it.

A checkpoint of a thousand ranks has millions of shards. Where each tensor is cut at the same places along each
dimension, as all plans cut it, the places and the files of all cells are runs of numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardwise.checkpoint.boxes import Box

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LARGEST_GRID = 1 << 26  # cells

Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Run = tuple[Number, Number, Number]
"""``start``, ``step``, ``count``: the numbers ``start``, ``start + step``, ..."""
Runs = tuple[Run, ...]


class Grid(BaseModel):
    """Cells of a tensor: where they begin in each dimension, and the file of each, the last dimension fastest.

    A cell ends where the next one begins, so that the cells cover the tensor exactly once. Each lies in a file of its
    own, since a file has one tensor of a name.
    """

    model_config = ConfigDict(frozen=True)

    begins: tuple[Runs, ...]
    files: Runs

    @model_validator(mode="after")
    def _runs(self) -> Self:
        for runs in self.begins:
            lasts = [start + step * (count - 1) for start, step, count in runs]
            ordered = all(runs[at + 1][0] > last for at, last in enumerate(lasts[:-1]))
            if not runs or runs[0][0] or not ordered or any(count > 1 and not step for _, step, count in runs):
                raise ValueError("the cells of a dimension do not begin at 0 and in order")
        if not 1 <= self.cells <= LARGEST_GRID or any(not count for runs in self.begins for _, _, count in runs):
            raise ValueError(f"a grid of {self.cells} cells")
        if sum(count for _, _, count in self.files) != self.cells or not all(count for _, _, count in self.files):
            raise ValueError(f"{sum(count for _, _, count in self.files)} files for {self.cells} cells")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Cells along each dimension."""
        return tuple(sum(count for _, _, count in runs) for runs in self.begins)

    @property
    def cells(self) -> int:
        """Number of cells."""
        return math.prod(self.sizes)

    @property
    def last_file(self) -> int:
        """Largest number of a file."""
        return max(start + step * (count - 1) for start, step, count in self.files)

    def fault(self, shape: tuple[int, ...], num_files: int) -> str:
        """Return why this is no grid of a tensor of ``shape`` in ``num_files`` files; empty where it is."""
        if len(self.begins) != len(shape):
            return f"a grid of {len(self.begins)} dimensions for {shape}"
        for runs, size in zip(self.begins, shape, strict=True):
            start, step, count = runs[-1]
            if start + step * (count - 1) >= size:
                return f"a grid reaches outside of {shape}"
        if self.last_file >= num_files:
            return f"a grid is in file {self.last_file} of {num_files}"
        if self.cells > num_files or not _differ(self.files):  # the files bound the memory that a grid asks for
            return f"a grid of {self.cells} cells has several in one file"
        return ""

    def file(self, cell: int) -> int:
        """Return the number of the file of a cell."""
        return int(_numbers(self.files)[cell])

    def box(self, cell: int, shape: tuple[int, ...]) -> Box:
        """Return the box of a cell in a tensor of ``shape``."""
        import numpy as np

        places = np.unravel_index(cell, self.sizes) if shape else ()
        offsets, lengths = [], []
        for at, runs, size in zip(places, self.begins, shape, strict=True):
            begins = _numbers(runs)
            offsets.append(int(begins[at]))
            lengths.append((int(begins[at + 1]) if at + 1 < len(begins) else size) - offsets[-1])
        return Box(tuple(offsets), tuple(lengths))

    def placed(self, shape: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
        """Yield the box of each cell in a tensor of ``shape``, and the number of its file, in order."""
        spans = []
        for runs, size in zip(self.begins, shape, strict=True):
            begins = _numbers(runs).tolist()
            spans.append([(at, end - at) for at, end in itertools.pairwise([*begins, size])])
        for cell, file in zip(itertools.product(*spans), _numbers(self.files).tolist(), strict=True):
            yield Box(tuple(at for at, _ in cell), tuple(length for _, length in cell)), file

    def overlapping(self, box: Box) -> list[int]:
        """Return the cells that overlap ``box``, in order."""
        import numpy as np

        if not box.numel:
            return []
        ranges = []
        for runs, offset, length in zip(self.begins, box.offsets, box.lengths, strict=True):
            begins = _numbers(runs)
            first, end = np.searchsorted(begins, [offset, offset + length - 1], side="right").tolist()
            ranges.append(range(first - 1, end))
        sizes = self.sizes
        return [
            sum(at * math.prod(sizes[axis + 1 :]) for axis, at in enumerate(places))
            for places in itertools.product(*ranges)
        ]


def grid_of(shape: tuple[int, ...], boxes: Sequence[tuple[Box, int]]) -> Grid | None:
    """Return the grid whose cells are ``boxes``, each with the number of its file; ``None`` where there is none."""
    begins = [sorted({box.offsets[axis] for box, _ in boxes}) for axis in range(len(shape))]
    cells = math.prod(map(len, begins))
    if cells != len(boxes) or cells > LARGEST_GRID or any(first[0] for first in begins):
        return None
    ends = [dict(itertools.pairwise([*places, size])) for places, size in zip(begins, shape, strict=True)]
    files: dict[tuple[int, ...], int] = {}
    for box, file in boxes:
        if any(end[at] != at + n for end, at, n in zip(ends, box.offsets, box.lengths, strict=True)):
            return None
        files[box.offsets] = file
    if len(files) != len(boxes) or len({*files.values()}) != len(boxes):
        return None
    return Grid(begins=tuple(map(runs_of, begins)), files=runs_of([files[at] for at in itertools.product(*begins)]))


def runs_of(numbers: Sequence[int]) -> Runs:
    """Write numbers as runs of equal, not negative steps."""
    runs: list[tuple[int, int, int]] = []
    for number in numbers:
        if runs:
            start, step, count = runs[-1]
            if count == 1 and number >= start:
                runs[-1] = (start, number - start, 2)
                continue
            if count > 1 and number == start + step * count:
                runs[-1] = (start, step, count + 1)
                continue
        runs.append((number, 0, 1))
    return tuple(runs)


@lru_cache(maxsize=256)  # most tensors are cut alike
def _numbers(runs: Runs) -> npt.NDArray[np.int64]:
    import numpy as np

    return np.concatenate([start + step * np.arange(count, dtype=np.int64) for start, step, count in runs])


@lru_cache(maxsize=256)
def _differ(runs: Runs) -> bool:
    import numpy as np

    numbers = _numbers(runs)
    return len(np.unique(numbers)) == len(numbers)
