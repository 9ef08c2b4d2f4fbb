"""The device mesh of a plan: one axis for each degree that the strategy uses."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import PlanError
from shardwise.plan.plan import Plan


def build_mesh(plan: Plan, world_size: int) -> DeviceMesh | None:
    """The mesh that parameters are sharded over; ``None`` where parameters stay whole. One rank has one axis.

    Raises:
        PlanError: the plan is for another number of ranks.
    """
    if plan.dims.world_size != world_size:
        raise PlanError(
            f"the plan is for {plan.dims.world_size} ranks ({plan.dims}), but {world_size} are running; "
            f"start {plan.dims.world_size} ranks or make a new plan"
        )
    strategy = plan.parsed
    if not strategy.shards_parameters:
        return None
    if strategy.base == "hsdp" and world_size > 1:
        shape = (plan.dims.dp_replicate, plan.dims.dp_shard)
        return init_device_mesh(plan.device, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh(plan.device, (plan.dims.dp_shard,), mesh_dim_names=("dp_shard",))
