"""Where nothing fits, ``train`` names the keys and values that would; devices are faked, and nothing is started."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.run.job import as_config_keys
from shardwise.search.candidate import Candidate
from shardwise.search.memory_savers import lean_workloads
from shardwise.train.config import read_config
from tests.cli import configs

Train = Callable[..., str]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """``train --dry-run`` on two GPUs with 1300 MiB each; what it says."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        "shardwise.hardware.cluster._nvml_devices", lambda: [("NVIDIA A100-SXM4-80GB", 1300 * 2**20)] * 2
    )

    def said(*words: str, exit_code: int = 0, **model: int) -> str:
        facts = json.loads((configs.ROOT / "examples/llama-2m/config.json").read_text())
        facts |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, **model}
        (tmp_path / "config.json").write_text(json.dumps(facts))
        tables = {"model": {"factory": None, "config": str(tmp_path)}, "data": {"seq_len": 512}}
        config = configs.write_config(tmp_path, **tables, train={"global_batch": 2}, parallel={"nproc": None})
        return "".join(configs.train(config, "--dry-run", *words, exit_code=exit_code))

    return said


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("model", "way", "key"),
    [
        (
            {"vocab_size": 128256, "hidden_size": 16, "intermediate_size": 32},
            "the loss in 8 chunks fits: ddp",
            "train.loss_chunks=8",
        ),
        (
            {"hidden_size": 2048, "intermediate_size": 4096},
            "another optimizer, adafactor, fits: ddp+pp2",
            "optimizer.name=adafactor",
        ),
    ],
)
def test_the_key_that_makes_it_fit(train: Train, model: dict[str, int], way: str, key: str) -> None:
    found = train(exit_code=1, **model)
    assert "no plan fits 2 × NVIDIA A100-SXM4-80GB" in found
    assert re.search(rf"{re.escape(way)}.*: set {re.escape(key)}$", found, flags=re.MULTILINE), found
    assert "dry run: nothing was started" in train(key, **model)


def test_no_adam_is_proposed_in_place_of_sgd() -> None:
    """``train`` knows SGD by its states alone."""
    assert [name for name, _ in lean_workloads(Workload())] and not [*lean_workloads(Workload(optimizer_states=1))]


def test_the_optimizer_in_the_backward_takes_three_keys(tmp_path: Path) -> None:
    plan = Plan(strategy="fsdp", dims=ParallelDims(dp_shard=2))
    options = {"--optimizer": "adamw8bit", "--optimizer-in-backward": None}
    told = as_config_keys(options, Candidate.model_construct(plan=plan))
    assert told.startswith("set optimizer.name=adamw8bit optimizer.in_backward=true ")
    config = read_config(configs.write_config(tmp_path), told.removeprefix("set ").split())
    assert config.optimizer.in_backward and config.parallel.strategy == "fsdp"
