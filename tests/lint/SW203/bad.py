# shows: result norms of the gradients of each step
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
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 10.0).item())
        optimizer.step()  # fault
        optimizer.zero_grad()
    return norms
