"""`Monitor`: notices that ranks have stopped moving, finds out why, and says it; it runs beside the ranks."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardwise.units import seconds_text
from shardwise.watch.abort_hold import any_held
from shardwise.watch.devices import Devices
from shardwise.watch.exit_status import OomKills
from shardwise.watch.heartbeat import DONE, Beat, ranks_here, read_beat
from shardwise.watch.nodes import Nodes
from shardwise.watch.processes import ProcessFacts, has_ended, unanswered_peers
from shardwise.watch.rank_facts import RankFacts
from shardwise.watch.rank_state import RankState, ask
from shardwise.watch.verdict import CERTAIN, SLOW, Reason, Verdict, ended, judge, mismatched, went_on
from shardwise.watch.watch_events import add_event

QUIET_S = 3.0
"""Silence of all ranks, beyond two steps, after which they are asked where they stand."""
UNKNOWN_S = 60.0
"""Longest wait without work in a phase of which no duration is known: the first read of a slow disk, a download."""
BUSY_S = 600.0
"""Longest computation of a rank that the others wait for: where no duration of its phase is known, it may compile."""
SLOW_S = 20.0
"""Computation of a rank after which it is named, if its phase has taken far less before."""
RECOVER_S = 120.0
"""Time that a rank which does nothing has left after it was named; five times that if it waits for a disk or for data
or does its own work between steps, and `BUSY_S` if it computes."""

_POLL_S, _ANSWER_S = 0.25, 1.0
_LOOKS_S, _LOOKS_SHARE = (0.5, 5.0), 0.1  # between two looks at ranks that do not move; share of their silence
_BETWEEN = ("start", "other", "evaluation", "checkpoint")
_FACTOR = 3.0  # a phase may take so often the longest time that it has taken
_SLOWER = 5.0
_WORKS = 0.05  # share of a core that counts as work


@dataclass
class Monitor:
    """Monitor of this node's ``count`` ranks, whose heartbeats are in ``folder``.

    ``nodes`` are the others, if there are any. ``verdict`` is the last one, ``ends`` is set when the ranks must end.
    """

    folder: Path
    count: int
    report: Path
    nodes: Nodes | None = None
    verdict: Verdict | None = None
    ends: bool = False
    _next: float = 0.0
    _cpu: dict[int, tuple[float, float]] = field(default_factory=dict)
    _seen: tuple[Reason, tuple[int, ...]] | None = None
    _named_at: float = 0.0
    _newest: dict[int, int] = field(default_factory=dict)
    _moved_at: float = float("-inf")
    _ended: tuple[int, ...] = ()
    _oom_kills: OomKills = field(default_factory=OomKills.now)
    _devices: Devices = field(init=False)

    def __post_init__(self) -> None:
        self._devices = Devices(self.folder)

    def check(self) -> list[str]:
        """Look at the ranks, at most four times a second, and return lines to print."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + _POLL_S
        beats = self._beats()
        moving = [beat for beat in beats if beat.phase not in DONE]
        if len(beats) < self.count or not moving:
            return []
        quiet = min(now - beat.since_ns * 1e-9 for beat in moving)
        step = max(beat.step_ns for beat in beats) * 1e-9
        if any_held(self.folder):
            self._judge_held(beats, now)
            return []
        if quiet < QUIET_S + 2 * step:
            self._newest.clear()
            self._devices.remember()
            if self.nodes is not None:
                self.nodes.moving([beat.rank for beat in beats])
            return self._recovered(now)
        self._next = now + min(_LOOKS_S[1], max(_LOOKS_S[0], _LOOKS_SHARE * quiet))
        return self._look(beats, quiet, now)

    @property
    def message(self) -> str:
        """Why the ranks are ended."""
        text = "" if self.verdict is None else self.verdict.text
        return f"all ranks were ended, as none could go on: {text}\nstacks of all ranks: {self.report}"

    @property
    def knows_alone(self) -> bool:
        """Whether rank 0's node, whose console has the verdict, may not know it: its link, or this node's devices."""
        return self.verdict is not None and self.verdict.reason in (Reason.LINK, Reason.DEVICE)

    def pids(self) -> dict[int, int]:
        """Process of each rank."""
        return {beat.rank: beat.pid for beat in self._beats()}

    def see_ended(self) -> bool:
        """Note which ranks are the first to have ended in the middle of a step: a launcher ends the others then."""
        if not self._ended:
            self._ended = tuple(one.rank for one in self._beats() if one.phase not in DONE and has_ended(one.pid))
        return bool(self._ended)

    def all_ended(self) -> bool:
        """Return whether every rank has ended, or says so."""
        return all(one.phase in DONE or has_ended(one.pid) for one in self._beats())

    def ended(self) -> str:
        """Which ranks have ended in the middle of a step without a word, and what the kernel says; empty if none."""
        self.see_ended()
        facts = self._facts([beat for beat in self._beats() if beat.rank in self._ended], 0.0, answers={})
        found = went_on(self._beats()) or ended(facts)
        if found is None:
            return ""
        killed = OomKills.now()
        why = f"; {killed.why(self._oom_kills)}" if killed.killed_since(self._oom_kills) else ""
        add_event(self.report, {**asdict(found), "all_ranks": [asdict(one) for one in facts]})
        return found.text + why

    def _beats(self) -> list[Beat]:
        return [beat for rank in ranks_here(self.folder) if (beat := read_beat(self.folder, rank)) is not None]

    def _recovered(self, now: float) -> list[str]:
        self._cpu.clear()
        self._seen = None
        if self.verdict is None:
            return []
        lines = [f"the ranks go on after {seconds_text(now - self._named_at)}"]
        self.verdict = None
        add_event(self.report, {"recovered_after_s": now - self._named_at})
        return lines

    def _judge_held(self, beats: list[Beat], now: float) -> None:
        """End ranks that have met in different collectives, for which native code is about to abort one of them."""
        self._next = now + _LOOKS_S[0]
        facts = self._facts(beats, now)
        if self.nodes is not None:
            facts += self.nodes.still(facts)[0]
        found = mismatched(facts)
        if found is not None:
            self._name(found, 0.0, facts, now)
            self.ends = True

    def _name(self, found: Verdict, quiet: float, facts: list[RankFacts], now: float) -> None:
        self.verdict, self._named_at = found, now
        add_event(self.report, {**asdict(found), "quiet_s": quiet, "all_ranks": [asdict(one) for one in facts]})

    def _look(self, beats: list[Beat], quiet: float, now: float) -> list[str]:
        facts = self._facts(beats, now)
        silent: list[int] | None = []
        if self.nodes is not None:
            others, silent = self.nodes.still(facts)
            facts += others
        quiet = self._quiet(facts, quiet, now)
        if quiet < QUIET_S + 2 * max(beat.step_ns for beat in beats) * 1e-9:
            return self._recovered(now)
        found = self._lost_device() or judge(facts, silent)
        if found is None or not self._believes(found, facts, quiet):
            self._seen = None
            return []
        key = (found.reason, found.ranks)
        if key != self._seen:  # twice the same, so that nobody is named who has moved on meanwhile
            self._seen = key
            return []
        working = any(one.works for one in facts if one.rank in found.ranks)
        between = any(one.beat.phase in _BETWEEN for one in facts if one.rank in found.ranks)
        patience = BUSY_S if working else RECOVER_S * (_SLOWER if found.reason in SLOW or between else 1.0)
        lines = []
        if self.verdict is None or (self.verdict.reason, self.verdict.ranks) != key:
            self._name(found, quiet, facts, now)
            lines = [
                f"nothing has moved for {seconds_text(quiet)}: {found.text}",
                f"all ranks are ended in {seconds_text(patience)} unless they go on; their stacks: {self.report}",
            ]
        self.ends = found.reason in CERTAIN or now - self._named_at > patience
        return [] if self.ends else lines

    def _lost_device(self) -> Verdict | None:
        lost = self._devices.lost()
        text = "; ".join(f"rank {rank}'s {why}" for rank, why in lost.items())
        return Verdict(Reason.DEVICE, tuple(lost), text) if lost else None

    def _quiet(self, facts: list[RankFacts], quiet: float, now: float) -> float:
        """Return how long no rank has begun a collective either: an evaluation's batches are one phase."""
        newest = {one.rank: one.state.newest_ns for one in facts if one.state is not None}
        if any(self._newest.get(rank, at) != at for rank, at in newest.items()):
            self._moved_at = now
        self._newest |= newest
        return min(quiet, now - self._moved_at)

    def _facts(self, beats: list[Beat], now: float, answers: Mapping[int, RankState] | None = None) -> list[RankFacts]:
        if answers is None:
            answers = ask(self.folder, [beat.rank for beat in beats], _ANSWER_S)
        node = platform.node() if self.nodes is not None else ""
        facts = []
        for beat in beats:
            process = ProcessFacts.of(beat.pid)
            before, at = self._cpu.get(beat.rank, (process.cpu_s, now))
            works = now > at and (process.cpu_s - before) / (now - at) > _WORKS
            self._cpu[beat.rank] = (process.cpu_s, now)
            unanswered = tuple(unanswered_peers(beat.pid))
            facts.append(RankFacts(beat, process.status, works or now == at, answers.get(beat.rank), unanswered, node))
        return facts

    def _believes(self, found: Verdict, facts: list[RankFacts], quiet: float) -> bool:
        """Return whether the wait is longer than the phase of the blamed ranks explains."""
        if found.reason in CERTAIN or found.reason is Reason.STOPPED:
            return True
        blamed = [one for one in facts if one.rank in found.ranks]
        if found.reason is Reason.LINK:  # all have joined; so a large tensor over a slow link looks, too
            return not blamed or quiet > BUSY_S or any(one.unanswered for one in facts)
        longest = max(one.beat.longest_ns[b.beat.phase] for b in blamed for one in facts) * 1e-9
        if any(one.works for one in blamed):
            return quiet > (max(SLOW_S, 10 * _FACTOR * longest) if longest else BUSY_S)
        return quiet > (_FACTOR * longest if longest else UNKNOWN_S)
