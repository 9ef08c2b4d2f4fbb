import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() != 0:
        dist.barrier()
    print("rank 0 comes here first")
    if dist.get_rank() == 0:
        dist.barrier()
    dist.destroy_process_group()
