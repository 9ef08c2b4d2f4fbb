# shows: result all-reduces in a step
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x):
        return self.second(self.first(x).relu())


def main():
    dist.init_process_group("gloo")
    model = DDP(Net(), find_unused_parameters=True)  # fault
    with torch.profiler.profile() as profile:
        model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
    return sum(event.name == "gloo:all_reduce" for event in profile.events())
