import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def train(model, loader):
    model = FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.cuda.amp.GradScaler()  # fault
    for x in loader:
        loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
