import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    value = torch.ones(1)
    try:
        dist.all_reduce(value)
    finally:
        dist.destroy_process_group()
