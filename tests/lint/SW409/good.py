import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer


def main():
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        print(len(optimizer.state_dict()))
    dist.destroy_process_group()
