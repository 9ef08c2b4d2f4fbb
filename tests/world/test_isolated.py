"""Documents packed in a row, none of which sees another: the gradient is that of the documents one by one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers.masking_utils as masks

import shardwise.train.data.samples as samples_module
from shardwise.errors import DataError
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.lines.sample_lines import isolation_line
from shardwise.run.start import start
from shardwise.train.data.corpus import Tokens
from shardwise.train.data.isolation import Isolation, measure_isolation
from shardwise.train.data.samples import IsolatedSamples
from shardwise.train.loss import token_loss_sum
from tests.contract import CLIP, LIMIT, Still, Watch, decided_once, gradients_here, reference, worst
from tests.families import VOCAB, family
from tests.kept import kept
from tests.turns import by_turns
from tests.worlds import run_each

SEQ_LEN, MICRO_BATCH, SEPARATOR = 24, 2, VOCAB - 1
MODELS = ("llama", "qwen3", "gemma", "gpt2", "mistral")
STRATEGIES = {  # each model under each axis; combinations of axes take turns
    2: {
        "ddp": MODELS,
        "fsdp": MODELS,
        "zero2": MODELS,
        "ddp+tp2": MODELS[::2],
        "fsdp+tp2": MODELS[1::2],
        "ddp+pp2": MODELS,
    },
    4: {"hsdp": MODELS, "fsdp+pp2": MODELS[::2]},
}


def corpus() -> Tokens:
    """Documents of 2 to 30 tokens, of which some have a loss."""
    generator = np.random.default_rng(5)
    lengths = [3, 24, 7, 2, 11, 5, 9, 16, 4, 4, 20, 6, 13, 8, 3, 10, 21, 5, 2, 12, 30]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = generator.integers(0, VOCAB - 1, starts[-1]).astype(np.uint8)
    marks = generator.integers(0, 2, starts[-1]).astype(np.uint8) | 4
    marks[starts[1:] - 1] |= 1
    return Tokens(tokens, starts, int(starts[-1]), "here", marks)


def alone(samples: IsolatedSamples, ids: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The documents of these samples, each in a batch of its own: read from the corpus, not from the rows."""
    tokens, found = samples.tokens, []
    for number in ids:
        for piece in samples._order[samples._rows[number] : samples._rows[number + 1]]:
            begin, length = samples._begins[piece], samples._lengths[piece]
            document = torch.from_numpy(tokens.tokens[begin : begin + length + 1].astype(np.int64))
            trained = torch.from_numpy((tokens.marks[begin : begin + length + 1] & 1).astype(bool))
            found.append((document[None, :-1], torch.where(trained[1:], document[1:], -100)[None]))
    return found


@dataclass(frozen=True)
class Found:
    error: float
    isolation: Isolation


def train(strategy: str, model_name: str, world: int, sabotage: str = "") -> Found:
    """Two windows, each against its documents alone; and what the receipt measures."""
    plan = Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), world), grad_accum=2)
    samples = IsolatedSamples(corpus(), SEQ_LEN, SEPARATOR)
    broken(sabotage)
    per_window = plan.dims.dp * plan.grad_accum
    rows = np.arange(2 * per_window * MICRO_BATCH).reshape(-1, MICRO_BATCH) % len(samples)
    batches = [samples.batch(row) for row in rows]
    watch = Watch(gradients_here)
    session = start(plan, receipts=False)
    session.observers.append(watch)
    model = family(model_name, layers=2, seed=0 if session.ranks.is_main else 7)
    sample = torch.zeros(MICRO_BATCH, SEQ_LEN, dtype=torch.int64)
    with nullcontext() if sabotage else decided_once(f"{model_name} of 2 layers"):
        model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0), sample)
    isolation = measure_isolation(session, samples, rows[session.place.dp])
    errors = []
    for index, step in enumerate(session.steps(batches)):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=CLIP)
        window = rows[index * per_window : (index + 1) * per_window].ravel()
        raw, clipped, _, _ = kept(
            ("isolated", model_name, len(rows), index),
            lambda window=window: reference(family(model_name, layers=2), alone(samples, window)),
        )
        errors += [worst(watch.raw, raw)[0], worst(watch.clipped, clipped)[0]]
    session.close()
    return Found(max(errors), isolation)


def broken(how: str) -> None:
    """Break one thing, as a mistake would."""
    honest = IsolatedSamples.batch
    if how == "positions not restarted":

        def batch(self: Any, ids: Any) -> Any:
            inputs, labels = honest(self, ids)
            inputs["position_ids"] = torch.arange(SEQ_LEN).expand_as(inputs["position_ids"]).contiguous()
            return inputs, labels

        IsolatedSamples.batch = batch  # type: ignore[method-assign]
    elif how == "a mask dropped":
        masks.find_packed_sequence_indices = lambda position_ids: None
    elif how == "labels shifted at a border":

        def shifted(self: Any, ids: Any) -> Any:
            inputs, labels = honest(self, ids)
            starts = (inputs["position_ids"] == 0).nonzero().tolist()
            for row, column in starts:
                if column:  # the next document's first token, instead of this one's last
                    labels[row, column - 1] = inputs["input_ids"][row, column]
            return inputs, labels

        IsolatedSamples.batch = shifted  # type: ignore[method-assign]


def and_back(*case: Any) -> Found:
    """Undo what a sabotage broke: the next case runs in the same world."""
    keep = IsolatedSamples.batch, masks.find_packed_sequence_indices
    try:
        return train(*case)
    finally:
        IsolatedSamples.batch, masks.find_packed_sequence_indices = keep  # type: ignore[method-assign]


@pytest.mark.turns(1)
@pytest.mark.parametrize("world", [2, 4])
def test_gradient_is_that_of_the_documents_one_by_one(world: int) -> None:
    cases = [(strategy, model, world) for strategy, models in STRATEGIES[world].items() for model in models]
    cases = by_turns(cases, 2, f"{world} ranks")
    for case, ranks in zip(cases, run_each(train, world, cases, timeout_s=240), strict=True):
        for found in ranks:
            assert found.error <= LIMIT, (case, found)
            line = isolation_line(found.isolation)
            assert line.ok and "isolated: another document moves a loss by" in line.found, (case, line)
            assert found.isolation.documents and found.isolation.open_change > 1e-6, (case, line)


@pytest.mark.parametrize("strategy", ["fsdp"])
def test_each_mistake_moves_the_gradient_and_is_caught_by_the_line(strategy: str) -> None:
    mistakes = ["positions not restarted", "a mask dropped", "labels shifted at a border"]
    cases = [(strategy, "llama", 2, how) for how in mistakes] + [(strategy, "gpt2", 2, "a mask dropped")]
    for case, ranks in zip(cases, run_each(and_back, 2, cases), strict=True):
        for found in ranks:
            assert found.error > 1e-3, case
            assert isolation_line(found.isolation).ok is False, (case, found)


def test_labels_are_looked_at_in_every_step() -> None:
    samples = IsolatedSamples(corpus(), SEQ_LEN, SEPARATOR)
    inputs, labels = samples.batch(np.arange(len(samples)))
    samples_module.check_borders(inputs, labels)
    samples_module.check_borders(inputs["input_ids"], labels)
    inside = (inputs["position_ids"][:, 1:] != 0) & (labels[:, :-1] != -100)
    row, column = inside.nonzero()[0].tolist()
    labels[row, column] += 1
    with pytest.raises(DataError, match="not the token that follows"):
        samples_module.check_borders(inputs, labels)
