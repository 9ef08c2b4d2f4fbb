"""Search problem: model, workload, cluster, pinned values, and cost functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.time.step_time import StepTime
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.packed_mask import PACKED_MASK
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import Plan, Precision, RunPrecision
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Pins
from shardwise.search.cost_inputs_of_plan import adapted, with_adapter
from shardwise.search.enumerate import complexity
from shardwise.search.heuristics import Totals, totals_of

if TYPE_CHECKING:
    from shardwise.cost.time.collective_time import Calibration
    from shardwise.cost.time.estimate_time import Rates

SAID_TIE = 0.05  # relative times within the model's error
TIE = 0.02  # relative difference in predicted time below which simplicity decides
PLAIN_TIE = 0.05  # the same for plans without model-parallel axes and offload: simpler is kept within this
MEASURED_OPTIMIZERS = ("adamw", "sgd")  # whose seconds on a CPU are those of the bytes that they move
USABLE: dict[str, float] = {"cuda": 0.97, "cpu": 0.9}  # of a device's memory; a CPU's is shared with libraries


def tie_of(plan: Plan) -> float:
    """Return by how much ``plan`` may be slower than the fastest, to be chosen for being simpler."""
    axes, swaps, *_ = complexity(plan.parsed)
    return TIE if axes or swaps else PLAIN_TIE


@dataclass(frozen=True)
class Costs:
    """Cost functions; tests replace them.

    ``links_known``: all links were measured, so none is looked up in the catalogue. ``measured`` are the precisions in
    which the device itself was measured, for one that is in no table.
    """

    estimate: Callable[[ModelProfile, Plan, Workload, ClusterSpec], Estimate]
    peak_lower_bound: Callable[[ModelProfile, Plan, Workload], int]
    step_time: Callable[[ModelProfile, Plan, Workload, ClusterSpec], StepTime]
    links_known: bool = False
    measured: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SearchProblem:
    """Search request with derived values; ``usable`` is None where a device's memory is unknown."""

    profile: ModelProfile
    workload: Workload
    cluster: ClusterSpec
    pins: Pins
    costs: Costs
    totals: Totals
    precision: Precision
    usable: int | None
    timed: bool
    only_runnable: bool = False
    any_plan: bool = False  # recommend what this version does not run, too
    plain: ModelProfile | None = None  # the profile before a pinned adapter changed it; None where none did


def usable_bytes(cluster: ClusterSpec) -> int | None:
    """Memory that a plan may use: 97 % of a GPU's, 90 % of a CPU rank's share of the host.

    The estimate includes the context and the allocator's reserve, so the margin is for the model's own error alone.
    """
    return None if cluster.device_memory_bytes is None else int(cluster.device_memory_bytes * USABLE[cluster.device])


def unknown_links(cluster: ClusterSpec) -> list[str]:
    """Describe links of unknown speed; every plan of the cluster uses all of them."""
    asked = [
        ("link inside a node", cluster.link, cluster.devices_per_node),
        ("network", cluster.network, cluster.nodes),
    ]
    return [name for name, link, ends in asked if ends > 1 and (link is None or link.bytes_per_s is None)]


def default_precision(cluster: ClusterSpec) -> RunPrecision:
    """Return bf16 on GPUs that have it, fp16 on Volta and Turing, fp32 on CPUs: the rule of ``plan`` and ``train``."""
    return _precision(cluster)[0]


def precision_text(precision: str, cluster: ClusterSpec, *, named: bool) -> str:
    """Format a precision with its reason: ``bf16 (A100-SXM-80GB has it)``."""
    return f"{precision} ({'asked for by name' if named else _precision(cluster)[1]})"


def _precision(cluster: ClusterSpec) -> tuple[RunPrecision, str]:
    if cluster.device == "cpu":
        return "fp32", "the default on a CPU"
    peaks, name = cluster.gpu.peak_flops if cluster.gpu is not None else {}, cluster.device_name
    if not peaks:
        return "bf16", f"whether {name} has it is not known"
    if "bf16" in peaks:
        return "bf16", f"{name} has it"
    return ("fp16", f"{name} has no bf16") if "fp16" in peaks else ("fp32", f"{name} has no 16-bit units")


def default_costs(rates: Rates | None = None, calibration: Calibration | None = None) -> Costs:
    """Return this package's cost model with measured rates of the device and of the links."""
    from shardwise.cost.memory.estimate_memory import estimate, peak_lower_bound
    from shardwise.cost.time.estimate_time import step_time

    if rates is None and calibration is None:
        return Costs(estimate=estimate, peak_lower_bound=peak_lower_bound, step_time=step_time)

    def measured(profile: ModelProfile, plan: Plan, workload: Workload, cluster: ClusterSpec) -> StepTime:
        return step_time(profile, plan, workload, cluster, rates=rates, calibration=calibration)

    return Costs(estimate=estimate, peak_lower_bound=peak_lower_bound, step_time=measured)


def _is_timed(
    profile: ModelProfile, workload: Workload, cluster: ClusterSpec, costs: Costs | None, precision: str
) -> bool:
    """Return whether the speed of the device and of its links is known, from the catalogue or measured.

    Convolutions, experts, 4-bit weights, compiled blocks, masks of documents, and optimizers that do more than move
    their states are not among a CPU's measured kernels.
    """
    in_table = cluster.gpu is not None and bool(cluster.gpu.peak_flops)
    other = workload.compiled or workload.program.fused_kernels or workload.optimizer not in MEASURED_OPTIMIZERS
    other = other or (workload.document_len is not None and workload.document_len < (profile.seq_len or 0))
    ops = [op for unit in profile.units for op in unit.ops]
    other = other or any(op.kind == "conv" or op.experts or op.name == PACKED_MASK for op in ops)
    other = other or any(weight.itemsize < 1 for unit in profile.units for weight in unit.weights)
    measured = costs is not None and precision in costs.measured and not other
    return (in_table or measured) and ((costs is not None and costs.links_known) or not unknown_links(cluster))


def ask(
    profile: ModelProfile,
    workload: Workload,
    cluster: ClusterSpec,
    pins: Pins,
    *,
    costs: Costs | None = None,
    rates: Rates | None = None,
    only_runnable: bool = False,
    any_plan: bool = False,
) -> SearchProblem:
    """Build a search request; a pinned adapter changes the profile.

    Raises:
        PlanError: the adapter is invalid.
    """
    precision, plain = pins.precision or default_precision(cluster), None
    if pins.options.get("adapter") is not None:
        workload = with_adapter(workload, pins.options["adapter"])
    if pins.strategy is not None and pins.strategy.adapter != "none":
        profile, plain = adapted(profile, pins.strategy, workload, precision, cluster.device), profile
    if pins.options.get("optimizer_in_backward") and pins.grad_accum is None:
        pins = pins.model_copy(update={"grad_accum": 1})
    return SearchProblem(
        profile=profile,
        workload=workload,
        cluster=cluster,
        pins=pins,
        costs=costs or default_costs(rates),
        totals=totals_of(profile, workload, cluster, precision),
        precision=precision,
        usable=usable_bytes(cluster),
        timed=rates is not None or _is_timed(profile, workload, cluster, costs, precision),
        only_runnable=only_runnable,
        any_plan=any_plan,
        plain=plain,
    )


def type_options(problem: SearchProblem) -> dict[str, Any]:
    """Return the types of weights and gradients: the program's; a compute type of fp32 leaves nothing to choose."""
    program = problem.workload.program
    if problem.precision == "fp32":
        return {"program": program.name}
    return {
        "program": program.name,
        "weights": program.weights,
        "accumulate": program.accumulate if program.weights == "masters" else "fp32",
        "reduce": program.reduce,
        "rounding": program.rounding,
        "fp8": program.fp8,
    }
