from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x):
        if x.mean() > 0:
            x = self.first(x)
        return self.second(x)


def build():
    return DDP(Net()), DDP(Branching(), find_unused_parameters=True)
