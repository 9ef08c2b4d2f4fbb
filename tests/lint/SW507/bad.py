# needs: two GPUs
# shows: error Duplicate GPU detected
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("nccl")
    model = DDP(nn.Linear(4, 1).cuda())  # fault
    dist.destroy_process_group()
    return str(model.device)
