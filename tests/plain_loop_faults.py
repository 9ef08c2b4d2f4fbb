"""A training loop of plain PyTorch with the watchdog beside it; a rank (1) comes to harm in step 6, or at the end."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise

STEPS, STEP = 8, 6


def main() -> None:
    kind, output = sys.argv[1:3]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    harmed = dist.get_rank() == (int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    shardwise.watch_loop(model, optimizer, output=output)
    for number in range(1, STEPS + 1 + (kind in ("batch", "lost") and harmed)):
        if harmed and number == (STEPS + 1 if kind in ("batch", "lost") else STEP):
            Path(output, "fault").write_text(str(time.time()))
        if kind == "sleep" and harmed and number == STEP:
            time.sleep(1000.0)
        if kind == "shape" and number == STEP:
            dist.all_reduce(torch.ones(5 if harmed else 3))
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "save" and number == STEP and not harmed:
            time.sleep(4.0)  # one rank alone saves
    if kind != "lost":
        dist.all_reduce(torch.ones(1))  # as a loop does with what it has counted
        if harmed and kind == "none":
            time.sleep(4.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
