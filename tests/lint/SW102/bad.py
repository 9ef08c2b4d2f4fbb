# shows: result samples of 16 that a rank trains on
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(16.0).unsqueeze(1))
    loader = DataLoader(data, batch_size=4, shuffle=True)  # fault
    model = DDP(nn.Linear(1, 1))
    seen = set()
    for (batch,) in loader:
        model(batch).sum().backward()
        seen.update(batch.flatten().tolist())
    dist.destroy_process_group()
    return len(seen)
