# shows: error has not been initialized
import torch.distributed as dist


def main():
    rank = dist.get_rank()  # fault
    dist.init_process_group("gloo")
    print(rank)
    dist.destroy_process_group()
