"""`Observed`: inputs of the diagnosis of a run. No torch here; unknown is ``None``."""

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
    """Checkpoint cost: seconds of training stall, seconds until durable, and bytes."""

    step: int
    stall_s: float
    write_s: float | None = None
    num_bytes: int | None = None
    background: bool = False


class LinkUse(_Facts):
    """Traffic of one device, or one node, over the link of a mesh axis.

    ``axis`` is ``dp``, ``tp``, ``cp`` or ``pp``; ``name`` is the link in words. ``bytes_per_step`` were sent in one
    direction in a step. ``expected`` is the expected rate in bytes/s, ``expected_from`` its source. ``measured`` is the
    rate of an earlier measurement (`shardwise bench comm`).
    """

    axis: str
    name: str
    bytes_per_step: float | None = None
    expected: float | None = None
    expected_from: str = ""
    measured: float | None = None
    measured_from: str = ""


class DeviceState(_Facts):
    """State of one GPU during the run: means, and ``throttled``, the share of time per reason.

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
    """Cores and network of rank 0's node during ``seconds`` of the run, over ``steps`` steps.

    ``cores`` is how many the ranks may use together, ``machine_cores`` how many there are. ``busy``, ``own`` and
    ``others`` are average busy cores: total, by the ranks with their data workers, and by everything else. ``threads``
    is the number of compute threads of a rank. ``nic`` is the interface (not loopback) that sent most: ``nic_bytes`` in
    total; its driver reports ``nic_speed`` bytes/s.
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


class LossSpike(_Facts):
    """Logged loss far above those before it. ``samples`` are the numbers of its step, of each data-parallel replica."""

    step: int
    loss: float
    median: float
    samples: tuple[tuple[int, ...], ...] = ()


class LostGradient(_Facts):
    """Parameters that had a gradient and have none any more, ``since`` a step."""

    parameters: tuple[str, ...]
    since: int


class Observed(_Facts):
    """Inputs of the diagnosis of a run.

    ``loader_workers`` is the number of loader processes of a rank, 0 for none, ``None`` where not known.
     ``save_every`` is steps between checkpoints. ``peak_bytes`` and ``device_bytes`` are the largest allocated
    peak of all ranks, and the memory of a rank's device (or its share of the host). ``price`` is US dollars for an hour
    of one device, by ``price_from``. ``mfu`` is measured. ``losses`` are the logged steps with their training loss in
    nats a token, ``spikes`` those far above the ones before, ``vocab_size`` the number of tokens to choose from.
    ``lost_gradients`` are parameters whose gradient went missing during the run.
    ``configured`` is false where a fix cannot name keys of a config or of `shardwise.start`: in another tool's loop.
    ``own_loop`` is true in the loop of ``shardwise train``, whose code its user does not write.
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
    losses: tuple[tuple[int, float], ...] = ()
    spikes: tuple[LossSpike, ...] = ()
    lost_gradients: tuple[LostGradient, ...] = ()
    vocab_size: int | None = None
    configured: bool = True
    own_loop: bool = False

    def link(self, axis: str) -> LinkUse | None:
        """Return the link of an axis, where anything is known of it."""
        return next((link for link in self.links if link.axis == axis), None)
