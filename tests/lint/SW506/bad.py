# shows: result relative error of the gradient, against all samples in one process
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).double()  # fault
    loader = DataLoader(images, batch_size=2, sampler=DistributedSampler(images, shuffle=False))
    model(images).pow(3).mean().backward()
    exact = model[0].weight.grad.clone()
    model.zero_grad()
    model = DDP(model)
    for batch in loader:
        model(batch).pow(3).mean().backward()
    dist.destroy_process_group()
    return round(((model.module[0].weight.grad - exact).norm() / exact.norm()).item(), 6)
