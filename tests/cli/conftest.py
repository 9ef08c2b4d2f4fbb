"""A base for the examples that train adapters: a few steps of the run that `make train` makes, once for all tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.run.job import prepare_job
from shardwise.run.rank_main import run_job
from shardwise.run.run_summary import keep_job
from shardwise.train.config import read_config
from tests.cli import configs
from tests.worlds import run_world


def _rank(text: str) -> None:
    from shardwise.run.job import Job

    run_job(Job.model_validate_json(text))


def train_example(name: str, overrides: Sequence[str]) -> None:
    """What ``shardwise train examples/NAME`` does, on the test world's two ranks: seconds cheaper."""
    config = read_config(configs.ROOT / "examples" / name, overrides)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"config": str(configs.ROOT / "examples" / "llama-2m")})}
    )
    job = prepare_job(config, lambda text: None).job
    keep_job(job)
    run_world(_rank, 2, job.to_json())


@pytest.fixture(scope="session")
def small_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a base that was trained for a few steps."""
    folder = tmp_path_factory.mktemp("base")
    short = ["train.steps=120", "data.seq_len=128", "data.path=python:email", "checkpoint.every=0"]
    train_example(
        "stdlib.toml",
        [*short, "train.eval_samples=8", "optimizer.warmup_steps=5", "parallel.strategy=ddp", f"train.output={folder}"],
    )
    return folder
