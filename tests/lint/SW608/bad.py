import torch


def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fault
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
