"""Peaks on real ranks: alike in each run, though gloo's threads free tensors where nobody sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import estimate_memory
from shardwise.model.read import read_model
from shardwise.parallel.apply import parameter_names
from shardwise.parallel.decide import decide, parts_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.fit import FitRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.optimizer import workload_of
from tests.families import VOCAB, family
from tests.models import decoder, ragged_batches
from tests.worlds import run_world

NOTHING: dict[str, Any] = {"activations": None, "logits": None, "buffers": 0}


class Told(FitRecorder):
    """Bytes at rest are another test's."""

    def _exact_lines(self, found: Any, *, lenient: bool, engine: bool) -> Any:
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
            assert abs(peak - mine[0]["allocated"][phase]) <= 4096  # what gloo frees unseen may count too long


def test_sharding_is_seen() -> None:
    found = {strategy: run_world(peaks_of, 2, strategy, 1, 1)[0][0] for strategy in ("ddp", "zero1", "fsdp")}
    held = sum(p.nbytes for p in decoder().float().parameters())
    assert found["fsdp"]["start"] < found["zero1"]["start"] < found["ddp"]["start"]
    assert 4 * held <= found["ddp"]["start"] < 4 * held + 4096  # parameters, two states, and buckets that stay
    assert found["fsdp"]["gathered"] > 0 and found["ddp"]["gathered"] == 0
    assert found["fsdp"]["allocated"]["optimizer"] < found["ddp"]["allocated"]["optimizer"]


def lines_of(strategy: str, model: str, options: dict[str, Any]) -> dict[str, tuple[str, str, bool | None]]:
    """The fit receipt of a plan that cuts the model, against closed formulas; and its peaks."""
    dims = dims_for(parse_strategy(strategy), dist.get_world_size())
    plan = Plan(strategy=strategy, dims=dims, grad_accum=2, **options)
    session = start(plan, receipts=False, device="cpu")
    module = family(model).float()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    spec, workload = read_model(module), workload_of(optimizer, parameter_names(module))
    parts = parts_of(decide(module, spec, plan), spec, plan)
    probe = FitRecorder(estimate_memory(spec, plan, workload, parts))
    session.observers.append(probe)
    module, optimizer = session.prepare(module, optimizer)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(VOCAB, (2, 17), generator=generator) for _ in range(3 * 2 * dims.dp)]
    for step in session.steps([(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in batches]):
        step.run(module, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
    session.close()
    assert probe.receipt is not None and probe.peaks is not None
    return {line.name: (line.planned, line.found, line.ok) for line in probe.receipt.lines}


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("world", "strategy", "model", "options"),
    [
        (2, "ddp+tp2", "llama", {}),
        (2, "fsdp+cp2", "llama", {}),
        (2, "ddp+pp2", "gemma", {}),
        (4, "fsdp+pp2", "gpt2", {}),
        (4, "ddp+tp2+pp2", "qwen3", {"loss_parallel": True}),
    ],
)
def test_cut_models_hold_what_was_predicted(world: int, strategy: str, model: str, options: dict[str, Any]) -> None:
    for lines in run_world(lines_of, world, strategy, model, options):
        for name in ("parameters", "gradients", "optimizer"):
            planned, found, ok = lines[name]
            assert ok is True and planned == found, (name, lines[name])
        pipelined = "+pp" in strategy
        assert ("peak in forward and backward" in lines) == pipelined
        assert ("peak in forward" in lines) == (not pipelined)
        saved = next(found for name, (_, found, _) in lines.items() if name.startswith("activations"))
        assert ("come and go in turn" in saved) == pipelined
        peak = lines["peak in forward and backward" if pipelined else "peak in backward"][1]
        assert "not measured" not in peak
