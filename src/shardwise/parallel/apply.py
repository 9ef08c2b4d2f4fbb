"""Apply a plan to a live module: every step, in order, on this page.

check → adapters → types at rest → decide → meshes → batch norm → pipeline stages → tensor parallel → context parallel →
loss chunks → activation checkpointing → compile → precision → weights → experts over ranks → fp8 layers → FSDP2 or
DDP → activation offload → optimizer.

The result is standard PyTorch: an ``nn.Module`` (sharded in place, or inside DDP) and a
``torch.optim.Optimizer`` over its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.distributed.mesh import Meshes, build_mesh
from shardwise.errors import ModelError
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name, read_model
from shardwise.parallel.activation_checkpointing import apply_recompute
from shardwise.parallel.activation_offload import SavedOnHost, save_on_host
from shardwise.parallel.chunked_loss import apply_loss_chunks
from shardwise.parallel.compile import apply_compile, overlap_tensor_parallel
from shardwise.parallel.context_parallel.attention import apply_context
from shardwise.parallel.data_parallel.ddp import Replicated, apply_replicate, shard_optimizer
from shardwise.parallel.data_parallel.fsdp import apply_shard, gather_ahead, overlap_over_gloo, shard_unit
from shardwise.parallel.data_parallel.unit_order import keep_order
from shardwise.parallel.decide import Decision, check_model, decide, refuse_renorm, with_stages
from shardwise.parallel.engines.engine import Engine
from shardwise.parallel.experts.expert_parallel import ExpertMeshes, check_experts, expert_meshes, spread_experts
from shardwise.parallel.fp8 import Converted, check_fp8, convert_unit
from shardwise.parallel.lora.adapters import Adapters, adapters_of, add_adapters, quantized_spec
from shardwise.parallel.materialize import Fill, make_contiguous, materialize_unit, send_what_ddp_cannot
from shardwise.parallel.ownership import ownership_of
from shardwise.parallel.pipeline_parallel.schedule import Pipeline, Stages, make_pipeline, split_stages
from shardwise.parallel.precision import apply_autocast, store_low
from shardwise.parallel.split_parameters import SplitParameters
from shardwise.parallel.tensor_parallel.parallelize import apply_tensor
from shardwise.parallel.unsupported_tensors import check_tensors
from shardwise.plan.plan import Plan
from shardwise.plan.traffic import keeps_last_block

_MARK = "_shardwise_prepared"
Replaced = Callable[[Optimizer, Plan, dict[int, str]], Optimizer]


@dataclass(frozen=True)
class Applied:
    """Model with a plan applied. Call ``outer``.

    ``module`` is the user's own, with the user's parameter names. ``plan`` is complete: it has the pipeline's stages.
    """

    plan: Plan
    outer: nn.Module
    module: nn.Module
    blocks: tuple[nn.Module, ...]
    spec: ModelSpec
    meshes: Meshes | None = None
    pipeline: Pipeline | None = None
    warnings: tuple[str, ...] = ()
    decision: Decision | None = None
    engine: Engine | None = None
    experts: ExpertMeshes | None = None
    fp8: Converted | None = None
    on_host: SavedOnHost | None = None


def apply(module: nn.Module, plan: Plan, device: torch.device, sample: Any = None, fill: Fill | None = None) -> Applied:
    """Apply ``plan`` to ``module`` on this rank.

    Collective: every rank passes the same structure.

    ``sample`` is the model's input for one micro batch (a tensor, a tuple or a dict; values do not matter). Plans
    that split the model itself trace one forward of it under fake tensors; default: token ids [1, length].
    Adapters are added where the plan has them and the module does not; ``fill`` then gives a unit (a block, then the
    rest) its frozen weights, before it is quantized and sharded. Without it, rank 0's weights are used.

    Raises:
        ModelError: the model has no trainable parameters, or does not support the plan.
    """
    if getattr(module, _MARK, False):
        raise ModelError("this model was prepared by an earlier session; rebuild it, or continue with that session")
    check_tensors(module, plan)
    adapters = _adapters(module, plan)
    store_low(module, plan)
    spec = read_model(module)
    spec = spec if adapters is None else quantized_spec(spec, adapters.packed)
    check_model(spec, plan)
    refuse_renorm(module, plan)
    check_experts(module, plan)
    converted = check_fp8(module, spec, plan, device)
    decision = decide(module, spec, plan, sample)
    plan = with_stages(plan, decision.wiring)
    meshes = build_mesh(plan, dist.get_world_size())
    experts = None if meshes is None else expert_meshes(plan, meshes.tp)
    module, notes = apply_batch_norm(module, spec, plan)
    if plan.recompute != "none" or plan.dims.splits_model:
        notes += stop_caching(module)
    setattr(module, _MARK, True)

    # Split the model: pipeline stages first, then what runs inside each of them
    splits = meshes is not None and plan.dims.tp * plan.dims.pp > 1
    parameters = SplitParameters(module, spec, device) if splits else None
    stages = split_stages(module, spec, decision.wiring, plan, plan.dims.place(dist.get_rank()).pp if splits else 0)
    blocks: dict[str, nn.Module] = {}
    exchange, compiled = None, None
    if meshes is not None:
        overlap_tensor_parallel(plan, meshes.tp)
    for stage in stages.parts:
        names = [name for name in spec.blocks if name in stages.blocks_of(stage)]
        if decision.layout is not None and meshes is not None and meshes.tp is not None:
            apply_tensor(stage, decision.layout, meshes.tp, plan)
        if decision.context is not None and meshes is not None and meshes.cp is not None:
            exchange = apply_context(stage, decision.context, meshes.cp, exchange)
        if decision.head is not None:
            apply_loss_chunks(stage, decision.head, plan.loss_chunks)
        wrapped = apply_recompute(stage, plan.recompute, names, compiled=plan.compile, layers=plan.recompute_layers)
        compiled = apply_compile(wrapped, plan, compiled)
        blocks |= dict(zip(names, wrapped, strict=True))

    # Give it weights, and put data parallel around it
    if parameters is not None and meshes is not None:
        notes += decision.layout.notes if decision.layout is not None else ()
        outer = module = _place_stages(stages, blocks, spec, plan, meshes, parameters, decision, experts)
    elif meshes is not None and plan.parsed.shards_parameters:
        make_contiguous(module)
        outer = apply_shard(module, [*blocks.values()], plan, meshes.data, device, fill, experts)
    else:
        apply_autocast(module, plan)
        outer = _replicate(module, blocks, spec, plan, device, fill, adapted=adapters is not None)
    pipeline = None
    if meshes is not None and decision.wiring is not None:
        pipeline = make_pipeline(stages, plan, meshes, device)
    ordered = tuple(blocks[name] for name in spec.blocks if name in blocks)
    away = save_on_host(ordered, device) if plan.offload_activations else None
    return Applied(
        plan, outer, module, ordered, spec, meshes, pipeline, notes, decision, None, experts, converted, away
    )


def is_unwrapped(module: object) -> bool:
    """Return whether ``module`` was prepared as it is: without DDP around it, and not sharded in place."""
    return isinstance(module, nn.Module) and getattr(module, _MARK, False) and not isinstance(module, FSDPModule)


def _replicate(
    module: nn.Module,
    blocks: dict[str, nn.Module],
    spec: ModelSpec,
    plan: Plan,
    device: torch.device,
    fill: Fill | None,
    *,
    adapted: bool,
) -> nn.Module:
    """Give the model its weights on every rank, and put DDP around it."""
    for block in blocks.values() if adapted else ():
        materialize_unit(block, device, fill)
    materialize_unit(module, device, fill, broadcast=False)  # DDP broadcasts rank 0's weights itself
    send_what_ddp_cannot(module)
    for block in blocks.values():
        convert_unit(block, plan)
    if plan.parsed.base == "zero1":  # it broadcasts each parameter after the update
        make_contiguous(module, gaps_only=True)
    return apply_replicate(module, spec, plan, dist.get_world_size(), device)


def _place_stages(
    stages: Stages,
    blocks: dict[str, nn.Module],
    spec: ModelSpec,
    plan: Plan,
    meshes: Meshes,
    parameters: SplitParameters,
    decision: Decision,
    experts: ExpertMeshes | None,
) -> nn.Module:
    """Fill this rank's stages with parameters, shard them by unit, and return their container.

    Under ``ddp`` the mesh's shard axis has size 1, as DDP takes no DTensors. FSDP2 over one shard keeps its copy of a
    block's weights only while the block runs, and a pipeline can drive it; torch's ``replicate`` keeps a second copy of
    the model from forward to backward. One data-parallel rank needs no wrapper.
    """
    wraps = plan.parsed.shards_parameters or meshes.data_ranks > 1
    for unit in (*spec.blocks, None):
        keeps = unit == spec.blocks[-1] and keeps_last_block(plan)
        parameters.place(unit, stages, decision.layout, meshes)
        if experts is not None and unit in blocks:
            spread_experts(blocks[unit], plan, experts, keeps=keeps)
        if wraps and unit in blocks:
            shard_unit(blocks[unit], plan, meshes.data, is_root=False, keeps=keeps)
    for stage in stages.parts:
        if wraps:
            shard_unit(stage, plan, meshes.data, is_root=True, is_last_stage=stages.is_last(stage))
            own = stages.blocks_of(stage)
            gather_ahead(stage, [blocks[name] for name in spec.blocks if name in own], plan.prefetch)
            keep_order(stage, meshes.data, pipelined=plan.dims.pp > 1)
            overlap_over_gloo(stage, plan, meshes.data)
        else:
            apply_autocast(stage, plan)
    parameters.note_ownership(stages, plan)
    return stages.container


def _adapters(module: nn.Module, plan: Plan) -> Adapters | None:
    """Return the adapters of ``module``, which must match the plan's.

    Add them where they are missing.
    """
    found, kind = adapters_of(module), plan.parsed.adapter
    if kind == "none" and found is not None:
        raise ModelError(f"the model has adapters, and {plan.strategy} has none; add +{found.kind} to the strategy")
    if kind == "none" or found is not None:
        return found
    return add_adapters(module, plan, real=dist.get_rank() == 0)


def stop_caching(module: nn.Module) -> tuple[str, ...]:
    """Turn off the key/value cache of transformers models; recompute would append to it twice.

    A split model would cache only its own part, and training does not use the cache.
    """
    notes = []
    for name in ("config", "config.text_config"):
        config: Any = module
        for part in name.split("."):
            config = getattr(config, part, None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
            notes.append(
                f"model.{name}.use_cache is now False: training uses no cache, and recompute would fill it twice"
            )
    return tuple(notes)


def apply_batch_norm(module: nn.Module, spec: ModelSpec, plan: Plan) -> tuple[nn.Module, tuple[str, ...]]:
    """Synchronize batch statistics over the global batch where the device supports it.

    Else return a warning.
    """
    if not spec.batch_norms or plan.dims.world_size == 1:
        return module, ()
    if plan.device == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module), ()
    return module, (
        f"batch norm ({spec.batch_norms[0]} and {len(spec.batch_norms) - 1} more) computes its statistics on each rank "
        "alone: PyTorch's SyncBatchNorm needs GPUs, so gradients differ from those of one process; "
        "use group norm or layer norm, or one rank",
    )


def apply_to_optimizer(
    optimizer: Optimizer, names: dict[int, str], applied: Applied, plan: Plan, replaced: Replaced | None = None
) -> Optimizer:
    """Point ``optimizer`` at the parameters that ``apply`` created.

    Shard its state for ``zero1``.

    ``names`` maps the id of each parameter before `apply` to its name. ``replaced`` gives what steps in the optimizer's
    place, before its state is sharded, by the names of its new parameters.

    Raises:
        ModelError: the optimizer has stepped already, or has parameters that are not the model's.
    """
    refill = _drop_fresh_sums(optimizer)
    if optimizer.state:
        raise ModelError(
            f"the optimizer ({type(optimizer).__name__}) has state already: call session.prepare before the "
            "first step; one that makes its state when it is built cannot follow its parameters, so use another"
        )
    live = {clean_name(name): p for name, p in applied.module.named_parameters(remove_duplicate=False)}
    ownership = ownership_of(applied.module)
    if ownership is not None:  # a stage registers a tied parameter under its local name
        live |= {ownership.canonical(name): p for name, p in live.items()}
    strangers, adopted = 0, _adopted(optimizer, names, applied.module)
    for group in optimizer.param_groups:
        strangers += sum(id(p) not in names for p in group["params"])
        here = [p for p in group["params"] if id(p) not in names or ownership is None or names[id(p)] in live]
        group["params"] = [live[names[id(p)]] if id(p) in names else p for p in here]
    if strangers:
        raise ModelError(
            f"the optimizer holds {strangers} parameters that do not belong to the "
            "model; build it from the parameters of the model that you pass to session.prepare"
        )
    if any(adopted):
        for group, fresh in zip(optimizer.param_groups, adopted, strict=True):
            group["params"] = [*(p for p in group["params"] if p.requires_grad), *fresh]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    shards_state = plan.parsed.base == "zero1" and plan.parsed.engine == "torch"
    if refill and not shards_state:
        begin = optimizer.defaults["initial_accumulator_value"]
        groups = [{**group} for group in optimizer.param_groups]
        optimizer.state.update(torch.optim.Adagrad(groups, initial_accumulator_value=begin).state)
    if replaced is not None:
        optimizer = replaced(optimizer, plan, {id(p): name for name, p in live.items()})
    memory = applied.outer.memory if isinstance(applied.outer, Replicated) else None
    return shard_optimizer(optimizer, memory) if shards_state else optimizer


def _drop_fresh_sums(optimizer: Optimizer) -> bool:
    """Drop the state that Adagrad creates when built; the local shards get a new one."""
    fresh = type(optimizer) is torch.optim.Adagrad and not any(s["step"] for s in optimizer.state.values())
    if fresh:
        optimizer.state.clear()
    return fresh


def _adopted(optimizer: Optimizer, names: dict[int, str], module: nn.Module) -> list[list[nn.Parameter]]:
    """Add adapters created after the optimizer to the group of the weight that each adapts."""
    found: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    alone: dict[str, None] = {}
    if adapters_of(module) is None:
        return found
    groups = {names.get(id(p)): at for at, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for name, parameter in module.named_parameters():
        name = clean_name(name)
        if parameter.requires_grad and name not in groups and name not in names.values():
            beside = f"{name.partition('.lora_')[0]}.weight"
            if beside in groups:
                found[groups[beside]].append(parameter)
            else:
                alone.setdefault(beside)
    if alone:
        more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
        raise ModelError(
            f"the optimizer does not hold {', '.join([*alone][:3])}{more}, but they have adapters, whose optimizer "
            "options are therefore unknown; build the optimizer from all weights that have adapters, or name "
            "others as lora.targets"
        )
    return found


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Map the id of each parameter to its name, so that it can be found after `apply`."""
    return {id(p): clean_name(name) for name, p in module.named_parameters()}


def set_gradient_sync(outer: nn.Module, enabled: bool) -> None:
    """Choose whether the next backward reduces gradients over ranks or accumulates them."""
    if isinstance(outer, FSDPModule):
        outer.set_requires_gradient_sync(enabled)
    elif isinstance(outer, DistributedDataParallel):
        outer.require_backward_grad_sync = enabled
