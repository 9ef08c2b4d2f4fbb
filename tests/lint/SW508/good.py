import os

import torch
import torch.distributed as dist


def main():
    dist.init_process_group()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    dist.destroy_process_group()
    return str(device)


def worker(rank):
    torch.cuda.set_device(rank)
    return torch.device(f"cuda:{dist.get_rank() % torch.cuda.device_count()}")
