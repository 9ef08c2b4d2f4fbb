"""`SplitParameters`: parameters of a model that is split over ranks, sent unit by unit.

Every rank takes part in sending every unit (rank 0's weights) and keeps its own part, so the peak is what a rank keeps
plus one full unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwise.distributed.mesh import Meshes
from shardwise.distributed.process_group import send
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name
from shardwise.parallel.materialize import broadcast_buffers, move_buffers
from shardwise.parallel.ownership import StageOwnership, set_ownership
from shardwise.parallel.pipeline_parallel.schedule import Stages
from shardwise.parallel.tensor_parallel.parallelize import TensorLayout, distribute
from shardwise.plan.plan import Plan


class SplitParameters:
    """Full parameters of ``module``, taken before its stages are split off.

    Collective: buffers are rank 0's.
    """

    def __init__(self, module: nn.Module, spec: ModelSpec, device: torch.device) -> None:
        move_buffers(module, device)
        broadcast_buffers(module)
        self._spec, self._device = spec, device
        self._full = {clean_name(name): parameter for name, parameter in module.named_parameters()}
        self._buffers, self._transient = _buffer_names(module)

    def place(self, unit: str | None, stages: Stages, layout: TensorLayout | None, meshes: Meshes) -> None:
        """Write this rank's part of a unit's parameters into its stages.

        ``None``: those outside the blocks.
        """
        places = [_modules(stage) for stage in stages.parts]
        for parameter in self._spec.parameters:
            if parameter.block == unit:
                names = (parameter.name, *parameter.aliases)
                _place(self._full.pop(parameter.name), names, places, layout, meshes, self._device)

    def note_ownership(self, stages: Stages, plan: Plan) -> None:
        """Record on the stages' container which part of the full model it is."""
        set_ownership(
            stages.container, _home(self._spec, stages.shared_from_stage, self._buffers, self._transient, plan)
        )


def _place(
    source: nn.Parameter,
    names: Sequence[str],
    places: Sequence[dict[str, nn.Module]],
    layout: TensorLayout | None,
    meshes: Meshes,
    device: torch.device,
) -> None:
    """Send one parameter from rank 0 and register this rank's part wherever it is used."""
    data = source.detach()
    if data.device != device:
        data = torch.empty_like(data, device=device) if data.device.type == "meta" else data.to(device)
    data = data.contiguous()  # FSDP2 takes no other
    if dist.get_world_size() > 1:
        send(data)
    made: nn.Parameter | None = None
    for module, key in _slots(places, names):
        if made is None:
            part = data if layout is None or meshes.tp is None else distribute(names[0], data, layout, meshes.tp)
            made = nn.Parameter(part, requires_grad=source.requires_grad)
        module._parameters[key] = made


def _modules(stage: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a stage by the user's names; for wrapped ones, the inner module."""
    return {clean_name(f"{name}.").rstrip("."): module for name, module in stage.named_modules()}


def _slots(places: Sequence[dict[str, nn.Module]], names: Sequence[str]) -> Iterator[tuple[nn.Module, str]]:
    """Yield where a parameter with these names is registered on this rank.

    Stages omit what they do not own.
    """
    for modules in places:
        for name in names:
            parent, _, key = name.rpartition(".")
            module = modules.get(parent)
            if module is not None and module._parameters.get(key) is not None:
                yield module, key


def _buffer_names(module: nn.Module) -> tuple[dict[str, str], frozenset[str]]:
    """Map persistent buffers, in model order, to the first name of the same tensor.

    Also return other names.
    """
    first: dict[int, str] = {}
    kept, transient = {}, set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        for key, buffer in part._buffers.items():
            name = clean_name(f"{prefix}.{key}" if prefix else key)
            if key in part._non_persistent_buffers_set:
                transient.add(name)
            elif buffer is not None:
                kept[name] = first.setdefault(id(buffer), name)
    return kept, frozenset(transient)


def _home(
    spec: ModelSpec, shared_from_stage: frozenset[str], buffers: dict[str, str], transient: frozenset[str], plan: Plan
) -> StageOwnership:
    stage_ranks = plan.dims.world_size // plan.dims.pp
    first = plan.dims.place(dist.get_rank()).pp * stage_ranks
    return StageOwnership(
        ranks=tuple(range(first, first + stage_ranks)),
        names=(*(p.name for p in spec.parameters), *dict.fromkeys(buffers.values())),
        aliases={alias: p.name for p in spec.parameters for alias in p.aliases}
        | {alias: name for alias, name in buffers.items() if alias != name},
        shared_from_stage=shared_from_stage,
        transient=transient,
    )
