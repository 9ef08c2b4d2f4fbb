# shows: result both ranks clip by the same norm
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FSDP(nn.Linear(4, 3), device_id=torch.device("cpu"))
    model(torch.arange(4.0)).square().sum().backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fault
    both = [torch.empty(1) for _ in range(2)]
    dist.all_gather(both, total.reshape(1))
    dist.destroy_process_group()
    return both[0].equal(both[1])
