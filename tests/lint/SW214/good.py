import torch
from accelerate import Accelerator
from torch import nn


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(8, 1).double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for x in torch.ones(2, 3, 8).double():
        with accelerator.accumulate(model):
            loss = model(x).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 10.0).item()
            optimizer.step()
            optimizer.zero_grad()
    return norm
