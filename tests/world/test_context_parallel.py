"""Context parallel: ranks that share the tokens of each sample compute the gradient of one process.

Gradients are compared, in float64, before and after clipping; labels are ragged, so that some chunks have none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardwise.errors import DataError, ModelError
from shardwise.model.read import read_model
from shardwise.parallel.compile import Compiled, compiled_of
from shardwise.parallel.context_parallel import attention as context
from shardwise.parallel.context_parallel import ulysses as context_exchange
from shardwise.parallel.context_parallel.attention import check_context, exchanged_calls, sequence_share
from shardwise.parallel.data_parallel.fsdp import gathered_ahead
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.evaluate import evaluate
from shardwise.train.loss import token_loss_sum
from tests.contract import CLIP, LENGTH, LIMIT, Still, Watch, decided_once, gradients_here, reference, worst
from tests.families import FAMILIES, VOCAB, configuration, family
from tests.kept import kept
from tests.turns import by_turns
from tests.worlds import run_each, run_world

LAYERS = 3


@dataclass(frozen=True)
class Case:
    """One plan on one model."""

    strategy: str
    model: str
    accum: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    layers: int = LAYERS

    def plan(self, world: int) -> Plan:
        dims = dims_for(parse_strategy(self.strategy), world)
        return Plan(strategy=self.strategy, dims=dims, grad_accum=self.accum, **self.options)


def ragged(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro batches of two samples: labels of every length (many end in the first chunk), each fifth without any."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for index in range(number):
        ids = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
        inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].clone()
        for row in range(2):
            labels[row, int(torch.randint(1, LENGTH + 1, (), generator=generator)) :] = -100
        if index % 5 == 1:
            labels[:] = -100
        if index % 5 == 2:
            labels[:, 3:] = -100
        batches.append((inputs, labels))
    return batches


def own_chunk_only(exchange: Any, name: str, query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> Any:
    """What a chunk computes if nothing is exchanged."""
    exchange.calls += 1
    return functional.scaled_dot_product_attention(query, key, value, mask, **options)


def mask_of_the_chunk(
    exchange: Any, name: str, query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any
) -> Any:
    """Keys and values of all, but each query under the causal mask of its place in the chunk."""
    exchange.calls += 1
    ranks = range(exchange.degree)
    keys, values = ([torch.empty_like(part).contiguous() for _ in ranks] for part in (key, value))
    for full, part in ((keys, key), (values, value)):
        dist.all_gather(full, part.detach().contiguous())
        full[dist.get_rank()] = part
    return functional.scaled_dot_product_attention(query, torch.cat(keys, 2), torch.cat(values, 2), None, **options)


def sabotaged(how: str) -> None:
    """Break what the comparison has to see broken."""
    if how == "own chunk only":
        context_exchange._attend = own_chunk_only  # type: ignore[assignment]
    elif how == "mask of the chunk":
        context_exchange._attend = mask_of_the_chunk  # type: ignore[assignment]
    elif how == "positions not told":
        plain = context._Positions.__init__
        context._Positions.__init__ = lambda self, index, ranks, layout: plain(self, 0, ranks, layout)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Outcome:
    """The worst relative error, the attentions that each step exchanged, and what else took effect."""

    error: float
    exchanged: list[int]
    compiled: Compiled | None
    ahead: tuple[int, int]


def train(case: Case, sabotage: str = "") -> Outcome:
    """A whole window and a partial one, each against one process."""
    session = start(case.plan(dist.get_world_size()), receipts=False)
    per_window = session.planner(nn.Module(), None, None).dims.dp * case.accum  # type: ignore[arg-type]
    batches = ragged(per_window + max(1, per_window // 2))
    watch = Watch(gradients_here)
    session.observers.append(watch)
    model = family(case.model, layers=case.layers, seed=0 if session.ranks.is_main else 7)
    sabotaged(sabotage)
    with nullcontext() if sabotage else decided_once(f"{case.model} of {case.layers} layers"):
        model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0), batches[0][0])
    errors, calls = [], [0]
    for index, step in enumerate(session.steps(batches)):
        for micro in step:
            step.backward(token_loss_sum(model(micro.inputs), micro.labels), count=micro.num_tokens)
        result = step.update(optimizer, clip_norm=CLIP)
        calls.append(exchanged_calls(session.module))
        window = batches[index * per_window : (index + 1) * per_window]
        raw, clipped, norm, loss = kept(
            ("context", case.model, case.layers, len(batches), index),
            lambda window=window: reference(family(case.model, layers=case.layers), window),
        )
        assert watch.raw.keys() == raw.keys(), watch.raw.keys() ^ raw.keys()
        errors += [worst(watch.raw, raw)[0], worst(watch.clipped, clipped)[0]]
        if step.tokens:
            errors += [abs(float(result.grad_norm or 0.0) - norm) / norm, abs(result.loss - loss) / abs(loss)]
    exchanged = [after - before for before, after in itertools.pairwise(calls)]
    outcome = Outcome(max(errors), exchanged, compiled_of(session.module), gathered_ahead(session.module))
    session.close()
    return outcome


SHARDED = ("ddp+cp2", "zero1+cp2", "zero2+cp2", "fsdp+cp2")
CASES: dict[str, tuple[int, list[Case]]] = {
    "data parallel": (2, [Case(strategy, model) for model in FAMILIES for strategy in SHARDED]),
    "recompute exchanges again": (
        2,
        [
            Case(*one, options={"recompute": recompute})
            for recompute in ("full", "selective")
            for one in (("ddp+cp2", "llama", 2), ("fsdp+cp2", "own", 3))
        ],
    ),
    "beside data parallel": (
        4,
        [
            Case(strategy, model, accum)
            for strategy in ("ddp+cp2", "fsdp+cp2", "hsdp+cp2")
            for model, accum in (("qwen3", 3), ("own", 1), ("gpt2", 2))
        ],
    ),
    "fewer key heads than ranks are repeated": (
        4,
        [
            Case(f"{base}+cp4", model, accum)
            for base in ("ddp", "fsdp")
            for model, accum in (("llama", 2), ("gemma", 1))
        ],
    ),
}


@pytest.mark.turns(1)
@pytest.mark.parametrize("world", [2, 4])
def test_gradient_is_that_of_one_process(world: int) -> None:
    cases = [case for ranks, some in CASES.values() for case in some if ranks == world]
    cases = by_turns(cases, 3 if world == 2 else 2, f"{world} ranks")
    wrong = []
    for case, outcomes in zip(cases, run_each(train, world, [(case,) for case in cases], timeout_s=300), strict=True):
        dp = case.plan(world).dims.dp
        part = -(-max(1, dp * case.accum // 2) // dp)  # micro batches of a rank in the partial window
        each = LAYERS * (1 if case.options.get("recompute", "none") == "none" else 2)
        for outcome in outcomes:
            if not outcome.error <= LIMIT or outcome.exchanged != [each * case.accum, each * part]:
                wrong.append((str(case), outcome))
    assert not wrong, wrong


@pytest.mark.parametrize("how", ["own chunk only", "mask of the chunk", "positions not told"])
def test_the_comparison_sees_what_is_wrong(how: str) -> None:
    for outcome in run_world(train, 2, Case("ddp+cp2", "own"), how):
        assert outcome.error > 1e-3, outcome


class Corpus:
    """Seven samples, with labels of every length."""

    def __len__(self) -> int:
        return 7

    def batch(self, ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [row for pair in ragged(4) for row in zip(*pair, strict=True)]
        rows.append((torch.zeros(LENGTH, dtype=torch.int64), torch.full((LENGTH,), -100)))  # the empty sample
        inputs, labels = zip(*(rows[index] for index in ids), strict=True)
        return torch.stack(inputs), torch.stack(labels)

    def label_bytes(self, num_samples: int | None) -> float:
        return 100.0


def held_out(strategy: str, model: str) -> float | None:
    plan = Case(strategy, model).plan(dist.get_world_size())
    session = start(plan, receipts=False)
    module = family(model, layers=2)
    session.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
    bits = evaluate(session, Corpus(), 0, 2).bits_per_byte
    session.close()
    return bits


@pytest.mark.turns(2)
@pytest.mark.parametrize(("strategy", "model"), [("ddp+cp2", "gpt2"), ("fsdp+cp2", "llama")])
def test_evaluation_is_that_of_one_process(strategy: str, model: str) -> None:
    inputs, labels = Corpus().batch(np.arange(7))
    expected = token_loss_sum(family(model, layers=2)(inputs), labels).item() / math.log(2) / 100
    for bits in run_world(held_out, 2, strategy, model):
        assert bits is not None and abs(bits - expected) <= LIMIT * expected


class Odd(nn.Module):
    """A decoder whose blocks do something more to the tokens: ``mix``; ``after`` is done to what comes out."""

    def __init__(self, mix: Any = None, after: Any = None, attend: Any = None, *, told: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.places = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(OddBlock(mix, attend) for _ in range(2))
        self.after = after
        self.told = told

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None or not self.told:
            position_ids = torch.arange(ids.shape[1])[None]
        x = self.embed(ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return x if self.after is None else self.after(x)


class OddBlock(nn.Module):
    def __init__(self, mix: Any, attend: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.mixer = mix() if isinstance(mix, type) else mix
        self.attend = attend or functional.scaled_dot_product_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        x = x + self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x if self.mixer is None else self.mixer(x)


class Convolution(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.GRU):
    def __init__(self) -> None:
        super().__init__(32, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Heads(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Batch(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(2, 3) / 8**0.5, dim=-1) @ v


def merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    parts = (part.flatten(0, 1) for part in (q, k, v))
    return functional.scaled_dot_product_attention(*parts, is_causal=is_causal).view_as(q)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return functional.scaled_dot_product_attention(q, k, v, mask)


def fewer_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4])


def refusal(module: nn.Module, strategy: str = "ddp+cp2", sample: Any = None) -> str:
    """What `check_context` says, as one text."""
    dims = parse_strategy(strategy)
    plan = Plan(strategy=strategy, dims=dims_for(dims, dims.tp * dims.pp * dims.cp))
    with pytest.raises(ModelError) as caught:
        check_context(module, read_model(module), plan, sample)
    return str(caught.value)


MIXERS: dict[str, Any] = {
    "convolution": Convolution,
    "cumsum": lambda x: x.cumsum(1),
    "roll": lambda x: x + x.roll(1, 1),
    "flip": lambda x: x + x.flip(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "mean of all": lambda x: x - x.mean(),
    "var": lambda x: x / (1 + x.var(dim=(1, 2), keepdim=True)),
    "shift": lambda x: x + functional.pad(x[:, :-1], (0, 0, 1, 0)),
    "first token": lambda x: x + x[:, :1],
    "softmax over tokens": lambda x: x.softmax(1),
    "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "matmul over tokens": lambda x: x @ (x.transpose(1, 2) @ x),
    "einsum over tokens": lambda x: torch.einsum("bld,blk->bdk", x, x).mean() + x,
    "pool": lambda x: functional.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "layer norm over tokens": lambda x: functional.layer_norm(x.transpose(1, 2), x.shape[1:2]).transpose(1, 2),
    "group norm": lambda x: functional.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "batch norm": Batch,
    "recurrent": Recurrent,
    "nn.MultiheadAttention": Heads,
    "sort": lambda x: x.sort(1).values,
    "indexing": lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "gather": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.int64)),
    "unbind": lambda x: torch.stack(list(reversed(x.unbind(1))), 1),
}


@pytest.mark.parametrize("mix", MIXERS.values(), ids=MIXERS.keys())
def test_what_mixes_tokens_is_refused(mix: Any) -> None:
    text = refusal(Odd(mix))
    assert "mixes tokens outside of attention" in text and "'blocks.0" in text and "without +cp" in text


TOKEN_WISE: dict[str, Any] = {
    "mlp": lambda x: functional.gelu(x @ torch.ones(32, 32)),
    "layer norm": lambda x: functional.layer_norm(x, (32,)),
    "rms norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "softmax over width": lambda x: x.softmax(-1),
    "pointwise convolution": lambda x: functional.conv1d(x.transpose(1, 2), torch.ones(32, 32, 1)).transpose(1, 2),
    "halves": lambda x: torch.cat((-x[..., 16:], x[..., :16]), dim=-1),
    "dropout": lambda x: functional.dropout(x, 0.1),
    "flattened": lambda x: (x.flatten(0, 1) @ torch.ones(32, 32)).view_as(x),
}


@pytest.mark.parametrize("act", TOKEN_WISE.values(), ids=TOKEN_WISE.keys())
def test_what_leaves_tokens_alone_is_not_refused(act: Any) -> None:
    module = Odd(act)
    plan = Plan(strategy="ddp+cp2", dims=dims_for(parse_strategy("ddp+cp2"), 2))
    assert check_context(module, read_model(module), plan).sites == ("blocks.0", "blocks.1")


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "by hand": (lambda: Odd(attend=by_hand), "never calls scaled_dot_product_attention"),
    "merged heads": (lambda: Odd(attend=merged), "needs [samples, heads, length, width]"),
    "mask": (lambda: Odd(attend=masked), "'blocks.0' calls attention with an explicit mask [16, 16]"),
    "fewer keys": (lambda: Odd(attend=fewer_keys), "as many keys as queries"),
    "pooled": (lambda: Odd(after=lambda x: x[:, 0]), "the model returns [1, 32] where [samples, length, ...]"),
    "loss inside": (lambda: Odd(after=lambda x: x.square().mean()), "the model returns []"),
    "not told": (lambda: Odd(told=False), "takes position_ids and does not use them"),
    "no argument": (lambda: nn.Sequential(nn.Embedding(VOCAB, 32), *(OddBlock(None, None) for _ in range(2))),
                    "forward has no argument position_ids"),
    "does not run": (lambda: Odd(lambda x: x.view(1, 4, -1)), "cannot be traced under fake tensors"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(build: Callable[[], nn.Module], message: str) -> None:
    assert message in refusal(build())


def transformers_model(name: str, **changes: Any) -> nn.Module:
    import transformers

    config = configuration(name, 2)
    for key, value in changes.items():
        setattr(config, key, value)
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return module


def test_a_window_shorter_than_the_sequence_is_refused() -> None:
    """Each chunk is shorter than the window: without a look at the whole length nothing would be noticed."""
    module = transformers_model("mistral", sliding_window=12)
    assert "explicit mask" in refusal(module, sample=torch.zeros(2, 16, dtype=torch.int64))
    plan = Plan(strategy="ddp+cp2", dims=dims_for(parse_strategy("ddp+cp2"), 2))
    assert check_context(module, read_model(module), plan, torch.zeros(2, 8, dtype=torch.int64)).window == 12


def longer_than_looked_at() -> str:
    session = start(Case("ddp+cp2", "", 1).plan(2), receipts=False)
    model = transformers_model("mistral", sliding_window=12)
    sample = torch.zeros(2, 8, dtype=torch.int64)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), sample)
    try:
        for step in session.steps(ragged(1)):
            step.run(model, token_loss_sum)
    except ModelError as error:
        return str(error)
    return ""


def test_a_sequence_that_outgrows_the_window_is_refused() -> None:
    for text in run_world(longer_than_looked_at, 2):
        assert "window of 12 tokens" in text and "16" in text


def padded() -> str:
    session = start(Case("fsdp+cp2", "", 1).plan(2), receipts=False)
    model = family("llama", layers=2)
    batches = [
        {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < 5).long().expand(2, -1), "labels": labels}
        for ids, labels in ragged(1)
    ]
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), batches[0])
    try:
        for step in session.steps(batches):
            step.run(model, token_loss_sum)
    except ModelError as error:
        return str(error)
    return ""


def test_padding_masks_are_refused_when_they_come() -> None:
    for text in run_world(padded, 2):
        assert "explicit mask" in text and "leave attention_mask" in text


def test_eager_attention_is_refused() -> None:
    text = refusal(transformers_model("llama", _attn_implementation="eager"))
    assert "'model.layers.0' and 1 more never calls scaled_dot_product_attention" in text


def test_degrees_that_work_are_named() -> None:
    assert "has 4 heads, which do not divide by cp 8: a head is computed on one rank; use cp 2 or 4" in refusal(
        family("llama"), "ddp+cp8"
    )
    assert "has 2 heads (4 over tp 2), which do not divide by cp 4" in refusal(family("llama"), "fsdp+tp2+cp4")


def test_everything_in_the_way_is_said_at_once() -> None:
    text = refusal(Odd(Convolution, attend=by_hand, after=lambda x: x[:, 0], told=False), "ddp+cp8")
    assert len(text.splitlines()) >= 4


def test_looking_changes_nothing() -> None:
    plan = Plan(strategy="ddp+cp2", dims=dims_for(parse_strategy("ddp+cp2"), 2))
    with torch.device("meta"):
        module = family("gpt2")
    before = {name: (id(p), p.device.type) for name, p in module.named_parameters()}
    state = torch.get_rng_state()
    assert len(check_context(module, read_model(module), plan).sites) == 4
    assert before == {name: (id(p), p.device.type) for name, p in module.named_parameters()}
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in module.modules())
    assert torch.equal(state, torch.get_rng_state())


def plan_of(strategy: str, world: int) -> Plan:
    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), world))


def test_tokens_are_cut_and_the_rest_is_left() -> None:
    plan = plan_of("ddp+cp2", 2)
    inputs = {"ids": torch.arange(24).view(3, 8), "position_ids": torch.arange(8)[None], "scale": torch.ones(3)}
    labels = torch.arange(24).view(3, 8)
    parts = [sequence_share((inputs, labels), plan, at) for at in range(2)]
    for at, (share, label) in enumerate(parts):
        assert torch.equal(label, labels[:, 4 * at : 4 * at + 4]) and label.is_contiguous()
        assert torch.equal(share["ids"], inputs["ids"][:, 4 * at : 4 * at + 4])
        assert torch.equal(share["position_ids"], inputs["position_ids"][:, 4 * at : 4 * at + 4])
        assert torch.equal(share["scale"], inputs["scale"])


def test_lengths_and_labels_that_do_not_divide_are_refused() -> None:
    ids = torch.zeros(2, 510, dtype=torch.int64)
    with pytest.raises(
        DataError,
        match=r"samples of 510 tokens, which is not a multiple of cp 4; make them 508 or "
        r"512",
    ):
        sequence_share((ids, ids), plan_of("ddp+cp4", 4), 0)
    with pytest.raises(DataError, match=r"cp 2 × tp 2 \(sequence parallel\) = 4; make them 508 or 512"):
        sequence_share((ids, ids), plan_of("fsdp+tp2+cp2", 4), 0)
    with pytest.raises(DataError, match="has none"):
        sequence_share((torch.zeros(3), torch.zeros(3)), plan_of("ddp+cp2", 2), 0)
    with pytest.raises(DataError, match=r"count 2 loss terms in full and 2 \+ 2 in parts"):
        sequence_share((ids, torch.zeros(2)), plan_of("ddp+cp2", 2), 0, len)


def test_a_model_that_would_cache_is_looked_at_as_it_trains() -> None:
    module = transformers_model("llama", use_cache=True)
    assert len(check_context(module, read_model(module), plan_of("fsdp+cp2", 2)).sites) == 2


def labels_inside() -> str:
    session = start(plan_of("ddp+cp2", 2), receipts=False)
    model = family("llama", layers=2)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    try:
        for step in session.steps(ragged(2)):
            for micro in step:
                model(micro.inputs, labels=micro.labels)
    except ModelError as error:
        return str(error)
    return ""


def test_a_loss_inside_of_the_model_is_refused() -> None:
    for text in run_world(labels_inside, 2):
        assert "remove labels from its inputs" in text


def narrow() -> tuple[float, int]:
    session = start(plan_of("ddp+cp2", 2).model_copy(update={"precision": "bf16"}), receipts=False)
    model = family("qwen3", layers=2, dtype=torch.float32)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    watch = Watch()
    session.observers.append(watch)
    for step in session.steps(ragged(1)):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    raw, *_ = reference(family("qwen3", layers=2), ragged(1))
    names = [n for n in raw if float(raw[n].norm()) > 1e-3]
    errors = [float((watch.raw[n].double() - raw[n]).norm() / raw[n].norm()) for n in names]
    return max(errors), len(names)


def test_bf16_runs_and_is_near() -> None:
    for error, number in run_world(narrow, 2):
        assert 1e-5 < error < 0.1 and number > 10
