"""Metrics as JSON lines: one object per logged step or evaluation, appended and flushed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import MachineError
from shardwise.train.run_files import replace_file


class MetricsFile:
    """File ``metrics.jsonl`` of a run; opening it at a step drops later lines of a dead run.

    ``also`` is called with every line, too.
    """

    def __init__(self, path: Path, after_step: int, also: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._also = also
        kept = [line for line in read_metrics(path) if line["step"] <= after_step]
        replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file: TextIO = path.open("a")

    def write(self, **values: Any) -> None:
        """Append one line.

        Raises:
            MachineError: the disk is full or unavailable.
        """
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        except OSError as error:
            raise MachineError(
                f"'{self._file.name}' cannot be written: {error.strerror}; free space on that disk and run the same "
                "command again, which resumes from the last checkpoint"
            ) from None
        if self._also is not None:
            self._also(values)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file; a last line truncated by a crash is left out."""
    if not path.exists():
        return
    with path.open(errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                return


def logged_losses(path: Path) -> list[tuple[int, float]]:
    """Return the logged steps of a metrics file with their training loss; losses that are not finite are left out."""
    found = ((line["step"], line.get("loss")) for line in read_metrics(path))
    return [(step, loss) for step, loss in found if isinstance(loss, float) and math.isfinite(loss)]


def logged_spikes(path: Path) -> list[dict[str, Any]]:
    """Return the logged spikes of the loss: ``step``, ``loss``, ``median`` and ``samples`` of each replica."""
    lines = (line for line in read_metrics(path) if "loss_spike" in line)
    return [{"step": line["step"], "loss": line["loss"], **line["loss_spike"]} for line in lines]


def logged_lost_gradients(path: Path) -> list[dict[str, Any]]:
    """Return the parameters that were named as without a gradient: ``parameters`` and ``since``, the first step."""
    return [one for line in read_metrics(path) for one in line.get("lost_gradients", ())]
