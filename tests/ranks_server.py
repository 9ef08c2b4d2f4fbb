"""What ranks of tests are forked from: a copy of the process that runs the tests, made before the first of them.

It has imported what the tests have, so neither it nor a rank imports that again; a rank's imports took more than what a
small test does. The fork server of Shardwise's commands is forked from it in turn, with an environment of its own.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, cast
from unittest import mock

from shardwise import environment
from shardwise.launch import fork_server


def fork_now() -> None:
    """Make the fork server of `multiprocessing` a copy of this process, unless it has one."""
    if forkserver._forkserver._forkserver_pid is None:
        resource_tracker.ensure_running()
        with mock.patch.object(util, "spawnv_passfds", _fork):
            forkserver.ensure_running()


def _fork(_: str, __: Sequence[str], files: Sequence[int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _be_the_server(*files)
        finally:
            os._exit(0)
    return pid


def _be_the_server(listener: int, alive: int) -> None:
    """Serve, as a process that was started for it would: with none of this one's files, and none of pytest's hooks."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file not in (1, 2, listener, alive, nothing) and os.path.lexists(f"/proc/self/fd/{file}"):
            # not closed: an object that is forgotten later would close whoever has its number by then
            os.dup2(nothing, file, inheritable=False)
    sys.stdin = os.fdopen(0)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.root.handlers.clear()
    gc.set_threshold(700, 10, 10)
    if listener in select.select([listener, alive], [], [])[0]:  # the first rank; some files have none
        importlib.import_module("tests.preload")
        gc.freeze()  # no rank is to write to what they all share
        forkserver.main(listener, alive, [])


class ForkServer(fork_server.ForkServer):
    """Shardwise's, forked."""

    def _started(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        context: Any = multiprocessing.get_context("forkserver")
        env = environment.one_thread(self._environment)
        process = context.Process(target=_serve, args=(connection, env), daemon=True)
        process.start()
        process.wait = process.join
        return cast("subprocess.Popen[bytes]", process)


def _serve(connection: socket.socket, env: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    fork_server._serve(connection)
