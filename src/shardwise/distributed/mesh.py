"""Device meshes of a plan: one axis for each degree that the strategy uses."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import PlanError
from shardwise.plan.plan import Plan
from shardwise.units import counted


@dataclass(frozen=True)
class Meshes:
    """Mesh axes of a rank; ``None`` where the plan has no such axis.

    ``data`` is the mesh that gradients are reduced over: ``dp_shard``, or ``dp_replicate × dp_shard`` where weights
    are replicated too. Ranks of a context-parallel group have equal weights and different tokens, so they are part of
    its last axis (of ``dp_replicate`` where nothing is sharded).
    """

    data: DeviceMesh
    tp: DeviceMesh | None
    pp: DeviceMesh | None
    cp: DeviceMesh | None

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks that gradients are reduced over."""
        return int(self.data.size())


def build_mesh(plan: Plan, world_size: int) -> Meshes | None:
    """Build the meshes of ``plan``.

    ``None`` for replicated parameters and distinct samples per rank. Collective.

    Raises:
        PlanError: the plan is for a different number of ranks.
    """
    dims, strategy = plan.dims, plan.parsed
    if dims.world_size != world_size:
        raise PlanError(
            f"the plan is for {counted(dims.world_size, 'rank')} ({dims}), but {world_size} are running; "
            f"start {counted(dims.world_size, 'rank')} or make a new plan"
        )
    if not strategy.shards_parameters and not dims.splits_model:
        return None
    shard = dims.dp_shard * dims.cp if strategy.shards_parameters else 1
    replicate = dims.world_size // (dims.tp * dims.pp * shard)
    sizes = {"pp": dims.pp, "dp_replicate": replicate, "dp_shard": shard, "tp": dims.tp}
    data_axes = ["dp_shard"] if replicate == 1 else ["dp_replicate", "dp_shard"]
    kept = {axis: size for axis, size in sizes.items() if size > 1 or axis in data_axes}
    root = init_device_mesh(plan.device, tuple(kept.values()), mesh_dim_names=tuple(kept))

    def axis(*names: str) -> DeviceMesh:
        return root if names == root.mesh_dim_names else root[names if len(names) > 1 else names[0]]

    context = None
    if dims.cp > 1:
        shape = (world_size // (dims.cp * dims.tp), dims.cp, dims.tp)
        context = init_device_mesh(plan.device, shape, mesh_dim_names=("others", "cp", "tp"))["cp"]
    data = axis(*data_axes)
    return Meshes(
        data=data,
        tp=axis("tp") if dims.tp > 1 else None,
        pp=axis("pp") if dims.pp > 1 else None,
        cp=context,
    )
