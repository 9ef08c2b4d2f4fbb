"""Apply a plan to a live module: the whole order on this one page.

adapters → check → meshes → batch norm → [stages → tensor parallel] → context → loss chunks → recompute → compile →
precision → weights (→ packed) → shard or replicate → optimizer. What is in square brackets is `parallel.split`'s, for
plans that cut the model itself.

What comes out is what PyTorch users know: an ``nn.Module`` (sharded in place, or inside DDP) and a
``torch.optim.Optimizer`` over its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.distributed.mesh import Meshes, build_mesh
from shardwise.errors import ModelError, UserError
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name, read_model
from shardwise.parallel.activation_checkpointing import apply_recompute
from shardwise.parallel.chunked_loss import OutputHead, apply_loss_chunks, find_head
from shardwise.parallel.compile import apply_compile, check_compile, check_options
from shardwise.parallel.context_parallel.attention import apply_context, check_context
from shardwise.parallel.context_parallel.inspect_attention import ContextLayout
from shardwise.parallel.data_parallel.ddp import apply_replicate, shard_optimizer
from shardwise.parallel.data_parallel.fsdp import apply_shard
from shardwise.parallel.engines.engine import Engine
from shardwise.parallel.lora.adapters import Adapters, adapters_of, add_adapters, packed_spec
from shardwise.parallel.materialize import Fill, make_contiguous, send_what_ddp_cannot, settle
from shardwise.parallel.model_parallel import Decision, apply_split, decide
from shardwise.parallel.ownership import home_of
from shardwise.parallel.pipeline_parallel.schedule import Pipeline, check_pipeline
from shardwise.parallel.precision import apply_autocast
from shardwise.parallel.unsupported_tensors import check_tensors
from shardwise.plan.plan import Plan

_MARK = "_shardwise_prepared"


@dataclass(frozen=True)
class Applied:
    """A model under a plan. ``outer`` is called; ``module`` is the user's own, whose names are the user's."""

    outer: nn.Module
    module: nn.Module
    blocks: tuple[nn.Module, ...]
    spec: ModelSpec
    meshes: Meshes | None = None
    pipeline: Pipeline | None = None
    warnings: tuple[str, ...] = ()
    decision: Decision | None = None
    engine: Engine | None = None


def apply(module: nn.Module, plan: Plan, device: torch.device, sample: Any = None, fill: Fill | None = None) -> Applied:
    """Put ``module`` under ``plan`` on this rank. Collective: every rank calls it with the same structure.

    ``sample`` is what the model takes for one micro batch (a tensor, a tuple or a dict; values do not matter). Plans
    that cut the model itself look at one forward of it under fake tensors; token ids [1, length] if left out.
    Adapters are added where the plan has them and the module does not; ``fill`` then gives a unit (a block, then the
    rest) its frozen weights, before it is packed and cut. Without it they are rank 0's.

    Raises:
        ModelError: the model has nothing to train, or does not allow what the plan asks for.
    """
    if getattr(module, _MARK, False):
        raise ModelError("this model was prepared by an earlier session; build it anew, or go on with that session")
    check_tensors(module, plan)
    adapters = _adapters(module, plan)
    spec = read_model(module)
    spec = spec if adapters is None else packed_spec(spec, adapters.packed)
    check(spec, plan)
    refuse_renorm(module, plan)
    decision = check_cut(module, spec, plan, sample)
    meshes = build_mesh(plan, dist.get_world_size())
    module, notes = apply_batch_norm(module, spec, plan)
    if plan.recompute != "none" or plan.dims.splits_model:
        notes += stop_caching(module)
    setattr(module, _MARK, True)
    if meshes is not None and plan.dims.tp * plan.dims.pp > 1:
        split = apply_split(module, spec, plan, decision, meshes, device, sample)
        notes += split.notes
        return Applied(split.outer, split.module, split.blocks, spec, meshes, split.pipeline, notes, decision)
    if meshes is not None and meshes.cp is not None and decision.context is not None:
        apply_context(module, decision.context, meshes.cp)
    if decision.head is not None:
        apply_loss_chunks(module, decision.head, plan.loss_chunks)
    blocks = apply_recompute(module, plan.recompute, spec.blocks, compiled=plan.compile)
    apply_compile(blocks, plan)
    if meshes is not None and plan.parsed.shards_parameters:
        make_contiguous(module)
        outer = apply_shard(module, blocks, plan, meshes.data, device, fill)
    else:
        apply_autocast(module, plan)
        for block in () if adapters is None else blocks:
            settle(block, device, fill)
        settle(module, device, fill, broadcast=False)  # DDP sends rank 0's weights itself
        send_what_ddp_cannot(module)
        if plan.parsed.base == "zero1":  # it broadcasts each parameter after the update
            make_contiguous(module, gaps_only=True)
        outer = apply_replicate(module, spec, dist.get_world_size(), device)
    return Applied(outer, module, tuple(blocks), spec, meshes, None, notes, decision)


def _adapters(module: nn.Module, plan: Plan) -> Adapters | None:
    """The adapters of ``module``, which the plan must have too; added where they are missing."""
    found, kind = adapters_of(module), plan.parsed.adapter
    if kind == "none" and found is not None:
        raise ModelError(f"the model has adapters, and {plan.strategy} has none; add +{found.kind} to the strategy")
    if kind == "none" or found is not None:
        return found
    return add_adapters(module, plan, real=dist.get_rank() == 0)


def check(spec: ModelSpec, plan: Plan) -> None:
    """What the model does not allow is said before anything is changed."""
    problems: list[str] = []
    if not spec.num_trainable:
        frozen = f"all {len(spec.parameters)} parameters are frozen" if spec.parameters else "it has no parameter"
        raise ModelError(f"the model has nothing to train: {frozen}; leave requires_grad True on some")
    if plan.recompute != "none" and not spec.blocks:
        apply_recompute(nn.Module(), plan.recompute, ())
    dims = plan.dims
    if plan.parsed.shards_parameters or (dims.tp * dims.pp > 1 and dims.dp * dims.cp > 1):  # FSDP2 wraps it
        units = [[p for p in spec.parameters if p.block == block] for block in (*spec.blocks, None)]
        odd = [p for p in spec.parameters if not p.shape or not p.num_elements]
        problems += [f"{plan.strategy} cannot shard '{p.name}' of shape {p.shape}; give it shape (1,)" for p in odd[:3]]
    else:
        units = [[p for p in spec.parameters if p.trainable]] if plan.parsed.base == "zero1" else []
    for unit in units:
        kinds = sorted({p.dtype for p in unit if p.trainable})  # what is frozen may rest in any
        if len(kinds) > 1:
            examples = " and ".join(
                f"'{next(p.name for p in unit if p.trainable and p.dtype == kind)}' {kind}" for kind in kinds
            )
            problems.append(f"{plan.strategy} needs one dtype for what it handles together, got {examples}; cast one")
            break
    if problems:
        raise ModelError(*(f"{problem}, or use ddp" for problem in problems))


def check_cut(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> Decision:
    """Whether the plan's tensor, pipeline and context parallel can be had of ``module``, and its options of the plan.

    No rank is needed, nothing is changed, and weights may be on the meta device. Returns how the model is cut.

    Raises:
        ModelError: everything that is in the way, with what would work.
    """
    problems: list[str] = []
    attention: list[ContextLayout] = []
    heads: list[OutputHead] = []
    checks: list[Callable[[], object]] = [lambda: check_options(plan)]
    if plan.dims.pp > 1:
        checks.append(lambda: check_pipeline(plan, len(spec.blocks)))
    if plan.dims.cp > 1:
        checks.append(lambda: attention.append(check_context(module, spec, plan, sample)))
    if plan.compile:
        checks.append(lambda: check_compile(module, spec, plan, sample))
    if plan.loss_chunks > 1:
        checks.append(lambda: heads.append(find_head(module, spec, plan, sample)))
    checks.append(lambda: decide(module, spec, plan, sample))
    found: object = None
    for look in checks:
        try:
            found = look()
        except UserError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems or not isinstance(found, Decision):
        raise ModelError(*problems)
    return replace(found, context=next(iter(attention), None), head=next(iter(heads), None))


def refuse_renorm(module: nn.Module, plan: Plan) -> None:
    """An embedding with ``max_norm`` scales the rows that its rank looks up, in place: copies and shards differ by it.

    Raises:
        ModelError: there is one, and more than one rank.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None and plan.dims.world_size > 1:
            raise ModelError(
                f"'{clean_name(name)}' has max_norm={part.max_norm:g}: its forward changes the rows of weights that "
                f"a rank looks up, and under {plan.strategy} other ranks keep others; scale the rows after the "
                "lookup (functional.normalize), or after step.update on all ranks, and leave max_norm out"
            )


def stop_caching(module: nn.Module) -> tuple[str, ...]:
    """transformers models keep keys and values by default; recompute would append them a second time.

    A cut model would keep those of its own part, and training uses none.
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
    """Batch statistics over the whole global batch where the device allows it; a warning where it does not."""
    if not spec.batch_norms or plan.dims.world_size == 1:
        return module, ()
    if plan.device == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module), ()
    return module, (
        f"batch norm ({spec.batch_norms[0]} and {len(spec.batch_norms) - 1} more) computes its statistics on each rank "
        "alone: PyTorch's SyncBatchNorm needs GPUs, so gradients differ from those of one process; "
        "use group norm or layer norm, or one rank",
    )


def apply_to_optimizer(optimizer: Optimizer, names: dict[int, str], applied: Applied, plan: Plan) -> Optimizer:
    """Point ``optimizer`` at the parameters that ``apply`` put in place, and split its state for ``zero1``.

    ``names`` maps the id of each parameter before `apply` to its name.

    Raises:
        ModelError: the optimizer has stepped already, or holds parameters that are not the model's.
    """
    refill = _drop_fresh_sums(optimizer)
    if optimizer.state:
        raise ModelError(
            f"the optimizer ({type(optimizer).__name__}) has state already: call session.prepare before the "
            "first step; one that makes its state when it is built cannot follow its parameters, so use another"
        )
    live = {clean_name(name): p for name, p in applied.module.named_parameters(remove_duplicate=False)}
    home = home_of(applied.module)
    if home is not None:  # a stage knows a tied parameter by the name that is used there
        live |= {home.canonical(name): p for name, p in live.items()}
    strangers, adopted = 0, _adopted(optimizer, names, applied.module)
    for group in optimizer.param_groups:
        strangers += sum(id(p) not in names for p in group["params"])
        here = [p for p in group["params"] if id(p) not in names or home is None or names[id(p)] in live]
        group["params"] = [live[names[id(p)]] if id(p) in names else p for p in here]
    if strangers:
        raise ModelError(
            f"the optimizer holds {strangers} parameters that are not the model's; "
            "build it from the parameters of the model that you pass to session.prepare"
        )
    if any(adopted):
        for group, fresh in zip(optimizer.param_groups, adopted, strict=True):
            group["params"] = [*(p for p in group["params"] if p.requires_grad), *fresh]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    cuts_state = plan.parsed.base == "zero1" and plan.parsed.engine == "torch"
    if refill and not cuts_state:
        begin = optimizer.defaults["initial_accumulator_value"]
        groups = [{**group} for group in optimizer.param_groups]
        optimizer.state.update(torch.optim.Adagrad(groups, initial_accumulator_value=begin).state)
    return shard_optimizer(optimizer) if cuts_state else optimizer


def _drop_fresh_sums(optimizer: Optimizer) -> bool:
    """Adagrad makes its state when it is built: before the first step it is dropped, to be made of what is cut."""
    fresh = type(optimizer) is torch.optim.Adagrad and not any(s["step"] for s in optimizer.state.values())
    if fresh:
        optimizer.state.clear()
    return fresh


def _adopted(optimizer: Optimizer, names: dict[int, str], module: nn.Module) -> list[list[nn.Parameter]]:
    """Adapters that the optimizer, built before them, does not hold: each goes to the group of the weight beside it."""
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
            f"the optimizer does not hold {', '.join([*alone][:3])}{more}, and adapters stand beside them, whose "
            "options would be anybody's guess; build the optimizer from all weights that have adapters, or name "
            "others as lora.targets"
        )
    return found


def parameter_names(module: nn.Module) -> dict[int, str]:
    """The name of each parameter by its id, to find it again after `apply`."""
    return {id(p): clean_name(name) for name, p in module.named_parameters()}


def set_gradient_sync(outer: nn.Module, enabled: bool) -> None:
    """Let the next backward reduce gradients over the ranks, or only add them up locally."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(outer, FSDPModule):
        outer.set_requires_gradient_sync(enabled)
    elif isinstance(outer, DistributedDataParallel):
        outer.require_backward_grad_sync = enabled
