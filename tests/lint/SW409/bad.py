# shows: error consolidate_state_dict
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer


def main():
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if dist.get_rank() == 0:
        print(len(optimizer.state_dict()))  # fault
    dist.destroy_process_group()
