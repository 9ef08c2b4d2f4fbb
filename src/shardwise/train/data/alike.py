"""Read a stream in full on every rank, with equal random states on all ranks.

A loader that shuffles, mixes or masks with the global generators would draw differently on each rank. It gets
the state of rank 0's generators when a pass begins, and the ranks' own generators continue separately.
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


class SyncedRngState:
    """Context in which the global generators have rank 0's saved state. Collective to create."""

    def __init__(self, ranks: Ranks) -> None:
        self._device = ranks.device
        text = ""
        if ranks.is_main:
            text = json.dumps({name: bytes(s.tolist()).hex() for name, s in random_states(ranks.device).items()})
        states_by_name = json.loads(broadcast_text(text, ranks))
        own = self._states()
        states = {name: torch.frombuffer(bytearray.fromhex(s), dtype=torch.uint8) for name, s in states_by_name.items()}
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
    """Yield the items of ``loader``, drawn with rank 0's random state. Collective at the start."""
    if isinstance(loader, list | tuple):
        yield from loader
        return
    rng_state = SyncedRngState(ranks)
    _leap()
    with rng_state:
        iterator = iter(loader)
    while True:
        with rng_state:
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _leap() -> None:
    """Advance this rank's generators; the loader uses the state from before."""
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
