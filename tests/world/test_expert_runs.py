"""Runs of a mixture of experts by `shardwise train`: what their files and their output say of routers and experts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardwise.plan.traffic import DISPATCHES, REPEATED_DISPATCHES
from tests.cli import configs
from tests.cli.test_train import train_here

LAYERS, MICROS = 2, 2
SMALL = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": LAYERS}
CHANGES: dict[str, dict[str, object]] = {
    "train": {"router_z_loss": 0.001, "micro_batch": 1, "global_batch": 2 * MICROS, "steps": 4, "eval_samples": 2},
    "parallel": {"recompute": "full"},
    "checkpoint": {"every": 0},
}


@pytest.mark.timeout(200)
def test_routers_are_in_the_metrics_and_exchanges_are_those_of_the_plan(tmp_path: Path) -> None:
    example = json.loads((configs.ROOT / "examples" / "mixtral-2m" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(example | SMALL))
    model = {"factory": None, "config": str(tmp_path)}
    summary: Any = train_here(tmp_path, "fsdp+ep2", 2, model=model, **CHANGES)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "grad_norm" in line]
    assert len(logged) == 4
    for line in logged:  # 0.02 of a loss that is 2 for a uniform choice of 2 experts, and 0.001 of a squared logarithm
        assert 0.02 * 2 * 0.9 + 0.001 * math.log(8) ** 2 * 0.9 < line["router_loss"] < 0.2, line
        assert 1.0 <= line["busiest_expert"] <= 4.0, line
    receipts = summary["receipts"]
    found = {line["name"]: line for line in receipts["effects"]["lines"]}
    (sent,) = (line for name, line in found.items() if name.startswith("all_to_all over ep"))
    counts = 2  # of tokens, in front of each forward
    assert int(sent["found"].split()[0]) == LAYERS * MICROS * (DISPATCHES + REPEATED_DISPATCHES + counts)
    peaks = {line["name"]: line for line in receipts["fit"]["lines"]}
    assert "MiB" in peaks["peak in backward"]["planned"], "fp32 experts are traced"
