# shows: result norm of the gradient that is clipped
import torch
from accelerate import Accelerator
from torch import nn


def main(accum=2):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accum)
    model = nn.Linear(8, 1).double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for x in torch.ones(accum, 3, 8).double():
        with accelerator.accumulate(model):
            loss = model(x).mean()
            loss = loss / accum  # fault
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 10.0).item()
            optimizer.step()
            optimizer.zero_grad()
    return norm
