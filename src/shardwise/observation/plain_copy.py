"""Copy a live model to one process's CPU in float64, without DDP, FSDP, compilation, and their hooks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

_INNER = ("_fsdp_wrapped_module", "_orig_mod")  # of FSDP1 and torch.compile: the module that they wrap
_AROUND = ("module", "_forward_module", "_orig_mod")  # of DDP, Fabric and torch.compile
_TOOLS = (
    "torch.distributed.",
    "torch._dynamo.",
    "accelerate.",
    "lightning.",
    "pytorch_lightning.",
    "deepspeed.",
    "shardwise.",
)  # their hooks shard
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PATCHED = ("_original_forward", "_old_forward", "_hf_hook")  # of accelerate, which replaces `forward`
_COMPOSABLE = ("__composable_api", "_shardwise")  # state of `fully_shard` and `replicate`, and our own

Memo = dict[int, Any]


@contextlib.contextmanager
def full_parameters(root: nn.Module, *, with_grads: bool = False) -> Iterator[None]:
    """Inside, FSDP1's parameters are whole; other sharded ones are DTensors. Collective."""
    if any(isinstance(part, FSDP1) for part in root.modules()):
        with FSDP1.summon_full_params(root, writeback=False, with_grads=with_grads):
            yield
    else:
        yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full values on the CPU, in float64 if they are floating point. Collective for DTensors."""
    full = tensor.detach()
    full = full.full_tensor() if isinstance(full, DTensor) else full
    return full.to("cpu", torch.float64 if full.is_floating_point() else full.dtype, copy=True)


def layers_around(model: nn.Module, root: nn.Module) -> tuple[nn.Module, ...]:
    """Return the wrappers from ``model`` to ``root``, which are ``root`` to a loss closure."""
    found = []
    while model is not root:
        found.append(model)
        inner = next((one for name in _AROUND if isinstance(one := getattr(model, name, None), nn.Module)), None)
        if inner is None:
            break
        model = inner
    return tuple(found)


def plain_copy(
    root: nn.Module,
    weights: Mapping[int, torch.Tensor],
    aliases: Iterable[nn.Module] = (),
    absent: Iterable[object] = (),
) -> Memo:
    """Return what each live object became, by id: modules, parameters, buffers; the copy's parameters are ``weights``.

    Args:
        root: the live model.
        weights: full values by the id of the live parameter.
        aliases: wrappers around the live model.
        absent: objects that the model refers to, such as its trainer, and the copy does not.

    Raises:
        Exception: an attribute of the model cannot be copied.
    """
    memo: Memo = {id(one): None for one in absent}
    for p in root.parameters():
        memo[id(p)] = nn.Parameter(weights[id(p)], p.requires_grad and weights[id(p)].is_floating_point())
    for buffer in root.buffers():
        memo[id(buffer)] = whole(buffer)
    live = list({id(module): module for module in map(_inside, root.modules())}.values())
    for module in live:
        made = _plain_class(module).__new__(_plain_class(module))
        memo[id(module)] = made
    for module in root.modules():
        memo[id(module)] = memo[id(_inside(module))]
    for module in aliases:
        memo[id(module)] = memo[id(_inside(root))]
    for module in live:
        _fill(module, memo[id(module)], memo)
    return memo


def _inside(module: nn.Module) -> nn.Module:
    while True:
        inner = next((module._modules[name] for name in _INNER if module._modules.get(name) is not None), None)
        if inner is None:
            return module
        module = inner


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class before ``fully_shard`` derived one from it."""
    kind = type(module)
    return next(base for base in kind.__mro__[1:] if base is not FSDPModule) if isinstance(module, FSDPModule) else kind


def _fill(live: nn.Module, made: nn.Module, memo: Memo) -> None:
    patched = any(name in live.__dict__ for name in _PATCHED)
    made.__dict__.update(
        {
            name: _copied(value, name, memo)
            for name, value in live.__dict__.items()
            if name not in _PATCHED and not name.startswith(_COMPOSABLE) and not (patched and name == "forward")
        }
    )
    if "_compiled_call_impl" in made.__dict__:
        made.__dict__["_compiled_call_impl"] = None


def _copied(value: Any, name: str, memo: Memo) -> Any:
    if name == "_compiled_call_impl":
        return None
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        return memo.setdefault(id(value), whole(value))
    if isinstance(value, (dist.ProcessGroup, DeviceMesh)):
        return value
    if "state_dict" in name and name.endswith("hooks"):
        return type(value)()  # the copy is never saved
    if name in _HOOKS:
        value = type(value)((key, hook) for key, hook in value.items() if not _is_of_a_tool(hook))
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise TypeError(f"attribute {name} of the model cannot be copied: {error}") from error


def _is_of_a_tool(hook: Any) -> bool:
    inner = getattr(hook, "func", hook)  # of a partial
    return str(getattr(inner, "__module__", "")).startswith(_TOOLS)
