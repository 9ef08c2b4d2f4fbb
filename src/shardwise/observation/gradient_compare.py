"""Compare a window's gradients on all ranks with the replay's, and name what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.distributed.process_group import Ranks, broadcast_text, gather_ints
from shardwise.gradcheck.causes import CauseContext, candidates, explain
from shardwise.gradcheck.compare import Difference, factor_of
from shardwise.gradcheck.views import all_parts
from shardwise.observation.window_replay import Gradient, Kind, WindowReplay
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.units import counted

_MOST_ELEMENTS = 8_000_000  # sent to explain a difference
_SAME_WEIGHT = 1e-3  # relative difference of a factor from the loop's weights
_SAME_FACTOR = 1e-5  # rounding of a gradient that is scaled in float32
# (largest relative error of a parameter's gradient, its least size relative to the whole), by the lowest dtype
TOLERANCES = {"float64": (1e-6, 1e-5), "float32": (1e-3, 1e-2), "bfloat16": (5e-2, 1e-1), "float16": (2e-2, 1e-1)}
LOSS_TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}


@dataclass(frozen=True)
class WindowFacts:
    """What all ranks know of the window: micro batches and items per rank, and how exact the loop computes.

    ``weights`` are the numbers by which the loop multiplied each loss.
    """

    micro_batches: tuple[int, ...]
    items: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    kind: Kind
    dtype: str
    tolerance: float
    floor: float
    noise: float

    @property
    def plan(self) -> Plan:
        """Degrees that could explain a factor."""
        return Plan(
            strategy="ddp", dims=ParallelDims(dp_replicate=len(self.micro_batches)), grad_accum=max(self.micro_batches)
        )


def total_over_ranks(mine: Gradient, shapes: Sequence[torch.Size], ranks: Ranks | None) -> Gradient:
    """Return the sum over all ranks; ``None`` where no rank has a gradient. Collective."""
    if ranks is None:
        return mine
    some = torch.tensor([g is not None for g in mine], dtype=torch.int64)
    dist.all_reduce(some, group=ranks.control)
    made: Gradient = []
    for gradient, shape, holders in zip(mine, shapes, some.tolist(), strict=True):
        if not holders:
            made.append(None)
            continue
        full = torch.zeros(shape, dtype=torch.float64) if gradient is None else gradient
        dist.all_reduce(full, group=ranks.control)
        made.append(full)
    return made


def shared_factor(before: Gradient, after: Gradient) -> float | None:
    """Return the one factor between two views of all gradients; ``None`` where there is none."""
    factors = []
    for one, other in zip(before, after, strict=True):
        if (one is None) != (other is None):
            return None
        if one is None or other is None or not bool(one.count_nonzero()):
            continue
        factor = factor_of(one, other, within=_SAME_FACTOR)
        if factor is None:
            return None
        factors.append(factor)
    if not factors:
        return 1.0
    middle = sorted(factors)[len(factors) // 2]
    alike = all(abs(f - middle) <= 1e-3 * abs(middle) for f in factors)
    return middle if alike else None


def differences(names: Sequence[str], expected: Gradient, found: Gradient, facts: WindowFacts) -> list[Difference]:
    """Compare this rank's view with the replay's, by norms; a factor near one that is known becomes that one."""
    squares = [float((g * g).sum()) for g in expected if g is not None]
    floor = facts.floor * sum(squares) ** 0.5
    return [
        _difference(name, one, other, floor, facts) for name, one, other in zip(names, expected, found, strict=True)
    ]


def _difference(
    name: str, expected: torch.Tensor | None, found: torch.Tensor | None, floor: float, facts: WindowFacts
) -> Difference:
    if found is None:
        lost = expected is not None and float(expected.norm()) > facts.tolerance * floor
        return Difference(name=name, error=float("inf") if lost else 0.0, missing=lost)
    if expected is None:
        expected = torch.zeros_like(found)
    if expected.shape != found.shape:
        return Difference(name=name, error=float("inf"))
    error = float((found - expected).norm()) / max(float(expected.norm()), floor, 1e-300)
    factor = factor_of(expected, found, within=max(1e-6, facts.noise))
    known = [c.factor for c in candidates(facts.plan) if factor and abs(c.factor - factor) <= facts.noise * c.factor]
    return Difference(name=name, error=error if error == error else float("inf"), factor=known[0] if known else factor)


def worst_errors(mine: Sequence[Difference], ranks: Ranks | None) -> list[tuple[float, int]]:
    """Return the largest error of each parameter, and the rank that has it. Collective."""
    row = torch.tensor([d.error for d in mine], dtype=torch.float64)
    if ranks is None:
        return [(float(error), 0) for error in row]
    rows = [torch.empty_like(row) for _ in range(ranks.world_size)]
    dist.all_gather(rows, row, group=ranks.control)
    found = torch.stack(rows).max(0)
    return list(zip(found.values.tolist(), found.indices.tolist(), strict=True))


def reasons(
    names: Sequence[str],
    expected: Gradient,
    found: Gradient,
    worst: Sequence[tuple[float, int]],
    facts: WindowFacts,
    replay: WindowReplay,
    ranks: Ranks | None,
) -> list[str]:
    """Explain what differs, on every rank alike. Collective."""
    wrong = [i for i, (error, _) in enumerate(worst) if not error <= facts.tolerance]
    chosen: list[int] = []
    size = 0
    for index in sorted(wrong, key=lambda i: _elements(expected[i])):
        size += _elements(expected[index])
        if chosen and size > _MOST_ELEMENTS:
            break
        chosen.append(index)
    chosen.sort()
    mine = {names[i]: found[i] for i in chosen}
    parts = [mine] if ranks is None else all_parts(list(mine), mine, ranks)
    keys = [(rank, micro) for rank, count in enumerate(facts.micro_batches) for micro in range(count)]
    vectors = _contributions(replay.contributions(facts.kind, chosen), facts, ranks)
    text = ""
    if ranks is None or ranks.is_main:
        total = sum(map(sum, facts.items))
        reference = {names[i]: None if (g := expected[i]) is None else g for i in chosen}
        views = {names[i]: parts[worst[i][1]].get(names[i]) for i in chosen}
        listed = differences(list(reference), list(reference.values()), list(views.values()), facts)
        listed = [d.model_copy(update={"error": worst[i][0]}) for d, i in zip(listed, chosen, strict=True)]
        named = {key: _split(vector, reference) for key, vector in zip(keys, vectors, strict=True)}
        tokens = {(rank, micro): _count(facts.items[rank][micro]) for rank, micro in keys}
        lines = explain(
            reference,
            views,
            listed,
            CauseContext(facts.plan),
            tolerance=facts.tolerance,
            parts=parts if len(parts) > 1 else (),
            contributions=named,
            tokens=tokens,  # type: ignore[arg-type]
            noise=facts.noise,
        )
        by_weight = _by_weight(listed, facts)
        text = json.dumps([by_weight] if by_weight else [line for line in lines if total])
    return list(json.loads(text if ranks is None else broadcast_text(text, ranks)))


def _by_weight(listed: Sequence[Difference], facts: WindowFacts) -> str:
    """Explain one factor of all gradients by the loop's own weights; empty where they are not the reason."""
    factors = sorted(d.factor for d in listed if d.factor is not None)
    shares = [weight * len(row) for row in facts.weights for weight in row]
    if facts.kind != "mean" or not shares or len(factors) < len(listed):
        return ""
    factor = factors[len(factors) // 2]
    within = max(_SAME_WEIGHT, facts.noise) * abs(factor)
    if any(abs(one - factor) > within for one in (*factors, *shares)):
        return ""
    weight, number = facts.weights[0][0], len(facts.weights[0])
    size = f"{factor:.4g} × too large" if factor > 1 else f"{1 / factor:.4g} × too small"
    return (
        f"the loop multiplies each loss by {weight:.4g}, where the mean over {counted(number, 'micro batch')} needs "
        f"{1 / number:.4g}: gradients are {size}"
    )


def _count(items: float) -> float:
    return int(items) if items == int(items) else items


def _elements(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient.numel()


def _split(vector: torch.Tensor, like: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    made: dict[str, torch.Tensor | None] = {}
    for name, one in like.items():
        size = _elements(one)
        made[name] = None if one is None else vector[:size].view(one.shape)
        vector = vector[size:]
    return made


def _contributions(mine: list[torch.Tensor], facts: WindowFacts, ranks: Ranks | None) -> list[torch.Tensor]:
    if ranks is None:
        return mine
    size = gather_ints([mine[0].numel() if mine else 0], ranks)
    length, made = max(row[0] for row in size), []
    for rank, count in enumerate(facts.micro_batches):
        for micro in range(count):
            vector = mine[micro] if rank == ranks.rank else torch.empty(length, dtype=torch.float64)
            dist.broadcast(vector, src=rank, group=ranks.control)
            made.append(vector)
    return made
