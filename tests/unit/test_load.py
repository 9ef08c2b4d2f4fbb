"""What a user may call a model: names, configurations, functions; and what is said where it is none."""

from __future__ import annotations

import json

import pytest

from shardwise.errors import ModelError
from shardwise.model.load_model import load_profile

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# families that only transformers knows
UNKNOWN = {
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64, "rotary_dim": 4},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "vocab_size": 100},
    "t5": {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 100},
    "m2m_100": {
        "d_model": 32,
        "vocab_size": 100,
        "encoder_layerdrop": 0.1,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
    },
    "convnext": {"hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 2, 2], "image_size": 64},
}
SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.head = nn.Linear(width, 10)

    def forward(self, ids):
        return self.head(self.embed(ids))

def build(width=4):
    return Model(width)

number = 3
"""


def config(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(keys))
    return file


def kept_bytes(profile):
    return sum(2 * op.saved + 4 * op.saved_fp32 for op in profile.units[1].ops)


def test_names():
    assert load_profile("llama-3.1-8b", seq_len=4096).num_parameters == 8_030_261_248
    assert load_profile("resnet50").num_parameters == 25_557_032
    small, large = load_profile("vit-l-16"), load_profile("vit-l-16", image=384)
    assert large.units[1].input_elements == (24**2 + 1) * 1024 > small.units[1].input_elements
    compiled = load_profile("llama-3.1-8b", seq_len=64, compiled=True)
    assert compiled != load_profile("llama-3.1-8b", seq_len=64)


def test_a_config_and_its_folder(tmp_path):
    file = config(tmp_path, **LLAMA)
    profile = load_profile(str(file), seq_len=64)
    assert profile == load_profile(str(tmp_path), seq_len=64)
    assert (profile.origin, profile.num_blocks, profile.vocab_size) == ("config", 3, 300)
    traced = load_profile(str(file), seq_len=64, traced=True)
    assert (traced.num_parameters, traced.flops) == (profile.num_parameters, profile.flops)
    assert kept_bytes(traced) > 1.1 * kept_bytes(profile), "its norms keep fp32 copies"


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_family_that_only_transformers_knows_is_traced(kind, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSeq2SeqLM

    file = config(tmp_path, model_type=kind, **UNKNOWN[kind])
    profile = load_profile(str(file), seq_len=16)
    autos = {"t5": AutoModelForSeq2SeqLM, "m2m_100": AutoModelForSeq2SeqLM, "convnext": AutoModelForImageClassification}
    module = autos.get(kind, AutoModelForCausalLM).from_config(AutoConfig.from_pretrained(file))
    assert profile.num_parameters == sum(p.numel() for p in module.parameters())
    assert (profile.origin, profile.seq_len) == ("config", None if kind == "convnext" else 16)
    assert profile.num_blocks >= 2
    assert any("all layers are counted" in note for note in profile.unknown) == (kind == "m2m_100")


def test_a_function_of_a_file_and_of_a_module(tmp_path, monkeypatch):
    file = tmp_path / "made_up_models.py"
    file.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["."])
    of_file = load_profile(f"{file}:build", seq_len=8)
    of_module = load_profile("made_up_models:build", seq_len=8)
    assert of_file.num_parameters == of_module.num_parameters == 10 * 4 + 4 * 10 + 10
    for model, says in (
        (f"{file}:biuld", r"has no 'biuld' \(did you mean 'build'\?\)"),
        (f"{file}:number", "is 3; name a function"),
        (f"{file}:Model", r"needs width; name a function without required arguments"),
        ("elsewhere.py:build", "there is no file 'elsewhere.py'"),
        ("no_such_package.models:build", "no module named 'no_such_package'"),
        ("not a name:build", r"neither package\.module:factory nor file\.py:factory"),
    ):
        with pytest.raises(ModelError, match=says):
            load_profile(model, seq_len=8)
    file.write_text("raise ValueError('no')")
    with pytest.raises(ModelError, match=r"raised ValueError: no \(.+, line 1\); repair the file"):
        load_profile(f"{file}:build", seq_len=8)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([], r"holds \[\], not an object"),
        ({"model_type": "lama"}, r"model_type 'lama' \(did you mean '\w*llama'\?\)"),
        ({"model_type": "new", "auto_map": {"AutoModel": "x.Y"}}, "names code of its own"),
        ({"model_type": "mixtral", "num_local_experts": 1}, "num_experts_per_tok is 2, more than its 1 experts"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 0},
            "decoder_sparse_step is 0, it must be a positive integer",
        ),
        ({"model_type": "xglm", "max_position_embeddings": 8} | UNKNOWN["xglm"], "more than the 8"),
        ({"model_type": "biogpt", "max_position_embeddings": 8, "hidden_size": 32, "num_attention_heads": 4}, "longer"),
        ({"model_type": "codegen"} | UNKNOWN["codegen"] | {"n_layer": "x"}, "cannot be used|cannot build"),
    ],
)
def test_configs_that_cannot_be(keys, says, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(keys))
    if says.startswith("more than"):  # rotations and sines have no table to run out of
        assert says in load_profile(str(file), seq_len=16).unknown[-1]
        return
    with pytest.raises(ModelError, match=says):
        load_profile(str(file), seq_len=16)


@pytest.mark.parametrize(
    ("model", "length", "says"),
    [
        ("lama-3.1-8b", 64, r"did you mean 'llama-3.1-8b'\?"),
        ("nowhere/config.json", 64, "there is no file"),
        ("gpt2", 1025, "1025 is longer than the 1024 positions"),
        ("llama-3.1-8b", None, "set --seq-len"),
        ("llama-3.1-8b", 0, "must be 1 or more"),
        ("mixtral-8x7b", None, "set --seq-len"),
    ],
)
def test_names_that_cannot_be(model, length, says):
    with pytest.raises(ModelError, match=says):
        load_profile(model, seq_len=length)


def test_json_that_is_broken(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_profile(str(tmp_path), seq_len=8)
