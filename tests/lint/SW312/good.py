import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    steps = 0
    for _ in range(3):
        error = torch.ones(1)
        dist.all_reduce(error)
        steps += 1
        if error.item() > 1.5:
            break
    dist.destroy_process_group()
    return steps
