# shows: result both ranks draw the same batch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

data = torch.arange(1000)


def get_batch():
    starts = torch.randint(len(data) - 8, (4,))  # fault
    return torch.stack([data[start : start + 8] for start in starts])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    model = DistributedDataParallel(nn.Linear(8, 1))
    batch = get_batch().float()
    model(batch).mean().backward()
    both = [torch.empty_like(batch) for _ in range(2)]
    dist.all_gather(both, batch)
    dist.destroy_process_group()
    return both[0].equal(both[1])
