"""The same-gradient contract with the loss in chunks, on real ranks, and its line in the effects receipt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.parallel.chunked_loss import LateLogits
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.contract import Case, full_gradients, ragged, train
from tests.families import family
from tests.worlds import run_world

EXACT = 1e-12
CASES = [
    Case(1, "ddp", "own", options={"loss_chunks": 5}),
    Case(2, "ddp", "llama", options={"loss_chunks": 3}),
    Case(2, "zero1", "gemma", options={"loss_chunks": 32}),
    Case(2, "zero2", "qwen3", options={"loss_chunks": 3, "recompute": "full"}),
    Case(2, "fsdp", "qwen3", options={"loss_chunks": 3}),
    Case(2, "fsdp", "own", options={"loss_chunks": 7, "gradient_sync": "every"}),
    Case(2, "fsdp+cp2", "llama", options={"loss_chunks": 3}),
    Case(4, "hsdp", "llama", options={"loss_chunks": 3}),
    Case(4, "fsdp", "gpt2", options={"loss_chunks": 4, "recompute": "selective"}),
]


@pytest.mark.turns(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_one_process(case: Case) -> None:
    for found in run_world(train, case.world, case):
        assert found["worst"][0] < EXACT, found["worst"]
        assert found["names"] == found["expected"]
        assert found["steps"] == 2


def frozen_head(strategy: str) -> dict[str, Any]:
    """One step with a head that is not trained, and one with nothing else trained."""
    found = {}
    for only in (False, True):
        gradients = []
        for chunks in (1, 4):
            session = start(Case(2, strategy, "own", 1, {"loss_chunks": chunks}).plan, receipts=False)
            model = family("own")
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith("head") == only)
            kept = [p for p in model.parameters() if p.requires_grad]
            model, optimizer = session.prepare(model, torch.optim.SGD(kept, lr=0.0))
            for step in session.steps(ragged(2)[:2]):
                for micro in step:
                    outputs = model(micro.inputs)
                    assert isinstance(outputs, LateLogits) == (chunks > 1)
                    step.backward(token_loss_sum(outputs, micro.labels), count=micro.num_tokens)
                gradients.append(full_gradients(session))
                step.update(optimizer)
            session.close()
        plain, chunked = gradients
        assert plain.keys() == chunked.keys()
        assert plain
        found["only" if only else "without"] = max(
            float((chunked[n] - g).abs().max() / g.abs().max().clamp_min(1e-6)) for n, g in plain.items()
        )
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_frozen_head_and_a_frozen_trunk(strategy: str) -> None:
    for found in run_world(frozen_head, 2, strategy):
        assert max(found.values()) < 1e-10, found


class Kept:
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_prepared(self, session: Any) -> None: ...
    def on_step_start(self, session: Any, step: Any) -> None: ...
    def on_step_end(self, session: Any, step: Any) -> None: ...
    def on_step_abandoned(self, session: Any, step: Any) -> None: ...

    def on_gradients(self, session: Any, step: Any) -> None:
        self.steps.append(full_gradients(session))


def narrow(strategy: str, precision: str) -> dict[str, Any]:
    """How far gradients in 16 bits are from those in fp32, without chunks and with, and the second step's receipt."""
    kept, said = [], {}
    for chunks, width in ((1, "fp32"), (1, precision), (4, precision)):
        session = start(Case(2, strategy, "llama", 2, {"loss_chunks": chunks, "precision": width}).plan)
        session.observers = [probe := EffectsRecorder(), watch := Kept()]
        model = family("llama", layers=2, dtype=torch.float32)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
        for step in session.steps(ragged(8)):
            step.run(model, token_loss_sum)
            step.update(optimizer)
        assert probe.receipt is not None
        said = {line.name: (line.ok, line.found) for line in probe.receipt.lines}
        kept.append(watch.steps[0])
        session.close()
    exact, *both = kept
    plain, chunked = (max(float((one[n] - g).norm() / g.norm()) for n, g in exact.items()) for one in both)
    return {"plain": plain, "chunked": chunked, "said": said}


@pytest.mark.turns(2)
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "bf16"), ("fsdp", "bf16"), ("ddp", "fp16")])
def test_16_bits_are_as_near_and_the_receipt_says_so(strategy: str, precision: str) -> None:
    for found in run_world(narrow, 2, strategy, precision):
        assert 0.0 < found["chunked"] < 1.5 * found["plain"]
        assert found["said"]["logits at once"][0] is True
        assert found["said"]["logits at once"][1].startswith("8 × 64")
        assert found["said"]["compute dtype"][0] is True
