"""Alternatives where no plan fits: each one with its bytes, and its time where known.

Simple ones come first: those that leave the training unchanged (chunked loss, optimizer in backward), then an optimizer
with less state, then host memory and drive offload, then another training (adapters only), then other devices. Times
are compared with ``ddp`` on such devices with unlimited memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.cost.time.kernels import supports
from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import find_gpu, gpu_names
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import TYPE_DEFAULTS, unrun_types
from shardwise.plan.strategy import SHARDED, Strategy
from shardwise.plan.tensor_types import TYPE_FIELDS
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Candidate, Pins, SearchResult
from shardwise.search.enumerate import complexity, divisors
from shardwise.search.explain_plan import room_text
from shardwise.search.memory_savers import lean_workloads, orders, saving_memory
from shardwise.search.problem import Costs, SearchProblem, ask, usable_bytes
from shardwise.search.search import search, simplest_fit
from shardwise.units import bytes_text, hours_text, seconds_text

if TYPE_CHECKING:
    from shardwise.cost.time.estimate_time import Rates

CHEAPER = 0.9  # of a plan's step time, above which another training is not worth a line
MOST_NODES = 4096
SHORTEST = 256

Command = Callable[[Mapping[str, str | None], Candidate], str]  # the request with these options, or their config keys


@dataclass
class _Ways:
    """Shared inputs of the alternatives: request, unlimited-memory step time, command format.

    ``kept`` is the first alternative that leaves the optimizer unchanged.
    """

    problem: SearchProblem
    limitless_s: float | None
    command: Command | None
    kept: Candidate | None = None
    is_wanted: Callable[[Candidate, float], bool] = lambda candidate, share: True  # by its share of a step time

    def option_text(self, candidate: Candidate, options: Mapping[str, str | None]) -> str:
        """Format a candidate with its bytes, its time and the command that plans it."""
        text = _candidate_text(candidate, self.problem.cluster)
        if candidate.time is not None:
            text += f"; {seconds_text(candidate.time.step_s)} a step"
            if self.limitless_s:
                text += f", {candidate.time.step_s / self.limitless_s:.2g} × that of ddp with memory without limit"
            text += "" if candidate.hours is None else f", {hours_text(candidate.hours)} total"
        elif candidate.plan.parsed.nvme and self.problem.cluster.nvme_bytes_per_s is None:
            text += "; its time is unknown (nvme_bytes_per_s of a cluster file)"
        away = candidate.memory.host_bytes if candidate.memory.offloaded_bytes else None
        text += f"; {bytes_text(away)} of host memory" if away else ""
        asked = self.problem.workload.program
        left = [
            name for name in TYPE_FIELDS if getattr(candidate.plan, name) == TYPE_DEFAULTS[name] != getattr(asked, name)
        ]
        text += f"; without {' and '.join(f'--{name} {getattr(asked, name)}' for name in left)}" if left else ""
        options = {**options, **{f"--{name}": TYPE_DEFAULTS[name] for name in left}}
        return text if self.command is None else f"{text}: {self.command(options, candidate)}"


def search_and_advise(
    profile: ModelProfile,
    workload: Workload,
    cluster: ClusterSpec,
    pins: Pins | None = None,
    *,
    costs: Costs | None = None,
    rates: Rates | None = None,
    shorter: Callable[[int], ModelProfile] | None = None,
    only_runnable: bool = False,
    any_plan: bool = False,
    saves_memory: bool = False,
    command: Command | None = None,
) -> SearchResult:
    """Run `search`, and where nothing fits, add alternatives that do.

    ``saves_memory`` includes the ways of `shardwise.search.memory_savers`. ``shorter`` builds the profile at another
    length; ``command`` formats what plans or trains an alternative, from its options.

    Raises:
        PlanError: the pinned values have no layout, or the global batch matches no strategy.
    """
    facts: dict[str, Any] = {"costs": costs, "rates": rates, "only_runnable": only_runnable, "any_plan": any_plan}
    found = search(profile, workload, cluster, pins, **facts)
    problem = ask(profile, workload, cluster, pins or Pins(), **facts)
    if saves_memory:
        found = saving_memory(problem, found)
    if found.recommended is not None:
        best = found.candidates[found.recommended]
        beside = other_trainings(problem, best, command) if saves_memory and found.optimizer is None else ()
        return found.model_copy(update={"other_trainings": beside})
    return found.model_copy(update={"advice": advice(problem, found.candidates, shorter, command)})


def other_trainings(problem: SearchProblem, best: Candidate, command: Command | None) -> tuple[str, ...]:
    """Describe cheaper trainings where the recommended plan needs host memory or cuts the model: named, never chosen.

    An optimizer with less state avoids the more complex strategy; adapters take at most `CHEAPER` of its step time.
    """
    if problem.pins.strategy is not None or problem.any_plan or complexity(best.plan.parsed)[:2] == (0, 0):
        return ()
    limit = None if best.time is None else best.time.step_s

    def is_cheaper(other: Candidate, share: float) -> bool:
        return limit is None or (other.time is not None and other.time.step_s <= share * limit)

    ways = _Ways(problem, None, command, kept=best, is_wanted=is_cheaper)
    return (*_other_optimizer(ways), *_adapters(ways))


def advice(
    problem: SearchProblem,
    candidates: Sequence[Candidate],
    shorter: Callable[[int], ModelProfile] | None,
    command: Command | None = None,
) -> tuple[str, ...]:
    """Describe alternatives that fit, simplest first; ``command`` formats a command line."""
    lines: list[str] = []
    nearest = min(candidates, key=lambda c: c.memory.device_bytes, default=None)
    if nearest is not None and problem.usable is not None:
        over = nearest.memory.device_bytes - problem.usable
        if over > 0:
            lines.append(
                f"nearest: {nearest.plan.strategy}, micro batch {nearest.plan.micro_batch}, recompute "
                f"{nearest.plan.recompute_words}, is {bytes_text(over)} over the {bytes_text(problem.usable)} usable"
            )
    ways = _Ways(problem, _limitless_s(problem), command)
    lines += _unpin(problem)
    usual = [_same_optimizer, _other_optimizer, _off_device]
    for way in [_adapters, *usual] if _is_far_too_large(problem) else [*usual, _adapters]:
        lines += way(ways)
    lines += _other_gpu(problem)
    if shorter is not None:
        lines += _shorter(problem, shorter)
    lines += _more_devices(problem)
    return tuple(lines) or ("no way was found; the model is too large for every device of the table",)


def _is_far_too_large(problem: SearchProblem) -> bool:
    """Return whether not even fp32 weights and gradients fit in all devices: people train adapters then."""
    state_bytes = 8 * problem.profile.num_parameters
    return problem.usable is not None and state_bytes > problem.usable * problem.cluster.world_size


def _asked(problem: SearchProblem, changes: Mapping[str, object]) -> dict[str, Any]:
    """Return the request with ``changes``; its profile is the one without adapters."""
    facts: dict[str, Any] = {
        "profile": problem.plain or problem.profile,
        "workload": problem.workload,
        "cluster": problem.cluster,
        "pins": problem.pins,
        "costs": problem.costs,
        "only_runnable": not problem.any_plan,
        "any_plan": problem.any_plan,
    }
    return {**facts, **changes}


def _fit(problem: SearchProblem, below: tuple[int, ...] | None = None, **changes: object) -> Candidate | None:
    """Return the simplest plan that fits the changed request, of a `complexity` ``below`` the given one."""
    try:
        return simplest_fit(ask(**_asked(problem, changes)), below)
    except PlanError:
        return None


def _best(problem: SearchProblem, below: tuple[int, ...] | None = None, **changes: object) -> Candidate | None:
    """Return the best variant of the simplest strategy that fits the changed request, ``below`` a complexity.

    Without the types of the request, such as fp8 products, where a run does not have them under that strategy.
    """
    found = _fit(problem, below, **changes)
    program = problem.workload.program
    if found is not None and program.is_own and not problem.any_plan and (unrun_types(found.plan) or found.unrun):
        usual = program.model_copy(update={name: TYPE_DEFAULTS[name] for name in TYPE_FIELDS})
        workload = _asked(problem, changes)["workload"].model_copy(update={"program": usual})
        return _best(problem, below, **changes | {"workload": workload})
    if found is None or not problem.timed:
        return found
    facts = _asked(problem, changes)
    facts["pins"] = facts["pins"].model_copy(update={"strategy": found.plan.parsed})
    result = search(**facts)
    return found if result.recommended is None else result.candidates[result.recommended]


def _limitless_s(problem: SearchProblem) -> float | None:
    """Seconds of ``ddp`` without adapters on these devices with unlimited memory, if known."""
    if not problem.timed:
        return None
    roomy = problem.cluster.model_copy(update={"device_memory_bytes": None})
    pins = Pins(strategy=Strategy(base="ddp"), recompute="none", precision=problem.precision)
    try:
        result = search(**_asked(problem, {"cluster": roomy, "pins": pins, "only_runnable": False}))
    except PlanError:
        return None
    times = [c.time.step_s for c in result.candidates if c.time is not None]
    return min(times, default=None)


def _candidate_text(candidate: Candidate, cluster: ClusterSpec) -> str:
    plan = candidate.plan
    return (
        f"{plan.strategy}, micro batch {plan.micro_batch}, recompute {plan.recompute_words}: "
        f"{room_text(candidate.memory, usable_bytes(cluster))}"
    )


def _same_optimizer(ways: _Ways) -> Iterator[str]:
    """Propose the same results, computed in another order."""
    for name, options, flags in orders(ways.problem):
        pins = ways.problem.pins.model_copy(update={"options": {**ways.problem.pins.options, **options}})
        if found := _best(ways.problem, pins=pins):
            ways.kept = found
            yield f"{name} fits: {ways.option_text(found, flags)}"
            return


def _other_optimizer(ways: _Ways) -> Iterator[str]:
    """Propose optimizers with less state than AdamW, where they avoid a more complex strategy.

    Their updates differ, and so do the results.
    """
    problem = ways.problem
    limit = None if ways.kept is None else complexity(ways.kept.plan.parsed)
    for name, work in lean_workloads(problem.workload):
        for order, options, flags in (("", {}, {}), *orders(problem)):
            pins = problem.pins.model_copy(update={"options": {**problem.pins.options, **options}})
            found = _best(problem, limit, pins=pins, workload=work)
            if found is not None and ways.is_wanted(found, 1.0):
                beside = f" with {order}" if order else ""
                option_text = ways.option_text(found, {"--optimizer": name, **flags})
                yield f"another optimizer, {name}{beside}, fits: {option_text}"
                return


def _off_device(ways: _Ways) -> Iterator[str]:
    """Propose host memory, and where that is not enough, its drive."""
    problem, strategy = ways.problem, ways.problem.pins.strategy
    if problem.cluster.device == "cpu" or (strategy is not None and strategy.nvme):
        return
    if strategy is not None and not strategy.offload:
        base = strategy.base if strategy.base in SHARDED or strategy.engine == "deepspeed" else "fsdp"
        moved = strategy.model_copy(update={"base": base, "offload": True})
        if found := _best(problem, pins=problem.pins.model_copy(update={"strategy": moved})):
            yield f"offload fits: {ways.option_text(found, {'--strategy': str(moved)})}"
            return
    swapped = Strategy(base="fsdp", engine="deepspeed", nvme=True)
    if strategy is not None and (strategy.splits_model or strategy.adapter != "none"):
        return  # DeepSpeed runs neither here
    free = {"strategy": swapped, "dp_replicate": None, "dp_shard": None}
    if found := _best(problem, pins=problem.pins.model_copy(update=free)):
        yield f"swapping to a drive fits: {ways.option_text(found, {'--strategy': str(swapped)})}"


def _adapters(ways: _Ways) -> Iterator[str]:
    """Propose to fine-tune adapters only.

    This trains another model, so it is advice and never chosen.
    """
    problem, strategy = ways.problem, ways.problem.pins.strategy
    had = "none" if strategy is None else strategy.adapter
    words = {"lora": "adapters (LoRA)", "qlora": "adapters on 4-bit weights (QLoRA)"}
    for adapter in {"none": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[had]:
        for base, offload in (("ddp", False), ("fsdp", False), ("fsdp", True)):
            if offload and problem.cluster.device == "cpu":
                continue
            wanted = Strategy.model_validate({"base": base, "adapter": adapter, "offload": offload})
            pins = problem.pins.model_copy(update={"strategy": wanted, "dp_replicate": None, "dp_shard": None})
            if (found := _best(problem, pins=pins)) and ways.is_wanted(found, CHEAPER):
                text = ways.option_text(found, {"--strategy": str(wanted)})
                yield f"another training, {words[adapter]} only, fits: {text}"
                break


def _unpin(problem: SearchProblem) -> Iterator[str]:
    """Propose to free each pinned value, one at a time."""
    pins = problem.pins
    smaller = [n for n in reversed(divisors(pins.micro_batch or 1)) if n < (pins.micro_batch or 1)]
    for micro in smaller:
        if found := _fit(problem, pins=pins.model_copy(update={"micro_batch": micro, "grad_accum": None})):
            yield f"micro batch {micro} fits: {_candidate_text(found, problem.cluster)}"
            break
    every = {name: value for name, value in pins.options.items() if name != "recompute_layers"}
    if (pins.recompute not in (None, "full") or every != pins.options) and (
        found := _fit(problem, pins=pins.model_copy(update={"recompute": "full", "options": every}))
    ):
        yield f"recompute full fits: {_candidate_text(found, problem.cluster)}"
    free = {"strategy": None, "dp_replicate": None, "dp_shard": None}
    if pins.strategy is not None and (found := _fit(problem, pins=pins.model_copy(update=free))):
        yield f"another strategy fits: {_candidate_text(found, problem.cluster)}"
    if pins.model_copy(update=free) != Pins() and (found := _fit(problem, pins=Pins(precision=pins.precision))):
        yield f"with nothing pinned it fits: {_candidate_text(found, problem.cluster)}"


def _other_gpu(problem: SearchProblem) -> Iterator[str]:
    """Propose the GPU of the table with the least sufficient memory, in the same number.

    One that computes in the types of the request, as far as the present one does.
    """
    cluster = problem.cluster
    if cluster.device != "cuda":
        return
    types = {problem.precision, "fp8"} if problem.workload.program.fp8 != "none" else {problem.precision}
    types -= {one for one in types if cluster.gpu is not None and not supports(cluster.gpu, one)}
    gpus = [gpu for name in gpu_names() if (gpu := find_gpu(name)) is not None]
    gpus = [gpu for gpu in gpus if all(supports(gpu, one) for one in types)]
    larger = [gpu for gpu in gpus if gpu.memory_bytes > (cluster.device_memory_bytes or 0)]
    for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes):
        other = cluster.model_copy(
            update={
                "device_name": gpu.name,
                "device_memory_bytes": gpu.memory_bytes,
                "gpu": gpu,
                "link": gpu.nvlink or gpu.pcie,
            }
        )
        if found := _fit(problem, cluster=other):
            yield f"{cluster.world_size} × {gpu.name} would do: {_candidate_text(found, other)}"
            return


def _shorter(problem: SearchProblem, shorter: Callable[[int], ModelProfile]) -> Iterator[str]:
    length = (problem.workload.seq_len or problem.profile.seq_len or 0) // 2
    while length >= SHORTEST:
        workload = problem.workload.model_copy(update={"seq_len": length})
        if found := _fit(problem, profile=shorter(length), workload=workload):
            yield f"samples of {length} tokens fit: {_candidate_text(found, problem.cluster)}"
            return
        length //= 2


def _more_devices(problem: SearchProblem) -> Iterator[str]:
    """Propose more of the same devices.

    Fill the node first, then double the nodes, then bisect between the last two.
    """
    cluster, previous = problem.cluster, problem.cluster.nodes
    typical = cluster.gpu.devices_per_node if cluster.gpu else None
    if typical and cluster.nodes == 1 and cluster.devices_per_node < typical:
        full = cluster.model_copy(update={"devices_per_node": typical})
        if found := _fit_with_batch(problem, full):
            text = f"{_candidate_text(found, full)}{_batch_note(problem, found)}"
            yield f"{typical} × {cluster.device_name} would do: {text}"
            return
        cluster = full
    nodes = cluster.nodes * 2
    while nodes <= MOST_NODES:
        larger = cluster.model_copy(update={"nodes": nodes})
        if found := _fit_with_batch(problem, larger):
            between = (nodes + previous) // 2
            smaller = cluster.model_copy(update={"nodes": between})
            if between > previous and (fewer := _fit_with_batch(problem, smaller)):
                larger, found = smaller, fewer
            yield (
                f"{larger.world_size} × {cluster.device_name} ({larger.nodes} nodes) would do: "
                f"{_candidate_text(found, larger)}{_batch_note(problem, found)}"
            )
            return
        previous, nodes = nodes, nodes * 2


def _fit_with_batch(problem: SearchProblem, cluster: ClusterSpec) -> Candidate | None:
    """Find a fit on more devices, if needed with a global batch that has a sample for each."""
    found = _fit(problem, cluster=cluster)
    if found is not None or problem.workload.global_batch is None:
        return found
    unit = cluster.world_size * (problem.pins.micro_batch or 1) * (problem.pins.grad_accum or 1)
    batch = -(-problem.workload.global_batch // unit) * unit
    return _fit(problem, cluster=cluster, workload=problem.workload.model_copy(update={"global_batch": batch}))


def _batch_note(problem: SearchProblem, candidate: Candidate) -> str:
    batch = candidate.plan.global_batch
    return "" if batch == problem.workload.global_batch else f", global batch {batch}"
