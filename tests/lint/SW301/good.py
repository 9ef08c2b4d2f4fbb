import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_main = rank == 0
    value = torch.ones(1)
    dist.all_reduce(value)
    if is_main:
        print(value.item() / dist.get_world_size())
        dist.broadcast(value, 0)
    else:
        dist.broadcast(value, 0)
    dist.destroy_process_group()


def evaluate(distributed):
    if not distributed or dist.get_rank() == 0:
        metric = torch.ones(1)
        if distributed:
            dist.broadcast(metric, 0)
    else:
        metric = torch.zeros(1)
        dist.broadcast(metric, 0)
    return metric


def share(names, ready):
    if ready and dist.get_rank() == 0:
        dist.broadcast_object_list(names)
    else:
        dist.broadcast_object_list(names)
