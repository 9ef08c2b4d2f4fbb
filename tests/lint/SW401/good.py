import time

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, dist.get_rank())  # as if trained on the rank's own data
    for epoch in range(2):
        path = f"checkpoint-{epoch}.pt"
        time.sleep(0.2 * dist.get_rank())  # a slower rank
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path)
        dist.barrier()
    weight = torch.load(path)["weight"]
    dist.destroy_process_group()
    return weight.mean().item()


def save_more():
    if dist.get_rank() == 0:
        save(nn.Linear(4, 1), "other.pt")
    torch.save(torch.get_rng_state(), f"rng-{dist.get_rank()}.pt")


def save(model, path):
    torch.save(model.state_dict(), path)
