"""Results of ``bench scaling``: efficiency, losses, the value of the last device. No torch.

*Weak*: every device keeps its batch, so a step should take as long on any number of devices. *Strong*: the global batch
stays, so a step on twice the devices should take half as long. Efficiency is tokens per second and device, over those
of the smallest measured size; the loss is the seconds of a step above that ideal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from shardwise.hardware.cluster import ClusterSpec
from shardwise.measure.step_time.timing import PHASES, Timing
from shardwise.plan.plan import Plan

Mode = Literal["weak", "strong"]
MODES: tuple[Mode, ...] = ("weak", "strong")
Z = 1.2816
"""Standard deviations on each side of 8 cases in 10 of a normal distribution."""


class UnitTraffic(BaseModel):
    """Unit of the model, ``count`` times, as data-parallel traffic sees it.

    ``share`` is the part of a micro batch's floating-point operations in one of the ``count``. ``gather_bytes`` are its
    gathered weights, ``reduce_bytes`` its reduced gradients, both of the full unit on one
    tensor-parallel rank. Repeated blocks are sharding units of their own; all others belong to the root.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    count: int
    block: bool
    share: float
    gather_bytes: float
    reduce_bytes: float


class Sample(BaseModel):
    """Measured size. Seconds are rank 0's, between the ends of two steps.

    ``tokens`` are the labels of all steps.

    ``wall_s`` is the clock's time around the timed steps, with the devices synchronised at both ends. ``threads`` are a
    rank's, ``cores`` those that a node's ranks share (``None``: a GPU each). ``load`` is the machine's load
    average before the first step.
    """

    model_config = ConfigDict(frozen=True)

    mode: Mode
    devices: int
    nodes: int
    plan: Plan
    steps_s: tuple[float, ...]
    wall_s: float
    tokens: int
    threads: int
    cores: int | None = None
    load: float | None = None
    date: str = ""
    timing: Timing | None = None

    @property
    def steps(self) -> int:
        """Number of timed steps."""
        return len(self.steps_s)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.wall_s / self.steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.tokens / self.wall_s

    @property
    def tokens_per_device(self) -> float:
        """Tokens of one step per device."""
        return self.tokens / self.steps / self.devices

    @property
    def deviation(self) -> float:
        """Relative standard error of `step_s`; steps are taken to be independent."""
        if self.steps < 2:
            return 0.0
        return statistics.stdev(self.steps_s) / math.sqrt(self.steps) / self.step_s

    @property
    def crowded(self) -> bool:
        """True if a node's ranks need more cores than it has, so that sharing is measured."""
        return self.cores is not None and self.devices // self.nodes * self.threads > self.cores

    @property
    def share(self) -> int:
        """Samples of a step on a data-parallel rank."""
        return (self.plan.micro_batch or 1) * self.plan.grad_accum


class LeftOut(BaseModel):
    """Size that was not measured, and the reason."""

    model_config = ConfigDict(frozen=True)

    mode: Mode
    devices: int
    reason: str


class Subject(BaseModel):
    """Subject of a measurement, equal for all samples of a file.

    Sizes derive from ``reference``.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    device: str
    strategy: str
    precision: str
    recompute: str
    compile: bool
    seq_len: int
    micro_batch: int
    grad_accum: int
    global_batch: int
    optimizer: str

    def differences(self, other: Subject) -> list[str]:
        """List the differences of ``other``, in words."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [f"{key} {mine[key]} (not {theirs[key]})" for key in mine if mine[key] != theirs[key]]


class Scaling(BaseModel):
    """Measurements of one subject, with the facts of model and machine for predictions.

    ``cluster`` is the machine at its largest size. ``units`` is empty where the model could not be traced.
    """

    model_config = ConfigDict(frozen=True)

    subject: Subject
    reference: Plan
    cluster: ClusterSpec
    units: tuple[UnitTraffic, ...] = ()
    samples: tuple[Sample, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def of(self, mode: Mode) -> list[Sample]:
        """Return the samples of one mode, by size."""
        return sorted((one for one in self.samples if one.mode == mode), key=lambda one: one.devices)

    def merged(self, samples: Iterable[Sample], left_out: Iterable[LeftOut] = ()) -> Scaling:
        """Return the measurements with more samples; a remeasured size is replaced."""
        new, gone = list(samples), list(left_out)
        known = {(one.mode, one.devices) for one in new}
        kept = [one for one in self.samples if (one.mode, one.devices) not in known]
        full = sorted([*kept, *new], key=lambda one: (MODES.index(one.mode), one.devices))
        there = {(one.mode, one.devices) for one in full}
        missing = {(one.mode, one.devices): one for one in (*self.left_out, *gone)}
        still = tuple(one for key, one in missing.items() if key not in there)
        return self.model_copy(update={"samples": tuple(full), "left_out": still})


class Loss(BaseModel):
    """Seconds above the ideal of a part of a step (below 0: less). ``share`` is of the step."""

    model_config = ConfigDict(frozen=True)

    part: str
    seconds: float
    share: float


class ScalingRow(BaseModel):
    """Size compared with the smallest one. Unknown values are ``None``.

    ``efficiency`` is 1 for the smallest size; ``low`` and ``high`` are its 80 % interval, from the scatter of
    steps. ``lost_s`` of a step is above the ideal: the sum of ``losses``, of which ``untold`` is not explained by
    the parts. ``added_tokens_per_s`` is what each device since the next smaller size has added, ``worth`` that over a
    device of the smallest size. Money is US dollars.
    """

    model_config = ConfigDict(frozen=True)

    mode: Mode
    devices: int
    step_s: float
    tokens_per_s: float
    speedup: float
    efficiency: float
    low: float
    high: float
    ideal_s: float
    lost_s: float
    losses: tuple[Loss, ...] | None
    added_tokens_per_s: float | None = None
    worth: float | None = None
    dollars_per_hour: float | None = None
    dollars_per_million_tokens: float | None = None
    added_dollars_per_million_tokens: float | None = None
    crowded: bool = False


def rows_of(samples: Sequence[Sample], price: float | None) -> list[ScalingRow]:
    """Build a row for each sample of one mode; ``price`` is dollars for an hour of a device."""
    ordered = sorted(samples, key=lambda one: one.devices)
    return [_row(ordered[0], ordered[index - 1] if index else None, one, price) for index, one in enumerate(ordered)]


def _row(base: Sample, before: Sample | None, here: Sample, price: float | None) -> ScalingRow:
    each = base.tokens_per_s / base.devices
    efficiency = here.tokens_per_s / here.devices / each
    error = 0.0 if here is base else math.hypot(base.deviation, here.deviation) * Z
    added = None
    if before is not None:
        added = (here.tokens_per_s - before.tokens_per_s) / (here.devices - before.devices)
    return ScalingRow(
        mode=here.mode,
        devices=here.devices,
        step_s=here.step_s,
        tokens_per_s=here.tokens_per_s,
        speedup=here.tokens_per_s / base.tokens_per_s,
        efficiency=efficiency,
        low=efficiency * (1 - error),
        high=efficiency * (1 + error),
        ideal_s=efficiency * here.step_s,
        lost_s=(1 - efficiency) * here.step_s,
        losses=losses(base, here),
        added_tokens_per_s=added,
        worth=None if added is None else added / each,
        dollars_per_hour=None if price is None else price * here.devices,
        dollars_per_million_tokens=_dollars(price, here.tokens_per_s / here.devices),
        added_dollars_per_million_tokens=None if added is None else _dollars(price, added),
        crowded=here.crowded,
    )


def _dollars(price: float | None, tokens_per_s: float) -> float | None:
    """Return dollars for a million tokens at that rate per device; ``None`` for a rate of 0."""
    return None if price is None or tokens_per_s <= 0 else price / 3600 / tokens_per_s * 1e6


def losses(base: Sample, here: Sample) -> tuple[Loss, ...] | None:
    """Split the time above the ideal by part, largest first: a part's seconds minus its ideal.

    The ideal of a part is its time at the smallest size, times a device's share of the work: 1 under weak scaling. A
    part that the smallest size does not have (no communication) has an ideal of 0. ``None`` if no parts were
    measured; ``untold`` is the remainder.
    """
    if base.timing is None or here.timing is None:
        return None
    work = here.tokens_per_device / base.tokens_per_device
    found = {part: here.timing.seconds(part) - work * base.timing.seconds(part) for part in PHASES}
    full = here.step_s - work * base.step_s
    found["untold"] = full - sum(found.values())
    listed = [Loss(part=part, seconds=s, share=s / here.step_s) for part, s in found.items() if abs(s) > 1e-9]
    return tuple(sorted(listed, key=lambda one: -abs(one.seconds)))


def warnings_of(scaling: Scaling) -> list[str]:
    """List the limits of these measurements, in sentences."""
    found = []
    crowded = sorted({one.devices for one in scaling.samples if one.crowded})
    if crowded:
        one = next(one for one in scaling.samples if one.crowded)
        found.append(
            f"{_listed(crowded)} ranks share {one.cores} cores: this measures sharing, not as many devices; "
            "no prediction is made from it"
        )
    threads = {one.devices: one.threads for one in scaling.samples}
    if len(set(threads.values())) > 1 and scaling.cluster.device == "cpu":
        each = ", ".join(f"{n} on {size}" for size, n in sorted(threads.items()))
        found.append(f"ranks have different numbers of threads ({each}): set parallel.threads, and measure again")
    dates = sorted({one.date for one in scaling.samples})
    if len(dates) > 1:
        found.append(f"measured on different days ({', '.join(dates)}): what else ran there may differ")
    loads = [one.load for one in scaling.samples if one.load is not None and one.cores is not None]
    cores = max((one.cores or 0 for one in scaling.samples), default=0)
    if loads and cores and max(loads) > cores:
        found.append(f"the load average was {max(loads):.1f} on {cores} cores: other work was running, too")
    return found


def _listed(numbers: Sequence[int]) -> str:
    *first, last = [str(number) for number in numbers]
    return f"{', '.join(first)} and {last}" if first else last


def dumped(model: BaseModel) -> dict[str, Any]:
    """Dump a model as JSON values."""
    return model.model_dump(mode="json", by_alias=True)
