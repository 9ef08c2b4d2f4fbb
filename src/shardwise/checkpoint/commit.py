"""Make a checkpoint visible atomically, point ``latest`` at it, and prune old ones.

On a disk a checkpoint is written under a temporary name and renamed to its own after everything is durable. An object
store has no rename of folders: there the manifest is written last, and a folder without one is ignored.
"""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.checkpoint.format import (
    LARGEST_LATEST,
    LARGEST_MANIFEST,
    LATEST,
    MANIFEST,
    TEMPORARY,
    Manifest,
    saved_steps,
    step_folder,
)
from shardwise.checkpoint.storage.local_storage import (
    Folder,
    read_small,
    remove_folder,
    rename_folder,
    sync_folder,
    write_small,
)
from shardwise.errors import CheckpointError, UserError

LOCK = ".lock"
_STALE = f"{TEMPORARY}step-*"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def begin(folder: Folder, step: int) -> Folder:
    """Create an empty folder to write the checkpoint of ``step`` in.

    Removes unfinished folders that crashes have left in ``folder``.

    Raises:
        CheckpointError: the checkpoint's own name is taken by something that is not a checkpoint.
        OSError: the folder cannot be written to.
    """
    target = folder / step_folder(step)
    if isinstance(folder, Path):
        if target.exists():
            raise CheckpointError(f"'{target}' exists but has no {MANIFEST}; remove it and save again")
        folder.mkdir(parents=True, exist_ok=True)
        working = folder / f"{TEMPORARY}{target.name}"
        for stale in folder.glob(_STALE):
            if stale != working:
                abandon(stale)
            elif stale.is_dir():
                remove_folder(stale)
        working.mkdir()
        return working
    if target.is_dir():  # files without a manifest: from a save that was never finished
        remove_folder(target)
    target.mkdir(parents=True, exist_ok=True)
    return target


def commit(working: Folder, target: Folder, manifest: Manifest) -> None:
    """Make the contents of ``working`` the checkpoint ``target``, durably and visible as a unit.

    Raises:
        OSError: it could not be written; ``target`` is not there.
        CheckpointError: the manifest is larger than the reader's limit.
    """
    document = manifest.to_json().encode()
    if len(document) > LARGEST_MANIFEST:
        raise CheckpointError(
            f"'{target / MANIFEST}' would have {len(document)} bytes, more than the {LARGEST_MANIFEST} that are read; "
            "save from fewer ranks"
        )
    if isinstance(working, Path) and isinstance(target, Path):
        write_small(working / MANIFEST, document)
        rename_folder(working, target)
    else:
        write_small(target / MANIFEST, document)


def abandon(working: Folder) -> None:
    """Remove the files of an abandoned checkpoint; warns where it cannot remove them."""
    try:
        if isinstance(working, Path) and not working.exists():
            return  # it already has its final name
        remove_folder(working)
    except Exception as error:
        warnings.warn(f"'{working}' could not be removed: {error}", stacklevel=2)


def take_away(path: Folder) -> None:
    """Remove a checkpoint, renaming it first so that a partial one is never read.

    Raises:
        OSError: it is still there, or part of it is left under a temporary name.
    """
    if isinstance(path, Path):
        hidden = path.with_name(f"{TEMPORARY}{path.name}-old")
        os.rename(path, hidden)
        sync_folder(path.parent)
        remove_folder(hidden)
    else:
        (path / MANIFEST).unlink()
        remove_folder(path)


def move_latest(folder: Folder, target: Folder) -> None:
    """Point ``latest`` at ``target``, which must already be durable."""
    write_small(folder / LATEST, f"{target.name}\n".encode())


def named_latest(folder: Folder) -> str:
    """Return the name in ``latest``; empty where there is none."""
    try:
        return read_small(folder / LATEST, LARGEST_LATEST).decode().strip()
    except (OSError, ValueError):
        return ""


def prune(folder: Folder, keep: int, saved: Folder, protected: Sequence[str] = ()) -> None:
    """Remove all but the ``keep`` newest checkpoints.

    ``saved``, the one just written, always stays, and so does the first of those whose names are ``protected``; the
    others stay until that one is there. Warns of what cannot be removed; that does not fail the save.
    """
    try:
        others = [path for _, path in saved_steps(folder) if path.name != saved.name]
    except Exception as error:
        warnings.warn(f"old checkpoints in '{folder}' could not be listed: {error}", stacklevel=2)
        return
    there = {saved.name, *(path.name for path in others)}
    pinned = protected[:1] if {*protected[:1]} <= there else protected
    for path in (path for path in others[keep - 1 :] if path.name not in pinned):
        try:
            take_away(path)
        except Exception as error:
            warnings.warn(f"the old checkpoint '{path}' could not be removed: {error}", stacklevel=2)


class FolderLock:
    """Lock that keeps a second run out of a checkpoint folder.

    It lasts as long as this process lives or until `release`. On a disk by the operating system's lock on ``.lock``; a
    forked child does not own it. A store behind a URL, and a file system without locks (which is reported),
    has none: there `check` finds out whether another run has moved ``latest``.

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
            _open_locks.add(self)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self.release()
                if isinstance(error, BlockingIOError):
                    raise self._taken() from None
                if error.errno not in _NO_LOCKS:
                    raise
                warnings.warn(
                    f"the file system of '{folder}' has no locks ({error.strerror}): nothing keeps a second run out",
                    stacklevel=2,
                )
        if self._handle < 0:
            self._latest = named_latest(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def check(self) -> None:
        """Check that the folder is still this run's; see the class."""
        if self._handle < 0 and named_latest(self.folder) != self._latest:
            raise self._taken()

    def moved(self, target: Folder) -> None:
        """Record that this run has pointed ``latest`` at ``target``."""
        self._latest = target.name

    def release(self) -> None:
        """Release the lock."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _taken(self) -> UserError:
        return UserError(
            f"another run is saving checkpoints to '{self.folder}'; wait for it, or choose another folder "
            "(train.output or checkpoint.folder)"
        )


_open_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close the lock file in a forked child.

    The lock belongs to the open file: a child (of a data loader) that outlives its parent would keep other runs out.
    """
    for lock in list(_open_locks):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
