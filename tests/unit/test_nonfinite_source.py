"""The source among what ranks have recorded: plain facts, no ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.train.nonfinite.choose_source import Column, ReplayFacts, choose
from shardwise.train.nonfinite.nonfinite_error import NonFiniteError, NonFiniteSource
from shardwise.train.nonfinite.nonfinite_hooks import NonFiniteEvent, Recorder, _rows_of_loss
from shardwise.train.nonfinite.tensor_values import is_overflow, non_finite
from shardwise.train.session_interface import TrainingSession


def event(module: str, order: int, *, micro: int = 1, kind: str = "forward", **more: Any) -> NonFiniteEvent:
    fields: dict[str, Any] = {"stage": 0, "value": "nan", "dtype": "float32", "rows": (0,), "batch_rows": 2, **more}
    return NonFiniteEvent(kind=kind, module=module, micro=micro, order=order, **fields)


def chosen(*facts: ReplayFacts, strategy: str = "ddp", scaled: bool = False) -> NonFiniteSource:
    plan = Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), len(facts)))
    return choose(facts, plan, 7, 2, scaled=scaled)


def test_the_first_module_of_the_first_micro_batch_is_the_source() -> None:
    late = ReplayFacts(events=(event("a", 1, micro=2),))
    early = ReplayFacts(events=(event("b", 5), event("c", 9)))
    found = chosen(late, early)
    assert (found.module, found.rank, found.micro_batch, found.ranks) == ("b", 1, 1, (1,))


def test_a_forward_goes_up_the_stages_and_a_backward_down() -> None:
    def both(kind: str) -> NonFiniteSource:
        facts = (ReplayFacts(events=(event(f"s{stage}", 3, kind=kind, stage=stage),)) for stage in (0, 1))
        return chosen(*facts, strategy="ddp+pp2")

    assert (both("forward").module, both("forward").rank) == ("s0", 0)
    assert (both("backward").module, both("backward").rank) == ("s1", 1)


def test_what_healthy_micro_batches_show_as_well_is_not_the_source() -> None:
    usual = event("mask", 1)
    healthy = ReplayFacts(events=(usual,), finite_losses={1: True})
    spoilt = ReplayFacts(events=(usual, event("b", 5)), finite_losses={1: False})
    assert chosen(healthy, spoilt).module == "b"
    assert chosen(healthy, healthy).reason == "not reproduced"


def test_a_backward_under_a_scaler_may_overflow() -> None:
    facts = ReplayFacts(events=(event("a", 1, kind="backward"),), finite_losses={1: True})
    assert chosen(facts).reason == "backward"
    assert chosen(facts, scaled=True).reason == "not reproduced"


def test_data_and_weights_come_before_what_they_spoil() -> None:
    column = Column(micro=1, name="pixels", value="nan", rows=(1,), batch_rows=2)
    spoilt = (event("", 1, kind="input"), event("", 2, operation="before 'a'"), event("a", 3))
    found = chosen(ReplayFacts(events=spoilt, columns=(column,)))
    assert (found.reason, found.module, found.column, found.rows) == ("data", "a", "pixels", (1,))
    found = chosen(ReplayFacts(events=(event("a", 3),)), ReplayFacts(weights={"a.weight": "inf", "ab.weight": "nan"}))
    assert (found.reason, found.parameters, found.rank) == ("weight", ("a.weight",), 1)
    found = chosen(ReplayFacts(events=(event("a", 3),)), ReplayFacts(weights={"ab.weight": "nan"}))
    assert found.reason == "forward"  # a frozen weight that nothing uses


def test_a_column_that_healthy_micro_batches_have_is_not_the_source() -> None:
    columns = tuple(Column(micro=micro, name="weight", value="nan", rows=(0,), batch_rows=2) for micro in (1, 2))
    event_2 = (event("a", 3, micro=2),)
    both = ReplayFacts(events=event_2, columns=columns, finite_losses={1: True, 2: False})
    assert chosen(both).reason == "forward"
    assert chosen(both.model_copy(update={"finite_losses": {1: False}})).reason == "data"
    spoilt = both.model_copy(update={"finite_losses": {}, "weights": {"a.weight": "nan"}})
    assert chosen(spoilt).reason == "weight"


@pytest.mark.parametrize(
    ("shape", "bad", "batch", "rows"),
    [
        ((4, 3), (2, 1), 4, (2,)),
        ((7, 4, 3), (1, 2, 0), 4, (2,)),  # time first
        ((12, 3), (7, 0), 4, (2,)),  # samples flattened into tokens
        ((7, 3), (1, 2), 4, None),
        ((), (), 4, None),
    ],
)
def test_rows_are_found_along_the_batch(shape: Any, bad: Any, batch: int, rows: Any) -> None:
    tensor = torch.zeros(shape)
    tensor[bad] = torch.nan
    found = non_finite(tensor, batch)
    assert found is not None and found.rows == rows
    assert non_finite(torch.zeros(shape), batch) is None


@pytest.mark.parametrize(
    ("values", "entering", "dtype", "overflow"),
    [
        ([6e4, torch.inf], 1.0, torch.float16, True),
        ([1.0, torch.inf], 300.0, torch.float16, True),
        ([1.0, torch.inf], 1.0, torch.float16, False),  # a division by zero
        ([1.0, torch.nan], 300.0, torch.float16, True),
        ([1.0, torch.nan], 1e4, torch.bfloat16, False),
        ([3e38, torch.inf], 1.0, torch.bfloat16, True),
        ([1.0, -torch.inf], 1.0, torch.float32, False),
    ],
)
def test_an_overflow_is_told_from_a_division_by_zero(values: Any, entering: float, dtype: Any, overflow: bool) -> None:
    found = non_finite(torch.tensor(values, dtype=dtype))
    assert found is not None
    assert is_overflow(found, entering) is overflow


def test_the_message_has_place_source_and_fix() -> None:
    source = NonFiniteSource(
        reason="overflow", step=7, module="blocks.1.up", rank=1, ranks=(1,), micro_batch=2, micro_batches=3, rows=(1,),
        batch_rows=4, samples=(37,), value="inf", dtype="float16", largest=61248.0, largest_input=300.0,
    )  # fmt: skip
    assert str(NonFiniteError(7, "the loss is nan", source, "runs/a/nonfinite.json")).splitlines() == [
        "step 7: the loss is nan; the weights of the last good checkpoint are untouched.",
        "  source: rank 1, micro batch 2 of 3, sample 37: inf in the forward of 'blocks.1.up', an overflow of float16 "
        "(the largest finite value beside it is 6.12e+04, the largest that enters 300, the largest possible 6.55e+04)",
        "  bf16 has the range of fp32, and fp16 has not.",
        "  Try a lower optimizer.lr, more optimizer.warmup_steps or a smaller optimizer.clip_norm. "
        "All that is known is in runs/a/nonfinite.json.",
    ]
    assert str(NonFiniteError(7, "the loss is nan")).endswith("smaller optimizer.clip_norm")


def test_a_loss_with_a_collective_is_not_called_by_one_rank_alone() -> None:
    def gathered(outputs: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        dist.all_reduce(outputs.clone(), group=group)
        return (outputs - labels).sum()

    outputs, labels = torch.tensor([1.0, torch.nan]), torch.zeros(2)
    assert _rows_of_loss(lambda one, other: (one - other).sum(), outputs, labels, 2) == (1,)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for group in (None, dist.new_group([0])):
            assert _rows_of_loss(partial(gathered, group=group), outputs, labels, 2) is None
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_hook_that_fails_ends_the_recording_and_not_the_model() -> None:
    def hook() -> None:
        calls.append(1)
        raise KeyError("a name")

    calls: list[int] = []
    recorder = Recorder(cast(TrainingSession, None), lambda: 1)
    safe = recorder._safe(hook)
    safe()
    safe()
    assert (len(calls), recorder.failure) == (1, "the replay could not watch every module: KeyError: 'a name'")
