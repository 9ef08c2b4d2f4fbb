"""`RankWatch`: a rank's own part of the watchdog, a heartbeat at each change of phase and a thread that answers."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from shardwise.distributed.process_group import Ranks, broadcast_text, gather_text
from shardwise.environment import node_name
from shardwise.measure.step_time.attribution import Attribution
from shardwise.train.run_files import RunFile
from shardwise.watch.abort_hold import AbortHold
from shardwise.watch.beside import Watched, start_monitor
from shardwise.watch.devices import device_uuid, write_device
from shardwise.watch.heartbeat import Heartbeat
from shardwise.watch.rank_state import Responder
from shardwise.watch.slow_rank import SlowRank

MONITOR_END_S = 5.0
"""Time that the monitor has to end."""


class Loop(Protocol):
    """What is watched: a `Session`, or a `WatchedLoop`; see the former for its parts."""

    ranks: Ranks
    phase_watchers: list[Callable[[str], None]]
    at_close: contextlib.ExitStack

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        ...


class RankWatch:
    """Heartbeat of a rank for as long as it trains.

    ``output`` is the run's folder, whose launcher watches the ranks. With ``beside`` nobody does: the node's first rank
    starts a monitor, and heartbeats are in a folder of this machine. Where they cannot be written, the run is not
    watched, and a warning says so.
    """

    def __init__(self, session: Loop, output: Path, *, beside: bool = False) -> None:
        self._ranks = ranks = session.ranks
        self._monitor: subprocess.Popen[bytes] | None = None
        self._responder: Responder | None = None
        self._hold: AbortHold | None = None
        self._watchers = session.phase_watchers  # and not the session, which would keep the model alive
        self._speaks = ranks.is_main and ranks.world_size > 1
        several = beside and ranks.world_size > ranks.local_world_size
        self._report = output.absolute() / (f"watch-{ranks.rank}.json" if several else RunFile.WATCH)
        # its monitors know this start of the run by a name that nobody can guess
        run = broadcast_text(secrets.token_hex(8) if ranks.is_main else "", ranks) if beside else ""
        here = f"shardwise-watch-{run}-{node_name()}-{os.getppid()}"  # nodes may share a file system, or a name
        folder = Path(tempfile.gettempdir()) / here if beside else output / RunFile.HEARTBEATS
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if sys.platform == "linux":
                self._responder = Responder(folder, ranks.rank)
                with contextlib.suppress(OSError, AttributeError):  # no libstdc++: an abort is seen when it is over
                    self._hold = AbortHold(folder, ranks.rank) if ranks.world_size > 1 else None
            if session.device.type == "cuda":
                write_device(folder, ranks.rank, device_uuid(session.device))
            self._heartbeat: Heartbeat | None = Heartbeat(folder, ranks.rank)
        except OSError as error:
            self._heartbeat = None
            self._close_answers()
            logging.getLogger("shardwise").warning("rank %d is not watched: %s", ranks.rank, error)
            return
        self._watchers.append(self._heartbeat.phase)
        session.at_close.callback(self.close)
        atexit.register(self._exit)
        if beside and ranks.local_rank == 0 and ranks.world_size > 1 and sys.platform == "linux":
            watched = Watched(
                folder, self._report, ranks.local_world_size, ranks.world_size, ranks.rank == 0, run if several else ""
            )
            self._monitor = start_monitor(watched)

    def judge_speed(self, attribution: Attribution, say: Callable[[str], None]) -> None:
        """Name a rank that all others wait for, step after step, with ``say`` on rank 0. Collective on GPUs."""
        ranks, uuids = self._ranks, list[str]()
        if ranks.device.type == "cuda" and ranks.world_size > 1:
            uuids = gather_text(device_uuid(ranks.device), ranks)[: ranks.local_world_size]  # NVML sees this node's
        if self._speaks:
            SlowRank.attach(attribution, say, self._report, uuids)

    def close(self, *, waits: bool = True) -> None:
        """End: this rank's silence means nothing from now on. A monitor ends by itself; ``waits`` until it has."""
        atexit.unregister(self._exit)
        if self._heartbeat is not None:
            self._heartbeat.close("failed" if getattr(sys, "last_value", None) is not None else "end")
            if self._heartbeat.phase in self._watchers:
                self._watchers.remove(self._heartbeat.phase)
        self._close_answers()
        monitor, self._monitor = self._monitor, None
        if monitor is None:
            return
        try:
            if waits:
                monitor.communicate(timeout=MONITOR_END_S)
            elif monitor.stdin is not None:
                monitor.stdin.close()
        except (subprocess.TimeoutExpired, OSError):
            monitor.kill()

    def _exit(self) -> None:
        self.close(waits=False)  # other ranks may have something to say when they have lost this one

    def _close_answers(self) -> None:
        for one in (self._hold, self._responder):
            if one is not None:
                one.close()
        self._hold = self._responder = None
