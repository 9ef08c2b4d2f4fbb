import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    dist.init_process_group("nccl")
    return DDP(nn.Linear(4, 1).cuda())  # fault
