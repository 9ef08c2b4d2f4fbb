"""Families of transformers under each axis: the gradient of one process, or refused before the first step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.turns import by_turns
from tests.world.zoo.families import FAMILIES, family
from tests.world.zoo.families_table import AXES, GOOD, batches, quiet, table
from tests.worlds import run_world

CHUNKS = 10
OF_THE_WHOLE = re.compile("(the model|this one) has none|no block of the model|the model does not number tokens")
"""What is in the way, where that is no layer."""
CAST_THEMSELVES = ("gpt_neo", "gptj", "codegen", "deepseek_v3", "mamba2")


def check(found: dict[str, dict[str, Any]]) -> None:
    """Each cell is right, or refused by the name of a layer; fsdp takes every family."""
    assert not {
        f"{name} {axis}": cell for name, row in found.items() for axis, cell in row.items() if cell.verdict not in GOOD
    }
    for name, row in found.items():
        layers = [layer for layer, _ in family(name).named_modules() if "." in layer]
        for axis, cell in row.items():
            assert axis != "fsdp" or cell.verdict == "right"
            if cell.verdict == "refused":
                assert any(layer in cell.sentence for layer in layers) or OF_THE_WHOLE.search(cell.sentence), cell


@pytest.mark.turns(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_family_is_right_or_refused(chunk: int) -> None:
    """fsdp and another axis of half of the families, by turns; `make soak` has all four of all."""
    check(table(list(FAMILIES)[chunk::CHUNKS], by_turns(tuple(AXES), 3, f"chunk {chunk}")))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_family_under_every_axis(chunk: int) -> None:
    found = table(list(FAMILIES)[chunk::CHUNKS])
    check(found)
    assert all(set(row) == set(AXES) for row in found.values())


def test_there_are_enough() -> None:
    assert len(FAMILIES) >= 40


def in_bf16(strategy: str, names: tuple[str, ...]) -> dict[str, Any]:
    quiet()
    found = {}
    for name in names:
        session, probe = start(strategy, precision="bf16", receipts=False), EffectsRecorder(strict=False)
        session.observers.append(probe)
        model, given = family(name, dtype=torch.float32), batches(4)
        model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.0))
        for step in session.steps(given):
            step.run(model, token_loss_sum)
            step.update(optimizer)
        assert probe.receipt is not None
        found[name] = [line for line in probe.receipt.lines if line.ok is False]
        session.close()
    return found


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_what_a_model_casts_itself_is_no_alarm(strategy: str) -> None:
    for found in run_world(in_bf16, 2, strategy, CAST_THEMSELVES):
        assert not {name: lines for name, lines in found.items() if lines}
