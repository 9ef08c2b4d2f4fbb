"""Locate and access the elements that DeepSpeed stores on this rank.

Does not import DeepSpeed.

ZeRO-1 and 2 flatten the parameters of a group one after the other and partition the result; ZeRO-3 partitions each
parameter, flattened, into equal parts of which the last ones may be padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from shardwise.parallel.engines.deepspeed_unused import Part
from shardwise.parallel.engines.engine import EngineTensors


def own_range(parameter: Any) -> tuple[int, int]:
    """Return this rank's range of a flattened parameter, begin and end.

    Equal if it has no element.
    """
    if hasattr(parameter, "ds_tensor"):
        rank, share = parameter.ds_zero_partition_rank, int(parameter.ds_tensor.ds_numel)
        begin = min(rank * share, int(parameter.ds_numel))
        return begin, min(begin + share, int(parameter.ds_numel))
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return 0, 0
    where = mapping.lp_fragment_address
    return int(where.start), int(where.start + where.numel)


def set_local(zero: Any, parameter: nn.Parameter, full: torch.Tensor, key: str | None) -> None:
    """Write this rank's elements of ``full`` into the fp32 weight, or its state ``key``."""
    if hasattr(parameter, "ds_tensor"):
        share = int(parameter.ds_tensor.ds_numel)
        begin, end = own_range(parameter)
        local = functional.pad(full.detach().flatten()[begin:end], (0, share - (end - begin)))
        zero.set_local_hp_param(local, parameter, key)
        return
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        begin, end = own_range(parameter)
        mapping.get_hp_fragment(key).data.copy_(full.detach().flatten()[begin:end])


def flat_of(zero: Any, parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the flat fp32 tensor that the optimizer updates for this rank's elements.

    The first of its group if this rank has no element of it.
    """
    if hasattr(parameter, "ds_tensor"):
        place = zero.grad_position.get(zero.get_param_id(parameter))
        return None if place is None else zero.fp32_partitioned_groups_flat[place[0]]
    for group, master in _flattened(zero):
        if any(parameter is other for other in group):
            return master
    return None


def part_of(zero: Any, parameter: nn.Parameter) -> Part:
    """Return the place of this rank's elements in the updated tensor, padding included."""
    flat = flat_of(zero, parameter)
    assert flat is not None
    if hasattr(parameter, "ds_tensor"):
        _, begin, number = zero.grad_position[zero.get_param_id(parameter)]
        return Part(flat, int(begin), int(begin + number))
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return Part(flat, 0, 0)
    where = mapping.get_hp_fragment_address()
    return Part(flat, int(where.start), int(where.start + where.numel))


def all_states(zero: Any, parameter: nn.Parameter) -> dict[str, torch.Tensor | None]:
    """Return a parameter's optimizer state by key: ``None`` for tensors of its shape.

    Scalars (AdamW's ``step``) are returned unchanged.
    """
    flat = flat_of(zero, parameter)
    state = {} if flat is None else zero.optimizer.state.get(flat, {})
    return {
        key: None if value.dim() else value.detach().clone()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def make_states(zero: Any, groups: list[dict[str, torch.Tensor | None]]) -> None:
    """Create the optimizer state as after a first step: zeros, and the given values for scalars.

    ``groups`` has the keys per optimizer group. State on a drive is read in and written back.
    """
    state = zero.optimizer.state
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
            keys = groups[zero.sub_group_to_group_id[number]]
            away = zero._swappable_optimizer_subgroup(number)
            if away:
                zero._optimizer_states_and_gradient_swap_in(number)
            _fill_state(state, flat, keys)
            if away:
                zero._optimizer_states_and_gradient_swap_out(number)
        return
    masters = getattr(zero, "single_partition_of_fp32_groups", None)
    masters = zero.fp32_groups_flat_partition if masters is None else masters
    for flat, keys in zip(masters, groups, strict=True):
        _fill_state(state, flat, keys)
    link_states(zero)


def link_states(zero: Any) -> None:
    """Record where each parameter's part of the flat states is.

    DeepSpeed does so once, after the first group's first step,
    when those of further groups do not exist yet; a group without momentum never has any."""
    for group, flat in _flattened(zero):
        for mapping in (getattr(parameter, "_hp_mapping", None) for parameter in group):
            if mapping is not None:
                mapping.set_optim_state_fragment(flat, zero.optimizer.state.get(flat, {}))
    zero._hp_optimizer_states_linked = True


def _flattened(zero: Any) -> Iterable[tuple[list[nn.Parameter], torch.Tensor]]:
    """Yield ZeRO-1 and 2's parameter groups, each with the flat fp32 tensor of the optimizer."""
    groups = getattr(zero, "bit16_groups", None) or getattr(zero, "bf16_groups", [])
    masters = getattr(zero, "single_partition_of_fp32_groups", None)
    masters = getattr(zero, "fp32_groups_flat_partition", []) if masters is None else masters
    return zip(groups, masters, strict=True)


def _fill_state(state: Any, flat: torch.Tensor, keys: dict[str, torch.Tensor | None]) -> None:
    if not keys:
        state.pop(flat, None)
        return
    there = state.setdefault(flat, {})
    for key, value in keys.items():
        if value is not None:
            there[key] = value.clone()
        elif key not in there:
            there[key] = torch.zeros_like(flat)


def find_local(zero: Any, optimizer: Optimizer, parameters: list[nn.Parameter]) -> EngineTensors:
    """Collect the live tensors of DeepSpeed's optimizer ``zero``, which updates with the user's."""
    if parameters and hasattr(parameters[0], "ds_tensor"):
        return _local_of_stage_3(zero, optimizer, parameters)
    masters = getattr(zero, "single_partition_of_fp32_groups", None)
    gradients: list[torch.Tensor] = []
    if masters is None:  # ZeRO-1 in bf16
        masters = zero.fp32_groups_flat_partition
        gradients = list(zero.fp32_groups_gradients_flat)
    elif getattr(zero, "cpu_offload", False):
        gradients = [master.grad for master in masters if master.grad is not None]
    else:
        for group in getattr(zero, "averaged_gradients", {}).values():
            gradients += [] if group is None else [g for g in group if g is not None]
    begun = [own_range(p) for p in parameters if p.requires_grad]
    padding = sum(m.numel() for m in masters) - sum(end - begin for begin, end in begun)
    return EngineTensors(
        parameters=tuple(p.detach() for p in parameters),
        masters=tuple(masters),
        gradients=tuple(gradients),
        states=tuple(_state_tensors(optimizer)),
        padding=padding,
    )


def _local_of_stage_3(zero: Any, optimizer: Optimizer, parameters: Sequence[Any]) -> EngineTensors:
    shards = [parameter.ds_tensor for parameter in parameters]
    available = [shard for shard in shards if shard.status.name == "AVAILABLE"]
    padding = 0
    for parameter in parameters:
        begin, end = own_range(parameter)
        padding += int(parameter.ds_tensor.ds_numel) - (end - begin)
    buffer = getattr(zero, "grad_partitions_flat_buffer", None)
    return EngineTensors(
        parameters=tuple(shard.detach() for shard in available),
        masters=tuple(m for m in zero.fp32_partitioned_groups_flat if m.numel()),
        gradients=() if buffer is None else (buffer,),
        states=tuple(t for t in _state_tensors(optimizer) if t.numel()),
        padding=padding,
        swapped=tuple(swap_files(zero)),
    )


def swap_files(zero: Any) -> list[Path]:
    """List the existing files with this rank's part of the data swapped to a drive."""
    found: list[Path] = []
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is not None:
        folder = Path(swapper.swap_folder)
        found += sorted(path for path in folder.rglob("*") if path.is_file())
    offload = getattr(zero, "parameter_offload", None)
    params = getattr(offload, "param_swapper", None) if offload is not None else None
    if params is None:
        module = getattr(zero, "module", None)
        first = next(iter(module.parameters()), None) if module is not None else None
        params = getattr(first, "nvme_swapper", None)
    if params is not None:
        found += sorted(path for path in Path(params.swap_folder).rglob("*") if path.is_file())
    return found


def _state_tensors(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def elements(tensors: Iterable[torch.Tensor]) -> int:
    """Count elements of tensors as stored in memory."""
    return sum(math.prod(t.shape) for t in tensors)
