import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([0])
    if rank < 1:
        print(group)
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
