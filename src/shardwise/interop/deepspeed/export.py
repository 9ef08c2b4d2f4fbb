"""Export a plan as an equivalent DeepSpeed configuration, or explain why there is none."""

from __future__ import annotations

from typing import Any

from shardwise.errors import PlanError
from shardwise.interop.deepspeed.import_config import BESIDE, BESIDE_KEYS
from shardwise.plan.deepspeed_stages import STAGES, deepspeed_config
from shardwise.plan.plan import Plan, axis_problems, export_problems
from shardwise.units import counted

_ITS_OWN = {  # what DeepSpeed has no key for, and what to do in a custom script
    "recompute": "recompute the blocks in the model's code",
    "recompute_layers": "recompute only the first of them",
    "offload_activations": "save tensors of the blocks on the host in the model's code",
    "compile": "call torch.compile on the blocks",
    "prefetch": "DeepSpeed gathers ahead by elements instead, stage3_prefetch_bucket_size",
    "gradient_sync": "DeepSpeed reduces after each micro batch as it sees fit",
    "adapter": "wrap the model with peft before deepspeed.initialize",
    "loss_chunks": "chunk the loss in the model's code",
}


def twin_problems(plan: Plan) -> list[str]:
    """List why no DeepSpeed configuration is equivalent to ``plan``; empty if one is."""
    strategy = plan.parsed
    problems = axis_problems(plan) + export_problems(plan, "deepspeed")
    whys = {
        "ddp": "ZeRO stage 0 shards nothing, and PyTorch runs it; use zero1, zero2 or fsdp",
        "hsdp": "ZeRO has no replicas of shard groups whose optimizer is sharded, too; use fsdp",
    }
    if strategy.base not in STAGES:
        problems.append(f"strategy '{plan.strategy}' has no twin in DeepSpeed: {whys[strategy.base]}")
    axes = {"tp": "layers sharded by it", "pp": "a model written as its PipelineModule", "cp": "its own attention"}
    problems += [
        f"strategy '{plan.strategy}' has no twin in DeepSpeed: for +{axis} it needs {need}; take +{axis} out"
        for axis, need in axes.items()
        if getattr(strategy, axis) > 1
    ]
    if plan.precision == "fp8":
        problems.append("precision fp8 has no key in DeepSpeed's configuration; use bf16")
    if plan.micro_batch is None:
        problems.append("the plan leaves the micro batch open, and DeepSpeed needs it; set micro_batch in the plan")
    if getattr(plan, "optimizer_in_backward", False):
        problems.append(
            "optimizer_in_backward has no equivalent: DeepSpeed steps after the backward; remove it from the plan"
        )
    return problems


def export_deepspeed(plan: Plan, *, clip_norm: float | None) -> dict[str, Any]:
    """Build the configuration; keys unknown to DeepSpeed go into a table ``shardwise``.

    Raises:
        PlanError: the plan has no equivalent in DeepSpeed; lists all reasons.
    """
    if problems := twin_problems(plan):
        raise PlanError(*problems)
    return {**deepspeed_config(plan, clip_norm=clip_norm), BESIDE: beside(plan)}


def beside(plan: Plan) -> dict[str, Any]:
    """Return the plan's keys without a DeepSpeed key, unless default; always with the device."""
    written = plan.model_dump(mode="json", by_alias=True)
    usual = Plan().model_dump(mode="json", by_alias=True)
    kept = {key: written[key] for key in written if key in BESIDE_KEYS - {"strategy"} and written[key] != usual[key]}
    strategy = plan.parsed
    if strategy.engine == "torch" or strategy.adapter != "none":
        kept["strategy"] = str(strategy)
    return {"device": plan.device, **kept}


def export_notes(plan: Plan) -> list[str]:
    """List what the configuration omits, or DeepSpeed does differently; one line each."""
    strategy, kept = plan.parsed, beside(plan)
    notes = [
        f"launch it on {counted(plan.dims.world_size, 'rank')}: DeepSpeed's configuration does not contain the number"
    ]
    if "seq_len" in kept:
        notes.append(f"seq_len {kept['seq_len']}: split samples to this length")
    notes.append("the optimizer is your script's: deepspeed.initialize(optimizer=...)")
    if strategy.engine == "torch":
        notes.append(f"the plan runs on PyTorch; this is its twin, deepspeed-zero{STAGES[strategy.base]}")
        if plan.precision != "fp32":
            notes.append(
                f"DeepSpeed casts weights to {plan.precision} once; PyTorch's plan keeps fp32 ones and casts in use"
            )
        if strategy.offload and strategy.base == "zero2":
            notes.append("DeepSpeed's stage 2 keeps full parameters on the device, PyTorch's zero2+offload does not")
    return notes


def export_losses(plan: Plan) -> list[str]:
    """List what a custom script has to do, since DeepSpeed has no key for it; one line each."""
    kept = beside(plan)
    return [f"{key} {_text(kept[key])}: {do}" for key, do in _ITS_OWN.items() if key in kept]


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)
