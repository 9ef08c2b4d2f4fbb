# shows: hang
import torch.distributed as dist


def log(text):
    print(text)
    dist.barrier()  # fault


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        log("started")
    dist.destroy_process_group()
