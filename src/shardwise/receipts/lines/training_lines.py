"""Receipt lines on training options of ``shardwise train``: schedule, loss terms, noise and average."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from shardwise.measure.state import local
from shardwise.model.read import clean_name
from shardwise.parallel.chunked_loss import LateLogits
from shardwise.parallel.ownership import ownership_of
from shardwise.plan.optimizers import ParameterShard, declared
from shardwise.receipts.receipt import Line
from shardwise.train.average import WeightAverage
from shardwise.train.config import Config
from shardwise.train.loss import IGNORED
from shardwise.train.session import Session
from shardwise.train.step import Step
from shardwise.train.training_options import TrainingOptions
from shardwise.train.training_parts import TrainingParts

_SHARE, _ROUNDING = 0.01, 1e-6  # of what the terms add, and of the cross-entropy in fp32
_ROWS = 256  # logits compared at once
_SAMPLED = 256  # elements of a tensor


def loss_by_formula(outputs: Any, labels: torch.Tensor, options: TrainingOptions) -> tuple[float, float]:
    """Return the summed loss with the options' terms, and the cross-entropy, in float64, written out."""
    logits = outputs if isinstance(outputs, torch.Tensor | LateLogits) else outputs.logits
    hidden = logits.hidden if isinstance(logits, LateLogits) else logits
    whole = hidden.full_tensor() if isinstance(hidden, DTensor) else hidden
    found = torch.zeros(2, dtype=torch.float64)
    for rows, some in zip(whole.flatten(0, -2).split(_ROWS), labels.flatten().split(_ROWS), strict=True):
        part = LateLogits(rows, logits.head).full() if isinstance(logits, LateLogits) else rows
        part, counts = part.double(), some != IGNORED
        logsumexp = part.logsumexp(-1)
        plain = logsumexp - part.gather(-1, some.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
        even = logsumexp - part.mean(-1)
        share = options.label_smoothing
        full = (1 - share) * plain + share * even + options.z_loss * logsumexp.square()
        found += torch.stack([full[counts].sum(), plain[counts].sum()]).cpu()
    return float(found[0]), float(found[1])


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)[:_SAMPLED].double()


@dataclass(frozen=True)
class Noise:
    """Sizes of the noise of one forward: the largest planned, and the largest and the mean that were added."""

    planned: float
    largest: float
    mean: float


def _groups_line(session: Session, optimizer: str, group_of: Callable[[ParameterShard], int]) -> Line:
    """Compare the parameters that are stepped as matrices, by the state that they have, with those of the blocks."""
    inner = getattr(session.optimizer, "optim", session.optimizer)
    names = {id(p): clean_name(name) for name, p in session.module.named_parameters()}
    home = ownership_of(session.module)
    facts = {name: p for p in session.spec.parameters for name in (p.name, *p.aliases)}
    planned, found = [0, 0], [0, 0]
    for parameter in (p for group in inner.param_groups for p in group["params"] if inner.state.get(p)):
        name = names[id(parameter)]
        fact = facts[name if home is None else home.canonical(name)]
        planned[group_of(ParameterShard(fact.shape, fact.shape, fact.shape, fact.block is not None))] += 1
        found["momentum_buffer" not in inner.state[parameter]] += 1
    texts = [f"{matrices} matrices of blocks, {rest} others by AdamW" for matrices, rest in (planned, found)]
    return Line(name=f"stepped by {optimizer}", planned=texts[0], found=texts[1], ok=planned == found)


class TrainingLines:
    """Lines of the options that a config sets, observed in one step: `start` before it, `lines` after its update."""

    def __init__(self, config: Config, parts: TrainingParts) -> None:
        self._config, self._parts = config, parts
        self._losses: tuple[float, float, float] | None = None  # of a label: found, planned, and the cross-entropy
        self._noise: list[Noise] = []
        self._hooks: list[RemovableHandle] = []
        self._before: list[torch.Tensor] = []  # the first elements of each local part of the average

    def start(self, session: Session, step: Step) -> None:
        """Begin to observe."""
        train = self._config.train
        if train.label_smoothing or train.z_loss:
            self._losses, self._parts.loss.watcher = None, functools.partial(self._see_loss, session)
        if self._parts.average is not None:
            self._before = [_sample(average) for average, _ in self._parts.average.pairs]
        if self._parts.noise is not None:
            self._noise, before, part = [], [], self._parts.noise.embedding
            self._hooks = [
                part.register_forward_hook(lambda _, __, outputs: before.append(outputs.detach()), prepend=True),
                part.register_forward_hook(lambda _, __, outputs: self._see_noise(session, before.pop(), outputs)),
            ]

    def stop(self) -> None:
        """Stop; the records stay."""
        self._parts.loss.watcher = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def lines(self, session: Session, step: Step) -> Iterator[Line]:
        """Yield the lines that this rank can check alone."""
        if self._config.optimizer.schedule == "wsd":
            yield self._rate_line(session, step)
        spec = declared(getattr(session.optimizer, "optim", session.optimizer))
        if spec is not None and spec.group is not None:
            yield _groups_line(session, spec.name, spec.group)
        if self._losses is not None:
            yield self._loss_line(*self._losses)
        if self._parts.noise is not None:
            yield self._noise_line()
        if self._parts.average is not None:
            yield self._average_line(session, self._parts.average)
            self._before = []

    def _see_loss(self, session: Session, outputs: Any, labels: torch.Tensor, loss: torch.Tensor) -> None:
        """Compare the loss of the first micro batch that has labels with the formula, unseen by other recorders."""
        count = int((labels != IGNORED).sum())
        if self._losses is not None or not count:
            return
        phase, session.phase = session.phase, "other"
        with _disable_current_modes(), torch.no_grad():
            planned, plain = loss_by_formula(outputs, labels, self._config.train)
        session.phase = phase
        self._losses = float(loss.detach()) / count, planned / count, plain / count

    def _see_noise(self, session: Session, before: torch.Tensor, after: torch.Tensor) -> None:
        if not torch.is_grad_enabled():  # an evaluation inside the step
            return
        with _disable_current_modes(), torch.no_grad():
            size = (after.detach().double() - before.double()).abs()
            length = before.shape[-2] * session.plan.dims.cp
            most = self._config.train.neftune_alpha / math.sqrt(length * before.shape[-1])
            self._noise.append(Noise(most, float(size.max()), float(size.mean())))

    def _noise_line(self) -> Line:
        """Compare the largest and the mean size of the noise with those of a uniform one."""
        name = f"embedding noise (neftune_alpha {self._config.train.neftune_alpha:g})"
        if not self._noise:
            return Line(name=name, planned="on", found="the embedding was not called", ok=False)
        worst = max(self._noise, key=lambda one: abs(one.mean / one.planned - 0.5))
        ok = worst.largest <= 1.05 * worst.planned and abs(worst.mean / worst.planned - 0.5) <= 0.1
        planned = f"uniform, up to {worst.planned:.3g}, {worst.planned / 2:.3g} on average"
        found = f"up to {worst.largest:.3g}, {worst.mean:.3g} on average"
        return Line(name=name, planned=planned, found=found, ok=ok)

    def _average_line(self, session: Session, average: WeightAverage) -> Line:
        """Compare how far the average moved, and the elements that it has, with the decay and the trained weights."""
        part, rounding = 1.0 - self._config.train.ema_decay, 0.0
        moves = torch.zeros(2, dtype=torch.float64)
        for before, (now, weight) in zip(self._before, average.pairs, strict=True):
            planned = (_sample(weight) - before).mul_(part)
            found = _sample(now) - before
            moves += torch.stack([planned.abs().sum(), found.abs().sum()]).cpu()
            rounding += float(torch.finfo(now.dtype).eps * before.abs().sum())
        trained = sum(local(p).numel() for p in session.module.parameters() if p.requires_grad)
        averaged = sum(now.numel() for now, _ in average.pairs)
        sizes = [float(move) for move in moves]
        return Line(
            name=f"average of the weights (ema_decay {self._config.train.ema_decay:g})",
            planned=f"{trained} elements, moved by {sizes[0]:.3g} in the first of each tensor",
            found=f"{averaged} elements, moved by {sizes[1]:.3g} in the first of each tensor",
            ok=trained == averaged and abs(sizes[1] - sizes[0]) <= 0.01 * sizes[0] + rounding,
        )

    def _loss_line(self, found: float, planned: float, plain: float) -> Line:
        train = self._config.train
        terms = {"label_smoothing": train.label_smoothing, "z_loss": train.z_loss}
        names = ", ".join(f"{name} {value:g}" for name, value in terms.items() if value)
        return Line(
            name="loss terms",
            planned=f"{planned:.6g} a label ({names}; cross-entropy {plain:.6g})",
            found=f"{found:.6g} a label",
            ok=abs(found - planned) <= max(_SHARE * abs(planned - plain), _ROUNDING * abs(plain)),
        )

    def _rate_line(self, session: Session, step: Step) -> Line:
        base = self._config.optimizer.lr
        groups = session.optimizer.param_groups
        used = {f"{group['lr'] * base / group.get('initial_lr', base):.6g}" for group in groups}
        planned, found = f"{self._parts.rate(step.number):.6g}", ", ".join(sorted(used))
        at = f" at step {step.number}"
        return Line(name="learning rate (wsd)", planned=planned + at, found=found + at, ok=planned == found)
