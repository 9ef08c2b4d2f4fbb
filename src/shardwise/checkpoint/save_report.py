"""Reports of ranks on their writes, merged into one manifest, or into one error message."""

from __future__ import annotations

import datetime
import errno
import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

import safetensors
import torch
from pydantic import ValidationError
from torch.optim import Optimizer

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.format import Manifest, OptimizerEntry, TensorEntry, short_list
from shardwise.checkpoint.layout import engine_of, plain
from shardwise.checkpoint.parts import merged_groups
from shardwise.checkpoint.save_plan import SavePlan
from shardwise.checkpoint.shard_files import write_file
from shardwise.checkpoint.spread_report import spread_tensors, write_table
from shardwise.checkpoint.storage.local_storage import Folder, free_bytes
from shardwise.errors import CheckpointError, UserError
from shardwise.plan.plan import Plan
from shardwise.units import bytes_text

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@dataclass(frozen=True)
class ManifestHead:
    """Manifest fields beside the tensors, on rank 0.

    ``names`` are all names of a model split into stages, in its order; empty where every rank has all of them.
    """

    step: int
    plan: Plan
    state: dict[str, Any]
    optimizer: str
    model: dict[str, Any] | None
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        step: int,
        plan: Plan,
        state: dict[str, Any],
        optimizer: Optimizer,
        model: dict[str, Any] | None,
        names: tuple[str, ...] = (),
    ) -> ManifestHead:
        """Snapshot the head in copied values; the caller may change its state afterwards.

        Raises:
            CheckpointError: ``state`` contains a value that JSON cannot represent.
        """
        kind = type(engine_of(optimizer)).__name__
        return cls(step, plan, plain(state, "state"), kind, plain(model, "model"), names)


def write_share(
    working: Folder, share: SavePlan, rank: int, wrong: Exception | None = None, *, spread: bool = False
) -> dict[str, Any]:
    """Write this rank's file into ``working`` and return its report as JSON; never raises.

    A rank without tensors writes no file. ``wrong`` is an earlier error; then nothing is written.
    ``spread``: the hashes go to a table beside the file.
    """
    path = working / f"rank-{rank:05d}.safetensors"
    report: dict[str, Any] = {"rank": rank, "path": str(path), "file": None, "needed": share.num_bytes}
    report |= {"entries": {}, "scalars": {}, "groups": None, "aliases": {}, "fault": None}
    try:
        if wrong is not None:
            raise wrong
        filled = {name: piece.tensor for name, piece in share.pieces.items() if piece.box.numel}
        hashes = write_file(path, filled) if filled else {}
        report["entries"] = {name: [dtype, shape, None, None] for name, (dtype, shape) in share.others.items()}
        for name, piece in share.pieces.items():
            box = [piece.box.offsets, piece.box.lengths] if name in hashes else None
            report["entries"][name] = [piece.dtype, piece.shape, box, hashes.get(name)]
        report["scalars"] = share.scalars
        if share.groups is not None:
            report["groups"] = [group.model_dump() for group in share.groups]
        if rank == 0:
            report["aliases"] = share.aliases
        if filled:
            report |= {"file": path.name, "size": path.stat().st_size}
            if spread:
                report["table"] = write_table(working, path.name, hashes)
    except Exception as error:
        report["fault"] = fault_of(error)
    return report


def merged(working: Folder, reports: list[dict[str, Any]], head: ManifestHead) -> Manifest:
    """Build the manifest of a checkpoint from the reports of all ranks in ``working``.

    Raises:
        CheckpointError: rank 0 does not see files of other ranks, or the shares do not cover the full state.
    """
    scalars: dict[str, dict[str, Any]] = {}
    for report in reports:
        file = report["file"]
        if file and not _is_there(working / file, report["size"]):
            raise CheckpointError(
                f"rank 0 does not see '{file}' as rank {report['rank']} wrote it to '{working}'; "
                "use a folder on a disk that all nodes share"
            )
        for name, values in report["scalars"].items():
            scalars.setdefault(name, {}).update(values)
    spread = "merged" in reports[0]
    tensors, files = spread_tensors(reports) if spread else (_listed_tensors(reports), {})
    entries, broken = {}, []
    for name, entry in tensors.items():
        try:
            entries[name] = TensorEntry.model_validate(entry)
        except ValidationError as error:
            broken.append(f"{name}: {error.errors()[0]['msg']}")
    broken += [f"model/{name}: no rank has it" for name in head.names if f"model/{name}" not in tensors]
    if broken:
        raise CheckpointError(f"the ranks do not have all of the state: {short_list(broken)}")
    groups = {report["rank"]: report["groups"] for report in reports if report["groups"] is not None}
    return Manifest(
        schema_version=3 if spread else 2,
        files=files,
        step=head.step,
        plan=head.plan.model_dump(mode="json", by_alias=True),
        plan_fingerprint=head.plan.fingerprint,
        versions=versions(),
        ranks=len(reports),
        tensors=entries,
        aliases=reports[0]["aliases"],
        optimizer=OptimizerEntry(name=head.optimizer, groups=tuple(merged_groups(groups, head.names)), state=scalars),
        state=head.state,
        model=head.model,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _is_there(path: Folder, size: int) -> bool:
    """Return whether a file with so many bytes is there; one question to a file system that all ranks share."""
    try:
        found: int = path.stat().st_size
    except OSError:
        return False
    return found == size


def _listed_tensors(reports: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = {}
    seen: set[tuple[str, str]] = set()
    for report in reports:
        for name, (dtype, shape, box, made) in report["entries"].items():
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "shards": []})
            if entry["dtype"] != dtype or entry["shape"] != shape:
                raise CheckpointError(f"{name} has another shape or dtype on rank {report['rank']} than on others")
            if box and (name, str(box)) not in seen:
                seen.add((name, str(box)))
                shard = {"file": report["file"], "key": name, "offsets": box[0], "lengths": box[1], "hash": made}
                entry["shards"].append(shard)
    return tensors


def versions() -> dict[str, str]:
    """Return the versions of the libraries that wrote the checkpoint."""
    try:
        own = importlib.metadata.version("shardwise")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return {"shardwise": own, "torch": str(torch.__version__), "safetensors": safetensors.__version__}


def fault_of(error: Exception) -> dict[str, Any]:
    """Serialize a rank's error as JSON."""
    if isinstance(error, OSError) and error.errno:
        return {"errno": error.errno}
    return exchange.describe(error)


def failure_of(faults: list[dict[str, Any]], folder: Folder, needed: int | None = None) -> exchange.Failure:
    """Build the error that every rank raises: the first rank's, with sizes if known, and the fix."""
    first = faults[0]
    fault = first["fault"]
    also = [str(other["rank"]) for other in faults[1:]]
    also_text = f" (ranks {', '.join(also)} too)" if also else ""
    if "errno" not in fault:
        return {"kind": fault["kind"], "text": f"rank {first['rank']}{also_text}: {fault['text']}"}
    why = os.strerror(fault["errno"])
    if fault["errno"] in _NOT_ALLOWED:
        text = f"rank {first['rank']}{also_text} cannot write checkpoints to '{folder}': {why}; choose a folder you "
        return {"kind": UserError.__name__, "text": f"{text}may write to (train.output or checkpoint.folder)"}
    text = f"rank {first['rank']}{also_text} could not write '{first['path']}': {why}; {_room(folder, needed)}"
    text += "make room or choose a folder on another disk (train.output or checkpoint.folder). "
    return {"kind": CheckpointError.__name__, "text": f"{text}Earlier checkpoints are untouched."}


def _room(folder: Folder, needed: int | None) -> str:
    try:
        free = free_bytes(folder)
    except OSError:
        free = None
    known = "an unknown number of bytes is" if free is None else f"{bytes_text(free)} are"
    return f"{known} free; " if needed is None else f"the checkpoint needs {bytes_text(needed)} and {known} free; "
