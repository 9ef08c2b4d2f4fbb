# shows: error No backend type associated with device type cpu
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = nn.Linear(4, 1)
    model = DDP(model)
    model.to(device)  # fault
    dist.destroy_process_group()
    return str(model.device)
