import os

import torch
import torch.distributed as dist


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return str(device)
