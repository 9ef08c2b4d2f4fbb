# shows: result weights are equal on both ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 2, 4, dtype=torch.float64)[dist.get_rank()]
    with model.no_sync():  # fault
        for row in x:
            (model(row).square().mean() / 2).backward()
    optimizer.step()
    weights = [torch.empty(1, 4, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.data)
    dist.destroy_process_group()
    return weights[0].equal(weights[1])
