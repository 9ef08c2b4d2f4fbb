import torch
from torch import nn


def train(loader, accum_steps):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model(x).mean() / accum_steps
        loss.backward()
        optimizer.step()  # fault
        optimizer.zero_grad()
