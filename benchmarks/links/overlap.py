"""Step time of plain FSDP2 over that of FSDP2 as `shardwise` runs it over gloo: exchanged, behind the backward.

    python -m benchmarks.links.overlap --output benchmarks/links/results

Two ranks, on loopback and over links of known speed between two network namespaces. Both models have the same weights
and batches, and step in turn in one process tree; a loss that differs stops the benchmark. Needs root for the links,
and a machine with nothing else to do: the load average is kept beside each row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.links.in_turn import in_turn, run, small_llama
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.parallel.data_parallel.fsdp import overlap_over_gloo
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.traffic import keeps_last_block

WIDTHS = ((192, 4), (256, 6))  # hidden size, blocks


def ranks(steps: int) -> None:
    """What each rank does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for width, blocks in WIDTHS:
        models = {name: _build(width, blocks, mesh, ours=name == "ours") for name in ("plain", "ours")}
        in_turn({name: (m, torch.optim.AdamW(m.parameters(), fused=True)) for name, m in models.items()}, steps)


def _build(width: int, blocks: int, mesh: DeviceMesh, *, ours: bool) -> nn.Module:
    model = small_llama(width, blocks)
    plan = Plan(strategy="fsdp", dims=dims_for(parse_strategy("fsdp"), mesh.size()), device="cpu")
    for block in model.model.layers:
        keeps = ours and block is model.model.layers[-1] and keeps_last_block(plan)
        fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if ours:
        overlap_over_gloo(model, plan, mesh)
    return model


if __name__ == "__main__":
    run("benchmarks.links.overlap", str(__doc__), ("loopback", "1gbit"), ranks)
