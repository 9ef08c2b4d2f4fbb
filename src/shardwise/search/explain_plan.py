"""Explain with numbers why a plan is recommended and each other one is not."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.local_shapes import layout_of
from shardwise.cost.time.step_time import StepTime
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.facts import itemsize_of
from shardwise.model.profile import ModelProfile
from shardwise.plan.objective import SEQUENCES
from shardwise.plan.plan import Plan
from shardwise.plan.program import SHARDWISE, ProgramTraits
from shardwise.plan.traffic import sent_bytes, traffic_text
from shardwise.search.axis_reasons import purposes
from shardwise.search.candidate import Candidate
from shardwise.search.enumerate import complexity
from shardwise.search.problem import SAID_TIE, SearchProblem, tie_of
from shardwise.units import bytes_text, count_text, counted, seconds_text

PARTS = {
    "compute_s": "computes longer",
    "recompute_s": "recomputes blocks",
    "exposed_dp_s": "waits longer for data-parallel traffic",
    "exposed_tp_s": "waits longer for tensor-parallel traffic",
    "exposed_cp_s": "waits longer for context-parallel traffic",
    "exposed_ep_s": "waits longer for expert-parallel traffic",
    "pipeline_s": "the pipeline idles",
    "optimizer_s": "the optimizer takes longer",
    "offload_s": "waits for host memory",
    "host_s": "the host launches kernels too slowly",
}
AXIS_OF = {"exposed_dp_s": "dp", "exposed_tp_s": "tp", "exposed_cp_s": "cp", "exposed_ep_s": "ep", "pipeline_s": "pp"}
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "temporaries", "context")


def with_reasons(
    problem: SearchProblem, ranked: Sequence[Candidate], chosen: int | None, considered: int
) -> list[Candidate]:
    """Add reasons to all candidates; the recommended one has its reason in its plan."""
    best = None if chosen is None else ranked[chosen]
    pinned = problem.pins.strategy is not None
    explained = []
    for index, candidate in enumerate(ranked):
        if index == chosen:
            why = "asked for by name" if pinned else _praise(problem, candidate, ranked)
            plan = candidate.plan.model_copy(update={"reason": why})
            explained.append(candidate.model_copy(update={"plan": plan}))
            continue
        tie = _is_tie(candidate, best)
        reason = against(problem, candidate, best)
        plan = candidate.plan.model_copy(update={"reason": "asked for by name"}) if pinned else candidate.plan
        explained.append(candidate.model_copy(update={"reason": reason, "tie": tie, "plan": plan}))
    return explained


def _praise(problem: SearchProblem, best: Candidate, ranked: Sequence[Candidate]) -> str:
    why = purposes(problem, best, ranked)[:1]
    return "; ".join([_verdict(problem, best, ranked), *why])


def _verdict(problem: SearchProblem, best: Candidate, ranked: Sequence[Candidate]) -> str:
    room = room_text(best.memory, problem.usable)
    if best.time is None:
        return f"the simplest that fits: {room}"
    every = [c for c in ranked if c.fits is not False and c.time is not None]
    fitting = [c for c in every if c.other_run] if best.other_run and not problem.any_plan else every
    both = "fit and run" if best.runnable and len(fitting) < len(every) else "fit"
    fastest = min(fitting, key=lambda c: c.time.step_s if c.time else 0.0)
    speed = f"{seconds_text(best.time.step_s)} a step"
    if len(fitting) == 1:
        return f"the only one that {both.replace('fit', 'fits').replace('run', 'runs')}: {speed}; {room}"
    if fastest is best:
        return f"the fastest of {len(fitting)} that {both}: {speed}; {room}"
    gap = best.time.step_s / fastest.time.step_s - 1 if fastest.time else 0.0
    close = f"within {gap:.1%} of its step time (less than the model's error)"
    return f"simpler than {fastest.plan.strategy}, and {close}: {speed}; {room}"


def room_text(memory: Estimate, usable: int | None) -> str:
    """Format ``61.20 GiB of 77.60 GiB usable``."""
    room = "device memory unknown" if usable is None else f"of {bytes_text(usable)} usable"
    return f"{bytes_text(memory.device_bytes)} {room}"


def against(problem: SearchProblem, candidate: Candidate, best: Candidate | None) -> str:
    """Explain why ``candidate`` is not the recommended plan."""
    if candidate.fits is False:
        return short_of_memory(candidate.memory, problem.usable, problem.cluster)
    if best is None:
        return f"not known to fit: {room_text(candidate.memory, problem.usable)}, {unknown_text(candidate.memory)}"
    if not candidate.other_run and best.other_run:
        return f"planned, but not run by this version ({candidate.why_not_runnable}){_gap_text(candidate, best)}"
    if best.time is None or candidate.time is None:
        if candidate.fits is None and best.fits:
            return f"not known to fit: {unknown_text(candidate.memory)}"
        if candidate.time is None and complexity(candidate.plan.parsed) < complexity(best.plan.parsed):
            return f"its speed is unknown, and that of {best.plan.strategy} is not"
        return f"not needed: {best.plan.strategy} is simpler and fits"
    return slower_text(problem, candidate, best)


def _gap_text(candidate: Candidate, best: Candidate) -> str:
    if candidate.time is None or best.time is None:
        return ""
    gap = candidate.time.step_s / best.time.step_s - 1
    return f"; {abs(gap):.1%} {'slower' if gap >= 0 else 'faster'} than {best.plan.strategy}"


def unknown_text(memory: Estimate) -> str:
    """Describe the unknown parts of an estimate."""
    return f"unknown: {', '.join(memory.unknown)}" if memory.unknown else "device memory unknown"


def short_of_memory(memory: Estimate, usable: int | None, cluster: ClusterSpec) -> str:
    """Format ``needs 91.20 GiB (parameters 26.10 GiB + ...), 77.60 GiB usable``; or of the host."""
    host = cluster.host_memory_bytes
    if memory.uses_host and memory.host_bytes is not None and host is not None and memory.host_bytes > host:
        return f"needs {bytes_text(memory.host_bytes)} of host memory on a node, which has {bytes_text(host)}"
    return f"needs {bytes_text(memory.device_bytes)} ({parts_text(memory)}), {bytes_text(usable)} usable"


def parts_text(memory: Estimate) -> str:
    """Format the relevant categories, largest first.

    Each is its own maximum, so their sum may exceed the peak.
    """
    found = {name: value for name in MEMORY_PARTS if (value := getattr(memory, name))}
    if memory.offloaded_bytes:
        found = {name: value for name, value in found.items() if name not in ("parameters", "gradients", "optimizer")}
    largest = sorted(found.items(), key=lambda item: -item[1])[:5]
    return " + ".join(f"{name} {bytes_text(value)}" for name, value in largest)


def slower_text(problem: SearchProblem, candidate: Candidate, best: Candidate) -> str:
    """Format why a candidate is slower.

    Such as ``18 % slower: waits longer for data-parallel traffic (2.1 s; 140 GiB sent over the network)``.
    """
    time, reference = candidate.time, best.time
    assert time is not None and reference is not None
    gap = time.step_s / reference.step_s - 1
    simpler = complexity(best.plan.parsed) < complexity(candidate.plan.parsed)
    if abs(gap) <= tie_of(candidate.plan):
        side = "slower" if gap >= 0 else "faster"
        verdict = f"and {best.plan.strategy} is simpler" if simpler else f"and {best.plan.strategy} is predicted ahead"
        return f"a tie ({abs(gap):.1%} {side}, less than the model's error), {verdict}"
    if gap < 0:
        return faster_text(candidate, best, -gap)
    share = f"{gap:.0%}" if gap < 1 else f"{gap + 1:.1f}×"
    start = f"{share} slower" if gap < 1 else f"takes {share} as long"
    part, extra = max(
        ((name, getattr(time, name) - getattr(reference, name)) for name in PARTS), key=lambda item: item[1]
    )
    if extra <= 0:
        return f"{start}: {seconds_text(time.step_s)} a step"
    return f"{start}: {PARTS[part]} (+{seconds_text(extra)}{_traffic(problem, candidate, part)})"


def faster_text(candidate: Candidate, best: Candidate, gap: float) -> str:
    """Explain why a faster plan is not chosen: another training, or another request."""
    start = f"{gap:.0%} faster"
    if candidate.plan.parsed.adapter != best.plan.parsed.adapter:
        words = {"none": "all weights", "lora": "adapters only", "qlora": "adapters on 4-bit weights only"}
        return f"{start}, but it trains {words[candidate.plan.parsed.adapter]}, which is another training; pin it"
    return f"{start}, but {best.plan.strategy} is the plan that was kept; plan without pins to get a faster one"


def _traffic(problem: SearchProblem, candidate: Candidate, part: str) -> str:
    axis = AXIS_OF.get(part)
    program, per_node = problem.workload.program, problem.cluster.devices_per_node
    sent = sent_bytes(problem.profile, candidate.plan, program, per_node=per_node).get(axis or "")
    if not axis or not sent or part == "pipeline_s":
        dims, accum = candidate.plan.dims, candidate.plan.grad_accum
        return f"; {dims.pp} stages, {counted(accum, 'micro batch')}" if part == "pipeline_s" else ""
    return f"; sends {bytes_text(sent)} a step {traffic_text(axis, candidate.plan, problem.cluster)}"


def _is_tie(candidate: Candidate, best: Candidate | None) -> bool:
    if best is None or best.time is None or candidate.time is None or candidate.fits is False:
        return False
    return abs(candidate.time.step_s / best.time.step_s - 1) <= SAID_TIE


def _factors(text: str) -> str:
    """Parenthesize a sum."""
    return f"({text})" if "×" in text else text


def memory_arithmetic(
    profile: ModelProfile, plan: Plan, memory: Estimate, program: ProgramTraits = SHARDWISE
) -> list[tuple[str, int | None, str]]:
    """Return category, bytes and the formula behind them; the bytes are the estimate's."""
    strategy, dims = plan.parsed, plan.dims
    model_ways = "".join(f" / {axis} {n}" for axis, n in (("tp", dims.tp), ("pp", dims.pp)) if n > 1)
    shards = " × ".join(f"{name} {n}" for name, n in (("dp_shard", dims.dp_shard), ("cp", dims.cp)) if n > 1)
    ranks = " × ".join(f"{name} {n}" for name, n in (("dp", dims.dp), ("cp", dims.cp)) if n > 1)
    ways = f" / {_factors(shards)}" if strategy.shards_parameters and shards else ""
    state_ways = f" / {_factors(ranks)}" if strategy.base == "zero1" and ranks else ways
    layout = layout_of(plan, program)
    if layout.partitions:  # DeepSpeed's ZeRO-2: full weights, a part of gradients and state
        ways, state_ways = "", f" / {_factors(ranks)}"
    gradient_ways = state_ways if layout.partitions else ways
    each = layout.accumulated if layout.masters else max(layout.stored, layout.width)
    own, own_state = "", ""
    if dims.ep > 1:
        pp = f" × pp {dims.pp}" if dims.pp > 1 else ""
        shared = f", of experts / (ep {dims.ep} × {dims.expert_shards} that share them{pp})"
        own = shared if ways else f", of experts / (ep {dims.ep}{pp})"
        own_state = shared if state_ways else own
    own_gradient = own_state if layout.partitions else own
    full, trained = count_text(profile.num_parameters), count_text(profile.num_trainable)
    width = itemsize_of(plan.precision)
    micro, blocks = plan.micro_batch or 1, profile.num_blocks
    kept = _kept_text(plan)
    rows = f"micro batch {micro}" + (f" × {SEQUENCES[plan.objective]} of a pair" if plan.reference != "none" else "")
    rows += f" × {plan.seq_len} tokens" if plan.seq_len else ""
    twice = " × 2 (policy and frozen reference)" if plan.reference == "copy" else ""
    rows += f" / cp {dims.cp}" if dims.cp > 1 else ""
    words = f"vocabulary {profile.vocab_size or 'unknown'}" + (
        f" / tp {dims.tp}" if dims.tp > 1 and layout.vocab else ""
    )
    in_flight = f" × up to {min(dims.pp, plan.grad_accum)} micro batches in flight" if dims.pp > 1 else ""
    stage = f"{blocks / dims.pp:.3g} blocks" if dims.pp > 1 else counted(blocks, "block")
    transit = "a block's unsharded gradient in transit"
    if plan.grad_accum > 1 and not plan.syncs_every_micro_batch:
        transit = "the unsharded gradients of all blocks, until the last micro batch"
    if layout.replicates:
        gathered = f"a block's {width}-byte weights, and its unsharded gradient in transit"
    elif not layout.shards:
        gathered = f"autocast's {width}-byte weights" if layout.autocasts else "reduction buckets"
    elif strategy.reshards_after_forward:
        gathered = f"gathered blocks of {width}-byte weights, and {transit}"
    else:
        gathered = f"all gathered {width}-byte weights, and {transit}"
    return [
        ("parameters", memory.parameters, f"{full} × bytes at rest{model_ways}{ways}{own}{twice}"),
        ("gradients", memory.gradients, f"{trained} trained × {each} B{model_ways}{gradient_ways}{own_gradient}"),
        ("optimizer", memory.optimizer, f"{trained} trained × bytes of its states{model_ways}{state_ways}{own_state}"),
        ("activations", memory.activations, f"{rows}, {stage}, {kept}{in_flight}"),
        ("logits", memory.logits, f"{rows} × {words}, and the loss's copies"),
        ("buffers", memory.buffers, gathered),
        ("temporaries", memory.temporaries, "while the optimizer steps"),
        ("context", memory.context, "CUDA context, libraries and communicators"),
    ]


def _kept_text(plan: Plan) -> str:
    """Describe what blocks save for the backward."""
    kept = {
        "none": "every operation's saved tensors",
        "selective": "saved tensors, matrix products kept and the rest recomputed",
        "full": "the inputs of the blocks, and one block's saved tensors",
    }[plan.recompute]
    if plan.offload_activations:
        kept += " of one block, the others' in host memory"
    elif plan.recompute_layers is not None:
        where = " of each stage" if plan.dims.pp > 1 else ""
        kept += f", of the first {plan.recompute_layers}{where}; every operation's saved tensors of the others"
    return kept


def time_parts(time: StepTime) -> list[tuple[str, float]]:
    """Return the non-zero parts of a step, in the order of `StepTime`."""
    return [(name.removesuffix("_s"), value) for name in PARTS if (value := getattr(time, name))]
