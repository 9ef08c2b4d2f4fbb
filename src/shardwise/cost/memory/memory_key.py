"""`MemoryKey`: what a plan's bytes depend on, as a key of caches."""

from __future__ import annotations

from operator import attrgetter

from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.parallel_options import OPTION_SPECS
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload

# styles have no cost and cannot be cache keys
_OPTIONS = attrgetter(*sorted(OPTION_SPECS.keys() - {"tp_styles", "gradient_sync"}))


class MemoryKey:
    """Key of bytes that are computed once.

    Profile, program and ``cluster`` are compared by identity, plan and workload by the fields that matter. Without a
    cluster the bytes are those of a micro batch of any size, without ``accumulation`` of any number of them, without
    ``step`` those that a rank stores, whatever it recomputes and whenever it reduces gradients.
    """

    __slots__ = ("_facts", "_hash", "cluster", "plan", "profile", "workload")

    def __init__(
        self,
        profile: ModelProfile,
        plan: Plan,
        workload: Workload,
        cluster: ClusterSpec | None = None,
        *,
        accumulation: bool = True,
        step: bool = True,
    ) -> None:
        dims = plan.dims
        self.profile, self.plan, self.workload, self.cluster = profile, plan, workload, cluster
        self._facts = (
            id(profile),
            plan.strategy,
            dims.dp_replicate,
            dims.dp_shard,
            dims.tp,
            dims.pp,
            dims.cp,
            dims.ep,
            plan.precision,
            *((plan.recompute, plan.gradient_sync) if step else ()),
            *_OPTIONS(plan),
            plan.stage_blocks,
            plan.device,
            plan.objective,
            counted_micro_batches(plan, workload) if accumulation and step else 0,
            workload.optimizer,
            workload.optimizer_states,
            workload.scalar_states,
            workload.optimizer_temporaries,
            workload.loop_temporaries,
            workload.compiled,
            workload.average,
            workload.fused_loss,
            id(workload.program),
            plan.weights,
            plan.accumulate,
            plan.reduce,
            plan.rounding,
            plan.fp8,
            workload.capacity_factor,
            *(() if cluster is None else (id(cluster), plan.sequences, workload.framework_overhead)),
        )
        self._hash = hash(self._facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryKey) and self._facts == other._facts

    def __hash__(self) -> int:
        return self._hash


def counted_micro_batches(plan: Plan, workload: Workload) -> int:
    """Return the fewest micro batches with the same memory as the plan's.

    Without a pipeline the third and later ones find what the second found. In one there are most in flight with
    ``2 pp`` of them (interleaved stages), unless all are (gpipe) or each has its own buffers (torch's stages).
    """
    if plan.dims.pp == 1:
        return min(plan.grad_accum, 2)
    if plan.pipeline_schedule == "gpipe" or workload.program.modules == "torchtitan":
        return plan.grad_accum
    return min(plan.grad_accum, 2 * plan.dims.pp + 1)
