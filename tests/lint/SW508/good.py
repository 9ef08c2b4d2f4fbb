import os

import torch
import torch.distributed as dist


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    return torch.device(f"cuda:{dist.get_rank() % torch.cuda.device_count()}")


def worker(rank):
    torch.cuda.set_device(rank)
