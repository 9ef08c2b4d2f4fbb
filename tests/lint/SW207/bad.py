# shows: result gradients are reduced in spite of no_sync()
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 1).double())
    x = torch.randn(2, 4, dtype=torch.float64)[dist.get_rank()]
    loss = model(x).square().mean()
    with model.no_sync():  # fault
        loss.backward()
    grads = [torch.empty(1, 4, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(grads, model.module.weight.grad)
    dist.destroy_process_group()
    return grads[0].equal(grads[1])
