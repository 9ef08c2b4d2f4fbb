"""Costs of the plan itself where another one fits: recompute, sharding, small micro batch.

No torch here. Another plan counts as fitting only where its bytes and the device's are known.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.diagnosis.finding import Finding, Level
from shardwise.diagnosis.links import waited_s
from shardwise.diagnosis.weight import Case, percent, span
from shardwise.plan.traffic import data_traffic
from shardwise.search.alternatives import Alternative
from shardwise.units import bytes_text

IDLE_MFU = 0.3
"""Below this, matrix units are mostly idle; well-fed training reaches 0.35 to 0.6."""


def recompute(case: Case) -> Iterator[Finding]:
    """Report recompute where the activations would fit."""
    seconds, plan = case.timing.seconds("recompute"), case.observed.plan
    level = case.level(seconds)
    if plan.recompute == "none" or level is None:
        return
    other = _find(case, "recompute")
    if other is not None and other.fits is False:
        return
    known = other is not None and other.fits
    yield case.finding(
        "recompute",
        level if known else "hint",
        f"Recompute is enabled but not needed: recomputing forwards takes {case.of_step(seconds)}."
        if known
        else f"Recomputing forwards takes {case.of_step(seconds)}; whether it is needed is not known.",
        seconds=seconds,
        evidence=[f"recompute is {plan.recompute_words}", _room(case, other)],
        fix=f"parallel.recompute={other.plan.recompute if other else 'none'}",
    )


def needless_sharding(case: Case) -> Iterator[Finding]:
    """Report sharding where one rank can store weights, gradients and optimizer state."""
    plan, other = case.observed.plan, _find(case, "strategy")
    if other is None or not other.fits or plan.parsed.base == "ddp":
        return
    exposed = waited_s(case, "dp")
    seconds = exposed * _saved_traffic(case, other)
    level = case.level(seconds)
    if level is None:
        return
    yield case.finding(
        "needless-sharding",
        level,
        f"{plan.strategy} shards what fits: {other.plan.strategy} would send less, and save up to "
        f"{case.of_step(seconds)}.",
        seconds=seconds,
        evidence=[f"{span(exposed)} a step is waiting for weights and gradients", _room(case, other)],
        fix=f"parallel.strategy={other.plan.strategy}",
    )


def _saved_traffic(case: Case, other: Alternative) -> float:
    """Return the share of data-parallel bytes that the other strategy saves.

    Weights count as gradients. By the bytes of ring algorithms: twice the gradients for ddp; for sharded strategies the
    weights once or twice for each micro batch and the gradients once for each reduction.
    """
    if other.gain is not None and other.gain <= 0:
        return 0.0
    plan = case.observed.plan
    if not plan.parsed.shards_parameters:
        return 1 / 3 if plan.parsed.base == "zero1" else 0.0  # all-reduce is two, the broadcast of weights one
    gathers = data_traffic(plan).gathers
    reduces = 1  # earlier ones are weighed by `early_sync`
    if case.observed.backend == "gloo":
        reduces *= 2  # gloo reduces full tensors to scatter them
    return max(0.0, 1 - 2 / (gathers + reduces))


def small_micro_batch(case: Case) -> Iterator[Finding]:
    """Report steps with more micro batches than memory requires."""
    plan, other, mfu = case.observed.plan, _find(case, "micro batch"), case.observed.mfu
    if plan.grad_accum < 2 or plan.micro_batch is None or other is None or not other.fits or other.gain is None:
        return
    seconds = other.gain * case.timing.step_s
    level: Level | None = case.level(seconds)
    if level is None or (mfu is not None and mfu >= IDLE_MFU):
        return
    evidence = [plan.batch_equation(), _room(case, other), f"predicted: {percent(other.gain)} of a step less"]
    evidence.append("MFU is not known here" if mfu is None else f"MFU {percent(mfu)}")
    yield case.finding(
        "small-micro-batch",
        "hint" if mfu is None else level,  # a prediction alone raises no alarm
        f"Micro batches of {plan.micro_batch} are small for this device: micro batches of {other.plan.micro_batch} are "
        f"predicted to save {case.of_step(seconds)}.",
        seconds=seconds,
        evidence=evidence,
        fix=f"train.micro_batch={other.plan.micro_batch} with train.grad_accum={other.plan.grad_accum}: the global "
        "batch stays",
    )


def _find(case: Case, kind: str) -> Alternative | None:
    """Return the fitting alternative of a kind with the largest gain; else any."""
    found = [a for a in case.observed.alternatives if a.kind == kind]
    return max(found, key=lambda a: (a.fits is True, a.gain or 0.0), default=None)


def _room(case: Case, other: Alternative | None) -> str:
    device = bytes_text(case.observed.device_bytes)
    peak = case.observed.peak_bytes
    now = "" if peak is None else f"; the peak now is {bytes_text(peak)}"
    if other is None or other.memory_bytes is None:
        return f"what it would need is not known{now}, the device has {device}"
    source = f" ({other.memory_from})" if other.memory_from else ""
    return f"it would need {bytes_text(other.memory_bytes)} of {device}{source}{now}"
