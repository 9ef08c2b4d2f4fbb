"""Parts of a plan that another tool may have no key for, under one name each."""

from __future__ import annotations

from collections.abc import Collection

from shardwise.plan.parallel_options import OPTION_DEFAULTS, has_effect
from shardwise.plan.plan import Plan

AXES = {"tp": "tensor parallel", "pp": "pipeline parallel", "cp": "context parallel"}


def parts_in_use(plan: Plan) -> dict[str, str]:
    """Return the parts of ``plan`` that differ from a plain one, with their values."""
    strategy = plan.parsed
    found = {f"+{axis}": str(size) for axis in AXES if (size := getattr(plan.dims, axis)) > 1}
    found |= {"recompute": plan.recompute} if plan.recompute != "none" else {}
    found |= {"adapter": strategy.adapter} if strategy.adapter != "none" else {}
    found |= {"offload": "true"} if strategy.offload else {}
    found |= {"nvme": "true"} if strategy.nvme else {}
    found |= {"objective": plan.objective} if plan.objective != "lm" else {}
    found |= {"stage_blocks": str(list(plan.stage_blocks))} if plan.stage_blocks else {}
    for name, default in OPTION_DEFAULTS.items():
        value = getattr(plan, name)
        if value != default and has_effect(name, strategy) and name != "nvme_path":
            found[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def unexpressed(plan: Plan, tool: str, has: Collection[str], whys: dict[str, str] | None = None) -> list[str]:
    """List the parts in use that ``tool`` has no key for; ``has`` are those that it has."""
    whys = whys or {}
    return [
        f"{name} {value}: {whys.get(name, f'{tool} has no key for it')}"
        for name, value in parts_in_use(plan).items()
        if name not in has
    ]


def base_problems(plan: Plan, tool: str, bases: Collection[str]) -> list[str]:
    """List why ``tool`` has no equivalent of the plan's strategy at all; ``bases`` are those that it runs."""
    strategy, problems = plan.parsed, []
    if strategy.engine == "torch" and strategy.base not in bases:
        problems.append(f"strategy '{plan.strategy}' has no equivalent in {tool}, which runs {', '.join(bases)}")
    if plan.micro_batch is None:
        problems.append("the plan leaves the micro batch open; set micro_batch in the plan")
    if plan.precision == "fp8":
        problems.append(f"precision fp8 is not written for {tool} in this version; use bf16")
    return problems


def on_cpu(plan: Plan, tool: str) -> list[str]:
    """Say that a tool shards nothing on a CPU, where the plan is for one."""
    if plan.device == "cpu" and plan.parsed.shards_parameters:
        return [f"device cpu: {tool} runs DDP on a CPU whatever FSDP keys say, so nothing would be sharded"]
    return []
