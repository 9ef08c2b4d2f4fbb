"""Saves with PyTorch's own distributed checkpoints: one rank of a world, in many layouts and forms."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Small(nn.Module):
    """Tied, uneven, short (two rows), 0-d, empty and bfloat16 tensors, and a module with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.short = nn.Parameter(torch.randn(2, 5))
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("running", torch.randn(3, 2).bfloat16())
        self.register_buffer("count", torch.tensor(11))


def laid_out(layout: str) -> nn.Module:
    """A model on all ranks: ``ddp``, ``fsdp``, ``hsdp``, ``tp`` (cut along both dims), ``2d`` or, for one, ``one``."""
    torch.manual_seed(7)
    model, world = Small(), dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "one":
        return model
    full = {model.scale}
    if layout in ("tp", "2d"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"blocks.0": ColwiseParallel(), "blocks.1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        if layout == "2d":
            fully_shard(model, mesh=mesh["dp"], ignored_params=full)
        return model
    shape = (2, world // 2) if layout == "hsdp" else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[2 - len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params=full)


def trained(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    """An optimizer of two groups after some steps, each with a gradient that depends on the weights alone."""
    short = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2]}, {"params": short, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.125, betas=(0.5, 0.75))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 0.25
        optimizer.step()
    return optimizer


def state_of(form: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> tuple[dict, dict, dict]:
    """What is saved, and what the model and the optimizer said of themselves."""
    joined = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    weights, state = get_state_dict(model, optimizer, options=joined)
    others = {"lr_scheduler": {"last_epoch": 4, "last_lr": [0.5]}, "epoch": 2}
    if form == "flat":  # as torchtitan saves
        return {**weights, "optimizer": state, "train_state": {"step": torch.tensor(steps)}, **others}, weights, state
    if form == "app":
        return {"app": {"model": weights, "optim": state}, "global_step": steps}, weights, state
    if form == "weights":
        return dict(weights), weights, state
    if form == "raw":  # names as wrapping makes them, state by number
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, weights, state
    return {"model": weights, "optim": state, "step": steps, **others}, weights, state


def save(folder: str, layout: str, form: str = "nested", steps: int = 3) -> dict[str, torch.Tensor]:
    """Save one folder and return what a reader must find, whole, by our names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = laid_out(layout)
        optimizer = trained(model, steps)
        saved, weights, state = state_of(form, model, optimizer, steps)
        if form == "old":  # how torch split nested dicts before version 2.4
            _version._derived_version = "2_3"
        many = dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=2)
        dcp.save(
            saved,
            checkpoint_id=folder,
            storage_writer=many if form == "many files" else None,
            use_collectives=form != "of ranks",
        )
        expected = {f"model/{name}": full(tensor) for name, tensor in weights.items()}
        for name, values in state["state"].items() if "state" in state else ():
            expected |= {f"optimizer/{name}/{key}": full(tensor) for key, tensor in values.items()}
        for name, tensor in state.items():
            if name.startswith("state."):
                parameter, key = name.removeprefix("state.").rsplit(".", 1)
                expected[f"optimizer/{parameter}/{key}"] = full(tensor)
        return expected


def save_large(folder: str, rows: int, columns: int) -> torch.Tensor:
    """Save one tensor that is cut over the ranks, and return it."""
    torch.manual_seed(1)
    full = torch.randn(rows, columns)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"large": distribute_tensor(full, mesh, [Shard(0)])}}, checkpoint_id=folder)
    return full


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, whichever way it is spread."""
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).clone()
