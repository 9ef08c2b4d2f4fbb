"""`Observed`: all that is known of a run when it is asked what it loses time to. No torch here; unknown is ``None``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardwise.cost.time.step_time import StepTime
from shardwise.measure.step_time.timing import Timing
from shardwise.plan.plan import Plan
from shardwise.search.alternatives import Alternative


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)


class SaveStall(_Facts):
    """One checkpoint: seconds that training stood still for it, seconds until it was on disk, and its bytes."""

    step: int
    stall_s: float
    write_s: float | None = None
    num_bytes: int | None = None
    background: bool = False


class LinkUse(_Facts):
    """What one device, or one node, sends over the link of a mesh axis.

    ``axis`` is ``dp``, ``tp``, ``cp`` or ``pp``; ``name`` is the link in words. ``bytes_per_step`` were sent in one
    direction in a step. ``expected`` is the bytes a second that the link should carry, ``expected_from`` says who says
    so. ``measured`` is what an earlier measurement got out of it (`shardwise bench comm`).
    """

    axis: str
    name: str
    bytes_per_step: float | None = None
    expected: float | None = None
    expected_from: str = ""
    measured: float | None = None
    measured_from: str = ""


class DeviceState(_Facts):
    """One GPU during the run: means over it, and ``throttled``, the share of the time for each reason.

    ``max_clock`` is the highest SM clock of the device. Clocks are in Hz, temperatures in degrees Celsius, power in W.
    """

    rank: int
    name: str = "GPU"
    clock: float | None = None
    max_clock: float | None = None
    temperature: float | None = None
    slowdown_temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    throttled: dict[str, float] = {}


class HostUse(_Facts):
    """The cores and the network of rank 0's node during ``seconds`` of the run, in which ``steps`` were made.

    ``cores`` is how many the ranks may use together, ``machine_cores`` how many there are. ``busy``, ``own`` and
    ``others`` are cores kept busy on average: in all, by the ranks with their data workers, and by everything else.
    ``threads`` is the number of compute threads of a rank. ``nic`` is the interface, the loopback left out, that sent
    most: ``nic_bytes`` in all, and by its driver it carries ``nic_speed`` bytes/s.
    """

    cores: int
    machine_cores: int
    local_ranks: int
    threads: int
    busy: float | None = None
    own: float | None = None
    seconds: float = 0.0
    steps: int = 0
    nic: str | None = None
    nic_bytes: float | None = None
    nic_speed: float | None = None

    @property
    def others(self) -> float | None:
        """Cores that other processes kept busy."""
        return None if self.busy is None or self.own is None else max(0.0, self.busy - self.own)


class Observed(_Facts):
    """What diagnosis knows of a run.

    ``loader_workers`` is how many processes make batches for a rank, 0 for none, ``None`` where the loader cannot be
    asked. ``save_every`` is steps between checkpoints. ``peak_bytes`` and ``device_bytes`` are the fullest rank's
    allocated peak and what a rank's device (or its share of the host) has. ``price`` is US dollars for an hour of one
    device, by ``price_from``. ``mfu`` is measured.
    """

    timing: Timing
    plan: Plan
    device: Literal["cpu", "cuda"] = "cpu"
    nodes: int = 1
    backend: str | None = None
    host: HostUse | None = None
    loader_workers: int | None = None
    saves: tuple[SaveStall, ...] = ()
    save_every: int | None = None
    links: tuple[LinkUse, ...] = ()
    peak_bytes: int | None = None
    device_bytes: int | None = None
    predicted: StepTime | None = None
    alternatives: tuple[Alternative, ...] = ()
    gpus: tuple[DeviceState, ...] = ()
    price: float | None = None
    price_from: str = ""
    mfu: float | None = None

    def link(self, axis: str) -> LinkUse | None:
        """The link of an axis, where anything is known of it."""
        return next((link for link in self.links if link.axis == axis), None)
