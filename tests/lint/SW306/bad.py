# shows: error No backend type associated with device type cpu
import torch
import torch.distributed as dist


def main():
    dist.init_process_group(backend="nccl")
    value = torch.tensor(3)
    dist.all_reduce(value)  # fault
    dist.destroy_process_group()
    return value.item()
