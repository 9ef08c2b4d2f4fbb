import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def evaluate(model):
    with torch.no_grad():
        return model(torch.ones(4)).sum().item()


def main():
    dist.init_process_group("gloo")
    model = nn.Linear(4, 4)
    fully_shard(model)
    value = evaluate(model)
    if dist.get_rank() == 0:
        print(value)
    dist.barrier()
    dist.destroy_process_group()
