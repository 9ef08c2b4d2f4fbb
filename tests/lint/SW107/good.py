import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    data = list(range(8))
    loader = DataLoader(
        data,
        batch_size=2,
        sampler=DistributedSampler(data),
    )
    total = sum(len(batch) for batch in loader)
    dist.destroy_process_group()
    return total
