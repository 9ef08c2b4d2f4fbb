"""One strategy after the other on live ranks: two steps each, gradients against one process, and the receipts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwise.cost.memory import estimate_memory
from shardwise.errors import ModelError, ReceiptError, TrainingError, UserError
from shardwise.parallel.apply import parameter_names
from shardwise.parallel.group import Ranks, broadcast_text, gather_text
from shardwise.parallel.home import home_of
from shardwise.plan.plan import Plan
from shardwise.spec.read import clean_name, read_model
from shardwise.train.config import Config
from shardwise.train.corpus import open_corpus
from shardwise.train.loss import token_loss_sum
from shardwise.train.model import model_factory
from shardwise.train.optimizer import build_optimizer, workload_of
from shardwise.train.order import Order
from shardwise.train.samples import samples_for
from shardwise.train.session import Session
from shardwise.train.step import Step
from shardwise.verify.batches import (
    STEPS,
    Batch,
    Data,
    Key,
    Reference,
    contributions,
    global_batch,
    reference,
    tokens_of,
)
from shardwise.verify.causes import Setting, explain, explain_norm
from shardwise.verify.effects import EffectsProbe
from shardwise.verify.fit import FitProbe
from shardwise.verify.gradients import TOLERANCE, Difference, Gradients, Verdict, compare, judge
from shardwise.verify.receipt import Receipt
from shardwise.verify.shrink import Shrunk, build_small

NOISY = 1e-6  # of plain PyTorch's own gradient, computed in two ways: above, there is nothing to compare with
SEED = 20_011


class Row(BaseModel):
    """What became of one strategy. ``reason`` says why it was not run; ``explanations`` why it does not verify."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    ranks: int
    dims: dict[str, int]
    status: Literal["verified", "failed", "refused"]
    verdict: Verdict | None = None
    explanations: tuple[str, ...] = ()
    reason: str = ""
    receipts: dict[str, Receipt] = {}

    @classmethod
    def refused(cls, strategy: str, ranks: int, reason: str, plan: Plan | None = None) -> Row:
        """A strategy that cannot be, and why."""
        dims = plan.dims.model_dump() if plan is not None else {}
        return cls(strategy=strategy, ranks=ranks, dims=dims, status="refused", reason=reason)


class Task(BaseModel):
    """What the ranks of one world are to verify. ``results`` gets one `Row` a line, as each is done."""

    model_config = ConfigDict(frozen=True)

    config: Config
    corpus: Path
    shrunk: Shrunk
    seq_len: int
    plans: tuple[Plan, ...]
    results: Path

    def to_json(self) -> str:
        """For the ranks. Keys that the user left out stay out: a config says when a key that is given does nothing."""
        return self.model_dump_json(by_alias=True, exclude_unset=True)

    @cached_property
    def factory(self) -> Callable[[], nn.Module]:
        """The user's model as it is."""
        return model_factory(self._short, open_corpus(self.corpus).vocab_size)

    @property
    def _short(self) -> Config:
        return self.config.model_copy(update={"data": self.config.data.model_copy(update={"seq_len": self.seq_len})})

    def model(self, seed: int = SEED) -> nn.Module:
        """The small model, in float64."""
        return build_small(self.factory, self.shrunk.recipe, seed)

    @cached_property
    def data(self) -> Data:
        """Short samples of the config's data, in the run's own order."""
        corpus, table = open_corpus(self.corpus), self._short.data
        samples = samples_for(corpus.train, table, corpus.separator)
        small = self.shrunk.vocab_size
        modulo = small if small is not None and small < corpus.vocab_size else None
        return Data(samples, Order(len(samples), self.config.train.seed, table.shuffle), modulo)


def verify_all(task: Task, ranks: Ranks) -> list[Row]:
    """Every plan of ``task`` in turn, on all ranks of a world; rows are rank 0's.

    Raises:
        ModelError: one process does not reproduce its own gradient, so there is nothing to compare with.
    """
    references = _References(task, ranks)
    rows = []
    for plan in task.plans:
        row = _verify(task, plan, ranks, references)
        rows.append(row)
        if ranks.is_main:
            with task.results.open("a") as file:
                file.write(row.model_dump_json() + "\n")
    return rows


def _verify(task: Task, plan: Plan, ranks: Ranks, references: _References) -> Row:
    torch.manual_seed(SEED + ranks.rank)  # a rank's own luck must not matter
    session = Session(ranks=dataclasses.replace(ranks, owns_group=False, owns_control=False), planner=lambda m, o: plan)
    problem = ""
    steps: list[tuple[Verdict, tuple[str, ...]]] = []
    receipts: dict[str, Receipt] = {}
    kind: type[Exception] | None = None
    try:
        steps, receipts = _run(task, plan, session, references)
    except (UserError, TrainingError) as error:
        problem, kind = str(error), type(error)
    finally:
        session.close()
    problems = gather_text(problem, ranks)  # what is refused is refused on every rank
    facts: dict[str, Any] = {"strategy": plan.strategy, "ranks": ranks.world_size, "dims": plan.dims.model_dump()}
    if any(problems):
        first = next(text for text in problems if text)
        if kind is TrainingError:
            return Row(**facts, status="failed", explanations=(first,))
        return Row(**facts, status="refused", reason=first)
    verdict = _together([found for found, _ in steps])
    explanations = _told_once(steps)
    explanations += tuple(
        f"{receipt.title}: {line.name}: planned {line.planned}, found {line.found}"
        for receipt in receipts.values()
        for line in receipt.lines
        if line.ok is False
    )
    ok = verdict.ok and all(receipt.ok for receipt in receipts.values())
    return Row(
        **facts,
        status="verified" if ok else "failed",
        verdict=verdict,
        explanations=explanations,
        receipts=receipts,
    )


def _together(verdicts: Sequence[Verdict]) -> Verdict:
    """The worse of the steps."""
    worst = max(verdicts, key=lambda v: (not v.ok, v.error))
    return worst.model_copy(update={"norm_error": max(v.norm_error for v in verdicts)})


def _told_once(steps: Sequence[tuple[Verdict, tuple[str, ...]]]) -> tuple[str, ...]:
    (_, said), (whole, said_of_whole) = steps
    if not whole.ok:
        return said_of_whole
    return tuple(f"only where ranks and micro batches have different numbers of tokens: {text}" for text in said)


def _run(
    task: Task, plan: Plan, session: Session, references: _References
) -> tuple[list[tuple[Verdict, tuple[str, ...]]], dict[str, Receipt]]:
    model = task.model(SEED if session.ranks.is_main else SEED + 1)  # rank 0's weights must win
    optimizer = build_optimizer(model.parameters(), task.config.optimizer)
    spec = read_model(model)
    estimate = estimate_memory(spec, plan, workload_of(optimizer, parameter_names(model), device="cpu"))
    effects, fit, watch = EffectsProbe(strict=False), FitProbe(estimate), _Watch()
    session.observers += [watch, _Quiet(effects), _Quiet(fit)]
    sample = torch.zeros(plan.micro_batch or 1, task.seq_len, dtype=torch.int64)
    outer, optimizer = session.prepare(model, optimizer, sample)
    weights = [_local(p).clone() for p in session.module.parameters()]
    found = []
    for number, step in enumerate(session.run_windows(_windows(task, plan, session), limit=len(STEPS))):
        batches = global_batch(task.data, plan, STEPS[number])
        expected = references.of(plan, STEPS[number], batches)
        clip = expected.norm / 2
        step.run(outer, token_loss_sum)
        result = step.update(optimizer, clip_norm=clip)
        found.append(_judge_step(task, session, watch, expected, (result.grad_norm or 0.0, clip), batches, references))
        with torch.no_grad():  # each step is of the same weights
            for parameter, weight in zip(session.module.parameters(), weights, strict=True):
                _local(parameter).copy_(weight)
    receipts = {"effects": effects.receipt, "fit": fit.receipt}
    return found, {name: receipt for name, receipt in receipts.items() if receipt is not None}


def _windows(task: Task, plan: Plan, session: Session) -> Iterator[list[Batch]]:
    for step in STEPS:
        batches = global_batch(task.data, plan, step)
        yield [batch for (rank, _), batch in batches.items() if rank == session.place.dp]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held


def _judge_step(
    task: Task,
    session: Session,
    watch: _Watch,
    expected: Reference,
    clipping: tuple[float, float],
    batches: dict[Key, Batch],
    references: _References,
) -> tuple[Verdict, tuple[str, ...]]:
    """Compare on every rank, agree, and where it is wrong let rank 0 look at all ranks' parts. Collective."""
    norm, clip = clipping
    ranks, plan = session.ranks, session.plan
    names = list(expected.gradients)
    mine = compare(expected.gradients, watch.raw)
    scale = min(1.0, clip / (expected.norm + 1e-6))
    scaled = {n: None if g is None else g * scale for n, g in expected.gradients.items()}
    clipped = max((d.error for d in compare(scaled, watch.clipped)), default=0.0)
    table = _error_table(names, mine, clipped, ranks)
    errors = [max(float(row[i]) for row in table) for i in range(len(names))]
    unheld = [i for i, error in enumerate(errors) if error < 0]
    merged = [
        Difference(name=name, error=float("inf") if i in unheld else error, missing=i in unheld)
        for i, (name, error) in enumerate(zip(names, errors, strict=True))
    ]
    worst_clipped = max(float(row[-1]) for row in table)
    tolerance = references.tolerance
    verdict = judge(merged, (norm, expected.norm), clipped_error=worst_clipped, tolerance=tolerance)
    if verdict.ok:
        return verdict, ()
    parts = _all_parts(names, watch.raw, ranks)
    if not ranks.is_main:
        return verdict, ()
    worst = torch.stack(table).max(0).indices.tolist()  # the rank whose view of a parameter is furthest off
    found = {name: parts[worst[i]].get(name) for i, name in enumerate(names)}
    differences = compare(expected.gradients, found)
    wrong = [d for d in differences if not d.error <= tolerance]
    verdict = judge(differences, (norm, expected.norm), clipped_error=worst_clipped, tolerance=tolerance)
    if not wrong:
        return verdict, (explain_norm(norm, expected.norm, plan),)
    heads, size = task.shrunk.heads
    told = explain(
        expected.gradients,
        found,
        differences,
        Setting(plan, key_value_heads=heads, head_dim=size),
        tolerance=tolerance,
        parts=parts,
        contributions=contributions(task.model, batches),
        tokens=tokens_of(batches),
    )
    return verdict, told


class _Quiet:
    """A probe whose receipt is collected, where alone it would end the run."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe

    def __getattr__(self, event: str) -> Callable[..., None]:
        method = getattr(self._probe, event)

        def call(*args: Any) -> None:
            try:
                method(*args)
            except ReceiptError:
                return

        return call
