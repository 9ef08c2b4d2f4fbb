import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([0])
    if rank < 1:
        print(group)
    both = dist.new_group([0, 1])
    value = torch.ones(1)
    dist.all_reduce(value, group=both)
    dist.destroy_process_group()
