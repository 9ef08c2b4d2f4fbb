# shows: result device of a rank
import argparse

import torch
import torch.distributed as dist


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)  # fault
    args = parser.parse_args()
    device = torch.device("cuda", args.local_rank)
    dist.init_process_group()
    return str(device)
