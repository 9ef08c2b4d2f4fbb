"""Explain what a plan does with routed experts: which ranks have them, and how many tokens each gets."""

from __future__ import annotations

from shardwise.cost.expert_load import MEMORY_QUANTILE, TIME_QUANTILE, fullest_load
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload


def unrun_experts(profile: ModelProfile, plan: Plan) -> tuple[str, ...]:
    """Return what this version does not run with a model's experts: torchao's layers have no grouped products."""
    return (f"fp8 = '{plan.fp8}' with experts",) if plan.fp8 != "none" and profile.experts else ()


def experts_text(profile: ModelProfile, plan: Plan, workload: Workload) -> str:
    """Describe the experts of a rank and their rows in a micro batch; empty for a dense model."""
    sparse = next((unit for unit in profile.units if unit.experts), None)
    product = next((op for op in sparse.ops if op.experts and op.kind == "matmul"), None) if sparse else None
    if sparse is None or product is None or not plan.seq_len:
        return ""
    dims, experts = plan.dims, sparse.experts
    local = experts // dims.ep
    rows = product.m * plan.sequences / dims.cp / (dims.tp if dims.ep > 1 else 1)
    each = round(rows / local)
    text = f"{experts} a layer, {product.m // plan.seq_len} for each token; a rank has {local}"
    text += ", cut by tp" if dims.tp > 1 and dims.ep == 1 else ""
    text += f" with {each:,} rows each on average"
    if workload.capacity_factor is not None:
        return f"{text}, filled to {workload.capacity_factor:g} times that"
    if dims.ep == 1 or workload.program.balanced_experts:
        return text
    middle, high = (
        fullest_load(experts, dims.ep, quantile, share=sparse.share) - 1
        for quantile in (TIME_QUANTILE, MEMORY_QUANTILE)
    )
    return (
        f"{text}; the fullest rank is taken {middle:.0%} above the mean for time (quantile {TIME_QUANTILE:g}) and "
        f"{high:.0%} for memory ({MEMORY_QUANTILE:g})"
    )
