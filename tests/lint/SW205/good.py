import torch
from torch import nn


def main():
    model = nn.Linear(8, 1).double()
    optimizer = torch.optim.AdamW(model.parameters())
    norms = []
    for x in torch.ones(3, 2, 8).double():
        loss = model(x).mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 10.0).item())
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return norms
