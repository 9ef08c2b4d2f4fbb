"""Runs and observed loops below a root: found without following links, read only where files are plain and small.

A run is addressed by a key made from its path, which is looked up among those found; no path comes from a request.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.train.run_files import RunFile
from shardwise.units import bytes_text

DEPTH = 3
MOST_RUNS = 500
MOST_FOLDERS = 5_000
MOST_BYTES = 64 * 2**20
"""Largest file that a report is made from."""

TAIL_BYTES, SUMMARY_BYTES = 2**16, 2**24
LIVE_S = 60.0
"""A run counts as live if its metrics were written in the last ``LIVE_S`` seconds."""

_MARKS = (RunFile.METRICS, RunFile.SUMMARY, RunFile.JOB, RunFile.OBSERVED)
_READ = (*_MARKS, RunFile.PLAN, RunFile.ENVIRONMENT, RunFile.TIMING, RunFile.FINDINGS, RunFile.LOCK)


@dataclass(frozen=True)
class RunFolder:
    """Run folder; ``problem`` says why it is not read, and is empty if it is.

    ``state`` is ``finished``, ``live``, ``unfinished``, ``observed`` (a loop that `shardwise.observe` has seen) or
    ``unknown``; ``changed`` is a Unix time.
    """

    key: str
    name: str
    path: Path
    state: str
    changed: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class RunList:
    """Runs, newest first; ``left_out`` says in a sentence what was not looked at."""

    runs: tuple[RunFolder, ...]
    left_out: str = ""

    def find(self, key: str) -> RunFolder | None:
        """Return the run of a key."""
        return next((run for run in self.runs if run.key == key), None)


def shown(name: str) -> str:
    """Return a file's name for display: bytes that are no UTF-8 are replaced, invisible characters escaped."""
    text = os.fsencode(name).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def find_runs(root: Path) -> RunList:
    """Find the runs in ``root`` and `DEPTH` levels below it; symbolic links to folders are not followed."""
    found: list[RunFolder] = []
    folders = [(root, 0)]
    seen = 0
    left_out = ""
    while folders:
        folder, depth = folders.pop(0)
        seen += 1
        if len(found) >= MOST_RUNS or seen > MOST_FOLDERS:
            left_out = f"Only the first {MOST_RUNS} runs are listed: choose a folder further down with --runs."
            break
        try:
            with os.scandir(folder) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        except OSError as error:
            found.append(_entry(root, folder, problem=f"cannot be read: {error.strerror}"))
            continue
        names = {entry.name for entry in entries}
        if names & set(_MARKS):
            found.append(_inspected(root, folder))
        elif depth < DEPTH:
            folders += [(Path(entry.path), depth + 1) for entry in entries if _is_folder(entry)]
    return RunList(tuple(sorted(found, key=lambda run: -(run.changed or 0.0))), left_out)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _entry(
    root: Path, folder: Path, *, problem: str = "", state: str = "unknown", at: float | None = None
) -> RunFolder:
    inside = os.path.relpath(folder, root)
    key = hashlib.sha256(os.fsencode(inside)).hexdigest()[:20]
    name = shown(root.resolve().name if inside == "." else inside)
    return RunFolder(key=key, name=name, path=folder, state=state, changed=at, problem=problem)


def _inspected(root: Path, folder: Path) -> RunFolder:
    problems = list(_unsafe(folder))
    times = {name: _modified(folder / name) for name in _MARKS}
    changed = max((at for at in times.values() if at is not None), default=None)
    if problems:
        return _entry(root, folder, problem="; ".join(problems), at=changed)
    if times[RunFile.OBSERVED] is not None:
        return _entry(root, folder, state="observed", at=changed)
    metrics, summarised = times[RunFile.METRICS], _summarised_steps(folder / RunFile.SUMMARY)
    if summarised is not None and summarised >= (_last_step(folder / RunFile.METRICS) or 0):
        state = "finished"
    elif metrics is not None and time.time() - metrics < LIVE_S:
        state = "live"
    else:
        state = "unfinished"
    return _entry(root, folder, state=state, at=changed)


def _summarised_steps(path: Path) -> int | None:
    try:
        found = json.loads(path.read_bytes()) if path.stat().st_size <= SUMMARY_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    steps = found.get("steps") if isinstance(found, dict) else None
    return steps if type(steps) is int else None


def _last_step(path: Path) -> int | None:
    """Return the step of the last complete line; ``None`` if the file's end has none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and type(found.get("step")) is int:
            return int(found["step"])
    return None


def _unsafe(folder: Path) -> Iterator[str]:
    """Yield what forbids reading a run: a file that is a link, a pipe or a device, or not ours to read."""
    for name in _READ:
        try:
            mode = (folder / name).lstat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
            continue
        if stat.S_ISLNK(mode):
            yield f"{name} is a symbolic link, which is not followed"
        elif not stat.S_ISREG(mode):
            yield f"{name} is not a plain file"
        elif not os.access(folder / name, os.R_OK):
            yield f"{name} cannot be read: Permission denied"


def _modified(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def too_large(folder: Path) -> str:
    """Say which file is too large for a report here; empty if none is."""
    for name in _READ:
        path = folder / name
        try:
            size = path.lstat().st_size
        except OSError:
            continue
        if size > MOST_BYTES:
            return f"{name} has {bytes_text(size)}, and reports of up to {bytes_text(MOST_BYTES)} are made here"
    return ""
