"""Expected part of the model on a rank, by plan and structure and not by observation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from shardwise.measure.collectives import OTHER, Axes
from shardwise.model.facts import ModelSpec, ParameterSpec
from shardwise.model.read import STAGE, clean_name
from shardwise.parallel.ownership import ownership_of
from shardwise.parallel.pipeline_parallel.schedule import padded_count
from shardwise.plan.plan import Plan
from shardwise.receipts.expected_experts import add_expert_groups
from shardwise.train.session import Session
from shardwise.train.step import Micro, Step


def used_spec(session: Session) -> ModelSpec:
    """Return this rank's part of the model.

    Parameters without a gradient on any rank are frozen.

    A gradient that exists but was never reduced over the ranks counts as a gradient, and so does one that the backward
    has stepped and freed.
    """
    ownership = ownership_of(session.module)
    stepped = set() if session.in_backward is None else session.in_backward.stepped
    named = session.module.named_parameters()
    used = {clean_name(name) for name, p in named if p.grad is not None or id(p) in stepped}
    used |= set(never_reduced(session.module))
    if ownership is not None:
        used |= {ownership.canonical(name) for name in used}
    spec = part_of(session)
    parameters = (p.model_copy(update={"trainable": p.trainable and p.name in used}) for p in spec.parameters)
    return spec.model_copy(update={"parameters": tuple(parameters)})


def part_of(session: Session) -> ModelSpec:
    """Return the blocks and parameters of this rank's stages; the full model without a pipeline."""
    spec = session.spec
    if session.plan.dims.pp == 1:
        return spec
    blocks = {block for mine in planned_stages(session).values() for block in mine}
    outside = {p.name for unit in root_units(session, spec) for p in unit}
    kept = tuple(p for p in spec.parameters if p.block in blocks or p.name in outside)
    return spec.model_copy(update={"parameters": kept, "blocks": tuple(b for b in spec.blocks if b in blocks)})


def stage_blocks(session: Session) -> dict[int, tuple[str, ...]]:
    """Return the actual blocks of each stage on this rank, by stage number."""
    live = {id(block) for block in session.applied.blocks}
    found: dict[int, tuple[str, ...]] = {}
    for name, child in session.module.named_children():
        if name.startswith(STAGE):
            inside = (clean_name(inner) for inner, part in child.named_modules() if id(part) in live)
            found[int(name.removeprefix(STAGE))] = tuple(inside)
    return found or {0: session.spec.blocks}


def planned_stages(session: Session) -> dict[int, tuple[str, ...]]:
    """Return the stages that this rank should have, with the blocks that the plan gives them.

    Stages are assigned round robin, or there and back for ``zbv``.
    """
    plan, counts, blocks = session.plan, session.plan.stage_blocks, session.spec.blocks
    if counts is None:
        return {0: blocks}
    pp, rank = plan.dims.pp, session.place.pp
    mine = [rank + turn * pp for turn in range(plan.virtual_stages)]
    if plan.pipeline_schedule == "zbv":
        mine = [rank, 2 * pp - 1 - rank]
    return {stage: blocks[sum(counts[:stage]) : sum(counts[: stage + 1])] for stage in mine}


def recomputed_blocks(session: Session) -> frozenset[str]:
    """Return the blocks on this rank that the plan recomputes: the first ones of each of its stages."""
    stages = planned_stages(session).values()
    return frozenset(name for blocks in stages for name in blocks[: session.plan.recomputed(len(blocks))])


def run_micros(session: Session, step: Step) -> list[Micro]:
    """Return the micro batches to compute; a pipeline's schedule may add padding ones."""
    micros = list(step.micros)
    if session.plan.dims.pp == 1:
        return micros
    return micros + [micros[-1]] * (padded_count(session.plan, len(micros)) - len(micros))


def tokens_of(micros: Sequence[Micro]) -> list[tuple[int, int]] | None:
    """Return samples and length of each micro batch; ``None`` if inputs are not token sequences."""
    found = []
    for micro in micros:
        leaves = [
            leaf for leaf in _pytree.tree_leaves(micro.inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim == 2
        ]
        shapes = {(leaf.shape[0], leaf.shape[1]) for leaf in leaves if not leaf.is_floating_point()}
        if len(shapes) != 1:
            return None
        found += list(shapes)
    return found


def keeps_gathered(plan: Plan) -> bool:
    """Return whether a pipeline gathers sharded weights once for all micro batches of a step."""
    full = plan.parsed.base == "zero2" or plan.pipeline_schedule in ("interleaved-zero-bubble", "zbv")
    return plan.dims.pp > 1 and full


def root_units(session: Session, spec: ModelSpec) -> list[list[ParameterSpec]]:
    """Group parameters outside of the blocks into sharding units by the stage that uses them.

    The first stage has those used before the first block, the last one those used after the last, or never.
    """
    outside = [p for p in spec.parameters if p.block is None]
    decision = session.applied.decision
    if decision is None or decision.wiring is None:
        return [outside] if outside else []
    units = []
    for blocks in planned_stages(session).values():
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
    """Return this rank's index among FSDP2's shards, which include context-parallel ranks."""
    dims, place = session.plan.dims, session.place
    return place.dp % dims.dp_shard * dims.cp + place.cp


def shard_dim_of(session: Session, name: str) -> int | None:
    """Return the dim that tensor parallel shards a parameter along; ``None`` if replicated."""
    decision = session.applied.decision
    layout = None if decision is None else decision.layout
    return None if layout is None else layout.shard_dim.get(name)


def group_of(module: FSDPModule) -> Any:
    """Return FSDP2's parameter group of a unit; ``None`` if it has none."""
    return module._get_fsdp_state()._fsdp_param_group


def holding_units(module: nn.Module) -> list[FSDPModule]:
    """Return FSDP2's units inside ``module`` that manage parameters."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    return [unit for unit in units if group_of(unit) is not None and group_of(unit).fsdp_params]


def never_reduced(module: nn.Module) -> Iterator[str]:
    """Yield the parameters of FSDP2's units whose gradient is whole here, and not reduced yet."""
    for unit in holding_units(module):
        for local in group_of(unit).fsdp_params:
            full = getattr(local, "_unsharded_param", None)
            if local.unsharded_accumulated_grad is not None or (full is not None and full.grad is not None):
                yield clean_name(str(local._param_fqn))


def names_axes(plan: Plan) -> bool:
    """Return whether a plan has collectives over other axes than data-parallel ones."""
    return plan.dims.splits_model or plan.dims.ep > 1


def axis_of(session: Session) -> Axes | None:
    """Return a function from a collective and its ranks to its axis; ``None`` for plain plans.

    Ranks of a context-parallel group are data-parallel ranks, too, and may be the same: only their exchanges are
    all-to-all.
    """
    plan, meshes = session.plan, session.applied.meshes
    if not names_axes(plan) or meshes is None:
        return None
    cp = " × cp" if plan.dims.cp > 1 else ""
    groups: dict[tuple[int, ...], str] = {}
    if meshes.data.ndim > 1 and plan.parsed.base == "hsdp":
        names = ["dp_replicate", f"dp_shard{cp}"]
    else:
        names = [f"dp{cp}"] * meshes.data.ndim
    for index, name in enumerate(names):
        groups[_ranks(meshes.data.get_group(index))] = name
    if isinstance(session.applied.outer, DistributedDataParallel):
        groups[_ranks(session.applied.outer.process_group)] = f"dp{cp}"
    for kind in ("pp", "tp"):
        mesh = getattr(meshes, kind)
        if mesh is not None:
            groups[_ranks(mesh.get_group())] = kind
    exchanging = None if meshes.cp is None else _ranks(meshes.cp.get_group())
    dispatching = add_expert_groups(session, groups)

    def axis(name: str, ranks: tuple[int, ...]) -> str:
        if name == "all_to_all" and ranks in (exchanging, dispatching) and groups.get(ranks) != "tp":
            return "cp" if ranks == exchanging else "ep"
        return groups.get(ranks, OTHER)

    return axis


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether a group uses gloo, which reduce-scatters by exchanging pieces."""
    return str(dist.get_backend(group)) == "gloo"
