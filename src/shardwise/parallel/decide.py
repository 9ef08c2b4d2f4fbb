"""`decide`: how a plan is applied to a model, determined on the untouched module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.cost.memory.estimate_memory import ShardPlacement
from shardwise.errors import ModelError, UserError
from shardwise.model.expert_layers import expert_layers, without_router_outputs
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name
from shardwise.model.wiring import Wiring, read_wiring
from shardwise.parallel.activation_checkpointing import apply_recompute
from shardwise.parallel.chunked_loss import OutputHead, find_head
from shardwise.parallel.compile import check_compile, check_options
from shardwise.parallel.context_parallel.attention import check_context
from shardwise.parallel.context_parallel.inspect_attention import ContextLayout
from shardwise.parallel.experts.expert_parallel import check_experts
from shardwise.parallel.pipeline_parallel.schedule import check_pipeline, check_tied, stage_ranks
from shardwise.parallel.tensor_parallel.parallelize import TensorLayout, tensor_layout
from shardwise.plan.plan import Plan
from shardwise.plan.stage_balance import balanced_stages


@dataclass(frozen=True)
class Decision:
    """Decision made on the untouched module, before any rank changes anything."""

    wiring: Wiring | None
    layout: TensorLayout | None
    context: ContextLayout | None = None
    head: OutputHead | None = None
    experts: frozenset[str] = frozenset()


def decide_split(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> Decision:
    """Decide where pipeline stages begin and how tensor parallel shards the layers.

    No collective, nothing is changed.

    Raises:
        ModelError: the model does not support the plan; lists all obstacles, with what would work.
    """
    wiring = read_wiring(module, spec, plan.dims.pp, sample, plan.seq_len) if plan.dims.pp > 1 else None
    if wiring is not None:
        check_tied(spec, wiring, plan)
    layout = tensor_layout(module, spec, plan, sample, plan.tp_styles or None) if plan.dims.tp > 1 else None
    return Decision(wiring, layout)


def decide(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> Decision:
    """Check the plan's axes and options on ``module``, and decide how each is applied.

    No rank is needed, nothing is changed, and weights may be on the meta device.

    Raises:
        ModelError: all obstacles, with what would work.
    """
    problems: list[str] = []
    attention: list[ContextLayout] = []
    heads: list[OutputHead] = []
    checks: list[Callable[[], object]] = [lambda: check_options(plan)]
    if plan.dims.ep > 1:
        checks.append(lambda: check_experts(module, plan))
    if plan.dims.pp > 1:
        checks.append(lambda: check_pipeline(plan, len(spec.blocks)))
    if plan.dims.cp > 1:
        checks.append(lambda: attention.append(check_context(module, spec, plan, sample)))
    if plan.compile:
        checks.append(lambda: check_compile(module, spec, plan, sample))
    if plan.loss_chunks > 1:
        checks.append(lambda: heads.append(find_head(module, spec, plan, sample)))
    checks.append(lambda: decide_split(module, spec, plan, sample))
    found: object = None
    with without_router_outputs(module):
        for check in checks:
            try:
                found = check()
            except UserError as error:
                problems += [problem for problem in error.problems if problem not in problems]
    if problems or not isinstance(found, Decision):
        raise ModelError(*problems)
    spread = (name for layer in expert_layers(module) for name in layer.parameters) if plan.dims.ep > 1 else ()
    return replace(found, context=next(iter(attention), None), head=next(iter(heads), None), experts=frozenset(spread))


def check_model(spec: ModelSpec, plan: Plan) -> None:
    """Check that the model supports the plan, before anything is changed.

    Raises:
        ModelError: it does not; lists all obstacles.
    """
    problems: list[str] = []
    if not spec.num_trainable:
        frozen = f"all {len(spec.parameters)} parameters are frozen" if spec.parameters else "it has no parameter"
        raise ModelError(f"the model has no trainable parameters: {frozen}; leave requires_grad True on some")
    if plan.recompute != "none" and not spec.blocks:
        apply_recompute(nn.Module(), plan.recompute, ())
    if (plan.recompute_layers or 0) > len(spec.blocks):
        most = len(spec.blocks)
        raise ModelError(
            f"recompute_layers {plan.recompute_layers} is more than the model's {most} blocks; give at most {most}, or "
            "leave it out for all"
        )
    dims = plan.dims
    if plan.parsed.shards_parameters or (dims.tp * dims.pp > 1 and dims.dp * dims.cp > 1):  # FSDP2 wraps it
        units = [[p for p in spec.parameters if p.block == block] for block in (*spec.blocks, None)]
        odd = [p for p in spec.parameters if not p.shape or not p.num_elements]
        problems += [f"{plan.strategy} cannot shard '{p.name}' of shape {p.shape}; give it shape (1,)" for p in odd[:3]]
    else:
        units = [[p for p in spec.parameters if p.trainable]] if plan.parsed.base == "zero1" else []
    for unit in units:
        kinds = sorted({p.dtype for p in unit if p.trainable})  # frozen parameters may be stored in any dtype
        if len(kinds) > 1:
            examples = " and ".join(
                f"'{next(p.name for p in unit if p.trainable and p.dtype == kind)}' {kind}" for kind in kinds
            )
            problems.append(f"{plan.strategy} needs one dtype for what it handles together, got {examples}; cast one")
            break
    if problems:
        raise ModelError(*(f"{problem}, or use ddp" for problem in problems))


def refuse_renorm(module: nn.Module, plan: Plan) -> None:
    """Refuse an embedding with ``max_norm`` on several ranks.

    It rescales the rows that its rank looks up, in place, so replicas and shards diverge.

    Raises:
        ModelError: there is one, and more than one rank.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None and plan.dims.world_size > 1:
            raise ModelError(
                f"'{clean_name(name)}' has max_norm={part.max_norm:g}: its forward changes the weight rows that "
                f"a rank looks up, and under {plan.strategy} other ranks keep others; scale the rows after the "
                "lookup (functional.normalize), or after step.update on all ranks, and leave max_norm out"
            )


def with_stages(plan: Plan, wiring: Wiring | None) -> Plan:
    """Write the blocks of each pipeline stage into a plan without them, balanced by the blocks' operations."""
    if wiring is None or plan.stage_blocks is not None:
        return plan
    stages = plan.dims.pp * plan.virtual_stages
    counts = balanced_stages(wiring.block_flops, wiring.before_flops, wiring.after_flops, stages)
    return plan.model_copy(update={"stage_blocks": counts})


def parts_of(decision: Decision, spec: ModelSpec, plan: Plan) -> ShardPlacement:
    """Return how parameters are placed, for estimates of a rank's memory."""
    wiring, shard_dim = decision.wiring, decision.layout.shard_dim if decision.layout is not None else {}
    if wiring is None:
        return ShardPlacement(shard_dim, experts=decision.experts)
    ranks, counts = stage_ranks(plan), with_stages(plan, wiring).stage_blocks or ()
    stage_of = {block: stage for stage, block in zip(_stage_numbers(counts), spec.blocks, strict=True)}
    names: list[set[str]] = [set() for _ in range(plan.dims.pp)]
    for parameter in spec.parameters:
        every = {parameter.name, *parameter.aliases}
        stages = {stage_of[parameter.block]} if parameter.block is not None else set()
        stages |= {0} if every & wiring.before else set()
        stages |= {len(ranks) - 1} if every & wiring.after else set()
        for stage in stages or {len(ranks) - 1}:
            names[ranks[stage]].add(parameter.name)
    return ShardPlacement(shard_dim, tuple(frozenset(stage_names) for stage_names in names), decision.experts)


def _stage_numbers(counts: Sequence[int]) -> list[int]:
    return [stage for stage, count in enumerate(counts) for _ in range(count)]
