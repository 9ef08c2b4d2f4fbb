"""Checks from a self-test of ranks, and from the GPUs under its load."""

from __future__ import annotations

from shardwise.doctor.check import Check, error, ok, warning
from shardwise.doctor.checks.gpu import clocks, pcie
from shardwise.doctor.machine_facts import HostFacts
from shardwise.doctor.rank_self_test import LARGE, SMALL, RanksTest
from shardwise.hardware.gpus import PCIE_TRANSFERS_PER_S, pcie_bytes_per_s
from shardwise.measure.gpu.gpu_load import DeviceLoad
from shardwise.measure.gpu.nvml import GpuMachine
from shardwise.units import bytes_text, counted

SLOW_COPY = 0.5
"""Host-to-device copies below this share of the link's rate are reported; packet headers alone take a tenth."""


def check_ranks_test(test: RanksTest, facts: HostFacts | None = None) -> list[Check]:
    """Convert the self-test to checks.

    ``facts`` of this machine are for the state of its GPUs under load.
    """
    where = sorted({answer.host for answer in test.answers if answer.host})
    hosts = f" on {len(where)} hosts" if len(where) > 1 else ""
    if test.problem is not None:
        evidence = [
            f"rank {answer.rank}: {answer.word or 'no answer'}, last seen in {answer.stage or 'no stage'}"
            for answer in test.answers
        ]
        text = f"{test.problem}; {counted(test.world_size, 'rank')}{hosts} over {test.backend}"
        return [error("ranks", text, test.fix, *evidence[:32])]
    words = []
    if test.small_s is not None and test.large_s is not None and test.world_size > 1:
        words = [
            f"all_reduce of {bytes_text(4 * SMALL)}: {test.small_s * 1e6:.0f} µs, of {bytes_text(4 * LARGE)}: "
            f"{test.large_s * 1e3:.2f} ms (medians of 5; shardwise bench comm measures it properly)"
        ]
    world = test.world_size
    who = f"all {world} ranks{hosts} answer, and add" if world > 1 else "the rank answers, and adds"
    answer = f"{who} up right, over {test.backend}"
    return [ok("ranks", answer, *words), *loads(test, facts)]


def loads(test: RanksTest, facts: HostFacts | None) -> list[Check]:
    """Check clocks, links and copies of the GPUs under load; none on CPU."""
    found: list[Check] = []
    busy = [(answer.rank, answer.load) for answer in test.answers if answer.load is not None]
    if not busy:
        return []
    if facts is not None:
        states = tuple(load.state for rank, load in busy if load.state is not None and _here(rank, test, facts))
        under_load = facts.model_copy(update={"gpus": GpuMachine(gpus=states)})
        if states:
            wrong = [check for check in (*clocks(under_load), *pcie(under_load)) if check.level in ("warning", "error")]
            found += [check.model_copy(update={"name": f"{check.name} under load"}) for check in wrong]
    slow = [
        f"rank {rank} ({load.name}): {load.from_host_bytes_per_s / 1e9:.1f} GB/s of {rate / 1e9:.1f}"
        for rank, load in busy
        if (rate := _rate(load)) is not None
        and load.from_host_bytes_per_s is not None
        and load.from_host_bytes_per_s < SLOW_COPY * rate
    ]
    if slow:
        text = f"copies from host memory are slow: {'; '.join(slow)}"
        found.append(warning("host copies", text, "see PCIe above; bind the rank to cores near its GPU", *slow))
    if not found:
        speeds = [load.from_host_bytes_per_s for _, load in busy if load.from_host_bytes_per_s is not None]
        rates = f"; copies from host memory at {min(speeds) / 1e9:.1f} GB/s and more" if speeds else ""
        found.append(ok("GPUs under load", f"nothing limited their clocks or links{rates}"))
    return found


def _rate(load: DeviceLoad) -> float | None:
    state = load.state
    if state is None or state.pcie_slot_generation not in PCIE_TRANSFERS_PER_S or not state.pcie_max_lanes:
        return None
    return pcie_bytes_per_s(state.pcie_slot_generation, state.pcie_max_lanes)


def _here(rank: int, test: RanksTest, facts: HostFacts) -> bool:
    return any(answer.rank == rank and answer.host == facts.host for answer in test.answers)
