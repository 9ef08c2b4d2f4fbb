"""Peaks on real ranks: alike in each run, though gloo's threads free tensors where nobody sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.cli.own_loop import start
from shardwise.cost.estimate import Estimate
from shardwise.train.loss import token_loss_sum
from shardwise.verify.fit import FitProbe
from tests.models import decoder, ragged_batches
from tests.worlds import run_world

NOTHING: dict[str, Any] = {"activations": None, "logits": None, "buffers": 0}


class Told(FitProbe):
    """Bytes at rest are another test's."""

    def _exact_lines(self, found: Any, *, told: bool) -> Any:
        return iter(())


def peaks_of(strategy: str, accum: int, runs: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(runs):
        session = start(strategy, grad_accum=accum, receipts=False)
        probe = Told(Estimate(parameters=0, gradients=0, optimizer=0, **NOTHING))
        session.observers.append(probe)
        model = decoder().float()
        model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in session.steps(ragged_batches(3 * accum * session.ranks.world_size)):
            for micro in step:
                step.backward(token_loss_sum(model(micro.inputs), micro.labels), count=micro.num_tokens)
            step.update(optimizer, clip_norm=1.0)
        session.close()
        assert probe.peaks is not None
        found.append(probe.peaks.model_dump())
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_peaks_repeat_and_all_ranks_are_told_the_fullest(strategy: str) -> None:
    mine, theirs = run_world(peaks_of, 2, strategy, 2, 3)
    assert mine == theirs
    for peaks in mine:
        assert peaks["start"] == mine[0]["start"]
        for phase, peak in peaks["allocated"].items():
            assert abs(peak - mine[0]["allocated"][phase]) <= 1024  # a small message may end on either side of a border


def test_sharding_is_seen() -> None:
    found = {strategy: run_world(peaks_of, 2, strategy, 1, 1)[0][0] for strategy in ("ddp", "zero1", "fsdp")}
    held = sum(p.nbytes for p in decoder().float().parameters())
    assert found["fsdp"]["start"] < found["zero1"]["start"] < found["ddp"]["start"]
    assert 4 * held <= found["ddp"]["start"] < 4 * held + 4096  # parameters, two states, and buckets that stay
    assert found["fsdp"]["gathered"] > 0 and found["ddp"]["gathered"] == 0
    assert found["fsdp"]["allocated"]["optimizer"] < found["ddp"]["allocated"]["optimizer"]
