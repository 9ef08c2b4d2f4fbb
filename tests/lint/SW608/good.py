import torch


def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
