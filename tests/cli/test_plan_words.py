"""What a new user types after ``shardwise plan``: each word is taken and said, or gets the one message that helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.plan.plan import read_plan
from shardwise.plan.strategy import complete_strategy, parse_strategy
from tests.cli.configs import write_config
from tests.cli.test_plan_command import answer, command

SMALL = ["gpt2", "--cluster", "4xA100-80GB", "--seq-len", "1k", "--global-batch", "16"]


@pytest.mark.parametrize(
    ("text", "full", "told"),
    [
        ("lora", "fsdp+lora", True),
        ("tp2", "ddp+tp2", True),
        ("tp2+qlora", "fsdp+tp2+qlora", True),
        ("auto+lora", "fsdp+lora", True),
        ("auto+cp2", "ddp+cp2", True),
        ("nvme", "deepspeed-zero3+nvme", True),
        ("zero3", "fsdp", True),
        ("zero3+tp2", "fsdp+tp2", True),
        ("auto", "auto", False),
        ("fsdp+lora", "fsdp+lora", False),
        ("fsdb+lora", "fsdb+lora", False),
        ("tpp2", "tpp2", False),
    ],
)
def test_a_strategy_that_is_left_out(text: str, full: str, told: bool) -> None:
    found, says = complete_strategy(text)
    assert found == full and bool(says) is told and (not told or full.partition("+")[0] in says)
    if told:
        parse_strategy(found)


def test_what_was_meant_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    document = answer(capsys, *SMALL, "--strategy", "lora")
    assert document["candidates"][0]["strategy"] == "fsdp+lora" and document["workload"]["seq_len"] == 1024
    assert "strategy 'lora' is taken as fsdp+lora" in document["notes"]
    assert "--precision was not given: bf16 (A100-SXM-80GB has it)" in document["notes"]


def test_beside_what_fp8_is_only_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3.1-8b", "--cluster", "8xH100-SXM", "--seq-len", "8192", "--global-batch", "16", "--fp8", "rowwise"]
    for more, beside in (
        (["--strategy", "fsdp+tp2"], "under fsdp+tp2"),
        (["--strategy", "fsdp", "--offload-activations"], "with offload_activations"),
    ):
        entry = answer(capsys, *words, *more)["candidates"][0]
        assert entry["why_not_runnable"] == f"fp8 = 'rowwise' {beside}"
    _, err = command(capsys, "plan", *words[:-1], "foo", exit_code=2)
    assert "--fp8 'foo' must be one of none, tensorwise, rowwise\n" in err
    mixture = [
        "mixtral-8x7b",
        "--cluster",
        "2x8xH200",
        "--seq-len",
        "4096",
        "--global-batch",
        "64",
        "--strategy",
        "fsdp",
    ]
    document = answer(capsys, *mixture, "--fp8", "rowwise")
    assert document["candidates"][0]["why_not_runnable"] == "fp8 = 'rowwise' with experts"
    notes = document["notes"]
    assert any("mixtral-8x7b has experts" in note and "train does not run fp8 with them" in note for note in notes)
    assert not any("experts" in note for note in answer(capsys, *words, "--strategy", "fsdp")["notes"])


def test_only_what_runs_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpt2", "--cluster", "4xH100-SXM", "--seq-len", "1024", "--global-batch", "16"]
    document = answer(capsys, *words, "--precision", "fp8")
    best = document["candidates"][document["recommended"]]
    assert (best["runnable"], best["why_not_runnable"]) == (False, "precision fp8")
    out, _ = command(capsys, "plan", *words, "--precision", "fp8")
    assert "this version plans precision fp8 but does not run it; plan with --precision bf16" in out
    assert "of what it runs," not in out and "▶◇" in out
    document = answer(capsys, "llama-3.1-8b", "--cluster", "2x8xH100-SXM", "--seq-len", "8192", "--global-batch", "64")
    runs = {entry["strategy"]: entry["runnable"] for entry in document["candidates"]}
    assert document["candidates"][0]["runnable"] and runs["fsdp"]
    assert all(ok != ("zero1+tp" in name or "zero1+pp" in name) for name, ok in runs.items())


@pytest.mark.parametrize(
    ("model", "cluster", "beside"),
    [
        ("llama-3.1-8b", "2xRTX4090", ["adapters (LoRA) only", "adapters on 4-bit weights (QLoRA) only"]),
        ("llama-3.1-70b", "2x8xH100-SXM", ["another optimizer, adamw8bit", "adapters (LoRA) only"]),
    ],
)
def test_cheaper_trainings_are_named_beside(
    model: str, cluster: str, beside: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights with the state in host memory are recommended; what else people train is a line, with its command."""
    words = (model, "--cluster", cluster, "--seq-len", "4096", "--global-batch", "64")
    out, _ = command(capsys, "plan", *words)
    lines = [line for line in out.splitlines() if line.startswith("cheaper: ")]
    assert "Use fsdp+offload" in out and all(any(word in line for line in lines) for word in beside)
    assert all(": shardwise plan " in line for line in lines)
    document = answer(capsys, *words)
    assert [f"cheaper: {line}" for line in document["other_trainings"]] == lines
    best = document["candidates"][document["recommended"]]
    fastest = {line.split(": ")[1].split(",")[0]: line for line in document["other_trainings"]}
    for strategy, line in fastest.items():
        optimizer = "adamw8bit" if "adamw8bit" in line else "adamw"
        other = answer(capsys, *words, "--strategy", strategy, "--optimizer", optimizer)["candidates"][0]
        assert other["fits"] and other["runnable"] and other["step_time_s"] < best["step_time_s"]
    assert not answer(capsys, *words, "--strategy", "fsdp+offload")["other_trainings"], "a pinned plan was asked for"


def test_a_plan_that_fits_as_it_is_has_no_cheaper_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert not answer(capsys, "llama-3.1-8b", "--cluster", "8xA100-80GB")["other_trainings"]


@pytest.mark.parametrize(("kind", "row"), [("gpus", "A100-SXM-80GB"), ("models", "llama-3.1-70b")])
def test_lists(kind: str, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = command(capsys, "plan", "--list", kind)
    assert any(line.startswith(row) for line in out.splitlines())


def test_prices_each_with_its_assumption(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["gpt2", "--seq-len", "1024", "--global-batch", "16", "--tokens", "1B"]
    document = answer(capsys, *words, "--cluster", "4xRTX4090")
    demand, spot, own = document["offers"]
    best = document["candidates"][document["recommended"]]
    assert demand["dollars"] == best["cost"] == pytest.approx(best["hours"] * 4 * 0.6)
    assert spot["dollars"] == pytest.approx(best["hours"] * 4 * 0.34) and "never interrupted" in spot["assumption"]
    assert 0 < own["dollars"] < demand["dollars"]
    assert "$1,599 a GPU (launch price) over 3 years, 100% of the time in use" in own["assumption"]
    out, _ = command(capsys, "plan", *words, "--cluster", "4xA100-40GB")
    assert "on demand   unknown  no source gives a price of A100-SXM-40GB; give one with --price" in out
    prices = tmp_path / "prices.toml"
    prices.write_text("A100-40GB = 1.5\nused_share = 0.5\nyears = 4\n[spot]\nA100-40GB = 1\n[buy]\nA100-40GB = 9000\n")
    document = answer(capsys, *words, "--cluster", "4xA100-40GB", "--price", str(prices))
    assert [offer["per_device_hour"] for offer in document["offers"][:2]] == [1.5, 1]
    assert "$9,000 a GPU (as given) over 4 years, 50% of the time" in document["offers"][2]["assumption"]
    prices.write_text("used_share = 2\nyears = 0\nspot = 3\n")
    _, err = command(capsys, "plan", *words, "--price", str(prices), exit_code=2)
    assert "spot is 3; it must be a table [spot]" in err


def test_ways_to_run_a_plan_that_save_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    words = ["plan", "llama-3.1-8b", "--cluster", "2xRTX4090", "--seq-len", "4k", "--global-batch", "16"]
    out, _ = command(capsys, *words, "-o", str(file))
    assert "in bf16 with selective recompute, the loss in 8 chunks: " in out
    assert "with: the loss in 8 chunks (fsdp+offload" in out
    assert read_plan(file).loss_chunks == 8
    out, _ = command(capsys, "explain", str(file))
    assert "with the loss in 8 chunks" in out


class TestConfig:
    """A config file of ``train`` is a model and a question."""

    def config(self, folder: Path, **tables: Any) -> str:
        return str(write_config(folder, **tables))

    def test_its_keys_are_the_options(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = self.config(
            tmp_path,
            train={"global_batch": None, "micro_batch": 2, "grad_accum": 3},
            parallel={"strategy": "fsdp", "precision": "fp32"},
        )
        plan = tmp_path / "plan.toml"
        document = answer(capsys, file, "--cluster", "4xA100-80GB", "-o", str(plan))
        (entry,) = document["candidates"]
        facts = ("strategy", "micro_batch", "grad_accum", "global_batch", "precision", "recompute")
        assert [entry[key] for key in facts] == ["fsdp", 2, 3, 24, "fp32", "none"]
        assert document["workload"]["tokens"] == document["workload"]["seq_len"] * 24 * 12
        assert read_plan(plan).global_batch == 24
        out, _ = command(capsys, "explain", str(plan))
        assert "asked for by name" in out

    def test_options_come_first(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = self.config(tmp_path, parallel={"strategy": "fsdp"})
        document = answer(capsys, file, "--cluster", "2xA100-80GB", "--strategy", "ddp", "--seq-len", "32")
        assert document["candidates"][0]["strategy"] == "ddp" and document["workload"]["seq_len"] == 32

    def test_its_mistakes(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = self.config(tmp_path, train={"stepz": 3})
        _, err = command(capsys, "plan", file, "--cluster", "8xZ100", exit_code=2)
        assert "train.stepz: no such key" in err


def test_a_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(write_config(tmp_path, parallel={"strategy": "fsdp"}))
    out, err = command(capsys, "train", file, "--dry-run", "--json")
    document = json.loads(out.splitlines()[-1])
    assert document["plan"]["strategy"] == "fsdp" and document["plan"]["precision"] == "fp32"
    assert document["memory"]["parameters"] > 0 and document["step_time"] is None
    for words in ("plan: fsdp on", "fp32 (the default on a CPU)", "batch: global batch", "predicted memory of a rank"):
        assert words in err, err
    assert "time of a step: unknown" in err and "dry run: nothing was started" in err
    assert not list(tmp_path.rglob("metrics.jsonl"))
