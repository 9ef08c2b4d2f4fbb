"""Export a plan as Python that builds Lightning's ``Fabric`` for it."""

from __future__ import annotations

from shardwise.errors import PlanError
from shardwise.interop.exported import Exported
from shardwise.interop.plan_parts import base_problems, unexpressed
from shardwise.plan.plan import Plan

TOOL = "Fabric"
_HAS = {
    "recompute",
    "recompute_layers",
    "offload",
    "compile",
    "find_unused_parameters",
    "static_graph",
    "bucket_cap_mb",
}


def export_fabric(plan: Plan, clip_norm: float | None) -> Exported:
    """Write a file with ``fabric()``, and ``shard(model)`` where the plan shards parameters.

    Raises:
        PlanError: Fabric has no equivalent of the strategy.
    """
    problems = base_problems(plan, TOOL, ("ddp", "zero2", "fsdp"))
    if plan.parsed.engine != "torch":
        problems.append(f"strategy '{plan.strategy}': give Fabric's DeepSpeedStrategy the file of --to deepspeed")
    if plan.dims.splits_model:
        problems.append(f"strategy '{plan.strategy}': a model sharded by tensor is not written; take +tp, +pp, +cp out")
    if plan.precision == "fp16" and plan.parsed.shards_parameters:
        problems.append("precision fp16: Fabric has no scaler for FSDP2; use bf16")
    if problems:
        raise PlanError(*problems)
    lost = unexpressed(plan, TOOL, _HAS)
    if plan.recompute == "selective":
        lost.append("recompute selective: written as recompute of full blocks")
    lines = _sharded(plan) if plan.parsed.shards_parameters else _replicated(plan)
    notes = [
        "model, optimizer = fabric.setup(model, optimizer), and fabric.backward(loss) in place of loss.backward()",
        f"accumulation {plan.grad_accum}: fabric.no_backward_sync(model) around all micro batches but the last",
        f"micro batch {plan.micro_batch}: DataLoader(batch_size={plan.micro_batch}), fabric.setup_dataloaders(loader)",
        "divide a summed loss by the labels of the global batch: DDP and FSDP average over ranks",
    ]
    if clip_norm is not None:
        notes.append(f"clipping: fabric.clip_gradients(model, optimizer, max_norm={clip_norm:g})")
    return Exported("\n".join(lines) + "\n", lost, notes)


def _head(plan: Plan, imports: list[str]) -> list[str]:
    return [
        f'"""Fabric for a plan of Shardwise: {plan.strategy}, {plan.dims}, {plan.precision}."""',
        "",
        *imports,
        "",
        "",
    ]


def _replicated(plan: Plan) -> list[str]:
    options = {"gradient_as_bucket_view": "True"}
    options |= {key: "True" for key in ("find_unused_parameters", "static_graph") if getattr(plan, key)}
    options |= {"bucket_cap_mb": str(plan.bucket_cap_mb)} if plan.bucket_cap_mb else {}
    written = ", ".join(f"{key}={value}" for key, value in options.items())
    names = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    imports = ["from lightning.fabric import Fabric", "from lightning.fabric.strategies import DDPStrategy"]
    blocks, more = _blocks(plan)
    return [
        *_head(plan, [*imports, *more]),
        *blocks,
        "def fabric() -> Fabric:",
        f"    strategy = DDPStrategy({written})",
        f'    return Fabric(accelerator="{plan.device}", devices={plan.dims.world_size}, strategy=strategy, '
        f'precision="{names[plan.precision]}")',
    ]


def _blocks(plan: Plan) -> tuple[list[str], list[str]]:
    """Return the function for what the plan does to blocks of a replicated model, and its imports."""
    if plan.recompute == "none" and not plan.compile:
        return [], []
    lines = [
        "def prepare(blocks: list[nn.Module]) -> None:",
        '    """Call it on the model\'s blocks before fabric.setup."""',
    ]
    lines += ["    for block in blocks:", *_each_block(plan), "", ""]
    imports = ["from torch import nn"]
    wrapper = "from torch.distributed._composable import checkpoint"
    return lines, [*imports, *([wrapper] if plan.recompute != "none" else [])]


def _each_block(plan: Plan) -> list[str]:
    lines = ["        checkpoint(block)"] if plan.recompute != "none" else []
    if plan.recompute_layers is not None:
        lines = [f"        if block in blocks[:{plan.recompute_layers}]:", "            checkpoint(block)"]
    return lines + (["        block.compile()"] if plan.compile else [])


def _sharded(plan: Plan) -> list[str]:
    mixed, offload = plan.precision == "bf16", plan.parsed.offload
    imports = ["import torch"] if mixed else []
    names = (["CPUOffloadPolicy"] if offload else []) + (["MixedPrecisionPolicy"] if mixed else []) + ["fully_shard"]
    imports += ["from lightning.fabric import Fabric", "from lightning.fabric.strategies import ModelParallelStrategy"]
    imports += ["from torch import nn", "from torch.distributed.device_mesh import DeviceMesh"]
    imports += [f"from torch.distributed.fsdp import {', '.join(names)}"]
    if plan.recompute != "none":
        imports.insert(-2, "from torch.distributed._composable import checkpoint")
    options = ", reshard_after_forward=False" if plan.parsed.base == "zero2" else ""
    more = (", offload_policy=CPUOffloadPolicy()" if offload else "") + (", mp_policy=precision" if mixed else "")
    root = more.replace("=precision", "=root_precision")
    lines = [
        *_head(plan, imports),
        "def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:",
        '    """Shard each block, then the rest; a block is a child of the longest list of modules."""',
        "    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]",
        "    blocks = max(lists, key=len, default=[])",
        '    data = mesh["data_parallel"]',
    ]
    if mixed:
        lines += [
            "    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
            "    root_precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)",
        ]
    lines += [
        "    for block in blocks:",
        *_each_block(plan),
        f"        fully_shard(block, mesh=data{options}{more})",
        f"    fully_shard(model, mesh=data, reshard_after_forward=False{root})",
        "    return model",
        "",
        "",
        "def fabric() -> Fabric:",
        f"    ranks = {plan.dims.world_size}",
        "    strategy = ModelParallelStrategy(shard, data_parallel_size=ranks, tensor_parallel_size=1)",
        f'    return Fabric(accelerator="{plan.device}", devices=ranks, strategy=strategy)',
    ]
    return lines
