import os

import torch
import torch.distributed as dist


def total(count):
    value = torch.tensor(count)
    dist.all_reduce(value)  # fault
    return value.item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    print(total(3))
    dist.destroy_process_group()
