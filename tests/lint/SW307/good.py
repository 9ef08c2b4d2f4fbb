import os

import torch.distributed as dist


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    print(rank, dist.get_rank())
    dist.destroy_process_group()
