# shows: hang
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_main = rank == 0
    value = torch.ones(1)
    if is_main:
        dist.all_reduce(value)  # fault
        print(value.item() / dist.get_world_size())
    dist.destroy_process_group()
