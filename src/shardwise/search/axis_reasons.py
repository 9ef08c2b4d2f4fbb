"""Explain the model-parallel axes of a plan: costs with and without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.cost.time.pipeline_time import bubble_fraction
from shardwise.hardware.cluster import ClusterSpec
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import DEGREE_WORDS
from shardwise.plan.traffic import crosses_nodes, sent_bytes, traffic_text
from shardwise.search.candidate import Candidate
from shardwise.search.problem import SearchProblem
from shardwise.units import bytes_text, number_text, seconds_text


def axes_text(plan: Plan) -> str:
    """Format ``tp 2 × pp 4``."""
    degrees = {axis: getattr(plan.dims, axis) for axis in DEGREE_WORDS}
    return " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)


def purposes(problem: SearchProblem, best: Candidate, others: Sequence[Candidate]) -> list[str]:
    """Return why ``best`` has its axes, most important first; empty where it has none.

    ``others`` are the candidates of the same request; those without such axes serve as comparison.
    """
    if not best.plan.dims.splits_model and best.plan.dims.ep == 1:
        return []
    return [*_without(problem, best, others), *_each(problem, best)]


def _without(problem: SearchProblem, best: Candidate, others: Sequence[Candidate]) -> Iterator[str]:
    """Describe the best plan without the axes."""
    plan, batch, world = best.plan, problem.workload.global_batch, problem.cluster.world_size
    shown = axes_text(plan)
    if batch is not None and batch < world:
        yield (
            f"the global batch of {batch} has no sample for each of {world} devices: {shown} puts "
            f"{world // plan.dims.dp} devices on the samples of one rank"
        )
    plain = [c for c in others if not c.plan.dims.splits_model and c.plan.dims.ep == 1]
    fitting = [c for c in plain if c.fits is not False]
    if plain and not fitting:
        near = min(plain, key=lambda c: c.memory.device_bytes)
        yield (
            f"no data-parallel plan fits: the nearest, {near.plan.strategy}, needs "
            f"{bytes_text(near.memory.device_bytes)} and {bytes_text(problem.usable)} are usable"
        )
    timed = [c for c in fitting if c.time is not None]
    if best.time is None or not timed:
        return
    fastest = min(timed, key=lambda c: c.time.step_s if c.time else 0.0)
    assert fastest.time is not None
    gap = fastest.time.step_s / best.time.step_s - 1
    if gap > 0:
        yield (
            f"the fastest data-parallel plan is {fastest.plan.strategy}, {gap:.0%} slower at "
            f"{seconds_text(fastest.time.step_s)} a step"
        )


def _each(problem: SearchProblem, best: Candidate) -> Iterator[str]:
    """Describe where each axis is placed and its cost per step."""
    plan, cluster = best.plan, problem.cluster
    dims, program = plan.dims, problem.workload.program
    sent = sent_bytes(problem.profile, plan, program, per_node=cluster.devices_per_node)
    if dims.tp > 1:
        where = (
            "reaches over several nodes"
            if crosses_nodes("tp", plan, cluster)
            else f"stays inside a node{_link(cluster)}"
        )
        yield f"tp {dims.tp} {where}: each device sends {bytes_text(sent['tp'])} a step{_waits(best, 'exposed_tp_s')}"
    if dims.cp > 1:
        length = plan.seq_len or problem.profile.seq_len
        tokens = "" if length is None else f"{length // dims.cp} of a sample's {length} tokens are on a rank, "
        where = traffic_text("cp", plan, cluster)
        yield (
            f"cp {dims.cp}: {tokens}attention exchanges them for heads, {bytes_text(sent['cp'])} a step {where}"
            f"{_waits(best, 'exposed_cp_s')}"
        )
    if dims.ep > 1:
        experts, where = problem.profile.experts, traffic_text("ep", plan, cluster)
        yield (
            f"ep {dims.ep}: a rank has {experts // dims.ep} of {experts} experts of each layer whole, and tokens go to "
            f"them, {bytes_text(sent['ep'])} a step {where}{_waits(best, 'exposed_ep_s')}"
        )
    if dims.pp > 1:
        micros, where = plan.grad_accum, traffic_text("pp", plan, cluster)
        idle = bubble_fraction(dims.pp, micros, plan.virtual_stages)
        yield (
            f"pp {dims.pp}: a stage sends only {bytes_text(sent['pp'])} a step {where}; with {micros} micro batches "
            f"equal stages idle {idle:.0%} of it"
        )


def _link(cluster: ClusterSpec) -> str:
    link = cluster.link
    if link is None or link.bytes_per_s is None:
        return ""
    return f" ({link.kind}, {number_text(link.bytes_per_s / 1e9)} GB/s)"


def _waits(best: Candidate, part: str) -> str:
    if best.time is None:
        return ""
    return f", and waits {seconds_text(getattr(best.time, part))} for it"
