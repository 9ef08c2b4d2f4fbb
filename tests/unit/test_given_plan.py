"""What a plan file is checked against when it is given to train, and what plan and train refuse before they work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.cli.plan_question import check_planned_model, planned_adapters
from shardwise.cli.train import _other_memory
from shardwise.errors import PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.train.config import read_config
from tests.commands import ROOT, shardwise

CONFIG = ROOT / "examples" / "stdlib.toml"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plan_for(folder: Path, model: str | None) -> Path:
    path = folder / "plan.toml"
    path.write_text("" if model is None else f'[question]\nmodel = "{model}"\nseq_len = 256\n')
    return path


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    path = plan_for(tmp_path, "gpt2")
    with pytest.raises(PlanError, match=r"made for the model 'gpt2' of 124.4 M parameters, and the config's 'examples"):
        check_planned_model(path, read_config(CONFIG))
    text = Plan(strategy="ddp", dims=ParallelDims(dp_replicate=2), device="cpu").to_toml()
    path.write_text(text + path.read_text())
    done = shardwise("train", str(CONFIG), "--plan", str(path), "--dry-run", exit_code=2)
    assert "made for the model 'gpt2'" in done.stderr


@pytest.mark.parametrize(
    "model", [None, "examples/stdlib.toml", "examples/llama-2m", "examples/llama-2m/config.json", "gone.toml", "gone:m"]
)
def test_another_name_of_the_model_and_one_that_is_not_here_are_taken(model: str | None, tmp_path: Path) -> None:
    check_planned_model(plan_for(tmp_path, model), read_config(CONFIG))


def test_a_config_changed_on_the_command_line_is_compared_by_its_shapes(tmp_path: Path) -> None:
    config = read_config(CONFIG, ["model.config=none", "model.factory=tests.models:byte_decoder"])
    with pytest.raises(PlanError, match="made for the model"):
        check_planned_model(plan_for(tmp_path, "examples/stdlib.toml"), config)
    check_planned_model(plan_for(tmp_path, "tests.models:byte_decoder"), config)


def test_adapters_of_the_plan_alone_are_said(tmp_path: Path) -> None:
    lora, full = Plan(strategy="ddp+lora"), Plan(strategy="ddp")
    config = read_config(CONFIG, planned="ddp+lora")
    assert "only the plan" in planned_adapters(tmp_path / "p.toml", lora, CONFIG, config)
    assert planned_adapters(tmp_path / "p.toml", full, CONFIG, read_config(CONFIG)) == ""
    asked = tmp_path / "lora.toml"
    asked.write_text(CONFIG.read_text().replace('strategy = "auto"', 'strategy = "ddp+lora"'))
    assert planned_adapters(tmp_path / "p.toml", lora, asked, read_config(asked)) == ""


def test_memory_that_is_not_the_plans_is_explained() -> None:
    cluster = parse_cluster("2xcpu")

    def said(reason: str) -> str:
        plan = Plan(strategy="ddp", dims=ParallelDims(dp_replicate=2), device="cpu", reason=reason)
        facts: Any = {"job": SimpleNamespace(plan=plan), "cluster": cluster}
        return _other_memory(
            SimpleNamespace(choice=SimpleNamespace(estimate=SimpleNamespace(device_bytes=2**20)), **facts)
        )

    assert said("asked for by name") == said("the simplest that fits: 1.00 MiB of 10 GiB usable") == ""
    assert said("the simplest that fits: 2.00 MiB of 10 GiB usable").startswith(
        "memory: 1.00 MiB, counted on the module"
    )


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_an_option_of_one_value_that_is_given_twice_is_refused(verb: str) -> None:
    done = shardwise(verb, str(CONFIG), "--strategy", "ddp", "--strategy=fsdp", exit_code=2)
    assert "--strategy is given 2 times, and takes one value" in done.stderr


def test_a_flag_given_twice_says_nothing_else() -> None:
    assert shardwise("plan", "--schema", "--schema").stdout


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_config_that_is_not_there_is_refused_before_torch_is_imported(verb: str) -> None:
    code = (
        f"import sys; sys.argv = ['shardwise', '{verb}', 'gone.toml']\n"
        "from shardwise.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"] and "config 'gone.toml' does not exist" in done.stderr
