import torch
from torch import nn


def train(loader):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
