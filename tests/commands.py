"""`shardwise`: the command line in this process, and its ranks from a fork server that has everything loaded.

Seconds cheaper than a process of its own, which is what the tests of signals and one test of each verb take.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any
from unittest import mock

from shardwise.launch import fork_server, local
from tests.ledger import spent

ROOT = Path(__file__).parents[1]
PRELOADED = (*fork_server.MODULES, "tests.preload")


def start_servers() -> None:
    """Start what ranks are forked from, unless it runs."""
    fork_server.start(PRELOADED)


def shardwise(*words: str, cwd: Path = ROOT, exit_code: int | None = 0) -> CompletedProcess[str]:
    """``shardwise words…`` in ``cwd``; fails unless it ends with ``exit_code`` (``None``: whatever it is)."""
    from shardwise.cli.main import main

    start_servers()
    code = 0
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        _working_in(cwd),
        _streams(out, err),
        warnings.catch_warnings(),
        mock.patch.object(sys, "argv", ["shardwise", *words]),
    ):
        warnings.simplefilter("default")
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    assert exit_code in (None, code), f"exit code {code}\n{texts[0]}\n{texts[1]}"
    return CompletedProcess(["shardwise", *words], code, *texts)


def _counted(*arguments: Any) -> int:
    spent("ranks")
    return _start(*arguments)


_start = local._start
local._start = _counted  # for the rest of this process


@contextmanager
def _streams(out: IO[str], err: IO[str]) -> Iterator[None]:
    """Files 1 and 2 of this process, which ranks inherit, are ``out`` and ``err`` inside."""
    kept = {1: os.dup(1), 2: os.dup(2)}
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    try:
        with (
            open(1, "w", closefd=False) as stdout,
            open(2, "w", closefd=False, errors="backslashreplace") as stderr,
            mock.patch.object(sys, "stdout", stdout),
            mock.patch.object(sys, "stderr", stderr),
        ):
            yield
    finally:
        for number, file in kept.items():
            os.dup2(file, number)
            os.close(file)


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
