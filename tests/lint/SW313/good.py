import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(2, 1))
    batches = torch.ones(3, 2)
    if dist.get_rank() == 1:
        batches[2] = float("nan")
    for x in batches:
        loss = model(x).mean()
        bad = torch.isnan(loss.detach()).float()
        dist.all_reduce(bad)
        if bad.item():
            continue
        loss.backward()
    dist.barrier()
    dist.destroy_process_group()


def mean_over_ranks(loss):
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def train(loader):
    model = DDP(nn.Linear(2, 1))
    for x in loader:
        loss = model(x).mean()
        reduced = reduce_loss(loss.detach())
        if torch.isnan(reduced).any():
            continue
        loss.backward()


reduce_loss = mean_over_ranks
