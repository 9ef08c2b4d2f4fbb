"""Server process that imports the ranks' modules during planning and forks ranks (Linux).

A fork takes milliseconds. A rank is forked twice, so that it becomes a child of the command and not of this server:
waiting for it, signals and queries of its peak memory work as for a directly started process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise import environment
from shardwise.collector import no_collector
from shardwise.errors import Interrupted

MODULES = (
    "torch.distributed.fsdp",
    "torch._dynamo",  # every optimizer imports it
    "shardwise.run.job",
    "shardwise.run.callbacks",
    "shardwise.report.progress",
    "shardwise.train.loop",
)
"""Modules that every rank of `train` imports; seconds for each of them."""

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's driver, AMD's, and either under WSL
_LARGEST = 1 << 20
_servers: list[ForkServer] = []


def running() -> ForkServer | None:
    """Server of this process, if `start` has created one."""
    return _servers[0] if _servers else None


def start(modules: Sequence[str] = MODULES) -> ForkServer | None:
    """Start the server, unless it runs; it imports ``modules`` in the background.

    Returns ``None`` where ranks cannot be forked: on systems other than Linux, in a process that is a rank itself, and
    on a machine with GPUs: CUDA does not survive a fork, and an import that only queries the number of devices can be
    enough.
    """
    if _servers:
        return _servers[0]
    if sys.platform != "linux" or environment.is_rank() or any(map(os.path.exists, _GPUS)):
        return None
    if not adopt_orphans(True):
        return None
    adopt_orphans(False)
    with contextlib.suppress(OSError):
        _servers.append(ForkServer(modules))
        atexit.register(stop)
    return running()


def adopt_orphans(on: bool) -> bool:
    """Set whether orphaned descendants become this process's children, which it can wait for.

    Returns ``False`` if the system does not support it.
    """
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_SUBREAPER, int(on), 0, 0, 0) == 0)


def stop() -> None:
    """Stop the server, if there is one; ranks continue."""
    while _servers:
        _servers.pop().close()


class ForkServer:
    """Client of the server, in the command's process."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._environment = environment.snapshot()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=environment.one_thread(self._environment),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the command, which signals the ranks
            )
        self.preload(modules)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def suits(self, env: dict[str, str]) -> bool:
        """Return whether ranks with this environment may be forked: it differs only in the rank's own variables."""
        return environment.same_but_for_rank(env, self._environment)

    def preload(self, modules: Sequence[str]) -> None:
        """Import more modules before the next rank; failing imports are left to the rank."""
        with contextlib.suppress(OSError):
            self._socket.sendmsg([json.dumps({"import": list(modules)}).encode()])

    def spawn(self, command: Sequence[str], env: dict[str, str], output: int | None, parent_fd: int) -> int | None:
        """Fork a rank that runs ``python -m module words…``; returns its process id, or ``None``.

        ``output`` is the target of its stdout and stderr (``None``: this process's), ``parent_fd`` the pipe that ends
        with this process. Modules are imported under the environment in which the server was started: if ``env``
        differs in more than the rank's variables, or the command is another program, the result is ``None``, and the
        rank must be started as a new process.
        """
        if list(command[:2]) != [sys.executable, "-m"] or not self.suits(env):
            return None
        request = {"module": command[2], "words": list(command[3:]), "env": env, "folder": str(Path.cwd())}
        files = [1 if output is None else output, 2 if output is None else output, parent_fd]
        adopt_orphans(True)
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            answer = json.loads(self._socket.recv(_LARGEST) or b"null")
        except OSError:
            return None
        return answer if isinstance(answer, int) else None

    def close(self) -> None:
        """Stop the server at once; it may be in the middle of an import."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _serve(connection: socket.socket) -> None:
    """Import and fork on request, until the command ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(connection, _LARGEST, 3)
        if not message:
            return
        request = json.loads(message)
        if "import" in request:
            with no_collector():  # looking for garbage took 16 % of torch's and transformers' import
                for name in request["import"]:
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
            gc.collect()
            gc.freeze()  # objects are shared with the ranks until one of them writes to them
            continue
        pid = _fork(request, files, connection) if len(os.listdir("/proc/self/task")) == 1 else None
        for file in files:
            os.close(file)
        connection.send(json.dumps(pid).encode())


def _fork(request: dict[str, Any], files: Sequence[int], connection: socket.socket) -> int | None:
    """Fork a process that forks the rank and ends; returns the rank's id.

    It returns once the rank is a child of the command.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        rank = os.fork()
        if rank == 0:
            os.close(reader)
            os.close(writer)
            connection.close()
            while os.getppid() == between:
                time.sleep(0.0005)
            _become(request, files)
        os.write(writer, str(rank).encode())
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 20)
    os.close(reader)
    os.waitpid(between, 0)
    return int(answer) if answer else None


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Turn this process into a rank: run its module as ``python -m`` would, and never return."""
    code = 1
    try:
        os.setsid()
        out, err, parent_fd = files
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["folder"])
        sys.path[0] = request["folder"]
        sys.argv = [request["module"], *request["words"]]
        environment.become_rank(request["env"], parent_fd)
        import torch

        torch.set_num_threads(environment.threads())  # the library has read the variable already
        torch.default_generator.seed()  # random, as in a new process; Python's random does so itself
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        sys.modules.pop(request["module"], None)
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except KeyboardInterrupt:  # before `guarded` could take it
        code = Interrupted.exit_code
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
