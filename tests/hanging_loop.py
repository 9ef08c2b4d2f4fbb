"""A loop of one's own, in which rank 1 calls a collective that the other does not, in step 6; or sleeps there."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import shardwise


def main() -> None:
    torch.manual_seed(0)
    session = shardwise.start("fsdp", watch=True, output=sys.argv[1], receipts=False)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in session.steps([(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(40)]):
        if step.number == 6 and session.ranks.rank == 1:
            if sys.argv[2] == "sleep":
                time.sleep(1000.0)
            dist.all_reduce(torch.ones(3))
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets, reduction="sum"))
        step.update(optimizer)


if __name__ == "__main__":
    main()
