"""Loops and losses that are not "outputs against labels", outputs that are no tensor, and tricks inside a forward."""

# ruff: noqa: E501 rows of a table

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from tests.world.zoo.case import (
    VOCAB,
    WIDTH,
    Net,
    changed,
    cross_entropy,
    floats,
    returned,
    squares,
    through,
    tokens,
    zoo,
)
from tests.world.zoo.shared import chain_blocks, language, logits
from tests.world.zoo.stacks import chain, encoder, ends, mlp, stack, text

Pair = collections.namedtuple("Pair", "first second")
NOISE = changed(floats(), lambda x, i: (x, torch.sin(x * (i + 1))))


@dataclasses.dataclass
class Answer:
    """A model's output."""

    hidden: torch.Tensor
    mean: torch.Tensor | None = None


for _name, _pack, _take in (
    ("a tuple", lambda x: (x, x.mean()), lambda out: out[0] + out[1]),
    ("a list", lambda x: [x, x + 1], lambda out: out[0] + out[1]),
    ("a dict", lambda x: {"x": x, "y": x * 2}, lambda out: out["x"] + out["y"]),
    ("a named tuple", lambda x: Pair(x, 2 * x), lambda out: out.first * out.second),
    ("a dataclass", lambda x: Answer(x, x.mean()), lambda out: out.hidden * out.mean),
    ("a ModelOutput", lambda x: BaseModelOutput(last_hidden_state=x), lambda out: out.last_hidden_state),
    ("nested", lambda x: {"a": [x, (x * 2, None)]}, lambda out: out["a"][0] + out["a"][1][0]),
):
    zoo(f"output: {_name}",
        lambda pack=_pack: Net(lambda m, x: pack(m.head(chain_blocks(m, x))), blocks=[mlp(), mlp()], head=nn.Linear(8, 8)),
        loss=through(_take))  # fmt: skip
    zoo(f"output of blocks: {_name}",
        lambda pack=_pack, take=_take: Net(lambda m, x: m.head(take(m.blocks[1](take(m.blocks[0](x))))),
        blocks=[Net(lambda b, x: pack(b.body(x)), body=mlp()) for _ in range(2)], head=nn.Linear(8, 8)))  # fmt: skip

zoo("loss returned from forward", lambda: Net(lambda m, x, y: (chain(m, x) - y).square().sum(), blocks=[mlp(), mlp()],
    head=nn.Linear(8, 8)), loss=returned)  # fmt: skip
zoo("dict of losses from forward", lambda: Net(lambda m, x, y: {"square": (chain(m, x) - y).square().sum(), "size": chain(
    m, x).abs().sum()}, blocks=[mlp(), mlp()]), loss=lambda *a: sum(returned(*a).values()))  # fmt: skip
zoo("inputs by keyword", lambda: Net(lambda m, *, x, scale: m.body(x) * scale, body=stack()),
    changed(floats(), lambda x, i: {"x": x, "scale": 2.0}))  # fmt: skip
zoo("blocks by keyword only", lambda: Net(lambda m, x: m.head(m.blocks[1](x=m.blocks[0](x=x))), blocks=[
    Net(lambda b, *, x: x + b.body(x), body=mlp()) for _ in range(2)], head=nn.Linear(8, 8)))  # fmt: skip
zoo("inputs in a nested dict", lambda: Net(lambda m, batch: m.body(batch["x"][0]), body=stack()),
    changed(floats(), lambda x, i: ({"x": [x]},)))  # fmt: skip
zoo("inputs in a dataclass", lambda: Net(lambda m, batch: m.body(batch.hidden), body=stack()),
    changed(floats(), lambda x, i: (Answer(x),)))  # fmt: skip


def twice(how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any, Any, Any], torch.Tensor]:
    """A loss over two calls of the model."""
    return lambda model, x, y: how(model(x), model(y))


def info_nce(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each row against the others of the micro batch."""
    return functional.cross_entropy(a @ b.mT, torch.arange(len(a)), reduction="sum")


def r_drop(model: Any, x: Any, y: Any) -> torch.Tensor:
    """Two passes over one input that should agree."""
    a, b = model(x), model(x * 1.01)
    return (a - y).square().sum() + (b - y).square().sum() + (a - b).square().sum()


def dpo(model: Any, ids: Any, labels: Any) -> torch.Tensor:
    """Chosen against rejected."""
    chosen, rejected = (
        model(x).log_softmax(-1).gather(-1, x.unsqueeze(-1)).sum((1, 2)) for x in (ids, labels)
    )  # fmt: skip
    return -functional.logsigmoid(chosen - rejected).sum()


zoo("siamese", stack, loss=twice(lambda a, b: (a - b).square().sum() + a.sum()))
zoo("siamese without blocks", mlp, loss=twice(lambda a, b: (a - b).square().sum() + a.sum()))
zoo("triplet", stack, loss=lambda m, x, y: functional.triplet_margin_loss(m(x), m(y), m(x + y), reduction="sum"))
zoo("contrastive", stack, loss=twice(info_nce))
zoo("contrastive, two towers", lambda: Net(lambda m, x, y: (m.image(x), m.sound(y)), image=mlp(), sound=mlp()),
    loss=lambda m, x, y: info_nce(*m(x, y)))  # fmt: skip
zoo("R-Drop", stack, loss=r_drop)
zoo("DPO", language, tokens(), dpo, count=len)
zoo("DPO on an encoder", lambda: text(encoder()), tokens(), dpo, count=len)


def gan_run(model: Net, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Both losses of one module; the generator's goes through a frozen copy of the discriminator's view."""
    fake = model.generator(noise)
    own = (
        functional.softplus(model.discriminator(fake.detach())).sum()
        - functional.softplus(model.discriminator(x)).sum()
    )
    return own + (fake - x).square().sum()


zoo("GAN in one module", lambda: Net(gan_run, generator=mlp(), discriminator=nn.Sequential(mlp(), nn.Linear(8, 1))),
    NOISE, lambda m, inputs, _: m(*inputs))  # fmt: skip
zoo("GAN, a turn for each micro batch", lambda: Net(lambda m, x, turn: (m.d(m.g(x)) if turn else m.d(m.g(x).detach())),
    g=mlp(), d=mlp()), changed(floats(), lambda x, i: (x, i % 2)))  # fmt: skip


def vae_run(model: Net, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean, variance, and a sample by the batch's own noise."""
    mean, log = model.encode(x).chunk(2, -1)
    kl = 0.5 * (mean.square() + log.exp() - 1 - log).sum()
    return model.decode(mean + noise[..., :4] * (0.5 * log).exp()), kl


zoo("VAE", lambda: Net(vae_run, encode=mlp(), decode=nn.Linear(4, WIDTH)), NOISE,
    lambda m, inputs, y: (lambda out, kl: (out - y).square().sum() + kl)(*m(*inputs)))  # fmt: skip
zoo("masked autoencoder", lambda: Net(lambda m, x, keep: m.decode(m.encode(x * (keep > 0))), encode=mlp(), decode=mlp()),
    NOISE)  # fmt: skip


def distilled(model: Net, x: torch.Tensor) -> torch.Tensor:
    """A student, and its distance to a teacher that does not learn."""
    with torch.no_grad():
        target = chain_blocks(model.teacher, x)
    return model.head(chain_blocks(model, x)) + 0.1 * (chain_blocks(model, x) - target).square().mean()


def mean_teacher(model: Net, x: torch.Tensor) -> torch.Tensor:
    """A teacher that follows the student in each forward of a step."""
    with torch.no_grad():
        target = model.teacher(x)
    return model.student(x) + 0.1 * (model.student(x) - target)


def copied() -> Net:
    """A student and a frozen copy."""
    student = stack()
    return Net(mean_teacher, student=student, teacher=copy.deepcopy(student).requires_grad_(False))


def teacher() -> Net:
    """A model with a frozen teacher inside."""
    return Net(distilled, blocks=[mlp(), mlp()], head=nn.Linear(8, 8),
        teacher=Net(chain, blocks=[mlp(), mlp()]).requires_grad_(False))  # fmt: skip


zoo("distillation, teacher's blocks called one by one", teacher)
zoo("frozen teacher as a submodule", copied)
zoo("EMA teacher in buffers", lambda: _with_ema())
zoo("stop-gradient targets", lambda: Net(lambda m, x: m.predict(m.body(x)) - m.body(x + 1).detach(), body=mlp(),
    predict=mlp()))  # fmt: skip
zoo("stop-gradient in the middle", lambda: Net(lambda m, x: m.head(m.body(x).detach()) + m.body(x), body=mlp(),
    head=mlp()))  # fmt: skip
zoo("a branch without gradients", lambda: Net(lambda m, x: m.a(x) + _without(m.b, x), a=mlp(), b=mlp()))
zoo("a branch without gradients in blocks", lambda: Net(chain, blocks=[
    Net(lambda m, x: m.a(x) + _without(m.b, x), a=mlp(), b=mlp()) for _ in range(2)]))  # fmt: skip


def _without(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(x)


class _Ema(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.body(x) * self.scratch


def _with_ema() -> nn.Module:
    return _Ema()


class Doubling(torch.autograd.Function):
    """A function of one's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grad


def recomputed(reentrant: bool) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    """Blocks under torch's own checkpoint."""

    def run(model: Net, ids: torch.Tensor) -> torch.Tensor:
        x = model.embed(ids)
        for block in model.blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        return model.head(x)

    return run


def hooked(model: Net, x: torch.Tensor) -> torch.Tensor:
    """The gradient of an activation is changed on its way."""
    x = model.blocks[0](x)
    x.register_hook(lambda grad: grad * 0.5)
    return model.head(model.blocks[1](x))


def energy(model: Net, x: torch.Tensor) -> torch.Tensor:
    """A force: the derivative of an energy, taken inside the forward."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        (force,) = torch.autograd.grad(model.body(x).square().sum(), x, create_graph=True)
    return force


def penalty(model: Any, x: Any, y: Any) -> torch.Tensor:
    """A gradient penalty in the loss."""
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - y).square().sum() + slope.square().sum()


def in_place(model: Net, x: torch.Tensor) -> torch.Tensor:
    """Adds into what is there."""
    x = model.blocks[1](model.blocks[0](x)).clone()
    x += 1
    x[:, 0] = 0
    return model.head(x).mul_(2)


def per_sample(model: Net, x: torch.Tensor) -> torch.Tensor:
    """One sample at a time, by vmap."""
    return torch.vmap(lambda row: torch.tanh(model.weight @ row))(x)


def functional_call(model: Net, x: torch.Tensor) -> torch.Tensor:
    """A submodule with changed weights."""
    weights = {name: p * 0.9 for name, p in model.body.named_parameters()}
    return torch.func.functional_call(model.body, weights, (x,))


def by_rank(model: Net, x: torch.Tensor) -> torch.Tensor:
    """What asks for the world, and does nothing wrong with it."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    return model.body(x) + 0.0 * world * rank


zoo(
    "autograd function of one's own",
    lambda: Net(lambda m, x: m.head(Doubling.apply(m.body(x))), body=mlp(), head=mlp()),
)
zoo("autograd function in blocks", lambda: Net(chain, blocks=[
    Net(lambda m, x: Doubling.apply(m.body(x)), body=mlp()) for _ in range(2)]))  # fmt: skip
for _reentrant in (False, True):
    zoo(f"own checkpoint, {'re' if _reentrant else 'non-re'}entrant", lambda reentrant=_reentrant: Net(
        recomputed(reentrant), **ends(), blocks=[mlp(), mlp()]), tokens(), cross_entropy)  # fmt: skip
zoo("hook on an activation", lambda: Net(hooked, blocks=[mlp(), mlp()], head=nn.Linear(8, 8)))
zoo("gradient of an energy in forward", lambda: Net(energy, body=mlp()))
zoo("gradient of an energy through blocks", lambda: Net(energy, body=stack()))
zoo("gradient penalty in the loss", mlp, loss=penalty)
zoo("gradient penalty through blocks", stack, loss=penalty)
zoo("in-place operations", lambda: Net(in_place, blocks=[mlp(), mlp()], head=nn.Linear(8, 8)))
zoo("vmap over samples", lambda: Net(per_sample, weight=nn.Parameter(torch.randn(8, 8))))
zoo("functional_call of a submodule", lambda: Net(functional_call, body=mlp()))
zoo("asks for the rank", lambda: Net(by_rank, body=stack()))
zoo("multiplies by the world's size", lambda: Net(lambda m, x: m.body(x) * (
    dist.get_world_size() if dist.is_initialized() else 1), body=stack()), asks="the model's own forward computes with "
    "the world's size, so that it is another model on another number of ranks; training cannot know that it was not "
    "meant, and `shardwise verify`, which compares with one process, names it")  # fmt: skip
zoo("weight penalty in the loss", stack, loss=lambda m, x, y: squares(m, x, y) + sum(
    p.square().sum() for p in m.parameters()))  # fmt: skip
zoo("head's weight in the loss", stack, loss=lambda m, x, y: squares(m, x, y) + m.head.weight.square().sum())
zoo("weight penalty in forward", lambda: Net(lambda m, x: m.body(x) + m.body[0].weight.square().sum(), body=mlp()))
zoo("sibling's weight in forward", lambda: Net(lambda m, x: chain(m, x) + m.blocks[0][0].weight.mean(), blocks=[
    mlp(), mlp()]))  # fmt: skip
zoo("regulariser over all weights in forward", lambda: Net(lambda m, x: chain(m, x) + sum(
    p.square().mean() for p in m.parameters()), blocks=[mlp(), mlp()]))  # fmt: skip


class Methods(nn.Module):
    """Forward goes by methods, lists and submodules of submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.groups = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(nn.ModuleList([mlp()]) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for group in self.groups:
            x = x + group[0](x)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(ids))


class Unregistered(nn.Module):
    """Layers in a plain list, which PyTorch does not see; only the head trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = [nn.Linear(WIDTH, WIDTH).double()], nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x).detach())


zoo("methods and nested lists", Methods, tokens(), cross_entropy)
zoo("layers in a plain list", Unregistered)
zoo("lazy modules", lambda: Net(lambda m, x: m.head(torch.tanh(m.up(x))), up=nn.LazyLinear(16), head=nn.LazyLinear(8)))
zoo("lazy module that was run", lambda: _run_once(nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(8))))


def _run_once(model: nn.Module) -> nn.Module:
    model(torch.zeros(1, WIDTH))
    return model


def lengths(generator: torch.Generator, index: int) -> tuple[Any, Any]:
    """Sequences of another length in each micro batch."""
    ids, labels = torch.randint(VOCAB, (2, 2, 3 + index % 3), generator=generator)
    return ids, labels


def holes(every: int) -> Callable[[torch.Generator, int], tuple[Any, Any]]:
    """Labels that are left out: some in each micro batch, and all in every so many."""

    def data(generator: torch.Generator, index: int) -> tuple[Any, Any]:
        ids, labels = torch.randint(VOCAB, (2, 2, 5), generator=generator)
        labels[:, : index % 4] = -100
        return ids, torch.full_like(labels, -100) if index % every == 1 else labels

    return data


zoo("lengths that differ", language, lengths, cross_entropy)
zoo("lengths that differ in an LSTM", lambda: text(nn.LSTM(8, 8, batch_first=True), 0), lengths, cross_entropy)
zoo("rows that differ", stack, lambda g, i: floats(rows=1 + i % 3)(g, i))
zoo("labels left out", language, holes(5), cross_entropy)
zoo("no label in every other micro batch", language, holes(2), cross_entropy)
zoo("ragged last window", stack, ragged=1)
zoo("ragged last window of tokens", language, tokens(), cross_entropy, ragged=1)
zoo(
    "AdamW", stack, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), limit=1e-6
)
zoo("two parameter groups", stack, optimizer=lambda model: torch.optim.SGD([
    {"params": list(model.blocks.parameters()), "lr": 0.01}, {"params": list(model.head.parameters()), "lr": 0.02}],
    lr=0.01, momentum=0.9))  # fmt: skip
zoo("logits by a functional head", lambda: Net(lambda m, ids: logits(m, ids) + functional.linear(
    m.embed(ids), m.embed.weight), **ends(), blocks=[mlp(), mlp()]), tokens(), cross_entropy)  # fmt: skip
