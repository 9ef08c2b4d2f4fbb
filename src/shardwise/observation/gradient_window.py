"""Judge one recorded window: read weights and gradients of all ranks, replay it, compare. Collective throughout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

from shardwise.distributed.process_group import Ranks, gather_ints, gather_text
from shardwise.gradcheck.causes import UNEVEN
from shardwise.measure import state
from shardwise.observation.collect import name_of
from shardwise.observation.gradient_compare import (
    LOSS_TOLERANCES,
    TOLERANCES,
    WindowFacts,
    differences,
    reasons,
    shared_factor,
    total_over_ranks,
    worst_errors,
)
from shardwise.observation.micro_batches import MicroBatch
from shardwise.observation.plain_copy import full_parameters, plain_copy, whole
from shardwise.observation.setup_lines import names_text
from shardwise.observation.window_replay import ROWS, Closures, Gradient, Kind, WindowReplay
from shardwise.receipts.drift import bit_sums
from shardwise.receipts.receipt import Line, Receipt
from shardwise.units import bytes_text, counted

_COPIES = 7  # of the parameters in float64 at the most: the copy, gradients and their sum, three views of the loop's
_PATIENCE_S = 300.0
_LEFTOVER = "the first backward found gradients of before it: zero_grad is missing, or another loss has set them"
_SCALED = 500.0  # no loop multiplies its loss by that, and a gradient scaler begins far above
_KINDS: tuple[Kind, ...] = ("neither", "sum", "mean", "assumed")
_ORDER = ("float64", "float32", "float16", "bfloat16")
Raw = Mapping[int, torch.Tensor]


class CannotReplay(Exception):
    """The window cannot be replayed, for a reason that all ranks know."""


@dataclass(frozen=True)
class GradientWindow:
    """One rank's record of a window.

    Args:
        root: the live model, without DDP.
        wrapper: what reduces its gradients: DDP, FSDP1, FSDP2, or none.
        closures: the loss.
        batches: micro batches whose backward ran.
        raw: local gradients after the last backward, by the id of the parameter.
        scale: factor of the loop's gradient scaler.
        leftover: whether the first backward found gradients of before it.
        clip_norm: norm that a loop clips to, which reduces gradients by itself.
        aliases: wrappers around the live model.
        absent: objects that the copy of the model does not refer to.
    """

    root: nn.Module
    wrapper: str
    closures: Closures
    batches: Sequence[MicroBatch]
    raw: Raw
    scale: float
    leftover: bool
    clip_norm: float | None
    aliases: tuple[nn.Module, ...]
    absent: tuple[object, ...]
    ranks: Ranks | None

    def judge(self) -> Receipt:
        """Return the receipt, the same on every rank."""
        try:
            return Receipt(title="gradients", lines=tuple(self._lines()))
        except CannotReplay as why:
            line = Line(name="gradient", planned="as one process has it", found=f"unknown: {why}", ok=None)
            return Receipt(title="gradients", lines=(line,))

    def _lines(self) -> Iterator[Line]:
        rows = self._gather([len(self.batches)])
        if not any(row[0] for row in rows):
            raise CannotReplay("no loss of compute_loss had a backward before the step")
        self._check_memory()
        trained = [(name_of(name), p) for name, p in self.root.named_parameters() if p.requires_grad]
        names = [name for name, _ in trained]
        with full_parameters(self.root, with_grads=True):
            weights = {id(p): whole(p) for p in self.root.parameters()}
            apart = self._same_weights(weights)
            replay = self._together(lambda: self._replay(weights))
            stepped: Gradient = [None if p.grad is None else whole(p.grad) for _, p in trained]
        shapes = [weights[id(p)].shape for _, p in trained]
        raw = self._raw([p for _, p in trained], stepped)
        facts, expected = self._expected(replay, shapes, [row[0] for row in rows])
        yield _window_line(facts, replay)
        if apart:
            found = f"{len(apart)} of {len(weights)} differ: {names_text(apart)}"
            yield Line(name="weights across ranks", planned="equal before the step", found=found, ok=False)
        loss = self._loss_line(replay, facts)
        yield loss
        yield from self._gradient_lines(names, expected, stepped, raw, facts, replay, loss.ok is not None)

    def _gather(self, values: list[int]) -> list[list[int]]:
        if self.ranks is None:
            return [values]
        return gather_ints(values, self.ranks, "gradient check", patient=False, limit_s=_PATIENCE_S)

    def _together(self, act: Callable[[], Any]) -> Any:
        """Call ``act`` on all ranks; an error of one stops all of them."""
        made, text = None, ""
        try:
            made = act()
        except Exception as error:  # of the user's closure or model
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        texts = [text] if self.ranks is None else gather_text(text, self.ranks)
        failed = [f"rank {rank}: {one}" for rank, one in enumerate(texts) if one]
        if failed:
            raise CannotReplay(failed[0])
        return made

    def _check_memory(self) -> None:
        """Refuse a model whose copies exceed the memory of the host."""
        elements = sum(p.numel() for p in self.root.parameters())
        if any(isinstance(part, FSDP1) for part in self.root.modules()) and self.ranks is not None:
            elements *= self.ranks.world_size  # its parameters are slices here
        here = 1 if self.ranks is None else self.ranks.local_world_size
        need, free = 8 * _COPIES * elements * here, int(psutil.virtual_memory().available)
        rows = self._gather([need, free])
        short = next((row for row in rows if row[0] > row[1]), None)
        if short is not None:
            raise CannotReplay(
                f"copies of {elements:,} parameters in float64 take {bytes_text(short[0])} on a host with {here} "
                f"ranks, and {bytes_text(short[1])} are free; check the loop with a smaller model"
            )

    def _same_weights(self, weights: dict[int, torch.Tensor]) -> list[str]:
        """Name replicas that differ, and take rank 0's of them."""
        named = [(name, p) for name, p in self.root.named_parameters() if not isinstance(p, DTensor) and p.ndim]
        if self.ranks is None or not named:
            return []
        sums = bit_sums([weights[id(p)] for _, p in named])
        rows = self._gather(list(sums))
        apart = [(name, p) for i, (name, p) in enumerate(named) if len({row[i] for row in rows}) > 1]
        for _, p in apart:
            dist.broadcast(weights[id(p)], src=0, group=self.ranks.control)
        return [name_of(name) for name, _ in apart]

    def _replay(self, weights: Mapping[int, torch.Tensor]) -> WindowReplay:
        memo = plain_copy(self.root, weights, self.aliases, self.absent)
        return WindowReplay(self.root, memo, self.closures, self.batches)

    def _raw(self, parameters: Sequence[nn.Parameter], stepped: Gradient) -> Gradient | None:
        """Return the full gradients after the last backward, without the scaler's factor; ``None`` where not known."""
        made: Gradient = []
        for p in parameters:
            value = self.raw.get(id(p))
            if isinstance(p, DTensor) and value is not None:
                value = DTensor.from_local(
                    value.to(p.to_local().device), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
                )
            made.append(None if value is None else whole(value) / self.scale)
        if all(one is None or one.shape == p.shape for one, p in zip(made, parameters, strict=True)) and not any(
            isinstance(part, FSDP1) for part in self.root.modules()
        ):
            return made
        local: Gradient = [
            None if p.grad is None else state.local(p.grad).detach().to("cpu", torch.float64) for p in parameters
        ]
        factor = shared_factor(made, local)
        rows = self._gather([int(factor is not None and factor > 0)])
        if not all(row[0] for row in rows) or factor is None:
            return None
        return [None if one is None else one / factor for one in stepped]

    def _expected(
        self, replay: WindowReplay, shapes: Sequence[torch.Size], micro_batches: Sequence[int]
    ) -> tuple[WindowFacts, Gradient]:
        """Return what all ranks know, and the gradient of the mean over the items of all micro batches."""
        mine: Kind = self._together(replay.kind)
        kinds = {_KINDS[row[0]] for row in self._gather([_KINDS.index(mine)])}
        stated = self.closures.items is not None
        kind: Kind = "neither" if "neither" in kinds and not stated else "sum" if "sum" in kinds else "mean"
        total = total_over_ranks(self._together(lambda: replay.run(kind)), shapes, self.ranks)
        dtypes = {dtype for batch in self.batches for dtype in batch.dtypes}
        dtypes |= {str(p.dtype).removeprefix("torch.") for p in self.root.parameters()}
        weights = [float(batch.weight) / self.scale for batch in self.batches if batch.weight is not None]
        document = json.dumps({"items": replay.items, "weights": weights, "dtypes": sorted(dtypes & set(_ORDER))})
        texts = [document] if self.ranks is None else gather_text(document, self.ranks)
        found = [json.loads(text) for text in texts]
        lowest = max((dtype for one in found for dtype in one["dtypes"]), key=_ORDER.index, default="float32")
        tolerance, floor = TOLERANCES[lowest]
        items = tuple(tuple(one["items"]) for one in found)
        facts = WindowFacts(
            micro_batches=tuple(micro_batches),
            items=items,
            weights=tuple(tuple(one["weights"]) for one in found),
            kind=kind,
            dtype=lowest,
            tolerance=tolerance,
            floor=floor,
            noise=tolerance / 10,
        )
        number = sum(map(sum, items))
        if not number:
            raise CannotReplay("no micro batch has an item: all labels are ignored")
        return facts, [None if one is None else one.div_(number) for one in total]

    def _loss_line(self, replay: WindowReplay, facts: WindowFacts) -> Line:
        """Tell whether the forward of one process is the loop's; where it is not, gradients are not comparable."""
        limit = LOSS_TOLERANCES[facts.dtype]
        rows = self._gather([min(int(replay.loss_error * 1e12), 2**60)])
        worst = max(range(len(rows)), key=lambda rank: rows[rank][0])
        error = rows[worst][0] / 1e12
        number = counted(sum(facts.micro_batches), "micro batch")
        planned = f"as in the loop, to {limit:.0e}"
        if error <= limit:
            return Line(name="loss, replayed", planned=planned, found=f"{number}, to {error:.1e}", ok=True)
        found = f"unknown: {error:.1e} off on rank {worst}: is the forward random, or does it see other ranks?"
        return Line(name="loss, replayed", planned=planned, found=found, ok=None)

    def _gradient_lines(
        self,
        names: Sequence[str],
        expected: Gradient,
        stepped: Gradient,
        raw: Gradient | None,
        facts: WindowFacts,
        replay: WindowReplay,
        comparable: bool,
    ) -> Iterator[Line]:
        total = sum(map(sum, facts.items))
        planned = f"mean over {total:.10g} {replay.source}"
        if facts.kind == "neither" or not comparable:
            why = "the loss of a micro batch is neither the mean nor the sum of its rows: give items="
            text = f"unknown: {why}" if comparable else "unknown: the replay has another loss"
            yield Line(name="gradient", planned=planned, found=text, ok=None)
            return
        norm = sum(float((g * g).sum()) for g in expected if g is not None) ** 0.5
        by_hand = self.wrapper == "none" and len(facts.micro_batches) > 1
        wanted = expected
        if by_hand and self.clip_norm is not None:
            clip = min(1.0, self.clip_norm / (norm + 1e-6))
            wanted = [None if g is None else g * clip for g in expected]
        views = [(stepped, wanted)] if by_hand or raw is None else [(raw, expected), (stepped, expected)]
        found, aim = views[0]
        worst = self._errors(names, aim, found, facts)
        for view, target in views[1:]:
            errors = self._errors(names, target, view, facts)
            if max(error for error, _ in errors) <= facts.tolerance:
                found, aim, worst = view, target, errors
        error = max((error for error, _ in worst), default=0.0)
        if error <= facts.tolerance:
            text = f"right, to {error:.1e} (norm {norm:.6g})"
            yield Line(name="gradient", planned=planned, found=text, ok=True)
        else:
            number = sum(not one <= facts.tolerance for one, _ in worst)
            named = reasons(names, aim, found, worst, facts, replay, self.ranks) or ["by no known fault"]
            if any(row[0] for row in self._gather([int(self.leftover)])):
                named = [_LEFTOVER]
            doubt = self._doubt(replay, named)
            unclear = bool(doubt)
            text = f"{number} of {len(names)} parameters differ{doubt}"
            yield Line(name="gradient", planned=planned, found=text, ok=None if unclear else False)
            for reason in named:
                yield Line(name="because", planned="", found=reason, ok=None if unclear else False)
        if raw is not None:
            yield self._between_line(raw, stepped)

    def _doubt(self, replay: WindowReplay, named: Sequence[str]) -> str:
        """Return what the user has to state before a difference is an error; empty where nothing is missing."""
        weights = [abs(float(batch.weight)) for batch in self.batches if batch.weight is not None]
        scaled = self.scale == 1.0 and bool(weights) and min(weights) >= _SCALED
        uneven = replay.source == ROWS and any(reason.startswith(UNEVEN) for reason in named)
        rows = self._gather([int(scaled), int(uneven)])
        if any(row[0] for row in rows):
            return ": the loop multiplies its losses by a large number, give scaler="
        return ": rows may not be what counts, give items=" if any(row[1] for row in rows) else ""

    def _errors(
        self, names: Sequence[str], expected: Gradient, found: Gradient, facts: WindowFacts
    ) -> list[tuple[float, int]]:
        return worst_errors(differences(names, expected, found, facts), self.ranks)

    def _between_line(self, raw: Gradient, stepped: Gradient) -> Line:
        """Report what the loop did to gradients after the backward."""
        factor = shared_factor(raw, stepped)
        code = -1 if factor is None or not 0 <= factor < 2**20 else round(factor * 1e9)
        rows = self._gather([code])
        factors = sorted({row[0] for row in rows})
        near = factors[-1] - factors[0] <= 1e-4 * factors[-1]
        text = "no one factor" if factors[0] < 0 else f"× {factors[-1] / 1e9:.4g} on each rank"
        if factors[0] >= 0 and not near:
            text = f"× {factors[0] / 1e9:.4g} to × {factors[-1] / 1e9:.4g}, by the rank"
        ok = None if factors[0] < 0 or near else False
        return Line(name="from backward to step", planned="the same factor on each rank", found=text, ok=ok)


def _window_line(facts: WindowFacts, replay: WindowReplay) -> Line:
    each = " + ".join(map(str, facts.micro_batches[:8])) + (" + ..." if len(facts.micro_batches) > 8 else "")
    items = " + ".join(f"{sum(one):.10g}" for one in facts.items[:8]) + (" + ..." if len(facts.items) > 8 else "")
    how = "the sum" if facts.kind == "sum" else "the mean"
    found = f"{each} micro batches by rank, with {items} {replay.source}; compute_loss is {how} over them"
    return Line(name="window", planned="", found=found, ok=None)
