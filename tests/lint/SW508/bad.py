# shows: result device of a rank, where each of two nodes has one GPU
# nodes: 2
import torch
import torch.distributed as dist


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device(f"cuda:{rank}")  # fault
    dist.destroy_process_group()
    return str(device)


def worker(rank):
    torch.cuda.set_device(dist.get_rank())  # fault
