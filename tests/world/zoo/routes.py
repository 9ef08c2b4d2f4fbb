"""Models whose samples decide what runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.world.zoo.case import WIDTH, Net, changed, floats, routed, through, zoo
from tests.world.zoo.stacks import mlp, stack

ROUTED = routed(floats())
HOLES = changed(floats(4, WIDTH, out=(4, WIDTH)), lambda x, i: x + 3.0 * (i % 3 - 1))


def top(k: int, always: bool = False) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    """Each token to its ``k`` best experts, which run only where they have tokens (``always``: on none, too)."""

    def run(model: Net, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = torch.softmax(model.gate(flat), -1).topk(k)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(_listed(model.experts)):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            if always or len(row):
                out = out.index_add(0, row, expert(flat[row]) * weights[row, slot, None])
        if hasattr(model, "shared"):
            out = out + model.shared(flat)
        return x + out.view_as(x)

    return run


def _listed(experts: Any) -> list[nn.Module]:
    return list(experts.values() if isinstance(experts, nn.ModuleDict) else experts)


def moe(run: Callable[..., Any], experts: Any = None, **more: nn.Module) -> Net:
    """A layer of experts."""
    return Net(run, gate=nn.Linear(WIDTH, 3), experts=experts or [mlp() for _ in range(3)], **more)


def layers(make: Callable[[], nn.Module], depth: int = 2) -> Net:
    """Layers one after the other, and a head."""
    return Net(_layers, blocks=[make() for _ in range(depth)], head=nn.Linear(WIDTH, WIDTH))


def _layers(model: Net, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return model.head(x)


def soft(model: Net, x: torch.Tensor) -> torch.Tensor:
    """All experts, weighted."""
    gates = torch.softmax(model.gate(x), -1)
    return x + sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(model.experts))


def batched(model: Net, x: torch.Tensor) -> torch.Tensor:
    """Experts as one 3-D parameter; each token takes one."""
    chosen = model.gate(x).softmax(-1)
    best, at = chosen.max(-1)
    found = torch.einsum("btd,btdf->btf", x, model.up[at])
    return x + torch.einsum("btf,btfd->btd", torch.tanh(found), model.down[at]) * best.unsqueeze(-1)


def expert_choice(model: Net, x: torch.Tensor) -> torch.Tensor:
    """Each expert takes its two best tokens."""
    flat = x.flatten(0, -2)
    gates, out = torch.softmax(model.gate(flat), -1), torch.zeros_like(flat)
    for number, expert in enumerate(model.experts):
        weight, row = gates[:, number].topk(2)
        out = out.index_add(0, row, expert(flat[row]) * weight.unsqueeze(-1))
    return x + out.view_as(x)


def with_auxiliary(model: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and what keeps a router's load even."""
    balance = x.new_zeros(())
    for block in model.blocks:
        gates = torch.softmax(block.gate(x), -1)
        balance = balance + gates.square().sum()
        x = block(x)
    return model.head(x), balance


def auxiliary_loss(model: Any, inputs: Any, labels: Any) -> torch.Tensor:
    """Squares, and a bit of the second output."""
    out, balance = model(inputs)
    return (out - labels).square().sum() + 0.1 * balance


def three_d() -> dict[str, nn.Parameter]:
    """Three experts in two parameters."""
    return {"up": nn.Parameter(torch.randn(3, 8, 16)), "down": nn.Parameter(torch.randn(3, 16, 8))}


for _name, _make in {
    "top-1": lambda: moe(top(1)),
    "top-2": lambda: moe(top(2)),
    "top-1, empty experts run": lambda: moe(top(1, always=True)),
    "top-1 with a shared expert": lambda: moe(top(1), shared=mlp()),
    "top-1 in a ModuleDict": lambda: moe(top(1), nn.ModuleDict({name: mlp() for name in "abc"})),
    "top-1, uneven experts": lambda: moe(top(1), [mlp(inner=inner) for inner in (4, 8, 12)]),
    "top-1, linear experts": lambda: moe(top(1), [nn.Linear(8, 8) for _ in range(3)]),
    "soft": lambda: moe(soft),
    "batched 3-D experts": lambda: Net(batched, gate=nn.Linear(WIDTH, 3), **three_d()),
    "expert choice": lambda: moe(expert_choice),
}.items():
    zoo(f"mixture of experts: {_name}", lambda make=_make: layers(make), HOLES)
zoo("mixture of experts: one layer", lambda: moe(top(1)), HOLES)
zoo("mixture of experts: auxiliary loss", lambda: Net(with_auxiliary, blocks=[moe(top(1)) for _ in range(2)],
    head=nn.Linear(WIDTH, WIDTH)), HOLES, auxiliary_loss)  # fmt: skip


def by_route(model: Net, x: torch.Tensor, route: int) -> torch.Tensor:
    """One of two branches, or both."""
    return model.head(x + sum(b(x) for i, b in enumerate(model.branches) if route in (i, 2)))


def early_exit(model: Net, x: torch.Tensor, route: int) -> torch.Tensor:
    """Fewer blocks for some samples."""
    for number, block in enumerate(model.blocks):
        if route != 2 and number > route:
            break
        x = x + block(x)
    return model.head(x)


def layer_drop(model: Net, x: torch.Tensor, route: int) -> torch.Tensor:
    """One block less for some samples."""
    for number, block in enumerate(model.blocks):
        if number != route:
            x = x + block(x)
    return model.head(x)


def reversed_order(model: Net, x: torch.Tensor, route: int) -> torch.Tensor:
    """Blocks in an order that samples decide."""
    for block in list(model.blocks)[:: -1 if route == 1 else 1]:
        x = x + block(x)
    return model.head(x)


def heads(model: Net, x: torch.Tensor, route: int) -> torch.Tensor:
    """A task's own head."""
    x = model.body(x)
    return model.heads[route](x) if route < 2 else model.heads[0](x) + model.heads[1](x)


def adaptive(model: Net, x: torch.Tensor, route: int) -> torch.Tensor:
    """One block as often as samples ask for."""
    for _ in range(route + 1):
        x = x + model.blocks[0](x)
    return model.head(model.blocks[1](x))


zoo("branches", lambda: Net(by_route, branches=[mlp(), mlp()], head=nn.Linear(8, 8)), ROUTED)
zoo("uneven branches", lambda: Net(by_route, branches=[mlp(inner=4), mlp(inner=12)], head=nn.Linear(8, 8)), ROUTED)
zoo("linear branches", lambda: Net(by_route, branches=[nn.Linear(8, 8), nn.Linear(8, 8)], head=nn.Linear(8, 8)), ROUTED)
zoo("branches by name", lambda: Net(
    lambda m, x, route: m.head(x + sum(m.branches[k](x) for i, k in enumerate(("image", "sound")) if route in (i, 2))),
    branches=nn.ModuleDict({"image": mlp(), "sound": mlp()}), head=nn.Linear(8, 8)), ROUTED)  # fmt: skip
zoo(
    "branches without a common part",
    lambda: Net(
        lambda m, x, route: sum(b(x) for i, b in enumerate(m.branches) if route in (i, 2)), branches=[mlp(), mlp()]
    ),
    ROUTED,
)
for _name, _run in (("early exit", early_exit), ("layer drop", layer_drop), ("adaptive depth", adaptive)):
    zoo(_name, lambda run=_run: Net(run, blocks=[mlp() for _ in range(3)], head=nn.Linear(8, 8)), ROUTED)
zoo("order of blocks by sample",
    lambda: Net(reversed_order, blocks=[mlp() for _ in range(3)], head=nn.Linear(8, 8)), ROUTED,
    decides=True)  # fmt: skip
zoo("adaptive depth, alike on all ranks", lambda: Net(adaptive, blocks=[mlp() for _ in range(2)],
    head=nn.Linear(8, 8)), changed(floats(), lambda x, i: (x, 1)))  # fmt: skip
zoo("heads of tasks", lambda: Net(heads, body=mlp(), heads=[nn.Linear(8, 8), nn.Linear(8, 8)]), ROUTED)
zoo("heads of tasks after blocks", lambda: Net(heads, body=stack(), heads=[nn.Linear(8, 8), nn.Linear(8, 8)]), ROUTED)
zoo("a head that only one sample ever uses", lambda: Net(heads, body=stack(), heads=[nn.Linear(8, 8), nn.Linear(8, 8)]),
    changed(floats(), lambda x, i: (x, int(i == 5))))  # fmt: skip
zoo("optional input", lambda: Net(lambda m, x, y: m.head(m.body(x) + (0.0 if y is None else m.side(y))), body=mlp(),
    side=mlp(), head=nn.Linear(8, 8)), changed(floats(), lambda x, i: (x, x if i % 3 else None)))  # fmt: skip
zoo("parameters of the first micro batch only", lambda: Net(by_route, branches=[mlp(), mlp()], head=nn.Linear(8, 8)),
    changed(floats(), lambda x, i: (x, 2 if i % 4 < 2 else 1)))  # fmt: skip
zoo("layer drop of one rank", lambda: Net(layer_drop, blocks=[mlp() for _ in range(3)], head=nn.Linear(8, 8)),
    changed(floats(), lambda x, i: (x, i % 2)))  # fmt: skip
zoo("detached for some samples", lambda: Net(
    lambda m, x, route: m.head(m.blocks[1](m.blocks[0](x).detach() if route == 1 else m.blocks[0](x))),
    blocks=[mlp(), mlp()], head=nn.Linear(8, 8)), ROUTED)  # fmt: skip
zoo("a loss that some samples do not have", lambda: Net(lambda m, x, route: m.a(x) if route else m.b(x).detach() + m.a(
    x), a=mlp(), b=mlp()), ROUTED, decides=True)  # fmt: skip
zoo("outputs by sample", lambda: Net(lambda m, x, route: {"a": m.a(x), "b": m.b(x)} if route == 2 else {"a": m.a(x)},
    a=mlp(), b=mlp()), ROUTED, through(lambda found: sum(found.values())))  # fmt: skip
zoo("gate by token mask", lambda: Net(lambda m, x: m.a(x) + m.b(x[x[:, 0] > 0]).sum(), a=mlp(), b=mlp()))
