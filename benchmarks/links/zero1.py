"""Step time of PyTorch's ZeroRedundancyOptimizer over that of `shardwise`'s zero1, which sends small weights together.

    python -m benchmarks.links.zero1 --output benchmarks/links/results

Two ranks under DDP, on loopback and over links of known speed and delay between two network namespaces, in turn in one
process tree; a loss that differs stops the benchmark. Needs root for the links, and a machine with nothing else to do:
the load average is kept beside each row.
"""

from __future__ import annotations

import warnings

import torch
from benchmarks.links.in_turn import Contender, in_turn, run, small_llama
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.data_parallel.ddp import shard_optimizer

WIDTHS = ((64, 4), (128, 8), (256, 4))  # hidden size, blocks: weights of 16, 64 and 256 KiB and more


def ranks(steps: int) -> None:
    """What each rank does."""
    for width, blocks in WIDTHS:
        in_turn({name: _build(width, blocks, ours=name == "ours") for name in ("plain", "ours")}, steps)


def _build(width: int, blocks: int, *, ours: bool) -> Contender:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(small_llama(width, blocks), gradient_as_bucket_view=True)
    if ours:
        return model, shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)


if __name__ == "__main__":
    run("benchmarks.links.zero1", str(__doc__), ("loopback", "1gbit", "1gbit-1ms", "1gbit-10ms"), ranks)
