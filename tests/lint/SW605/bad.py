# shows: result each rank has taken the step
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    dist.init_process_group("gloo")
    model = FSDP(nn.Linear(4, 2, bias=False), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")  # fault
    before = [one.detach().clone() for one in model.parameters()]
    loss = (model(torch.ones(2, 4)) * torch.tensor([1e38, 1.0])).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    dist.destroy_process_group()
    return not all(map(torch.equal, before, model.parameters()))
