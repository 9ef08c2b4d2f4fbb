# shows: result loss that is shown, where each rank's is 1.0
import torch
import torch.distributed as dist
import torch.nn.functional as F


def main():
    dist.init_process_group("gloo")
    loss = F.mse_loss(torch.ones(3), torch.zeros(3))
    dist.all_reduce(loss)  # fault
    shown = loss.item()
    dist.destroy_process_group()
    return shown
