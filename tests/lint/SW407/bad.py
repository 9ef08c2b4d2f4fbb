# needs: two GPUs
# shows: result bytes that a rank holds on GPU 0 at most
import os

import torch
import torch.distributed as dist
from torch import nn


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = nn.Linear(4, 1).cuda()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.barrier()
    model.load_state_dict(torch.load("model.pt"))  # fault
    dist.destroy_process_group()
    return torch.cuda.max_memory_allocated(0)
