"""``shardwise checkpoint inspect`` and ``verify``: look, say, and end with 3 where something is damaged."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from shardwise.checkpoint.inspect import inspect_checkpoint
from shardwise.errors import CheckpointError, UserError
from shardwise.report.checkpoint_table import (
    ReadProgress,
    inspection_json,
    print_inspection,
    print_verification,
    verification_json,
)

PIPED = 132
_FIX = "restore the files from a copy, or go on from an earlier checkpoint"


def run_inspect(place: str, *, everything: bool, as_json: bool) -> None:
    """The verb.

    Raises:
        UserError: there is no checkpoint that is known.
        CheckpointError: files are missing or have another size than they need, or the manifest is damaged.
    """
    try:
        found = inspect_checkpoint(place)
    except OSError as error:
        raise _unreadable(place, error) from None
    print_inspection(found, _console(as_json), everything=everything)
    if as_json:
        print(json.dumps(inspection_json(found)))
    if found.damage:
        raise CheckpointError(f"'{found.place}' is damaged, as is said above; {_FIX}")


def run_verify(place: str, *, as_json: bool) -> None:
    """The verb.

    Raises:
        UserError: there is no checkpoint that is known.
        CheckpointError: bytes are not those that were saved, or something is missing.
    """
    from shardwise.checkpoint.integrity import verify_checkpoint

    console = _console(as_json)
    try:
        with ReadProgress(console) as progress:
            found = verify_checkpoint(place, progress.begin, progress.tick)
    except OSError as error:
        raise _unreadable(place, error) from None
    print_verification(found, console)
    if as_json:
        print(json.dumps(verification_json(found)))
    if found.damage:
        raise CheckpointError(f"'{found.place}' is damaged, as is said above; {_FIX}")


def _console(as_json: bool) -> Console:
    """As wide as the terminal; where the text goes into a file or a pipe, wide enough for names."""
    stream = sys.stderr if as_json else sys.stdout
    width = None if stream.isatty() else PIPED
    return Console(stderr=as_json, highlight=False, soft_wrap=width is not None, width=width)


def _unreadable(place: str, error: OSError) -> UserError:
    return UserError(
        f"'{error.filename or place}' cannot be read: {error.strerror or error}; give a place you may read"
    )
