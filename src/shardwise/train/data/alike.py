"""A stream that every rank reads whole: all read the same, whatever the luck of each rank is.

A loader that shuffles, mixes or masks by the global generators would draw something else on each rank. It is given
the numbers that rank 0's generators have in store when a pass begins, and the ranks' own generators go on apart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch

from shardwise.distributed.process_group import Ranks, broadcast_text
from shardwise.train.rng import random_states, restore_random_states


class SharedLuck:
    """While it is entered, the global generators are those that rank 0 had when it was made. Collective to make."""

    def __init__(self, ranks: Ranks) -> None:
        self._device = ranks.device
        text = ""
        if ranks.is_main:
            text = json.dumps({name: bytes(s.tolist()).hex() for name, s in random_states(ranks.device).items()})
        told = json.loads(broadcast_text(text, ranks))
        own = self._states()
        states = {name: torch.frombuffer(bytearray.fromhex(s), dtype=torch.uint8) for name, s in told.items()}
        restore_random_states(states, ranks.device)
        self._kept = self._states()
        self._set(own)

    def __enter__(self) -> None:
        self._kept, kept = self._states(), self._kept
        self._set(kept)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._kept, own = self._states(), self._kept
        self._set(own)

    def _states(self) -> tuple[Any, ...]:
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True), cuda

    def _set(self, states: tuple[Any, ...]) -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if states[3] is not None:
            torch.cuda.set_rng_state(states[3], self._device)


def read_alike(loader: Iterable[Any], ranks: Ranks) -> Iterator[Any]:
    """The items of ``loader``, drawn with the luck of rank 0. Collective at the start."""
    if isinstance(loader, list | tuple):
        yield from loader
        return
    luck = SharedLuck(ranks)
    _leap()
    with luck:
        iterator = iter(loader)
    while True:
        with luck:
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _leap() -> None:
    """This rank's generators go on elsewhere: what rank 0's have in store belongs to the loader now."""
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
