"""Read GPU state through NVML, once or over a run: clocks, heat, power, links, errors.

Values that a device, a driver or a container does not report are ``None``, never 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict

# Why clocks are reduced: the bits of nvmlClocksEventReasons (NVML API reference).
REASONS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}
THERMAL = ("software thermal slowdown", "hardware thermal slowdown")
HARMFUL = (*THERMAL, "hardware slowdown", "power brake")
"""Reasons that slow an otherwise healthy device; a power cap is normal on a loaded GPU."""
COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}
P2P_READ, P2P_OK = 0, 0  # pynvml has the first as a tuple, which its own function does not accept
FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


def decode_reasons(bits: int) -> tuple[str, ...]:
    """Return the reasons in NVML's bits, by rising bit; an unknown bit reads ``bit 0x...``."""
    known = [name for bit, name in REASONS.items() if bits & bit]
    rest = bits & ~sum(REASONS)
    return (*known, *([f"bit {rest:#x}"] if rest else []))


class GpuState(BaseModel):
    """State of one GPU at one moment. Clocks in Hz, power in W, memory in bytes, heat in °C.

    ``reasons`` says why the clock is below its maximum; empty: nothing limits it. ``pcie_generation`` and
    ``pcie_lanes`` are the link now: the generation falls while a GPU idles, the lanes do not. ``pcie_slot_generation``
    is the maximum of card and slot together, ``pcie_card_generation`` that of the card alone. At ``slowdown_c`` the
    hardware throttles. ``ecc_uncorrected`` counts since the driver was loaded; ``remap_pending`` requires a reset,
    ``remap_failed`` a new card. ``processes`` are ids of those with memory on it. ``fabric`` is the state of its
    registration with the NVSwitches.
    """

    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    uuid: str | None = None
    bus: str | None = None
    sm_clock_hz: float | None = None
    max_sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    max_memory_clock_hz: float | None = None
    temperature_c: float | None = None
    slowdown_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    reasons: tuple[str, ...] | None = None
    utilisation: float | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_slot_generation: int | None = None
    pcie_card_generation: int | None = None
    pcie_lanes: int | None = None
    pcie_max_lanes: int | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    mig: bool | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    capability: tuple[int, int] | None = None
    fabric: str | None = None
    processes: tuple[int, ...] | None = None

    @property
    def throttled(self) -> tuple[str, ...]:
        """Active reasons of `HARMFUL`; empty if the reasons are unknown."""
        return tuple(reason for reason in self.reasons or () if reason in HARMFUL)


class GpuMachine(BaseModel):
    """GPUs of a machine, their driver, and its newest supported CUDA (major, minor).

    ``problem`` says why there
    are none. ``peers`` has, for each pair of indices, whether one can read the other's memory; ``None``: unknown.
    """

    model_config = ConfigDict(frozen=True)

    gpus: tuple[GpuState, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    problem: str | None = None
    peers: dict[str, bool] | None = None


class GpuSource(Protocol):
    """Source of states: `NvmlSource`, or a recording in tests."""

    def read(self) -> GpuMachine:
        """Read all GPUs now."""
        ...


class NvmlSource:
    """NVML through ``pynvml``, or a module ``nvml`` with the same functions.

    Reading creates no CUDA context. NVML is opened for each call unless the source is used in a ``with``, which keeps
    it open. A function that fails for a device, or that this driver lacks, leaves its value ``None``.
    """

    def __init__(self, nvml: Any = None) -> None:
        if nvml is None:
            import pynvml

            nvml = pynvml
        self._nvml = nvml
        self._open = False

    def __enter__(self) -> Self:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlInit()
            self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def read(self) -> GpuMachine:
        """Read all GPUs now; none, with the reason, if there is no driver."""
        with self._opened() as problem:
            if problem is not None:
                return GpuMachine(problem=problem)
            handles = self._handles()
            cuda = self._ask("nvmlSystemGetCudaDriverVersion_v2")
            return GpuMachine(
                gpus=tuple(self._state(index, handle) for index, handle in handles),
                driver=_text(self._ask("nvmlSystemGetDriverVersion")),
                cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
                problem=None if handles else "the driver lists no GPU",
                peers=self._peers(handles) if len(handles) > 1 else None,
            )

    def brief(self) -> tuple[GpuState, ...]:
        """Read only changing values: clock, heat, power, reasons, use. Empty without a driver."""
        with self._opened() as problem:
            if problem is not None:
                return ()
            return tuple(self._moment(index, handle) for index, handle in self._handles())

    @contextlib.contextmanager
    def _opened(self) -> Iterator[str | None]:
        if self._open:
            yield None
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            yield f"NVML does not start: {error}"
            return
        try:
            yield None
        finally:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _handles(self) -> list[tuple[int, Any]]:
        """Return the handles that can be opened; a GPU that fell off the bus cannot."""
        found = []
        for index in range(self._ask("nvmlDeviceGetCount") or 0):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            if handle is not None:
                found.append((index, handle))
        return found

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call a function of NVML; ``None`` if it fails or is missing."""
        function: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except (self._nvml.NVMLError, ctypes.ArgumentError, ValueError):
            return None

    def _moment(self, index: int, handle: Any) -> GpuState:
        ask = self._ask
        bits = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:  # its name before driver 535
            bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        use, memory = ask("nvmlDeviceGetUtilizationRates", handle), ask("nvmlDeviceGetMemoryInfo", handle)
        return GpuState(
            index=index,
            name=_text(ask("nvmlDeviceGetName", handle)) or "unknown",
            uuid=_text(ask("nvmlDeviceGetUUID", handle)),
            sm_clock_hz=_scaled(ask("nvmlDeviceGetClockInfo", handle, self._nvml.NVML_CLOCK_SM), 1e6),
            max_sm_clock_hz=_scaled(ask("nvmlDeviceGetMaxClockInfo", handle, self._nvml.NVML_CLOCK_SM), 1e6),
            temperature_c=ask("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU),
            power_w=_scaled(ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            power_limit_w=_scaled(ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
            reasons=None if bits is None else decode_reasons(bits),
            utilisation=None if use is None else use.gpu / 100,
            memory_bytes=None if memory is None else memory.total,
            used_bytes=None if memory is None else memory.used,
        )

    def _state(self, index: int, handle: Any) -> GpuState:
        ask, nvml = self._ask, self._nvml
        remapped, mig = ask("nvmlDeviceGetRemappedRows", handle), ask("nvmlDeviceGetMigMode", handle)
        mode, bus = ask("nvmlDeviceGetComputeMode", handle), ask("nvmlDeviceGetPciInfo", handle)
        ecc, persistence = ask("nvmlDeviceGetEccMode", handle), ask("nvmlDeviceGetPersistenceMode", handle)
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
        threshold = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        more: dict[str, Any] = {
            "bus": None if bus is None else _text(bus.busId),
            "memory_clock_hz": _scaled(ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM), 1e6),
            "max_memory_clock_hz": _scaled(ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM), 1e6),
            "slowdown_c": ask("nvmlDeviceGetTemperatureThreshold", handle, threshold) or None,
            "default_power_limit_w": _scaled(ask("nvmlDeviceGetPowerManagementDefaultLimit", handle), 1e-3),
            "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "pcie_slot_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_card_generation": ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
            "pcie_lanes": ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "pcie_max_lanes": ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            "ecc": None if ecc is None else bool(ecc[0]),
            "ecc_uncorrected": ask(
                "nvmlDeviceGetTotalEccErrors",
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            "remap_pending": None if remapped is None else bool(remapped[2]),
            "remap_failed": None if remapped is None else bool(remapped[3]),
            "mig": None if mig is None else bool(mig[0]),
            "persistence": None if persistence is None else bool(persistence),
            "compute_mode": None if mode is None else COMPUTE_MODES.get(mode, f"mode {mode}"),
            "capability": None if capability is None else tuple(capability),
            "fabric": self._fabric(handle),
            "processes": None if processes is None else tuple(process.pid for process in processes),
        }
        return self._moment(index, handle).model_copy(update=more)

    def _fabric(self, handle: Any) -> str | None:
        kind = getattr(self._nvml, "c_nvmlGpuFabricInfo_t", None)
        if kind is None:
            return None
        info = kind()
        if self._ask("nvmlDeviceGetGpuFabricInfo", handle, info) is None:
            return None
        return FABRIC_STATES.get(int(info.state), f"state {info.state}")

    def _peers(self, handles: Sequence[tuple[int, Any]]) -> dict[str, bool] | None:
        found = {}
        for i, one in handles:
            for j, other in handles:
                if i < j:
                    status = self._ask("nvmlDeviceGetP2PStatus", one, other, P2P_READ)
                    if status is not None:
                        found[f"{i}-{j}"] = status == P2P_OK
        return found or None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


BUSY = 0.5
"""Share of NVML's last sampling period in which kernels must have run for a device to count as busy."""


class DeviceTrack(BaseModel):
    """One device over a run.

    ``samples`` is the total, ``busy`` those under load; clocks in Hz and ``reasons`` (each reason's
    share) are of the busy samples only, ``None`` or empty if there were none: an idle clock is not informative.

    ``max_sm_clock_hz`` is the device's limit. NVML's use is a share of time in which any kernel ran, not of the
    device's units: 100 % is possible with one unit at work.
    """

    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    uuid: str | None = None
    samples: int
    busy: int
    mean_sm_clock_hz: float | None = None
    lowest_sm_clock_hz: float | None = None
    max_sm_clock_hz: float | None = None
    highest_temperature_c: float | None = None
    mean_power_w: float | None = None
    highest_power_w: float | None = None
    power_limit_w: float | None = None
    mean_utilisation: float | None = None
    most_used_bytes: int | None = None
    reasons: dict[str, float] | None = None

    @property
    def throttled_share(self) -> float | None:
        """Share of busy samples under the most frequent reason of `HARMFUL`; ``None``: unknown."""
        if self.reasons is None or not self.busy:
            return None
        return max((share for reason, share in self.reasons.items() if reason in HARMFUL), default=0.0)


class GpuTrack(BaseModel):
    """Result of a `GpuSampler`; ``devices`` is empty if no GPU could be read (see ``problem``)."""

    model_config = ConfigDict(frozen=True)

    interval_s: float
    devices: tuple[DeviceTrack, ...] = ()
    problem: str | None = None


class _Sums:
    """Sums of one device's samples, so that memory does not grow with the run."""

    def __init__(self, first: GpuState) -> None:
        self.first = first
        self.samples = self.busy = self.reasons_known = 0
        self.reasons: Counter[str] = Counter()
        self.totals: dict[str, tuple[float, int]] = {}
        self.lowest: float | None = None
        self.highest: dict[str, float] = {}

    def add(self, state: GpuState) -> None:
        self.samples += 1
        self._mean("utilisation", state.utilisation)
        self._mean("power", state.power_w)
        for name, value in (
            ("temperature", state.temperature_c),
            ("power", state.power_w),
            ("used", None if state.used_bytes is None else float(state.used_bytes)),
        ):
            if value is not None:
                self.highest[name] = max(value, self.highest.get(name, value))
        if state.utilisation is None or state.utilisation < BUSY:
            return
        self.busy += 1
        if state.sm_clock_hz is not None:
            self._mean("clock", state.sm_clock_hz)
            self.lowest = state.sm_clock_hz if self.lowest is None else min(self.lowest, state.sm_clock_hz)
        if state.reasons is not None:
            self.reasons_known += 1
            self.reasons.update(state.reasons)

    def _mean(self, name: str, value: float | None) -> None:
        if value is not None:
            total, count = self.totals.get(name, (0.0, 0))
            self.totals[name] = (total + value, count + 1)

    def track(self) -> DeviceTrack:
        mean = {name: total / count for name, (total, count) in self.totals.items()}
        used = self.highest.get("used")
        known = self.reasons_known
        return DeviceTrack(
            index=self.first.index,
            name=self.first.name,
            uuid=self.first.uuid,
            samples=self.samples,
            busy=self.busy,
            mean_sm_clock_hz=mean.get("clock"),
            lowest_sm_clock_hz=self.lowest,
            max_sm_clock_hz=self.first.max_sm_clock_hz,
            highest_temperature_c=self.highest.get("temperature"),
            mean_power_w=mean.get("power"),
            highest_power_w=self.highest.get("power"),
            power_limit_w=self.first.power_limit_w,
            mean_utilisation=mean.get("utilisation"),
            most_used_bytes=None if used is None else int(used),
            reasons={reason: count / known for reason, count in sorted(self.reasons.items())} if known else None,
        )


class GpuSampler:
    """Sampler that reads the GPUs every ``interval_s`` seconds on its own thread.

    ``uuids`` limits it to these devices (default: all of the machine), with or without NVML's ``GPU-`` prefix. A sample
    costs about ten calls of NVML a device and has Python's lock only between them. Without a GPU no thread is
    started. A sample that fails is skipped.
    """

    def __init__(
        self, interval_s: float = 1.0, *, uuids: Sequence[str] | None = None, source: NvmlSource | None = None
    ) -> None:
        self.interval_s = interval_s
        self._uuids = None if uuids is None else {uuid.removeprefix("GPU-") for uuid in uuids}
        self._source = source
        self._sums: dict[int, _Sums] = {}
        self._problem: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> GpuSampler:
        """Start; a second call does nothing."""
        if self._thread is not None or self._problem is not None:
            return self
        try:
            self._source = self._source or NvmlSource()
            found = self._source.brief()
        except Exception as error:  # a run must not fail for this
            found, self._problem = (), f"the GPUs cannot be asked: {error}"
        if not found:
            self._problem = self._problem or "no GPU answers through NVML"
            return self
        self._thread = threading.Thread(target=self._watch, name="shardwise-gpu-sampler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> GpuTrack:
        """Stop the thread, and summarize; may be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * self.interval_s + 10)
        devices = tuple(self._sums[index].track() for index in sorted(self._sums))
        return GpuTrack(interval_s=self.interval_s, devices=devices, problem=self._problem)

    def _watch(self) -> None:
        assert self._source is not None
        with self._source as source:
            while True:
                try:
                    self._look(source.brief())
                except Exception as error:
                    self._problem = f"reading the GPUs failed: {error}"
                if self._stop.wait(self.interval_s):
                    return

    def _look(self, states: Sequence[GpuState]) -> None:
        for state in states:
            if self._uuids is None or (state.uuid or "").removeprefix("GPU-") in self._uuids:
                self._sums.setdefault(state.index, _Sums(state)).add(state)
