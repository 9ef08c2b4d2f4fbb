"""Receipt lines on structure: units, stages, tied parameters, block forwards, placement."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from shardwise.distributed.places import first_in_group
from shardwise.distributed.process_group import gather_text
from shardwise.measure import state
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name
from shardwise.plan.parallel_options import OPTION_SPECS
from shardwise.receipts.expected import expected_block_calls, units_of
from shardwise.receipts.expected_experts import expert_units
from shardwise.receipts.expected_part import (
    group_of,
    holding_units,
    planned_stages,
    recomputed_blocks,
    root_units,
    run_micros,
    stage_blocks,
    used_spec,
)
from shardwise.receipts.lines.forward_lines import ForwardCounts
from shardwise.receipts.lines.sample_lines import tensor_bytes
from shardwise.receipts.lines.traffic_lines import range_text
from shardwise.receipts.receipt import Line
from shardwise.train.session import Session
from shardwise.train.step import Step

REPLICAS_APART = 1e-3  # of a norm; 16-bit compute gives the same bits on each rank too, as inputs are the same
REPLICAS_FLOOR = 1e-4


def structure_lines(session: Session, step: Step, forwards: ForwardCounts) -> Iterator[Line]:
    """Yield the lines that this rank can check alone."""
    plan, spec, module = session.plan, used_spec(session), session.module
    unused = _trainable_here(session, spec) - spec.num_trainable
    if unused:
        found = f"{unused} of {_trainable_here(session, spec)} trainable elements take no part in the loss"
        yield Line(name="gradients missing", planned="none", found=found, ok=None)
    cuts = plan.dims.tp * plan.dims.pp > 1
    if plan.parsed.shards_parameters or (cuts and plan.dims.dp * plan.dims.cp > 1):
        blocks = [unit for unit in units_of(spec) if unit[0].block is not None]
        planned = len(blocks) + len(root_units(session, spec)) + len(expert_units(session, spec))
        yield _same("sharding units", str(planned), str(len(holding_units(module))))
    if spec.blocks:
        again = recomputed_blocks(session)
        text = plan.recompute if plan.recompute_layers is None else f"{plan.recompute} of {len(again)} blocks"
        inside = " inside of the compiled blocks" if plan.compile and again else ""
        visible = frozenset[str]() if plan.compile else again
        yield block_line(spec, visible, len(run_micros(session, step)), forwards, f"{text}{inside}")
        if plan.recompute_layers is not None:
            yield recomputed_line(session, len(again))
    tied = [names if plan.dims.pp == 1 else _present(module, names) for names in spec.tied]
    tied = [names for names in tied if len(names) > 1]
    if tied:
        planned_text = ", ".join(" = ".join(names) for names in tied)
        untied = [" ≠ ".join(names) for names in tied if not _is_tied(module, names)]
        yield Line(name="tied parameters", planned=planned_text, found=", ".join(untied) or planned_text, ok=not untied)
    if plan.dims.pp > 1:
        yield _same("stages here", _stages_text(planned_stages(session)), _stages_text(stage_blocks(session)))


def recomputed_line(session: Session, planned: int) -> Line:
    """Count the blocks of this rank that are inside of checkpointing."""
    blocks = session.applied.blocks
    found = sum(isinstance(block, CheckpointWrapper) for block in blocks)
    return _same(OPTION_SPECS["recompute_layers"].receipt, f"{planned} of {len(blocks)}", f"{found} of {len(blocks)}")


def block_line(spec: ModelSpec, again: Collection[str], micros: int, forwards: ForwardCounts, recompute: str) -> Line:
    """Check forwards of blocks: one per model forward, or as called, plus those of the blocks that run ``again``."""
    calls = forwards.of_blocks(spec.blocks, micros)
    least, most = expected_block_calls(spec, again, micros, calls)
    own = 0 if again else forwards.recomputed  # by the model's own checkpointing
    found = forwards.block_calls - own
    number = forwards.number or micros
    often = f"; {number} forwards of the model" if number != micros else ""
    planned = f"{range_text((least, most), str)} (recompute {recompute}{often})"
    text = f"{found}, and {own} recomputed by the model itself" if own else str(found)
    return Line(name="block forwards per step", planned=planned, found=text, ok=least <= found <= most)


def _stages_text(stages: dict[int, tuple[str, ...]]) -> str:
    return "; ".join(f"{number}: {', '.join(blocks)}" for number, blocks in sorted(stages.items()))


def _trainable_here(session: Session, used: ModelSpec) -> int:
    here = {p.name for p in used.parameters}
    return sum(p.num_elements for p in session.spec.parameters if p.trainable and p.name in here)


def _same(name: str, planned: str, found: str) -> Line:
    return Line(name=name, planned=planned, found=found, ok=planned == found)


def _live(module: nn.Module) -> dict[str, nn.Parameter]:
    return {clean_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}


def _present(module: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a tied parameter that this rank's stages use."""
    live = _live(module)
    return tuple(name for name in names if name in live)


def _is_tied(module: nn.Module, names: Iterable[str]) -> bool:
    live = _live(module)
    return len({id(live.get(name)) for name in names}) == 1


def offload_lines(session: Session) -> Iterator[Line]:
    """Yield lines on where parameters and optimizer state are stored."""
    plan, module = session.plan, session.module
    if not plan.parsed.shards_parameters:
        return
    offloading = {isinstance(group_of(unit).offload_policy, CPUOffloadPolicy) for unit in holding_units(module)}
    tensors = [*module.parameters(), *(t for t in state.optimizer_tensors(session.optimizer) if t.ndim)]
    where = state.devices(tensors)
    home = "cpu" if plan.parsed.offload else session.device.type
    planned = f"{home}, offload {'on' if plan.parsed.offload else 'off'}"
    found = f"{where}, offload {'/'.join(sorted('on' if o else 'off' for o in offloading))}"
    yield _same("state lives on", planned, found)


def tied_lines(session: Session) -> Iterator[Line]:
    """Check that every block is on one stage and shared parameters are equal; collective."""
    plan, spec = session.plan, session.spec
    if plan.dims.pp == 1:
        return
    live = _live(session.module)
    hashes = {}
    for names in spec.tied:
        part = next((live[name] for name in names if name in live), None)
        if part is not None:
            hashes[names[0]] = hashlib.blake2b(tensor_bytes(state.local(part)), digest_size=8).hexdigest()
    mine = {"blocks": [b for blocks in stage_blocks(session).values() for b in blocks], "hashes": hashes}
    texts = gather_text(json.dumps(mine), session.ranks)
    first = first_in_group(plan.dims, "dp", "cp", "tp")
    mates = (first == first[session.ranks.rank]).nonzero()[0].tolist()
    everyone = {rank: json.loads(texts[rank]) for rank in mates}
    counts = [len(everyone[rank]["blocks"]) for rank in mates]
    blocks = sorted(block for rank in mates for block in everyone[rank]["blocks"])
    sizes = " + ".join(str(count) for count in counts)
    planned = f"each of {len(spec.blocks)} blocks on one of {plan.dims.pp} ranks"
    ok = blocks == sorted(spec.blocks) and all(counts)
    yield Line(name="stages", planned=planned, found=f"{sizes} blocks" if ok else f"{sizes}: not each on one", ok=ok)
    shared = {
        name: [everyone[rank]["hashes"][name] for rank in mates if name in everyone[rank]["hashes"]]
        for name in (names[0] for names in spec.tied)
    }
    shared = {name: found for name, found in shared.items() if len(found) > 1}
    if shared:
        apart = [name for name, found in shared.items() if len(set(found)) > 1]
        planned = f"{', '.join(shared)}: the same on each stage"
        yield Line(
            name="tied over stages",
            planned=planned,
            found=f"{', '.join(apart)}: not the same" if apart else planned,
            ok=not apart,
        )


def replica_lines(session: Session) -> Iterator[Line]:
    """Check that parameters replicated over tp have equal gradients on each rank; collective.

    A gradient that is partial, or computed from different numbers, drifts apart without any other sign. Gradients
    that are zero up to rounding (a key's bias) are left out.
    """
    plan = session.plan
    if plan.dims.tp == 1:
        return
    mine: dict[str, float] = {}
    for name, parameter in session.module.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and _is_whole_over_tp(gradient):
            mine[clean_name(name)] = float(state.local(gradient).double().norm())
    texts = gather_text(json.dumps(mine), session.ranks)
    first = json.loads(texts[session.ranks.rank - session.place.tp])
    floor = REPLICAS_FLOOR * max([*first.values(), 0.0])
    apart = [n for n, norm in mine.items() if abs(norm - first.get(n, 0.0)) > REPLICAS_APART * max(norm, floor)]
    planned = f"{len(mine)} gradients: the same on each of {plan.dims.tp} ranks"
    more = f" and {len(apart) - 2} more" if len(apart) > 2 else ""
    found = f"not the same: {', '.join(apart[:2])}{more}" if apart else planned
    yield Line(name="replicas over tp", planned=planned, found=found, ok=not apart)


def _is_whole_over_tp(gradient: DTensor) -> bool:
    axes = gradient.device_mesh.mesh_dim_names or ()
    return "tp" in axes and gradient.placements[axes.index("tp")].is_replicate()
