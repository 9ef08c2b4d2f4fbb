"""What a live step is counted as: FLOPs against a count by hand, and the same model FLOPs whatever the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.distributed.process_group import join
from shardwise.measure import step_flops as step_work
from shardwise.measure.step_flops import FlopsRecorder
from shardwise.measure.utilisation import StepWork, utilisation
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.expected_part import axis_of
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests.worlds import run_world

VOCAB, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, LENGTH, BATCH = 64, 32, 48, 4, 4, 2, 16, 8


def llama(attention: str) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64, use_cache=False,
        tie_word_embeddings=False, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return module


def by_hand() -> tuple[float, float, float]:
    """Parameters, model FLOPs and executed FLOPs (attention fused) of one step over the whole batch."""
    head = WIDTH // HEADS
    block = 2 * WIDTH * WIDTH + 2 * WIDTH * KV_HEADS * head + 3 * WIDTH * INNER
    products = LAYERS * block + VOCAB * WIDTH
    parameters = products + VOCAB * WIDTH + (2 * LAYERS + 1) * WIDTH
    tokens = BATCH * LENGTH
    square = 2 * (2 * LENGTH * WIDTH) * tokens * LAYERS  # two products of a row with all rows
    return parameters, 6 * parameters * tokens + 3 * square, 6 * products * tokens + 3.5 * square


def mixtral(implementation: str) -> nn.Module:
    """The same with four experts instead of one product, of which a token takes two."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64, use_cache=False,
        tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = implementation
    torch.manual_seed(0)
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return module


def count(
    strategy: str, recompute: str, attention: str, grad_accum: int, compiled: bool = False
) -> tuple[StepWork, bool]:
    ranks = join("cpu")
    dims = dims_for(parse_strategy(strategy), ranks.world_size)
    micro = BATCH // dims.dp // grad_accum
    plan = Plan(
        strategy=strategy, dims=dims, micro_batch=micro, grad_accum=grad_accum, recompute=recompute, compile=compiled
    )  # type: ignore[arg-type]
    session = Session(ranks=ranks, planner=lambda *_: plan)
    probe = FlopsRecorder(axis_of)
    session.observers.append(probe)
    model: Any = mixtral(attention) if attention == "grouped_mm" else llama(attention)
    model, optimizer = session.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.zeros(micro, LENGTH, dtype=torch.int64)
    )
    ids = torch.randint(VOCAB, (micro, LENGTH))
    windows = [[(ids, ids)] * grad_accum] * 2
    for step in session.run_windows(windows):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
    assert probe.work is not None
    found = probe.work, not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    session.close()
    return found


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("world", "strategy", "attention", "grad_accum"),
    [
        (1, "ddp", "sdpa", 1),
        (1, "ddp", "eager", 2),
        (2, "ddp", "sdpa", 2),
        (2, "fsdp", "eager", 1),
        (2, "ddp+tp2", "sdpa", 1),
        (2, "ddp+pp2", "sdpa", 2),
        (2, "ddp+pp2", "eager", 2),
        (2, "fsdp+cp2", "sdpa", 1),
    ],
)
def test_flops_are_those_counted_by_hand(world: int, strategy: str, attention: str, grad_accum: int) -> None:
    parameters, model, executed = by_hand()
    if attention == "eager":  # two products forward, four backward
        executed -= 0.5 * (model - 6 * parameters * BATCH * LENGTH) / 3
    for work, clean in run_world(count, world, strategy, "none", attention, grad_accum):
        assert work.parameters == parameters and work.tokens == BATCH * LENGTH
        assert work.model_flops == pytest.approx(model, rel=5e-3)
        assert work.executed_flops == pytest.approx(executed, rel=5e-3)
        assert clean, "nothing watches every operator any more"


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp+ep2"])
def test_a_token_uses_the_experts_that_it_chose(strategy: str) -> None:
    parameters, model, executed = by_hand()
    tokens, expert, routers = BATCH * LENGTH, LAYERS * 3 * WIDTH * INNER, LAYERS * 4 * WIDTH
    for work, _ in run_world(count, 2, strategy, "none", "grouped_mm", 1):
        assert work.parameters == parameters + 3 * expert + routers
        assert work.model_flops == pytest.approx(model + 6 * (expert + routers) * tokens, rel=1e-6)
        assert work.executed_flops == pytest.approx(executed + 6 * (expert + routers) * tokens, rel=5e-3)


def test_recompute_is_executed_and_not_needed() -> None:
    _, model, executed = by_hand()
    for work, _ in run_world(count, 2, "fsdp", "full", "sdpa", 1):
        assert work.model_flops == pytest.approx(model, rel=5e-3)
        assert 1.15 * executed < work.executed_flops < 1.34 * executed


@pytest.mark.parametrize(("strategy", "axes"), [("ddp", {"dp"}), ("ddp+tp2", {"tp"}), ("ddp+pp2", {"pp"})])
def test_traffic_goes_over_the_axes_of_the_plan(strategy: str, axes: set[str]) -> None:
    for work, _ in run_world(count, 2, strategy, "none", "sdpa", 2):
        assert work.traffic is not None and axes <= set(work.traffic)
        if strategy == "ddp":  # every gradient once, and not what the session says to others
            assert work.traffic == {"dp": {"all_reduce": 4 * by_hand()[0]}}
            dims = dims_for(parse_strategy("ddp"), 2)
            found = utilisation(work, 0.5, dims, "fp32")
            assert found.mfu is None and found.axes[0].use is None
            assert found.axes[0].wire_bytes == 4 * by_hand()[0]


@pytest.mark.turns(2)
def test_compiled_products_are_not_claimed_to_be_counted() -> None:
    _, model, _ = by_hand()
    ((work, _),) = run_world(count, 1, "ddp", "none", "sdpa", 1, True)
    assert work.executed_flops is None and "executed FLOPs" in work.unknown
    assert work.model_flops == pytest.approx(model, rel=5e-3), "the attention is that of the configuration"


def watched_by_another() -> tuple[int, bool]:
    """Ten steps under somebody else's counter: how often this one added up, and whether it knows anything."""
    from torch.utils.flop_counter import FlopCounterMode

    plan = Plan(strategy="ddp", dims=dims_for(parse_strategy("ddp"), 1), micro_batch=BATCH)
    session = Session(ranks=join("cpu"), planner=lambda *_: plan)
    probe, sums = FlopsRecorder(axis_of), []
    session.observers.append(probe)
    model: Any = llama("sdpa")
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    ids = torch.randint(VOCAB, (BATCH, LENGTH))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_work, "_full", lambda *_: sums.append(1))
        with FlopCounterMode(display=False):
            for step in session.run_windows([[(ids, ids)]] * 10):
                step.run(model, token_loss_sum)
                step.update(optimizer)
    session.close()
    return len(sums), probe.work is None


def test_what_cannot_be_counted_is_given_up() -> None:
    assert run_world(watched_by_another, 1) == [(step_work.TRIES, True)]
