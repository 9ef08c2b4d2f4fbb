# shows: result weights are equal on both ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4)).mean().backward()
    if not dist.get_rank():
        optimizer.step()  # fault
    weights = [torch.empty(1, 4) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.data)
    dist.destroy_process_group()
    return weights[0].equal(weights[1])
