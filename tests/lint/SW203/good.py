import torch
from torch import nn


def train(loader, accum_steps):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, x in enumerate(loader):
        loss = model(x).mean() / accum_steps
        loss.backward()
        if (step + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def train_inner(batches, accum_steps):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for window in batches:
        for micro in range(accum_steps):
            loss = model(window[micro]).mean() / accum_steps
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
