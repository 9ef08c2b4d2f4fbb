"""`RankWatch`: a rank's own part of the watchdog, a heartbeat at each change of phase and a thread that answers."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shardwise.environment import attempt
from shardwise.train.run_files import RunFile
from shardwise.train.session import Session
from shardwise.watch.beside import start_monitor
from shardwise.watch.heartbeat import Heartbeat
from shardwise.watch.rank_state import Responder

MONITOR_END_S = 5.0
"""Time that the monitor has to end."""


class RankWatch:
    """Heartbeat of a rank for as long as it trains.

    ``output`` is the run's folder, whose launcher watches the ranks. With ``beside`` nobody does: the node's first rank
    starts a monitor, and heartbeats are in a folder of this machine.
    """

    def __init__(self, session: Session, output: Path, *, beside: bool = False) -> None:
        ranks = session.ranks
        self._monitor: subprocess.Popen[bytes] | None = None
        self._watchers = session.phase_watchers  # and not the session, which would keep the model alive
        folder = _folder_here() if beside else output / RunFile.HEARTBEATS
        self._heartbeat = Heartbeat(folder, ranks.rank)
        self._responder: Responder | None = Responder(ranks.rank) if sys.platform == "linux" else None
        self._watchers.append(self._heartbeat.phase)
        session.at_close.append(self.close)
        atexit.register(self.close)
        if beside and ranks.local_rank == 0 and ranks.world_size > 1 and sys.platform == "linux":
            first = ranks.rank
            here = range(first, first + ranks.local_world_size)
            report = output / (RunFile.WATCH if len(here) == ranks.world_size else f"watch-{first}.json")
            self._monitor = start_monitor(folder, here, report, whole=len(here) == ranks.world_size)

    def close(self) -> None:
        """End: this rank's silence means nothing from now on."""
        self._heartbeat.close()
        atexit.unregister(self.close)
        if self._heartbeat.phase in self._watchers:
            self._watchers.remove(self._heartbeat.phase)
        if self._responder is not None:
            self._responder.close()
            self._responder = None
        if self._monitor is not None:
            self._monitor.communicate(timeout=MONITOR_END_S)
            self._monitor = None


def _folder_here() -> Path:
    """Folder of the heartbeats of this node's ranks: they have one parent, and each attempt of it another number."""
    return Path(tempfile.gettempdir()) / f"shardwise-watch-{os.getuid()}-{os.getppid()}-{attempt()}"
