"""The loss in chunks: the same gradients, never more rows of logits, and no model that does more with its logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.cost.memory.estimate_memory import estimate, estimate_memory, peak_lower_bound
from shardwise.errors import ConfigError, ModelError, PlanError
from shardwise.hardware.cluster import detect
from shardwise.model.read import read_model
from shardwise.model.trace import trace_module
from shardwise.parallel import chunked_loss as loss_chunks
from shardwise.parallel.chunked_loss import LateLogits, OutputHead, _Head, apply_loss_chunks, find_head
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan, runnable
from shardwise.plan.workload import Workload
from shardwise.run.start import start
from shardwise.train.config import read_config
from shardwise.train.loss import token_loss_sum
from tests.families import VOCAB, configuration, family
from tests.models import decoder

ROWS, WIDTH = 21, 12
PLAN = Plan(loss_chunks=4)


class MostRows(TorchDispatchMode):
    """The most rows of a tensor with ``vocab`` columns that an operator has made."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        views = any(result.alias_info is not None for result in func._schema.returns)
        for tensor in () if views else _pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self.vocab:
                self.rows = max(self.rows, tensor.numel() // self.vocab)
        return made


def head(dtype: torch.dtype, bias: bool = True) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCAB, (3, 7))
    labels[0, 2:] = -100
    labels[2] = -100
    return hidden, nn.Linear(WIDTH, VOCAB, bias=bias, dtype=dtype), labels


def both(dtype: torch.dtype, chunks: int, scale: float = 1.0, bias: bool = True) -> tuple[list[Any], list[Any]]:
    """The loss and its gradients, PyTorch's own and in chunks."""
    hidden, linear, labels = head(dtype, bias)
    operands = [hidden, *linear.parameters()]
    logits = linear(hidden).flatten(0, -2)
    wide = logits if dtype == torch.float64 else logits.float()
    plain = functional.cross_entropy(wide, labels.flatten(), reduction="sum") * scale
    expected = [plain.detach(), *torch.autograd.grad(plain, operands)]
    apply_loss_chunks(linear, OutputHead("", VOCAB), chunks)
    with MostRows(VOCAB) as seen:
        found = token_loss_sum(linear(hidden), labels) * scale
        gradients = torch.autograd.grad(found, operands)
    assert 0 < seen.rows <= max(1, -(-ROWS // chunks))
    return [found.detach(), *gradients], expected


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


class TestGradients:
    @pytest.mark.parametrize("chunks", [1, 2, 4, ROWS, 50])
    @pytest.mark.parametrize("bias", [True, False])
    def test_equal_those_of_one_piece(self, chunks: int, bias: bool) -> None:
        found, expected = both(torch.float64, chunks, 0.37, bias)
        assert apart(found, expected) < 1e-14

    @pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="torch 2.13 has it")
    def test_are_those_of_torchs_own_which_sums_in_bf16(self) -> None:
        """Equal in float64; in bf16 torch returns loss and gradients in bf16, for which ours is kept (decision 025)."""
        for dtype in (torch.float64, torch.bfloat16):
            hidden, layer, labels = head(dtype)
            options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=6)
            more = {"linear_bias": layer.bias, "reduction": "sum", "ignore_index": -100, "options": options}
            loss = functional.linear_cross_entropy(hidden.flatten(0, 1), layer.weight, labels.flatten(), **more)
            found = [loss.detach(), *torch.autograd.grad(loss, (hidden, layer.weight, layer.bias))]
            ours = LateLogits(hidden, _Head(layer, dtype, 4, strict=False)).loss_sum(labels, -100)
            if dtype == torch.bfloat16:
                assert (loss.dtype, ours.dtype) == (torch.bfloat16, torch.float32)
                continue
            expected = [ours.detach(), *torch.autograd.grad(ours, (hidden, layer.weight, layer.bias))]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    def test_keep_their_dtype_and_are_summed_in_fp32(self) -> None:
        found, expected = both(torch.bfloat16, 4)
        assert [one.dtype for one in found] == [one.dtype for one in expected]
        assert apart(found, expected) < 2e-2

    def test_of_fp16_are_found_under_the_loss_scale(self) -> None:
        """A softmax's small parts are zero in fp16 without it."""
        found, expected = both(torch.float16, 4, 1024.0)
        assert apart(found, expected) < 5e-3
        hidden, linear, labels = head(torch.float16)
        with torch.no_grad():
            linear.bias.fill_(-20.0)[0] = 0.0
        labels[:] = 0
        scale, apply = 2.0**15, apply_loss_chunks
        apply(linear, OutputHead("", VOCAB), 4)
        (token_loss_sum(linear(hidden), labels) * scale).backward()
        assert linear.bias.grad is not None
        assert linear.weight.grad is not None
        assert int((linear.weight.grad[1:] != 0).sum()) > VOCAB  # e-20 × 2^15 is a number of fp16, e-20 is none

    def test_without_a_label_are_zero(self) -> None:
        hidden, linear, labels = head(torch.float64)
        apply_loss_chunks(linear, OutputHead("", VOCAB), 4)
        loss = token_loss_sum(linear(hidden), torch.full_like(labels, -100))
        loss.backward()
        assert loss.item() == 0.0
        assert hidden.grad is not None
        assert not hidden.grad.any()

    def test_of_a_frozen_head_are_not_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Any] = []
        original = loss_chunks._add
        monkeypatch.setattr(loss_chunks, "_add", lambda found, *rest: (made.append(found), original(found, *rest)))
        hidden, linear, labels = head(torch.float64)
        linear.requires_grad_(False)
        apply_loss_chunks(linear, OutputHead("", VOCAB), 4)
        token_loss_sum(linear(hidden), labels).backward()
        assert all(part[1] is None and part[2] is None for part in made)
        assert linear.weight.grad is None
        assert hidden.grad is not None

    def test_go_backward_once(self) -> None:
        hidden, linear, labels = head(torch.float64)
        apply_loss_chunks(linear, OutputHead("", VOCAB), 4)
        loss = token_loss_sum(linear(hidden), labels)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once"):
            loss.backward()

    def test_a_label_outside_of_the_vocabulary_is_an_error(self) -> None:
        hidden, linear, labels = head(torch.float64)
        apply_loss_chunks(linear, OutputHead("", VOCAB), 4)
        labels[1, 0] = VOCAB
        with pytest.raises((IndexError, RuntimeError)):
            token_loss_sum(linear(hidden), labels)


class TestWithoutGradients:
    def test_the_loss_is_the_same_and_in_chunks(self) -> None:
        hidden, linear, labels = head(torch.float64)
        plain = token_loss_sum(linear(hidden), labels)
        apply_loss_chunks(linear, OutputHead("", VOCAB), 4)
        with torch.no_grad(), MostRows(VOCAB) as seen:
            assert torch.allclose(token_loss_sum(linear(hidden), labels), plain, rtol=1e-14)
        assert seen.rows == 6

    def test_logits_are_made_where_they_are_read(self) -> None:
        hidden, linear, _ = head(torch.float64)
        full = linear(hidden)
        apply_loss_chunks(linear, OutputHead("", VOCAB), 4)
        with torch.no_grad():
            late = linear(hidden)
            assert isinstance(late, LateLogits)
            assert late.shape == full.shape
            assert torch.equal(late[:, -1], full[:, -1])
            assert torch.equal(late.argmax(-1), full.argmax(-1))
            assert torch.equal(torch.argmax(late, -1), full.argmax(-1))

    def test_text_is_generated(self) -> None:
        model = family("llama", layers=1)
        ids = torch.arange(6)[None]
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, **options)
        apply_loss_chunks(model, OutputHead("lm_head", VOCAB), 4)
        assert torch.equal(model.generate(ids, **options), expected)


class TestMisuse:
    @pytest.mark.parametrize(
        "use",
        [
            lambda late: functional.cross_entropy(late, torch.zeros(3, dtype=torch.long)),
            lambda late: late[0],
            lambda late: torch.tanh(late),
        ],
    )
    def test_another_reader_is_told_what_to_do(self, use: Any) -> None:
        hidden, linear, _ = head(torch.float64)
        apply_loss_chunks(linear, OutputHead("", VOCAB), 4)
        with pytest.raises(ModelError, match="token_loss_sum"):
            use(linear(hidden))

    def test_so_is_one_of_an_attribute(self) -> None:
        hidden, linear, _ = head(torch.float64)
        apply_loss_chunks(linear, OutputHead("", VOCAB), 4)
        with pytest.raises(AttributeError, match="token_loss_sum"):
            linear(hidden).view(-1)


class Capped(nn.Module):
    """A head whose logits go on through ``after``."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.embed, self.head, self.after = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), after

    def forward(self, ids: torch.Tensor) -> Any:
        return self.after(self.head(self.embed(ids)))


class Functional(nn.Module):
    """A head that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.embed(ids), self.embed.weight)


class Twice(Capped):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.head(self.embed(ids))
        return self.head(self.embed(ids))


class Stacked(nn.Module):
    """Equal linear layers, of which the last one's result is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(ids))


def in_place(logits: Any) -> Any:
    logits /= 2.0
    return logits


def find(module: nn.Module) -> OutputHead:
    return find_head(module, read_model(module), PLAN)


class TestFindHead:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [("llama", "lm_head"), ("qwen3", "lm_head"), ("gpt2", "lm_head"), ("gemma", "lm_head"), ("own", "head")],
    )
    def test_of_known_models(self, name: str, expected: str) -> None:
        module = family(name, layers=2)
        assert find(module) == OutputHead(expected, VOCAB)
        assert isinstance(module(torch.zeros(1, 4, dtype=torch.long)), torch.Tensor) or name != "own"  # nothing changed

    def test_of_weights_without_data_and_in_bf16(self) -> None:
        with torch.device("meta"):
            module = decoder(tied=True).bfloat16()
        assert find(module).name == "head"

    def test_logits_that_are_only_widened(self) -> None:
        assert find(Capped(lambda logits: logits.float())).name == "head"

    @pytest.mark.parametrize(
        "after",
        [
            lambda logits: torch.tanh(logits / 30.0) * 30.0,
            lambda logits: logits * 0.0625,
            lambda logits: logits.clamp(-5, 5),
            lambda logits: logits[..., : VOCAB - 1],
            lambda logits: torch.tanh(logits),
            lambda logits: SimpleNamespace(logits=logits, aux=logits.sum()),
            in_place,
        ],
    )
    def test_logits_that_go_on_are_refused(self, after: Any) -> None:
        with pytest.raises(ModelError, match="loss_chunks"):
            find(Capped(after))

    @pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "Granite"])
    def test_models_that_cap_or_scale_are_refused(self, kind: str) -> None:
        import transformers

        facts = configuration("llama", 1).to_dict()
        kept = {key: facts[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
        config = getattr(transformers, f"{kind}Config")(**kept, num_key_value_heads=2, num_hidden_layers=1, head_dim=8)
        if kind == "Granite":
            config.logits_scaling = 8.0
        module = getattr(transformers, f"{kind}ForCausalLM")(config)
        with pytest.raises(ModelError, match=r"not simply what 'lm_head' puts out.*take loss_chunks out"):
            find(module)

    @pytest.mark.parametrize(
        ("module", "why"),
        [
            (Functional(), "not what an nn.Linear puts out"),
            (Twice(None), "runs 2 times"),
            (Stacked(), "one of the repeated blocks"),
            (Capped(lambda logits: {"scores": logits}), "must return its logits"),
        ],
    )
    def test_others_are_refused_with_the_reason(self, module: nn.Module, why: str) -> None:
        with pytest.raises(ModelError, match=why):
            find(module)
        assert not any("forward" in vars(part) for part in module.modules())


class TestPlan:
    def test_the_fingerprint_knows_it(self) -> None:
        assert Plan(loss_chunks=1).fingerprint == Plan().fingerprint
        assert Plan(loss_chunks=2).fingerprint != Plan().fingerprint

    @pytest.mark.parametrize(
        ("strategy", "dims"),
        [("ddp+tp2", ParallelDims(tp=2)), ("fsdp+pp2", ParallelDims(pp=2)), ("deepspeed-zero2", ParallelDims())],
    )
    def test_axes_that_cut_the_head_are_refused(self, strategy: str, dims: ParallelDims) -> None:
        with pytest.raises(PlanError, match=r"loss_chunks 4.*set loss_chunks to 1"):
            runnable(Plan(strategy=strategy, dims=dims, loss_chunks=4))

    def test_a_config_too(self, tmp_path: Any) -> None:
        path = tmp_path / "c.toml"
        path.write_text(
            '[model]\nfactory = "a:b"\n[data]\npath = "x"\nseq_len = 8\n[train]\nsteps = 1\nloss_chunks = 4\n'
            '[parallel]\nstrategy = "ddp+tp2"\n'
        )
        with pytest.raises(ConfigError, match=r"train.loss_chunks 4: under ddp\+tp2"):
            read_config(path)

    def test_the_model_is_looked_at_before_anything_is_changed(self) -> None:
        session = start(Plan(loss_chunks=4), receipts=False)
        module = Capped(torch.tanh)
        with pytest.raises(ModelError, match="loss_chunks"):
            session.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        session.close()


class TestCosts:
    def test_predictions_shrink_with_it(self) -> None:
        module, cluster, workload = family("llama", dtype=torch.float32), detect("cpu", 1), Workload()
        profile = trace_module(module, seq_len=64, vocab_size=VOCAB, precision="fp32", device="cpu")
        plans = [Plan(seq_len=64, micro_batch=8, loss_chunks=chunks) for chunks in (1, 8)]
        logits = [estimate(profile, plan, workload, cluster).logits for plan in plans]
        full = 64 * 8 * VOCAB * 4
        assert logits[0] == 3 * full
        assert logits[1] == full // 8 + (64 * 8 + VOCAB) * 32 * 4  # a chunk, and the gradients that wait
        assert peak_lower_bound(profile, plans[1], workload) < peak_lower_bound(profile, plans[0], workload)

    def test_so_do_those_without_a_profile(self) -> None:
        spec = read_model(decoder())
        workload = Workload(activation_bytes={"none": 5000}, logits_bytes=800)
        plain, chunked = (estimate_memory(spec, Plan(micro_batch=2, loss_chunks=n), workload) for n in (1, 8))
        assert (plain.activations, plain.logits) == (10000, 1600)
        assert (chunked.activations, chunked.logits) == (8400, 200)
