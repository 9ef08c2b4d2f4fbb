"""The same-gradient contract, as the tests of each axis hold plans to it: one process, the ranks, and their difference.

Gradients are compared, in float64, before and after clipping, with ragged labels, accumulation and a partial window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name
from shardwise.parallel import apply
from shardwise.parallel.decide import Decision, decide
from shardwise.parallel.ownership import ownership_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from shardwise.train.step import Step
from tests.families import VOCAB, family
from tests.kept import kept

LENGTH, MICRO_BATCH, CLIP, LIMIT = 16, 2, 0.05, 1e-9
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One combination. ``options`` are the plan's; every model has 4 blocks."""

    world: int
    strategy: str
    model: str
    accum: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = "".join(f",{key}={value}" for key, value in self.options.items())
        return f"{self.strategy} {self.model} x{self.accum}{more}"

    @property
    def plan(self) -> Plan:
        dims = dims_for(parse_strategy(self.strategy), self.world)
        return Plan(strategy=self.strategy, dims=dims, grad_accum=self.accum, **self.options)


def ragged(number: int, seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro batches with labels of every length, and each fifth without any."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(number):
        ids = torch.randint(VOCAB, (MICRO_BATCH, LENGTH + 1), generator=generator)
        inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].clone()
        for row in range(MICRO_BATCH):
            labels[row, int(torch.randint(1, LENGTH + 1, (), generator=generator)) :] = -100
        if index % 5 == 1:
            labels[:] = -100
        batches.append((inputs, labels))
    return batches


def reference(model: nn.Module, batches: list[Any]) -> tuple[Gradients, Gradients, float, float]:
    """One process over the whole global batch, without Shardwise: gradient, clipped gradient, norm, loss."""
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    loss = sum(_loss_sum(model(inputs), labels) for inputs, labels in batches) / max(count, 1)
    loss.backward()
    raw = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    clipped = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return raw, clipped, norm.item(), loss.item()


def _loss_sum(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """PyTorch's own loss: a mistake in Shardwise's must not be on both sides."""
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


@contextmanager
def decided_once(name: str) -> Iterator[None]:
    """How a plan is applied to the model ``name`` is decided by the first rank, for all: a fourth of the time.

    Nothing but the model and the plan may count, and the decision holds nothing but names and numbers.
    """

    def once(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> Decision:
        shape = (tuple(sample.shape), sample.dtype) if isinstance(sample, torch.Tensor) else None
        assert (shape is None) == (sample is None)
        return kept(("decided", name, plan.model_dump_json(), shape), lambda: decide(module, spec, plan, sample))

    with mock.patch.object(apply, "decide", once):
        yield


def full_gradients(session: Session) -> Gradients:
    """The whole gradient of every parameter that this rank holds, under the name that it has in the whole model."""
    return {name: full(gradient).detach().clone() for name, gradient in _gradients(session)}


def gradients_here(session: Session) -> Gradients:
    """As `full_gradients`, but of a shard as it is: a gather of each parameter takes half of a small test's time."""
    return {name: here(gradient).detach().clone() for name, gradient in _gradients(session)}


def _gradients(session: Session) -> Iterator[tuple[str, torch.Tensor]]:
    home = ownership_of(session.module)
    for name, parameter in session.module.named_parameters():
        if parameter.grad is not None:
            yield clean_name(name) if home is None else home.canonical(clean_name(name)), parameter.grad


def full(gradient: torch.Tensor) -> torch.Tensor:
    """All of it, on every rank."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def here(gradient: torch.Tensor) -> torch.Tensor:
    """A DTensor whose part on this rank is a plain slice stays one; all others are gathered."""
    if isinstance(gradient, DTensor) and all(
        type(place) in (Shard, Replicate, _StridedShard) for place in gradient.placements
    ):
        return gradient
    return full(gradient)


def both_here(value: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of ``value``, and the same part of ``expected``, which is whole."""
    if not isinstance(value, DTensor):
        return value, expected
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    for dim, (length, begin) in enumerate(zip(shape, offset, strict=True)):
        expected = expected.narrow(dim, min(begin, expected.shape[dim]), length)
    return value.to_local(), expected


class Still(torch.optim.SGD):
    """Leaves the weights alone, as a rate of zero would; adding nothing to DTensors takes a fifth of a test's time."""

    def step(self, closure: Any = None) -> None: ...


class Watch:
    """Keeps the gradients of the last step, before and after clipping: whole ones, or as `gradients_here`.

    Where only shards are kept, a test must look at the errors of all ranks.
    """

    def __init__(self, gradients: Callable[[Session], Gradients] = full_gradients) -> None:
        self.raw: Gradients = {}
        self.clipped: Gradients = {}
        self.gradients = gradients

    def on_prepared(self, session: Session) -> None: ...
    def on_step_start(self, session: Session, step: Step) -> None: ...
    def on_step_abandoned(self, session: Session, step: Step) -> None: ...

    def on_gradients(self, session: Session, step: Step) -> None:
        self.raw = self.gradients(session)

    def on_step_end(self, session: Session, step: Step) -> None:
        self.clipped = self.gradients(session)


def worst(found: Gradients, expected: Gradients) -> tuple[float, str]:
    """The largest error of a gradient that is here, over the largest element of that gradient.

    What should be zero (a key's bias, which softmax takes out again) is held against the largest of all, too.
    """
    errors = [(0.0, "")]
    floor = 1e-6 * max(float(value.abs().max()) for value in expected.values()) + 1e-30
    for name, value in found.items():
        scale = expected[name].abs().max().clamp_min(floor)
        mine, theirs = both_here(value, expected[name])
        assert mine.shape == theirs.shape, name
        if mine.numel():
            errors.append((float((mine - theirs).abs().max() / scale), name))
    return max(errors)


def train(case: Case) -> dict[str, Any]:
    """A whole window and a partial one, or two whole ones of one micro batch: the worst error, where, and the names."""
    per_window = case.plan.dims.dp * case.accum
    partial = max(1, per_window // 2) if per_window > 1 else 0
    batches = ragged(per_window + (partial or 1))
    watch = Watch(gradients_here)
    session = start(case.plan, receipts=False)
    session.observers.append(watch)
    model = family(case.model, seed=0 if session.ranks.is_main else 7)
    with decided_once(case.model):
        model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0), batches[0][0])
    errors: list[tuple[float, str]] = []
    names: set[str] = set()
    for index, step in enumerate(session.steps(batches)):
        step.run(model, token_loss_sum)
        result = step.update(optimizer, clip_norm=CLIP)
        window = batches[index * per_window : (index + 1) * per_window]
        raw, clipped, norm, loss = kept(
            ("contract", case.model, len(batches), index), lambda window=window: reference(family(case.model), window)
        )
        errors += [worst(watch.raw, raw), worst(watch.clipped, clipped)]
        if step.tokens:
            errors.append((abs(float(result.grad_norm or 0.0) - norm) / norm, "norm"))
            errors.append((abs(result.loss - loss) / abs(loss), "loss"))
        names |= set(watch.raw)
    session.close()
    expected = kept(("names", case.model), lambda: [n for n, _ in family(case.model).named_parameters()])
    return {"worst": max(errors), "names": sorted(names), "expected": sorted(expected), "steps": index + 1}
