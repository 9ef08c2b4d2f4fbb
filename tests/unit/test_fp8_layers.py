"""Which layers of a model are converted to fp8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from shardwise.errors import ModelError, PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.model.read import read_model
from shardwise.parallel.fp8 import check_fp8, decided
from shardwise.plan.plan import Plan
from shardwise.plan.program import ProgramTraits
from shardwise.plan.workload import Workload
from shardwise.search.search import search


class Block(nn.Module):
    """Its layer ``up`` is in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rest = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32))
        self.rest.append(self.up)


def test_a_layer_in_two_places_is_tied_and_stays_as_it_is() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])})
    found = decided(model, read_model(model))
    assert found.layers == ["blocks.0.rest.0", "blocks.1.rest.0"]
    assert found.kept == {"blocks.0.up": "tied to another", "blocks.1.up": "tied to another"}


SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4}
FAMILIES = {"llama": {}, "mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2}}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planner_runs_fp8_for_the_models_that_train_converts(family: str, tmp_path: Path) -> None:
    config = transformers.CONFIG_MAPPING[family](**SMALL, **FAMILIES[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    plan = Plan(strategy="fsdp", precision="bf16", fp8="rowwise", fp8_emulate=True)
    try:
        taken = check_fp8(model, read_model(model), plan, torch.device("cpu")) is not None
    except PlanError as error:  # the last check: all of them were passed
        taken = "needs torchao" in str(error)
    except ModelError as error:
        assert "the model has experts" in str(error)
        taken = False
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    work = Workload(global_batch=8, seq_len=32, program=ProgramTraits(fp8="rowwise"))
    found = search(load_profile(str(tmp_path), seq_len=32), work, parse_cluster("8xH100-SXM"))
    plain = [one for one in found.candidates if one.plan.strategy in ("ddp", "zero1", "zero2", "fsdp", "hsdp")]
    assert taken == (family == "llama") and len(plain) >= 4
    assert {one.why_not_runnable for one in plain} == {"" if taken else "fp8 = 'rowwise' with experts"}
