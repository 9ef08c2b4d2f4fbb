import time

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1)
    path = "start.pt"
    if dist.get_rank() == 0:
        time.sleep(0.5)  # a slow disk
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, map_location="cpu"))
    dist.destroy_process_group()
