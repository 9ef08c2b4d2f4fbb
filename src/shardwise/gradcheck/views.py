"""Each rank's view of the full model, by the user's names, and comparison between ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.gradcheck.compare import Difference, Gradients
from shardwise.model.read import clean_name
from shardwise.parallel.ownership import ownership_of
from shardwise.train.session import Session
from shardwise.train.step import Step


class GradientRecorder:
    """Recorder of this rank's view of the full gradients, before and after clipping."""

    def __init__(self) -> None:
        self.raw: Gradients = {}
        self.clipped: Gradients = {}

    def on_prepared(self, session: Session) -> None:
        """Nothing to record."""

    def on_step_start(self, session: Session, step: Step) -> None:
        """Nothing to record."""

    def on_gradients(self, session: Session, step: Step) -> None:
        """Record reduced, normalised, unclipped gradients."""
        self.raw = full_gradients(session.module)

    def on_step_end(self, session: Session, step: Step) -> None:
        """Record clipped gradients."""
        self.clipped = full_gradients(session.module)

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Nothing to record."""


def full_gradients(module: nn.Module) -> Gradients:
    """Return this rank's view of every trained parameter's full gradient. Collective.

    By the user's names. A partial gradient (of a sum over tensor-parallel ranks) stays partial: summing it is the
    session's task.

    """
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in _named(module):
        if parameter.requires_grad:
            found[name] = None if parameter.grad is None else _full(parameter.grad)
    return found


def full_weights(module: nn.Module) -> Gradients:
    """Return this rank's view of every full parameter, by the user's names. Collective."""
    return {name: _full(parameter) for name, parameter in _named(module)}


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    ownership = ownership_of(module)
    for name, parameter in module.named_parameters():
        clean = clean_name(name)
        yield clean if ownership is None else ownership.canonical(clean), parameter


def _full(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in tensor.placements)
    if placements != tensor.placements:
        local, mesh = tensor.to_local(), tensor.device_mesh
        tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.full_tensor().detach().clone()


def error_table(names: list[str], mine: Sequence[Difference], extra: float, ranks: Ranks) -> list[torch.Tensor]:
    """Gather each rank's error of each parameter (-1: not local), then ``extra``. Collective."""
    values = {d.name: d.error for d in mine}
    row = torch.tensor([*(values.get(name, -1.0) for name in names), extra], dtype=torch.float64)
    if ranks.world_size == 1:
        return [row]
    rows = [torch.empty_like(row) for _ in range(ranks.world_size)]
    dist.all_gather(rows, row, group=ranks.control)
    return rows


def all_parts(names: list[str], mine: Gradients, ranks: Ranks) -> list[Gradients]:
    """Gather each rank's view of every gradient, on every rank."""
    values = {name: g for name in names if (g := mine.get(name)) is not None}
    texts = gather_text(json.dumps({name: list(g.shape) for name, g in values.items()}), ranks)
    parts: list[Gradients] = []
    for rank, text in enumerate(texts):
        shapes: dict[str, list[int]] = json.loads(text)
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        flat = torch.empty(sum(sizes), dtype=torch.float64)
        if rank == ranks.rank and values:
            flat = torch.cat([g.flatten() for g in values.values()])
        if ranks.world_size > 1 and flat.numel():
            dist.broadcast(flat, src=rank, group=ranks.control)
        pieces = flat.split(sizes) if sizes else ()
        parts.append({name: p.view(shapes[name]) for name, p in zip(shapes, pieces, strict=True)})
    return parts
