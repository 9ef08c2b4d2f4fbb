# shows: result steps of 200 that change no weight, where the scale doubles in each
import torch


def main(dtype=torch.bfloat16):
    model = torch.nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)  # fault
    skipped = 0
    for _ in range(200):
        before = model.weight.detach().clone()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.full((2, 8), 3.0)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += model.weight.equal(before)
    return skipped
