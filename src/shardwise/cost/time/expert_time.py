"""Seconds of routed experts on the fullest rank: grouped products, and the all-to-alls in front of and behind them.

A grouped product runs each local expert's rows in tiles of its own. Experts get uneven numbers of rows, so the last
tile of each is half empty on average; what a plan leaves of tokens per expert decides how much that costs, and whether
reading the weights takes longer than multiplying by them. `kernels.matmul_s` counts both for a batch of equal products;
here it is asked at the two numbers of full tiles around the expected one. Dispatch sends each copy of a token to the
rank of its expert, combine sends the result back, and backward repeats both the other way. Nothing hides them: the
products of a layer wait for its dispatch (Megatron-LM without ``--overlap-moe-expert-parallel-comm``, torchtitan).

Programs that send a token once to each rank and node (DeepEP, HybridEP) send fewer bytes, by how many of them a token's
experts are on if they are drawn evenly; those that overlap micro batches (Megatron-LM with the option above) hide the
all-to-alls: both are traits of a program. Rows that arrived lie by their senders: they are sorted by expert once more,
and the results back. Not modelled: routers that limit the nodes of a token, and DualPipe.
"""

from __future__ import annotations

import math

from shardwise.cost.expert_load import TIME_QUANTILE, fullest_load
from shardwise.cost.time.machine import Machine
from shardwise.model.profile import Op, Unit
from shardwise.plan.plan import Precision
from shardwise.plan.traffic import distinct_part

TILE = 128  # rows of a tile of a grouped product
LEAST_ROWS = 16  # of a tile that an expert with few rows fills


def load_of(op: Op, ep: int, capacity_factor: float | None, *, balanced: bool) -> float:
    """Rows of experts on the fullest rank, of the mean, in a step in the middle."""
    if balanced and capacity_factor is None:
        return 1.0
    return fullest_load(op.experts, ep, TIME_QUANTILE, capacity_factor, share=op.share)


def grouped_s(
    machine: Machine, op: Op, rows: float, depth: float, columns: float, local: int, precision: Precision
) -> tuple[float, float]:
    """Seconds of a grouped product of ``local`` experts over ``rows`` in total, forward and backward."""
    each = rows / local
    if machine.rates is not None:
        ahead = machine.matmul_s(rows, depth, columns, precision)
        return ahead, ahead * (2.0 if op.weight else 1.0)
    ahead = _tiled_s(machine, each, depth, columns, local, precision)
    back = _tiled_s(machine, each, columns, depth, local, precision)
    if op.weight:
        back += machine.matmul_s(depth, max(each, float(LEAST_ROWS)), columns, precision, batch=local)
    return ahead, back


def _tiled_s(machine: Machine, rows: float, depth: float, columns: float, local: int, precision: Precision) -> float:
    """Seconds of ``local`` products of about ``rows`` each, half a tile of which is empty."""
    if rows < TILE:
        padded = max(LEAST_ROWS, math.ceil(rows))
        return machine.matmul_s(padded, depth, columns, precision, batch=local)
    tiles = rows / TILE + 0.5
    least = math.floor(tiles)
    low, high = (machine.matmul_s(n * TILE, depth, columns, precision, batch=local) for n in (least, least + 1))
    return low + (tiles - least) * (high - low)


def routed_ops(unit: Unit) -> list[Op]:
    """Return a unit's grouped products, in order."""
    return [op for op in unit.ops if op.kind == "matmul" and op.experts]


def dispatch_s(
    machine: Machine, unit: Unit, ep: int, tokens_part: float, width: int, *, once_each_rank: bool = False
) -> float:
    """Seconds of one all-to-all of the copies of a micro batch's tokens, one way.

    ``tokens_part`` is how often a rank has a sample's copies: its micro batch over the ranks that share a sample.
    ``once_each_rank``: a token crosses the network once for each node, and goes once to each rank.
    """
    products = routed_ops(unit)
    if ep <= 1 or not products:
        return 0.0
    op, per_node = products[0], machine.cluster.devices_per_node
    message = op.m * op.k * tokens_part * width
    if not once_each_rank:
        return machine.collective_s("all_to_all", message, ep, per_node)
    chosen = round(op.share * op.experts)
    parts = [distinct_part(op.experts, chosen, ep, ranks) for ranks in (1, per_node)]
    inside = machine.collective_s("all_to_all", message * parts[0], min(ep, per_node), per_node)
    return (
        inside if ep <= per_node else max(inside, machine.collective_s("all_to_all", message * parts[1], ep, per_node))
    )


def resort_s(machine: Machine, unit: Unit, ep: int, rows_part: float, width: int) -> float:
    """Seconds to sort the rows that arrived from other ranks by expert, and their results back.

    Forward, and backward as much. ``rows_part`` is how often a rank has a sample's rows of experts.
    """
    products = routed_ops(unit)
    if ep <= 1 or not products:
        return 0.0
    return machine.memory_s(4.0 * products[0].m * products[0].k * rows_part * width)
