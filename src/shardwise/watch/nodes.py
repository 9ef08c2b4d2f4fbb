"""`Nodes`: what the monitors of several nodes tell each other while their ranks do not move."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from shardwise.watch.rank_facts import RankFacts

FRESH_S = 15.0
"""Time for which another node's facts are believed, and after which it is silent; monitors tell theirs every 5 s."""
_ANSWER_S, _AGAIN_S, _ALIVE_S = 2.0, 5.0, 5.0
_NODES = "nodes"


@dataclass
class _Node:
    """What another node has told: its ``count`` rises with each time, since ``at`` it is the same."""

    ranks: list[int]
    count: int
    at: float
    facts: list[RankFacts] = field(default_factory=list)


@dataclass
class Nodes:
    """Exchange over the store at which the ranks of a run of ``world_size`` met; ``None`` while it is not reached."""

    store: Any
    world_size: int
    _index: int | None = None
    _count: int = 0
    _told_at: float = 0.0
    _still: bool = False
    _ranks: list[int] = field(default_factory=list)
    _others: dict[int, _Node] = field(default_factory=dict)

    @classmethod
    def connect(cls, address: str, port: int, run: str, world_size: int) -> Nodes:
        """Connect to the store in the background; until then no other node is known.

        ``run`` tells this run from others that used the store.
        """
        found = cls(None, world_size)
        threading.Thread(target=found._connect, args=(address, port, run), daemon=True).start()
        return found

    def _connect(self, address: str, port: int, run: str) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore  # seconds

        timeout = timedelta(seconds=_ANSWER_S)
        while self.store is None:
            try:
                store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
            except RuntimeError:
                time.sleep(_AGAIN_S)
            else:
                self.store = PrefixStore(f"shardwise/watch/{run}", store)

    def moving(self, ranks: Sequence[int]) -> None:
        """Tell, every few seconds, that there is a monitor of this node's ``ranks``, and that they move."""
        if self._still:  # what the others have told counts for one silence
            self._others.clear()
        if self.store is None or (not self._still and time.monotonic() - self._told_at < _ALIVE_S):
            return
        self._still, self._ranks = False, list(ranks)
        with contextlib.suppress(RuntimeError):
            self._tell([])

    def still(self, mine: Sequence[RankFacts]) -> tuple[list[RankFacts], list[int] | None]:
        """Tell that this node's ranks do not move; return those of others that do not, and those of silent nodes.

        The latter are ``None`` where ranks are neither: they move, or nothing is known of them.
        """
        self._still, self._ranks = True, [one.rank for one in mine]
        if self.store is not None:
            with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError):
                self._tell([asdict(one) for one in mine])
                self._listen()
        now = time.monotonic()
        others = self._others.values()
        heard = [one for node in others if now - node.at < FRESH_S for one in node.facts]
        silent = sorted(rank for node in others if now - node.at >= FRESH_S for rank in node.ranks)
        known = {*self._ranks, *silent, *(one.rank for one in heard)}
        return heard, silent if len(known) == self.world_size else None

    def _tell(self, facts: list[dict[str, Any]]) -> None:
        if self._index is None:
            self._index = int(self.store.add(_NODES, 1)) - 1
        self._count += 1
        self._told_at = time.monotonic()
        self.store.set(str(self._index), json.dumps({"count": self._count, "ranks": self._ranks, "facts": facts}))

    def _listen(self) -> None:
        for index in range(int(self.store.add(_NODES, 0))):
            if index == self._index or not self.store.check([str(index)]):
                continue
            found = json.loads(self.store.get(str(index)))
            before = self._others.get(index)
            if before is None:  # its facts may be of long ago, and its node out of reach since
                self._others[index] = _Node(found["ranks"], found["count"], time.monotonic())
            elif before.count != found["count"]:
                facts = [RankFacts.from_dict(one) for one in found["facts"]]
                self._others[index] = _Node(found["ranks"], found["count"], time.monotonic(), facts)
