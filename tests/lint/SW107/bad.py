# shows: error mutually exclusive
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    data = list(range(8))
    loader = DataLoader(  # fault
        data,
        batch_size=2,
        shuffle=True,
        sampler=DistributedSampler(data),
    )
    total = sum(len(batch) for batch in loader)
    dist.destroy_process_group()
    return total
