# shows: result gradients are equal on both ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    model = DDP(model)
    model.module[0].requires_grad_(True)  # fault
    x = torch.randn(2, 4, dtype=torch.float64)[dist.get_rank()]
    model(x).square().sum().backward()
    grads = [torch.empty(4, 4, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(grads, model.module[0].weight.grad)
    dist.destroy_process_group()
    return grads[0].equal(grads[1])
