"""Adapters in one process: what is refused and how, layers whose weights are read past them, packing by rows."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError, PlanError
from shardwise.parallel.lora import quantize as quantise
from shardwise.parallel.lora.adapters import adapted_layers, add_adapters
from shardwise.parallel.lora.quantize import pack, packed, packing_layers, prepare_packing
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan
from shardwise.run.checks import check_packages
from shardwise.run.inspect_model import adapted_factory
from shardwise.run.job import prepare_job
from shardwise.run.run_summary import identity
from shardwise.run.start import start
from shardwise.train.config import read_config
from shardwise.train.loss import token_loss_sum
from shardwise.train.model import forward_bytes
from tests.cli import configs
from tests.families import family


def adapted(module: nn.Module, strategy: str = "ddp+lora", precision: str = "fp32", **options: Any) -> nn.Module:
    add_adapters(module, Plan(strategy=strategy, precision=precision, adapter=AdapterOptions(**options)))  # type: ignore[arg-type]
    return module


class Experts(nn.Module):
    """As mixtures of experts have them: one parameter with the weights of all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(4, 8, 8))
        self.router = nn.Linear(8, 4)


class Encoder(nn.Module):
    """Attention whose own projections are no layers that are called."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(x)
        return found


REFUSED: list[tuple[Any, str, dict[str, Any], str]] = [
    (
        "llama",
        "ddp+lora",
        {"targets": ("q_prj",)},
        "'q_prj' is not a linear layer of the blocks (did you mean 'q_proj'?)",
    ),
    ("llama", "ddp+lora", {"targets": ("embed_tokens",)}, "'embed_tokens' is 'model.embed_tokens', a Embedding"),
    ("llama", "ddp+lora", {"targets": ("lm_head",)}, "'lm_head' is 'lm_head', a Linear outside of the blocks"),
    ("llama", "ddp+lora", {"rank": 33}, "lora.rank 33 is more than 'model.layers.0.self_attn.k_proj' can use"),
    ("gpt2", "ddp+qlora", {}, "'transformer.h.0.attn.c_attn' is a Conv1D (16 such layers); use +lora"),
    (
        "llama",
        "ddp+qlora",
        {},
        "has rows of 32 (28 such layers), which bitsandbytes unpacks wrongly on CPUs; use +lora",
    ),
    (Encoder, "ddp+lora", {"targets": ("out_proj",)}, "a NonDynamicallyQuantizableLinear"),
    (Encoder, "ddp+lora", {"targets": ("attention",), "rank": 4}, "no linear layer is known as attention by its name"),
    (lambda: nn.Linear(8, 8), "ddp+lora", {}, "the model has no torch.nn.Linear in repeated blocks"),
    (
        lambda: nn.Sequential(Experts(), Experts()),
        "ddp+lora",
        {"targets": ("gate_up",), "rank": 4},
        "'gate_up' is the parameter '0.gate_up' of shape 4 × 8 × 8, and adapters are added to linear layers",
    ),
]


@pytest.mark.parametrize(("model", "strategy", "options", "text"), REFUSED)
def test_what_cannot_have_an_adapter_is_said(model: Any, strategy: str, options: dict[str, Any], text: str) -> None:
    module = family(model, dtype=torch.float32) if isinstance(model, str) else model()
    options = {"rank": 4, **options}
    with pytest.raises(ModelError) as refused:
        adapted(module, strategy, **options)
    assert text in str(refused.value), str(refused.value)
    assert all(p.requires_grad for p in module.parameters())  # nothing was changed


def test_all_problems_at_once() -> None:
    with pytest.raises(ModelError) as refused:
        adapted(family("llama", dtype=torch.float32), targets=("q_prj", "norm", "mlp"))
    assert len(refused.value.problems) == 2


@pytest.mark.parametrize(("adapter", "package"), [("lora", "peft"), ("qlora", "bitsandbytes")])
def test_a_package_that_is_missing_is_named_before_anything_is_read(adapter: str, package: str) -> None:
    def there(name: str) -> object:
        return None if name == package else object()

    said = pytest.raises(ConfigError, match=f"pip install 'shardwise.*{package}|need.* {package}")
    with mock.patch("shardwise.run.checks.find_spec", side_effect=there), said:
        check_packages(adapter)


def test_adapters_of_another_hand_are_left_to_him() -> None:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(family("llama", dtype=torch.float32), LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ModelError, match="take \\+lora out of the strategy"):
        adapted(model)


def test_a_plan_or_a_strategy_without_adapters_ignores_no_options() -> None:
    options = AdapterOptions(rank=4)
    with pytest.raises(PlanError, match="name a strategy with \\+lora or \\+qlora"):
        start("fsdp", lora=options)
    with pytest.raises(PlanError, match="'adapter' does nothing under fsdp"):
        start(Plan(strategy="fsdp", adapter=options))
    with pytest.raises(PlanError, match="is beside a plan"):
        start(Plan(strategy="fsdp+lora", adapter=options), lora=options)


def test_runs_with_other_adapters_are_other_runs(tmp_path: Path) -> None:
    config = configs.write_config(tmp_path)
    first, second, none = (
        identity(read_config(config, words))
        for words in (
            ["parallel.strategy=fsdp+lora"],
            ["parallel.strategy=fsdp+lora", "lora.rank=8"],
            ["parallel.strategy=fsdp"],
        )
    )
    assert first != second
    assert "lora" not in none


@pytest.mark.parametrize("strategy", ["ddp+lora", "ddp+qlora"])
def test_an_encoder_in_evaluation_does_not_pass_its_adapters_by(strategy: str) -> None:
    """PyTorch's encoder reads the weights of its linear layers itself in evaluation, where it can."""
    torch.manual_seed(0)
    module = adapted(Encoder(), strategy, rank=4)
    assert set(adapted_layers(module)) == {f"encoder.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    for layer in adapted_layers(module).values():
        nn.init.normal_(layer.lora_B["default"].weight)
    if strategy == "ddp+qlora":
        pack(module)
    x = torch.randn(2, 5, 64)
    module.eval()
    with torch.no_grad():
        found = module(x)
        for layer in adapted_layers(module).values():
            layer.enable_adapters(False)
        assert (module(x) - found).abs().max() > 0.1
    padded = module.encoder(x, src_key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    assert torch.isfinite(padded).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adapters_have_the_dtype_of_the_base_and_at_least_fp32(dtype: torch.dtype) -> None:
    module = adapted(family("llama", dtype=dtype), rank=4)
    kinds = {p.dtype for p in module.parameters() if p.requires_grad}
    assert kinds == {torch.float64 if dtype == torch.float64 else torch.float32}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_packing_by_rows_makes_the_bits_of_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch, kind: str, nested: bool
) -> None:
    import bitsandbytes

    monkeypatch.setattr(quantise, "_AT_ONCE", 64 * 64 * 2)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        weight = (torch.randn(300, 192) * 0.1).to(dtype)
        mine = packed(weight, nested, kind)
        theirs = bitsandbytes.nn.Params4bit(
            weight.clone(), requires_grad=False, blocksize=64, compress_statistics=nested, quant_type=kind
        ).to("cpu")
        assert torch.equal(mine.data, theirs.data)
        facts = [found.quant_state.as_dict(packed=False) for found in (mine, theirs)]
        assert facts[0].keys() == facts[1].keys()
        for key, value in facts[0].items():
            same = torch.equal(value, facts[1][key]) if isinstance(value, torch.Tensor) else value == facts[1][key]
            assert same, key


def test_a_weight_that_comes_back_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bitsandbytes 0.50 does for rows of 96 values on some CPUs; one without AVX-512 unpacked them rightly."""
    from bitsandbytes import functional

    right = functional.dequantize_4bit

    def rows_after_the_first_are_shifted(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.cat([(found := right(*args, **kwargs))[:1], found[1:].roll(32, dims=1)])

    monkeypatch.setattr(functional, "dequantize_4bit", rows_after_the_first_are_shifted)
    with pytest.raises(ModelError, match="unpacks a weight of \\[8, 96\\] wrongly"):
        packed(torch.randn(8, 96), True, "nf4")


@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16])
def test_a_packed_layer_leaves_its_bias_alone(width: torch.dtype) -> None:
    """bitsandbytes' own layer gives the bias the dtype of its input, in place."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4)).to(width)
    plain = module[0](torch.zeros(1, 64, dtype=width)).detach()
    prepare_packing(module, {"0": module[0]}, AdapterOptions(), torch.bfloat16)
    pack(module)
    layer = next(packing_layers(module))
    before = layer.bias.data_ptr()
    for x in (torch.randn(3, 64), torch.randn(3, 64, dtype=torch.bfloat16)):
        assert layer(x).dtype == x.dtype
        assert layer.bias.dtype == width
        assert layer.bias.data_ptr() == before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(3, 64)).dtype == torch.bfloat16
    assert torch.allclose(layer(torch.zeros(1, 64)), plain.float(), atol=1e-2)


def test_every_key_of_the_config_reaches_the_plan(tmp_path: Path) -> None:
    """Also those that no cost depends on, through the planner's search."""
    config = configs.write_config(tmp_path, model={"factory": "tests.models:ByteAttention", "kwargs": {"width": 64}})
    given: dict[str, Any] = {
        "rank": 3,
        "alpha": 5.0,
        "dropout": 0.25,
        "targets": ("attention", "up"),
        "rslora": True,
        "dora": True,
        "quant_type": "fp4",
        "double_quant": False,
        "modules_to_save": ("embed",),
    }
    assert given.keys() == AdapterOptions.model_fields.keys()
    words = [f"lora.{key}={json.dumps(value)}" for key, value in given.items()]
    job = prepare_job(read_config(config, ["parallel.strategy=fsdp+qlora", *words]), lambda text: None).job
    assert job.plan.adapter == AdapterOptions(**given)


def test_a_model_with_adapters_runs_on_fake_tensors_and_dropout_keeps_more() -> None:
    """What a sample saves is measured there; what cannot run is unknown, and nobody would see that."""
    saved = []
    for dropout in (0.0, 0.1):
        model = lambda: family("llama", dtype=torch.float32)  # noqa: E731
        factory = adapted_factory(model, Plan(strategy="ddp+lora", adapter=AdapterOptions(dropout=dropout)))
        ids = torch.zeros(1, 16, dtype=torch.int64)
        found = forward_bytes(
            factory, token_loss_sum, (ids, ids), num_outputs=64, dtype=torch.float32, prepare=lambda module: None
        )
        assert found is not None
        saved.append(found[0])
    assert saved[1] > saved[0]
