import torch
import torch.nn.functional as F
from torch import nn


def train(windows):
    model = nn.Linear(8, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    for window in windows:
        tokens = sum((labels != -100).sum() for _, labels in window)
        for x, labels in window:
            loss = F.cross_entropy(model(x), labels, ignore_index=-100, reduction="sum")
            (loss / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
