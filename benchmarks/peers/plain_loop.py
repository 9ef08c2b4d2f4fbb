"""The hand-written training step for a plan, which Shardwise is measured against."""

from __future__ import annotations

from benchmarks.peers.plain import data_parallel, plain_ddp, plain_fsdp, plain_step, plain_zero1
from benchmarks.peers.plain_pipeline import plain_pipeline
from benchmarks.peers.plain_tensor import plain_tensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.bench.step.step_bench import MakeOptimizer, TrainStep
from shardwise.distributed.process_group import Ranks
from shardwise.plan.plan import Plan


def plain_loop(
    model: nn.Module, plan: Plan, ranks: Ranks, make_optimizer: MakeOptimizer, clip_norm: float | None
) -> TrainStep:
    """The hand-written training step for ``plan``; see `check_plain` for what there is. Collective.

    It takes the micro batches of a step and returns the loss: of this rank, or of the last stage.
    """
    dims = plan.dims
    if dims.tp * dims.pp == 1:
        sharded = plan.parsed.base == "fsdp"
        model = plain_fsdp(model, ranks.device, dims.dp) if sharded else plain_ddp(model, ranks.device)
        optimizer = make_optimizer(list(model.parameters()))
        return plain_step(model, plain_zero1(optimizer) if plan.parsed.base == "zero1" else optimizer, clip_norm)
    sizes = {"pp": dims.pp, "dp": dims.dp, "tp": dims.tp}
    kept = {axis: size for axis, size in sizes.items() if size > 1}
    mesh = init_device_mesh(ranks.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    model.to(ranks.device)
    if dims.pp > 1:
        return plain_pipeline(model, plan, mesh, ranks, make_optimizer, clip_norm)
    plain_tensor(model, mesh["tp"], plan)
    data_parallel(model, list(model.model.layers), mesh, plan)  # type: ignore[union-attr, arg-type]
    return plain_step(model, make_optimizer(list(model.parameters())), clip_norm, plan)
