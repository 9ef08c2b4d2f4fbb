# needs: two GPUs
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    images = torch.randn(4, 3, 4, 4, dtype=torch.float64).cuda()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).double().cuda()
    loader = DataLoader(images, batch_size=2, sampler=DistributedSampler(images, shuffle=False))
    model(images).pow(3).mean().backward()
    exact = model[0].weight.grad.clone()
    model.zero_grad()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model)
    for batch in loader:
        model(batch).pow(3).mean().backward()
    dist.destroy_process_group()
    return round(((model.module[0].weight.grad - exact).norm() / exact.norm()).item(), 6)
