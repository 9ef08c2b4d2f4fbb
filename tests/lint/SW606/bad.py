import torch
from torch import nn


def train(loader, n):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    for step, x in enumerate(loader):
        loss = model(x).mean() / n
        loss.backward()
        if (step + 1) % n == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()  # fault
