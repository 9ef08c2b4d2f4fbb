"""What people do in loops of their own: each was silently wrong, hung or raised a false alarm once."""

from __future__ import annotations

import collections
import gc
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.data import DataLoader, Sampler, TensorDataset

from shardwise.errors import DataError, ModelError, ShardwiseError, UserError
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests.models import Decoder, decoder, ragged_batches
from tests.worlds import run_world


def prepared(
    strategy: str, model: nn.Module | None = None, lr: float = 0.1, **options: Any
) -> tuple[Session, nn.Module, torch.optim.Optimizer, EffectsRecorder]:
    session = start(strategy, receipts=False, **options)
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    model = decoder() if model is None else model
    outer, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    return session, outer, optimizer, probe


def loss_of(model: nn.Module, micro: Any) -> torch.Tensor:
    return token_loss_sum(model(micro.inputs), micro.labels)


def losses(strategy: str, *, evaluate: bool) -> list[float]:
    session, model, optimizer, probe = prepared(strategy)
    found = []
    for step in session.steps(ragged_batches(8)):
        for micro in step:
            step.backward(loss_of(model, micro))
            if evaluate:
                with torch.no_grad():
                    model(micro.inputs)
        found.append(step.update(optimizer).loss)
    assert probe.receipt is not None
    assert probe.receipt.ok, probe.receipt
    return found


def evaluating_inside_a_step(strategy: str) -> None:
    assert losses(strategy, evaluate=True) == losses(strategy, evaluate=False)


def interrupted(strategy: str) -> None:
    """Leave a loop in the middle of a step, also of the one that is watched; then train as if nothing had been."""
    for steps_before in (0, 1):
        session, model, optimizer, probe = prepared(strategy, lr=0.0, grad_accum=2)
        norms = []
        for attempt in range(2):
            for number, step in enumerate(session.steps(ragged_batches(16))):
                for micro in step:
                    step.backward(loss_of(model, micro))
                    if attempt == 0 and number == steps_before:
                        break
                if attempt == 0 and number == steps_before:
                    break
                norms.append(step.update(optimizer, clip_norm=1.0).grad_norm)
        assert _len_torch_dispatch_stack() == 0
        assert norms[:steps_before] == norms[steps_before : 2 * steps_before]
        clean, model, optimizer, _ = prepared(strategy, lr=0.0, grad_accum=2)
        for step, norm in zip(clean.steps(ragged_batches(16)), norms[steps_before:], strict=True):
            for micro in step:
                step.backward(loss_of(model, micro))
            assert step.update(optimizer, clip_norm=1.0).grad_norm == norm
        assert probe.receipt is not None
        assert probe.receipt.ok, probe.receipt


def raises(kind: type[ShardwiseError], words: str, action: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        action()


def refusals(strategy: str) -> None:
    """Each of these is one message on every rank, and none of them a hang."""

    def one_step(batches: list[Any], loss: Callable[..., torch.Tensor] = loss_of) -> None:
        session, model, optimizer, _ = prepared(strategy)
        for step in session.steps(batches):
            for micro in step:
                step.backward(loss(model, micro))
            step.update(optimizer)

    def mean(model: nn.Module, micro: Any) -> torch.Tensor:
        return functional.cross_entropy(model(micro.inputs).flatten(0, 1), micro.labels.flatten())

    raises(UserError, "got a mean", lambda: one_step(ragged_batches(4), mean))
    raises(UserError, "got a mean", lambda: one_step(ragged_batches(4), lambda m, b: m(b.inputs).square().mean()))
    raises(DataError, "labels are a dict", lambda: one_step([(x, {"y": y}) for x, y in ragged_batches(4)]))
    raises(DataError, "rank 1 got no batch", lambda: one_step(ragged_batches(1)))

    model = decoder()
    first = start(strategy, receipts=False)
    first.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    again = start(strategy, receipts=False)
    raises(ModelError, "earlier session", lambda: again.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))

    def twice() -> None:
        session, model, optimizer, _ = prepared(strategy)
        for step in session.steps(ragged_batches(2)):
            for micro in step:
                step.backward(loss_of(model, micro))
            step.update(optimizer)
            step.update(optimizer)

    raises(UserError, "called twice", twice)


class Odd(Decoder):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "scalar":
            self.factor = nn.Parameter(torch.tensor(1.5))
        elif kind == "dtypes":
            self.blocks[0].norm.bfloat16()
        elif kind == "unused":
            self.pooler = nn.Linear(3, 3)
        elif kind == "nested":
            self.blocks = nn.ModuleList(nn.ModuleList([block]) for block in self.blocks)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = (block[0] if self.kind == "nested" else block)(x)
        return self.head(x * self.scale)


def odd_models(strategy: str) -> None:
    sharded = strategy in ("zero2", "fsdp")
    if sharded:
        raises(ModelError, "shape \\(\\); give it shape", lambda: prepared(strategy, Odd("scalar")))
    if strategy != "ddp":
        raises(ModelError, "one dtype", lambda: prepared(strategy, Odd("dtypes")))

    for kind in ("unused", "nested"):
        torch.manual_seed(0)
        session, model, optimizer, probe = prepared(strategy, Odd(kind).double())

        def train(session: Session = session, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            for step in session.steps(ragged_batches(6)):
                for micro in step:
                    step.backward(loss_of(model, micro))
                step.update(optimizer)

        train()
        assert probe.receipt is not None
        assert probe.receipt.ok, probe.receipt


def no_false_alarms(strategy: str) -> None:
    """Overfitting one batch, text in the inputs, a user's own collective, a mapping that is no dict."""
    for kind in ("one batch", "text", "own collective", "mapping"):
        batches: list[Any] = ragged_batches(6)
        if kind == "one batch":
            batches = [batches[0]] * 6
        elif kind == "text":
            batches = [([f"text {n}"], labels) for n, (_, labels) in enumerate(batches)]
        elif kind == "mapping":
            batches = [collections.UserDict(ids=inputs, labels=labels) for inputs, labels in batches]
        session, model, optimizer, probe = prepared(strategy)
        for step in session.steps(batches):
            for micro in step:
                inputs = torch.zeros(2, 7, dtype=torch.int64) if kind == "text" else micro.inputs
                inputs = inputs["ids"] if kind == "mapping" else inputs
                if kind == "own collective":
                    dist.all_reduce(torch.ones(3))
                step.backward(token_loss_sum(model(inputs), micro.labels))
                if kind == "own collective":
                    dist.all_reduce(torch.ones(3))
            step.update(optimizer)
        assert probe.receipt is not None
        assert probe.receipt.ok, (kind, probe.receipt)


class KnowsItsRank:
    """Knows its rank, for another reason than to deal by it."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Any:
        return iter(ragged_batches(8))


def the_same_on_all_ranks() -> str:
    session, model, optimizer, _ = prepared("ddp")
    session.observers[-1] = EffectsRecorder()
    try:
        for step in session.steps(KnowsItsRank()):
            for micro in step:
                step.backward(loss_of(model, micro))
            step.update(optimizer)
    except ShardwiseError as error:
        return str(error)
    finally:
        session.close()
    return ""


def test_a_loader_that_knows_its_rank_and_gives_all_the_same_is_named() -> None:
    for text in run_world(the_same_on_all_ranks, 2):
        assert "the loader's KnowsItsRank knows its rank" in text and "sharded=False" in text


class PythonShuffle(Sampler[int]):
    """Draws from a generator that no seed of torch's reaches."""

    def __iter__(self) -> Any:
        order = list(range(32))
        random.Random(dist.get_rank()).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 32


def samplers(strategy: str) -> list[int]:
    session, _, _, _ = prepared(strategy)
    data = TensorDataset(torch.arange(32), torch.zeros(32))
    seen: list[int] = []
    own = torch.Generator().manual_seed(dist.get_rank())
    for loader in (DataLoader(data, batch_size=3, sampler=PythonShuffle()), DataLoader(data, 5, True, generator=own)):
        for step in session.steps(loader):
            seen += [int(x) for micro in step.micros if not micro.padding for x in micro.inputs]
            session.steps_done = step.number
    return seen


def attributes(strategy: str) -> None:
    model = decoder()
    model.config = "the user's"  # type: ignore[assignment]
    _, outer, _, _ = prepared(strategy, model)
    assert outer.config == "the user's"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = outer.nothing_like_it


def scheduler_before(strategy: str) -> None:
    session = start(strategy, receipts=False)
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    raises(ModelError, "scheduler was built before", lambda: session.prepare(model, optimizer))


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize(
    "case", [evaluating_inside_a_step, interrupted, refusals, odd_models, no_false_alarms, attributes]
)
def test_hazard(case: Callable[[str], None], strategy: str) -> None:
    run_world(case, 2, strategy)


def test_a_scheduler_that_would_do_nothing_is_refused() -> None:
    run_world(scheduler_before, 2, "zero1")


def test_samplers_that_draw_alone_give_each_sample_to_one_rank() -> None:
    seen = sorted(x for rank in run_world(samplers, 2, "ddp") for x in rank)
    assert seen == sorted([*range(32), *range(32)])


def caches(mode: str) -> None:
    """transformers models keep keys and values by default; recompute must not fill the cache twice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    facts = LlamaConfig(vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    assert facts.use_cache
    torch.manual_seed(0)
    model = LlamaForCausalLM(facts)
    session, outer, optimizer, probe = prepared("fsdp", model, recompute=mode)
    for step in session.steps(ragged_batches(6)):
        for micro in step:
            step.backward(loss_of(outer, micro))
        step.update(optimizer)
    assert probe.receipt is not None
    assert probe.receipt.ok, probe.receipt


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_of_a_model_that_caches(mode: str) -> None:
    run_world(caches, 2, mode)


def threads_of_closed_sessions() -> tuple[int, int]:
    threads = []
    for _ in range(2):
        for _ in range(3):
            session, outer, optimizer, _ = prepared("fsdp")
            for step in session.steps(ragged_batches(2)):
                for micro in step:
                    step.backward(loss_of(outer, micro))
                step.update(optimizer)
            session.close()
        del session, outer, optimizer, step, micro
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    return threads[0], threads[1]


def test_sessions_that_were_closed_leave_no_threads() -> None:
    for first, second in run_world(threads_of_closed_sessions, 2):
        assert second <= first
