"""`shardwise.check_saved` on two ranks: whole files are right, and what a save has lost is named."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import shardwise
from tests.models import decoder
from tests.world.test_observe import sharded
from tests.worlds import run_each

Weights = dict[str, torch.Tensor]


def folder() -> Path:
    """The same folder on all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(made[0])


def saved(model: nn.Module, weights: Weights, name: str = "model.safetensors") -> dict[str, str]:
    place = folder()
    if dist.get_rank() == 0:
        save_file({key: one.contiguous() for key, one in weights.items()}, place / name)
    dist.barrier()
    receipt = shardwise.check_saved(model, place / name)
    return {line.name: line.found for line in receipt.lines if line.ok is False}


def full(model: nn.Module) -> Weights:
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def adapted() -> nn.Module:
    """A frozen model with adapters, all sharded over two ranks, as PEFT and FSDP2 have them."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(decoder(), LoraConfig(target_modules=["up", "down", "head"], r=4))
    return sharded_root(model)


def sharded_root(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def adapters(model: nn.Module, *, whole: bool) -> Weights:
    """As PEFT's file names them; or rank 0's slices."""
    found = {}
    for name, p in model.named_parameters():
        if "lora_" in name:
            value = p.detach().full_tensor() if whole else p.detach().to_local()
            found[name.replace(".default", "")] = value.clone()
    return found


def whole_model() -> dict[str, str]:
    model = sharded(decoder(tied=True))
    return saved(model, full(model))


def in_bf16() -> dict[str, str]:
    model = sharded(decoder())
    return saved(model, {name: one.bfloat16() for name, one in full(model).items()})


def whole_adapters() -> dict[str, str]:
    model = adapted()
    return saved(model, adapters(model, whole=True), "adapter_model.safetensors")


def rank_0_alone() -> dict[str, str]:
    model = adapted()
    return saved(model, adapters(model, whole=False), "adapter_model.safetensors")


def one_adapter_lost() -> dict[str, str]:
    model = adapted()
    weights = adapters(model, whole=True)
    weights.pop(next(name for name in weights if "lora_B" in name))
    return saved(model, weights, "adapter_model.safetensors")


def before_the_last_step() -> dict[str, str]:
    model = DDP(decoder())
    weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    with torch.no_grad():
        model.module.head.weight += 1e-3
    return saved(model, weights)


CASES: dict[Callable[[], dict[str, str]], set[str]] = {
    whole_model: set(),
    in_bf16: set(),
    whole_adapters: set(),
    rank_0_alone: {"shapes"},
    one_adapter_lost: {"trained parameters in the file"},
    before_the_last_step: {"values"},
}


def run_case(number: int) -> dict[str, str]:
    return [*CASES][number]()


def test_what_a_save_lost_is_named() -> None:
    found = run_each(run_case, 2, [(number,) for number in range(len(CASES))], timeout_s=170)
    for (case, names), (first, second) in zip(CASES.items(), found, strict=True):
        assert first == second, case.__name__
        assert first.keys() == names, f"{case.__name__}: {first}"
    assert "a rank's part alone?" in found[3][0]["shapes"]
    assert "head.weight" in found[5][0]["values"]
