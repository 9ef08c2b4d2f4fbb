import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard


def build(local_rank):
    dist.init_process_group("nccl")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.to(local_rank)  # fault
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def build_older():
    model = nn.Linear(4, 4).cuda()  # fault
    return FSDP(model)


def build_at_once(device):
    return FSDP(nn.Linear(4, 4).to(device))  # fault
