import torch
from torch import nn


def main(n=4, updates=4):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=updates)
    rates = []
    for step, x in enumerate(torch.ones(updates * n, 2, 8)):
        loss = model(x).mean() / n
        loss.backward()
        if (step + 1) % n == 0:
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return rates
