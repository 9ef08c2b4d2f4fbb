"""Profiles counted from a configuration, against modules that are traced, against FlopCounterMode and real tensors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from shardwise.errors import ModelError
from shardwise.model.architecture import Architecture, parameter_count
from shardwise.model.catalogue import catalogue_names, find_architecture, published_parameters
from shardwise.model.convnet import RESNET_50, convnet_profile
from shardwise.model.operations import autocast_copies, mark_selective
from shardwise.model.profile import ModelProfile, Op, Unit
from shardwise.model.trace import trace_module
from shardwise.model.transformer import profile_of
from shardwise.parallel.activation_checkpointing import ATTENTION, MATMULS
from tests.native import Native, ResNet

BASE = {
    "family": "made-up",
    "layers": 3,
    "hidden": 64,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 176,
    "vocab": 100,
    "max_seq_len": 128,
}
LAYER = {"norm": "layer", "norm_bias": True}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
FORMS: dict[str, dict[str, object]] = {
    "llama": {},
    "many-heads": {"kv_heads": 8},
    "qwen3": {"qk_norm": "head"},
    "whole-qk-norm": {"qk_norm": "projection"},
    "gpt2": {
        **LAYER,
        **BIASES,
        "positions": "learned",
        "gated": False,
        "fused_qkv": True,
        "tied": True,
        "kv_heads": 8,
        "position_offset": 2,
    },
    "fused": {"fused_qkv": True},
    "gemma2": {"block_norms": 4, "head_dim": 16},
    "gpt-neox": {**LAYER, **BIASES, "parallel_block": True, "gated": False, "fused_qkv": True},
    "phi": {**LAYER, "parallel_block": True, "block_norms": 1, "gated": False, "head_bias": True},
    "fused-qk-norm": {"fused_qkv": True, "qk_norm": "head"},
    "olmo": {"norm": "layer_no_weight", "positions": "none"},
    "encoder": {**LAYER, "causal": False, "final_norm": False},
}
LENGTH, ODD = 96, 95
KEPT = ("saved", "saved_fp32", "saved_bytes", "temporary", "temporary_fp32", "launches")


def architecture(form: str) -> Architecture:
    return Architecture.model_validate(BASE | FORMS[form] | {"name": form})


def total(ops: tuple[Op, ...], name: str) -> int:
    return sum(getattr(op, name) for op in ops)


def cuts(unit: Unit) -> tuple[list[str], list[str]]:
    """How tensor parallel cuts what it can: of the norms only those over whole projections, which the trace leaves."""
    weights = [(w.shape, w.tp_dim) for w in unit.weights if len(w.shape) > 1 or "norm" not in w.name]
    return sorted(map(str, weights)), [op.tp_sharding for op in unit.ops if op.kind in ("matmul", "attention", "loss")]


@pytest.mark.parametrize("form", FORMS)
def test_a_profile_is_what_a_trace_of_the_module_gives(form):
    a = architecture(form)
    counted = profile_of(a, LENGTH)
    traced = trace_module(lambda: Native(a), seq_len=LENGTH)
    assert traced.unknown == ()
    assert [(u.kind, u.count, u.input_elements) for u in traced.units] == [
        (u.kind, u.count, u.input_elements) for u in counted.units
    ]
    for mine, theirs in zip(counted.units, traced.units, strict=True):
        assert sorted(w.shape for w in mine.weights) == sorted(w.shape for w in theirs.weights)
        assert {n: total(mine.ops, n) for n in KEPT} == {n: total(theirs.ops, n) for n in KEPT}, mine.name
        assert mine.flops == theirs.flops
        assert total(mine.ops, "moved") == pytest.approx(total(theirs.ops, "moved"), rel=0.01)
        kept = [(op.m, op.k, op.n) for op in mine.ops if op.kept_by_selective]
        assert kept == [(op.m, op.k, op.n) for op in theirs.ops if op.kept_by_selective]
        assert cuts(mine) == cuts(theirs)
    assert counted.num_parameters == traced.num_parameters == parameter_count(a)
    assert len(counted.tied) == len(traced.tied)
    assert (traced.heads, traced.kv_heads, traced.hidden_size) == (a.heads, a.kv_heads, a.hidden)


def kept_bytes(module: torch.nn.Module, precision: str) -> int:
    """Bytes of the storages that a real forward and its loss keep, without weights and autocast's copies of weights.

    The length is no other dim of the module, so that shapes tell the copies apart.
    """
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    weights = {shape for p in module.parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
    held: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tuple(tensor.shape) not in weights:
            held[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(1, ODD, dtype=torch.int64)
    narrow = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), narrow:
        torch.nn.functional.cross_entropy(module(ids)[0].float(), ids[0])
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize("form", ["encoder", "gpt2", "gpt-neox", "phi"])
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_saved_bytes_are_those_that_a_real_forward_keeps(form, precision):
    """Real tensors, real autograd; only forms without RMSNorm, which the CPU composes of small ops."""
    a = architecture(form)
    profile = profile_of(a, ODD)
    stream = 4 if precision == "autocast" else 2
    saved = 0
    for unit in profile.units:
        kept = sum(op.saved * (stream if op.kind == "norm" else 2) + op.saved_fp32 * 4 for op in unit.ops)
        copies = autocast_copies(unit.ops) * 2 if precision == "autocast" else 0
        saved += unit.count * (kept + copies + total(unit.ops, "saved_bytes"))
    module = Native(a)
    real = kept_bytes(module.bfloat16() if precision == "bf16" else module, precision)
    assert saved == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("form", ["llama", "gpt2"])
def test_flops_are_those_of_pytorch_s_own_counter(form):
    a = architecture(form)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        Native(a)(torch.zeros(1, LENGTH, dtype=torch.int64))
    profile = profile_of(a, LENGTH)
    attention = sum(u.count * op.flops for u in profile.units for op in u.ops if op.kind == "attention")
    assert profile.flops - attention == counter.get_total_flops()
    shape = (1, a.heads, LENGTH, a.head_dim)
    assert attention == a.layers * sdpa_flop_count(shape, shape, shape) / 2, "the half that is computed"
    encoder = profile_of(a.model_copy(update={"causal": False}), LENGTH)
    assert encoder.flops == profile.flops + attention


def test_every_name_of_the_catalogue_has_the_parameters_that_are_published():
    counted = {}
    for name in catalogue_names():
        a = find_architecture(name)
        if a is not None:
            counted[name] = profile_of(a, 128).num_parameters
            assert counted[name] == parameter_count(a), name
            assert counted[name] == (published_parameters(name) or counted[name]), name
    assert len(counted) > 105
    assert (counted["llama-3.1-8b"], counted["vit-l-16"]) == (8_030_261_248, 304_326_632)


def test_a_llama_block_keeps_what_is_worked_out_by_hand():
    a = find_architecture("llama-3.1-8b")
    block = profile_of(a, 8192).units[1]
    h, kv, ffn = 4096, 1024, 14336
    # the stream twice, both norms' outputs, queries, keys, values and attention's output; gate, up, their product
    # and the activation
    assert total(block.ops, "saved") == 8192 * (2 * h + 2 * h + 2 * h + 2 * kv + 4 * ffn)
    assert total(block.ops, "saved_fp32") == 8192 * (2 + 32)
    compiled = profile_of(a, 8192, compiled=True).units[1]
    assert total(block.ops, "saved") - total(compiled.ops, "saved") == 8192 * ffn
    assert total(compiled.ops, "temporary_fp32") == 0 < total(block.ops, "temporary_fp32")
    assert [w.tp_dim for w in block.weights if "o_proj" in w.name or "down" in w.name] == [1, 1]
    assert {op.tp_sharding for op in block.ops} == {"sequence", "column", "heads", "row"}


def test_the_loss_says_what_its_peak_is_made_of():
    loss = profile_of(architecture("llama"), LENGTH).units[-1].ops[-1]
    logits = LENGTH * 100
    assert (loss.kind, loss.saved, loss.saved_fp32) == ("loss", 0, logits)
    assert (loss.temporary, loss.temporary_fp32) == (logits, logits)


def test_selective_keeps_what_our_recompute_keeps():
    """The rule of parallel.recompute: attention, and matmuls by their number in the block."""
    ops = [Op(name, "matmul") for name in "qkv"] + [Op("a", "attention"), Op("n", "norm"), Op("o", "matmul")]
    assert [op.name for op in mark_selective(ops) if op.kept_by_selective] == ["q", "v", "a"]
    assert torch.ops.aten.convolution.default not in MATMULS | ATTENTION
    llama = profile_of(architecture("llama"), LENGTH).units[1].ops
    assert [op.name for op in llama if op.kept_by_selective] == ["q", "v", "attention", "gate", "down"]


def test_lengths():
    learned, rope = architecture("gpt2"), architecture("llama")
    with pytest.raises(ModelError, match=r"129 is longer than the 128 positions that 'gpt2' has learned; use 128"):
        profile_of(learned, 129)
    assert "more than the 128" in profile_of(rope, 129).unknown[0]
    with pytest.raises(ModelError, match="set --seq-len"):
        profile_of(rope, None)
    assert "sliding window of 16" in profile_of(rope.model_copy(update={"sliding_window": 16}), 64).unknown[0]
    image = find_architecture("vit-l-16")
    assert profile_of(image, 4096).units[1].input_elements == 197 * 1024


def test_resnet_is_what_its_trace_gives():
    counted, traced = convnet_profile(RESNET_50), trace_module(ResNet)
    assert counted.num_parameters == traced.num_parameters == 25_557_032
    assert [(u.kind, u.count) for u in counted.units] == [(u.kind, u.count) for u in traced.units]
    assert counted.flops == traced.flops == pytest.approx(2 * 4.09e9, rel=0.01)
    assert full(counted, "saved") - 3 * 224**2 == full(traced, "saved"), "the images themselves are no activations"
    assert full(counted, "saved_bytes") == full(traced, "saved_bytes")
    assert full(counted, "launches") == full(traced, "launches")
    assert not any(op.kept_by_selective for unit in counted.units for op in unit.ops if op.kind == "conv")


def full(profile: ModelProfile, name: str) -> int:
    return sum(unit.count * total(unit.ops, name) for unit in profile.units)


def test_counting_needs_no_torch():
    code = (
        "import sys; from shardwise.model.load_model import load_profile; "
        "load_profile('llama-3.1-405b', seq_len=8192); load_profile('resnet-50'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
    assert {f.name for f in fields(Op)} >= set(KEPT)
