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
"""Time for which another node's facts are believed; a monitor renews its own at least every 5 s."""
_ANSWER_S, _AGAIN_S = 2.0, 5.0
_NODES = "nodes"


@dataclass
class Nodes:
    """Exchange over the store at which the ranks of a run of ``world_size`` met; ``None`` while it is not reached."""

    store: Any
    world_size: int
    _index: int | None = None
    _count: int = 0
    _told: bool = False
    _ranks: list[int] = field(default_factory=list)
    _watched: set[int] = field(default_factory=set)
    _heard: dict[int, tuple[int, float, list[RankFacts]]] = field(default_factory=dict)

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

    def swap(self, mine: Sequence[RankFacts]) -> list[RankFacts]:
        """Tell the facts of this node's ranks, and return those of the other nodes that do not move either.

        A store that does not answer tells nothing.
        """
        if self._index is not None:
            with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError):
                self._told = True
                self._set([asdict(one) for one in mine])
                self._listen()
        now = time.monotonic()
        return [one for _, at, facts in self._heard.values() if now - at < FRESH_S for one in facts]

    def moving(self) -> None:
        """Tell that this node's ranks move, if the others were told that they do not."""
        if self._told:
            self._told = False
            self._heard.clear()
            with contextlib.suppress(RuntimeError):
                self._set([])

    def silent(self, heard: Sequence[RankFacts]) -> list[int] | None:
        """Ranks of watched nodes that are not among those heard; ``None`` where a node has no monitor."""
        if len(self._watched) < self.world_size:
            return None
        return sorted(self._watched - {one.rank for one in heard})

    def greet(self, ranks: Sequence[int]) -> None:
        """Tell that this node's ranks are watched."""
        if self._index is None and self.store is not None:
            with contextlib.suppress(RuntimeError):
                self._index = int(self.store.add(_NODES, 1)) - 1
                self._ranks = list(ranks)
                self._set([])

    def _set(self, facts: list[dict[str, Any]]) -> None:
        self._count += 1
        found = {"count": self._count, "ranks": self._ranks, "facts": facts}
        self.store.set(str(self._index), json.dumps(found))

    def _listen(self) -> None:
        self._watched.update(self._ranks)
        for index in range(int(self.store.add(_NODES, 0))):
            if index == self._index or not self.store.check([str(index)]):
                continue
            found = json.loads(self.store.get(str(index)))
            self._watched.update(found["ranks"])
            if index not in self._heard:  # it may be of long ago, and its node out of reach since
                self._heard[index] = (found["count"], -FRESH_S, [])
            elif self._heard[index][0] != found["count"]:
                facts = [RankFacts.from_dict(one) for one in found["facts"]]
                self._heard[index] = (found["count"], time.monotonic(), facts)
