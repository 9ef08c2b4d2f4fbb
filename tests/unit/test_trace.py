"""Profiles traced off any module: what is counted, where it is put, and what is said where that cannot be."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.model import trace_operations
from shardwise.model.profile import ModelProfile, Unit
from shardwise.model.trace import trace_module
from tests.models import LENGTH, VOCAB, WIDTH, Decoder


class Mixer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(functional.dropout(torch.relu(self.first(x)), 0.1, self.training))


class Framework(nn.Module):
    """Blocks over floats: no tokens, so it says itself what it reads. A table that is no buffer, an unused weight."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Mixer(width) for _ in range(blocks))
        self.table = torch.ones(width)
        self.unused = nn.Parameter(torch.zeros(5))
        self.rates = [x.item() for x in torch.linspace(0, 0.1, blocks)]

    def example_inputs(self) -> tuple[torch.Tensor]:
        return (torch.zeros(4, 6, self.table.shape[0]),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x) * self.table.type_as(x)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class Peeks(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.kind = nn.Embedding(9, 4), kind

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.kind == "value" and x.sum() > 0:
            return x
        if self.kind == "shape":
            return x[x > 0]
        if self.kind == "mismatch":
            return x + torch.zeros(3)
        return x @ torch.zeros(4, 4)


def only(profile: ModelProfile, kind: str) -> Unit:
    (unit,) = [unit for unit in profile.units if unit.kind == kind]
    return unit


def test_units_weights_and_sizes():
    profile = trace_module(Framework)
    assert [(u.kind, u.count, u.input_elements) for u in profile.units] == [
        ("embedding", 1, 0),
        ("block", 3, 48),
        ("head", 1, 48),
    ]
    block = only(profile, "block")
    assert [w.name for w in block.weights] == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert profile.num_parameters == sum(p.numel() for p in Framework().parameters())
    assert "unused" in [w.name for w in only(profile, "head").weights], "what nothing reads is held all the same"
    products = [op for op in block.ops if op.kind == "matmul"]
    assert [(op.name, op.m, op.k, op.n, op.flops, op.weight) for op in products] == [
        ("first", 6, 8, 8, 768.0, True),
        ("second", 6, 8, 8, 768.0, True),
    ], "of one of the four samples"
    # the input; ReLU's output, which dropout leaves; dropout's output; its mask of bytes
    assert sum(op.saved for op in block.ops) == 3 * 48
    assert sum(op.saved_bytes for op in block.ops) == 48
    assert (profile.seq_len, profile.origin, profile.unknown) == (None, "traced", ())
    assert only(profile, "head").ops[-1].saved_fp32 == 8, "cross-entropy over 8 classes"


def test_nothing_of_the_module_changes():
    module = Framework().eval()
    module.blocks[1].train()
    before = {n: (id(p), p.dtype, p.clone()) for n, p in module.named_parameters()}
    table, flags = module.table, [part.training for part in module.modules()]
    profile = trace_module(module, inputs=torch.zeros(1, 2, 8))
    assert profile.num_blocks == 3
    assert module.table is table and [part.training for part in module.modules()] == flags
    for name, parameter in module.named_parameters():
        identity, dtype, value = before[name]
        assert id(parameter) == identity and parameter.dtype == dtype and torch.equal(parameter, value)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    torch.nn.Linear(2, 2).weight.sum().item()  # no registration hook is left either


def test_nothing_real_is_made_of_a_large_factory():
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 2**16)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2**16, 2**16, bias=False)) for _ in range(40))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return x

    state = torch.random.get_rng_state()
    assert trace_module(Large, seq_len=8).num_parameters > 1.7e11
    assert torch.equal(state, torch.random.get_rng_state())


def test_tied_frozen_and_uneven():
    tied = trace_module(lambda: Decoder(tied=True), seq_len=LENGTH)
    assert tied.tied == (("embed.weight", "head.weight"),)
    assert tied.num_parameters == sum(p.numel() for p in Decoder(tied=True).parameters())
    assert [w.name for w in only(tied, "head").weights] == ["scale"]
    frozen = trace_module(lambda: Decoder(frozen=True), seq_len=LENGTH)
    assert frozen.num_trainable == sum(p.numel() for p in Decoder(frozen=True).parameters() if p.requires_grad)
    blocks = [unit for unit in frozen.units if unit.kind == "block"]
    assert [unit.count for unit in blocks] == [1, 1, 1]
    weights = [[op.weight for op in unit.ops if op.kind == "matmul"] for unit in blocks]
    assert weights == [[False, False], [False, True], [True, True]]
    assert frozen.vocab_size == VOCAB and frozen.hidden_size == WIDTH


def test_upcasts_show_as_fp32():
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(torch.sigmoid(self.embed(ids).float()).type_as(self.out.weight))

    unit = trace_module(Careful, seq_len=5).units[0]
    assert sum(op.saved_fp32 for op in unit.ops if op.kind != "loss") == 20, "sigmoid's result"
    assert sum(op.saved for op in unit.ops) == 20, "and its narrow copy, which the linear layer reads"


def test_a_module_that_needs_fp32_is_traced_so():
    profile = trace_module(lambda: Peeks("width"), seq_len=3)
    assert "does not run in bf16 (RuntimeError: mm of torch.bfloat16 and torch.float32 at" in profile.unknown[0]
    assert profile.flops == 2 * 3 * 4 * 4


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("value", r"_local_scalar_dense\.default needs a value at .*test_trace\.py:\d+: if self\.kind == \"value\""),
        ("shape", r"nonzero\.default needs a shape that depends on values at .*test_trace\.py:\d+: return x\[x > 0\]"),
        ("mismatch", r"its forward raised RuntimeError: .* at .*test_trace\.py:\d+: return x \+ torch\.zeros\(3\)"),
    ],
)
def test_a_module_that_cannot_be_traced(kind, says):
    with pytest.raises(ModelError, match=says):
        trace_module(lambda: Peeks(kind), seq_len=5, name="mine")


def missing_file() -> nn.Module:
    with open("/nowhere/weights.bin") as file:
        return nn.Linear(len(file.read()), 2)


def on_cuda() -> nn.Module:
    if torch.cuda.is_available():
        raise RuntimeError("Found no NVIDIA driver on your system")
    return nn.Linear(2, 2).to("cuda")


class WithoutInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (missing_file, r"building it raised FileNotFoundError.*; build the module without reading data or weights"),
        (on_cuda, r"a plan needs no GPU: build the module on the CPU"),
        (lambda: 3, "gave a int; it must give a torch.nn.Module"),
        (
            WithoutInputs,
            r"has no embedding.*a method example_inputs\(\) that returns the inputs of one sample, such as",
        ),
        (lambda: Decoder(), "the length of a sample is not given; set --seq-len"),
        (lambda: Decoder(num_blocks="x"), "give a function without required arguments"),
    ],
)
def test_what_a_factory_must_do(factory, says):
    with pytest.raises(ModelError, match=says):
        trace_module(factory)


def test_inputs_by_name_and_examples_of_another_length():
    class Named(Decoder):
        def example_inputs(self) -> torch.Tensor:
            return torch.zeros(2, 3, dtype=torch.int64)

        def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(ids) * scale

    assert trace_module(Named).seq_len == 3
    assert trace_module(Named, seq_len=11).seq_len == 11
    one, two = (trace_module(Named, inputs={"ids": torch.zeros(n, 5, dtype=torch.int64), "scale": 2.0}) for n in (1, 2))
    assert one.seq_len == 5
    assert (one.flops, one.units[1].input_elements) == (two.flops, two.units[1].input_elements)


def test_a_loss_of_its_own_is_taken_as_it_is():
    class WithLoss(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(super().forward(ids).flatten(0, 1).float(), ids.flatten())

    profile = trace_module(WithLoss, seq_len=LENGTH)
    assert "own output" in profile.unknown[0]
    assert not [op for op in only(profile, "head").ops if op.kind == "loss"]
    assert sum(op.saved_fp32 for op in only(profile, "head").ops) >= LENGTH * VOCAB


def test_a_convolution_as_implicit_gemm():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=3, bias=False)
            self.back = nn.ConvTranspose2d(12, 5, 2, stride=2, bias=False)

        def example_inputs(self) -> torch.Tensor:
            return torch.zeros(1, 6, 8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.back(self.conv(x))

    profile = trace_module(Net)
    first, second = [op for unit in profile.units for op in unit.ops if op.kind == "conv"]
    assert (first.m, first.k, first.n) == (16, 2 * 9, 12)
    assert (second.m, second.k, second.n) == (16, 12, 5 * 4)
    assert first.flops == 2 * 16 * 18 * 12 and first.weight
    assert first.moved == 6 * 64 + 12 * 2 * 9 + 12 * 16


def test_what_enters_every_block_is_kept_once():
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return x + self.mix(x * memory)

    class Two(Framework):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Crossing() for _ in range(3))
            self.encode = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            memory, x = self.encode(x), self.enter(x)
            for block in self.blocks:
                x = block(x, memory)
            return x.mean(1)

    blocks = [unit for unit in trace_module(Two).units if unit.kind == "block"]
    assert [(unit.count, unit.input_elements) for unit in blocks] == [(1, 96), (2, 48)]
    assert [sum(op.saved for op in unit.ops) for unit in blocks] == [3 * 48, 2 * 48]


def test_recurrent_layers_and_torch_s_own_attention():
    class Recurrent(Decoder):
        def __init__(self) -> None:
            super().__init__(num_blocks=1)
            self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(self.embed(ids))[0])

    per_token = 2 * (2 * 4 * WIDTH * WIDTH + WIDTH * VOCAB)
    assert trace_module(Recurrent, seq_len=5).flops == 5 * per_token

    class Encoder(Decoder):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 3, 24, dropout=0.1, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.embed(ids)))

    profile = trace_module(Encoder, seq_len=64)
    assert (profile.heads, profile.num_blocks) == (3, 2)
    most = max(op.saved for op in only(profile, "block").ops)
    assert most < 64 * 64 * 3, "dropout does not make attention keep its scores"


def test_tensor_parallel_is_told_only_where_it_can_be_followed():
    class Gated(Mixer):
        """A whole tensor meets a cut one: no division by heads or columns is right for it."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(x * torch.sigmoid(self.first(x)))

    plain = trace_module(Framework)
    assert [op.tp_sharding for op in only(plain, "block").ops if op.kind == "matmul"] == ["column", "row"]
    assert [w.tp_dim for w in only(plain, "block").weights] == [0, 0, 1, None]

    class Odd(Framework):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Gated() for _ in range(2))

    odd = trace_module(Odd)
    assert {op.tp_sharding for unit in odd.units for op in unit.ops} == {"none"}
    assert {w.tp_dim for unit in odd.units for w in unit.weights} == {None}
    assert odd.heads is None


def test_a_large_llama_of_transformers_is_traced_in_three_seconds():
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        use_cache=False,
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    began = time.process_time()
    profile = trace_module(module, seq_len=8192)
    assert time.process_time() - began < 3
    assert profile.num_parameters == 8_030_261_248
    assert [(u.kind, u.count) for u in profile.units] == [("embedding", 1), ("block", 32), ("head", 1)]
    (attention,) = [op for op in profile.units[1].ops if op.kind == "attention"]
    assert (attention.heads, attention.kv_heads, attention.causal) == (32, 8, True), "no mask, no repeated keys"


class Normed(nn.Module):
    """A norm that the CPU composes, in front of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.RMSNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.up(x) + self.gate(x)


class NormedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(3))

    def example_inputs(self) -> torch.Tensor:
        return torch.zeros(1, 6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_under_autocast_each_layer_keeps_a_copy_of_its_own_and_weights_are_no_activations():
    block = trace_module(NormedStack, under_autocast=True).units[-2]
    assert block.autocast_ops, "it runs under autocast, too"
    assert [sum(op.saved for op in ops if op.kind == "matmul") for ops in (block.ops, block.autocast_ops)] == [48, 96]
    assert sum(op.saved_fp32 for op in block.autocast_ops) == 48 + 6, "the stream, and a root a row"
    assert block.kind == "block"
    assert not trace_module(NormedStack).units[-2].autocast_ops


def test_a_cpu_composes_what_cuda_has_a_kernel_for():
    cuda, cpu = (trace_module(NormedStack, precision="fp32", device=d).units[-2] for d in ("cuda", "cpu"))
    assert "norm" in {op.kind for op in cuda.ops}
    assert "norm" not in {op.kind for op in cpu.ops}
    assert sum(op.saved for op in cpu.ops) > sum(op.saved for op in cuda.ops)


def test_a_loop_over_tokens_is_refused_before_it_takes_minutes(monkeypatch):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(50, 8), nn.Linear(8, 8)

        def forward(self, ids):
            state, out = 0.0, []
            for token in self.embed(ids).unbind(1):
                state = self.mix(token + state)
                out.append(state)
            return torch.stack(out, 1)

    assert trace_module(Loop, seq_len=64).num_parameters == 50 * 8 + 72
    monkeypatch.setattr(trace_operations, "MOST_OPERATIONS", 100)
    with pytest.raises(ModelError, match="more than 100 operations on one sample"):
        trace_module(Loop, seq_len=64)


def test_grouped_products_are_traced_in_either_precision(capfd: pytest.CaptureFixture[str]) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.up, self.down = nn.Parameter(torch.ones(4, 8, 16)), nn.Parameter(torch.ones(4, 16, 8))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x, ends = self.embed(ids).flatten(0, 1), torch.tensor([1, 2, 3, 8], dtype=torch.int32)
            rows = functional.grouped_mm(x, self.up, offs=ends)
            return functional.grouped_mm(rows.relu(), self.down, offs=ends).unsqueeze(0)

    wide, narrow = (trace_module(Experts, seq_len=8, precision=precision) for precision in ("fp32", "bf16"))
    products = [[(op.m, op.k, op.n, op.experts) for unit in found.units for op in unit.ops if op.kind == "matmul"]
                for found in (wide, narrow)]  # fmt: skip
    assert products[0] == products[1] and [one[:3] for one in products[0]] == [(8, 8, 16), (8, 16, 8)]
    assert "Traceback" not in capfd.readouterr().err
