"""``shardwise export`` and ``import``: what they write where, how they end, and the sessions of their page."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.cli.main import main
from shardwise.errors import PlanError
from shardwise.plan.plan import Plan, read_plan
from shardwise.train.config import read_config
from tests.cli import configs
from tests.cli.test_readme import fits, masked

FILES = configs.ROOT / "tests" / "deepspeed_configs"
PAGE = (configs.ROOT / "docs" / "deepspeed-configs.md").read_text()
SESSIONS = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", PAGE)
PLAN = Plan.model_validate(
    {
        "strategy": "deepspeed-zero3+offload",
        "dims": {"dp_shard": 4},
        "micro_batch": 2,
        "grad_accum": 3,
        "seq_len": 128,
        "precision": "bf16",
        "recompute": "full",
        "device": "cuda",
    }
)


def shardwise(*words: str, code: int = 0) -> None:
    """Run the command in this process; it must end with ``code``."""
    ended = 0
    with mock.patch.object(sys, "argv", ["shardwise", *words]):
        try:
            main()
        except SystemExit as end:
            ended = int(end.code or 0)
    assert ended == code


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.to_toml())
    return path


class TestExport:
    def test_stdout_is_the_configuration_and_nothing_else(self, plan_file: Path, capsys: Any) -> None:
        shardwise("export", str(plan_file), "--to", "deepspeed", "--lossy")
        said = capsys.readouterr()
        config = json.loads(said.out)
        assert config["zero_optimization"]["stage"] == 3
        assert config["train_batch_size"] == 24
        assert config["gradient_clipping"] == 1.0
        assert "lost: recompute full" in said.err

    def test_into_a_file_and_back(self, plan_file: Path, tmp_path: Path, capsys: Any) -> None:
        there, back = tmp_path / "ds.json", tmp_path / "back.toml"
        shardwise("export", str(plan_file), "--to", "deepspeed", "--clip-norm", "0", "--lossy", "-o", str(there))
        assert json.loads(there.read_text())["gradient_clipping"] == 0
        shardwise("import", str(there), "-o", str(back))
        assert read_plan(back).fingerprint == PLAN.fingerprint
        said = capsys.readouterr()
        assert 'clip_norm = "none"' in said.out
        assert "train_batch_size 24 ÷ (2 × 3) = 4 ranks" in said.out
        assert not said.err

    def test_json(self, plan_file: Path, tmp_path: Path, capsys: Any) -> None:
        shardwise("export", str(plan_file), "--to", "deepspeed", "--json", "--lossy", "-o", str(tmp_path / "ds.json"))
        said = capsys.readouterr()
        answer = json.loads(said.out)
        assert answer["config"] == json.loads((tmp_path / "ds.json").read_text())
        assert (answer["fingerprint"], answer["ranks"]) == (PLAN.fingerprint, 4)
        assert "deepspeed: " in said.err

    def test_what_is_lost_needs_consent(self, plan_file: Path, tmp_path: Path, capsys: Any) -> None:
        there = tmp_path / "ds.json"
        shardwise("export", str(plan_file), "--to", "deepspeed", "-o", str(there), code=1)
        assert not there.exists()
        assert "accept with --lossy" in capsys.readouterr().err

    def test_a_target_that_needs_a_config(self, plan_file: Path, capsys: Any) -> None:
        shardwise("export", str(plan_file), "--to", "trainer", "train.steps=3", code=2)
        assert "override 'train.steps=3' is of a config" in capsys.readouterr().err
        shardwise("export", str(plan_file), "--to", "pytorch", code=2)
        assert "add --config CONFIG.toml" in capsys.readouterr().err

    def test_the_target_and_the_plan_are_wrong(self, tmp_path: Path, capsys: Any) -> None:
        shardwise("export", str(tmp_path / "nowhere.toml"), "--to", "depspeed", code=2)
        said = capsys.readouterr().err
        assert "did you mean 'deepspeed'?" in said
        assert "nowhere.toml" in said

    def test_an_output_that_cannot_be(self, plan_file: Path, tmp_path: Path, capsys: Any) -> None:
        shardwise("export", str(plan_file), "--to", "deepspeed", "--lossy", "-o", str(tmp_path), code=2)
        assert "cannot be written" in capsys.readouterr().err


class TestImport:
    def test_json(self, capsys: Any) -> None:
        shardwise("import", str(FILES / "zero2-bf16.json"), "--nproc", "4", "--json")
        said = capsys.readouterr()
        answer = json.loads(said.out)
        plan = Plan.model_validate(answer["plan"])
        assert plan.fingerprint == answer["fingerprint"]
        assert plan.strategy == "deepspeed-zero2"
        assert answer["config"]["optimizer.lr"] == 3e-4
        assert {"key", "value", "why"} == set(answer["not_taken"][0])
        assert "taken over" in said.err

    def test_a_cluster_says_ranks_and_device(self, capsys: Any) -> None:
        shardwise("import", str(FILES / "zero3-bf16.json"), "--cluster", "8xA100-80GB", "--json")
        plan = json.loads(capsys.readouterr().out)["plan"]
        assert (plan["dims"]["dp_shard"], plan["device"]) == (8, "cuda")

    @pytest.mark.parametrize("name", ["zero1-fp16", "zero2-bf16", "zero2-offload", "zero3-offload"])
    def test_the_printed_keys_are_a_config_file(self, name: str, tmp_path: Path, capsys: Any) -> None:
        ranks = {"zero2-bf16": "4", "zero3-offload": "1"}.get(name, "2")
        shardwise("import", str(FILES / f"{name}.json"), "--nproc", ranks, "--engine", "torch")
        printed = capsys.readouterr().out.partition("for the config file\n")[2].partition("\nplan:")[0]
        keys = tomllib.loads(printed)
        train = {"global_batch": None, "steps": 4} | keys.get("train", {})
        path = configs.write_config(tmp_path, optimizer={"lr": None, "warmup_steps": None}, train=train)
        text = path.read_text().replace("[optimizer]\n", "")
        path.write_text(text + "\n" + printed.partition("[train]")[0])
        config = read_config(path)
        assert config.optimizer.model_dump(include=set(keys["optimizer"])) == {
            key: None if value == "none" else value for key, value in keys["optimizer"].items()
        }

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nowhere.json"], "give the path of a DeepSpeed configuration"),
            (["--tool", "axolotll"], "did you mean 'axolotl'?"),
            (["--nproc", "4", "--cluster", "2xcpu"], "leave one out"),
            (["--engine", "torhc"], "did you mean 'torch'?"),
            (["--recompute", "ful"], "did you mean 'full'?"),
            (["--cluster", "8xZ100"], "is not in the hardware table"),
            (["--nproc", "3"], "train_batch_size 128 is not"),
        ],
    )
    def test_wrong_words(self, words: list[str], message: str, capsys: Any) -> None:
        file = [] if words[0].endswith(".json") else [str(FILES / "zero2-bf16.json")]
        shardwise("import", *file, *words, code=2)
        said = capsys.readouterr()
        assert message in said.err
        assert not said.out

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[1]", "is a list; a DeepSpeed configuration is a table"),
            ("{// a comment\n}", "is not JSON"),
            ('{"train_batch_size": 8, "train_batch_size": 4}', "says 'train_batch_size' twice"),
        ],
    )
    def test_files_that_are_none(self, text: str, message: str, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "ds.json").write_text(text)
        shardwise("import", str(tmp_path / "ds.json"), "--nproc", "2", code=2)
        assert message in capsys.readouterr().err


def test_the_imported_plan_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    config = configs.write_config(
        tmp_path, train={"global_batch": None, "steps": 3}, checkpoint={"every": None}, parallel={"threads": 1}
    )
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps({"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}})
    )
    shardwise("import", str(file), "--nproc", "2", "-o", str(tmp_path / "plan.toml"))
    configs.train(config, "--plan", str(tmp_path / "plan.toml"))
    assert len(configs.losses(tmp_path)) == 3
    receipt = (tmp_path / "run").rglob("*.json")
    assert any(read_plan(tmp_path / "plan.toml").strategy in path.read_text() for path in receipt)


def test_a_config_for_another_drive_is_refused(tmp_path: Path) -> None:
    from shardwise.hardware.cluster import detect
    from shardwise.run.checks import check_plan

    shardwise("import", str(FILES / "zero3-nvme.json"), "--cluster", "2xcpu", "-o", str(tmp_path / "plan.toml"))
    plan, cluster = read_plan(tmp_path / "plan.toml"), detect("cpu", 2)
    for folder, says in (("/local_nvme", None), ("/elsewhere", "parallel.nvme_path is /elsewhere, but the plan has")):
        parallel = {"strategy": "deepspeed-zero3+nvme", "precision": "bf16", "nvme_path": folder}
        config = read_config(configs.write_config(tmp_path, train={"global_batch": None}, parallel=parallel))
        if says is None:
            check_plan(config, cluster, plan)
        else:
            with pytest.raises(PlanError, match=says):
                check_plan(config, cluster, plan)


def test_the_sessions_of_the_page(tmp_path: Path) -> None:
    assert {command.split()[1] for command, _ in SESSIONS} == {"import", "export"}
    for command, expected in SESSIONS:
        words = shlex.split(command.replace("runs/deepspeed", str(tmp_path)))
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=configs.ROOT,
            env=configs.environment(),
            text=True,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == (2 if "problems" in expected else 0)
        found = (done.stdout + done.stderr).replace(str(tmp_path), "runs/deepspeed")
        wrong = fits(masked(found), masked(expected))
        assert not wrong, f"{command}: {wrong}\n{found}"


def test_the_page_names_what_is_refused() -> None:
    from shardwise.interop.deepspeed.keys import TABLES

    refused = {name for name, key in TABLES[""].items() if key.fate == "not run"}
    assert not {name for name in refused if f"`{name}`" not in PAGE}
