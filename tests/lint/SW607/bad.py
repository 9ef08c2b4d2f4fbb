# needs: two GPUs
# shows: result norm of the last update, where 1.0 is the bound
import torch
from accelerate import Accelerator


def main():
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(9, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for x in torch.ones(8, 2, 9, device=accelerator.device):
        before = model.module.weight.detach().clone()
        loss = model(x).mean()
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fault
        optimizer.step()
        optimizer.zero_grad()
    return (model.module.weight - before).norm().item()
