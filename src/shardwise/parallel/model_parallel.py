"""Plans that cut the model itself: pipeline stages, tensor parallel inside each, data parallel around both.

Decide on the untouched module → cut stages → tensor-parallel forwards → context → recompute → compile → weights and
data parallel, unit by unit. Every rank takes part in sending every unit (rank 0's weights) and keeps its own part, so
the peak is what a rank keeps plus one whole unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from shardwise.cost.memory.estimate_memory import Parts
from shardwise.distributed.mesh import Meshes
from shardwise.distributed.process_group import send
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name
from shardwise.model.wiring import Wiring, read_wiring
from shardwise.parallel.activation_checkpointing import apply_recompute
from shardwise.parallel.chunked_loss import OutputHead
from shardwise.parallel.compile import Compiled, apply_compile, overlap_tensor_parallel
from shardwise.parallel.context_parallel.attention import apply_context
from shardwise.parallel.context_parallel.inspect_attention import ContextLayout
from shardwise.parallel.context_parallel.ulysses import Exchange
from shardwise.parallel.data_parallel.fsdp import gather_ahead
from shardwise.parallel.data_parallel.unit_order import keep_order
from shardwise.parallel.materialize import broadcast_buffers, move_buffers
from shardwise.parallel.ownership import Home, set_home
from shardwise.parallel.pipeline_parallel.schedule import Pipeline, check_tied, cut_stages, make_pipeline, stage_ranks
from shardwise.parallel.precision import apply_autocast, mixed_precision_policy
from shardwise.parallel.tensor_parallel.parallelize import TensorLayout, apply_tensor, distribute, tensor_layout
from shardwise.plan.plan import Plan
from shardwise.plan.stage_balance import balanced_stages


@dataclass(frozen=True)
class ShardedModel:
    """A model whose parts are spread over ranks; ``module`` is what this rank holds of it."""

    outer: nn.Module
    module: nn.Module
    blocks: tuple[nn.Module, ...]
    pipeline: Pipeline | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """What is decided on the untouched module, before any rank changes anything."""

    wiring: Wiring | None
    layout: TensorLayout | None
    context: ContextLayout | None = None
    head: OutputHead | None = None


def decide(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> Decision:
    """How ``module`` is cut; no collective, nothing is changed, weights may be on the meta device.

    Raises:
        ModelError: the model does not allow it; everything that is in the way, with what would work.
    """
    wiring = read_wiring(module, spec, plan.dims.pp, sample, plan.seq_len) if plan.dims.pp > 1 else None
    if wiring is not None:
        check_tied(spec, wiring, plan)
    layout = tensor_layout(module, spec, plan, sample, plan.tp_styles or None) if plan.dims.tp > 1 else None
    return Decision(wiring, layout)


def parts_of(decision: Decision, spec: ModelSpec, plan: Plan) -> Parts:
    """Which parameters lie where, for who predicts what a rank holds."""
    wiring, shard_dim = decision.wiring, decision.layout.shard_dim if decision.layout is not None else {}
    if wiring is None:
        return Parts(shard_dim)
    ranks = stage_ranks(plan)
    counts = balanced_stages(wiring.block_flops, wiring.before_flops, wiring.after_flops, len(ranks))
    stage_of = {block: stage for stage, block in zip(_stage_numbers(counts), spec.blocks, strict=True)}
    names: list[set[str]] = [set() for _ in range(plan.dims.pp)]
    for parameter in spec.parameters:
        every = {parameter.name, *parameter.aliases}
        stages = {stage_of[parameter.block]} if parameter.block is not None else set()
        stages |= {0} if every & wiring.before else set()
        stages |= {len(ranks) - 1} if every & wiring.after else set()
        for stage in stages or {len(ranks) - 1}:
            names[ranks[stage]].add(parameter.name)
    return Parts(shard_dim, tuple(frozenset(held) for held in names))


def _stage_numbers(counts: Sequence[int]) -> list[int]:
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def apply_split(
    module: nn.Module,
    spec: ModelSpec,
    plan: Plan,
    decision: Decision,
    meshes: Meshes,
    device: torch.device,
    sample: Any = None,
) -> ShardedModel:
    """Cut ``module`` as ``plan`` and ``decision`` say; see the top of this file. Collective."""
    move_buffers(module, device)
    broadcast_buffers(module)
    whole = {clean_name(name): parameter for name, parameter in module.named_parameters()}
    held, transient = _buffer_names(module)
    stages = cut_stages(module, spec, decision.wiring, plan, plan.dims.place(dist.get_rank()).pp)
    notes: tuple[str, ...] = decision.layout.notes if decision.layout is not None else ()
    blocks: dict[str, nn.Module] = {}
    exchange: Exchange | None = None
    compiled: Compiled | None = None
    overlap_tensor_parallel(plan, meshes.tp)
    for stage in stages.parts:
        own = [block for block in spec.blocks if block in stages.blocks_of(stage)]
        if decision.layout is not None and meshes.tp is not None:
            apply_tensor(stage, decision.layout, meshes.tp, plan)
        if meshes.cp is not None and decision.context is not None:
            exchange = apply_context(stage, decision.context, meshes.cp, exchange)
        wrapped = apply_recompute(stage, plan.recompute, own, compiled=plan.compile)
        compiled = apply_compile(wrapped, plan, compiled)
        blocks |= dict(zip(own, wrapped, strict=True))
    wrap, places = _Wrapper(plan, meshes), [_modules(stage) for stage in stages.parts]
    for unit in (*spec.blocks, None):
        for parameter in spec.parameters:
            if parameter.block == unit:
                _place(
                    whole.pop(parameter.name),
                    (parameter.name, *parameter.aliases),
                    places,
                    decision.layout,
                    meshes,
                    device,
                )
        if unit in blocks:
            wrap(blocks[unit], is_root=False)
    for stage in stages.parts:
        if wrap.is_needed:
            wrap(stage, is_root=True, is_last=stages.is_last(stage))
            gather_ahead(stage, [blocks[b] for b in spec.blocks if b in stages.blocks_of(stage)], plan.prefetch)
            keep_order(stage, meshes.data, pipelined=plan.dims.pp > 1)
        else:
            apply_autocast(stage, plan)
    outer = stages.container
    set_home(outer, _home(spec, stages.borrowed, held, transient, plan))
    pipeline = None if decision.wiring is None else make_pipeline(stages, plan, meshes, device)
    return ShardedModel(outer, outer, tuple(blocks[b] for b in spec.blocks if b in blocks), pipeline, notes)


class _Wrapper:
    """Data parallel around a unit by FSDP2; ``ddp`` is a mesh whose shard axis is 1, and one data rank needs nothing.

    DDP takes no DTensors. FSDP2 over shards of 1 keeps its one copy of a block's weights only while the block runs, and
    a pipeline knows how to drive it; torch's ``replicate`` keeps a second copy of the model from forward to backward.
    """

    def __init__(self, plan: Plan, meshes: Meshes) -> None:
        self.plan, self.mesh = plan, meshes.data
        self.is_needed = plan.parsed.shards_parameters or meshes.data_ranks > 1

    def __call__(self, unit: nn.Module, *, is_root: bool, is_last: bool = True) -> None:
        if not self.is_needed:
            return
        strategy = self.plan.parsed
        policy = mixed_precision_policy(self.plan, is_root=is_root and is_last)
        offload = CPUOffloadPolicy(pin_memory=self.plan.device == "cuda") if strategy.offload else OffloadPolicy()
        reshard = strategy.base != "zero2" and not is_root
        fully_shard(unit, mesh=self.mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)


def _place(
    source: nn.Parameter,
    names: Sequence[str],
    places: Sequence[dict[str, nn.Module]],
    layout: TensorLayout | None,
    meshes: Meshes,
    device: torch.device,
) -> None:
    """Send one parameter from rank 0 and put this rank's part of it wherever it is used here."""
    data = source.detach()
    if data.device != device:
        data = torch.empty_like(data, device=device) if data.device.type == "meta" else data.to(device)
    data = data.contiguous()  # FSDP2 takes no other
    if dist.get_world_size() > 1:
        send(data)
    made: nn.Parameter | None = None
    for module, key in _slots(places, names):
        if made is None:
            part = data if layout is None or meshes.tp is None else distribute(names[0], data, layout, meshes.tp)
            made = nn.Parameter(part, requires_grad=source.requires_grad)
        module._parameters[key] = made


def _modules(stage: nn.Module) -> dict[str, nn.Module]:
    """The modules of a stage by the user's names; of one that is wrapped, what is inside."""
    return {clean_name(f"{name}.").rstrip("."): module for name, module in stage.named_modules()}


def _slots(places: Sequence[dict[str, nn.Module]], names: Sequence[str]) -> Iterator[tuple[nn.Module, str]]:
    """Where the parameter of these names is registered on this rank; a stage leaves out what is not its own."""
    for modules in places:
        for name in names:
            parent, _, key = name.rpartition(".")
            module = modules.get(parent)
            if module is not None and module._parameters.get(key) is not None:
                yield module, key


def _buffer_names(module: nn.Module) -> tuple[dict[str, str], frozenset[str]]:
    """Persistent buffers in the model's order, each with the first name of the same tensor; names of the others."""
    first: dict[int, str] = {}
    kept, transient = {}, set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        for key, buffer in part._buffers.items():
            name = clean_name(f"{prefix}.{key}" if prefix else key)
            if key in part._non_persistent_buffers_set:
                transient.add(name)
            elif buffer is not None:
                kept[name] = first.setdefault(id(buffer), name)
    return kept, frozenset(transient)


def _home(
    spec: ModelSpec, borrowed: frozenset[str], buffers: dict[str, str], transient: frozenset[str], plan: Plan
) -> Home:
    stage_ranks = plan.dims.world_size // plan.dims.pp
    first = plan.dims.place(dist.get_rank()).pp * stage_ranks
    return Home(
        ranks=tuple(range(first, first + stage_ranks)),
        names=(*(p.name for p in spec.parameters), *dict.fromkeys(buffers.values())),
        aliases={alias: p.name for p in spec.parameters for alias in p.aliases}
        | {alias: name for alias, name in buffers.items() if alias != name},
        borrowed=borrowed,
        transient=transient,
    )
