# shows: hang
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(2, 1))
    batches = torch.ones(3, 2)
    if dist.get_rank() == 1:
        batches[2] = float("nan")
    for x in batches:
        loss = model(x).mean()
        if torch.isnan(loss):  # fault
            continue
        loss.backward()
    dist.barrier()
    dist.destroy_process_group()
