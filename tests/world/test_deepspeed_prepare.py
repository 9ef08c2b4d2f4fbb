"""What `prepare` and the first steps refuse on DeepSpeed as on PyTorch, and what beside it is right.

The reference is one process in float64; DeepSpeed keeps weights in fp32, so they are compared up to `LIMIT`.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer, swa_utils

from shardwise.errors import ShardwiseError, TrainingError
from shardwise.run.start import start
from tests import optimizers as own
from tests.world.test_deepspeed_engine import plan_of
from tests.worlds import run_world

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install 'shardwise[deepspeed]')",
)
LIMIT = 5e-6
STAGES = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3", "deepspeed-zero2+offload")
STEPS = 4
Batches = list[tuple[torch.Tensor, torch.Tensor]]
Weights = dict[str, torch.Tensor]


class Small(nn.Module):
    """Two layers of odd sizes, so that flat rows are cut within a parameter, and what a case adds."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.stem, self.head = nn.Linear(6, 7), nn.Linear(7, 3)
        if kind == "sparse":
            self.table = nn.Embedding(4, 6, sparse=True)
        elif kind == "max_norm":
            self.table = nn.Embedding(4, 6, max_norm=0.5)
        elif kind == "channels_last":
            self.odd = nn.Parameter(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        elif kind == "transposed":
            self.odd = nn.Parameter(torch.rand(6, 4).t())
        elif kind == "frozen":
            self.odd = nn.Parameter(torch.rand(6, 4).t(), requires_grad=False)
        if hasattr(self, "odd"):
            self.register_buffer("weights", torch.rand(self.odd.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "odd"):  # each element counts for itself, so that one in another's place is seen
            x = x * (1 + (self.odd * self.weights).sum() / 50)
        if hasattr(self, "table"):
            x = x + self.table((x[:, 0] > 0).long())
        return self.head(torch.tanh(self.stem(x)))


def drawn(number: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 6, generator=generator), torch.randn(2, 3, generator=generator)) for _ in range(number)]


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().sum()


def with_penalty(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    loss = loss_of(model, x, y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def with_parameters(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x, y)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients) / 100


def weighed(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By a gradient that is a number only, of the same forward."""
    x = x.clone().requires_grad_(True)
    loss = loss_of(model, x, y)
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    return loss * (1 + gradient.sum() / 100)


def looked_at(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same of a forward of its own."""
    given = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss_of(model, given, y), given)
    return loss_of(model, x, y) * (1 + gradient.sum() / 100)


Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
Make = Callable[[Any], Optimizer]


def one_process(kind: str, make: Make, loss: Loss, window: int) -> Weights:
    model = Small(kind).double()
    optimizer, batches = make(list(model.parameters())), drawn(window * STEPS)
    for at in range(0, len(batches), window):
        optimizer.zero_grad()
        for x, y in batches[at : at + window]:
            (loss(model, x.double(), y.double()) / (2 * window)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(strategy: str, kind: str = "", make: Make | None = None, loss: Loss = loss_of, accum: int = 1) -> str:
    """How far the weights are from those of one process, or what was said instead, with the kind of error."""
    make = sgd if make is None else make
    session = start(plan_of(strategy, grad_accum=accum), receipts=False)
    window = session.ranks.world_size * accum
    try:
        model = Small(kind)
        outer, optimizer = session.prepare(model, make(list(model.parameters())))
        for step in session.steps(drawn(window * STEPS), count=len):
            for micro in step:
                step.backward(loss(outer, micro.inputs, micro.labels))
            step.update(optimizer)
        found = {name: weight.double() for name, weight in session.applied.engine.weights()}
    except Exception as error:
        return f"{'' if isinstance(error, ShardwiseError) else 'not by name: '}{type(error).__name__}: {error}"
    finally:
        session.close()
    expected = one_process(kind, make, loss, window)
    worst = max(float((found[name] - weight).abs().max()) for name, weight in expected.items())
    return "" if worst < LIMIT else f"off by {worst:.1e}"


def sgd(params: Any) -> Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


def several(cases: list[tuple[Any, ...]]) -> list[str]:
    return [trained(*case) for case in cases]


class Clamping(own.Own):
    """SGD that clips each element."""

    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return grad.clamp(-0.1, 0.1)


class RowNormed(own.Own):
    """Each row of a matrix by its own norm, and each element of what is no matrix for itself."""

    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return grad / (grad.norm(dim=1, keepdim=True) + 1e-3) if grad.ndim == 2 else grad


def muon(params: Any) -> Optimizer:
    return optim.Muon([p for p in params if p.ndim == 2], lr=0.01)


def cached(params: Any) -> Optimizer:
    optimizer = own.LARS(params)
    optimizer.mine = list(params)  # type: ignore[attr-defined]
    return optimizer


def adamw_8bit(params: Any) -> Optimizer:
    from shardwise.optim.adamw8bit import AdamW8bit

    return AdamW8bit(params, lr=0.01)


FLAT = "steps flattened parameters otherwise than the model's own .* use ddp or zero1"
WRONG: dict[Make, str] = {
    own.LAMB: f"^ModelError: LAMB {FLAT}",
    own.LARS: f"^ModelError: LARS {FLAT}",
    own.LocalLAMB: f"^ModelError: LocalLAMB {FLAT}",
    own.Clipping: f"^ModelError: Clipping {FLAT}",
    RowNormed: f"^ModelError: RowNormed {FLAT}",
    optim.Adafactor: f"^ModelError: Adafactor {FLAT}",
    muon: "^ModelError: Muon cannot step the parameters as DeepSpeed gives them .* use ddp or zero1, or AdamW",
    own.DAdaptation: "^ModelError: DAdaptation steps flattened parameters .* use ddp, or",
    optim.LBFGS: "^ModelError: LBFGS.step needs a closure",
    cached: "^ModelError: LARS.mine keeps parameters from before session.prepare",
    adamw_8bit: "^ModelError: AdamW8bit is not for .* its state goes by rows or blocks",
}


def fused(params: Any) -> Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


RIGHT: list[Make] = [fused, own.Lion, Clamping, optim.Rprop, optim.Adamax, optim.ASGD]


@pytest.mark.turns(3)
@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_that_need_whole_parameters_are_refused(world: int) -> None:
    """On one rank nothing is cut, but all is one row: a number from all parameters is right there."""
    wrong = {make: words for make, words in WRONG.items() if world > 1 or make is not own.DAdaptation}
    cases = [(stage, "", make) for stage in STAGES[: 4 if world > 1 else 1] for make in wrong]
    right = RIGHT if world > 1 else [own.DAdaptation, own.Lion]
    fine: list[Any] = [(stage, "", make) for stage in ("deepspeed-zero1", "deepspeed-zero3") for make in right]
    for found in run_world(several, world, [*cases, *fine]):
        for case, text in zip(cases, found, strict=False):
            assert re.search(wrong[case[2]], text), (case, text)
        assert not any(found[len(cases) :]), list(zip(fine, found[len(cases) :], strict=True))


def test_what_lies_oddly_in_memory_is_right_and_what_cannot_be_right_is_refused() -> None:
    cases: list[tuple[Any, ...]] = [(s, kind) for s in STAGES for kind in ("channels_last", "transposed", "frozen")]
    refusals = {
        **{(s, "sparse"): f"'table' is an embedding with sparse=True, and {s} cannot reduce" for s in STAGES[::2]},
        **{(s, "max_norm"): f"'table' has max_norm=0.5: .* under {s} other ranks keep others" for s in STAGES[:3]},
    }
    for found in run_world(several, 2, [*cases, *refusals]):
        assert not any(found[: len(cases)]), [row for row in zip(cases, found, strict=False) if row[1]]
        for words, text in zip(refusals.values(), found[len(cases) :], strict=True):
            assert re.search(f"^ModelError: .*{words}", text), text


@pytest.mark.turns(3)
def test_a_gradient_that_the_loss_asks_for_is_no_micro_batch() -> None:
    """DeepSpeed would count it as one, and divide it; under ZeRO-3 the second backward would find no weights."""
    losses = (with_penalty, with_parameters, weighed, looked_at)
    full = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero1+offload", "deepspeed-zero2+offload")
    cases: list[Any] = [(s, "", None, loss, accum) for s in full for loss in losses for accum in (1, 2)]
    cases += [
        (s, "", None, looked_at, accum) for s in ("deepspeed-zero3", "deepspeed-zero3+offload") for accum in (1, 2)
    ]
    refused: list[Any] = [("deepspeed-zero3", "", None, loss) for loss in losses[:3]]
    for found in run_world(several, 2, cases + refused):
        assert not any(found[: len(cases)]), [row for row in zip(cases, found, strict=False) if row[1]]
        for word, text in zip(("create", "create", "retain"), found[len(cases) :], strict=True):
            assert re.search(f"^ModelError: {word}_graph=True .* deepspeed-zero3 frees the weights", text), text


def registered(kind: str, parameter: nn.Parameter) -> Any:
    if kind == "after":
        return parameter.register_post_accumulate_grad_hook(lambda p: None)
    return parameter.register_hook(torch.zeros_like)


def late(strategy: str, kind: str, at: int, options: dict[str, Any]) -> tuple[str, int, bool]:
    """A hook is registered before step ``at``, by rank 1 alone if the kind says so; what is said, after which step, and
    whether weights have moved since."""
    session = start(plan_of(strategy, **options), receipts=False)
    model = Small()
    outer, optimizer = session.prepare(model, optim.SGD(model.parameters(), lr=0.1))

    def weights() -> list[torch.Tensor]:
        return [p.detach().clone() for p in session.module.parameters()]

    said, before = "", weights()
    try:
        for step in session.steps(fed(session, kind, at), count=len):
            for micro in step:
                step.backward(loss_of(outer, micro.inputs, micro.labels))
                if kind == "middle" and step.number == at:
                    registered(kind, session.module.head.weight)
            if kind != "middle":
                before = weights()
            step.update(optimizer)
            before = weights()
    except ShardwiseError as error:
        said = f"{type(error).__name__}: {error}"
    moved = not all(torch.equal(one, other) for one, other in zip(before, weights(), strict=True))
    done = session.steps_done
    session.close()
    return said, done, moved


def fed(session: Any, kind: str, at: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches; the hook is there, or gone again, before the first one of step ``at`` is given."""
    for number, batch in enumerate(drawn(2 * STEPS)):
        if number == 2 * (at - 1) and kind != "middle" and (kind != "one rank" or session.ranks.rank == 1):
            hook = registered(kind, session.module.head.weight)
            if kind == "removed":
                hook.remove()
        yield batch


def later(cases: list[Any]) -> list[tuple[str, int, bool]]:
    return [late(*case) for case in cases]


@pytest.mark.turns(3)
def test_hooks_registered_after_prepare_are_refused_on_all_ranks_before_an_update() -> None:
    early = {"optimizer_in_backward": True}
    cases: list[Any] = [(s, kind, at, {}) for at, s in enumerate(STAGES, 1) for kind in ("before", "after")]
    cases += [("deepspeed-zero1", "one rank", 2, {}), ("deepspeed-zero3", "middle", 2, {})]
    cases += [(s, kind, 2, early) for s in ("fsdp", "zero2") for kind in ("before", "after", "one rank")]
    cases += [("fsdp", "after", 2, {})]
    words = {
        "deepspeed": "'head.weight' has a hook, and deepspeed-zero\\S+ reduces gradients by its own hooks",
        "early": "'head.weight' has a hook, and optimizer_in_backward steps a parameter before",
        "fsdp": "'head.weight' has a hook of register_post_accumulate_grad_hook, .* fsdp has a shard",
    }
    fine: list[Any] = [(s, "removed", 2, {}) for s in STAGES[1:3]] + [("fsdp", "removed", 2, early)]
    for found in run_world(later, 2, cases + fine):
        assert found[len(cases) :] == [("", STEPS, False)] * len(fine)
        for case, (said, done, moved) in zip(cases, found, strict=False):
            kind = "deepspeed" if case[0].startswith("deepspeed") else "early" if case[3] else "fsdp"
            assert re.search(words[kind], said), (case, said)
            assert done == case[2] - 1 and not moved, case


def copies(strategies: list[str]) -> list[str]:
    """What copies of a model and of its parts say."""
    said = []
    for strategy in strategies:
        session = start(strategy, receipts=False)
        model = Small()
        outer, _ = session.prepare(model, optim.SGD(model.parameters(), lr=0.1))
        parts = [outer, session.module, *([session.module.head] if strategy == "deepspeed-zero3" else [])]
        for part in parts:
            for made in (swa_utils.AveragedModel, copy.deepcopy):
                try:
                    made(part)
                    said.append(f"{strategy}: copied")
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")
        session.close()
    return said


def test_a_copy_of_the_model_says_what_to_do_instead() -> None:
    strategies = ["deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"]
    for said in run_world(copies, 2, strategies):
        assert len(said) == 14
        for text in said:
            assert re.search(
                "^ModelError: a model that deepspeed-zero. has taken over cannot be copied .* ema = ", text
            )


def evaluated(cases: list[tuple[str, str]]) -> list[str]:
    """A forward without a gradient after the second step, on rank 0 alone or on all ranks."""
    said = []
    for strategy, who in cases:
        session = start(strategy, receipts=False)
        model = Small()
        outer, optimizer = session.prepare(model, optim.SGD(model.parameters(), lr=0.1))
        try:
            for step in session.steps(drawn(2 * STEPS), count=len):
                for micro in step:
                    step.backward(loss_of(outer, micro.inputs, micro.labels))
                step.update(optimizer)
                if step.number == 2 and (who == "all" or session.ranks.rank == 0):
                    with torch.no_grad():
                        (session.module if who == "module" else outer)(torch.zeros(2, 6))
            said.append(f"{session.steps_done} steps")
        except TrainingError as error:
            said.append(str(error))
        session.close()
    return said


def test_an_evaluation_on_rank_0_alone_is_refused_where_it_gathers() -> None:
    refused = [("deepspeed-zero3", "outer"), ("deepspeed-zero3", "module"), ("deepspeed-zero3+offload", "outer")]
    fine = [("deepspeed-zero3", "all"), ("deepspeed-zero1", "outer"), ("deepspeed-zero2", "outer")]
    for said in run_world(evaluated, 2, refused + fine):
        assert all("rank 0 at an evaluation, rank 1 at the start of a step" in text for text in said[:3]), said
        assert said[3:] == ["4 steps"] * 3


def spoilt(strategies: list[str], folder: str) -> list[str]:
    """An update leaves one weight that is no number; what the save after it says."""
    said = []
    for strategy in strategies:
        session = start(strategy, receipts=False)
        model = Small()
        groups = [{"params": [model.head.weight], "lr": 1e30}, {"params": [*model.stem.parameters(), model.head.bias]}]
        outer, optimizer = session.prepare(model, optim.SGD(groups, lr=0.1))
        try:
            for step in session.steps(drawn(4), count=len):
                for micro in step:
                    step.backward(loss_of(outer, micro.inputs, micro.labels) * 1e12)
                step.update(optimizer)
                session.save(Path(folder) / strategy)
        except TrainingError as error:
            said.append(str(error))
        session.close()
    return said


def test_an_update_that_is_not_finite_is_told_with_the_name_of_the_weight(tmp_path: Path) -> None:
    strategies = ["deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3", "deepspeed-zero3+offload"]
    for said in run_world(spoilt, 2, strategies, str(tmp_path)):
        assert len(said) == len(strategies)
        assert all("step 1: the update has left weights that are not finite (head.weight)" in text for text in said), (
            said
        )
