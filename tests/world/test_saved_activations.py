"""What blocks save for the backward, on real ranks: recomputed for the first blocks only, or kept in host memory."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from shardwise.errors import ModelError
from shardwise.model.read import read_model
from shardwise.parallel.decide import check_model
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.units import bytes_text
from tests.contract import LENGTH, LIMIT, MICRO_BATCH, Case, Still, decided_once, ragged, train
from tests.families import family
from tests.worlds import run_each

FULL: dict[str, Any] = {"recompute": "full"}
INTERLEAVED = {"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2}
CASES = [
    Case(2, "ddp", "llama", options=FULL | {"recompute_layers": 1}),
    Case(2, "ddp", "own", options={"recompute": "selective", "recompute_layers": 2}),
    Case(2, "fsdp", "llama", options=FULL | {"recompute_layers": 3}),
    Case(2, "fsdp", "gpt2", options={"recompute": "selective", "recompute_layers": 1}),
    Case(2, "ddp+pp2", "llama", options=FULL | {"recompute_layers": 1}),
    Case(2, "fsdp+pp2", "own", accum=4, options=FULL | INTERLEAVED | {"recompute_layers": 1}),
    Case(2, "fsdp+tp2", "qwen3", options=FULL | {"recompute_layers": 2}),
    Case(2, "ddp+cp2", "llama", options=FULL | {"recompute_layers": 2}),
]
AWAY: dict[str, Any] = {"offload_activations": True}
OFFLOADED = [
    Case(2, "ddp", "llama", options=AWAY),
    Case(2, "ddp", "own", options=AWAY | FULL),
    Case(2, "fsdp", "gpt2", options=AWAY),
    Case(2, "fsdp", "llama", options=AWAY | FULL),
    Case(2, "fsdp", "qwen3", options=AWAY | FULL | {"recompute_layers": 2}),
    Case(2, "fsdp+pp2", "llama", options=AWAY),
    Case(2, "ddp+pp2", "own", accum=4, options=AWAY | FULL | INTERLEAVED),
    Case(2, "fsdp+tp2", "llama", options=AWAY),
    Case(2, "ddp+cp2", "llama", options=AWAY),
]


def test_the_gradient_is_that_of_one_process_whichever_blocks_are_recomputed() -> None:
    check_gradients(CASES)


def test_the_gradient_is_that_of_one_process_where_activations_are_offloaded() -> None:
    check_gradients(OFFLOADED)


def check_gradients(cases: list[Case]) -> None:
    found = run_each(train, 2, [(case,) for case in cases], timeout_s=300.0)
    wrong = {}
    for case, ranks in zip(cases, found, strict=True):
        far = {rank: result["worst"] for rank, result in enumerate(ranks) if not result["worst"][0] <= LIMIT}
        held = {name for result in ranks for name in result["names"]} ^ set(ranks[0]["expected"])
        wrong |= {str(case): (far, held)} if far or held else {}
    assert not wrong, wrong


def lines_of(case: Case) -> tuple[dict[str, str], list[str], list[bool]]:
    """The receipt's lines by name, those that are false, and which blocks of this rank are checkpointed."""
    session = start(case.plan, receipts=False)
    session.observers.append(probe := EffectsRecorder(strict=False))
    batches = ragged(2 * case.plan.dims.dp * case.accum)
    model = family(case.model, seed=0)
    with decided_once(case.model):
        model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0), batches[0][0])
    wrapped = [isinstance(block, CheckpointWrapper) for block in session.applied.blocks]
    for step in session.steps(batches):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
    session.close()
    assert probe.receipt is not None
    found = {line.name: line.found for line in probe.receipt.lines}
    false = [f"{line.name}: {line.planned}, {line.found}" for line in probe.receipt.lines if line.ok is False]
    return found, false, wrapped


def test_the_first_blocks_of_each_stage_are_recomputed_and_the_receipt_counts_them() -> None:
    first = {"ddp": [1, 0, 0, 0], "fsdp": [1, 1, 1, 0], "ddp+pp2": [1, 0], "fsdp+pp2": [1, 1], "fsdp+tp2": [1, 1, 0, 0]}
    cases = [case for case in CASES if case.options["recompute"] == "full"]
    found = run_each(lines_of, 2, [(case,) for case in cases], timeout_s=300.0)
    for case, ranks in zip(cases, found, strict=True):
        expected = first.get(case.strategy, [1, 1, 0, 0])
        micros = case.accum
        for lines, false, wrapped in ranks:
            assert not false, (str(case), false)
            assert wrapped == [bool(one) for one in expected], str(case)
            assert lines["blocks recomputed"] == f"{sum(expected)} of {len(expected)}", str(case)
            assert lines["block forwards per step"] == str(micros * (len(expected) + sum(expected))), str(case)


def test_more_blocks_than_there_are_is_refused() -> None:
    plan = Case(1, "ddp", "llama", options=FULL | {"recompute_layers": 5}).plan
    with pytest.raises(ModelError, match="recompute_layers 5 is more than the model's 4 blocks; give at most 4"):
        check_model(read_model(family("llama")), plan)


def test_the_receipt_has_the_bytes_that_went_to_host_memory() -> None:
    found = run_each(lines_of, 2, [(case,) for case in OFFLOADED], timeout_s=300.0)
    for case, ranks in zip(OFFLOADED, found, strict=True):
        for lines, false, _ in ranks:
            assert not false, (str(case), false)
            moved, _, back = lines["activations offloaded"].partition(", ")
            assert back == f"{moved} came back", (str(case), lines["activations offloaded"])
    for case, ranks in zip(OFFLOADED, found, strict=True):
        if case.strategy == "fsdp" and case.options.get("recompute") == "full" and len(case.options) == 2:
            inputs = 2 * 4 * MICRO_BATCH * LENGTH * 8 * family("llama").config.hidden_size  # micros, blocks, float64
            assert ranks[0][0]["activations offloaded"].startswith(bytes_text(inputs) + ",")
