import torch
from torch import nn


def main():
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8), nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = body(torch.randn(4, 8))
        with torch.autocast("cpu", enabled=False):  # this layer is to be exact
            loss = head(hidden.float()).square().mean()
    loss.backward()
    return head.weight.grad.bfloat16().float().equal(head.weight.grad)
