# needs: two GPUs
# shows: result bytes that a GPU holds at most, of 2,097,152 of the model
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    model.to(local_rank)  # fault
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    dist.destroy_process_group()
    return torch.cuda.max_memory_allocated()


def build_older():
    model = nn.Linear(4, 4).cuda()  # fault
    return FSDP(model)


def build_at_once(device):
    return FSDP(nn.Linear(4, 4).to(device))  # fault
