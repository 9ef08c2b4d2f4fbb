"""How a checkpoint comes to exist at once: a working folder, one rename, then ``latest``; and how old ones go.

On a disk a checkpoint is written under a name that nobody reads and gets its own by a rename, after everything is
durable. An object store has no rename of folders: there the manifest is put last, and without one a folder is nothing.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.checkpoint.format import LATEST, MANIFEST, TEMPORARY, Manifest, saved_steps, step_folder
from shardwise.checkpoint.storage import Folder, remove_folder, rename_folder, sync_folder, write_small
from shardwise.errors import CheckpointError, UserError

LOCK = ".lock"


def begin(folder: Folder, step: int) -> Folder:
    """An empty folder to write the checkpoint of ``step`` in; what crashes have left in ``folder`` is removed.

    Raises:
        CheckpointError: the checkpoint's own name is taken by something that is none.
        OSError: the folder cannot be written to.
    """
    target = folder / step_folder(step)
    if isinstance(folder, Path):
        if target.exists():
            raise CheckpointError(f"'{target}' is there but has no {MANIFEST}; remove it and save again")
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{TEMPORARY}*"):
            if stale.is_dir():
                remove_folder(stale)
        working = folder / f"{TEMPORARY}{target.name}"
        working.mkdir()
        return working
    if target.is_dir():  # files without a manifest: of a save that was never finished
        remove_folder(target)
    target.mkdir(parents=True, exist_ok=True)
    return target


def commit(working: Folder, target: Folder, manifest: Manifest) -> None:
    """Make what lies in ``working`` the checkpoint ``target``, durably: afterwards everybody sees all of it.

    Raises:
        OSError: it could not be written; ``target`` is not there.
    """
    document = manifest.to_json().encode()
    if isinstance(working, Path) and isinstance(target, Path):
        write_small(working / MANIFEST, document)
        rename_folder(working, target)
    else:
        write_small(target / MANIFEST, document)


def abandon(working: Folder) -> None:
    """Remove what was written for a checkpoint that is not to be."""
    try:
        remove_folder(working)
    except OSError as error:
        warnings.warn(f"'{working}' could not be removed: {error}", stacklevel=2)


def move_latest(folder: Folder, target: Folder) -> None:
    """Let ``latest`` name ``target``, which must be durable already."""
    write_small(folder / LATEST, f"{target.name}\n".encode())


def named_latest(folder: Folder) -> str:
    """The name in ``latest``; empty where there is none."""
    try:
        return (folder / LATEST).read_bytes().decode().strip()
    except (OSError, ValueError):
        return ""


def prune(folder: Folder, keep: int, saved: Folder) -> None:
    """Remove all but the ``keep`` newest checkpoints; ``saved``, the one just written, always stays.

    One is taken out of sight first (renamed, or its manifest removed), so that half of it is never taken for one.
    """
    others = [path for _, path in saved_steps(folder) if path.name != saved.name]
    for path in others[keep - 1 :]:
        try:
            if isinstance(path, Path):
                hidden = path.with_name(f"{TEMPORARY}{path.name}")
                os.rename(path, hidden)
                sync_folder(folder)
                remove_folder(hidden)
            else:
                (path / MANIFEST).unlink()
                remove_folder(path)
        except OSError as error:
            warnings.warn(f"the old checkpoint '{path}' could not be removed: {error}", stacklevel=2)


class FolderLock:
    """Keeps a second run out of a folder of checkpoints, as long as this process lives or until `release`.

    On a disk by the operating system's lock on ``.lock``. A store behind a URL has none: there `check` finds out
    whether another run has moved ``latest``.

    Raises:
        UserError: another run is saving there.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._handle = -1
        self._latest = ""
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._handle)
                self._handle = -1
                raise self._taken() from None
        else:
            self._latest = named_latest(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def check(self) -> None:
        """Whether the folder is still this run's; see the class."""
        if self._handle < 0 and named_latest(self.folder) != self._latest:
            raise self._taken()

    def moved(self, target: Folder) -> None:
        """This run has let ``latest`` name ``target``."""
        self._latest = target.name

    def release(self) -> None:
        """Let others in."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _taken(self) -> UserError:
        return UserError(
            f"another run is saving checkpoints to '{self.folder}'; wait for it, or choose another folder "
            "(train.output or checkpoint.folder)"
        )
