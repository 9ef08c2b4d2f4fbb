import torch


def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")  # fault
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
