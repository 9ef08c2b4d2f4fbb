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
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to(local_rank)  # buffers
    dist.destroy_process_group()
    return torch.cuda.max_memory_allocated()


def build_older():
    model = nn.Linear(4, 4).to(torch.bfloat16)
    return FSDP(model, device_id=torch.cuda.current_device())


def build_at_once(x, device):
    cpu = torch.device("cpu")
    other = nn.Linear(4, 4).to(cpu)
    fully_shard(other)
    return FSDP(nn.Linear(4, 4), device_id=device), x.to(device)
