"""The mask of documents packed in a sample: what the planner counts of it is what a real forward keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.cli.plan_config import profile_of_model
from shardwise.cost.memory.estimate_memory import estimate
from shardwise.hardware.cluster import detect
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.model.packed_mask import with_packed_mask
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.run.inspect_model import attention_of, look
from shardwise.run.job import draft_plan
from shardwise.train.config import read_config
from shardwise.train.tasks.registry import prepare_data

LENGTH, BATCH, LAYERS = 96, 2, 3
SIZES: dict[str, Any] = {
    "llama": {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": LAYERS, "num_attention_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
}


def build(kind: str, implementation: str) -> nn.Module:
    facts = AutoConfig.for_model(kind, vocab_size=300, use_cache=False, **SIZES[kind])
    module: nn.Module = AutoModelForCausalLM.from_config(facts, attn_implementation=implementation)
    return module.train()


def kept_bytes(module: nn.Module, *, packed: bool) -> int:
    """Bytes of the storages that a forward saves for its backward."""
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    begins = [*range(40), *range(LENGTH - 40)] if packed else range(LENGTH)
    positions = torch.tensor(list(begins)).expand(BATCH, LENGTH)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = module(input_ids=ids, position_ids=positions).logits
    del held
    return sum(found.values())


def saved(profile: ModelProfile) -> float:
    return sum(unit.count * sum(op.saved * 4 + op.saved_bytes for op in unit.ops) for unit in profile.units)


@pytest.mark.parametrize("kind", SIZES)
def test_sdpa_saves_an_additive_mask_in_each_layer(kind: str) -> None:
    module = build(kind, "sdpa")
    more = kept_bytes(module, packed=True) - kept_bytes(module, packed=False)
    plain = load_profile("llama-3.2-1b", seq_len=LENGTH)
    blocks = plain.num_blocks
    counted = saved(with_packed_mask(plain, attention_of(module))) - saved(plain)
    boolean = LENGTH**2
    assert more == BATCH * LAYERS * LENGTH**2 * 4
    assert counted == blocks * LENGTH**2 * 4 + boolean, "and the one that they are made of"


def test_what_other_attention_keeps() -> None:
    plain = load_profile("llama-3.2-1b", seq_len=LENGTH)
    assert saved(with_packed_mask(plain, "eager")) - saved(plain) == LENGTH**2 * 4
    for implementation in ("flash_attention_2", ""):
        assert with_packed_mask(plain, implementation) is plain
    assert attention_of(nn.Linear(2, 2)) == ""


@pytest.mark.parametrize(("recompute", "layers"), [("none", 16), ("full", 1)])
def test_long_samples_cost_their_square(recompute: str, layers: int) -> None:
    """Full recompute keeps the boolean one, and makes one layer's additive one at a time."""
    plain = load_profile("llama-3.2-1b", seq_len=4096)
    cluster, work = parse_cluster("1xA100-80GB"), Workload(seq_len=4096, global_batch=1)
    plan = Plan(strategy="ddp", micro_batch=1, seq_len=4096, precision="bf16", recompute=recompute, device="cuda")
    before, after = (estimate(one, plan, work, cluster) for one in (plain, with_packed_mask(plain)))
    assert after.activations - before.activations == pytest.approx(4096**2 * (2 * layers + 1), rel=0.02)


def test_train_counts_it_where_documents_are_packed_apart(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text("a few words of a document " * (number + 2))
    (tmp_path / "config.json").write_text(build("llama", "sdpa").config.to_json_string())
    (tmp_path / "train.toml").write_text(
        f'[model]\nconfig = "{tmp_path}"\n[data]\npath = "{tmp_path / "text"}"\nseq_len = {LENGTH}\n'
        f'[train]\nsteps = 2\noutput = "{tmp_path / "run"}"\n'
    )
    found = {}
    for pack in ("joined", "isolated"):
        config = read_config(tmp_path / "train.toml", [f"data.pack={pack}"])
        data = prepare_data(config, tmp_path / pack, lambda text: None)
        cluster = detect("cpu", 1)
        profile = look(config, draft_plan(config, cluster), "none", data).profile
        assert profile is not None
        found[pack] = saved(profile)
    assert found["isolated"] - found["joined"] == LENGTH**2 * (4 * LAYERS + 1)


def test_plan_counts_it_where_the_config_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(build("llama", "sdpa").config.to_json_string())
    words = f'[model]\nconfig = "{tmp_path}"\n[data]\npath = "."\nseq_len = {LENGTH}\n[train]\nsteps = 2\n'
    found = {}
    for pack in ("auto", "isolated"):
        (tmp_path / f"{pack}.toml").write_text(words.replace("[train]", f'pack = "{pack}"\n[train]'))
        found[pack] = saved(profile_of_model(str(tmp_path / f"{pack}.toml"), seq_len=LENGTH, compiled=False))
    assert found["isolated"] - found["auto"] == LENGTH**2 * (4 * LAYERS + 1)
