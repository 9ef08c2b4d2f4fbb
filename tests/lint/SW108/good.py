import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = 0
    for batch in loader:
        loss = model(batch).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += len(batch)
    return seen
