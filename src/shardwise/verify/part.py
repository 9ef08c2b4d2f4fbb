"""What a rank's part of the model should be, and where its ranks stand: by plan and structure, not by what was done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.measure.collectives import OTHER
from shardwise.parallel.home import home_of
from shardwise.plan.plan import Plan
from shardwise.spec.model import ModelSpec, ParameterSpec
from shardwise.spec.read import STAGE, clean_name
from shardwise.train.session import Session


def used_spec(session: Session) -> ModelSpec:
    """This rank's part of the model, with parameters that got no gradient counted as frozen: nothing is reduced for them.

    A gradient that is there but was never reduced over the ranks is one all the same.
    """
    home = home_of(session.module)
    used = {clean_name(name) for name, p in session.module.named_parameters() if p.grad is not None}
    used |= set(_never_reduced(session.module))
    if home is not None:
        used |= {home.canonical(name) for name in used}
    spec = part_of(session)
    parameters = (p.model_copy(update={"trainable": p.trainable and p.name in used}) for p in spec.parameters)
    return spec.model_copy(update={"parameters": tuple(parameters)})


def part_of(session: Session) -> ModelSpec:
    """The blocks and parameters of this rank's stages; the whole model without a pipeline.

    Which blocks are here is read off the stages (that every block is on one stage is a line of its own); what else is
    here follows from when the model uses it.
    """
    spec, decision = session.spec, session.applied.decision
    if session.plan.dims.pp == 1 or decision is None or decision.wiring is None:
        return spec
    blocks = tuple(block for blocks in stage_blocks(session).values() for block in blocks)
    wiring = decision.wiring
    here = frozenset[str]()
    if spec.blocks[0] in blocks:
        here |= wiring.before
    if spec.blocks[-1] in blocks:  # and what no forward uses
        here |= {name for p in spec.parameters for name in (p.name, *p.aliases) if p.block is None} - wiring.before
        here |= wiring.after
    kept = [
        p for p in spec.parameters if p.block in blocks or (p.block is None and not here.isdisjoint((p.name, *p.aliases)))
    ]
    return spec.model_copy(update={"parameters": tuple(kept), "blocks": tuple(b for b in spec.blocks if b in blocks)})


def stage_blocks(session: Session) -> dict[int, tuple[str, ...]]:
    """The blocks of each stage that is on this rank, as they are there: by stage number."""
    live = {id(block) for block in session.applied.blocks}
    found: dict[int, tuple[str, ...]] = {}
    for name, child in session.module.named_children():
        if name.startswith(STAGE):
            inside = (clean_name(inner) for inner, part in child.named_modules() if id(part) in live)
            found[int(name.removeprefix(STAGE))] = tuple(inside)
    return found or {0: session.spec.blocks}


def stage_numbers(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """The stages that a rank of a pipeline should have: dealt out in turn, or there and back again for ``zbv``."""
    pp = plan.dims.pp
    if plan.pipeline_schedule == "zbv":
        return pp_rank, 2 * pp - 1 - pp_rank
    return tuple(pp_rank + turn * pp for turn in range(plan.virtual_stages))


def root_units(session: Session, spec: ModelSpec) -> list[list[ParameterSpec]]:
    """Parameters outside of the blocks as sharding units: those of each stage, where it has any."""
    outside = [p for p in spec.parameters if p.block is None]
    decision, stages = session.applied.decision, stage_blocks(session)
    if decision is None or decision.wiring is None or len(stages) == 1:
        return [outside] if outside else []
    units = []
    for blocks in stages.values():
        names: set[str] = set()
        if session.spec.blocks[0] in blocks:
            names |= decision.wiring.before
        if session.spec.blocks[-1] in blocks:
            names |= {name for p in outside for name in (p.name, *p.aliases)} - decision.wiring.before
            names |= decision.wiring.after
        mine = [p for p in outside if not names.isdisjoint((p.name, *p.aliases))]
        units += [mine] if mine else []
    return units


def shard_rank(session: Session) -> int:
    """Where this rank stands among those that FSDP2 cuts parameters over, which are context-parallel ranks, too."""
    dims, place = session.plan.dims, session.place
    return place.dp % dims.dp_shard * dims.cp + place.cp


def shard_dim_of(session: Session, name: str) -> int | None:
    """The dim that tensor parallel cuts a parameter along; ``None`` where it is whole on each of its ranks."""
    decision = session.applied.decision
    layout = None if decision is None else decision.layout
    return None if layout is None else layout.shard_dim.get(name)


def group_of(module: FSDPModule) -> Any:
    """FSDP2's parameter group of a unit; ``None`` where it manages none."""
    return module._get_fsdp_state()._fsdp_param_group


def holding_units(module: nn.Module) -> list[FSDPModule]:
    """FSDP2's units inside ``module`` that manage parameters."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    return [unit for unit in units if group_of(unit) is not None and group_of(unit).fsdp_params]


def _never_reduced(module: nn.Module) -> Iterator[str]:
    for unit in holding_units(module):
        for held in group_of(unit).fsdp_params:
            whole = getattr(held, "_unsharded_param", None)
            if held.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                yield clean_name(str(held._param_fqn))


def axis_of(session: Session) -> Callable[[str, str], str] | None:
    """The name of the axis that a collective goes over, by its own name and its group's; ``None`` for plain plans.

    Ranks of a context-parallel group are data-parallel ranks, too, and may well be the same group: only their exchanges
    are all-to-all.
    """
    plan, meshes = session.plan, session.applied.meshes
    if not plan.dims.splits_model or meshes is None:
        return None
    cp = " × cp" if plan.dims.cp > 1 else ""
    groups: dict[str, str] = {}
    if meshes.data.ndim > 1 and plan.parsed.base == "hsdp":
        names = ["dp_replicate", f"dp_shard{cp}"]
    else:
        names = [f"dp{cp}"] * meshes.data.ndim
    for index, name in enumerate(names):
        groups[meshes.data.get_group(index).group_name] = name
    if isinstance(session.applied.outer, DistributedDataParallel):
        groups[session.applied.outer.process_group.group_name] = f"dp{cp}"
    for axis in ("pp", "tp"):
        mesh = getattr(meshes, axis)
        if mesh is not None:
            groups[mesh.get_group().group_name] = axis
    exchanges = None if meshes.cp is None else meshes.cp.get_group().group_name

    def axis(name: str, group: str) -> str:
        return "cp" if name == "all_to_all" and group == exchanges else groups.get(group, OTHER)

    return axis


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether a group runs on gloo, which scatters sums by exchanging pieces."""
    return str(dist.get_backend(group)) == "gloo"
