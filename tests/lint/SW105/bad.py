# shows: result both ranks draw the same noise
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(np.random.rand())


def seed_worker(worker_id):
    np.random.seed(42 + worker_id)  # fault


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    loader = DataLoader(Noisy(), num_workers=1, worker_init_fn=seed_worker)
    mine = torch.cat(list(loader))
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    dist.destroy_process_group()
    return both[0].equal(both[1])
