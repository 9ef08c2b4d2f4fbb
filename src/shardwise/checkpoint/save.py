"""`save_checkpoint`: each rank writes what it owns, rank 0 commits with one rename, and all agree how it went."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from pydantic import ValidationError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint import exchange
from shardwise.checkpoint.format import (
    MANIFEST,
    TEMPORARY,
    Manifest,
    OptimizerEntry,
    ParamGroup,
    TensorEntry,
    saved_steps,
    short_list,
    step_folder,
)
from shardwise.checkpoint.layout import Slot, box_of, copies_of, engine_of, local_of, plain, slots_of
from shardwise.checkpoint.shards import code_of, sync, sync_folder, write_file
from shardwise.errors import CheckpointError, UserError
from shardwise.plan.plan import Plan
from shardwise.units import bytes_text

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@dataclass
class _Holdings:
    """What this rank has to offer: tensors only it holds, tensors others hold too, and state that is no tensor."""

    mine: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, tuple[torch.Tensor, list[list[int]]]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor, copies: list[list[int]]) -> None:
        """File a tensor under whoever may write it; ``copies`` are the groups of ranks that each hold all of it."""
        if len(copies) > 1:
            self.shared[name] = (tensor, copies)
        elif exchange.rank() in copies[0]:
            self.mine[name] = tensor


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    state: dict[str, Any],
    rng: dict[str, torch.Tensor] | None,
    keep: int,
) -> Path:
    """Save model, optimizer and ``state`` as ``folder/step-00000020``; a step that is there already is left alone.

    Collective over the default group; one process needs none. ``folder`` must be on a disk that all ranks see.
    ``state`` is JSON, and rank 0's is kept. ``rng`` holds this rank's generator states as uint8 tensors. Buffers
    that are not sharded are rank 0's. The ``keep`` newest checkpoints stay, and always the one just written.
    Nobody sees a half checkpoint: what is in the folder by its name is complete.

    Raises:
        UserError: the folder cannot be written to, or ``keep`` is less than 1.
        CheckpointError: a rank could not write its part (the same text on every rank). Earlier checkpoints stay.
    """
    if keep < 1:
        raise UserError(f"keep {keep}: at least one checkpoint must be kept; set checkpoint.keep to 1 or more")
    target = folder / step_folder(step)
    temporary = folder / f"{TEMPORARY}{target.name}"
    first = exchange.rank() == 0
    start = exchange.broadcast_json(_prepare(folder, target, temporary) if first else None)
    if start["failure"]:
        raise exchange.revive(start["failure"])
    if start["exists"]:
        return target
    holdings, report = _write_share(temporary, model, optimizer, rng)
    reports = exchange.gather_json(report)
    failure: exchange.Failure | None = None
    if first:
        head = {"step": step, "plan": plan, "state": state, "optimizer": type(engine_of(optimizer)).__name__}
        failure = _finish(temporary, target, reports, holdings, head)
    failure = exchange.broadcast_json(failure)
    if failure:
        raise exchange.revive(failure)
    if first:
        _prune(folder, keep, target)
    return target


def _prepare(folder: Path, target: Path, temporary: Path) -> dict[str, Any]:
    """Rank 0: an empty temporary folder and nothing left of earlier crashes; or why not."""
    try:
        if (target / MANIFEST).is_file():
            return {"exists": True, "failure": None}
        if target.exists():
            raise CheckpointError(f"'{target}' is there but has no {MANIFEST}; remove it and save again")
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{TEMPORARY}step-*"):
            shutil.rmtree(stale)
        temporary.mkdir()
    except Exception as error:
        fault = {"rank": 0, "path": str(folder), "needed": 0, "fault": _fault(error)}
        return {"exists": False, "failure": _failure([fault], folder)}
    return {"exists": False, "failure": None}


def _write_share(
    temporary: Path, model: nn.Module, optimizer: Optimizer, rng: dict[str, torch.Tensor] | None
) -> tuple[_Holdings, dict[str, Any]]:
    """Write this rank's file and report what is in it. Collective; never raises because of a rank's own trouble."""
    path = temporary / f"rank-{exchange.rank():05d}.safetensors"
    report: dict[str, Any] = {"rank": exchange.rank(), "path": str(path), "file": None, "needed": 0, "fault": None}
    holdings = _Holdings()
    try:
        holdings = _holdings(model, optimizer, rng)
    except Exception as error:
        report["fault"] = _fault(error)
    loads = exchange.gather_counts(sum(_local_bytes(tensor) for tensor in holdings.mine.values()))
    if report["fault"]:
        return holdings, report
    try:
        tensors = holdings.mine | _assigned(holdings.shared, loads)
        report["needed"] = sum(map(_local_bytes, tensors.values()))
        report["entries"] = _write_tensors(path, tensors)
        report["scalars"] = holdings.scalars
        if path.exists():
            report |= {"file": path.name, "size": path.stat().st_size}
    except Exception as error:
        report["fault"] = _fault(error)
    return holdings, report


def _holdings(model: nn.Module, optimizer: Optimizer, rng: dict[str, torch.Tensor] | None) -> _Holdings:
    slots = slots_of(model)
    found = _Holdings()
    for slot in slots:
        name = f"model/{slot.name}"
        is_rank_0s = slot.is_buffer and not isinstance(slot.tensor, DTensor)
        found.add(name, slot.tensor, [[0]] if is_rank_0s else copies_of(slot.tensor))
        found.aliases |= {f"model/{alias}": name for alias in slot.aliases}
    _add_optimizer(found, optimizer, slots)
    for name, generator in (rng or {}).items():
        if generator.dtype != torch.uint8:
            raise CheckpointError(f"rng '{name}' is {generator.dtype}; give generator states as uint8 tensors")
        found.mine[f"rng/{exchange.rank()}/{name}"] = generator
    return found


def _add_optimizer(found: _Holdings, optimizer: Optimizer, slots: list[Slot]) -> None:
    names = {id(slot.tensor): slot.name for slot in slots}
    for number, group in enumerate(optimizer.param_groups):
        unknown = sum(id(parameter) not in names for parameter in group["params"])
        if unknown:
            raise CheckpointError(
                f"parameter group {number} of the optimizer has {unknown} parameters that the model does not; "
                "build the optimizer from the model's parameters after it is sharded"
            )
        options = {key: plain(value, f"optimizer option {key}") for key, value in group.items() if key != "params"}
        found.groups.append(ParamGroup(params=tuple(names[id(p)] for p in group["params"]), options=options))
    engine = engine_of(optimizer)
    for group in engine.param_groups:
        for parameter in group["params"]:
            for key, value in engine.state.get(parameter, {}).items():
                name = f"optimizer/{names[id(parameter)]}/{key}"
                if "/" in key:
                    raise CheckpointError(f"{name}: a state key with a slash cannot be stored")
                if isinstance(value, torch.Tensor):
                    _refuse_local(name, value, parameter)
                    copies = [[exchange.rank()]] if engine is not optimizer else copies_of(value)
                    found.add(name, value, copies)
                else:
                    found.scalars.setdefault(names[id(parameter)], {})[key] = plain(value, name)


def _refuse_local(name: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    """A plain tensor shaped as a shard is different on each rank: stored as one tensor it would be lost."""
    here, whole = local_of(parameter).shape, parameter.shape
    is_plain = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
    if is_plain and value.dim() and value.shape == here != whole:
        raise CheckpointError(f"{name} is a plain tensor with the shape of the local shard; make it a DTensor")


def _assigned(shared: dict[str, tuple[torch.Tensor, list[list[int]]]], loads: list[int]) -> dict[str, torch.Tensor]:
    """What this rank writes of tensors that several ranks hold: the largest first, to the copy with the least to do.

    ``loads`` are the bytes each rank writes anyway. Every rank computes the same answer.
    """
    mine = {}
    loads = list(loads)
    for name in sorted(shared, key=lambda n: (-_all_bytes(shared[n][0]), n)):
        tensor, copies = shared[name]
        ranks = min(copies, key=lambda group: (max(loads[rank] for rank in group), group))
        for rank in ranks:
            loads[rank] += -(-_all_bytes(tensor) // len(ranks))
        if exchange.rank() in ranks:
            mine[name] = tensor
    return mine


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write the local parts into ``path`` (no file where all are empty); says what was written, as JSON."""
    boxes = {name: box_of(tensor) for name, tensor in tensors.items()}
    local = {name: local_of(tensor) for name, tensor in tensors.items() if boxes[name].numel}
    hashes = write_file(path, local) if local else {}
    return {
        name: {
            "dtype": code_of(tensor),
            "shape": list(tensor.shape),
            "box": [boxes[name].offsets, boxes[name].lengths] if name in hashes else None,
            "hash": hashes.get(name),
        }
        for name, tensor in tensors.items()
    }


def _finish(
    temporary: Path, target: Path, reports: list[dict[str, Any]], holdings: _Holdings, head: dict[str, Any]
) -> exchange.Failure | None:
    """Rank 0: commit where every rank wrote its part, otherwise remove the parts and say what went wrong."""
    faults = [report for report in reports if report["fault"]]
    needed = sum(report["needed"] for report in reports)
    try:
        if not faults:
            _commit(temporary, target, _manifest(temporary, reports, holdings, head))
            return None
    except Exception as error:
        faults = [{"rank": 0, "path": str(temporary / MANIFEST), "fault": _fault(error)}]
    shutil.rmtree(temporary, ignore_errors=True)
    return _failure([fault | {"needed": needed} for fault in faults], target.parent)


def _manifest(temporary: Path, reports: list[dict[str, Any]], holdings: _Holdings, head: dict[str, Any]) -> Manifest:
    tensors: dict[str, dict[str, Any]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for report in reports:
        file = report["file"]
        if file and not ((temporary / file).is_file() and (temporary / file).stat().st_size == report["size"]):
            raise CheckpointError(
                f"rank 0 does not see '{file}' as rank {report['rank']} wrote it to '{temporary}'; "
                "use a folder on a disk that all nodes share"
            )
        for name, part in report["entries"].items():
            facts = {"dtype": part["dtype"], "shape": part["shape"]}
            entry = tensors.setdefault(name, {**facts, "shards": []})
            if any(entry[key] != value for key, value in facts.items()):
                raise CheckpointError(f"{name} has another shape or dtype on rank {report['rank']} than on others")
            if part["box"] and part["box"] not in [[s["offsets"], s["lengths"]] for s in entry["shards"]]:
                offsets, lengths = part["box"]
                shard = {"file": file, "key": name, "offsets": offsets, "lengths": lengths, "hash": part["hash"]}
                entry["shards"].append(shard)
        for name, values in report["scalars"].items():
            scalars.setdefault(name, {}).update(values)
    entries, broken = {}, []
    for name, entry in tensors.items():
        try:
            entries[name] = TensorEntry.model_validate(entry)
        except ValidationError as error:
            broken.append(f"{name}: {error.errors()[0]['msg']}")
    if broken:
        raise CheckpointError(f"the ranks do not hold all of the state: {short_list(broken)}")
    plan: Plan = head["plan"]
    return Manifest(
        step=head["step"],
        plan=plan.model_dump(mode="json", by_alias=True),
        plan_fingerprint=plan.fingerprint,
        versions=_versions(),
        ranks=len(reports),
        tensors=entries,
        aliases=holdings.aliases,
        optimizer=OptimizerEntry(name=head["optimizer"], groups=tuple(holdings.groups), state=scalars),
        state=plain(head["state"], "state"),
    )


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("shardwise")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return {"shardwise": own, "torch": str(torch.__version__), "safetensors": safetensors.__version__}


def _commit(temporary: Path, target: Path, manifest: Manifest) -> None:
    """The manifest last, everything on the disk, then one rename."""
    with (temporary / MANIFEST).open("wb") as file:
        file.write(manifest.to_json().encode())
        sync(file)
    sync_folder(temporary)
    temporary.rename(target)
    sync_folder(target.parent)


def _prune(folder: Path, keep: int, saved: Path) -> None:
    """Remove all but the newest; one is renamed first, so that half of it is never taken for a checkpoint."""
    others = [path for _, path in saved_steps(folder) if path != saved]
    for path in others[keep - 1 :]:
        try:
            shutil.rmtree(path.rename(path.with_name(f"{TEMPORARY}{path.name}")))
        except OSError as error:
            warnings.warn(f"the old checkpoint '{path}' could not be removed: {error}", stacklevel=2)


def _fault(error: Exception) -> dict[str, Any]:
    """What went wrong on a rank, as JSON."""
    if isinstance(error, OSError) and error.errno:
        return {"errno": error.errno}
    return exchange.describe(error)


def _failure(faults: list[dict[str, Any]], folder: Path) -> exchange.Failure:
    """What every rank raises: the first rank's trouble, with the numbers and the fix."""
    first = faults[0]
    fault = first["fault"]
    also = [str(other["rank"]) for other in faults[1:]]
    also_text = f" (ranks {', '.join(also)} too)" if also else ""
    if "errno" not in fault:
        return {"kind": fault["kind"], "text": f"rank {first['rank']}{also_text}: {fault['text']}"}
    why = os.strerror(fault["errno"])
    if fault["errno"] in _NOT_ALLOWED:
        text = f"rank {first['rank']}{also_text} cannot write checkpoints to '{folder}': {why}"
        return {"kind": UserError.__name__, "text": f"{text}; choose a folder you may write to (train.output)"}
    free = bytes_text(shutil.disk_usage(folder).free) if folder.is_dir() else "unknown"
    text = f"rank {first['rank']}{also_text} could not write '{first['path']}': {why}; the checkpoint needs "
    text += f"{bytes_text(first['needed'])} and {free} are free; make room or choose a folder on another disk "
    return {"kind": CheckpointError.__name__, "text": f"{text}(train.output). Earlier checkpoints are untouched."}


def _local_bytes(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return local.numel() * local.element_size()


def _all_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
