# shows: hang
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    value = torch.ones(1)
    try:
        if dist.get_rank() == 1:
            raise ValueError("a broken sample")
        dist.all_reduce(value)
    finally:
        dist.barrier()  # fault
    dist.destroy_process_group()
