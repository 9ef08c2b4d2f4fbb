"""``shardwise train`` and ``bench step --fp8`` with products in fp8, emulated: from the config to what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.bench.step.fp8_probe import NOT_HERE, Fp8Samples, Fp8Task, time_fp8
from shardwise.distributed.process_group import join
from shardwise.run.job import prepare_job
from shardwise.train.config import read_config
from tests.cli import configs
from tests.cli.test_train import train_here
from tests.commands import shardwise
from tests.fp8 import use_torchao
from tests.worlds import run_world

use_torchao()

MODEL: dict[str, Any] = {"factory": "tests.world.test_fp8:Decoder", "kwargs": {"vocab": 257}}
EMULATED: dict[str, Any] = {"precision": "bf16", "fp8": "tensorwise", "fp8_emulate": True}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_a_run_is_planned_trained_and_judged(tmp_path: Path, strategy: str) -> None:
    changes: Any = {"model": MODEL, "train": {"steps": 4, "ema_decay": 0.5}, "checkpoint": {"every": 2}}
    summary: Any = train_here(tmp_path, strategy, 2, parallel=EMULATED, **changes)
    effects, fit = summary["receipts"]["effects"], summary["receipts"]["fit"]
    assert effects["ok"] and fit["ok"], summary["receipts"]
    found = {
        line["name"]: (line["found"].removesuffix(" (rank 0 and 1 more)"), line["ok"]) for line in effects["lines"]
    }
    kept = "4 of a size that is no multiple of 16, 1 outside of the blocks"
    assert found["fp8 layers"] == (f"4 tensorwise, emulated; not {kept}", True)
    assert found["layers that multiply in fp8"] == ("4", True)
    assert ("scales of weights gathered in fp8" in found) == (strategy == "fsdp")
    assert found["fp8 against bf16"] == ("not measured in this run", None)


def test_a_config_is_planned_with_its_recipe_and_not_proven(tmp_path: Path) -> None:
    parallel: Any = EMULATED | {"strategy": "fsdp", "reduce": "compute"}
    words = ["plan", str(configs.write_config(tmp_path, model=MODEL, parallel=parallel)), "--cluster", "2xH100-SXM"]
    (only,) = json.loads(shardwise(*words, "--json").stdout)["candidates"]
    assert (only["fp8"], only["reduce"], only["runnable"]) == ("tensorwise", "compute", True)
    assert "in bf16 and fp8 products (tensorwise)" in shardwise(*words).stdout
    done = shardwise(*words, "--prove", exit_code=2)
    assert "fp8 = 'tensorwise' is emulated with fp32 copies that no GPU makes; leave fp8 out" in done.stderr


def probed(task: str) -> Any:
    return time_fp8(Fp8Task.model_validate_json(task), join("cpu"))


def test_the_probe_times_both_on_ranks_that_have_fp8_and_says_so_where_they_do_not(tmp_path: Path) -> None:
    changes: Any = {"model": MODEL, "train": {"steps": 3}, "parallel": EMULATED | {"strategy": "ddp", "nproc": 2}}
    file = configs.write_config(tmp_path, **changes)
    task = Fp8Task(job=prepare_job(read_config(file), lambda text: None).job)
    found = run_world(probed, 2, task.model_dump_json(by_alias=True, exclude_unset=True))
    samples = Fp8Samples(**found[0]["samples"])
    assert len(samples.fp8_s) == len(samples.bf16_s) == 3 and samples.recipe == "tensorwise"
    done = shardwise("bench", "step", str(file), "--fp8", "--output", str(tmp_path))
    assert NOT_HERE in done.stdout
    done = shardwise(
        "bench", "step", str(file), "parallel.fp8=none", "parallel.fp8_emulate=false", "--fp8", exit_code=2
    )
    assert "compares a recipe with bf16, and the config has none; set parallel.fp8" in done.stderr


def test_the_verdict() -> None:
    def said(*bf16_s: float) -> str:
        return Fp8Samples(strategy="fsdp", recipe="rowwise", fp8_s=(0.1, 0.2, 0.1), bf16_s=bf16_s).verdict

    assert said(0.12, 0.24, 0.15) == (
        "fp8 rowwise under fsdp: 100.0 ms a step, bf16 150.0 ms (medians of 3): 20% faster"
    )
    assert said(0.08, 0.16, 0.09).endswith("20% slower; leave fp8 out")
    assert said(0.101, 0.2, 0.1).endswith("as fast as bf16 here")
