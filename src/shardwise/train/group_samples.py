"""Keep ranks that work on one sample together: the same data, and the same RNG state in a tensor-parallel group."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from shardwise.distributed.control_message import Table
from shardwise.distributed.places import first_in_group
from shardwise.distributed.same_batches import check_same_batches, checksum
from shardwise.train.session_interface import TrainingSession


def group_marks(session: TrainingSession, given: list[Any]) -> list[int]:
    """Return checksums that ranks on one sample must share: data, and a TP group's RNG state."""
    dims = session.plan.dims
    if not dims.splits_model:
        return []
    rng_state = zlib.crc32(_rng_state(session.device).numpy().data) if dims.tp > 1 else 0
    return [checksum(given), rng_state]


def keep_together(session: TrainingSession, rows: Table) -> None:
    """Refuse different samples within a group, and restore equal RNG states in its ranks.

    Rank 0 draws the order of the samples for all ranks, and a loop may seed each rank by its number:
    ranks of a tensor-parallel group would drop different elements of the same tensor.
    """
    dims = session.plan.dims
    if not dims.splits_model:
        return
    check_same_batches(rows[:, 4], session.plan)
    states = rows[:, 5]
    if (states != states[first_in_group(dims, "pp", "dp", "cp")]).any():
        session.sync_rng_state()


def copy_rng_state(session: TrainingSession) -> None:
    """Copy the first rank's RNG state to its tensor-parallel group. Collective over all ranks."""
    device, ranks = session.device, session.ranks
    mine = _rng_state(device)
    states = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(states, mine, group=ranks.control)
    shared = states[ranks.rank - session.place.tp]
    size = torch.get_rng_state().numel()
    torch.set_rng_state(shared[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(shared[size:], device)


def _rng_state(device: torch.device) -> torch.Tensor:
    """Return the states of torch's generators, as bytes on the CPU."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat(states)
