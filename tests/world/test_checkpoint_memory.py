"""How much memory saving and loading take beside the state itself: the largest tensor and 256 MiB at most.

What is measured is the peak of resident memory (VmHWM). File pages are in it only where they are mapped, which no
checkpoint's are; the system's page cache, which it gives back when others need memory, is not in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from shardwise.checkpoint.layout import box_of
from shardwise.checkpoint.load import load_checkpoint
from shardwise.checkpoint.save import save_checkpoint
from shardwise.run.start import start
from tests.world.test_checkpoint_matrix import here, plan_for
from tests.worlds import run_world

MIB = 1 << 20
LARGEST = 64 * MIB
LIMIT = LARGEST + 64 * MIB  # stricter than what is promised, so that the state need not be larger
STATE = 2 * (LARGEST + 24 * 4 * MIB)  # parameters and momentum


class Large(nn.Module):
    """One large matrix and many smaller ones: 160 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(16 * 1024, 1024))
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def status(key: str) -> int:
    """Bytes of this process by the kernel's count: what is resident, and file pages only where they are mapped."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def extra_of(do: Callable[[], Any]) -> int:
    """Bytes at the peak of ``do`` beside what is there before or stays afterwards."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    do()
    peak = status("VmHWM")
    gc.collect()
    return peak - max(before, status("VmRSS"))


def numbers(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What of the whole tensor must be here: a function of the place in it."""
    box = box_of(tensor)
    rows = torch.arange(box.offsets[0], box.offsets[0] + box.lengths[0])[:, None]
    columns = torch.arange(box.offsets[1], box.offsets[1] + box.lengths[1])
    return ((rows * 1024 + columns) % 65521 + len(name)).to(tensor.dtype)


def named(session: Any) -> dict[str, torch.Tensor]:
    names = {id(p): name for name, p in session.module.named_parameters()}
    found: dict[str, torch.Tensor] = dict(session.module.named_parameters())
    for p, state in session.optimizer.state.items():
        found |= {f"{names[id(p)]}/{key}": value for key, value in state.items()}
    return found


def prepared(strategy: str) -> Any:
    session = start(plan_for(strategy, dist.get_world_size()), device="cpu", receipts=False)
    model = Large()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return session


def save_measured(root: str, strategy: str) -> int:
    session = prepared(strategy)
    with torch.no_grad():
        for p in session.module.parameters():
            session.optimizer.state[p]["momentum_buffer"] = torch.empty_like(p)
        for name, tensor in named(session).items():
            here(tensor).copy_(numbers(name, tensor))
    arguments = {"model": session.module, "optimizer": session.optimizer, "plan": session.plan}
    return extra_of(lambda: save_checkpoint(root, 1, **arguments, state={}, rng=None, keep=1))


def load_measured(root: str, strategy: str) -> int:
    session = prepared(strategy)
    with torch.no_grad():
        for p in session.module.parameters():
            here(p).zero_()  # there, page by page
    path = Path(root) / "step-00000001"
    extra = extra_of(lambda: load_checkpoint(path, model=session.module, optimizer=session.optimizer))
    found = named(session)
    assert len(found) == 2 * 25
    for name, tensor in found.items():
        assert torch.equal(here(tensor), numbers(name, tensor)), name
    return extra


def both(save_to: str, load_from: str, strategy: str) -> list[int]:
    return [save_measured(save_to, strategy), load_measured(load_from, strategy)]


def columns_measured(root: str) -> int:
    """Into a layout that is cut along columns, whose parts lie in short runs in the files."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Large()
    with torch.no_grad():
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                cut = distribute_tensor(p.detach(), mesh, [Cut(1)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(cut))
        for p in model.parameters():
            here(p).zero_()
    extra = extra_of(lambda: load_checkpoint(Path(root) / "step-00000001", model=model, optimizer=None))
    for name, tensor in model.named_parameters():
        assert isinstance(tensor, DTensor)
        assert torch.equal(here(tensor), numbers(name, tensor)), name
    return extra


def across_measured(root: str) -> int:
    """Saving parameters whose memory is not in the order of their elements."""
    model = nn.ParameterList(torch.empty(1024, 16 * 1024).t() for _ in range(3))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(numbers(name, p))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_for("one", 1)
    extra = extra_of(
        lambda: save_checkpoint(root, 1, model=model, optimizer=optimizer, plan=plan, state={}, rng=None, keep=1)
    )
    load_checkpoint(Path(root) / "step-00000001", model=model, optimizer=None)
    assert all(torch.equal(p, numbers(name, p)) for name, p in model.named_parameters())
    return extra


@pytest.mark.turns(6)
def test_the_measure_sees_a_copy_of_the_state() -> None:
    tensors = [torch.ones(4 * MIB // 4) for _ in range(64)]
    assert abs(extra_of(lambda: [tensor.clone() for tensor in tensors]) - 256 * MIB) < 16 * MIB
    assert extra_of(lambda: [float(tensor.sum()) for tensor in tensors]) < 16 * MIB
    assert STATE > LIMIT, "whoever copied all of the state would be seen"


@pytest.mark.turns(6)
def test_saving_and_loading_hold_no_second_copy(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel cannot begin the peak of a process anew")
    ddp, fsdp = str(tmp_path / "ddp"), str(tmp_path / "fsdp")
    found = {"save ddp": max(run_world(save_measured, 2, ddp, "ddp"))}
    saved, loaded = zip(*run_world(both, 2, fsdp, ddp, "fsdp"), strict=True)
    found |= {"save fsdp": max(saved), "ddp to fsdp": max(loaded)}
    found["fsdp to ddp"] = max(run_world(load_measured, 2, fsdp, "ddp"))
    found["fsdp to one"] = max(run_world(load_measured, 1, fsdp, "one"))
    found["ddp to columns"] = max(run_world(columns_measured, 2, ddp))
    found["save across"] = max(run_world(across_measured, 1, str(tmp_path / "across")))
    print({name: f"{extra / MIB:.0f} MiB" for name, extra in found.items()})
    assert all(extra <= LIMIT for extra in found.values()), found
