"""Receipts of observed loops, from plain facts: what is judged, what is only reported, and what users may state."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import PlanError, UserError
from shardwise.observation import observer as observer_module
from shardwise.observation.expectation import Expectation, of_strategy
from shardwise.observation.expected_settings import expectation_of, of_training_arguments
from shardwise.observation.loop_facts import BufferFacts, LoopFacts, ParameterFacts
from shardwise.observation.loop_receipt import loop_receipt
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy


def parameter(name: str = "w", **more: Any) -> ParameterFacts:
    usual = {"elements": 100, "local_elements": 100, "dtype": "float32", "trainable": True, "placement": "replicated"}
    return ParameterFacts(**{"name": name, "has_state": True, "norm": 1.0, "bits": 7, **usual, **more})


def facts(rank: int = 0, world: int = 2, **more: Any) -> LoopFacts:
    """A rank of a DDP loop in which all is right."""
    usual: dict[str, Any] = {
        "rank": rank,
        "world_size": world,
        "wrapper": "DDP",
        "parameters": (parameter("a"), parameter("b")),
        "product_dtypes": ("float32",),
        "forwards": 1,
        "backward_elements": (200,),
        "products": 4,
        "norm_backward": 2.0,
        "norm_step": 1.0,
        "samples": (f"of rank {rank}",),
        "training": True,
    }
    return LoopFacts(**{**usual, **more})


def sharded(rank: int, world: int = 4, shards: int = 4, **more: Any) -> LoopFacts:
    part = {"local_elements": 100 // shards, "shards": shards, "part": str(rank % shards)}
    own = (parameter("a", placement=f"Shard(0) over {shards}", **part),)
    return facts(rank, world, wrapper="FSDP2", units=1, parameters=own, backward_elements=(100,), **more)


def false_lines(expect: Any, *ranks: LoopFacts, **stated: Any) -> set[str]:
    receipt = loop_receipt(expectation_of(expect, stated), ranks)
    return {line.name for line in receipt.lines if line.ok is False}


def line(name: str, expect: Any, *ranks: LoopFacts, **stated: Any) -> tuple[str, bool | None]:
    found = next(one for one in loop_receipt(expectation_of(expect, stated), ranks).lines if one.name == name)
    return found.found, found.ok


def test_a_right_loop_has_no_false_line() -> None:
    assert not false_lines("ddp", facts(0), facts(1), grad_accum=1, precision="fp32", clip_norm=2.0)
    assert not false_lines("fsdp", *(sharded(rank) for rank in range(4)))
    assert not false_lines("hsdp", *(sharded(rank, shards=2) for rank in range(4)))


def test_nothing_is_judged_by_what_is_not_stated() -> None:
    odd = {"wrapper": "none", "backward_elements": (0, 0), "products": 0, "product_dtypes": ()}
    assert not false_lines(None, facts(0, **odd), facts(1, **odd))


@pytest.mark.parametrize(("base", "shards", "wrong"), [("hsdp", 4, True), ("fsdp", 2, True), ("hsdp", 2, False)])
def test_hybrid_sharding_is_told_from_full(base: str, shards: int, wrong: bool) -> None:
    found = false_lines(base, *(sharded(rank, shards=shards) for rank in range(4)))
    assert found == ({"parameters"} if wrong else set())


def test_ranks_with_the_same_part_are_compared_and_no_others() -> None:
    def rank(number: int, norm: float) -> LoopFacts:
        own = parameter("a", shards=2, part=str(number % 2), local_elements=50, norm=norm, bits=int(norm))
        return sharded(number, shards=2).model_copy(update={"parameters": (own,)})

    assert not false_lines("hsdp", rank(0, 1.0), rank(1, 2.0), rank(2, 1.0), rank(3, 2.0))
    found = false_lines("hsdp", rank(0, 1.0), rank(1, 2.0), rank(2, 3.0), rank(3, 2.0))
    assert found == {"gradients across ranks", "weights across ranks"}


def test_a_gradient_that_one_rank_lacks_is_named() -> None:
    missing = facts(1, parameters=(parameter("a"), parameter("b", norm=None)))
    found, ok = line("gradients across ranks", "ddp", facts(0), missing)
    assert ok is False
    assert found == "1 of 2 differ: b (norms 1, none)"


def test_the_first_wrong_rank_is_shown() -> None:
    loose = facts(1, parameters=(parameter("a"), parameter("b", held=0)))
    found, ok = line("held by the optimizer", "ddp", facts(0), loose)
    assert (found, ok) == ("1 of 2 trainable parameters; not b (rank 1)", False)


def test_the_global_norm_counts_each_part_once() -> None:
    def rank(number: int) -> LoopFacts:
        own = parameter("a", shards=2, part=str(number), local_elements=50, norm=3.0 + number, bits=None)
        return sharded(number, world=2, shards=2).model_copy(update={"parameters": (own,)})

    assert line("gradient norm", "fsdp", rank(0), rank(1))[0] == "5"
    assert line("gradient norm", "ddp", facts(0), facts(1))[0] == f"{2**0.5:.6g}"
    assert line("gradient norm", "fsdp", rank(0), rank(1), clip_norm=4.9)[1] is False


def test_norms_that_are_not_numbers_are_equal_to_each_other_alone() -> None:
    def rank(number: int, norm: float) -> LoopFacts:
        return facts(number, parameters=(parameter("a", norm=norm),))

    assert line("gradients across ranks", "ddp", rank(0, float("nan")), rank(1, float("inf")))[1] is True
    assert line("gradients across ranks", "ddp", rank(0, float("nan")), rank(1, 1.0))[1] is False


def test_facts_survive_the_way_between_ranks() -> None:
    odd = facts(norm_step=float("inf"), parameters=(parameter("a", norm=float("nan")),))
    back = LoopFacts.model_validate_json(odd.model_dump_json())
    assert back.norm_step == float("inf")
    assert math.isnan(back.parameters[0].norm or 0.0)


def test_a_model_compiled_in_place_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    with pytest.raises(UserError, match=r"torch\.compile"):
        shardwise.observe(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_data_that_repeats_itself_is_reported() -> None:
    same = {"samples": ("x",)}
    assert line("samples across ranks", "ddp", facts(0, **same), facts(1, **same))[1] is False
    again = {"samples": ("x",), "earlier": ("x",)}
    assert line("samples across ranks", "ddp", facts(0, **again), facts(1, **again))[1] is None


def test_an_input_that_one_rank_forwards_twice_is_one_sample() -> None:
    """As R-Drop, SimCSE and SAM do."""
    twice = {"samples": ("x", "x")}
    receipt = loop_receipt(expectation_of("ddp", {}), (facts(0, **twice), facts(1)))
    found = next(one for one in receipt.lines if one.name == "samples across ranks")
    assert (found.planned, found.found, found.ok) == ("2 distinct inputs of the model", "2 distinct", True)
    assert line("samples across ranks", "ddp", facts(0, **twice), facts(1, **twice)) == (
        "1 distinct; the same on ranks 0, 1",
        False,
    )


def test_copies_and_the_optimizer_are_judged_with_a_strategy_alone() -> None:
    """Local SGD and groups left out of the optimizer may be meant."""
    own = facts(1, parameters=(parameter("a", norm=2.0, bits=8), parameter("b", held=0)))
    names = {"gradients across ranks", "weights across ranks", "held by the optimizer"}
    assert false_lines("ddp", facts(0), own) == names
    lines = [one for one in loop_receipt(Expectation(), (facts(0), own)).lines if one.name in names]
    assert {(one.name, one.planned, one.ok) for one in lines} == {(name, "not stated", None) for name in names}
    right = loop_receipt(Expectation(), (facts(0), facts(1))).lines
    assert {one.ok for one in right if one.name in names} == {None}


def test_buffers_that_ddp_sends_may_differ_between_forwards() -> None:
    def rank(number: int, sent: bool) -> LoopFacts:
        return facts(number, buffers=(BufferFacts(name="mean", bits=number, sent=sent),))

    assert line("buffers across ranks", "ddp", rank(0, True), rank(1, True))[1] is None
    found, ok = line("buffers across ranks", "ddp", rank(0, False), rank(1, False))
    assert (found, ok) == ("1 of 1 differ, and nothing sends them: mean", False)


def test_a_model_in_evaluation_mode_matters_with_dropout_alone() -> None:
    assert line("training mode", None, facts(training=False), facts(1))[1] is None
    assert line("training mode", None, facts(training=False, dropouts=2), facts(1))[1] is False
    assert line("training mode", None, facts(quiet=("drop",), dropouts=2), facts(1))[1] is None


def test_what_one_rank_does_is_right_under_every_strategy() -> None:
    alone = facts(0, 1, wrapper="none", backward_elements=(0,))
    for strategy in ("ddp", "zero1", "fsdp", "hsdp"):
        assert not false_lines(strategy, alone)


def test_one_process_without_ranks() -> None:
    """The whole way, in this process: no group is needed, and none is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    receipts: list[shardwise.Receipt] = []
    observer = shardwise.observe(model, optimizer, "ddp", on_receipt=receipts.append, clip_norm=1e-6)
    for _ in range(3):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert receipts == [observer.receipt]
    assert [one.name for one in receipts[0].lines if one.ok is False] == ["gradient norm"]
    assert not optimizer._optimizer_step_post_hooks and not model._forward_hooks


@pytest.mark.parametrize("steps", [0, 1])
def test_an_observer_whose_step_never_comes_gives_up(
    steps: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observer_module, "_MOST_FORWARDS", 5)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = shardwise.observe(model, optimizer)
    with torch.no_grad():
        for _ in range(9):
            model(torch.randn(3, 4))  # evaluation first
    for _ in range(steps):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    for _ in range(5):
        model(torch.randn(3, 4))
    assert model._forward_pre_hooks and not caplog.records
    for _ in range(3):
        model(torch.randn(3, 4))
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    (record,) = caplog.records
    assert f"step {steps + 1} of SGD did not come in 5 forwards" in record.getMessage()
    assert "give observe the optimizer that the loop steps" in record.getMessage()
    assert observer.receipt is None


def test_a_callback_used_again_removes_what_a_failed_training_left() -> None:
    pytest.importorskip("transformers")
    from shardwise.integrations.transformers import ReceiptCallback

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = ReceiptCallback(expect="ddp")
    for _ in range(2):
        callback.on_train_begin(arguments(), None, None, model=model, optimizer=optimizer)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 1
    callback.on_train_end(arguments(), None, None)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not model._forward_pre_hooks


def test_hooks_of_others_on_the_optimizer_stay() -> None:
    """An optimizer iterates over its hooks: one that removes itself before others would end the training."""
    model, steps = nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = shardwise.observe(model, optimizer, on_receipt=lambda _: None)

    def compute_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).square().mean()

    loss = shardwise.check_gradients(model, optimizer, compute_loss, step=2, on_report=lambda _: None)
    optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
    optimizer.register_step_post_hook(lambda *_: steps.append("after"))
    for _ in range(4):
        optimizer.zero_grad()
        loss(model, torch.randn(3, 4)).backward()
        optimizer.step()
    assert steps == ["before", "after"] * 4
    assert observer.receipt is not None and loss.report is not None and loss.report.ok
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == (1, 1)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_all_impossible_settings_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        expectation_of("ddp", {"precision": "bfloat16", "grad_accum": 0, "clip_norm": -1})
    assert [word in str(caught.value) for word in ("precision = 'bfloat16'", "grad_accum = 0", "clip_norm = -1")] == [
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("text", ["fsdp+tp2", "ddp+pp2", "fsdp+cp2", "deepspeed-zero3+nvme"])
def test_strategies_that_split_the_model_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="not judged in a loop of another tool"):
        of_strategy(text)


def test_mistakes_have_one_message() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="fsdpp"):
        shardwise.observe(model, optimizer, "fsdpp")
    with pytest.raises(UserError, match="expect = int"):
        shardwise.observe(model, optimizer, 3)
    with pytest.raises(UserError, match="no step hooks"):
        shardwise.observe(model, object())
    with pytest.raises(UserError, match="give the model that the loop calls"):
        shardwise.observe(model.parameters(), optimizer)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="recompute = 'full': use True or False"):
        shardwise.observe(model, optimizer, recompute="full")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"no parameter 'wieght' \(did you mean 'weight'\?\)"):
        shardwise.observe(model, optimizer, tied=[("wieght", "bias")])
    with pytest.raises(UserError, match="use a list of groups"):
        shardwise.observe(model, optimizer, tied=("weight", "bias"))
    with pytest.raises(PlanError, match="'auto' is chosen by"):
        shardwise.observe(model, optimizer, "auto")
    with pytest.raises(UserError, match="compute_loss is a Tensor"):
        shardwise.check_gradients(model, optimizer, torch.zeros(()))  # type: ignore[arg-type]
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(2, 2)
    with pytest.raises(UserError, match=r"give the engine that deepspeed.initialize returned"):
        shardwise.observe(engine, optimizer)
    with pytest.raises(UserError, match="use report or error"):
        shardwise.observe(model, optimizer, on_difference="raise")  # type: ignore[arg-type]
    assert not model._forward_hooks and not optimizer._optimizer_step_post_hooks


def arguments(**more: Any) -> Any:
    usual = {"fsdp": False, "fsdp_config": None, "bf16": False, "fp16": False, "gradient_accumulation_steps": 1}
    return SimpleNamespace(
        **{**usual, "max_grad_norm": 1.0, "gradient_checkpointing": False, "ignore_data_skip": False, **more}
    )


@pytest.mark.parametrize(
    ("options", "strategy", "wrapper"),
    [
        ({}, "ddp", None),
        ({"fsdp": True, "fsdp_config": {"version": 2}}, "fsdp", "FSDP2"),
        ({"fsdp": True, "fsdp_config": {}}, "fsdp", "FSDP2"),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": "false"}}, "zero2", "FSDP2"),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "fsdp+offload", "FSDP2"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp", "FSDP1"),
        ({"fsdp": True, "fsdp_config": {"version": 1, "reshard_after_forward": "hybrid_shard"}}, "hsdp", "FSDP1"),
        ({"fsdp": True, "fsdp_config": {"version": 1, "reshard_after_forward": "shard_grad_op"}}, "zero2", "FSDP1"),
    ],
)
def test_what_training_arguments_ask_for(options: dict[str, Any], strategy: str, wrapper: str | None) -> None:
    found = of_training_arguments(arguments(**options))
    assert (str(found.strategy), found.wrapper) == (strategy, wrapper)


def test_training_arguments_state_precision_clipping_and_recompute() -> None:
    found = of_training_arguments(arguments(bf16=True, gradient_checkpointing=True, gradient_accumulation_steps=4))
    assert (found.precision, found.clip_norm, found.recompute, found.grad_accum) == ("bf16", 1.0, True, 4)
    assert of_training_arguments(arguments(max_grad_norm=0.0)).clip_norm is None
    assert of_training_arguments(arguments(bf16=True, torch_compile=True)).precision is None


def test_a_plan_and_an_expectation_are_taken_as_they_are() -> None:
    dims = dims_for(parse_strategy("fsdp"), 2)
    plan = Plan(strategy="fsdp", dims=dims, grad_accum=3, precision="bf16", recompute="full")
    found = expectation_of(plan, {"grad_accum": 5})
    assert (str(found.strategy), found.grad_accum, found.precision, found.recompute) == ("fsdp", 5, "bf16", True)
    own = Expectation(clip_norm=2.0)
    assert expectation_of(own, {}) == own


@pytest.mark.parametrize(
    ("sizes", "fsdp", "strategy"),
    [
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, True, "hsdp"),
        ({"dp_shard_size": 4}, True, "fsdp"),
        ({"tp_size": 2, "dp_shard_size": 2}, True, "None"),
        ({"tp_size": 4}, False, "None"),
        ({"dp_replicate_size": 4}, False, "ddp"),
    ],
)
def test_axes_beside_fsdp_are_not_taken_for_fsdp_over_all_ranks(
    sizes: dict[str, int], fsdp: bool, strategy: str
) -> None:
    found = of_training_arguments(arguments(fsdp=fsdp, parallelism_config=SimpleNamespace(**sizes)))
    assert str(found.strategy) == strategy


@pytest.mark.parametrize(
    ("batches", "accum", "begun", "short"),
    [(5, 2, 0, False), (5, 2, 1, True), (5, 2, 2, False), (3, 2, 0, True), (1, 2, 0, True), (4, 2, 1, False)],
)
def test_the_last_step_of_an_epoch_is_short_also_after_a_resumption(
    batches: int, accum: int, begun: int, short: bool
) -> None:
    from shardwise.integrations import transformers

    state = SimpleNamespace(global_step=begun)
    assert transformers.is_short(batches, accum, arguments(), state) is short
    assert transformers.is_short(5, 2, arguments(fp16=True), state)


def test_a_loop_too_short_for_a_receipt_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shardwise.observe(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert "no receipt, as the loop ended before its optimizer step 2" in caplog.text


@pytest.mark.parametrize(("steps", "said"), [(1, True), (2, False)])
def test_a_program_that_ends_before_the_receipt_says_so(
    steps: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a ``with`` only the interpreter's end tells that the loop has ended."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at_exit: dict[Any, None] = {}
    forget = mock.patch("atexit.unregister", lambda function: at_exit.pop(function, None))
    with mock.patch("atexit.register", lambda function: at_exit.setdefault(function)), forget:
        observer = shardwise.observe(model, optimizer)
        loss = shardwise.check_gradients(model, optimizer, lambda x: model(x).sum(), step=2)
        for _ in range(steps):
            loss(torch.ones(1, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for warn in at_exit:
            warn()
    assert ("observe: no receipt, as the loop ended before its optimizer step 2" in caplog.text) is said
    assert ("check_gradients: no report, as the training ended before its step 2" in caplog.text) is said
    observer.detach()
    loss.detach()


def test_an_observer_that_the_program_drops_keeps_no_model() -> None:
    def dropped() -> list[Any]:
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        observed, checked = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
        shardwise.observe(models[0], observed)
        shardwise.check_gradients(models[1], checked, lambda x: models[1](x).sum())(torch.ones(1, 2))
        return [weakref.ref(model) for model in models]

    at_exit: list[Any] = []
    with mock.patch("atexit.register", at_exit.append):
        kept = dropped()
    gc.collect()
    assert len(at_exit) == 2
    assert [reference() for reference in kept] == [None, None]
