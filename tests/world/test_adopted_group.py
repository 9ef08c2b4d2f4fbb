"""A process group that the script made itself, as with ``mp.spawn``: each rank keeps or gets a device of its own."""

from __future__ import annotations

import os

import torch

from shardwise.distributed.process_group import join, leave
from tests.worlds import run_world


def devices_of(current: int) -> tuple[int, int, list[str], str]:
    """Local rank, ranks on the host, devices that were set, and the device that is used."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    chosen: list[str] = []
    torch.cuda.set_device = lambda device: chosen.append(str(device))  # type: ignore[assignment]
    torch.cuda.current_device = lambda: current
    ranks = join("cuda")
    leave(ranks)
    return ranks.local_rank, ranks.local_world_size, chosen, str(ranks.device)


def test_ranks_of_one_host_get_devices_of_their_own() -> None:
    found = run_world(devices_of, 3, 0)
    assert found == [(rank, 3, [f"cuda:{rank}"], f"cuda:{rank}") for rank in range(3)]


def test_a_device_that_the_script_has_chosen_stays() -> None:
    assert run_world(devices_of, 2, 5) == [(rank, 2, [], "cuda:5") for rank in range(2)]
