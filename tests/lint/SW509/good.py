import os

import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
