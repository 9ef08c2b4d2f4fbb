import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() != 0:
        dist.barrier()
    print("rank 0 comes here first")
    if dist.get_rank() == 0:
        dist.barrier()
    dist.destroy_process_group()


def with_a_cache(args, evaluate):
    if args.local_rank not in [-1, 0] and not evaluate:
        dist.barrier()
    if args.local_rank == 0 and not evaluate:
        dist.barrier()
