from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(loader, n):
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for step, x in enumerate(loader):
        last = (step + 1) % n == 0
        with nullcontext() if last else model.no_sync():
            loss = model(x).mean() / n
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
