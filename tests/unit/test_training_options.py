"""Options of a training run: what a config may ask for, and what goes together."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from shardwise.cost.memory.estimate_memory import estimate, peak_lower_bound
from shardwise.errors import ConfigError, ModelError, PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.receipts.lines.training_lines import TrainingLines
from shardwise.search.candidate import Pins
from shardwise.search.enumerate import layouts
from shardwise.train.config import OptimizerTable, read_config
from shardwise.train.noise import EmbeddingNoise, embedding_name
from shardwise.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from tests.cli.configs import write_config


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_part_to_decay_in_is_of_wsd(schedule: Any) -> None:
    with pytest.raises(ValidationError, match=f"'decay_fraction' has no effect with schedule '{schedule}'"):
        OptimizerTable(schedule=schedule, decay_fraction=0.2)
    assert OptimizerTable(schedule="wsd", decay_fraction=1.0).decay_fraction == 1.0
    for wrong in (0.0, 1.5):
        with pytest.raises(ValidationError):
            OptimizerTable(schedule="wsd", decay_fraction=wrong)


def test_the_rate_of_a_step_is_read_off_the_optimizer() -> None:
    table = OptimizerTable(schedule="wsd", lr=0.5, warmup_steps=4)
    config: Any = SimpleNamespace(optimizer=table)
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 5.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    session: Any = SimpleNamespace(optimizer=optimizer)
    step: Any = SimpleNamespace(number=2)
    parts: Any = SimpleNamespace(rate=learning_rate(table, 20), noise=None, average=None)
    for rate, ok in ((0.25, True), (0.5, False)):
        set_learning_rate(optimizer, rate, 0.5)
        (line,) = TrainingLines(config, parts).lines(session, step)
        assert (line.planned, line.found, line.ok) == ("0.25 at step 2", f"{rate:g} at step 2", ok)


class Two(torch.nn.Module):
    """Tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(5, 4), torch.nn.Embedding(3, 4)


class Named(Two):
    def get_input_embeddings(self) -> torch.nn.Module:
        return self.tokens


def test_the_embedding_of_the_tokens_is_found_or_asked_for() -> None:
    assert embedding_name(Named()) == "tokens"
    assert embedding_name(torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))) == "0"
    with pytest.raises(ModelError, match=r"Two has 2 nn.Embedding \(tokens, positions\); define get_input_embeddings"):
        embedding_name(Two())
    with pytest.raises(ModelError, match=r"has no nn.Embedding"):
        embedding_name(torch.nn.Linear(2, 2))


def test_noise_is_uniform_and_only_in_training() -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(7, 64)
    EmbeddingNoise(4.0, embedding)
    ids = torch.randint(7, (9, 16))
    clean = embedding.weight[ids]
    added = embedding(ids) - clean
    most = 4.0 / math.sqrt(16 * 64)
    assert 0.99 * most < added.abs().max() <= most * 1.00001
    assert added.mean().abs() < 0.02 * most
    assert float(added.detach().square().mean()) == pytest.approx(most**2 / 3, rel=0.02)
    assert torch.equal(embedding.eval()(ids), clean)


def problems_of(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        read_config(write_config(tmp_path), overrides)
    return str(raised.value)


def test_what_a_strategy_cannot_do_is_said_together(tmp_path: Path) -> None:
    said = problems_of(tmp_path, "parallel.strategy=ddp+tp2", "train.neftune_alpha=5", "optimizer.name=adafactor")
    assert "'train.neftune_alpha' is not for ddp+tp2: tensor parallel shards the embedding" in said
    assert "optimizer.name 'adafactor' is not for +tp" in said
    said = problems_of(tmp_path, "parallel.strategy=deepspeed-zero2", "train.ema_decay=0.9", "train.ema_decay=1.0")
    assert "train.ema_decay: got 1.0; it must be less than 1" in said
    said = problems_of(tmp_path, "parallel.strategy=deepspeed-zero2", "train.ema_decay=0.9")
    assert "'train.ema_decay' is not for deepspeed-zero2: DeepSpeed keeps the weights in flattened parts" in said


def test_muon_says_where_it_runs(tmp_path: Path) -> None:
    said = problems_of(tmp_path, "parallel.strategy=fsdp+tp2", "optimizer.name=muon")
    assert "optimizer.name 'muon' is not for zero2, fsdp and hsdp: it orthogonalises whole matrices" in said
    assert "use adamw, or ddp or zero1" in said and "optimizer.name 'muon' is not for +tp" in said
    config = read_config(write_config(tmp_path), ["parallel.strategy=zero1", "optimizer.name=muon"])
    assert (config.optimizer.momentum, config.optimizer.weight_decay) == (0.95, 0.1)
    with pytest.raises(ConfigError, match="the module that has the parameters, and it is not known here"):
        build_optimizer([torch.nn.Parameter(torch.ones(2, 2))], config.optimizer)
    with pytest.raises(ConfigError, match="no trained matrix in a repeated block"):
        build_optimizer((model := torch.nn.Linear(3, 3)).parameters(), config.optimizer, model)


def test_the_planner_proposes_muon_where_weights_are_whole() -> None:
    profile = load_profile("gpt2", seq_len=128)
    cluster = parse_cluster("4xA100-80GB")
    asked = Workload(optimizer="muon", seq_len=128, global_batch=8)
    found, refused = layouts(profile, asked, cluster, Pins())
    assert {layout.strategy.base for layout in found} == {"ddp", "zero1"}
    assert not any(layout.strategy.tp > 1 for layout in found)
    said = {one.strategy: one.reason for one in refused}
    why = "muon is not for zero2, fsdp and hsdp: it orthogonalises whole matrices, and a rank holds a part"
    assert said["fsdp"] == f"{why}; use adamw, or ddp or zero1"
    with pytest.raises(PlanError, match=f"strategy 'fsdp': {why}; use adamw, or ddp or zero1"):
        layouts(profile, asked, cluster, Pins(strategy=parse_strategy("fsdp")))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp+pp2", "fsdp+offload"])
def test_the_planner_counts_an_average_as_the_trained_weights_of_a_rank(strategy: str) -> None:
    profile, cluster = load_profile("gpt2", seq_len=128), parse_cluster("4xA100-80GB")
    plan = Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), 4), micro_batch=1, device="cuda")
    asked = Workload(seq_len=128, global_batch=8)
    averaged = asked.model_copy(update={"average": True})
    plain, kept = (estimate(profile, plan, one, cluster) for one in (asked, averaged))
    more = 0 if strategy == "fsdp+offload" else plain.gradients
    assert kept.allocated is not None and plain.allocated is not None
    assert kept.allocated - plain.allocated == more
    assert peak_lower_bound(profile, plan, averaged) - peak_lower_bound(profile, plan, asked) == more
    assert (kept.parameters, kept.optimizer) == (plain.parameters, plain.optimizer)
