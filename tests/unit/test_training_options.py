"""Options of a training run: what a config may ask for, and what goes together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from shardwise.receipts.lines.training_lines import TrainingLines
from shardwise.train.config import OptimizerTable
from shardwise.train.loop import set_learning_rate
from shardwise.train.optimizer import learning_rate


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_part_to_decay_in_is_of_wsd(schedule: Any) -> None:
    with pytest.raises(ValidationError, match=f"'decay_fraction' has no effect with schedule '{schedule}'"):
        OptimizerTable(schedule=schedule, decay_fraction=0.2)
    assert OptimizerTable(schedule="wsd", decay_fraction=1.0).decay_fraction == 1.0
    for wrong in (0.0, 1.5):
        with pytest.raises(ValidationError):
            OptimizerTable(schedule="wsd", decay_fraction=wrong)


def test_the_rate_of_a_step_is_read_off_the_optimizer() -> None:
    table = OptimizerTable(schedule="wsd", lr=0.5, warmup_steps=4)
    config: Any = SimpleNamespace(optimizer=table)
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 5.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    session: Any = SimpleNamespace(optimizer=optimizer)
    step: Any = SimpleNamespace(number=2)
    parts: Any = SimpleNamespace(rate=learning_rate(table, 20))
    for rate, ok in ((0.25, True), (0.5, False)):
        set_learning_rate(optimizer, rate, 0.5)
        (line,) = TrainingLines(config, parts).lines(session, step)
        assert (line.planned, line.found, line.ok) == ("0.25 at step 2", f"{rate:g} at step 2", ok)
