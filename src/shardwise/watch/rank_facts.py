"""`RankFacts`: all that is known of a rank that does not move; of other nodes' ranks, as their monitors tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.watch.heartbeat import Beat
from shardwise.watch.rank_state import RankState


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank: heartbeat, process (psutil's word for its state; whether it works), and its answer.

    ``unanswered`` are addresses that acknowledge nothing, ``node`` the rank's machine where there are several.
    """

    beat: Beat
    status: str
    works: bool
    state: RankState | None
    unanswered: tuple[str, ...] = ()
    node: str = ""

    @property
    def rank(self) -> int:
        """Rank."""
        return self.beat.rank

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> RankFacts:
        """Read what ``dataclasses.asdict`` has made of one, and JSON of that."""
        state = found["state"]
        return cls(
            beat=Beat(**found["beat"]),
            status=found["status"],
            works=found["works"],
            state=None if state is None else RankState.from_dict(state),
            unanswered=tuple(found["unanswered"]),
            node=found["node"],
        )
