# shows: result samples of 8 that a rank trains on
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __iter__(self):
        for number in range(8):
            yield torch.tensor([float(number)])


def main():
    dist.init_process_group("gloo")
    loader = DataLoader(Lines(), batch_size=4)  # fault
    model = DDP(nn.Linear(1, 1))
    count = 0
    for batch in loader:
        model(batch).sum().backward()
        count += len(batch)
    dist.destroy_process_group()
    return count
