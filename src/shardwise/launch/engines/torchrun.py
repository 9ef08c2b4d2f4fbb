"""torchrun on machines without a scheduler: the line of each node, and starting them over ssh."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from shardwise.errors import Interrupted, RankError
from shardwise.launch.engines.launch_request import NO_INTERFACE, LaunchRequest

SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
"""A terminal (-tt), so that Ctrl-C and the end of the connection reach torchrun; no question for a password."""
_CTRL_C = b"\x03"
_LOOK_S = 0.2


def torchrun_words(request: LaunchRequest, node: int) -> list[str]:
    """Return the command of a node; node 0 hosts the rendezvous."""
    words = [request.python, "-m", "torch.distributed.run"]
    if request.max_nodes == 1:
        words += ["--standalone"]
    else:
        host = f"is_host={'true' if node == 0 else 'false'},join_timeout=900,read_timeout=900"
        words += [f"--nnodes={request.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint(request)}"]
        words += [f"--rdzv-id={request.name}", f"--rdzv-conf={host}"]
    words += [f"--nproc-per-node={request.nproc}", *request.torchrun_options, *request.train]
    return ["env", *(f"{one.name}={one.value}" for one in request.variables), *words]


def torchrun_line(request: LaunchRequest, node: int) -> str:
    """Return the line that starts a node, for a shell."""
    return f"cd {shlex.quote(request.folder)} && exec {shlex.join(torchrun_words(request, node))}"


def endpoint(request: LaunchRequest) -> str:
    """Return host and port of the rendezvous: as given, else the first host's, else this machine's."""
    given, hosts = request.options["endpoint"], request.options["hosts"]
    host = hosts[0].rpartition("@")[2] if hosts else socket.gethostname()
    return given or f"{host}:{request.port}"


def render_torchrun(request: LaunchRequest, file: str, header: str) -> str:
    """Return a script with the line of each node."""
    hosts = request.options["hosts"] or [f"node {node}" for node in range(request.nodes)]
    lines = ["#!/bin/sh", f"# {header}"]
    if request.max_nodes > 1:
        lines += [
            f"# One line for each node; {endpoint(request)} must be the first, and all must reach it. Start them",
            "# within 15 minutes (join_timeout). Each node needs this Python, and the same files at the same paths.",
        ]
    lines += [f"# {one.name}: {one.why}" for one in request.variables]
    lines += [f"# {NO_INTERFACE}"] if request.interface is None else []
    if request.nodes == 1:
        return "\n".join([*lines, torchrun_line(request, 0), ""])
    lines += ['case "$1" in']
    for node, host in enumerate(hosts):
        lines += [f"{node}) # {host}", f"    {torchrun_line(request, node)} ;;"]
    lines += [f'*) echo "give the number of the node, 0 to {request.nodes - 1}" >&2; exit 2 ;;', "esac", ""]
    return "\n".join(lines)


def torchrun_problems(request: LaunchRequest) -> list[str]:
    """List hosts and an endpoint that do not fit."""
    hosts, given = request.options["hosts"], request.options["endpoint"]
    problems = []
    if hosts and len(hosts) != request.nodes:
        problems.append(
            f"--hosts names {len(hosts)} ({', '.join(hosts)}), and --nodes is {request.nodes}; name each once"
        )
    elif hosts and len(set(hosts)) != len(hosts):
        problems.append(f"--hosts '{','.join(hosts)}' names a host twice; a host's ranks are set by --nproc")
    bad = [host for host in hosts or () if not host or host.startswith("-") or not host.isprintable() or " " in host]
    problems += [f"--hosts: '{host}' is not a host name; write them as a,b or user@a,user@b" for host in bad]
    if given is not None and not given.rpartition(":")[2].isdigit():
        problems.append(f"--endpoint '{given}' must be HOST:PORT, the first node's address and a free port there")
    return problems


def run_over_ssh(request: LaunchRequest, grace_s: float | None = None, *, to_stderr: bool = False) -> None:
    """Start all nodes over ssh, print what they print, and wait.

    When one fails, or on Ctrl-C or SIGTERM, all are ended; the others have ``grace_s`` to save.

    Raises:
        RankError: a node failed; names the first.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    hosts: Sequence[str] = request.options["hosts"]
    width = max(map(len, hosts))
    grace = request.grace_s if grace_s is None else grace_s
    nodes: list[subprocess.Popen[bytes]] = []
    printers: list[threading.Thread] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # before the first node: none may be left alone
    try:
        for number, host in enumerate(hosts):
            command = [*SSH, host, torchrun_line(request, number)]
            pipe, same = subprocess.PIPE, subprocess.STDOUT
            nodes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=same, start_new_session=True))
            prefix = f"{host:<{width}} | "
            printers.append(threading.Thread(target=_forward, args=(nodes[-1].stdout, prefix, to_stderr), daemon=True))
            printers[-1].start()
        failed = _first_failure(nodes, elastic=request.is_elastic)
        if failed is not None and any(node.poll() is None for node in nodes):
            print(f"shardwise: node {hosts[failed]} failed; the others have {grace:g} s to save", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"shardwise: interrupted; the nodes have {grace:g} s to save", file=sys.stderr)
        raise Interrupted("interrupted; the same command resumes from the newest checkpoint") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(nodes, grace)
        for printer in printers:
            printer.join(timeout=5)
        for stream in (stream for node in nodes for stream in (node.stdin, node.stdout) if stream is not None):
            with suppress(OSError):  # a broken pipe, with Ctrl-C that was not read
                stream.close()
    if failed is not None:
        code = nodes[failed].returncode
        what = "ssh could not connect, or lost the connection" if code == 255 else f"torchrun ended with {code}"
        raise RankError(f"node {hosts[failed]} failed first: {what}; its output is above, after '{hosts[failed]} |'")


def _first_failure(nodes: Sequence[subprocess.Popen[bytes]], *, elastic: bool) -> int | None:
    """Wait until all nodes ended, or one failed; under an elastic run, until all ended or the last one failed."""
    first: int | None = None
    while True:
        codes = [node.poll() for node in nodes]
        wrong = [number for number, code in enumerate(codes) if code]
        first = wrong[0] if wrong and first is None else first
        if None not in codes:
            return None if elastic and 0 in codes else first
        if wrong and not elastic:
            return first
        time.sleep(_LOOK_S)


def _end(nodes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Interrupt nodes that run, and after ``grace_s`` close their connections."""
    for node in nodes:
        if node.poll() is None and node.stdin is not None:
            with suppress(OSError):
                node.stdin.write(_CTRL_C)
                node.stdin.flush()
    deadline = time.monotonic() + grace_s
    for node in nodes:
        try:
            node.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:  # a second Ctrl-C waits for nothing
            deadline = 0.0
        if node.poll() is None:
            node.terminate()
        node.wait()


def _forward(stream: IO[bytes] | None, prefix: str, to_stderr: bool) -> None:
    """Print each line of a node after its name."""
    for line in stream or ():
        text = f"{prefix}{line.decode(errors='replace').rstrip()}\n"  # in one: nodes have a thread each
        print(text, end="", file=sys.stderr if to_stderr else sys.stdout, flush=True)
