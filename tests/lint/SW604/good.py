import torch


def train(model, optimizer, loader, dtype):
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for x in loader:
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
