# shows: hang
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(nn.Linear(2, 1))
    for step in range(4):
        loss = model(torch.ones(2)).mean()
        loss.backward()
        if rank == 0 and step == 1:
            print("good enough")
            break  # fault
    dist.barrier()
    dist.destroy_process_group()
