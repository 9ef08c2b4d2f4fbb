"""Saves with Accelerate itself: ``python -m tests.peers.write_accelerate FOLDER``. Noisy, so a process of its own.

Its FSDP folders come from its own saving functions over a model that is really sharded on two ranks: the
``Accelerator`` trains with DDP where there is no GPU, whatever it was asked for. Beside each folder lies
``NAME.expected.pt`` with what a reader must find.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
SHARDED = ("fsdp2-sharded", "fsdp2-full", "fsdp1-sharded", "fsdp1-full", "fsdp2-of-ranks")


def built() -> nn.Module:
    """A small model of uneven sizes."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of two groups after two steps."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if not name.endswith("bias")]},
        {"params": [p for name, p in named.items() if name.endswith("bias")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    for _ in range(2):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def expected_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors, whole, by our names."""
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {f"model/{name}": tensor.clone() for name, tensor in weights.items()}
    for name, values in state["state"].items():
        found |= {f"optimizer/{name}/{key}": tensor.clone() for key, tensor in values.items()}
    return found


def save_fsdp(folder: Path, name: str, rank: int) -> None:
    """What ``save_state`` does under FSDP."""
    version, kind = int(name[4]), "FULL_STATE_DICT" if name.endswith("full") else "SHARDED_STATE_DICT"
    mesh = init_device_mesh("cpu", (RANKS,))
    if version == 2:
        model = fully_shard(built(), mesh=mesh)
    else:
        model = FullyShardedDataParallel(built(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = trained(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type=kind, reshard_after_forward=True if version == 2 else "FULL_SHARD"
    )
    offloads = name != "fsdp1-full"  # which crashes torch where the weights are on the CPU already
    saver = SimpleNamespace(num_processes=RANKS if offloads else 1, process_index=rank)
    expected = expected_of(model, optimizer)
    dcp = not name.endswith("ranks")
    save_fsdp_model(plugin, saver, model, str(folder / name), use_dcp=dcp)
    save_fsdp_optimizer(plugin, saver, optimizer, model, str(folder / name), use_dcp=dcp)
    dist.barrier()
    if not offloads:  # torch's whole state of FSDP1 is not right on the CPU: what counts is what it wrote
        expected = written(folder / name)
    if rank == 0:
        torch.save(expected, folder / f"{name}.expected.pt")


def written(folder: Path) -> dict[str, torch.Tensor]:
    """What is in the files of a whole FSDP folder, as torch reads them."""
    found = {f"model/{name}": t for name, t in torch.load(folder / "pytorch_model_fsdp.bin").items()}
    for name, values in torch.load(folder / "optimizer.bin")["state"].items():
        found |= {f"optimizer/{name}/{key}": tensor for key, tensor in values.items()}
    return found


def save_plain(folder: Path, name: str, safe: bool) -> None:
    """``Accelerator.save_state`` with a scheduler; under DDP where there are ranks."""
    accelerator = Accelerator(cpu=True)
    model = torch.compile(built(), backend="eager") if name == "compiled" else built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    accelerator.save_state(str(folder / name), safe_serialization=safe)
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert (accelerator.distributed_type == DistributedType.NO) != isinstance(model, DistributedDataParallel)
    if accelerator.is_main_process:
        expected = {f"model/{key}": tensor.clone() for key, tensor in inner.state_dict().items()}
        torch.save(expected, folder / f"{name}.expected.pt")
    accelerator.wait_for_everyone()


def sharded_rank(rank: int, folder: Path, store: str) -> None:
    """One rank: every sharded folder."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    PartialState(cpu=True)  # Accelerate's logger needs it
    for name in SHARDED:
        save_fsdp(folder, name, rank)
    dist.barrier()
    dist.destroy_process_group()


def replicated_rank(rank: int, folder: Path, port: int) -> None:
    """One rank, which finds the others as torchrun would have it."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in names.items()})
    save_plain(folder, "ddp", safe=True)
    dist.destroy_process_group()


def main(folder: Path) -> None:
    """Every folder there is."""
    run = functools.partial(torch.multiprocessing.start_processes, nprocs=RANKS, start_method="fork")
    with tempfile.TemporaryDirectory() as scratch:
        run(sharded_rank, args=(folder, f"{scratch}/store"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run(replicated_rank, args=(folder, port))
    save_plain(folder, "plain", safe=True)
    save_plain(folder, "plain-bin", safe=False)
    save_plain(folder, "compiled", safe=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
