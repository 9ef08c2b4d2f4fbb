import torch
from torch import nn


def main():
    model = nn.Linear(4, 1)
    model = torch.compile(model)
    torch.save(model.state_dict(), "model.pt")  # fault
