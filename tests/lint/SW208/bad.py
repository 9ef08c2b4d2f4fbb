# shows: result reductions of the gradients in a step
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def main(n=4):
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(8, 1))
    reductions = []
    model.register_comm_hook(None, lambda _, bucket: (reductions.append(bucket), allreduce_hook(None, bucket))[1])
    optimizer = torch.optim.AdamW(model.parameters())
    for step, x in enumerate(torch.ones(n, 3, 8)):
        loss = model(x).mean() / n
        loss.backward()  # fault
        if (step + 1) % n == 0:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    return len(reductions)
