"""`load_checkpoint`: fill a live model and optimizer, under any strategy and world size."""

from __future__ import annotations

import bisect
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.engine_state import shadow_of
from shardwise.checkpoint.format import (
    AVERAGE,
    MANIFEST,
    GridShards,
    Manifest,
    Shard,
    TensorEntry,
    newest,
    read_manifest,
    short_list,
)
from shardwise.checkpoint.layout import Box, Slot, engine_of, like, local_of, part_of, slots_of
from shardwise.checkpoint.parts import is_in_parts, joined
from shardwise.checkpoint.save_plan import Average
from shardwise.checkpoint.shard_files import (
    ShardReader,
    code_of,
    entry_dtype,
    fill,
    in_threads,
    is_full,
    touched,
    wrong_bytes,
)
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.distributed.local_tensor import empty_beside
from shardwise.errors import CheckpointError, CheckpointMismatch
from shardwise.parallel.fp8 import agree_on_scales
from shardwise.parallel.ownership import StageOwnership

# they select the implementation, not the algorithm: the live optimizer's values are kept
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
_FIX = "remove this checkpoint and load an earlier one"  # then `newest` finds it without ``latest``


class RelaidState(Protocol):
    """State of one parameter that its optimizer brings from the saved layout into the one here, by ``relayout``.

    ``saved`` are tensors to fill, by their key; ``finish`` is called when all is read. Not ``is_exact``: it rounds.
    """

    saved: dict[str, torch.Tensor]

    @property
    def is_exact(self) -> bool:
        """Whether every value is as it was saved."""

    def finish(self) -> None:
        """Put what was read where it belongs."""


@dataclass
class _Work:
    """Load plan: tensors to fill, values to set afterwards, and problems.

    ``ownerships`` are, for each parameter group of the live optimizer, the groups of the checkpoint that its local
    parameters were in; ``options`` are what each group gets.
    """

    manifest: Manifest
    ownerships: list[list[int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    jobs: list[tuple[torch.Tensor, list[tuple[Shard, Box]]]] = field(default_factory=list)
    states: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    moved: list[tuple[str, RelaidState]] = field(default_factory=list)


def load_checkpoint(
    path: Folder,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    verify: bool = True,
    average: Average | None = None,
) -> Manifest:
    """Fill ``model`` and ``optimizer`` in place from a checkpoint; return its manifest.

    ``path`` is the checkpoint's folder. Collective over the default group. Strategy and world size may differ from
    those that saved. Each rank reads only its local shards, straight into its tensors; the values are bit-equal.
    Optimizer state is created as needed, on the parameter's device and in its layout (8-bit state in another layout of
    blocks is requantized, with a notice); hyperparameters are restored by parameter names, except how the optimizer
    computes (``foreach``, ``fused``, ``capturable``, ``differentiable``). ``optimizer=None`` leaves its state unread.
    ``average`` are filled where the checkpoint has averages (`has_average`).
    With ``verify`` the hashes of all the shards that any rank needs are compared: shards that a rank reads completely
    are hashed during the read, each of the others by one rank. No tensor is changed before all names and shapes were
    found to match; damage found later leaves the model partly filled.

    Raises:
        CheckpointError: names, shapes, dtypes or the optimizer do not match (at most ten are listed), or a file is
            missing or damaged. The same on every rank.
    """
    shadow = shadow_of(model, filled=False)
    if shadow is not None:  # of an engine: its rows are filled, then written to it
        states = shadow.optimizer if optimizer is not None else None
        manifest = load_checkpoint(path, model=shadow.model, optimizer=states, verify=verify)
        shadow.put_back(states=optimizer is not None)
        return manifest
    work = exchange.together(lambda: _match(path, model, optimizer, average))
    if is_in_parts(model):
        work.problems, work.ownerships = joined(work.problems, work.ownerships)
    exchange.together(lambda: _choose_options(path, optimizer, work))
    rest = _unseen(work) if verify else []
    exchange.together(lambda: _fill(path, optimizer, work, rest, verify))
    _report_inexact(work)
    agree_on_scales(model)
    return work.manifest


def _report_inexact(work: _Work) -> None:
    """Report on rank 0 that 8-bit state is not bit-equal to what was saved, where it is not."""
    names = [name for name, moved in work.moved if not moved.is_exact]
    if names and exchange.rank() == 0:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        logging.getLogger("shardwise").warning(
            f"8-bit optimizer state of {names[0]}{more} was requantized: parts begin elsewhere than when it was "
            "saved, not at a multiple of 256 elements; it is within half a code of what was saved"
        )


def newest_of_all(folder: Folder) -> Folder | None:
    """Return the `newest` checkpoint as rank 0 sees it, on every rank.

    Collective over the default group.

    Raises:
        CheckpointError: a rank does not see it, or the folder cannot be read.
    """
    mine = exchange.together(lambda: newest(folder))
    name = exchange.broadcast_json(mine and mine.name)
    path = folder / name if name else None

    def look() -> None:
        if path is not None and not (path / MANIFEST).is_file():
            raise CheckpointError(
                f"rank {exchange.rank()} does not see '{path}', which rank 0 resumes from; use a folder on a disk that "
                "all nodes share (train.output or checkpoint.folder)"
            )

    exchange.together(look)
    return path


def rng_for(path: Folder, rank: int) -> dict[str, torch.Tensor] | None:
    """Return the RNG states that rank ``rank`` saved; ``None`` where it saved none.

    By name, uint8 on the CPU.

    Raises:
        CheckpointError: the manifest or the rank's file is missing or damaged.
    """
    prefix = f"rng/{rank}/"
    entries = {n.removeprefix(prefix): e for n, e in read_manifest(path).tensors.items() if n.startswith(prefix)}
    found: dict[str, torch.Tensor] = {}
    with ShardReader(path, _FIX) as reader:
        for name, entry in entries.items():
            for shard in entry.shards:
                reader.stored(shard, entry_dtype(entry))  # before memory is allocated for it
            found[name] = torch.empty(entry.shape, dtype=entry_dtype(entry))
            fill(found[name], touched(found[name], entry.shards), reader, check=True)
    return found or None


def has_average(manifest: Manifest) -> bool:
    """Return whether a checkpoint has averages of the weights."""
    return any(name.startswith(AVERAGE) for name in manifest.tensors)


def _match(path: Folder, model: nn.Module, optimizer: Optimizer | None, average: Average | None) -> _Work:
    """Match names and shapes of this rank; nothing of the model is changed."""
    work = _Work(read_manifest(path))
    slots, home = slots_of(model), part_of(model)
    _match_model(slots, home, work)
    if average is not None and has_average(work.manifest):
        _match_average(slots, average, work)
    if optimizer is not None:
        _match_groups(slots, home, optimizer, work)
        _match_state(slots, optimizer, work)
    return work


def _choose_options(path: Folder, optimizer: Optimizer | None, work: _Work) -> None:
    """Choose which saved group's options each live group gets, where everything matches.

    Raises:
        CheckpointMismatch: something does not match.
    """
    saved = work.manifest.optimizer.groups
    for number, ownerships in enumerate(work.ownerships):
        if len(ownerships) > 1:
            work.problems.append(f"optimizer: group {number} mixes the groups {ownerships} of the checkpoint")
        at = ownerships[0] if ownerships else number
        options = dict(saved[at].options) if at < len(saved) else {}
        live = {} if optimizer is None else optimizer.param_groups[number]
        work.problems += [
            f"optimizer: {key} of group {number} is {value!r:.40} in the checkpoint, {live[key]!r:.40} here"
            for key, value in options.items()
            if key in live and not _alike(live[key], value)
        ]
        work.options.append(options)
    if work.problems:
        raise CheckpointMismatch(
            f"checkpoint '{path}' does not fit the model and optimizer; undo the change to the model or the optimizer, "
            f"or choose another output folder: {short_list(work.problems)}"
        )


def _alike(live: Any, saved: Any) -> bool:
    """Return whether a saved hyperparameter can replace the live one.

    A number replaces a number, a list a list.
    """
    numbers = (bool, int, float, torch.Tensor)
    if isinstance(live, numbers):
        return saved is None or isinstance(saved, numbers)
    if isinstance(live, tuple | list):
        return isinstance(saved, list) and (
            len(live) != len(saved) or all(_alike(one, other) for one, other in zip(live, saved, strict=True))
        )
    return True


def _unseen(work: _Work) -> list[Shard]:
    """Return this rank's share of the shards that are needed but read completely by no rank.

    Collective.
    """
    begins, number, total = list[int](), dict[int, int](), 0
    tensors = [entry.shards for entry in work.manifest.tensors.values()]
    for shards in tensors:
        numbered = shards.made.items() if isinstance(shards, GridShards) else enumerate(shards)  # others: not needed
        number |= {id(shard): total + at for at, shard in numbered}
        begins.append(total)
        total += len(shards)
    flags = torch.zeros(2, total, dtype=torch.uint8)
    for _, pieces in work.jobs:
        for shard, overlap in pieces:
            flags[0, number[id(shard)]] = 1
            if is_full(shard, overlap):
                flags[1, number[id(shard)]] = 1
    needed, full = exchange.any_of(flags)
    open_ones = ((needed == 1) & (full == 0)).nonzero().flatten().tolist()
    mine = open_ones[exchange.rank() :: exchange.world_size()]
    places = [(bisect.bisect_right(begins, index) - 1, index) for index in mine]

    def made() -> list[Shard]:
        return [tensors[at][index - begins[at]] for at, index in places]

    return exchange.together(made) if work.manifest.files else made()  # tables of hashes may be damaged


def _fill(path: Folder, optimizer: Optimizer | None, work: _Work, rest: list[Shard], verify: bool) -> None:
    wrong: list[tuple[object, str]] = []
    with ShardReader(path, _FIX) as reader:

        def check(shard: Shard) -> None:
            if reader.wrong_hash(shard):
                wrong.append((path / shard.file, shard.key))

        in_threads(check, rest)
        if wrong:
            raise CheckpointError(wrong_bytes(wrong, _FIX))
        largest_first = sorted(work.jobs, key=lambda job: -job[0].numel())
        in_threads(lambda job: fill(*job, reader, check=verify), largest_first)
    for _, moved in work.moved:
        moved.finish()
    if optimizer is not None:
        _set_optimizer(optimizer, work)


def _match_model(slots: list[Slot], home: StageOwnership | None, work: _Work) -> None:
    manifest = work.manifest
    live = {f"model/{name}" for slot in slots for name in slot.names}
    if home is not None:
        live |= {f"model/{name}" for name in (*home.names, *home.aliases)}
    for slot in slots:
        name = f"model/{slot.name}"
        entry = manifest.entry(name)
        if entry is None:
            work.problems.append(f"{name}: not in the checkpoint")
            continue
        if entry.shape != tuple(slot.tensor.shape):
            work.problems.append(f"{name}: {entry.shape} in the checkpoint, {tuple(slot.tensor.shape)} in the model")
        elif entry.dtype != code_of(slot.tensor):
            work.problems.append(f"{name}: {entry.dtype} in the checkpoint, {code_of(slot.tensor)} in the model")
        else:
            work.jobs.append((slot.tensor, touched(slot.tensor, entry.shards)))
        stored = manifest.aliases.get(name, name)
        for alias in (f"model/{alias}" for alias in slot.aliases):
            if manifest.entry(alias) and manifest.aliases.get(alias, alias) != stored:
                work.problems.append(f"{alias}: tied to {name} in the model, on its own in the checkpoint")
    extra = [name for name in (*manifest.tensors, *manifest.aliases) if name.startswith("model/") and name not in live]
    work.problems += [f"{name}: in the checkpoint, not in the model" for name in extra]


def _match_average(slots: list[Slot], average: Average, work: _Work) -> None:
    """Match each average to its own in the checkpoint; a tied weight's is stored once."""
    for slot in slots:
        name = f"{AVERAGE}{_stored(slot.name, work.manifest)}"
        entry, averaged = work.manifest.entry(name), average.get(id(slot.tensor))
        if averaged is None:
            continue
        if entry is None or entry.shape != tuple(averaged.shape) or entry.dtype != code_of(averaged):
            work.problems.append(f"{name}: not in the checkpoint, or of another shape or dtype")
        else:
            work.jobs.append((averaged, touched(averaged, entry.shards)))


def _match_groups(slots: list[Slot], part: StageOwnership | None, optimizer: Optimizer, work: _Work) -> None:
    manifest = work.manifest
    saved = manifest.optimizer
    kind = type(engine_of(optimizer)).__name__
    if kind != saved.name:
        work.problems.append(f"optimizer: {saved.name} in the checkpoint, {kind} here")
    if len(optimizer.param_groups) != len(saved.groups):
        here = len(optimizer.param_groups)
        work.problems.append(f"optimizer: {len(saved.groups)} parameter groups in the checkpoint, {here} here")
    names = _stored_names(slots, manifest)
    home = {name: number for number, group in enumerate(saved.groups) for name in group.params}
    stateless = {names[id(s.tensor)] for s in slots if not s.tensor.requires_grad} - _with_state(manifest)
    seen: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in names for parameter in group["params"]):
            work.problems.append(f"optimizer: group {number} has parameters that the model does not have")
            work.ownerships.append([])
            continue
        members = [names[id(parameter)] for parameter in group["params"]]
        seen.update(members)
        lost = [name for name in members if name not in home and name not in stateless]  # zero1 omits frozen parameters
        work.problems += [f"optimizer/{name}: not in the checkpoint" for name in lost]
        work.ownerships.append(sorted({home[name] for name in members if name in home}))
    elsewhere = set() if part is None else {_stored(name, manifest) for name in part.names} - {*names.values()}
    gone = [name for name in home if name not in seen and name not in stateless and name not in elsewhere]
    work.problems += [f"optimizer/{name}: in the checkpoint, not in the optimizer" for name in gone]


def _match_state(slots: list[Slot], optimizer: Optimizer, work: _Work) -> None:
    manifest = work.manifest
    names = _stored_names(slots, manifest)
    tensors: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for full, entry in manifest.tensors.items():
        if full.startswith("optimizer/"):
            name, key = full.removeprefix("optimizer/").rsplit("/", 1)
            tensors[name][key] = entry
    engine = engine_of(optimizer)
    relayout: Callable[..., RelaidState | None] = getattr(engine, "relayout", lambda *_: None)
    own_room: Callable[..., torch.Tensor | None] = getattr(engine, "empty_state", lambda *_: None)
    for group in engine.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter), "")
            saved = tensors.get(name, {})
            values: dict[str, Any] = dict(manifest.optimizer.state.get(name, {}))
            keys, here = {*saved, *values}, set(engine.state.get(parameter, {}))
            if keys and here and keys != here:
                work.problems.append(f"optimizer/{name}: keys {sorted(keys)} in the checkpoint, {sorted(here)} here")
                continue
            try:
                moved = relayout(parameter, {key: tuple(e.shape) for key, e in saved.items()}, values)
            except ValueError as error:
                work.problems.append(f"optimizer/{name}: {error}")
                continue
            rooms = {} if moved is None else moved.saved
            for key, entry in saved.items():
                values[key] = own_room(parameter, key)
                if values[key] is None:
                    values[key] = _empty_state(parameter, key, entry, group)
                room = rooms.get(key, values[key])
                work.jobs.append((room, touched(room, entry.shards)))
            work.states.append((parameter, values))
            work.moved += [] if moved is None else [(name, moved)]


def _with_state(manifest: Manifest) -> set[str]:
    """Return the parameters that have optimizer state in the checkpoint."""
    tensors = (name.removeprefix("optimizer/") for name in manifest.tensors if name.startswith("optimizer/"))
    return {name.rsplit("/", 1)[0] for name in tensors} | {n for n, state in manifest.optimizer.state.items() if state}


def _stored_names(slots: list[Slot], manifest: Manifest) -> dict[int, str]:
    """Map each parameter to its name in the checkpoint."""
    return {id(slot.tensor): _stored(slot.name, manifest) for slot in slots}


def _stored(name: str, manifest: Manifest) -> str:
    return manifest.aliases.get(f"model/{name}", f"model/{name}").removeprefix("model/")


def _empty_state(parameter: torch.Tensor, key: str, entry: TensorEntry, group: dict[str, Any]) -> torch.Tensor:
    """Allocate one state tensor, sharded as its parameter if the shapes match, else replicated."""
    dtype = entry_dtype(entry)
    with torch.no_grad():
        if not entry.shape:  # counters live on the CPU, unless the optimizer uses them on the device
            on_device = key != "step" or group.get("capturable") or group.get("fused")
            return torch.empty((), dtype=dtype, device=local_of(parameter).device if on_device else "cpu")
        if entry.shape == tuple(parameter.shape):
            return torch.empty_like(parameter.detach(), dtype=dtype)
        return empty_beside(parameter, entry.shape, dtype)


def _set_optimizer(optimizer: Optimizer, work: _Work) -> None:
    engine = engine_of(optimizer)
    for parameter, values in work.states:
        if values:
            engine.state[parameter] = values
        else:
            engine.state.pop(parameter, None)
    for number, (group, options) in enumerate(zip(optimizer.param_groups, work.options, strict=True)):
        changed = {key: like(group.get(key), value) for key, value in options.items() if key not in _HOW}
        group.update(changed)
        if engine is not optimizer:
            engine.param_groups[number].update(changed)
