"""Building a model: real where it must be, on the meta device elsewhere, and measured without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.model.read import find_blocks
from shardwise.parallel.activation_checkpointing import apply_recompute
from shardwise.parallel.materialize import build, materialize
from shardwise.parallel.meta_parameters import parameters_on_meta
from shardwise.train.config import Config
from shardwise.train.loss import token_loss_sum
from shardwise.train.model import forward_bytes, model_factory
from tests.models import VOCAB, Decoder

HERE = "tests.unit.test_model_build"
CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


class Rotary(nn.Module):
    """Buffers of both kinds, one of which only the constructor can make; dropout, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0) ** 0.5, persistent=False)
        self.register_buffer("nothing", None)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_parameter("none", None)


class TiedByHand(nn.Module):
    """One real parameter under two names: never on the meta device before it is registered."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.randn(4, 4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.weight = shared
        self.second.weight = shared


class Impatient(nn.Module):
    """Looks at a value in its forward, which fake tensors have none of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return x * 2 if x.sum().item() > 0 else x


def no_module() -> dict[str, int]:
    return {"layers": 3}


def factory_with(num_blocks: int = 2, tied: bool = False) -> nn.Module:
    return Decoder(num_blocks=num_blocks, tied=tied)


def make_config(seq_len: int = 16, **model: Any) -> Config:
    return Config.model_validate(
        {"model": model, "data": {"path": "python:stdlib", "seq_len": seq_len}, "train": {"steps": 1}}
    )


@pytest.fixture
def folder(tmp_path):
    """A folder with the config.json of a small Llama; called with changes, it writes them."""
    pytest.importorskip("transformers")

    def write(**changes: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return str(tmp_path)

    return write


def plain(factory: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


class TestBuild:
    @pytest.mark.parametrize("factory", [Decoder, lambda: Decoder(tied=True, frozen=True), Rotary])
    def test_real_weights_are_those_of_plain_construction_bit_for_bit(self, factory):
        expected, found = plain(factory, 7), build(factory, 7, real=True)
        assert list(found.state_dict()) == list(expected.state_dict())
        for name, tensor in expected.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), name
        other = build(factory, 8, real=True)
        assert any(not torch.equal(a, b) for a, b in zip(other.parameters(), found.parameters(), strict=True))

    @pytest.mark.parametrize("real", [True, False])
    def test_the_random_state_is_left_as_it_was(self, real):
        before = torch.get_rng_state()
        build(Rotary, 3, real=real)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("factory", [Decoder, lambda: Decoder(tied=True, frozen=True), Rotary])
    def test_on_meta_it_is_the_same_model_without_weights(self, factory):
        expected, found = plain(factory, 7), build(factory, 7, real=False)
        ours, theirs = (
            [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
            for model in (found, expected)
        )
        assert ours == theirs
        assert all(p.device.type == "meta" and type(p) is nn.Parameter for p in found.parameters())

    def test_buffers_are_real(self):
        found = build(Rotary, 7, real=False)
        assert torch.equal(found.table, torch.arange(8.0) ** 0.5)
        assert torch.equal(found.norm.running_var, torch.ones(8))
        assert found.nothing is None and found.none is None

    def test_ties_are_kept_on_meta(self):
        found = build(lambda: Decoder(tied=True), 0, real=False)
        assert found.head.weight is found.embed.weight

    def test_a_parameter_registered_twice_stays_one(self):
        found = build(TiedByHand, 0, real=False)
        assert found.first.weight is found.second.weight

    def test_registration_is_itself_again_afterwards(self):
        register = nn.Module.register_parameter
        with pytest.raises(ZeroDivisionError), parameters_on_meta():
            assert nn.Linear(2, 2).weight.device.type == "meta"
            1 / 0  # noqa: B018
        assert nn.Module.register_parameter is register
        assert nn.Linear(2, 2).weight.device.type == "cpu"


class TestMaterialize:
    def test_ties_are_kept(self):
        module = build(lambda: Decoder(tied=True, frozen=True), 0, real=False)
        trained = {name: p.requires_grad for name, p in module.named_parameters()}
        materialize(module, CPU, broadcast=False)
        assert module.head.weight is module.embed.weight
        assert all(p.device == CPU for p in module.parameters())
        assert {name: p.requires_grad for name, p in module.named_parameters()} == trained

    def test_what_has_memory_already_is_left_alone(self):
        module = plain(Rotary, 0)
        before = {name: (id(p), p.clone()) for name, p in module.named_parameters()}
        materialize(module, CPU, broadcast=False)
        assert {name: id(p) for name, p in module.named_parameters()} == {
            name: key for name, (key, _) in before.items()
        }
        assert all(torch.equal(p, before[name][1]) for name, p in module.named_parameters())

    def test_buffers_keep_their_values(self):
        module = build(Rotary, 0, real=False)
        materialize(module, CPU, broadcast=False)
        assert torch.equal(module.table, torch.arange(8.0) ** 0.5)
        assert "table" not in module.state_dict() and module.none is None


class TestFactory:
    def test_the_users_own_with_its_arguments(self):
        config = make_config(factory=f"{HERE}:factory_with", kwargs={"num_blocks": 4, "tied": True})
        module = model_factory(config, VOCAB)()
        assert len(module.blocks) == 4 and module.head.weight is module.embed.weight

    def test_every_call_builds_anew(self):
        factory = model_factory(make_config(factory=f"{HERE}:factory_with"), VOCAB)
        assert factory() is not factory()

    def test_what_it_returns_must_be_a_module(self):
        with pytest.raises(ModelError, match=rf"'{HERE}:no_module' returned a dict; it must return a torch.nn.Module"):
            model_factory(make_config(factory=f"{HERE}:no_module"), VOCAB)()

    @pytest.mark.parametrize(
        ("path", "says"),
        [
            (f"{HERE}:factory_wiht", "did you mean 'factory_with'"),
            ("no_such_package_of_ours.models:make", "no module named 'no_such_package_of_ours'"),
            ("no_colon", "is neither package.module:function nor file.py:function"),
        ],
    )
    def test_a_factory_that_is_not_there(self, path, says):
        with pytest.raises(ConfigError, match=says) as raised:
            model_factory(make_config(factory=path), VOCAB)
        assert str(raised.value).startswith(f"model.factory '{path}'")

    def test_frozen_by_pattern(self):
        config = make_config(factory=f"{HERE}:factory_with", freeze=["blocks.0.*", "embed.weight"])
        module = model_factory(config, VOCAB)()
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        assert frozen == {"embed.weight", *(f"blocks.0.{name}" for name, _ in module.blocks[0].named_parameters())}

    def test_a_pattern_that_matches_nothing(self):
        config = make_config(factory=f"{HERE}:factory_with", freeze=["embed.wieght"])
        with pytest.raises(ModelError, match=r"model.freeze 'embed.wieght' .*did you mean 'embed.weight'"):
            model_factory(config, VOCAB)()


class TestConfiguration:
    @pytest.mark.parametrize("name", ["", "config.json"])
    def test_a_folder_or_its_file(self, folder, name):
        path = Path(folder()) / name
        module = build(model_factory(make_config(config=str(path)), 300), 0, real=False)
        assert type(module).__name__ == "LlamaForCausalLM"
        assert find_blocks(module) == ["model.layers.0", "model.layers.1", "model.layers.2"]
        assert module.lm_head.weight is module.model.embed_tokens.weight

    def test_the_example(self):
        pytest.importorskip("transformers")
        path = Path(__file__).parents[2] / "examples" / "llama-2m"
        module = build(model_factory(make_config(config=str(path)), 257), 0, real=False)
        assert 1.5e6 < sum(p.numel() for p in module.parameters()) < 2.5e6

    def test_weights_are_fp32_whatever_the_file_says(self, folder):
        module = build(model_factory(make_config(config=folder(torch_dtype="bfloat16")), 300), 0, real=True)
        assert {p.dtype for p in module.parameters()} == {torch.float32}

    def test_it_is_built_the_same_with_one_seed(self, folder):
        factory = model_factory(make_config(config=folder()), 300)
        first, again, other = (build(factory, seed, real=True) for seed in (1, 1, 2))
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
        assert not torch.equal(first.lm_head.weight, other.lm_head.weight)

    def test_vocabulary_and_length_are_told_at_once(self, folder):
        with pytest.raises(ModelError) as raised:
            model_factory(make_config(config=folder(), seq_len=129), 301)
        vocabulary, length = raised.value.problems
        assert "vocab_size 300" in vocabulary and "301" in vocabulary
        assert "data.seq_len 129" in length and "max_position_embeddings 128" in length
        model_factory(make_config(config=folder(), seq_len=128), 300)

    def test_code_of_the_models_folder_is_refused_and_not_run(self, folder):
        path = Path(
            folder(model_type="ours", auto_map={"AutoConfig": "code.Ours", "AutoModelForCausalLM": "code.Model"})
        )
        (path / "code.py").write_text(f"open({str(path / 'was run')!r}, 'w')\nclass Ours: pass\nclass Model: pass\n")
        for kind in ("ours", "llama"):
            folder(model_type=kind, auto_map={"AutoConfig": "code.Ours", "AutoModelForCausalLM": "code.Model"})
            with pytest.raises(ModelError):
                model_factory(make_config(config=str(path)), 300)()
            assert not (path / "was run").exists()

    @pytest.mark.parametrize("kind", ["no_such_kind", "", 7])
    def test_a_kind_that_transformers_does_not_know(self, folder, kind):
        with pytest.raises(ModelError, match=r"^model\.config "):
            model_factory(make_config(config=folder(model_type=kind)), 300)

    def test_a_file_that_is_missing_or_no_json(self, tmp_path):
        pytest.importorskip("transformers")
        with pytest.raises(ModelError, match="there is no file"):
            model_factory(make_config(config=str(tmp_path)), 300)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ModelError, match=r"^model\.config "):
            model_factory(make_config(config=str(tmp_path)), 300)


def saved_bytes(module: nn.Module, seq_len: int, dtype: torch.dtype) -> tuple[int, int]:
    """What autograd really keeps of one real forward: each storage once, parameters and buffers not."""
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    ids = torch.zeros(1, seq_len, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32),
    ):
        outputs = module(ids)
        token_loss_sum(outputs, ids)
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own), logits.numel() * 4


class TestForwardBytes:
    def measure(self, factory: Any, mode: str = "none", dtype: torch.dtype = torch.float32, seq_len: int = 64) -> Any:
        ids = torch.zeros(1, seq_len, dtype=torch.int64)
        return forward_bytes(
            factory,
            token_loss_sum,
            (ids, ids),
            num_outputs=1,
            dtype=dtype,
            prepare=lambda module: apply_recompute(module, mode, find_blocks(module)),
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("mode", ["none", "full"])
    def test_close_to_what_a_real_llama_saves(self, folder, mode, dtype):
        factory = model_factory(make_config(config=folder(), seq_len=64), 300)
        found = self.measure(factory, mode, dtype)
        module = factory()
        apply_recompute(module, mode, find_blocks(module))
        saved, logits = saved_bytes(module, 64, dtype)
        assert found[0] == pytest.approx(saved, rel=0.15)
        assert found[1] == logits == 64 * 300 * 4

    def test_longer_samples_save_more_and_recompute_saves_less(self):
        short, long = self.measure(Decoder, seq_len=32)[0], self.measure(Decoder, seq_len=64)[0]
        assert long == pytest.approx(2 * short, rel=0.05)
        assert self.measure(Decoder, "full", seq_len=64)[0] < 0.7 * long

    def test_it_costs_no_memory_of_that_size(self):
        """A model of 400 GB."""

        def huge() -> nn.Module:
            return nn.Sequential(nn.Embedding(1000, 10**8))

        assert self.measure(huge, seq_len=10)[1] == 10 * 10**8 * 4

    def test_unknown_where_the_model_does_not_run_on_fake_tensors(self):
        assert self.measure(Impatient) is None
        assert Impatient()(torch.zeros(1, 2, dtype=torch.int64)).shape == (1, 2, VOCAB), "it does run on real ones"

    def test_random_states_are_left_alone(self):
        before = torch.get_rng_state()
        self.measure(Decoder)
        assert torch.equal(torch.get_rng_state(), before)
