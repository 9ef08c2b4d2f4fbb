"""Losses between ranks: links, collectives, premature reductions, pipeline bubble.

Each rule checks one cause and yields nothing where it does not apply. Time that a rank waits for a later one is
`slowest_rank` and not communication: it is caused by the straggler, not by the link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.cost.time.pipeline_time import bubble_fraction
from shardwise.diagnosis.finding import Finding, Level
from shardwise.diagnosis.observed import LinkUse
from shardwise.diagnosis.weight import (
    ALARM,
    GLOO_BYTES_PER_S,
    HEAVY,
    HINT,
    SLOW_GLOO,
    SLOW_LINK,
    Case,
    percent,
    rate,
    span,
)
from shardwise.units import bytes_text

EXPOSED = {"dp": "exposed_dp", "tp": "exposed_tp", "cp": "exposed_cp"}
_WHAT = {
    "dp": "reducing gradients and gathering weights over the data-parallel ranks",
    "tp": "the tensor-parallel exchange of each block",
    "cp": "the context-parallel exchange around each attention",
}
SMALL_BYTES = 1 << 20
"""With fewer bytes per step than this, latency dominates, and bytes/s do not characterize a link."""


def communication(case: Case) -> Iterator[Finding]:
    """Report axes with exposed collectives: a slow link, a wrong topology, or too much traffic."""
    for axis in EXPOSED:
        seconds = waited_s(case, axis)
        if case.level(seconds) is None:
            continue
        link = case.observed.link(axis)
        found = _misplaced(case, axis, seconds) or _slow(case, axis, seconds, link)
        yield found or _much(case, axis, seconds, link)


def waited_s(case: Case, axis: str) -> float:
    """Exposed seconds of an axis in a step; premature reductions belong to `early_sync`."""
    early = case.timing.early_reduce_s or 0.0
    return case.timing.seconds(EXPOSED[axis]) - (early if axis == "dp" else 0.0)


def _slow(case: Case, axis: str, seconds: float, link: LinkUse | None) -> Finding | None:
    """Report a link that carries far less than it should.

    The bytes of a step over the exposed time are an *upper bound* on the link's rate, as part of the transfer may
    overlap with computation. So a link reported as slow is slow. Where the planner, with the catalogue's link, predicts
    nearly the same wait for many small messages, the cause is latency, not the link.
    """
    if link is None or link.bytes_per_step is None or link.expected is None or link.bytes_per_step < SMALL_BYTES:
        return None
    gloo = case.observed.backend == "gloo"
    should = min(link.expected, GLOO_BYTES_PER_S) if gloo else link.expected
    full = case.timing.seconds(EXPOSED[axis])  # early reductions are among the bytes
    most = link.bytes_per_step / full
    if most >= (SLOW_GLOO if gloo else SLOW_LINK) * should:
        return None
    lost = seconds * (1 - most / should)
    level = case.level(lost)
    if level is None or _as_planned(case, axis, link, full):
        return None
    evidence = [
        f"{bytes_text(link.bytes_per_step)} a step in {span(full)} of waiting: at most {rate(most)}, as part of them "
        "may have overlapped with computation",
        f"expected: {rate(link.expected)} ({link.expected_from})"
        + (f", of which gloo gets {rate(should)}" if should < link.expected else ""),
    ]
    evidence += _measured_line(link)
    evidence.append(f"waiting for a slower rank is not in it: that is {span(case.timing.seconds('slowest_rank'))} more")
    return case.finding(
        "slow-link",
        level,
        f"The link is slow: {link.name} carries at most {rate(most)} and should carry {rate(should)}. "
        f"{_capital(_WHAT[axis])} takes {span(seconds)} a step; as it should be, it would save up to "
        f"{case.of_step(lost)}.",
        seconds=lost,
        evidence=evidence,
        fix="measure it alone with `shardwise bench comm`; look at which interface is used (GLOO_SOCKET_IFNAME, "
        f"NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO), at limits set on it, and at `shardwise doctor`; {_less(case, axis)}",
    )


def is_of_dp(*found: Finding) -> bool:
    """Return whether all of these findings of this file are about the data-parallel axis.

    Those of other files are.
    """
    mine = [finding for finding in found if finding.kind in ("slow-link", "communication")]
    return all(_WHAT["dp"][1:] in finding.text for finding in mine)


def _as_planned(case: Case, axis: str, link: LinkUse, waited: float) -> bool:
    """Return whether the planner predicted about this wait, over a link that was not measured."""
    predicted = case.observed.predicted
    if predicted is None or link.measured is not None:
        return False
    return waited * SLOW_LINK <= float(getattr(predicted, f"{EXPOSED[axis]}_s"))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _measured_line(link: LinkUse) -> list[str]:
    return [] if link.measured is None else [f"measured before: {rate(link.measured)} ({link.measured_from})"]


def _misplaced(case: Case, axis: str, seconds: float) -> Finding | None:
    """Report tensor or context parallel over several nodes, where one node has enough devices."""
    dims, nodes = case.observed.plan.dims, case.observed.nodes
    inside = dims.world_size // max(nodes, 1)
    reach = {"tp": dims.tp, "cp": dims.tp * dims.cp}.get(axis, 0)
    level = case.level(seconds)
    if nodes < 2 or reach <= inside or level is None:
        return None
    return case.finding(
        "slow-link",
        level,
        f"The topology is wrong: {axis}{getattr(dims, axis)} reaches over nodes of {inside} ranks, so that "
        f"{_WHAT[axis]} goes over the network: {case.of_step(seconds)}.",
        seconds=seconds,
        evidence=[f"{dims} on {nodes} nodes", f"{_WHAT[axis]} cannot hide behind computation"],
        fix=f"keep tp × cp at {inside} or less, inside a node, and give the rest to data parallel",
    )


def _much(case: Case, axis: str, seconds: float, link: LinkUse | None) -> Finding:
    level = case.level(seconds, HEAVY) or "hint"
    evidence = []
    if link is not None and link.bytes_per_step is not None:
        evidence.append(
            f"{bytes_text(link.bytes_per_step)} a step over {link.name}: at most "
            f"{rate(link.bytes_per_step / case.timing.seconds(EXPOSED[axis]))}"
        )
        expected = "not known what it should carry" if link.expected is None else f"should carry {rate(link.expected)}"
        evidence.append(f"{expected}{f' ({link.expected_from})' if link.expected_from else ''}")
        evidence += _measured_line(link)
    else:
        evidence.append(f"how many bytes go over {axis} in a step is not known")
    return case.finding(
        "communication",
        level,
        f"The devices wait for each other's bytes: {_WHAT[axis]} takes {case.of_step(seconds)} that no computation "
        "hides.",
        seconds=seconds,
        evidence=evidence,
        fix=_less(case, axis),
    )


def _less(case: Case, axis: str) -> str:
    """Return how to send less."""
    plan = case.observed.plan
    if axis != "dp":
        return f"a smaller {axis} degree, or longer micro batches for each exchange"
    if plan.parsed.shards_parameters:
        inside = case.observed.nodes > 1 and plan.parsed.base != "hsdp"
        if plan.grad_accum > 1:
            return (
                f"weights are gathered for each of {plan.grad_accum} micro batches: make the micro batch larger and "
                f"the accumulation smaller{', or shard inside a node only (hsdp)' if inside else ''}"
            )
        nearer = ", hsdp (shards inside a node only)," if inside else ""
        return f"a larger batch for each step{nearer} or ddp where the model fits"
    key = "train.grad_accum" if case.observed.configured else "micro batches a step"
    if plan.parsed.base == "zero1":
        return f"a larger batch for each step ({key}), or ddp, which does not send the weights around"
    return (
        f"reduce less often: with twice the accumulation ({key}={2 * plan.grad_accum}) a sample costs half of it, at "
        "twice the global batch"
    )


def early_sync(case: Case) -> Iterator[Finding]:
    """Report gradient reduction after every micro batch, where once per step would do."""
    timing, plan = case.timing, case.observed.plan
    seconds, times = timing.early_reduce_s, timing.early_reduces
    if seconds is None or not times or times < 0.5:
        return
    level: Level | None = case.level(seconds)
    if level is None:
        return
    asked = plan.syncs_every_micro_batch
    fits = None if not asked else _whole_gradients_fit(case)
    if fits is False:
        level = "hint"
    evidence = [
        f"{times:.3g} reductions a step before the last micro batch, {span(seconds)} of waiting",
        f"{plan.grad_accum} micro batches a step: one reduction would do",
    ]
    if asked:
        room = {
            True: "there is room for unsharded gradients",
            False: "unsharded gradients do not fit",
            None: "room not known",
        }
        evidence.append(f"the plan asks for it (gradient_sync = every), to keep gradients sharded; {room[fits]}")
        fix = "gradient_sync='last' in the plan"
    elif not case.observed.configured:
        fix = "reduce with the last micro batch alone: no_sync around the forward and the backward of those before it"
    else:
        fix = (
            "let session.steps and step.backward decide when to reduce: take out what sets require_backward_grad_sync, "
            "set_requires_gradient_sync or no_sync by hand"
        )
    yield case.finding(
        "early-sync",
        level,
        f"Gradients are reduced after every micro batch, {times + 1:.3g} times a step: {case.of_step(seconds)} for "
        "sums that the last reduction would have made anyway.",
        seconds=seconds,
        evidence=evidence,
        fix=fix,
    )


def _whole_gradients_fit(case: Case) -> bool | None:
    found = [a.fits for a in case.observed.alternatives if a.kind == "schedule" and a.plan.gradient_sync == "last"]
    return found[0] if found else None


def pipeline_bubble(case: Case) -> Iterator[Finding]:
    """Report idle time of pipeline stages."""
    plan, seconds = case.observed.plan, case.timing.seconds("pipeline")
    level = case.level(seconds, HEAVY)
    if plan.dims.pp < 2 or level is None:
        return
    stages, micros, virtual = plan.dims.pp, plan.grad_accum, plan.virtual_stages
    formula = bubble_fraction(stages, micros, virtual)
    enough = math.ceil((stages - 1) * (1 - ALARM) / (ALARM * virtual))
    if virtual > 1:
        enough = math.ceil(enough / stages) * stages  # interleaved rounds are complete
    evidence = [
        f"{stages} stages and {micros} micro batches: equal stages would be without work {percent(formula)} of the time"
    ]
    uneven = case.share(seconds) > formula + ALARM
    if uneven:
        evidence.append("it is more than that, so the stages are uneven or what they send each other is slow")
    fix = f"{enough} micro batches a step (train.grad_accum={enough}) would leave {percent(ALARM)}"
    if enough <= micros:
        fix = "balance the stages, or use fewer of them"
    if formula < HINT and not uneven:
        level = "hint"
    yield case.finding(
        "pipeline-bubble",
        level,
        f"Stages of the pipeline are without work {case.of_step(seconds)}.",
        seconds=seconds,
        evidence=evidence,
        fix=fix,
    )
