# shows: hang
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank < 1:
        group = dist.new_group([0])  # fault
        print(group)
    both = dist.new_group([0, 1])
    value = torch.ones(1)
    dist.all_reduce(value, group=both)
    dist.destroy_process_group()
