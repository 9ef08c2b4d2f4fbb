"""Experts over ranks: each has some whole experts of every layer, and gets the tokens that chose them.

torchtitan's scheme: the ranks are data-parallel ones for all other weights. What a rank has of a layer's experts is
sharded again, by FSDP2, over the ranks with the same experts, and their gradient, which has the tokens of all ranks
already, is divided by the number of data-parallel ranks as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import ModelError
from shardwise.model.expert_layers import expert_layers
from shardwise.parallel.experts.dispatch import RowExchange, ScaledGradient, Share, Untouched, Whole, counts_from
from shardwise.parallel.precision import mixed_precision_policy
from shardwise.plan.divisibility import expert_problem
from shardwise.plan.plan import Plan

_MARK, _NUMBER = "_shardwise_experts", "_shardwise_num_experts"


@dataclass(frozen=True)
class ExpertMeshes:
    """``ep``: ranks with different experts; ``data``: those with the same ones; ``tp``: those with the same tokens.

    Under sequence parallel tensor-parallel ranks have different tokens in front of experts.
    """

    ep: DeviceMesh
    data: DeviceMesh
    tp: DeviceMesh | None


def expert_meshes(plan: Plan, tp: DeviceMesh | None) -> ExpertMeshes | None:
    """Build the experts' meshes; ``None`` without ``+ep``. Collective."""
    dims = plan.dims
    if dims.ep == 1:
        return None
    replicas = dims.world_size // (dims.pp * dims.expert_ranks)
    sizes = {"pp": dims.pp, "ep_replicate": replicas, "ep_shard": dims.expert_shards, "ep": dims.ep}
    names = ["ep_replicate", "ep_shard"] if replicas > 1 else ["ep_shard"]
    kept = {axis: size for axis, size in sizes.items() if size > 1 or axis in (*names, "ep")}
    root = init_device_mesh(plan.device, tuple(kept.values()), mesh_dim_names=tuple(kept))
    data = root[tuple(names)] if len(names) > 1 else root[names[0]]
    return ExpertMeshes(root["ep"], data, None if plan.sequence_parallel else tp)


def check_experts(module: nn.Module, plan: Plan) -> None:
    """Check that experts of ``module`` can be spread over ranks, and mark the layers.

    Raises:
        ModelError: they cannot; lists all obstacles.
    """
    if plan.dims.ep == 1:
        return
    layers = expert_layers(module)
    problems = [] if layers else [_NO_LAYER]
    problems += [
        f"'{layer.name}': {problem}" for layer in layers if (problem := expert_problem(layer.num_experts, plan.dims.ep))
    ]
    problems += [f"'{layer.name}' does not say num_experts, which is its part of them under +ep" for layer in layers
                 if getattr(layer.module, "num_experts", None) != layer.num_experts]  # fmt: skip
    if plan.compile:
        problems.append("the tokens of an expert differ in number from step to step; set compile to false")
    if problems:
        raise ModelError(*(f"{plan.strategy}: {problem}" for problem in dict.fromkeys(problems)))
    for layer in layers:  # a split model has other forwards
        layer.module.__dict__[_NUMBER] = layer.num_experts


_NO_LAYER = (
    "the model has no layer of experts that is known: stacked weights [experts, ...] in a module whose forward takes "
    "tokens, the experts of each (top_k_index) and their weights (top_k_weights), as transformers' experts do; use "
    "a strategy without +ep"
)


@dataclass
class ExpertsHere:
    """Experts of a layer on this rank: those from ``first`` on.

    ``scale`` makes FSDP2's mean over the ranks with the same experts one over all data-parallel ranks (a divide factor
    of its own is applied twice by torch 2.13 where only one rank has them). ``computed`` is called with the rows that
    are computed, and the expert of each, for receipts.
    """

    meshes: ExpertMeshes
    first: int
    number: int
    total: int
    scale: float
    computed: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    inner: Any = field(default=None)
    rows: int = 0  # that forwards have received, without recomputed ones


def experts_here(module: nn.Module) -> ExpertsHere | None:
    """Return what is on this rank of a layer's experts; ``None`` where they are not spread over ranks."""
    found: ExpertsHere | None = module.__dict__.get(_MARK)
    return found


def received_rows(module: nn.Module) -> int:
    """Return the rows that experts inside ``module`` have received on this rank so far."""
    return sum(here.rows for part in module.modules() if (here := experts_here(part)) is not None)


def spread_experts(unit: nn.Module, plan: Plan, meshes: ExpertMeshes, *, keeps: bool = False) -> None:
    """Keep this rank's experts of each layer inside ``unit``, shard them, and let tokens travel.

    ``unit`` has its full weights; no collective but FSDP2's own. ``keeps`` them gathered from forward to backward.
    """
    for module in unit.modules():
        if _NUMBER in module.__dict__ and any(True for _ in module.parameters()):  # a stage has others' without weights
            _spread(module, module.__dict__[_NUMBER], plan, meshes, keeps=keeps)


def _spread(module: nn.Module, total: int, plan: Plan, meshes: ExpertMeshes, *, keeps: bool) -> None:
    number = total // plan.dims.ep
    first = meshes.ep.get_local_rank() * number
    for key, parameter in list(module.named_parameters(recurse=False)):
        full = parameter.detach()
        full = full.to_local() if isinstance(full, DTensor) else full  # tensor parallel has it whole on each rank
        part = DTensor.from_local(full[first : first + number].clone(), meshes.ep, [Shard(0)], run_check=False)
        module._parameters[key] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    scale = meshes.data.size() / (plan.dims.dp * plan.dims.cp)
    here = ExpertsHere(meshes, first, number, total, scale, inner=module.forward)
    module.__dict__[_MARK] = here
    module.num_experts = number  # type: ignore[assignment]
    module.forward = _forward(module, here)
    _shard(module, plan, meshes.data, keeps=keeps)


def _shard(module: nn.Module, plan: Plan, mesh: DeviceMesh, *, keeps: bool) -> None:
    """Shard the experts of this rank by FSDP2 over the ranks that have the same ones."""
    shards = mesh.size(mesh.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard:
        local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if shards <= local.shape[0]:
            return Shard(0)
        return Shard(next((dim for dim in range(1, local.ndim) if local.shape[dim] % shards == 0), 0))

    policy = replace(mixed_precision_policy(plan, is_root=False), cast_forward_inputs=False)  # a router's stay fp32
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=plan.parsed.base != "zero2" and not keeps,
        shard_placement_fn=place,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(pin_memory=plan.device == "cuda") if plan.parsed.offload else OffloadPolicy(),
    )


def _forward(module: nn.Module, here: ExpertsHere) -> Any:
    """Return the forward of a layer whose experts are on several ranks."""

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        hidden, index, weights = hidden_states, top_k_index, top_k_weights
        tp = here.meshes.tp
        if tp is None:
            return _routed(module, here, hidden, index, weights)
        ranks, rank, number, group = tp.size(), tp.get_local_rank(), len(hidden), tp.get_group()
        first, end = number * rank // ranks, number * (rank + 1) // ranks
        part = Share.apply(hidden, first, end, group)
        chosen = Share.apply(weights, first, end, group)
        return Whole.apply(_routed(module, here, part, index[first:end], chosen), first, end, number, group)

    return forward


def _routed(
    module: nn.Module, here: ExpertsHere, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    group, ranks, top_k = here.meshes.ep.get_group(), here.meshes.ep.size(), index.shape[-1]
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=here.total)[: here.total]  # those for no expert are sorted behind
    incoming = counts_from(counts, group)  # [ranks, experts here]
    sends, receives = counts.reshape(ranks, -1).sum(1).tolist(), incoming.sum(1).tolist()
    order = order[: sum(sends)]
    if torch._C._current_graph_task_id() == -1:
        here.rows += sum(receives)
    rows = RowExchange.apply(hidden[order // top_k], sends, receives, group)
    expert = torch.arange(here.number, device=rows.device).repeat(ranks).repeat_interleave(incoming.reshape(-1))
    found = RowExchange.apply(_local(module, here, rows, expert), receives, sends, group)
    weighted = found * weights.reshape(-1)[order].unsqueeze(-1)
    out = torch.zeros_like(hidden)
    return out.index_add(0, order // top_k, weighted.to(out.dtype))


def _local(module: nn.Module, here: ExpertsHere, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Compute rows by the model's own forward, each by one expert of this rank with weight 1."""
    whole = module._parameters
    parts = {key: _scaled(p, here.scale) for key, p in whole.items() if p is not None}
    if not len(rows):
        return Untouched.apply(rows, *parts.values())
    if here.computed is not None:
        here.computed(rows, expert)
    object.__setattr__(module, "_parameters", parts)
    try:
        found: torch.Tensor = here.inner(rows, expert.unsqueeze(-1), rows.new_ones((len(rows), 1)))
    finally:
        object.__setattr__(module, "_parameters", whole)
    return found


def _scaled(parameter: torch.Tensor, scale: float) -> torch.Tensor:
    local: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local if scale == 1.0 else ScaledGradient.apply(local, scale)
