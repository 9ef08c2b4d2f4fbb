"""`Monitor`: notices that ranks have stopped moving, finds out why, and says it; it runs beside the ranks."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardwise.units import seconds_text
from shardwise.watch.heartbeat import Beat, read_beat
from shardwise.watch.processes import ProcessFacts, unanswered_peers
from shardwise.watch.rank_state import ask
from shardwise.watch.verdict import CERTAIN, SLOW, RankFacts, Reason, Verdict, judge

QUIET_S = 3.0
"""Silence of all ranks, beyond two steps, after which they are asked where they stand."""
UNKNOWN_S = 60.0
"""Longest wait without work in a phase of which no duration is known: the first read of a slow disk, a download."""
BUSY_S = 600.0
"""Longest computation of a rank that the others wait for: where no duration of its phase is known, it may compile."""
SLOW_S = 20.0
"""Computation of a rank after which it is named, if its phase has taken far less before."""
RECOVER_S = 120.0
"""Time that a rank which does nothing has left after it was named; five times that if it waits for a disk or for data,
and `BUSY_S` if it computes."""

_POLL_S, _LOOK_S, _ANSWER_S = 0.25, 0.5, 1.0
_FACTOR = 3.0  # a phase may take so often the longest time that it has taken
_SLOWER = 5.0
_WORKS = 0.05  # share of a core that counts as work


@dataclass
class Monitor:
    """Monitor of the ``ranks`` of this node, whose heartbeats are in ``folder``.

    ``whole``: these are all ranks of the run. ``verdict`` is the last one, ``ends`` is set when the ranks must end.
    """

    folder: Path
    ranks: tuple[int, ...]
    report: Path
    whole: bool = True
    verdict: Verdict | None = None
    ends: bool = False
    since_s: float = 0.0
    _next: float = 0.0
    _cpu: dict[int, tuple[float, float]] = field(default_factory=dict)
    _seen: tuple[Reason, tuple[int, ...]] | None = None
    _named_at: float = 0.0

    def check(self) -> list[str]:
        """Look at the ranks, at most four times a second, and return lines to print."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + _POLL_S
        beats = [beat for rank in self.ranks if (beat := read_beat(self.folder, rank)) is not None]
        moving = [beat for beat in beats if beat.phase != "end"]
        if len(beats) < len(self.ranks) or not moving:
            return []
        quiet = min(now - beat.since_ns * 1e-9 for beat in moving)
        step = max(beat.step_ns for beat in beats) * 1e-9
        if quiet < QUIET_S + 2 * step:
            return self._recovered(now)
        self._next = now + _LOOK_S
        return self._look(beats, quiet, now)

    @property
    def message(self) -> str:
        """Why the ranks are ended."""
        text = "" if self.verdict is None else self.verdict.text
        return f"all ranks were ended, as none could go on: {text}\nstacks of all ranks: {self.report}"

    def pids(self) -> list[int]:
        """Processes of the ranks."""
        return [beat.pid for rank in self.ranks if (beat := read_beat(self.folder, rank)) is not None]

    def _recovered(self, now: float) -> list[str]:
        self._cpu.clear()
        self._seen = None
        if self.verdict is None:
            return []
        lines = [f"the ranks go on after {seconds_text(now - self._named_at)}"]
        self.verdict = None
        self._write({"recovered_after_s": now - self._named_at})
        return lines

    def _look(self, beats: list[Beat], quiet: float, now: float) -> list[str]:
        facts = self._facts(beats, now)
        found = judge(facts, whole=self.whole)
        if found is None or not self._believes(found, facts, quiet):
            self._seen = None
            return []
        key = (found.reason, found.ranks)
        if key != self._seen:  # twice the same, so that nobody is named who has moved on meanwhile
            self._seen = key
            return []
        lines = []
        if self.verdict is None or (self.verdict.reason, self.verdict.ranks) != key:
            self.verdict, self._named_at, self.since_s = found, now, quiet
            self._write({"verdict": found, "quiet_s": quiet, "facts": facts})
            lines = [f"nothing has moved for {seconds_text(quiet)}: {found.text}"]
        working = any(one.works for one in facts if one.rank in found.ranks)
        patience = BUSY_S if working else RECOVER_S * (_SLOWER if found.reason in SLOW else 1.0)
        self.ends = found.reason in CERTAIN or now - self._named_at > patience
        return [] if self.ends else lines

    def _facts(self, beats: list[Beat], now: float) -> list[RankFacts]:
        answers = ask({beat.rank: beat.pid for beat in beats}, _ANSWER_S)
        facts = []
        for beat in beats:
            process = ProcessFacts.of(beat.pid)
            before, at = self._cpu.get(beat.rank, (process.cpu_s, now))
            works = now > at and (process.cpu_s - before) / (now - at) > _WORKS
            self._cpu[beat.rank] = (process.cpu_s, now)
            unanswered = tuple(unanswered_peers(beat.pid))
            facts.append(RankFacts(beat, process.letter, works or now == at, answers.get(beat.rank), unanswered))
        return facts

    def _believes(self, found: Verdict, facts: list[RankFacts], quiet: float) -> bool:
        """Return whether the wait is longer than the phase of the blamed ranks explains."""
        if found.reason in CERTAIN or found.reason is Reason.STOPPED:
            return True
        blamed = [one for one in facts if one.rank in found.ranks]
        longest = max(one.beat.longest_ns[b.beat.phase] for b in blamed for one in facts) * 1e-9
        if any(one.works for one in blamed):
            return quiet > (max(SLOW_S, 10 * _FACTOR * longest) if longest else BUSY_S)
        if found.reason is Reason.LINK and any(one.unanswered for one in facts):
            return True
        return quiet > (_FACTOR * longest if longest else UNKNOWN_S)

    def _write(self, event: dict[str, object]) -> None:
        """Append an event to the report, whole or not at all."""
        events = []
        if self.report.exists():
            try:
                events = json.loads(self.report.read_text())["events"]
            except (OSError, ValueError, KeyError, TypeError):
                events = []
        found, facts = event.pop("verdict", None), event.pop("facts", ())
        if isinstance(found, Verdict):
            event |= asdict(found)
        if isinstance(facts, list):
            event["all_ranks"] = [asdict(one) for one in facts]
        events.append({"time": time.time(), "node": platform.node(), **event})
        partial = self.report.with_name(self.report.name + ".partial")
        try:
            partial.write_text(json.dumps({"schema": 1, "events": events}, indent=1))
            partial.replace(self.report)
        except OSError:  # a full disk: the line on the console says the same
            return
