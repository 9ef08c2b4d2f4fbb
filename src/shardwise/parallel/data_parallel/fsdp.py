"""Sharded parameters: FSDP2's ``fully_shard`` on each block, then on the root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from shardwise.parallel.data_parallel.exchanged_gather import exchange_gathers
from shardwise.parallel.data_parallel.exchanged_sum import exchange_sums
from shardwise.parallel.data_parallel.unit_forwards import free_gathered
from shardwise.parallel.data_parallel.unit_order import keep_order
from shardwise.parallel.experts.expert_parallel import ExpertMeshes, spread_experts
from shardwise.parallel.fp8 import agree_on_scales, convert_unit
from shardwise.parallel.materialize import Fill, broadcast_buffers, materialize_unit
from shardwise.parallel.precision import mixed_precision_policy
from shardwise.plan.plan import Plan
from shardwise.plan.traffic import keeps_last_block


def apply_shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    plan: Plan,
    mesh: DeviceMesh,
    device: torch.device,
    fill: Fill | None = None,
    experts: ExpertMeshes | None = None,
) -> nn.Module:
    """Shard ``module`` in place with FSDP2: each block is a unit, the rest is the root's unit.

    A unit gets real weights (rank 0's, or from ``fill``) just before it is quantized and sharded, so the peak is the
    shards plus one full unit.

    Tied parameters stay tied because they are left to the root together. The root stays gathered from forward to
    backward (it is needed at the end of one and the start of the other); blocks do so only under ``zero2``, and the
    last one where `keeps_last_block` says so.
    """
    for block in blocks:
        keeps = block is blocks[-1] and keeps_last_block(plan)
        materialize_unit(block, device, fill)
        if experts is not None:
            spread_experts(block, plan, experts, keeps=keeps)
        convert_unit(block, plan)
        shard_unit(block, plan, mesh, is_root=False, keeps=keeps)
    materialize_unit(module, device, fill)
    broadcast_buffers(module)
    shard_unit(module, plan, mesh, is_root=True)
    if plan.weights == "masters" and plan.accumulate == "fp32":
        accumulate_in_fp32(module)
    gather_ahead(module, blocks, plan.prefetch)
    keep_order(module, mesh)
    overlap_over_gloo(module, plan, mesh)
    agree_on_scales(module)
    return module


def overlap_over_gloo(root: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Let gloo gather the next block and reduce the last one while a block computes its backward, both by exchange.

    FSDP2 leaves that to CUDA's streams, and waits for each collective where there are none. Stages of a pipeline have
    an order of their own, and only reduce by exchange.
    """
    backend = str(dist.get_backend(mesh.get_group(mesh.ndim - 1)))
    if not isinstance(root, FSDPModule) or (backend != "gloo" and (backend, plan.device) != ("fake", "cpu")):
        return
    pipelined = plan.dims.pp > 1
    exchange_sums(root, pipelined=pipelined)
    if plan.device == "cpu":
        exchange_gathers(root)
    if not pipelined:
        root._set_unshard_async_op(True)


def shard_unit(
    unit: nn.Module, plan: Plan, mesh: DeviceMesh, *, is_root: bool, is_last_stage: bool = True, keeps: bool = False
) -> None:
    """Shard one unit over ``mesh``; only the root of the last stage casts outputs back.

    ``keeps``: its weights stay gathered from forward to backward, as those of the root and all under ``zero2``.
    """
    strategy = plan.parsed
    fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=strategy.base != "zero2" and not is_root and not keeps,
        mp_policy=mixed_precision_policy(plan, is_root=is_root and is_last_stage),
        offload_policy=CPUOffloadPolicy(pin_memory=plan.device == "cuda") if strategy.offload else OffloadPolicy(),
    )


def accumulate_in_fp32(root: nn.Module) -> None:
    """Let sharded gradients rest in fp32, as they are reduced, and not in the type of their bf16 parameters."""

    def with_fp32(group: Any, first: Callable[[], None]) -> None:
        first()
        group._orig_dtype = torch.float32 if group._orig_dtype is not None else None

    for unit in root.modules():
        group: Any = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        if group is not None:
            group._init_mp_dtypes = partial(with_fp32, group, group._init_mp_dtypes)
    for parameter in root.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.grad_dtype = torch.float32


def gather_ahead(root: nn.Module, blocks: Sequence[nn.Module], depth: int) -> None:
    """Prefetch the weights of ``depth`` blocks ahead, in forward and backward.

    FSDP2 prefetches one block by itself, in the order that it observes; depth 1 keeps that. Blocks of one
    stage only.
    """
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    if depth < 2 or not isinstance(root, FSDPModule):
        return
    for index, block in enumerate(sharded):
        block.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + depth])
        block.set_modules_to_backward_prefetch(sharded[max(0, index - depth) : index][::-1])
    root.set_modules_to_forward_prefetch(sharded[:depth])
    root.set_modules_to_backward_prefetch(sharded[::-1][:depth])


def gathered_ahead(module: nn.Module) -> tuple[int, int]:
    """Return the largest prefetch depth in forward and in backward: 1 for FSDP2's default.

    0 where nothing is sharded.
    """
    states = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
    ahead = max((len(state._states_to_forward_prefetch) for state in states), default=0)
    back = max((len(state._states_to_backward_prefetch) for state in states), default=0)
    return (max(1, ahead), max(1, back)) if states else (0, 0)


def reshard(module: nn.Module) -> None:
    """Free the full parameters that a forward without a backward left gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            group: Any = part._get_fsdp_state()._fsdp_param_group
            if group is not None and group._training_state == TrainingState.FORWARD:
                group._training_state = TrainingState.IDLE  # it raised, and FSDP2 keeps some in a forward
            part.reshard()


def discard_gradients(outer: nn.Module) -> None:
    """Discard every gradient, also the unreduced ones that FSDP2 keeps of earlier micro batches.

    A forward or backward that raised is forgotten: FSDP2 would never end another backward.
    """
    for module in outer.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        group = state._fsdp_param_group
        state._state_ctx.post_backward_final_callback_queued = False  # one that raised never ended
        for fsdp_param in group.fsdp_params if group is not None else ():
            fsdp_param.unsharded_accumulated_grad = None
            full = getattr(fsdp_param, "_unsharded_param", None)
            if full is not None:
                full.grad = None
        free_gathered(module)
    for parameter in outer.parameters():
        parameter.grad = None
