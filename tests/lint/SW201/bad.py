# shows: result norm of the gradient
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 1).double())
    x = torch.randn(2, 3, 4, dtype=torch.float64)[dist.get_rank()]
    loss = model(x).square().mean()
    loss = loss / dist.get_world_size()  # fault
    loss.backward()
    norm = model.module.weight.grad.norm().item()
    dist.destroy_process_group()
    return round(norm, 6)
