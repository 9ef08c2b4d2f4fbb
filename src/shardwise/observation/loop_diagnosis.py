"""Diagnosis of an observed loop by the rules of own runs: what its phases show, and why the rest is not judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.diagnosis.diagnose import diagnose, why_nothing
from shardwise.diagnosis.finding import Finding
from shardwise.diagnosis.observed import HostUse, LinkUse, Observed
from shardwise.measure.step_time.timing import Timing
from shardwise.observation.loop_facts import LoopFacts
from shardwise.observation.loop_times import LoopTimes
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan

_UNSEEN = {
    "throttling": "an observation does not read the devices' clocks",
    "checkpoint-stall": "a checkpoint is in the loop's own code",
    "slow-link": "what the link should carry is not known without a plan and its cluster",
    "pipeline-bubble": "stages of a pipeline are not seen",
    "recompute": "recomputed forwards are in the backward, and memory is not measured",
    "needless-sharding": "memory is not measured, and no plan says what else fits",
    "small-micro-batch": "memory is not measured, and no plan says what else fits",
    "loss-at-chance": "the loop logs its losses where it logs them",
    "loss-rises": "the loop logs its losses where it logs them",
    "loss-spike": "the loop logs its losses where it logs them",
    "lost-gradient": "an observation does not look at gradients again and again",
}


def diagnosed(
    timing: Timing, ranks: Sequence[LoopFacts], times: Sequence[LoopTimes], host: HostUse | None
) -> tuple[tuple[Finding, ...] | None, dict[str, str]]:
    """Return the findings, and by kind why a cause is not judged; ``None``, and why under "", without a diagnosis.

    ``healthy`` is among them only where waiting for data and for other ranks is seen: else computing has it inside.
    """
    why = why_nothing(timing).removeprefix("no diagnosis: ")
    if why or not timing.ranks[0]:
        return None, {"": why or next(iter(timing.unmeasured.values()), "no part of the step is seen")}
    workers = {one.loader_workers for one in times}
    found = diagnose(
        Observed(
            timing=timing,
            plan=_plan_of(ranks),
            backend=None if timing.world_size == 1 else "gloo",  # parts are known of models on a CPU alone
            host=host,
            links=tuple(_links(ranks)),
            loader_workers=workers.pop() if len(workers) == 1 else None,
            configured=False,
        )
    )
    if timing.parts["data"] is None or (timing.world_size > 1 and timing.parts["exposed_dp"] is None):
        found = tuple(finding for finding in found if finding.kind != "healthy")
    return found, _UNSEEN | dict(_blind(timing))


def _blind(timing: Timing) -> Iterator[tuple[str, str]]:
    """Yield causes whose part of the step is not seen in this loop, with the reason."""
    if timing.parts["data"] is None:
        yield "data-loader", timing.unmeasured["data"]
    if timing.world_size == 1:
        yield from dict.fromkeys(("straggler", "communication", "early-sync"), "there is one rank").items()
    elif timing.parts["exposed_dp"] is None:
        why = timing.unmeasured.get("exposed_dp", "waits for other ranks are not seen")
        yield from dict.fromkeys(("straggler", "communication", "early-sync"), why).items()
    if timing.cpu_wait_s is None:
        yield "cpu-oversubscription", "this kernel does not account for it"


def _links(ranks: Sequence[LoopFacts]) -> Iterator[LinkUse]:
    """Yield what a rank sends in a step where gradients are reduced, as a ring does; what a link carries is unknown."""
    sizes = [row.num_bytes for row in ranks[0].traffic if (row.name, row.phase) == ("all_reduce", "backward")]
    if sizes and len(ranks) > 1:
        sent = 2 * (len(ranks) - 1) / len(ranks) * sum(sizes)
        yield LinkUse(axis="dp", name="the link between ranks", bytes_per_step=sent)


def _plan_of(ranks: Sequence[LoopFacts]) -> Plan:
    """Return what the rules ask of a plan, as observed: a world of DDP, or ZeRO-1, where each rank has a part."""
    stated = [p.has_state for facts in ranks for p in facts.trained]
    strategy = "zero1" if any(stated) and not all(stated) else "ddp"
    micros = max(1, *(facts.micro_batches for facts in ranks))
    return Plan(strategy=strategy, dims=ParallelDims(dp_replicate=len(ranks)), grad_accum=micros)
