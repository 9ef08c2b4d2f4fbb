"""Lost and throttled GPUs, on facts as NVML and the kernel's log document them: no GPU has shown them."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from shardwise.measure.gpu.nvml import GpuMachine, GpuState, NvmlSource
from shardwise.measure.gpu.xids import Xid, parse_xids
from shardwise.measure.step_time.timing import PHASES
from shardwise.watch import devices
from shardwise.watch.devices import Devices, held_down, write_device
from shardwise.watch.heartbeat import Heartbeat
from shardwise.watch.monitor import Monitor
from shardwise.watch.slow_rank import SlowRank
from shardwise.watch.verdict import CERTAIN, Reason
from tests.machines import RECORDED, RecordedNvml


class Machine:
    """Two GPUs; ``gone`` are no longer listed, ``xids`` are in the kernel's log."""

    def __init__(self) -> None:
        buses = {"GPU-a": "00000000:3B:00.0", "GPU-b": "00000000:5D:00.0"}
        self.gpus = {
            uuid: GpuState(index=n, name="H100", uuid=uuid, bus=bus) for n, (uuid, bus) in enumerate(buses.items())
        }
        self.gone: set[str] = set()
        self.xids: tuple[Xid, ...] | None = ()
        self.problem: str | None = None

    def read(self) -> GpuMachine:
        here = tuple(gpu for uuid, gpu in self.gpus.items() if uuid not in self.gone)
        return GpuMachine(gpus=() if self.problem else here, problem=self.problem)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def looked_at(folder: Path, machine: Machine) -> Devices:
    for rank, uuid in enumerate(machine.gpus):
        write_device(folder, rank, uuid)
    found = Devices(folder, machine, lambda: machine.xids)
    found.remember()
    return found


def test_a_lost_gpu_is_that_of_its_rank(tmp_path: Path, machine: Machine) -> None:
    one = looked_at(tmp_path, machine)
    assert one.lost() == {}
    recorded = parse_xids((RECORDED / "xids.txt").read_text())  # 79 of the card at 5d, 31 (a program's) of that at 3b
    machine.xids = recorded
    assert one.lost() == {
        1: "GPU (00000000:5d:00.0) is lost: Xid 79, the GPU has fallen off the bus; restart; then check power, seating "
        "and cooling of the card"
    }
    machine.xids, machine.gone = None, {"GPU-a"}  # the log may not be read
    assert list(one.lost()) == [0] and "the driver does not list it any more" in one.lost()[0]


def test_what_was_in_the_log_before_is_old(tmp_path: Path, machine: Machine) -> None:
    machine.xids = parse_xids((RECORDED / "xids.txt").read_text())
    one = looked_at(tmp_path, machine)
    assert one.lost() == {}
    machine.xids = (Xid(bus="0000:5d:00", number=79, times=3),)
    assert list(one.lost()) == [1]


def test_what_cannot_be_known_is_not_said(tmp_path: Path, machine: Machine) -> None:
    one = looked_at(tmp_path, machine)
    machine.problem = "NVML does not start"
    assert one.lost() == {}
    machine.problem, machine.xids = None, (Xid(bus="nonsense", number=79), Xid(bus="0000:3b:00", number=63))
    assert one.lost() == {}
    write_device(tmp_path, 2, "MIG-1")  # a part of a GPU, which NVML does not list
    assert one.lost() == {}
    assert Devices(tmp_path / "cpu").lost() == {}


def test_the_monitor_ends_ranks_whose_device_is_lost(tmp_path: Path, machine: Machine) -> None:
    for rank in (0, 1):
        Heartbeat(tmp_path, rank)
    one = Monitor(tmp_path, 2, tmp_path / "watch.json")
    one._devices = looked_at(tmp_path, machine)
    machine.gone = {"GPU-b"}
    beats = one._beats()
    one._look(beats, 10.0, 100.0)
    assert one.verdict is None
    one._look(beats, 11.0, 101.0)
    assert one.verdict is not None and (one.verdict.reason, one.verdict.ranks) == (Reason.DEVICE, (1,))
    assert one.ends and one.knows_alone and Reason.DEVICE in CERTAIN
    assert "rank 1's GPU (00000000:5d:00.0) is lost" in one.message


def test_a_slow_rank_whose_clock_is_held_down(tmp_path: Path) -> None:
    hot, cool = NvmlSource(RecordedNvml("1xh100-hot")), NvmlSource(RecordedNvml("1xt4"))
    [warm], [cold] = [[str(one.uuid) for one in source.brief()] for source in (hot, cool)]
    said = held_down(warm, hot.brief())
    assert said.startswith("its GPU's clock is held down at 0.66 of ")
    assert said.endswith(" GHz, 90 °C: hardware slowdown, hardware thermal slowdown")
    assert held_down(cold, cool.brief()) == held_down("GPU-other", hot.brief()) == ""
    lines: list[str] = []
    rows = [dict.fromkeys(PHASES, 0.0) | {"forward": 0.1, "slowest_rank": 0.9} for _ in range(3)]
    rows[1] |= {"forward": 1.0, "slowest_rank": 0.0}
    columns = {part: np.array([row[part] for row in rows]) for part in rows[0]}
    for uuids, source in (((), hot), (("GPU-other", warm), hot), (("GPU-other", cold), cool)):
        one = SlowRank(lines.append, tmp_path / "watch.json", uuids, source)
        for _ in range(6):
            one.judge(1, columns)
    assert [said in line for line in lines] == [False, True, False]
    assert '"clock throttled"' in (tmp_path / "watch.json").read_text()


def test_a_driver_that_does_not_answer_stops_nobody(tmp_path: Path, machine: Machine) -> None:
    one = looked_at(tmp_path, machine)
    machine.gone = {"GPU-a"}
    answers = threading.Event()
    one.xids = lambda: () if answers.wait(60) else None
    with mock.patch.object(devices, "_ANSWER_S", 0.05):
        assert one.lost() == {}
    answers.set()
