import torch
from torch.nn.utils import clip_grad_norm_


def main():
    model = torch.nn.Linear(9, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    for x in torch.ones(8, 2, 9):
        before = model.weight.detach().clone()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return (model.weight - before).norm().item()
