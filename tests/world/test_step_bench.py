"""What ``bench step`` compares does the same work: the hand-written loops and ours have the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.peers.plain_loop import plain_loop
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardwise.bench.step.bubble import idle_share
from shardwise.bench.step.step_bench import plan_for, shardwise_loop, strategies_for
from shardwise.distributed.process_group import join
from shardwise.parallel.pipeline_parallel.stage_runtime import StageSpan
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from tests.families import VOCAB
from tests.worlds import run_world

LENGTH, CLIP, LIMIT = 16, 0.05, 1e-9
Found = list[tuple[torch.Tensor, torch.Tensor]]


def llama(*, tied: bool, vocab: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return module.double()


class Keeper(torch.optim.SGD):
    """Steps by nothing, and keeps every weight with the gradient that it was to be stepped by."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.found = [(full(p), full(p.grad)) for p in parameters]


def full(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def gradients(loop: Any, plan: Plan, ranks: Any, micros: Any, model: nn.Module) -> tuple[Found, float]:
    """Weights and gradients of this rank's part after one step, and the loss that was told."""
    kept: list[Keeper] = []

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kept.append(Keeper(parameters, lr=1.0))
        return kept[0]

    more = (micros[0][0],) if loop is shardwise_loop else ()
    step = loop(model, plan, ranks, make, CLIP, *more)
    loss = step(micros)
    return kept[0].found, loss


def both(strategy: str, tied: bool, vocab: int) -> dict[str, float]:
    """The largest relative error of a gradient of each contender, against one process without either."""
    ranks = join("cpu")
    dims = dims_for(parse_strategy("ddp"), ranks.world_size)
    base = Plan(strategy="ddp", dims=dims, micro_batch=8 // ranks.world_size, loss_parallel=True)
    plan = plan_for(base, strategy, ranks.world_size)
    assert plan.global_batch == 8
    ids = torch.randint(vocab, (8, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    size, dp = plan.micro_batch or 1, plan.dims.dp
    rows = [ids[first : first + size] for first in range(0, 8, size)]
    micros = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows]
    model = llama(tied=tied, vocab=vocab)
    outputs: Any = model(ids[:, :-1])
    functional.cross_entropy(outputs.logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    expected = [(p.detach(), p.grad) for p in model.parameters()]
    errors = {}
    for loop in (plain_loop, shardwise_loop):
        mine = micros[plan.dims.place(ranks.rank).dp :: dp]
        found, _ = gradients(loop, plan, ranks, mine, llama(tied=tied, vocab=vocab))
        assert found
        errors[loop.__name__] = max(error_of(weight, gradient, expected) for weight, gradient in found)
    dist.barrier()
    return errors


def error_of(weight: torch.Tensor, gradient: torch.Tensor, expected: Any) -> float:
    same = [g for w, g in expected if w.shape == weight.shape and torch.equal(w, weight)]
    assert len(same) == 1, "each weight has values of its own"
    return float((gradient - same[0]).norm() / same[0].norm())


@pytest.mark.turns(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("world", "strategy"),
    [(2, "ddp"), (2, "fsdp"), (2, "ddp+tp2"), (2, "ddp+pp2"), (4, "fsdp+tp2"), (4, "ddp+pp2")],
)
def test_both_contenders_have_the_same_gradients(world: int, strategy: str, tied: bool) -> None:
    for errors in run_world(both, world, strategy, tied, VOCAB):
        assert set(errors) == {"plain_loop", "shardwise_loop"}
        assert max(errors.values()) < LIMIT, errors


def test_every_default_strategy_is_compared_here() -> None:
    assert strategies_for(2) == ("ddp", "fsdp", "ddp+tp2", "ddp+pp2")
    assert strategies_for(4) == (*strategies_for(2), "fsdp+tp2")
    assert strategies_for(3) == ("ddp", "fsdp")


def share_of(busy: list[list[tuple[float, float]]]) -> float:
    """The idle share of made-up spans, each rank's clock with an origin of its own."""
    ranks = join("cpu")
    origin = 100.0 * (1 + ranks.rank)
    spans = [StageSpan(ranks.rank, "forward", 0, origin + start, origin + end) for start, end in busy[ranks.rank]]
    return idle_share(spans, origin, ranks)


def test_the_idle_share_is_that_of_all_stages() -> None:
    one_micro_batch = [[(1.0, 2.0), (5.0, 7.0)], [(2.0, 3.0), (3.0, 5.0)]]
    assert run_world(share_of, 2, one_micro_batch) == [pytest.approx(0.5)] * 2
    busy_all_the_time = [[(0.0, 4.0)], [(0.0, 4.0)]]
    assert run_world(share_of, 2, busy_all_the_time) == [pytest.approx(0.0)] * 2
