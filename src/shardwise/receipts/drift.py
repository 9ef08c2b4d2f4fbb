"""Detect replicas that drift apart, by checksums of weights and buffers during a run.

A forward may change state that no gradient reaches (running statistics, a codebook), by the samples of its own rank.
Each check sums the bits of some tensors on each rank; the sums are sent with the message that starts the next step.
A check waits until it costs at most `SHARE` of the elapsed time; a save checks everything that it will store.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.distributed.control_message import Table
from shardwise.distributed.process_group import gather_table, gather_text
from shardwise.errors import ReceiptError
from shardwise.measure import state
from shardwise.model.read import clean_name
from shardwise.train.session import Session
from shardwise.train.step import Step

SHARE = 0.001  # of a run's time, at most
CHUNK = 16 * 1024**2  # elements summed by one check
ROUNDING = 1e-6  # largest relative difference of replicas whose ranks only round differently
_SLOTS = 4  # kinds of replicas of parameters, and the buffers
_BLOCKS = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Replica:
    """Tensor that is equal on all ranks of the same ``team``. ``slot`` is 0 for buffers."""

    name: str
    slot: int
    team: str
    trained: bool
    num_elements: int


@dataclass
class DriftRecorder:
    """Observer on every rank that sends checksums as mail, within ``share`` of the time."""

    share: float = SHARE
    size: int = 2 + 2 * _SLOTS
    warned: set[str] = field(default_factory=set)
    checks: int = 0
    spent_s: float = 0.0
    _session: Session | None = None
    _chunks: list[list[Replica]] = field(default_factory=list)
    _checked: list[Replica] = field(default_factory=list)
    _row: list[int] = field(default_factory=list)
    _totals: dict[str, int] = field(default_factory=dict)  # of the last check
    _begun: float = 0.0
    _last_s: float = 0.0
    _due: bool = False
    _step: int = 0

    @classmethod
    def attach(cls, session: Session, share: float = SHARE) -> DriftRecorder:
        """Start observing ``session``."""
        one = cls(share)
        one._session = session
        session.observers.append(one)
        session.header.append(one)
        session.phase_watchers.append(one._on_phase)
        return one

    # called by the session

    def on_prepared(self, session: Session) -> None:
        """Find the tensors that several ranks have."""
        self._chunks = _chunks(replicas_of(session))

    def on_step_start(self, session: Session, step: Step) -> None:
        """Start the clock with the first step."""
        self._begun = self._begun or time.perf_counter()

    def on_gradients(self, session: Session, step: Step) -> None:
        """Sum the next tensors, if all ranks have the time: after forward and before the update.

        ``zero1`` would overwrite the changes of a forward elsewhere with the owner's weights.
        """
        if not self._due or not self._chunks:
            return
        started = time.perf_counter()
        self._checked = self._chunks[self.checks % len(self._chunks)]
        self._row, self._step = self._sums(self._checked), step.number
        self.checks += 1
        self._last_s = time.perf_counter() - started
        self.spent_s += self._last_s

    def on_step_end(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def _on_phase(self, phase: str) -> None:
        """Check before a save, which stores one rank's replica."""
        session = self._session
        if phase != "checkpoint" or session is None or not self._chunks:
            return
        stored = [one for chunk in self._chunks for one in chunk if one.trained or not one.slot]
        self._step = session.steps_done
        self._judge(gather_table(self._sums(stored), session.ranks), stored)

    # sent with each step's message

    def post(self) -> list[int]:
        """Return whether there is time for a check, and the unsent teams and sums of the last one."""
        gone = time.perf_counter() - self._begun if self._begun else 0.0
        ready = not self.checks or self.share * gone >= self.spent_s + self._last_s
        row, self._row = self._row or [0] * (self.size - 1), []
        return [int(ready), *row]

    def deliver(self, rows: Table) -> None:
        """Compare sums, and agree on whether this step ends with a check.

        Raises:
            ReceiptError: on all ranks, if weights have drifted apart on any.
        """
        self._due = bool(rows[:, 0].all())
        self._judge(rows[:, 1:], self._checked)

    def _judge(self, rows: Table, checked: list[Replica]) -> None:
        if (rows == rows[0]).all():  # one team with one sum in each slot, or no check
            return
        apart = [slot for slot in range(_SLOTS) if _differ(rows[:, 1 + 2 * slot : 3 + 2 * slot].tolist())]
        if not apart or self._session is None:
            return
        mine = {one.name: [one.team, one.slot, *self._detail(one)] for one in checked if one.slot in apart}
        everyone = [json.loads(text) for text in gather_text(json.dumps(mine), self._session.ranks)]
        self._report(everyone)

    # sums

    def _sums(self, replicas: list[Replica]) -> list[int]:
        """Return 1, then a team and a sum for each slot."""
        session = self._session
        assert session is not None
        local, row = tensors_of(session.module), [1]
        for slot in range(_SLOTS):
            here = [one for one in replicas if one.slot == slot and one.name in local]
            team = zlib.crc32("\n".join(f"{one.name} {one.team}" for one in here).encode()) if here else 0
            total = bit_sums([local[one.name] for one in here])
            self._totals |= {one.name: number for one, number in zip(here, total, strict=True)}
            row += [team, zlib.crc32(json.dumps(total).encode())]
        return row

    def _detail(self, replica: Replica) -> tuple[int, list[float]]:
        """Return the replica's sum as checked, and the size of each of its parts now."""
        assert self._session is not None
        tensor = tensors_of(self._session.module)[replica.name]
        flat = tensor.detach().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        return self._totals[replica.name], [float(part.double().norm()) for part in flat.chunk(_BLOCKS)]

    def _report(self, everyone: list[dict[str, list[Any]]]) -> None:
        session = self._session
        assert session is not None
        found: dict[str, tuple[int, int, int, bool]] = {}
        first: dict[tuple[str, str], int] = {}
        healed = session.plan.parsed.base == "zero1"  # by its broadcast: the difference is overwritten
        for rank, row in enumerate(everyone):
            for name, (team, slot, total, sizes) in row.items():
                other = first.setdefault((name, team), rank)
                if total != everyone[other][name][2]:
                    far = healed or _far(sizes, everyone[other][name][3])
                    found.setdefault(name, (slot, other, rank, far))
        weights = {name: entry for name, entry in found.items() if entry[0]}
        far_apart = {name: entry for name, entry in weights.items() if entry[3]}
        if far_apart:
            raise ReceiptError(
                f"by step {self._step}, weights have drifted apart that {session.plan.strategy} keeps alike on all "
                f"ranks: {_names(far_apart)}; the gradient was not reduced, or something changes them on each rank "
                "alone (a forward, a hook): change weights by the optimizer that session.prepare returned, and start "
                "again from the last checkpoint"
            )
        self._warn(weights, "weights differ in their last digits, as ranks round differently (threads, devices)")
        self._warn(
            {name: entry for name, entry in found.items() if not entry[0]},
            "buffers have drifted apart: a forward changes them by the samples of its rank, so the gradient is not "
            "that of one process, and a checkpoint stores those of one rank; average them over the ranks "
            "(torch.distributed.all_reduce) where they are changed, or freeze them",
        )

    def _warn(self, found: dict[str, tuple[int, int, int, bool]], text: str) -> None:
        fresh = {name: entry for name, entry in found.items() if name not in self.warned}
        self.warned.update(fresh)
        if fresh and self._session is not None and self._session.ranks.is_main:
            logging.getLogger("shardwise").warning(f"by step {self._step}, {_names(fresh)}: {text}")


def bit_sums(tensors: list[torch.Tensor]) -> list[int]:
    """Sum each tensor's bits, read as integers, so that NaN counts, too.

    One wait for the device.
    """
    if not tensors:
        return []
    sums = []
    for tensor in tensors:
        full = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        sums.append(full.view(_BITS[full.element_size()]).sum(dtype=torch.int64))
    found: list[int] = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    return found


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's parameters and buffers, of sharded ones the local part."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {clean_name(name): state.local(tensor.detach()) for name, tensor in named}


def replicas_of(session: Session) -> list[Replica]:
    """Find tensors that other ranks have, too: equal or equally sharded parameters, and buffers.

    Excluded are batch norm's statistics: a warning covers them when the model is prepared.
    """
    module, place = session.module, session.place
    if session.ranks.world_size == 1:
        return []
    found, slots, here = [], dict[str, int](), f"{place.pp} {place.tp}"
    for prefix, part in module.named_modules():
        if clean_name(prefix) in session.spec.batch_norms:
            continue
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set and _summable(buffer):
                found.append(Replica(clean_name(name), 0, here, trained=False, num_elements=buffer.numel()))
    for name, parameter in module.named_parameters() if session.applied.engine is None else ():
        sharding = _sharding_of(parameter)
        if sharding is not None and _summable(parameter):
            axes, stand = sharding
            slot = slots.setdefault(axes, min(len(slots) + 1, _SLOTS - 1))
            team = f"{here if 'tp' not in axes else place.pp} {stand}"
            found.append(Replica(clean_name(name), slot, team, parameter.requires_grad, parameter.numel()))
    return found


def _sharding_of(parameter: torch.Tensor) -> tuple[str, str] | None:
    """Return the axes of a parameter's mesh and this rank's position on the sharding ones.

    ``None`` if no other rank
    has the same part.
    """
    if not isinstance(parameter, DTensor):
        return "", ""
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    sharding = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if all(axis in sharding or mesh.size(axis) == 1 for axis in range(mesh.ndim)):
        return None
    place = list(mesh.get_coordinate() or ())
    return " ".join(names), str([(names[axis], place[axis]) for axis in sharding])


def _summable(tensor: torch.Tensor) -> bool:
    full = state.local(tensor.detach())
    size = full.element_size() // 2 if full.is_complex() else full.element_size()
    return full.layout == torch.strided and full.device.type != "meta" and not full.is_quantized and size in _BITS


def _chunks(replicas: list[Replica]) -> list[list[Replica]]:
    """Split replicas into checks of limited size: buffers, trained parameters, then the rest."""
    chunks: list[list[Replica]] = []
    room = 0
    for one in sorted(replicas, key=lambda one: (one.slot > 0, not one.trained)):
        if one.num_elements > room:
            chunks.append([])
            room = CHUNK
        chunks[-1].append(one)
        room -= one.num_elements
    return chunks


def _differ(pairs: list[list[int]]) -> bool:
    """Return whether two ranks of one team have different sums."""
    first: dict[int, int] = {}
    return any(team and first.setdefault(team, total) != total for team, total in pairs)


def _far(mine: list[float], other: list[float]) -> bool:
    """Return whether two sizes differ by more than rounding."""
    pairs = list(zip(mine, other, strict=False))
    return any(
        not (math.isfinite(a) and math.isfinite(b)) or abs(a - b) > ROUNDING * max(abs(a), abs(b)) for a, b in pairs
    )


def _names(found: dict[str, tuple[int, int, int, bool]]) -> str:
    entry = [f"'{name}' (ranks {one} and {other} differ)" for name, (_, one, other, _) in list(found.items())[:3]]
    return ", ".join(entry) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
