"""What GPUs say of themselves: recorded machines through NVML and through nvidia-smi, and the sampler of a run."""

from __future__ import annotations

import threading
import time

import pynvml
import pytest

from shardwise.measure.gpu.nvidia_smi import QuerySource, parse_query
from shardwise.measure.gpu.nvml import GpuSampler, GpuState, NvmlSource, decode_reasons
from shardwise.measure.gpu.xids import parse_xids, read_xids
from tests.machines import MACHINES, RECORDED, RecordedNvml

MIB = 1 << 20


def read(machine: str, **changes):
    return NvmlSource(RecordedNvml(machine, **changes)).read()


def test_reasons_are_decoded():
    assert decode_reasons(0) == ()
    assert decode_reasons(0x1) == ("idle",)
    assert decode_reasons(0x4 | 0x40 | 0x8) == ("power cap", "hardware slowdown", "hardware thermal slowdown")
    assert decode_reasons(0x20 | 0x80) == ("software thermal slowdown", "power brake")
    assert decode_reasons(0x1000 | 0x1) == ("idle", "bit 0x1000")
    named = {
        pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
        pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
        pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    }
    for bit, name in named.items():
        assert decode_reasons(bit) == (name,)


def test_an_nvswitch_machine():
    machine = read("8xh100-hgx")
    assert (machine.driver, machine.cuda, machine.problem) == ("550.90.07", (12, 4), None)
    assert len(machine.gpus) == 8 and [gpu.index for gpu in machine.gpus] == list(range(8))
    gpu = machine.gpus[3]
    assert gpu.name == "NVIDIA H100 80GB HBM3" and gpu.bus == "00000000:5D:00.0"
    assert (gpu.sm_clock_hz, gpu.max_sm_clock_hz) == (210e6, 1980e6)
    assert (gpu.temperature_c, gpu.slowdown_c) == (29, 89)
    assert gpu.power_w == pytest.approx(70) and gpu.power_limit_w == gpu.default_power_limit_w == pytest.approx(700)
    assert (gpu.pcie_generation, gpu.pcie_slot_generation, gpu.pcie_lanes, gpu.pcie_max_lanes) == (5, 5, 16, 16)
    assert gpu.reasons == ("idle",) and gpu.throttled == ()
    assert gpu.memory_bytes == 81559 * MIB and gpu.capability == (9, 0)
    assert (gpu.ecc, gpu.ecc_uncorrected, gpu.remap_pending, gpu.remap_failed) == (True, 0, False, False)
    assert gpu.fabric == "completed" and gpu.mig is False and gpu.processes == ()
    assert machine.peers is not None and len(machine.peers) == 28 and all(machine.peers.values())


def test_what_a_device_does_not_tell_is_none():
    gpu = read("4xrtx4090").gpus[0]
    assert gpu.ecc is None and gpu.ecc_uncorrected is None and gpu.remap_pending is None and gpu.fabric is None
    assert gpu.mig is None
    no = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    blind = read(
        "1xt4", nvmlDeviceGetClockInfo=no, nvmlDeviceGetCurrentClocksEventReasons=no, nvmlDeviceGetPowerUsage=no
    )
    assert (blind.gpus[0].sm_clock_hz, blind.gpus[0].reasons, blind.gpus[0].power_w) == (None, None, None)
    old = read("1xt4", nvmlDeviceGetCurrentClocksEventReasons=no, nvmlDeviceGetCurrentClocksThrottleReasons=0x20)
    assert old.gpus[0].reasons == ("software thermal slowdown",), "the name that drivers before 535 have"


def test_no_driver_is_said():
    class NoDriver(RecordedNvml):
        def nvmlInit(self) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    nvml = NoDriver("1xt4")
    machine = NvmlSource(nvml).read()
    assert machine.gpus == () and machine.problem is not None and "NVML does not start" in machine.problem
    assert NvmlSource(nvml).brief() == ()
    with NvmlSource(nvml) as source:
        assert source.brief() == ()


def test_a_card_off_the_bus_leaves_the_others():
    class Lost(RecordedNvml):
        def _answer(self, name, arguments):
            if name == "nvmlDeviceGetHandleByIndex" and arguments[0] == 2:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return super()._answer(name, arguments)

    nvml = Lost("4xrtx4090")
    assert [gpu.index for gpu in NvmlSource(nvml).read().gpus] == [0, 1, 3]
    assert nvml.opened == 0, "NVML is closed again"


@pytest.mark.parametrize("machine", [name for name in MACHINES if (RECORDED / name / "query.txt").exists()])
def test_both_sources_tell_the_same(machine):
    nvml, query = read(machine), parse_query((RECORDED / machine / "query.txt").read_text())
    assert (query.driver, query.cuda) == (nvml.driver, nvml.cuda)
    unknown_to_text = {"uuid", "bus", "capability", "fabric"}
    for one, other in zip(nvml.gpus, query.gpus, strict=True):
        expected, found = one.model_dump(exclude=unknown_to_text), other.model_dump(exclude=unknown_to_text)
        for key, value in expected.items():
            same = pytest.approx(value) if isinstance(value, float) else value
            assert found[key] == same, key


def test_text_that_is_no_query():
    assert parse_query("No devices were found").problem == "nvidia-smi -q lists no GPU"
    assert parse_query("").gpus == ()


def test_two_cards_in_a_text():
    text = (RECORDED / "1xt4" / "query.txt").read_text()
    second = text[text.index("GPU 00000000") :].replace("1E:00.0", "1F:00.0").replace(": 35 C", ": 50 C")
    found = parse_query(text + second)
    assert [(gpu.index, gpu.bus, gpu.temperature_c) for gpu in found.gpus] == [
        (0, "00000000:1E:00.0", 35),
        (1, "00000000:1F:00.0", 50),
    ]


def test_nvidia_smi_that_is_not_there(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = QuerySource().read()
    assert not found.gpus and found.problem is not None and "does not answer" in found.problem


def test_xids():
    found = parse_xids((RECORDED / "xids.txt").read_text())
    assert [(xid.bus, xid.number, xid.times, xid.is_hardware) for xid in found] == [
        ("0000:19:00", 63, 1, True),
        ("0000:3b:00", 31, 1, False),
        ("0000:5d:00", 79, 2, True),
    ]
    assert "fallen off" in found[2].text


def test_a_log_that_may_not_be_read_is_unknown(tmp_path):
    assert read_xids(tmp_path / "none") is None
    (tmp_path / "log").write_text((RECORDED / "xids.txt").read_text())
    assert len(read_xids(tmp_path / "log") or ()) == 3


class Moments(NvmlSource):
    """A source whose one GPU is a new one at each look, and the last one from then on."""

    def __init__(self, states):
        super().__init__(RecordedNvml("1xt4"))
        self.states, self.looks, self.seen_all = list(states), 0, threading.Event()

    def brief(self):
        state = self.states[min(self.looks, len(self.states) - 1)]
        self.looks += 1
        if self.looks > len(self.states):
            self.seen_all.set()
        if isinstance(state, Exception):
            raise state
        return (state,)


def state(**facts) -> GpuState:
    known = {"index": 0, "name": "T4", "uuid": "GPU-a", "max_sm_clock_hz": 1000.0, "power_limit_w": 70.0}
    return GpuState(**{**known, **facts})


def track(states, **options):
    source = Moments(states)
    sampler = GpuSampler(0.01, source=source, **options).start()
    assert source.seen_all.wait(30)
    return sampler.stop(), sampler


def test_the_sampler_counts_busy_moments_only():
    idle = state(utilisation=0.0, sm_clock_hz=100.0, temperature_c=30, power_w=10.0, reasons=("idle",))
    fast = state(utilisation=1.0, sm_clock_hz=1000.0, temperature_c=70, power_w=60.0, reasons=())
    slow = state(
        utilisation=0.9, sm_clock_hz=500.0, temperature_c=90, power_w=40.0, reasons=("hardware thermal slowdown",)
    )
    sums, _ = track([idle, fast, slow, fast, idle])
    device = sums.devices[0]
    assert device.busy == 3 and device.samples > device.busy, "the first look is start's own"
    assert device.lowest_sm_clock_hz == 500 and device.highest_temperature_c == 90 and device.max_sm_clock_hz == 1000
    assert device.mean_sm_clock_hz == pytest.approx(2500 / 3)
    assert device.reasons == {"hardware thermal slowdown": pytest.approx(1 / 3)}
    assert device.throttled_share == pytest.approx(1 / 3)
    assert sums.problem is None and sums.interval_s == 0.01


def test_an_idle_device_has_no_clock_and_no_reason():
    sums, _ = track([state(utilisation=0.0, sm_clock_hz=100.0, reasons=("idle",))] * 3)
    device = sums.devices[0]
    assert (device.busy, device.mean_sm_clock_hz, device.reasons, device.throttled_share) == (0, None, None, None)
    assert device.mean_utilisation == 0


def test_unknown_values_stay_unknown():
    sums, _ = track([state()] * 3)
    device = sums.devices[0]
    assert (device.mean_power_w, device.highest_temperature_c, device.mean_utilisation, device.most_used_bytes) == (
        None,
        None,
        None,
        None,
    )


def test_a_power_cap_is_no_throttling():
    sums, _ = track([state(utilisation=1.0, reasons=("power cap",))] * 3)
    assert sums.devices[0].reasons == {"power cap": 1.0} and sums.devices[0].throttled_share == 0.0


def test_other_devices_are_left_out():
    sums, _ = track([state(utilisation=1.0)] * 3, uuids=["GPU-b"])
    assert sums.devices == ()
    sums, _ = track([state(utilisation=1.0)] * 3, uuids=["a"])
    assert len(sums.devices) == 1, "torch leaves the beginning of the id away"


def test_a_failing_look_ends_nothing():
    good = state(utilisation=1.0, sm_clock_hz=900.0)
    sums, _ = track([good, RuntimeError("driver went away"), good, good])
    assert sums.devices[0].busy >= 2 and sums.problem is not None and "went away" in sums.problem


def test_without_a_gpu_no_thread_is_started():
    class Nothing(NvmlSource):
        def brief(self):
            return ()

    before = threading.active_count()
    sampler = GpuSampler(0.01, source=Nothing(RecordedNvml("1xt4"))).start()
    assert threading.active_count() == before
    assert sampler.stop().problem == "no GPU answers through NVML"
    assert sampler.stop().devices == (), "may be called again"


def test_the_sampler_holds_nvml_open_once():
    nvml = RecordedNvml("8xa100-sxm", nvmlDeviceGetUtilizationRates={"gpu": 100, "memory": 50})
    sampler = GpuSampler(0.005, source=NvmlSource(nvml)).start()
    deadline = time.monotonic() + 30
    while not (7 in sampler._sums and sampler._sums[7].samples > 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    sums = sampler.stop()
    assert len(sums.devices) == 8 and all(device.busy == device.samples > 3 for device in sums.devices)
    assert nvml.opened == 0
