"""Options that are asked for: ``plan CONFIG -o FILE`` writes them, ``train --plan FILE`` runs them or says why not."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.plan.dims import ParallelDims
from shardwise.plan.parallel_options import CONFIG_KEYS, OPTION_SPECS
from shardwise.plan.plan import Plan, read_plan
from shardwise.run.checks import check_plan
from shardwise.train.config import read_config
from tests.cli.configs import write_config
from tests.cli.test_plan_command import command
from tests.unit.test_parallel_options import BESIDE, strategies
from tests.unit.test_plan import OTHERS

NOT_ON_A_CPU = {"async_tp", "nvme_path"}  # the one needs GPUs, the other DeepSpeed
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp+tp2": {
        "model": {"factory": None, "config": "examples/llama-2m"},
        "parallel": {
            "sequence_parallel": False,
            "loss_parallel": False,
            "tp_styles": {
                "model.layers.*.mlp.gate_proj": "colwise",
                "model.layers.*.mlp.up_proj": "colwise",
                "model.layers.*.mlp.down_proj": "rowwise",
            },
        },
    },
    "ddp+pp2": {
        "model": {"factory": None, "config": "examples/llama-2m"},
        "parallel": {"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2},
    },
    "ddp": {"parallel": {"find_unused_parameters": True, "bucket_cap_mb": 5, "compile": True}},
    "zero1": {"parallel": {"static_graph": True}, "train": {"grad_accum": 1}},
    "fsdp": {
        "parallel": {"prefetch": 3, "recompute": "full", "recompute_layers": 1, "offload_activations": True},
        "train": {"loss_chunks": 4},
        "optimizer": {"in_backward": True, "clip_norm": "none", "name": "sgd"},
    },
    "hsdp": {"parallel": {"dp_replicate": 2, "dp_shard": 1}},
    "fsdp+lora": {
        "model": {"factory": None, "config": "examples/llama-2m"},
        "lora": {"rank": 4, "alpha": 8.0, "targets": ["attention"], "dropout": 0.1, "rslora": True},
    },
}


def test_each_option_has_a_case() -> None:
    named = {f"{table}.{key}" for case in CASES.values() for table, keys in case.items() for key in keys}
    assert set(CONFIG_KEYS.values()) - named == {CONFIG_KEYS[name] for name in NOT_ON_A_CPU}
    assert set(OPTION_SPECS) - set(CONFIG_KEYS) == {"gradient_sync"}


@pytest.mark.parametrize("strategy", list(CASES))
def test_a_config_s_options_are_in_its_plan_and_run(
    strategy: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tables = {table: dict(keys) for table, keys in CASES[strategy].items()}
    tables["parallel"] = {**tables.get("parallel", {}), "strategy": strategy}
    file, plan_file = str(write_config(tmp_path, **tables)), tmp_path / "plan.toml"
    command(capsys, "plan", file, "-o", str(plan_file))
    plan, config = read_plan(plan_file), read_config(Path(file))
    for option, key in CONFIG_KEYS.items():
        table, _, name = key.partition(".")
        if name in tables.get(table, {}):
            assert getattr(plan, option) == attrgetter(key)(config), key
    facts = (plan.strategy, plan.recompute, plan.dims.dp_replicate if strategy == "hsdp" else None)
    assert facts == (strategy, config.parallel.recompute, config.parallel.dp_replicate)
    assert plan.adapter is None if "lora" not in strategy else plan.adapter == config.lora.options
    same, _ = command(capsys, "train", file, "--plan", str(plan_file), "--dry-run", "--json")
    options = {"loss_chunks", "in_backward"}
    bare = str(
        write_config(
            tmp_path,
            **{
                table: {key: value for key, value in keys.items() if key not in options}
                for table, keys in tables.items()
                if table not in ("parallel", "lora")
            },
        )
    )
    without, _ = command(capsys, "train", bare, "--plan", str(plan_file), "--dry-run", "--json")
    for out in (same, without):
        found = Plan.model_validate(json.loads(out.splitlines()[-1])["plan"])
        assert found.model_copy(update={"stage_blocks": plan.stage_blocks}) == plan


@pytest.mark.parametrize("option", list(CONFIG_KEYS))
def test_a_config_that_says_otherwise_is_refused(option: str, tmp_path: Path) -> None:
    """Also where the plan leaves the option out: what the config names is never dropped."""
    strategy, _ = strategies(option)
    key, other = CONFIG_KEYS[option], OTHERS[option]
    table, _, name = key.partition(".")
    file = write_config(
        tmp_path,
        optimizer={"clip_norm": "none"},
        **({} if table == "optimizer" else {table: {name: other, **BESIDE.get(option, {})}}),
    )
    config = read_config(file, ["optimizer.in_backward=true"] if table == "optimizer" else [], planned=strategy)
    plan = Plan(strategy=strategy, dims=ParallelDims(dp_replicate=2), **BESIDE.get(option, {}))
    with pytest.raises(PlanError) as refused:
        check_plan(config, parse_cluster("2xcpu"), plan)
    assert any(f"{key} is {other}, but the plan " in line for line in refused.value.problems)
    same = plan.model_copy(update={option: other})
    check_plan(config, parse_cluster("2xcpu"), same)


def test_a_plan_without_a_batch_takes_the_config_s(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, train={"global_batch": None, "micro_batch": 2, "grad_accum": 3}))
    check_plan(config, parse_cluster("2xcpu"), Plan(dims=ParallelDims(dp_replicate=2)))


def test_an_alias_is_the_same_strategy(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, parallel={"strategy": "zero3"}))
    check_plan(config, parse_cluster("2xcpu"), Plan(strategy="fsdp", dims=ParallelDims(dp_shard=2)))


def test_compile_is_in_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    words = ["plan", "gpt2", "--cluster", "4xA100-80GB", "--seq-len", "1k", "--global-batch", "16", "-o", str(file)]
    command(capsys, *words, "--compile")
    assert read_plan(file).compile
    command(capsys, *words)
    assert not read_plan(file).compile


def test_the_optimizer_that_a_plan_is_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, file = str(write_config(tmp_path)), tmp_path / "plan.toml"
    command(capsys, "plan", config, "--optimizer", "adamw8bit", "-o", str(file))
    _, err = command(capsys, "train", config, "--plan", str(file), "--dry-run", exit_code=2)
    assert "is for optimizer adamw8bit, and optimizer.name is adamw; set optimizer.name=adamw8bit" in err
    command(capsys, "train", config, "--plan", str(file), "--dry-run", "optimizer.name=adamw8bit")
