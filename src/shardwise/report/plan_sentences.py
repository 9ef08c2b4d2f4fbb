"""Recommendation of ``shardwise plan`` in sentences, for the terminal and the page."""

from __future__ import annotations

from shardwise.cost.price import dollars_per_million_tokens
from shardwise.hardware.cluster import ClusterSpec
from shardwise.plan.plan import Plan, products
from shardwise.plan.program import OWN
from shardwise.plan.stage_balance import longest_stage
from shardwise.search.candidate import Candidate, SearchResult
from shardwise.units import bytes_text, counted, hours_text, money_text, number_text, seconds_text


def options_text(plan: Plan) -> str:
    """Describe a plan's options besides its strategy; empty if there are none."""
    found = []
    if plan.adapter is not None:
        found.append(f"adapters of rank {plan.adapter.rank} beside {', '.join(plan.adapter.targets)}")
    if plan.loss_chunks > 1:
        found.append(f"the loss in {plan.loss_chunks} chunks")
    if plan.offload_activations:
        found.append("activations of blocks in host memory")
    if plan.optimizer_in_backward:
        found.append("the optimizer in the backward")
    if plan.reference != "none":
        beside = "a frozen reference" if plan.reference == "copy" else "the base without adapters as the reference"
        found.append(f"preference pairs ({plan.objective}) and {beside}")
    return "; ".join(found)


def recompute_text(plan: Plan, blocks: int) -> str:
    """Describe what of the model's ``blocks`` is recomputed."""
    kind = {"none": "no recompute", "selective": "selective recompute", "full": "full recompute"}[plan.recompute]
    if plan.recompute_layers is None:
        return kind
    of = f"{plan.recompute_layers} of {blocks} blocks"
    if plan.dims.pp > 1:
        longest = longest_stage(plan, blocks)
        if plan.recompute_layers >= longest:
            return f"{kind} (of {plan.recompute_layers} blocks of each stage; none has more than {longest})"
        of = f"the first {counted(plan.recompute_layers, 'block')} of each stage"
    return f"{'selective ' if plan.recompute == 'selective' else ''}recompute of {of}"


def sentences(best: Candidate, cluster: ClusterSpec, result: SearchResult, blocks: int) -> list[str]:
    """Write the recommendation for a model of ``blocks`` with reason, needs and speed, and cost or runner-up."""
    plan, time = best.plan, best.time
    recompute = recompute_text(plan, blocks)
    beside = f", {options}" if (options := options_text(plan)) else ""
    fp8 = f" and fp8 products ({plan.fp8})" if plan.fp8 != "none" else ""
    lines = [f"Use {plan.strategy} ({plan.dims}) in {plan.precision}{fp8} with {recompute}{beside}: {plan.reason}."]
    needs = f"A device needs {bytes_text(best.memory.device_bytes)} of {bytes_text(cluster.device_memory_bytes)}"
    if best.memory.uses_host and plan.device == "cuda":
        has = cluster.host_memory_bytes
        room = "; whether it has that is not known" if has is None else f" of {bytes_text(has)}"
        needs += f" (a node's host {bytes_text(best.memory.host_bytes)}{room})"
    if best.memory.unknown:
        needs += f", {', '.join(best.memory.unknown)} unknown and left out"
    if time is None:
        lines.append(f"{needs}; its speed is unknown, so simplicity decided.")
    else:
        tokens, samples = time.tokens_per_s_per_device, time.samples_per_s_per_device
        rate, noun = (samples, "samples") if tokens is None else (tokens, "tokens")
        speed = "" if rate is None else f", {number_text(rate)} {noun}/s a device"
        peak = " of the bf16 peak" if products(best.plan) == "fp8" else ""
        mfu = "" if time.mfu is None else f", MFU {time.mfu:.1%}{peak}"
        span = f"{seconds_text(time.low_s)} to {seconds_text(time.high_s)}"
        lines.append(f"{needs}, and a step takes {seconds_text(time.step_s)} ({span} in 8 of 10 cases){speed}{mfu}.")
    lines.append(_third(best, cluster, result))
    lines.append(_not_run(best, result))
    return [line for line in lines if line]


def _third(best: Candidate, cluster: ClusterSpec, result: SearchResult) -> str:
    hourly = cluster.price_per_device_hour
    if best.hours is not None:
        cost = "at a price that is not known (--price)" if best.cost is None else f"for {money_text(best.cost)}"
        speed = best.time.tokens_per_s_per_device if best.time else None
        million = dollars_per_million_tokens(speed, hourly)
        each = "" if million is None else f", {money_text(million)} a million tokens"
        return f"The full run takes {hours_text(best.hours)} {cost}{each}."
    others = [c for c in result.candidates if c is not best]
    ties = [c.plan.strategy for c in others if c.tie and c.other_run >= best.other_run]
    if ties:
        return f"Indistinguishable in predicted speed: {', '.join(ties[:3])}."
    return f"Next comes {others[0].plan.strategy}: {others[0].reason}." if others else ""


def _only_planned(plan: Plan) -> str:
    """Return the options for which this version runs none of the plans, whatever fits without them."""
    asked = {"--program": plan.program != OWN, f"--fp8 {plan.fp8}": plan.fp8 != "none"}
    return " and ".join(option for option, given in asked.items() if given)


def _not_run(best: Candidate, result: SearchResult) -> str:
    """Return what this version runs, if it does not run the recommended plan."""
    if best.runnable:
        return ""
    runs = [c for c in result.candidates if c.runnable and c.fits is not False]
    what = f"this version plans {best.why_not_runnable} but does not run it"
    if best.plan.objective != "lm":
        return f"Note that {what}."
    if best.plan.precision == "fp8":
        other = "" if best.plan.program == OWN else " and without --program"
        return f"Note that {what}; plan with --precision bf16{other} for the best of what it runs."
    if len(result.candidates) == 1:
        return f"Note that {what}."
    if not runs and (asked := _only_planned(best.plan)):
        return f"Note that {what}; plan without {asked} for the best of what it runs."
    if not runs:
        return f"Note that {what}, and that nothing it runs fits."
    return f"Note that {what}; of what it runs, {runs[0].plan.strategy} is best: {runs[0].reason}."
