# shows: result norm of the gradient
import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)[dist.get_rank()]
    loss = model(x).square().mean()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)  # fault
    norm = model.weight.grad.norm().item()
    dist.destroy_process_group()
    return round(norm, 6)
