# needs: two GPUs
import os

import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    value = torch.tensor(3, device="cuda")
    dist.all_reduce(value)
    moved = torch.tensor(3).cuda()
    dist.all_reduce(moved)
    dist.destroy_process_group()
    return value.item()
