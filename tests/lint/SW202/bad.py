import torch
import torch.nn.functional as F
from torch import nn


def train(loader, accumulation):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # fault
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
