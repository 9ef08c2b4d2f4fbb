# shows: hang
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(2, 1))
    batches = [torch.ones(2), torch.ones(2 + dist.get_rank())]
    for x in batches:
        try:
            loss = model(x).mean()
            loss.backward()
        except RuntimeError as error:  # fault
            print(f"skipped: {error}")
    dist.barrier()
    dist.destroy_process_group()
