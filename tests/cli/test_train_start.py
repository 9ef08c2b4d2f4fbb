"""Between the command and the first step: how many ranks, what is said meanwhile, and what ends it."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from shardwise.run.job import Job
from shardwise.train.config import read_config
from tests.cli import configs
from tests.commands import shardwise

A100 = ("NVIDIA A100-SXM4-80GB", 80 * 1024**3)


@pytest.mark.parametrize("name", ["stdlib", "lora", "qlora"])
def test_an_example_names_no_number_of_ranks(name: str) -> None:
    assert read_config(configs.ROOT / "examples" / f"{name}.toml").parallel.nproc is None


@pytest.mark.parametrize(("gpus", "ranks"), [(0, min(2, os.cpu_count() or 1)), (1, 1), (4, 4)])
def test_one_rank_for_each_gpu_and_two_on_a_cpu(
    gpus: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["train", "examples/stdlib.toml", "data.path=python:json", f"train.output={tmp_path / 'run'}"]
    with (
        mock.patch("shardwise.hardware.cluster._nvml_devices", lambda: [A100] * gpus),
        mock.patch("shardwise.cli.train.launch") as launch,
    ):
        shardwise(*words)
    job = launch.call_args.args[0]
    assert isinstance(job, Job)
    assert job.plan.device == ("cuda" if gpus else "cpu")
    assert job.plan.dims.world_size == ranks
