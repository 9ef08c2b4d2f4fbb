# shows: result outputs before and after a step are the same
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # fault
    fully_shard(model)
    before = model(torch.ones(4)).sum().item()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    after = model(torch.ones(4)).sum().item()
    dist.destroy_process_group()
    return before == after
