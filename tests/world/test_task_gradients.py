"""Every task's gradient is that of plain transformers in one process: its own loss, from its own labels."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.config import Config
from shardwise.train.model import model_factory
from shardwise.train.tasks.own_loss import loss_of
from shardwise.train.tasks.registry import prepare_data, samples_of
from tests.contract import CLIP, LIMIT, Still, Watch, gradients_here, worst
from tests.kept import kept
from tests.task_models import MODELS, QUIET, smoothed, write_task
from tests.turns import by_turns
from tests.worlds import run_each

MICRO_BATCH = 2
TP = {"sequence_parallel": False, "loss_parallel": False}


def doubled(inputs: Any) -> Any:
    """Inputs of a model in float64."""
    if isinstance(inputs, dict):
        return {name: doubled(value) for name, value in inputs.items()}
    return inputs.double() if inputs.is_floating_point() else inputs


def reference(model: nn.Module, batches: list[Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Gradient, clipped gradient and loss, by the loss that transformers computes from labels."""
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for inputs, labels in batches:
        number = int((labels != -100).sum())
        if not number:
            continue
        if not hasattr(model, "config"):
            total, count = total + smoothed(model(inputs), labels)[0], count + number
            continue
        given = {"pixel_values": inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
        given.pop("decoder_input_ids", None)  # transformers shifts the labels itself
        total, count = total + model(**given, labels=labels).loss * number, count + number
    (total / count).backward()
    raw = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    clipped = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return raw, clipped, float(total.detach() / count)


def train(kind: str, strategy: str, world: int, options: dict[str, Any], sabotage: str = "") -> tuple[float, str]:
    """Two windows, the second with empty samples at its end; the worst error, and where. Or why it is refused."""
    dims = dims_for(parse_strategy(strategy), world)
    plan = Plan(strategy=strategy, dims=dims, grad_accum=2, **options)
    session = start(plan, receipts=False)
    try:
        with TemporaryDirectory() as folder:
            tables = write_task(Path(folder), "vit" if kind == "own" else kind)
            if kind == "own":
                tables["model"] = OWN
            config = Config.model_validate(tables)
            data = prepare_data(config, Path(folder) / "data", QUIET)
            samples, loss_sum, factory = (
                samples_of(data, config),
                loss_of(config),
                model_factory(config, data.vocab_size),
            )
            per_window = plan.dims.dp * plan.grad_accum * MICRO_BATCH
            ids = np.arange(2 * per_window) % len(samples)
            ids[-3:] = -1
            right = [(doubled(inputs), labels) for inputs, labels in map(samples.batch, ids.reshape(-1, MICRO_BATCH))]
            if sabotage:
                broken(sabotage, samples)
            batches = [(doubled(inputs), labels) for inputs, labels in map(samples.batch, ids.reshape(-1, MICRO_BATCH))]

            def build(seed: int) -> nn.Module:
                torch.manual_seed(seed)
                return factory().double()

            watch = Watch(gradients_here)
            session.observers.append(watch)
            model = build(0 if session.ranks.is_main else 7).eval()
            try:
                model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0), batches[0][0])
            except ModelError as error:
                return -1.0, str(error)
            errors = []
            for index, step in enumerate(session.steps(batches)):
                step.run(model, loss_sum)
                result = step.update(optimizer, clip_norm=CLIP)
                window = right[index * per_window // MICRO_BATCH : (index + 1) * per_window // MICRO_BATCH]
                raw, clipped, loss = kept(
                    (kind, len(batches), index), lambda window=window: reference(build(0), window)
                )
                assert not plan.dims.pp > 1 or set(watch.raw) <= set(raw)
                assert plan.dims.pp > 1 or set(watch.raw) == set(raw), set(raw) ^ set(watch.raw)
                errors += [worst(watch.raw, raw), worst(watch.clipped, clipped), (abs(result.loss / loss - 1), "loss")]
            return max(errors)
    finally:
        session.close()


def broken(sabotage: str, samples: Any) -> None:
    """Break one thing of a task, as a mistake would."""
    honest = samples.make

    def make(rows: Any) -> Any:
        inputs, labels = honest(rows)
        if sabotage == "targets not late":
            inputs["decoder_input_ids"] = torch.where(labels < 0, 0, labels)
        elif sabotage == "padding attended to":
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        else:
            labels = torch.where(labels < 0, 0, labels)
        return inputs, labels

    samples.make = make


STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp", {}),
    ("zero2", {}),
    ("fsdp", {}),
    ("ddp+tp2", TP),
    ("ddp+pp2", {}),
)
OWN = {"factory": "tests.task_models:flat_mlp", "loss": "tests.task_models:smoothed", "task": "image-classification"}
CASES = [(kind, strategy, 2, options) for kind in MODELS for strategy, options in STRATEGIES]
CASES += [("own", strategy, 2, {}) for strategy in ("ddp", "fsdp")]
REFUSED = {("t5", "ddp+tp2"): "decoder.block.0 cannot be sharded", ("t5", "ddp+pp2"): "a skip connection"}


@pytest.mark.turns(1)
def test_gradient_is_that_of_plain_transformers() -> None:
    cases = by_turns(CASES, 2, "tasks")
    for case, ranks in zip(cases, run_each(train, 2, cases, timeout_s=240), strict=True):
        for error, where in ranks:
            if told := REFUSED.get(case[:2]):
                assert error < 0 and told in where, (case, where)
            else:
                assert 0 <= error <= LIMIT, (case, error, where)


def test_each_mistake_moves_the_gradient() -> None:
    """The reference must not share the mistake: it gets only what transformers documents, and shifts by itself."""
    cases = [
        ("t5", "ddp", 2, {}, "targets not late"),
        ("bert sequences", "fsdp", 2, {}, "padding attended to"),
        ("bert tokens", "ddp", 2, {}, "padding has a loss"),
    ]
    for case, ranks in zip(cases, run_each(train, 2, cases), strict=True):
        assert all(error > 1e-3 for error, _ in ranks), (case, ranks)


def test_the_embedding_of_encoder_and_decoder_is_one(tmp_path: Path) -> None:
    config = Config.model_validate(write_task(tmp_path, "t5"))
    model = model_factory(config, 257)()
    assert model.shared.weight is model.lm_head.weight is model.decoder.embed_tokens.weight
    assert model.shared.weight is model.encoder.embed_tokens.weight
