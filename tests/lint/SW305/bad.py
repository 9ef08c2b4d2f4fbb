# shows: hang
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                print(model(torch.ones(2, 4)).sum().item())  # fault
    dist.barrier()
    dist.destroy_process_group()
