"""The monitor as a process of its own, beside ranks that another launcher has started: one for each node."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.environment import rendezvous, silence_torch
from shardwise.watch.monitor import Monitor
from shardwise.watch.nodes import Nodes
from shardwise.watch.rank_state import tell_end

END_S = 2.0
"""Time that a rank has to end by itself, before it is killed."""
LAST_S = 10.0
"""Time that the monitor waits for the others, once the node's first rank has ended: they may fail, having lost it."""

_POLL_S = 0.1


@dataclass(frozen=True)
class Watched:
    """Ranks for a monitor of this node: ``count`` of ``world_size``.

    ``folder`` holds their heartbeats, and is removed at the end. ``speaks``: rank 0 is here, whose console has the
    verdict. ``run`` names the run to other nodes' monitors; it is empty if there are none.
    """

    folder: Path
    report: Path
    count: int
    world_size: int
    speaks: bool
    run: str = ""


def start_monitor(watched: Watched) -> subprocess.Popen[bytes]:
    """Start a monitor; it ends with this process, whose end of a pipe it reads."""
    words = json.dumps(asdict(watched), default=str)
    command = [sys.executable, "-m", __name__, words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C is for the ranks


def main() -> None:
    """Watch until the ranks have ended."""
    found = json.loads(sys.argv[1])
    watched = Watched(**{**found, "folder": Path(found["folder"]), "report": Path(found["report"])})
    monitor = Monitor(watched.folder, watched.count, watched.report, _nodes(watched))
    try:
        while not select.select([sys.stdin.buffer], [], [], _POLL_S)[0]:
            monitor.see_ended()
            for line in monitor.check():
                if watched.speaks or monitor.knows_alone:
                    print(f"shardwise: {line}", file=sys.stderr, flush=True)
            if monitor.ends:
                print(f"shardwise: {monitor.message}", file=sys.stderr, flush=True)
                _end(monitor)
                return
        deadline = time.monotonic() + LAST_S
        while not (monitor.see_ended() or monitor.all_ended()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if text := monitor.ended():
            print(f"shardwise: {text}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(watched.folder, ignore_errors=True)


def _nodes(watched: Watched) -> Nodes | None:
    place = rendezvous() if watched.run else None
    if place is None:
        return None
    silence_torch()  # a store that is out of reach is no news each time
    return Nodes.connect(place.master_addr, place.master_port, watched.run, watched.world_size)


def _end(monitor: Monitor) -> None:
    pids = monitor.pids()
    for rank in pids:
        tell_end(monitor.folder, rank)
    time.sleep(END_S)
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
