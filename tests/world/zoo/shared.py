"""Weights that are used twice, frozen, adapted, reparametrised, odd in shape or kind."""

# ruff: noqa: E501 rows of a table

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.world.zoo.case import VOCAB, WIDTH, Net, cross_entropy, tokens, zoo
from tests.world.zoo.stacks import chain, ends, mlp, stack


def logits(model: Net, ids: torch.Tensor) -> torch.Tensor:
    """Blocks between embedding and head."""
    return model.head(chain_blocks(model, model.embed(ids)))


def chain_blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Residual blocks alone."""
    for block in model.blocks:
        x = x + block(x)
    return x


def language(**more: nn.Module) -> Net:
    """Embedding, two blocks and a head."""
    return Net(logits, **ends(), blocks=[mlp(), mlp()], **more)


def tied(*pairs: tuple[str, str], make: Callable[[], nn.Module] = language) -> nn.Module:
    """A model in which the first module's weight of each pair is the second's."""
    model = make()
    for one, other in pairs:
        model.get_submodule(one).weight = model.get_submodule(other).weight
    return model


def frozen(trains: Callable[[str], bool]) -> nn.Module:
    """A language model of which only some names train."""
    model = language()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    return model


for _name, _pairs in {
    "head and embedding": [("head", "embed")],
    "two linear layers of two blocks": [("blocks.0.0", "blocks.1.0")],
    "two linear layers of one block": [("blocks.0.0", "blocks.0.0"), ("blocks.1.2", "blocks.0.2")],
}.items():
    zoo(f"tied: {_name}", lambda pairs=_pairs: tied(*pairs), tokens(), cross_entropy)
zoo("tied: three ways", lambda: Net(
    lambda m, ids: m.head(chain_blocks(m, m.embed(ids) + m.other(ids.flip(1)))), **_three(), blocks=[mlp(), mlp()]),
    tokens(), cross_entropy)  # fmt: skip
zoo("tied: transposed", lambda: Net(lambda m, x: torch.tanh(m.up(x)) @ m.up.weight, up=nn.Linear(WIDTH, 16)))
zoo("tied: functional head", lambda: Net(lambda m, ids: chain_blocks(m, m.embed(ids)) @ m.embed.weight.mT,
    embed=nn.Embedding(VOCAB, WIDTH), blocks=[mlp(), mlp()]), tokens(), cross_entropy)  # fmt: skip


def _three() -> dict[str, nn.Module]:
    embed, other, head = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    other.weight = head.weight = embed.weight
    return {"embed": embed, "other": other, "head": head}


def same(depth: int) -> list[nn.Module]:
    """One block several times."""
    return [mlp()] * depth


def loop(times: int) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    """All blocks again and again."""

    def run(model: Net, x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            x = chain_blocks(model, x)
        return model.head(x)

    return run


zoo("one block three times in the list", lambda: Net(chain, blocks=same(3), head=nn.Linear(8, 8)))
zoo("one block between others", lambda: Net(chain, blocks=[*same(2), mlp(), mlp()], head=nn.Linear(8, 8)))
zoo("ALBERT-like", lambda: Net(lambda m, x: m.head(loop_one(m, x)), block=mlp(), head=nn.Linear(8, 8)))
for _times in (2, 3):
    zoo(f"universal transformer, {_times} rounds",
        lambda times=_times: Net(loop(times), blocks=[mlp(), mlp()], head=nn.Linear(8, 8)))  # fmt: skip
zoo("universal transformer after an embedding", lambda: Net(lambda m, ids: loop(2)(m, m.embed(ids)), **ends(),
    blocks=[mlp(), mlp()]), tokens(), cross_entropy)  # fmt: skip


def loop_one(model: Net, x: torch.Tensor) -> torch.Tensor:
    """One block four times."""
    for _ in range(4):
        x = x + model.block(x)
    return x


for _name, _trains in {
    "embedding": lambda name: "embed" not in name,
    "first block": lambda name: "blocks.0" not in name,
    "all but the head": lambda name: "head" in name,
    "all but the biases": lambda name: "bias" in name,
    "all but the embedding": lambda name: "embed" in name,
    "all but the middle": lambda name: "blocks.1" in name,
}.items():
    zoo(f"frozen: {_name}", lambda trains=_trains: frozen(trains), tokens(), cross_entropy)


class Adapted(nn.Module):
    """A frozen linear layer, and a product of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.mT @ self.up.mT


zoo("low-rank adapters by hand", lambda: Net(chain, blocks=[nn.Sequential(Adapted(), nn.Tanh()) for _ in range(3)],
    head=nn.Linear(8, 8)))  # fmt: skip
zoo("low-rank adapters, head frozen", lambda: Net(chain, blocks=[nn.Sequential(Adapted()) for _ in range(3)],
    head=nn.Linear(8, 8).requires_grad_(False)))  # fmt: skip
zoo("hypernetwork", lambda: Net(lambda m, x: torch.einsum("bi,bio->bo", x, m.make(torch.tanh(x)).view(-1, 8, 8)),
    make=nn.Linear(WIDTH, 64)))  # fmt: skip
zoo("hypernetwork of a shared code", lambda: Net(lambda m, x: x @ m.make(m.code).view(8, 8), make=nn.Linear(4, 64),
    code=nn.Parameter(torch.ones(4))))  # fmt: skip


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


for _name, _wrap in {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "symmetric": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
}.items():
    zoo(f"parametrized: {_name}", lambda wrap=_wrap: Net(lambda m, x: m.head(torch.tanh(m.first(x))),
        first=wrap(nn.Linear(8, 8)), head=nn.Linear(8, 8)), counts=_name == "spectral norm")  # fmt: skip
    zoo(f"parametrized in blocks: {_name}", lambda wrap=_wrap: Net(chain, blocks=[
        nn.Sequential(wrap(nn.Linear(8, 8)), nn.Tanh()) for _ in range(2)], head=nn.Linear(8, 8)),
        counts=_name == "spectral norm")  # fmt: skip

for _name, _factor in {
    "0-d": lambda: nn.Parameter(torch.tensor(1.5)),
    "one element": lambda: nn.Parameter(torch.tensor([1.5])),
    "row": lambda: nn.Parameter(torch.full((1, WIDTH), 1.5)),
}.items():
    zoo(f"parameter: {_name}", lambda factor=_factor: Net(lambda m, x: m.body(x) * m.factor, body=mlp(),
        factor=factor()))  # fmt: skip
zoo("parameter: 0-d in blocks", lambda: Net(chain, blocks=[
    Net(lambda m, x: m.body(x) * m.factor, body=mlp(), factor=nn.Parameter(torch.tensor(0.5))) for _ in range(2)]))  # fmt: skip
zoo("parameter: one element in blocks", lambda: Net(chain, blocks=[
    Net(lambda m, x: m.body(x) * m.factor, body=mlp(), factor=nn.Parameter(torch.ones(1))) for _ in range(2)]))  # fmt: skip
zoo("parameter: empty", lambda: Net(lambda m, x: m.body(x) + m.none.sum(), body=mlp(), none=nn.Parameter(
    torch.empty(0, 4))))  # fmt: skip
zoo("parameter: 4-D of ones", lambda: Net(lambda m, x: m.body(x) + m.bias.view(8), body=mlp(),
    bias=nn.Parameter(torch.zeros(1, 8, 1, 1))))  # fmt: skip
zoo("ParameterList", lambda: Net(lambda m, x: sum(torch.tanh(x @ w) for w in m.weights), weights=nn.ParameterList(
    torch.randn(8, 8) for _ in range(3))))  # fmt: skip
zoo("ParameterDict", lambda: Net(lambda m, x: x @ m.weights["a"] * m.weights["b"], weights=nn.ParameterDict(
    {"a": torch.randn(8, 8), "b": torch.ones(8)})))  # fmt: skip
zoo("unused layer", lambda: stack(spare=nn.Linear(3, 3)))
zoo("unused block", lambda: Net(lambda m, x: m.blocks[2](m.blocks[0](x)), blocks=[mlp() for _ in range(3)]))
zoo("unused parameter in blocks", lambda: Net(chain, blocks=[
    Net(lambda m, x: m.body(x), body=mlp(), spare=nn.Linear(3, 3)) for _ in range(2)]))  # fmt: skip
zoo("complex weights", lambda: Net(lambda m, x: (x.to(torch.complex128) @ m.weight).abs() + m.body(x), body=mlp().double(),
    weight=nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))), dtype=None)  # fmt: skip
zoo("mixed dtypes", lambda: Net(lambda m, x: m.head(m.body(x.float()).double()), body=mlp(), head=nn.Linear(8, 8).double()),
    dtype=None, limit=1e-4)  # fmt: skip
zoo("mixed dtypes, block by block", lambda: Net(lambda m, x: m.blocks[1](m.blocks[0](x.float()).double()),
    blocks=[mlp(), mlp().double()]), dtype=None, limit=1e-4)  # fmt: skip
zoo("fp32", lambda: Net(lambda m, x: m.body(x.float()), body=stack()), dtype=None, limit=1e-4)

BAGS = tokens(4)
for _name, _embedding in {
    "padding index": lambda: nn.Embedding(VOCAB, WIDTH, padding_idx=0),
    "scaled by frequency": lambda: nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True),
    "max norm": lambda: nn.Embedding(VOCAB, WIDTH, max_norm=1.0),
    "sparse": lambda: nn.Embedding(VOCAB, WIDTH, sparse=True),
    "of one row": lambda: nn.Sequential(nn.Embedding(VOCAB, 1), nn.Linear(1, WIDTH)),
}.items():
    zoo(f"embedding: {_name}", lambda embedding=_embedding: Net(logits, embed=embedding(), head=nn.Linear(WIDTH, VOCAB),
        blocks=[mlp(), mlp()]), tokens(), cross_entropy, optimizer=lambda model: torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9))  # fmt: skip
for _mode in ("sum", "mean", "max"):
    zoo(f"EmbeddingBag: {_mode}", lambda mode=_mode: Net(lambda m, ids: m.head(m.bag(ids)).unsqueeze(1).expand(-1, 4, -1),
        bag=nn.EmbeddingBag(VOCAB, WIDTH, mode=mode), head=nn.Linear(WIDTH, VOCAB)), BAGS, cross_entropy)  # fmt: skip
zoo("adaptive softmax", lambda: Net(lambda m, x, y: -m.soft(m.body(x), y)[0].sum(), body=mlp(),
    soft=nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, [3, 7])), lambda g, i: (
    torch.randn(4, WIDTH, generator=g, dtype=torch.float64), torch.randint(VOCAB, (4,), generator=g)),
    lambda model, x, y: model(x, y))  # fmt: skip
