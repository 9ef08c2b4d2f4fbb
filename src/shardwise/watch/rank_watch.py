"""`RankWatch`: a rank's own part of the watchdog, a heartbeat at each change of phase and a thread that answers."""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.train.run_files import RunFile
from shardwise.train.session import Session
from shardwise.watch.heartbeat import Heartbeat
from shardwise.watch.rank_state import Responder


class RankWatch:
    """Heartbeat of a rank for as long as it trains. ``folder`` is that of the run."""

    def __init__(self, session: Session, folder: Path) -> None:
        rank = session.ranks.rank
        self._heartbeat = Heartbeat(folder / RunFile.HEARTBEATS, rank)
        self._responder = Responder(rank) if sys.platform == "linux" else None
        session.phase_watchers.append(self._heartbeat.phase)

    def close(self) -> None:
        """End: this rank's silence means nothing from now on."""
        self._heartbeat.close()
        if self._responder is not None:
            self._responder.close()
