"""The monitor as a process of its own, beside ranks that another launcher has started: one for each node."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardwise.watch.monitor import Monitor
from shardwise.watch.rank_state import tell_end

END_S = 2.0
"""Time that a rank has to end by itself, before it is killed."""

_POLL_S = 0.1


def start_monitor(folder: Path, ranks: range, report: Path, *, whole: bool) -> subprocess.Popen[bytes]:
    """Start the monitor of ``ranks``; it ends with this process, whose end of a pipe it reads.

    ``folder`` holds the heartbeats, and is removed at the end.
    """
    words = [str(folder), str(ranks.start), str(ranks.stop), str(report), str(int(whole))]
    command = [sys.executable, "-m", __name__, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C is for the ranks


def main() -> None:
    """Watch until the ranks have ended."""
    folder, start, stop, report, whole = sys.argv[1:]
    monitor = Monitor(Path(folder), tuple(range(int(start), int(stop))), Path(report), whole=whole == "1")
    try:
        while not select.select([sys.stdin.buffer], [], [], _POLL_S)[0]:
            for line in monitor.check():
                print(f"shardwise: {line}", file=sys.stderr, flush=True)
            if monitor.ends:
                print(f"shardwise: {monitor.message}", file=sys.stderr, flush=True)
                _end(monitor)
                return
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end(monitor: Monitor) -> None:
    pids = monitor.pids()
    for pid in pids:
        tell_end(pid)
    time.sleep(END_S)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
