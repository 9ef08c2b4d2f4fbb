from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def build(dataset):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))  # fault
    loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
    return DDP(model), loader
