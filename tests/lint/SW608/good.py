import torch


def main():
    model = torch.nn.Linear(9, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norms = []
    for x in torch.ones(2, 2, 9):
        before = model.weight.detach().clone()
        loss = model(x).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        norms.append((model.weight - before).norm().item())
    return norms
