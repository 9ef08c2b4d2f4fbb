import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = torch.randn(17, 1)
    mine = data[: len(data) // world_size * world_size][rank::world_size]
    loader = DataLoader(mine, batch_size=4)
    model = DDP(nn.Linear(1, 1))
    for batch in loader:
        model(batch).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
