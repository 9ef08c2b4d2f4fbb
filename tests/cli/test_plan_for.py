"""``shardwise plan --for TOOL``: a plan that the tool runs, what its costs leave out, and its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shardwise.cli.plan_for import PLANNED_FOR, cost_differences
from shardwise.plan.plan import Plan, read_plan
from tests.commands import shardwise

WORDS = ("plan", "llama-3.2-1b", "--cluster", "4xA100-80GB", "--seq-len", "1024", "--global-batch", "8")


def test_the_configuration_is_that_of_the_plan(tmp_path: Path) -> None:
    done = shardwise(*WORDS, "--strategy", "fsdp", "--for", "accelerate", "-o", str(tmp_path / "plan.toml"))
    assert "gradients are reduced in bf16: half of the bytes" in done.stdout
    assert "an embedding that is not tied is a unit of its own" in done.stdout
    begin = done.stdout.index("compute_environment:")
    config = yaml.safe_load(done.stdout[begin : done.stdout.index("plan: ", begin)])
    plan = read_plan(tmp_path / "plan.toml")
    assert config["num_processes"] == plan.dims.world_size == 4
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] is (plan.parsed.base == "fsdp")


def test_the_costs_are_those_of_the_program_that_is_named() -> None:
    words = (*WORDS, "--strategy", "deepspeed-zero2", "--for", "deepspeed")
    assert "--program deepspeed has that tool's" in shardwise(*words).stdout
    assert "costs are those of --program deepspeed" in shardwise(*words, "--program", "deepspeed").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--for", "acelerate"], "did you mean 'accelerate'?"),
        (["--for", "trainer"], "give a config of train as MODEL"),
        (["--for", "fabric", "--json"], "--json has no place for it"),
        (["--for", "accelerate", "--strategy", "zero1"], "no plan in the answer is one that it runs"),
    ],
)
def test_what_cannot_be_answered(words: list[str], message: str) -> None:
    assert message in shardwise(*WORDS, *words, exit_code=2).stderr


def test_costs_that_differ_are_of_the_plan() -> None:
    plan = Plan.model_validate({"strategy": "zero2", "dims": {"dp_shard": 2}, "micro_batch": 1})
    assert not cost_differences("accelerate", plan)
    assert cost_differences("accelerate", plan.model_copy(update={"precision": "bf16"}))
    assert "deepspeed" in PLANNED_FOR
    assert "pytorch" not in PLANNED_FOR
