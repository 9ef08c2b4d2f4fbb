import torch
import torch.distributed as dist


def save(model):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.barrier()


def resume(model):
    model.load_state_dict(torch.load("model.pt"))  # fault


def setup():
    dist.init_process_group("nccl")
