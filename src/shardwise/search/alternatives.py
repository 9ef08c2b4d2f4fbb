"""Alternatives of a plan with predicted bytes and seconds, for the diagnosis of a run.

The same global batch on the same ranks, with one change. Bytes and seconds are those of the planner's cost model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.dims import ParallelDims, dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Candidate, Pins
from shardwise.search.cost_inputs_of_plan import with_plan
from shardwise.search.problem import ask
from shardwise.search.search import cost_of

Change = Literal["micro batch", "recompute", "strategy", "schedule"]
_SHARDS_MORE = {
    "ddp": ("zero2", "fsdp", "fsdp+offload"),
    "zero1": ("zero2", "fsdp", "fsdp+offload"),
    "zero2": ("fsdp", "fsdp+offload"),
    "fsdp": ("fsdp+offload",),
    "ddp+lora": ("fsdp+lora",),
}
"""Strategies of the same training that need less memory on a device, by strategy."""


class Alternative(BaseModel):
    """Same step under another plan: required bytes, whether they fit, and predicted seconds.

    ``memory_from`` is the source of the bytes. ``step_s`` and ``now_s``, the plan's own, are predicted by one model:
    only their ratio means something.
    """

    model_config = ConfigDict(frozen=True)

    kind: Change
    plan: Plan
    memory_bytes: int | None = None
    fits: bool | None = None
    memory_from: str = "predicted"
    step_s: float | None = None
    now_s: float | None = None

    @property
    def gain(self) -> float | None:
        """Predicted gain as a share of a step; negative where it is slower."""
        return None if self.step_s is None or not self.now_s else 1 - self.step_s / self.now_s


def alternatives(
    profile: ModelProfile, workload: Workload, cluster: ClusterSpec, plan: Plan
) -> tuple[Alternative, ...]:
    """Return a few alternatives with one change, each with its bytes and seconds.

    Takes milliseconds. Larger micro batches with less accumulation; less recompute; no sharding; gradients kept
    unsharded until the last micro batch.
    """
    now = _cost(profile, workload, cluster, plan)
    now_s = None if now is None or now.time is None else now.time.step_s
    found = []
    for kind, changed in changes(plan):
        candidate = _cost(profile, workload, cluster, changed)
        if candidate is None:
            continue
        found.append(
            Alternative(
                kind=kind,
                plan=changed,
                memory_bytes=candidate.memory.device_bytes if not candidate.memory.unknown else None,
                fits=candidate.fits,
                step_s=None if candidate.time is None else candidate.time.step_s,
                now_s=now_s,
            )
        )
    return tuple(found)


def changes(plan: Plan) -> list[tuple[Change, Plan]]:
    """Return plans of the same global batch with one change."""
    found: list[tuple[Change, Plan]] = []
    if plan.micro_batch is not None and plan.dims.pp == 1:
        for times in (2, 4, 8):
            if plan.grad_accum % times == 0:
                update: dict[str, object] = {"micro_batch": plan.micro_batch * times}
                update["grad_accum"] = plan.grad_accum // times
                if plan.grad_accum == times:
                    update["gradient_sync"] = "last"
                found.append(("micro batch", plan.model_copy(update=update)))
    less = {"full": ("selective", "none"), "selective": ("none",), "none": ()}[plan.recompute]
    found += [("recompute", plan.model_copy(update={"recompute": mode, "recompute_layers": None})) for mode in less]
    if plan.gradient_sync == "every":
        found.append(("schedule", plan.model_copy(update={"gradient_sync": "last"})))
    full = _full(plan)
    return [*found, ("strategy", full)] if full is not None else found


def smaller(profile: ModelProfile, workload: Workload, cluster: ClusterSpec, plan: Plan) -> tuple[Alternative, ...]:
    """Return plans of the same step that are predicted to need less memory, the fastest first."""
    now = _cost(profile, workload, cluster, plan)
    if now is None or now.memory.unknown:
        return ()
    found = []
    for kind, changed in _reductions(plan, cluster):
        candidate = _cost(profile, workload, cluster, changed)
        if candidate is None or candidate.memory.device_bytes >= now.memory.device_bytes:
            continue
        found.append(
            Alternative(
                kind=kind,
                plan=changed,
                memory_bytes=candidate.memory.device_bytes,
                fits=candidate.fits,
                step_s=None if candidate.time is None else candidate.time.step_s,
                now_s=None if now.time is None else now.time.step_s,
            )
        )
    return tuple(sorted(found, key=lambda one: one.step_s or 0))


def _reductions(plan: Plan, cluster: ClusterSpec) -> list[tuple[Change, Plan]]:
    """Return plans that may need less memory, from the least change to the greatest."""
    own: list[tuple[Change, Plan]] = [("micro batch", one) for one in _splits(plan)]
    full = plan.model_copy(update={"recompute": "full", "recompute_layers": None})
    own += [("recompute", full)] if plan.recompute != "full" or plan.recompute_layers else []
    own += [("recompute", one) for one in _splits(full)[-1:]]
    others = [one for name in _SHARDS_MORE.get(str(plan.parsed), ()) for one in _as_strategy(plan, name, cluster)]
    for one in others:
        least = one.model_copy(update={"recompute": "full", "recompute_layers": None})
        own += [("strategy", which) for which in (one, *_splits(one)[-1:], *(_splits(least)[-1:] or [least]))]
    return own


def _splits(plan: Plan) -> list[Plan]:
    """Return the plan with smaller micro batches and more accumulation, down to one sample."""
    if plan.micro_batch is None or plan.dims.pp > 1 or plan.optimizer_in_backward:
        return []
    sizes = [size for size in range(plan.micro_batch // 2, 0, -1) if plan.micro_batch % size == 0]
    update = [{"micro_batch": size, "grad_accum": plan.grad_accum * (plan.micro_batch // size)} for size in sizes]
    return [plan.model_copy(update=one) for one in update]


def _as_strategy(plan: Plan, name: str, cluster: ClusterSpec) -> list[Plan]:
    try:
        dims = dims_for(parse_strategy(name), cluster.world_size, devices_per_node=cluster.devices_per_node)
    except PlanError:
        return []
    return [plan.model_copy(update={"strategy": name, "dims": dims})] if dims.dp == plan.dims.dp else []


def _full(plan: Plan) -> Plan | None:
    """Return the plan as ``ddp``; nothing if it already is, or uses other axes."""
    parsed = plan.parsed
    if parsed.base == "ddp" or str(parsed) != parsed.base or plan.dims.splits_model or plan.optimizer_in_backward:
        return None  # ddp reduces in buckets, too late to step in the backward
    dims = ParallelDims(dp_replicate=plan.dims.dp)
    return plan.model_copy(update={"strategy": "ddp", "dims": dims, "gradient_sync": "last", "prefetch": 1})


def _cost(profile: ModelProfile, workload: Workload, cluster: ClusterSpec, plan: Plan) -> Candidate | None:
    """Estimate a plan's costs; ``None`` where impossible."""
    pins = Pins(strategy=plan.parsed, precision=plan.precision)
    try:
        return cost_of(ask(profile, with_plan(workload, plan), cluster, pins), plan)
    except PlanError:
        return None
