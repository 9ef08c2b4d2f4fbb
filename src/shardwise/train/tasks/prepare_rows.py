"""Files to rows on disk, once: read, check the labels, choose what is held out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError, MachineError, UserError
from shardwise.train.config import Config
from shardwise.train.data.rows import RowData, RowWriter, open_rows
from shardwise.train.data.sources import DENIED, BadRows
from shardwise.train.tasks.task import RowReader, Task
from shardwise.units import counted

_LAYOUT = 1  # version of the folder; a change of its content makes old folders unused
_MOST_SKIPPED = 0.1  # share of rows that may be left out


def prepare_rows(task: Task, config: Config, cache: Path, log: Callable[[str], None]) -> RowData:
    """Read the rows of ``config`` into a folder of ``cache``, or reuse an unchanged one.

    Copies of a row are on the same side of what is held out. The folder is created completely or not at all.

    Raises:
        DataError: files are missing, or rows cannot be trained on.
        ModelError: the model is not one of the task's.
        UserError: the cache folder cannot be written.
        MachineError: its disk is full.
    """
    facts, table = task.configuration(config), config.data
    reader = task.reader(config, facts)
    asked = [(str(table.path), "data.path")]
    if table.heldout_path is not None:
        asked.append((table.heldout_path, "data.heldout_path"))
    listings = [reader.open(value, key, cache) for value, key in asked]
    sides = [*listings, None if len(asked) == 2 else table.heldout_fraction]
    known = json.dumps([_LAYOUT, task.name, sides, reader.identity(), table.bad_rows], default=str)
    fingerprint = hashlib.blake2b(known.encode(), digest_size=16).hexdigest()
    folder = cache / fingerprint[:16]
    if folder.is_dir():
        try:
            return open_rows(folder)
        except DataError:
            log(f"the data in '{folder}' is damaged, preparing it again")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            (work / "rows").mkdir()
            _write(task, config, reader, work / "rows", fingerprint, [f"{key} '{value}'" for value, key in asked], log)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(work / "rows", folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        what = f"data cache '{cache}' cannot be written: {error.strerror or error}"
        if error.errno in DENIED:
            raise UserError(f"{what}; use a folder you may write") from None
        raise MachineError(f"{what}; free space or use another folder") from None
    return open_rows(folder)


def _write(
    task: Task,
    config: Config,
    reader: RowReader,
    folder: Path,
    fingerprint: str,
    places: Sequence[str],
    log: Callable[[str], None],
) -> None:
    """Write the rows of all places (training ones, then held-out ones, if any)."""
    bad = BadRows(skip=config.data.bad_rows == "skip")
    ends = []
    log("reading the rows")
    with RowWriter(folder) as writer:
        for place, where in enumerate(places):
            before, skipped = len(writer.hashes), bad.number
            for row in reader.rows(place, bad):
                writer.add(row)
            found, left_out = len(writer.hashes) - before, bad.number - skipped
            if left_out > _MOST_SKIPPED * (left_out + found):
                raise DataError(
                    f"{where}: {left_out} of {counted(left_out + found, 'row')}, over a tenth, cannot be trained on:",
                    *bad.notes,
                )
            if not found:
                raise DataError(f"{where} has no row to train on; give some")
            ends.append(len(writer.hashes))
        sides = _sides(np.array(writer.hashes, np.uint64), ends, config.data.heldout_fraction)
        classes, order = ((), None) if reader.labels is None else reader.labels.finish()
        if order is not None:
            writer.renumber("label", order)
        facts = reader.facts()
        num_classes = reader.vocab_size if reader.labels is None else reader.labels.num_classes
        is_heldout = len(sides["heldout"]) if "heldout" in sides else 0
        notes = [f"{counted(len(sides['train']), 'training row')}, {is_heldout} held out"]
        if reader.labels is not None:
            some = f": {', '.join(classes[:8])}{', ...' * (len(classes) > 8)}" if classes else ""
            notes.append(f"{num_classes} classes{some}")
        if bad.number:
            notes.append(f"{counted(bad.number, 'row')} left out, such as {bad.notes[0]}")
        facts["told"] = [*notes, *facts.get("told", [])]
        data: dict[str, Any] = {
            "task": task.name,
            "vocab_size": reader.vocab_size,
            "num_classes": num_classes,
            "fingerprint": fingerprint,
            "classes": classes,
            "left_out": bad.number,
            "left_out_first": bad.notes,
            "facts": facts,
        }
        writer.finish(sides, data)


def _sides(hashes: NDArray[np.uint64], ends: Sequence[int], fraction: float) -> dict[str, NDArray[np.int64]]:
    """Return the row numbers of each side; neither is empty if there are two contents."""
    if len(ends) == 2:
        return {"train": np.arange(ends[0]), "heldout": np.arange(ends[0], ends[1])}
    is_heldout = hashes < np.uint64(int(fraction * 2**63) * 2)
    if fraction and len(set(hashes.tolist())) > 1:
        if not is_heldout.any():
            is_heldout = hashes == hashes.min()
        elif is_heldout.all():
            is_heldout = hashes != hashes.max()
    elif is_heldout.all():
        is_heldout[:] = False
    sides = {"train": np.flatnonzero(~is_heldout), "heldout": np.flatnonzero(is_heldout)}
    return {name: index for name, index in sides.items() if len(index)}
