import torch
import torch.nn.functional as F
from torch import nn


def main(accumulation=4):
    torch.manual_seed(0)
    model = nn.Linear(8, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [(torch.randn(3, 8, dtype=torch.float64), torch.tensor([0, 1, 1])) for _ in range(accumulation)]
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / accumulation
        loss.backward()
        if (step + 1) % accumulation == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return norm.item()


def train_sums(loader, accumulation, tokens):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        if (step + 1) % accumulation == 0:
            for parameter in model.parameters():
                parameter.grad /= tokens
            optimizer.step()
            optimizer.zero_grad()
