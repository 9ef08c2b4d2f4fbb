"""Generators of a rank: seeded by the seed and the rank; states as bytes for a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shardwise.plan.plan import Plan


def seed_everything(seed: int, rank: int) -> None:
    """Seed all generators from the seed and the rank."""
    torch.manual_seed(seed * 100_003 + rank)
    random.seed(seed * 100_003 + rank)
    np.random.seed((seed * 100_003 + rank) % 2**32)


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of every generator of this rank, as bytes."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    python = json.dumps([version, list(words), gauss])
    legacy = json.dumps([kind, np.asarray(keys).tolist(), place, has_gauss, cached])
    states = {"torch": torch.get_rng_state(), "python": _to_bytes(python), "numpy": _to_bytes(legacy)}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore the states from `random_states`."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = json.loads(bytes(states["python"].tolist()))
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached = json.loads(bytes(states["numpy"].tolist()))
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def rank_to_follow(saved: Mapping[str, Any], plan: Plan, rank: int) -> int:
    """Return the saved rank whose generators ``rank`` resumes with.

    A new one if there are too few.

    ``saved`` is the plan of the checkpoint as JSON. Under the same degrees it is the rank itself. Under others, ranks
    of one tensor-parallel group follow the same one (they must draw the same numbers), and no two groups do.
    """
    dims: Mapping[str, int] = saved.get("dims") or {}
    if plan.dims.model_dump(mode="json") == dims:
        return rank
    return rank // plan.dims.tp * int(dims.get("tp", 1))


def _to_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
