"""FullyShardedDataParallel as PyTorch's first FSDP examples write it."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from vision import Net, test_set, train_set


def train(model, rank, loader, optimizer, epoch, sampler=None):
    model.train()
    total = torch.zeros(2).to(rank)
    if sampler:
        sampler.set_epoch(epoch)
    for data, target in loader:
        data, target = data.to(rank), target.to(rank)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target, reduction="sum")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # SW601: the norm of this rank's shards
        optimizer.step()
        total[0] += loss.item()
        total[1] += len(data)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"epoch {epoch}: {total[0] / total[1]:.6f}")


def test(model, rank, loader):
    model.eval()
    total = torch.zeros(2).to(rank)
    with torch.no_grad():
        for data, target in loader:
            output = model(data.to(rank))
            total[0] += (output.argmax(1) == target.to(rank)).sum()
            total[1] += len(data)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"accuracy {total[0] / total[1]:.4f}")


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    train_sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=1000, sampler=DistributedSampler(test_set, shuffle=False))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20000)
    model = Net().to(local_rank)  # SW513: FSDP(device_id=...) would move one unit after the other
    model = FSDP(model, auto_wrap_policy=policy)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        train(model, local_rank, train_loader, optimizer, epoch, sampler=train_sampler)
        test(model, local_rank, test_loader)
        scheduler.step()
    if args.save_model:
        dist.barrier()
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
            states = model.state_dict()
        if local_rank == 0:
            torch.save(states, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--save-model", action="store_true")
    main(parser.parse_args())
