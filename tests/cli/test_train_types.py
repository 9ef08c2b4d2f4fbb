"""`shardwise train` with weights and gradients in bf16: from the config to the receipts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.receipts.lines.rounding_lines import TOO_SMALL
from shardwise.run.checks import check_plan
from shardwise.train.config import read_config
from tests.cli import configs
from tests.cli.test_train import train_here

LOW: dict[str, object] = {"precision": "bf16", "weights": "compute"}
CASES: list[tuple[str, dict[str, object], dict[str, str]]] = [
    (
        "fsdp",
        LOW | {"rounding": "kahan"},
        {"parameter": "bfloat16", "gradient": "bfloat16", "optimizer state": "bfloat16"},
    ),
    (
        "zero1",
        LOW | {"weights": "masters", "accumulate": "compute", "reduce": "compute"},
        {"parameter": "bfloat16", "gradient": "bfloat16", "reduction": "bfloat16", "optimizer state": "float32"},
    ),
    ("ddp", {"precision": "bf16", "reduce": "compute"}, {"parameter": "float32", "reduction": "bfloat16"}),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("strategy", "parallel", "types"), CASES, ids=[case[0] for case in CASES])
def test_types_of_a_config_are_planned_run_and_judged(
    tmp_path: Path, strategy: str, parallel: dict[str, object], types: dict[str, str]
) -> None:
    without_luck = {"model": {"kwargs": {"dropout": 0.0}}, "train": {"steps": 4}, "checkpoint": {"every": 0}}
    summary: Any = train_here(tmp_path, strategy, 2, parallel=parallel, **without_luck)
    receipts = summary["receipts"]
    assert receipts["effects"]["ok"] and receipts["fit"]["ok"], receipts
    lines = {line["name"]: line["found"] for line in receipts["effects"]["lines"]}
    for kind, dtype in types.items():
        assert lines[f"{kind} dtype"].split()[0] == dtype, (kind, lines[f"{kind} dtype"])
    lost = lines.get(TOO_SMALL)
    assert (lost is not None) == (parallel.get("weights") == "compute")
    exact = {line["name"]: line["ok"] for line in receipts["fit"]["lines"]}
    assert exact["parameters"] and exact["gradients"] and exact["optimizer"]


def test_a_plans_types_are_compared_with_the_config(tmp_path: Path) -> None:
    file = configs.write_config(tmp_path, data={"seq_len": 32})
    plan = Plan(strategy="fsdp", dims=ParallelDims(dp_shard=2), precision="bf16", weights="compute")
    check_plan(read_config(file), parse_cluster("2xcpu"), plan)
    words = ["optimizer.name=adafactor", "train.ema_decay=0.9", "parallel.precision=bf16"]
    config = read_config(file, [*words, "parallel.strategy=fsdp", "parallel.reduce=compute"])
    with pytest.raises(PlanError) as raised:
        check_plan(config, parse_cluster("2xcpu"), plan)
    told = "\n".join(raised.value.problems)
    assert "parallel.reduce is compute, but the plan has fp32" in told
    assert "'train.ema_decay' is not for weights = 'compute'" in told
    assert "optimizer.name 'adafactor' does not step" in told


def test_all_that_does_not_go_together_is_told(tmp_path: Path) -> None:
    file = configs.write_config(tmp_path)

    def told(*words: str) -> str:
        with pytest.raises(ConfigError) as raised:
            read_config(file, [*words, "parallel.weights=compute"])
        return "\n".join(raised.value.problems)

    both = told("parallel.strategy=auto", "parallel.precision=auto")
    assert "'weights' needs a named strategy: set parallel.strategy to one of ddp, zero1" in both
    assert "'weights' needs a named precision: set parallel.precision to bf16" in both
    assert "'weights' needs a named precision: set parallel.precision to bf16" in told("parallel.strategy=fsdp")
    fsdp = ("parallel.strategy=fsdp", "parallel.precision=bf16")
    assert "runs under ddp, zero1, zero2, fsdp, hsdp" in told(
        "parallel.strategy=fsdp+offload", "parallel.precision=bf16"
    )
    assert "precision is fp16; set precision to bf16" in told("parallel.strategy=fsdp", "parallel.precision=fp16")
    both = told(*fsdp, "optimizer.name=adafactor", "train.ema_decay=0.9", "parallel.rounding=kahan")
    assert "'train.ema_decay' is not for weights = 'compute'" in both
    assert "optimizer.name 'adafactor' does not step weights = 'compute'" in both and "use adamw" in both
    assert "accumulate = 'compute' is of weights = 'masters'" in told(*fsdp, "parallel.accumulate=compute")
