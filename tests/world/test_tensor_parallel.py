"""Tensor, sequence and loss parallel: gradients in float64 are those of one process."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import ModelError
from shardwise.parallel import decide as split
from shardwise.parallel.tensor_parallel.tensor_layout import TensorLayout
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.contract import CLIP, LIMIT, Still, Watch, decided_once, gradients_here, reference, worst
from tests.families import FAMILIES, VOCAB, WIDTH, family
from tests.kept import kept
from tests.turns import by_turns
from tests.worlds import run_world

LENGTH = 8
Case = tuple[str, str, dict[str, Any]]


def ragged(number: int, vocab: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro batches of two samples whose labels are masked to different lengths."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(number):
        ids = torch.randint(0, vocab, (2, LENGTH), generator=generator)
        labels = torch.randint(0, vocab, (2, LENGTH), generator=generator)
        labels[:, : (index * 3) % 7] = -100
        found.append((ids, labels))
    return found


def build(name: str, seed: int) -> nn.Module:
    """A family's model, or one of the special ones of this file."""
    if name == "uneven":
        module = family("own", layers=2, seed=seed)
        torch.manual_seed(seed)
        module.tokens = nn.Embedding(61, WIDTH, dtype=torch.float64)
        module.head = nn.Linear(WIDTH, 61, dtype=torch.float64)
        return module
    if name == "frozen":
        module = family("llama", layers=2, seed=seed)
        for path, parameter in module.named_parameters():
            parameter.requires_grad_("layers.0.self_attn" not in path and "embed" not in path and "up_proj" not in path)
        return module
    if name == "styled":
        module = family("own", layers=2, seed=seed)
        module.tp_styles = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise", "head": "colwise"}
        return module
    if name in ("phi3", "neox", "opt"):
        return _other(name, seed)
    if name == "torch":
        return _Encoder(seed)
    return family(name, layers=2, seed=seed)


def _other(name: str, seed: int) -> nn.Module:
    """Fused projections with heads outermost and innermost, numbers in a shared configuration, own position tables."""
    import transformers

    common = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2}
    common |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(seed)
    if name == "phi3":
        config = transformers.Phi3Config(**common, num_key_value_heads=2, intermediate_size=48)
    elif name == "neox":
        config = transformers.GPTNeoXConfig(**common, intermediate_size=48)
    else:
        config = transformers.OPTConfig(**common, ffn_dim=48, word_embed_proj_dim=WIDTH, dropout=0.0)
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config).double()


class _Encoder(nn.Module):
    """PyTorch's own encoder layers, whose attention computes with its weights directly, and a head tied by hand."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        layer = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.embed.weight)


def vocab_of(name: str) -> int:
    return 61 if name == "uneven" else VOCAB


def error_of(strategy: str, name: str, options: dict[str, Any]) -> float:
    """Largest relative error of the gradients, the clipped ones, the norm and the loss of one step."""
    world = dist.get_world_size()
    accum = options.get("grad_accum", 1)
    dims = dims_for(parse_strategy(strategy), world)
    plan = Plan(strategy=strategy, dims=dims, **options)
    batches = ragged(dims.dp * accum, vocab_of(name))
    raw, clipped, norm, loss = kept(("tensor", name, len(batches)), lambda: reference(build(name, 0), batches))
    watch = Watch(gradients_here)
    session = start(plan)
    session.observers.append(watch)
    torch.manual_seed(100 + session.ranks.rank)
    model = build(name, 0 if session.ranks.is_main else 7)
    model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0))
    for step in session.steps(batches):
        step.run(model, token_loss_sum)
        result = step.update(optimizer, clip_norm=CLIP)
    assert watch.raw.keys() == raw.keys(), watch.raw.keys() ^ raw.keys()
    error = max(worst(watch.raw, raw)[0], worst(watch.clipped, clipped)[0])
    session.close()
    return max(error, abs(float(result.grad_norm or 0) - norm) / norm, abs(result.loss - loss) / loss)


def errors_of(cases: list[Case]) -> dict[str, float]:
    found = {}
    for strategy, name, options in cases:
        with decided_once(f"of tensor parallel: {name}"):
            found[f"{strategy} {name} {options}"] = error_of(strategy, name, options)
    return found


def check(world: int, cases: list[Case]) -> None:
    for errors in run_world(errors_of, world, cases, timeout_s=170.0):
        wrong = {case: error for case, error in errors.items() if not error <= LIMIT}
        assert not wrong, wrong
        assert len(errors) == len(cases)


SWITCHES: list[dict[str, Any]] = [
    {"sequence_parallel": sequence, "loss_parallel": loss}
    for sequence, loss in itertools.product((True, False), repeat=2)
]
MORE: list[dict[str, Any]] = [
    {"recompute": "full", "grad_accum": 2},
    {"recompute": "selective", "loss_parallel": True, "grad_accum": 2},
    {"recompute": "selective", "sequence_parallel": False},
]


@pytest.mark.turns(1)
@pytest.mark.parametrize("names", [("llama", "qwen3"), ("gpt2", "bert"), ("mistral", "gemma"), ("own",)], ids="-".join)
def test_gradients_are_those_of_one_process_on_two_ranks(names: tuple[str, ...]) -> None:
    cases: list[Case] = [("ddp+tp2", name, options) for name in names for options in (*SWITCHES, *MORE)]
    check(2, by_turns(cases, 3, names[0]))


@pytest.mark.turns(1)
@pytest.mark.parametrize("options", [SWITCHES[0], SWITCHES[3]], ids=["both", "neither"])
def test_four_ranks_share_two_key_value_heads(options: dict[str, Any]) -> None:
    check(4, by_turns([("ddp+tp4", name, options) for name in FAMILIES], 2, str(options)))


@pytest.mark.turns(1)
@pytest.mark.parametrize("strategy", ["ddp+tp2", "fsdp+tp2", "zero2+tp2"])
def test_data_parallel_around_tensor_parallel(strategy: str) -> None:
    names = ("llama", "qwen3", "gpt2", "own") if strategy != "zero2+tp2" else ("own",)
    variants = [{"grad_accum": 2, "recompute": "full", "loss_parallel": True}, {"sequence_parallel": False}]
    check(4, by_turns([(strategy, name, options) for name in names for options in variants], 3, strategy))


def test_hybrid_sharding_around_tensor_parallel() -> None:
    check(8, [("hsdp+tp2", "own", {"grad_accum": 2, "loss_parallel": True})])


def test_a_vocabulary_that_the_ranks_do_not_divide() -> None:
    cases: list[Case] = [("ddp+tp2", "uneven", options) for options in SWITCHES]
    check(2, [*cases, ("fsdp+tp2", "uneven", SWITCHES[0])])


def test_uneven_vocabulary_on_four_ranks() -> None:
    check(4, [("ddp+tp4", "uneven", SWITCHES[0]), ("fsdp+tp2", "uneven", SWITCHES[0]), ("fsdp+tp4", "uneven", {})])


def test_other_ways_to_write_a_transformer() -> None:
    cases: list[Case] = [("ddp+tp2", "phi3", {}), ("ddp+tp2", "neox", {"loss_parallel": True})]
    check(2, [*cases, ("ddp+tp2", "opt", {"sequence_parallel": False})])


def test_frozen_parameters() -> None:
    check(2, [("ddp+tp2", "frozen", SWITCHES[0]), ("fsdp+tp2", "frozen", SWITCHES[3])])


def test_own_styles_and_weights_that_another_module_computes_with() -> None:
    cases: list[Case] = [("ddp+tp2", "styled", {"sequence_parallel": False, "loss_parallel": True})]
    check(2, [*cases, *((f"{base}+tp2", "torch", {"sequence_parallel": False}) for base in ("ddp", "fsdp"))])


def sabotaged(name: str, change: Callable[[TensorLayout], TensorLayout], options: dict[str, Any]) -> float:
    full = split.tensor_layout
    split.tensor_layout = lambda *args, **kwargs: change(full(*args, **kwargs))
    return error_of(f"ddp+tp{dist.get_world_size()}", name, options)


def other_heads(layout: TensorLayout) -> TensorLayout:
    """Each rank takes the key/value head of its neighbour."""
    modules = dict(layout.modules)
    for name, cut in layout.modules.items():
        if name.endswith("k_proj"):
            local = cut.local["weight"]
            turned = dataclasses.replace(local, uses=(*local.uses[2:], *local.uses[:2]))
            modules[name] = dataclasses.replace(cut, local={**cut.local, "weight": turned})
    return dataclasses.replace(layout, modules=modules)


def forgotten_sum(layout: TensorLayout) -> TensorLayout:
    """The gradient of the norm inside a region is taken for whole."""
    modules = dict(layout.modules)
    for name, cut in layout.modules.items():
        if name.endswith("q_norm"):
            modules[name] = dataclasses.replace(
                cut, local={"weight": dataclasses.replace(cut.local["weight"], partial=False)}
            )
    return dataclasses.replace(layout, modules=modules)


def all_heads(layout: TensorLayout) -> TensorLayout:
    """The number of heads stays that of the whole model."""
    kept = {name: {k: v for k, v in new.items() if k != "n_head"} for name, new in layout.attributes.items()}
    assert any("n_head" in new for new in layout.attributes.values())
    return dataclasses.replace(layout, attributes=kept)


@pytest.mark.parametrize(
    ("world", "name", "change", "options"),
    [
        (4, "llama", other_heads, {}),
        (2, "qwen3", forgotten_sum, {"sequence_parallel": False}),
        (2, "own", all_heads, {}),
    ],
    ids=["other heads", "forgotten sum", "all heads"],
)
def test_the_comparison_catches(world: int, name: str, change: Any, options: dict[str, Any]) -> None:
    for error in run_world(sabotaged, world, name, change, options):
        assert error > 1e-3


def narrow(strategy: str, options: dict[str, Any]) -> float:
    """The loss in bf16 beside that of fp32 in one process."""
    dims = dims_for(parse_strategy(strategy), dist.get_world_size())
    batches = ragged(dims.dp, VOCAB)
    expected = reference(build("llama", 0), batches)[3]
    session = start(Plan(strategy=strategy, dims=dims, precision="bf16", **options))
    model = family("llama", layers=2, dtype=torch.float32)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for step in session.steps(batches):
        step.run(model, token_loss_sum)
        result = step.update(optimizer, clip_norm=CLIP)
    session.close()
    return abs(result.loss - expected) / expected


def all_narrow() -> list[float]:
    strategies = ("ddp+tp2", "fsdp+tp2") if dist.get_world_size() == 4 else ("ddp+tp2",)
    return [narrow(strategy, options) for strategy in strategies for options in (SWITCHES[0], SWITCHES[3])]


@pytest.mark.turns(2)
@pytest.mark.parametrize("world", [2, 4])
def test_bf16_is_close(world: int) -> None:
    for errors in run_world(all_narrow, world):
        assert max(errors) < 0.02, errors
        assert max(errors) > 0.0


def loss_of_parts(dtype: torch.dtype, vocab: int) -> tuple[float, float]:
    """Loss and gradient over logits that are cut, beside those over whole ones."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(2, 6, vocab, generator=generator) * 30).to(dtype)
    labels = torch.randint(0, vocab, (2, 6), generator=generator)
    labels[0, :3] = -100
    full = logits.clone().requires_grad_()
    expected = token_loss_sum(full, labels)
    (expected * 0.5).backward()
    each = -(-vocab // ranks)
    local = logits[..., mesh.get_local_rank() * each :][..., :each].clone().requires_grad_()
    cut = DTensor.from_local(local, mesh, [Shard(2)], run_check=False, shape=logits.shape, stride=logits.stride())
    found = token_loss_sum(cut, labels)
    (found * 0.5).backward()
    mine = full.grad[..., mesh.get_local_rank() * each :][..., :each]
    gap = float((local.grad - mine).abs().max()) if mine.numel() else 0.0
    return float((found - expected).abs() / expected), gap


def losses_of_parts() -> list[tuple[float, float]]:
    kinds = ((torch.float64, 9), (torch.float64, 8), (torch.float32, 9), (torch.bfloat16, 5))
    return [loss_of_parts(dtype, vocab) for dtype, vocab in kinds]


@pytest.mark.parametrize("world", [2, 4])
def test_the_loss_over_parts_of_the_vocabulary(world: int) -> None:
    for found in run_world(losses_of_parts, world):
        for (value, gradient), limit in zip(found, (1e-12, 1e-12, 1e-5, 1e-2), strict=True):
            assert value <= min(limit, 1e-5), found
            assert gradient <= limit, found


def refusals() -> list[str]:
    """What is only known once it runs: the length of a batch, labels among the inputs."""
    said = []
    dims = dims_for(parse_strategy("ddp+tp2"), 2)
    for options, inputs in (
        ({}, {"input_ids": torch.zeros(1, 7, dtype=torch.int64)}),
        (
            {"loss_parallel": True},
            {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "labels": torch.ones(1, 8).long()},
        ),
    ):
        session = start(Plan(strategy="ddp+tp2", dims=dims, **options))
        model = family("llama", layers=2)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        try:
            model(**inputs)
        except ModelError as error:
            said.append(str(error))
        session.close()
    return said


def test_what_a_batch_can_get_wrong_is_said() -> None:
    for length, labels in run_world(refusals, 2):
        assert "length 7 is not a multiple of 2; pad it to 8 or set parallel.sequence_parallel to false" in length
        assert "remove labels from its inputs or set parallel.loss_parallel to false" in labels
