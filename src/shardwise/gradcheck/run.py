"""Verify strategies in turn on live ranks: two steps each, gradients, and receipts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.cost.memory.estimate_memory import estimate_memory
from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.errors import ReceiptError, TrainingError, UserError
from shardwise.gradcheck.batches import STEPS, Batch, Data, global_batch
from shardwise.gradcheck.compare import GradientVerdict
from shardwise.gradcheck.judge import CLIPPED, Judge, Judged
from shardwise.gradcheck.reference import References, refuse_own_collectives
from shardwise.gradcheck.router_reference import set_terms, terms_of
from shardwise.gradcheck.shrink import Shrunk, build_small
from shardwise.gradcheck.views import GradientRecorder
from shardwise.model.read import read_model
from shardwise.parallel.apply import parameter_names
from shardwise.parallel.decide import decide, parts_of
from shardwise.plan.plan import Plan
from shardwise.receipts.effects import EffectsRecorder
from shardwise.receipts.fit import FitRecorder
from shardwise.receipts.receipt import Receipt
from shardwise.train.config import Config
from shardwise.train.data.corpus import open_corpus
from shardwise.train.data.samples import order_for, samples_for
from shardwise.train.loss import token_loss_sum
from shardwise.train.model import model_factory
from shardwise.train.optimizer import build_optimizer, workload_of
from shardwise.train.routing import router_terms
from shardwise.train.session import Session

SEED = 20_011
MOST_LINES = 4  # number of receipt lines reported


class StrategyResult(BaseModel):
    """Result of one strategy.

    ``reason`` is why it was not run; ``explanations`` why it failed.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    strategy: str
    ranks: int
    dims: dict[str, int]
    status: Literal["verified", "failed", "refused"]
    verdict: GradientVerdict | None = None
    explanations: tuple[str, ...] = ()
    reason: str = ""
    receipts: dict[str, Receipt] = {}

    @classmethod
    def refused(cls, strategy: str, ranks: int, reason: str, plan: Plan | None = None) -> StrategyResult:
        """Build the result of an impossible strategy."""
        dims = plan.dims.model_dump() if plan is not None else {}
        return cls(strategy=strategy, ranks=ranks, dims=dims, status="refused", reason=reason)


class VerifyTask(BaseModel):
    """Task of one world; ``results`` gets one `StrategyResult` per line, as each is done.

    ``references`` is the folder with the gradients of one process.
    """

    model_config = ConfigDict(frozen=True)

    config: Config
    corpus: Path
    shrunk: Shrunk
    seq_len: int
    plans: tuple[Plan, ...]
    results: Path
    references: Path

    @cached_property
    def factory(self) -> Callable[[], nn.Module]:
        """Return the user's model unchanged."""
        return model_factory(self._short, open_corpus(self.corpus).vocab_size)

    @property
    def _short(self) -> Config:
        return self.config.model_copy(update={"data": self.config.data.model_copy(update={"seq_len": self.seq_len})})

    def model(self, seed: int = SEED) -> nn.Module:
        """Build the small model, in float64."""
        small = build_small(self.factory, self.shrunk.recipe, seed)
        set_terms(small, router_terms(small, self.config.train.router)[0])
        return small

    @cached_property
    def data(self) -> Data:
        """Return short samples of the config's data, in the run's own order; every token has a loss.

        Those of conversations with one may all lie beyond a short sample.
        """
        corpus, config = open_corpus(self.corpus), self._short
        corpus = replace(corpus, train=replace(corpus.train, marks=None))
        samples = samples_for(corpus, config)
        small = self.shrunk.vocab_size
        modulo = small if small is not None and small < corpus.vocab_size else None
        return Data(samples, order_for(samples, config, endless=True), modulo)


def verify_all(
    task: VerifyTask, ranks: Ranks, reasons: Callable[[StrategyResult], None] | None = None
) -> list[StrategyResult]:
    """Verify every plan of ``task`` on all ranks; ``reasons`` gets rank 0's results."""
    references = References(task.model, task.references)
    rows = []
    for plan in task.plans:
        row = _verify(task, plan, ranks, references)
        rows.append(row)
        if ranks.is_main:
            with task.results.open("a") as file:
                file.write(row.model_dump_json() + "\n")
            if reasons is not None:
                reasons(row)
    return rows


def _verify(task: VerifyTask, plan: Plan, ranks: Ranks, references: References) -> StrategyResult:
    torch.manual_seed(SEED + ranks.rank)  # a rank's own random state must not matter
    session = Session(ranks=dataclasses.replace(ranks, owns_group=False, owns_control=False), planner=lambda *_: plan)
    problem, failed = "", False
    found: list[Judged] = []
    receipts: dict[str, Receipt] = {}
    try:
        found, receipts = _run(task, plan, session, references)
    except (UserError, TrainingError) as error:
        problem, failed = str(error), isinstance(error, TrainingError)
    finally:
        session.close()
    problems = [text for text in gather_text(problem, ranks) if text]  # a rejection is the same on every rank
    facts: dict[str, Any] = {"strategy": plan.strategy, "ranks": ranks.world_size, "dims": plan.dims.model_dump()}
    if problems and failed:
        return StrategyResult(**facts, status="failed", explanations=(problems[0],))
    if problems:
        return StrategyResult(**facts, status="refused", reason=problems[0])
    verdict = _together([step.verdict for step in found])
    explanations = (*_once(found), *(text for receipt in receipts.values() for text in false_lines(receipt)))
    ok = verdict.ok and all(receipt.ok for receipt in receipts.values())
    status = "verified" if ok else "failed"
    return StrategyResult(**facts, status=status, verdict=verdict, explanations=explanations, receipts=receipts)


def false_lines(receipt: Receipt) -> list[str]:
    """Return the first lines of a receipt that are false."""
    wrong = [line for line in receipt.lines if line.ok is False]
    shown = [f"{receipt.title}: {line.name}: planned {line.planned}, found {line.found}" for line in wrong[:MOST_LINES]]
    return [
        *shown,
        *([f"{receipt.title}: and {len(wrong) - MOST_LINES} more lines"] if len(wrong) > MOST_LINES else []),
    ]


def _together(verdicts: Sequence[GradientVerdict]) -> GradientVerdict:
    """Return the worse of the steps' verdicts."""
    worst = max(verdicts, key=lambda v: (not v.ok, v.error))
    return worst.model_copy(update={"norm_error": max(v.norm_error for v in verdicts)})


def _once(steps: Sequence[Judged]) -> tuple[str, ...]:
    ragged, full = steps
    if full.verdict.ok and not ragged.verdict.ok:
        return tuple(
            f"only where ranks and micro batches have different numbers of tokens: {t}" for t in ragged.reasons
        )
    return full.reasons


def _run(
    task: VerifyTask, plan: Plan, session: Session, references: References
) -> tuple[list[Judged], dict[str, Receipt]]:
    model = task.model(SEED if session.ranks.is_main else SEED + 1)  # rank 0's weights must win
    refuse_own_collectives(task.model(), next(iter(global_batch(task.data, plan, STEPS[-1]).values())))
    optimizer = build_optimizer(model.parameters(), task.config.optimizer, model)
    sample = torch.zeros(plan.micro_batch or 1, task.seq_len, dtype=torch.int64)
    spec = read_model(model)
    cut = plan.dims.splits_model or plan.dims.ep > 1
    parts = parts_of(decide(model, spec, plan, sample), spec, plan) if cut else None
    estimate = estimate_memory(spec, plan, workload_of(optimizer, parameter_names(model), device="cpu"), parts)
    effects, fit, recorder = EffectsRecorder(strict=False), FitRecorder(estimate), GradientRecorder()
    session.observers += [recorder, _Quiet(effects), _Quiet(fit)]
    session.routing.terms = terms_of(model)
    outer, optimizer = session.prepare(model, optimizer, sample)
    judge = Judge(task.model, session, references, heads=task.shrunk.heads)
    misplaced = judge.weights()
    weights = [_local(p).clone() for p in session.module.parameters()]
    found = []
    for number, step in enumerate(session.run_windows(_windows(task, plan, session), limit=len(STEPS))):
        batches = global_batch(task.data, plan, STEPS[number])
        expected = references.of(plan, STEPS[number], batches)
        step.run(outer, token_loss_sum)
        result = step.update(optimizer, clip_norm=expected.norm * CLIPPED)
        judged = judge.step(recorder, expected, batches, norm=result.grad_norm or 0.0, loss=result.loss)
        found.append(judged if judged.verdict.ok else Judged(judged.verdict, (*misplaced, *judged.reasons)))
        with torch.no_grad():  # each step starts from the same weights
            for parameter, weight in zip(session.module.parameters(), weights, strict=True):
                _local(parameter).copy_(weight)
    receipts = {"effects": effects.receipt, "fit": fit.receipt}
    return found, {name: receipt for name, receipt in receipts.items() if receipt is not None}


def _windows(task: VerifyTask, plan: Plan, session: Session) -> Iterator[list[Batch]]:
    for step in STEPS:
        batches = global_batch(task.data, plan, step)
        yield [batch for (rank, _), batch in batches.items() if rank == session.place.dp]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


class _Quiet:
    """Probe whose receipt is collected instead of ending the run."""

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
