import torch
from torch import nn


def main(accum_steps=4):
    torch.manual_seed(0)
    model = nn.Linear(8, 1).double()
    optimizer = torch.optim.AdamW(model.parameters())
    norms = []
    for step, x in enumerate(torch.ones(accum_steps, 3, 8).double()):
        loss = model(x).mean() / accum_steps
        loss.backward()
        if (step + 1) % accum_steps == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 10.0).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


def train_inner(batches, accum_steps):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for window in batches:
        for micro in range(accum_steps):
            loss = model(window[micro]).mean() / accum_steps
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
