# shows: error Expected to have finished reduction
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    for parameter in model.module[0].parameters():
        parameter.requires_grad = False  # fault
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
    dist.destroy_process_group()
