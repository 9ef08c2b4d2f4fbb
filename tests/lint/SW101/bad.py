# shows: result two epochs begin with the same batch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    data = list(range(64))
    sampler = DistributedSampler(data)  # fault
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    first = []
    for epoch in range(2):
        for batch in loader:
            first.append(batch.tolist())
    dist.destroy_process_group()
    return first[0] == first[4]
