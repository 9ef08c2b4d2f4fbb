import torch
import torch.nn.functional as F
from torch import nn


def train(loader, grad_accum):
    model = nn.Linear(8, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (x, labels) in enumerate(loader):
        loss = F.cross_entropy(model(x), labels, ignore_index=-100)
        (loss / grad_accum).backward()  # fault
        if (step + 1) % grad_accum == 0:
            optimizer.step()
            optimizer.zero_grad()
