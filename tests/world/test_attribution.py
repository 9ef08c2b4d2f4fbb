"""Where the time of a step goes, on real ranks: what is put somewhere is found there, and all of it adds up."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.backends.debugging import eager
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.distributed.process_group import join
from shardwise.measure.step_time import comm_hooks as borders
from shardwise.measure.step_time.attribution import Attribution
from shardwise.measure.step_time.timing import BETWEEN, PHASES, Timing
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests.families import family
from tests.ledger import uncounted
from tests.turns import by_turns
from tests.worlds import WorldError, run_world

STEPS = 9
SLEEP = 0.04


@dataclass(frozen=True)
class Case:
    """One small run; ``sleep_in`` names where ``sleeper`` (a rank, or every one) sleeps in each step: a part, or a
    method of FSDP2's, of the scaler or of the optimizer, which sleeps once in a step.
    """

    strategy: str
    world: int = 2
    accum: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    compile: bool = False
    sleep_in: str = ""
    sleeper: int | None = None
    every: bool = False
    precision: str = "fp32"
    sleep_s: float = SLEEP


def run(case: Case) -> dict[str, Any] | None:
    """Train; rank 0 returns the timing. What it changes is changed back."""
    with pytest.MonkeyPatch.context() as patched, patch("torch._inductor.compile_fx.compile_fx", eager):
        # where collectives become part of a graph is dynamo's; the graph itself may run as it is
        return trained(case, patched)


def trained(case: Case, patched: pytest.MonkeyPatch) -> dict[str, Any] | None:
    ranks = join("cpu")
    plan = Plan(
        strategy=case.strategy,
        dims=dims_for(parse_strategy(case.strategy), case.world),
        micro_batch=2,
        grad_accum=case.accum,
        recompute=case.recompute,
        pipeline_schedule=case.schedule,
        virtual_stages=1 if case.schedule == "1f1b" else 2,
        compile=case.compile,
        precision=case.precision,
    )
    session = Session(ranks=ranks, planner=lambda *_: plan)
    attribution = Attribution.attach(session)
    late = case.sleeper in (None, ranks.rank)

    def nap(where: str) -> None:
        if where == case.sleep_in and late:
            time.sleep(case.sleep_s)

    slept: set[int] = set()

    def slow(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def slower(*args: Any, **kwargs: Any) -> Any:
            if name == case.sleep_in and session.steps_done not in slept:
                slept.add(session.steps_done)
                nap(name)
            return plain(*args, **kwargs)

        patched.setattr(owner, name, slower)

    for name in ("wait_for_unshard", "post_backward"):
        slow(FSDPParamGroup, name)
    layers = 2 * max(1, plan.dims.pp)
    model = family("own", layers=layers, dtype=torch.float32)
    batch = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters()), batch)
    for owner, name in ((session.scaler, "unscale_"), (optimizer, "zero_grad")):
        if hasattr(owner, name):
            slow(owner, name)
    session.module.register_forward_pre_hook(lambda module, inputs: nap("forward"))
    block = session.applied.blocks[-1]

    def hook(module: Any, inputs: Any, found: torch.Tensor) -> None:
        if found.requires_grad and case.sleep_in == "backward":
            found.register_hook(lambda gradient: nap("backward"))

    block.register_forward_hook(hook)
    if case.every:
        begin = session.begin_micro
        session.begin_micro = lambda *, last, padding=False: begin(last=True, padding=padding)  # type: ignore[method-assign]

    def windows() -> Any:
        while True:
            nap("data")
            yield [(batch, batch)] * case.accum

    for step in session.run_windows(windows(), limit=STEPS):
        step.run(model, token_loss_sum)
        nap("other")
        step.update(optimizer, clip_norm=1.0)
        if case.sleep_in == "checkpoint":
            session.phase = "checkpoint"
            nap("checkpoint")
            session.phase = "other"
    attribution.finish()
    assert COMM_TIMER.listener is None
    assert attribution not in session.observers and attribution not in session.header and not session.phase_watchers
    timing = attribution.timing()
    assert (timing is None) == (ranks.rank > 0)
    session.close()
    return None if timing is None else timing.model_dump()


def run_all(cases: list[Case]) -> list[dict[str, Any] | None]:
    return [run(case) for case in cases]


@functools.cache
def timings(strategy: str, world: int) -> dict[Case, dict[str, Any]]:
    """Those of all cases of a strategy, one after another on the same ranks; none where one of them fails."""
    cases = [case for case in (*CASES, *SLEEPING, *UNASKED, *REDUCING, *BETWEEN_STEPS) if not case.compile]
    cases = [case for case in dict.fromkeys(cases) if (case.strategy, case.world) == (strategy, world)]
    try:
        return dict(zip(cases, run_world(run_all, world, cases, timeout_s=50.0)[0], strict=True))
    except WorldError:
        return {}


def timing_of(case: Case) -> Timing:
    """With the others of its strategy, or alone where one of them fails: each tells what is its own."""
    found = timings(case.strategy, case.world)
    return Timing(**(found[case] if case in found else run_world(run, case.world, case)[0]))


ALL_CASES = [
    Case("ddp", 1),
    Case("ddp"),
    Case("ddp", accum=3, recompute="full"),
    Case("zero1"),
    Case("zero2", accum=2),
    Case("fsdp", recompute="selective"),
    Case("hsdp", 4),
    Case("fsdp+offload"),
    Case("ddp+tp2"),
    Case("fsdp+tp2", 4, recompute="full"),
    Case("ddp+cp2"),
    Case("ddp+pp2", accum=4),
    Case("fsdp+pp2", 4, accum=4, schedule="interleaved-1f1b"),
]
CASES = by_turns(ALL_CASES, 2, "parts")  # chosen here: what a strategy's cases are measured in is one world
PLACES = ("data", "forward", "backward", "other")
ALL_LATE = by_turns(
    [Case(strategy, sleep_in=where) for strategy in ("ddp", "fsdp", "ddp+tp2") for where in PLACES], 4, "all late"
)
ONE_LATE = by_turns(
    [Case(strategy, sleep_in=where, sleeper=1) for strategy in ("ddp", "fsdp", "zero1", "ddp+tp2") for where in PLACES],
    4,
    "one late",
)
SLEEPING = [*ALL_LATE, *ONE_LATE]
UNASKED = {
    Case("fsdp", sleep_in="wait_for_unshard"): "exposed_dp",
    Case("fsdp", sleep_in="post_backward"): "exposed_dp",
    Case("fsdp", 1, sleep_in="wait_for_unshard"): "forward",
    Case("fsdp", 1, sleep_in="post_backward"): "backward",
    Case("ddp", 1, sleep_in="unscale_", precision="fp16"): "clip",
    Case("ddp", 1, sleep_in="zero_grad"): "optimizer",
}
REDUCING = [Case(strategy, accum=3, every=every) for strategy in ("ddp", "fsdp") for every in (True, False)]
STAGES_APART = Case("ddp+pp2", accum=2, sleep_in="backward")
SAVING = Case("ddp", sleep_in="checkpoint")
BETWEEN_STEPS = [STAGES_APART, SAVING]


def thrice(test: Callable[[Case, Timing], None]) -> Callable[[Case], None]:
    """Measure anew where ``test`` fails, twice at most, and sleep four times as long each time.

    A busy machine is late anywhere, by less than a long sleep; a clock that counts a sleep where it was not is wrong
    each time.
    """

    def tried(case: Case) -> None:
        for longer in (1, 4, 16):
            slower = replace(case, sleep_s=SLEEP * longer)
            if longer == 1:
                timing = timing_of(case)
            else:
                with uncounted():  # how often is the machine's doing
                    timing = Timing(**run_world(run, case.world, slower)[0])
            try:
                return test(slower, timing)
            except AssertionError:
                if longer == 16:
                    raise
        return None

    tried.__name__, tried.__doc__ = test.__name__, test.__doc__
    return tried


def name_of(case: Case) -> str:
    return f"{case.strategy}-{case.sleep_in}-{case.world}"


@pytest.mark.turns(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.strategy}-{case.recompute}-{case.accum}")
@thrice
def test_parts_add_up_and_only_those_that_there_are_told(case: Case, timing: Timing) -> None:
    assert timing.steps == STEPS - timing.warm_up == STEPS - 3
    told = {part: found for part, found in timing.parts.items() if found is not None}
    assert sum(found.mean_s for found in told.values()) == pytest.approx(timing.step_s, rel=1e-6)
    assert timing.stopwatch_s == pytest.approx(timing.step_s + sum(timing.between_s.values()), rel=0.01)
    parallel = {
        "exposed_dp": timing.world_size > 1 and case.strategy not in ("ddp+tp2", "ddp+pp2"),
        "exposed_tp": "tp" in case.strategy,
        "exposed_cp": "cp" in case.strategy,
        "pipeline": "pp" in case.strategy,
        "recompute": case.recompute != "none",
        "slowest_rank": timing.world_size > 1,
    }
    for part, there in parallel.items():
        assert (part in told) == there, part
        if there and part != "slowest_rank":
            assert told[part].high_s > 0, part
    for part in ("forward", "backward", "clip", "optimizer", "data", "other"):
        assert told[part].low_s > 0
    assert not timing.unmeasured and not timing.early_reduces
    assert len(timing.ranks) == case.world and set(timing.ranks[0]) == {*PHASES, *BETWEEN}


@pytest.mark.turns(1)
@pytest.mark.parametrize("case", ALL_LATE, ids=name_of)
@thrice
def test_what_all_ranks_do_is_found_where_they_do_it(case: Case, timing: Timing) -> None:
    found = timing.parts[case.sleep_in]
    assert found is not None and case.sleep_s <= found.low_s < case.sleep_s * 1.9
    assert timing.seconds("slowest_rank") < case.sleep_s / 2


@pytest.mark.turns(1)
@pytest.mark.parametrize("case", ONE_LATE, ids=name_of)
@thrice
def test_what_one_rank_does_is_waited_for_by_the_others(case: Case, timing: Timing) -> None:
    waited, own = timing.parts["slowest_rank"], timing.parts[case.sleep_in]
    assert waited is not None and own is not None
    assert waited.highest_rank == 0 and case.sleep_s * 0.8 <= waited.high_s < case.sleep_s * 1.9
    assert own.highest_rank == 1 and own.high_s - own.low_s > case.sleep_s * 0.8
    assert timing.late_rank == 1 and timing.late_share is not None and timing.late_share > 0.8


@pytest.mark.parametrize("case", UNASKED, ids=name_of)
@thrice
def test_what_the_loop_did_not_ask_for_is_not_its_own_code(case: Case, timing: Timing) -> None:
    part = UNASKED[replace(case, sleep_s=SLEEP)]
    found = timing.parts[part]
    assert found is not None and found.low_s >= case.sleep_s
    for another in {"forward", "backward", "clip", "optimizer", "other"} - {part}:
        assert timing.seconds(another) < case.sleep_s, another


def test_a_stage_that_is_through_before_another_is_part_of_the_bubble():
    timing = timing_of(STAGES_APART)
    bubble = timing.parts["pipeline"]
    assert bubble is not None and bubble.low_s > SLEEP * 0.8
    assert timing.seconds("slowest_rank") < SLEEP / 4


def test_what_lies_between_steps_is_no_step_time():
    timing = timing_of(SAVING)
    assert timing.between_s["checkpoint"] > SLEEP * 0.8  # none after the last step
    assert timing.between_s["evaluation"] == 0
    assert timing.stopwatch_s == pytest.approx(timing.step_s + timing.between_s["checkpoint"], rel=0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_reductions_before_the_last_micro_batch_are_counted(strategy: str):
    timing = timing_of(Case(strategy, accum=3, every=True))
    assert timing.early_reduces == 2
    exposed = timing.parts["exposed_dp"]
    assert timing.early_reduce_s is not None and exposed is not None and timing.early_reduce_s > 0
    assert timing_of(Case(strategy, accum=3)).early_reduces == 0


@pytest.mark.turns(3)
def test_what_the_compiler_hides_is_unknown_and_not_zero():
    timing = timing_of(Case("ddp+tp2", compile=True))
    assert timing.parts["exposed_tp"] is None and "compiled" in timing.unmeasured["exposed_tp"]
    assert set(timing.unmeasured) == {"exposed_tp"}, "there is neither context parallel nor recompute"
    told = [found.mean_s for found in timing.parts.values() if found is not None]
    assert sum(told) == pytest.approx(timing.step_s, rel=1e-6)


def order_that_changes(every: int, recheck: int) -> dict[str, str] | None:
    """After ``every`` steps another branch is the last to have a gradient."""
    borders.RECHECK = recheck
    ranks = join("cpu")

    class Turns(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for index in range(4):
                x = self.parts[(index + self.calls // every) % 4](x)
            return x

    plan = Plan(strategy="ddp", dims=dims_for(parse_strategy("ddp"), 2))
    session = Session(ranks=ranks, planner=lambda *_: plan)
    attribution = Attribution.attach(session)
    model = Turns()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(2, 8)
    for step in session.run_windows(iter([[(batch, torch.zeros(2))]] * 12)):
        step.run(model, lambda out, labels: out.square().sum())
        step.update(optimizer)
    attribution.finish()
    timing = attribution.timing()
    return None if timing is None else timing.unmeasured


@pytest.mark.parametrize(("every", "recheck"), [(4, 4), (1, borders.RECHECK)])
def test_gradients_in_another_order_are_noticed(every: int, recheck: int):
    assert "order" in run_world(order_that_changes, 2, every, recheck)[0]["exposed_dp"]


def late_for_buffers() -> dict[str, Any] | None:
    """Rank 0, whose buffers DDP sends round before a forward, comes late to it."""
    ranks = join("cpu")
    plan = Plan(strategy="ddp", dims=dims_for(parse_strategy("ddp"), 2))
    session = Session(ranks=ranks, planner=lambda *_: plan)
    attribution = Attribution.attach(session)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(4, 8)
    for step in session.run_windows(iter([[(batch, torch.zeros(4))]] * STEPS)):
        time.sleep(SLEEP if ranks.is_main else 0.0)
        step.run(model, lambda out, labels: out.square().sum())
        step.update(optimizer)
    attribution.finish()
    timing = attribution.timing()
    return None if timing is None else timing.model_dump()


def test_buffers_that_are_sent_round_are_waited_for():
    timing = Timing(**run_world(late_for_buffers, 2)[0])
    waited, forward = timing.parts["slowest_rank"], timing.parts["forward"]
    assert waited is not None and forward is not None
    assert waited.highest_rank == 1 and waited.high_s > SLEEP * 0.8 and forward.high_s < SLEEP / 2
    assert timing.late_rank == 0


def two_sessions() -> list[float] | None:
    """Two models are trained in turn."""
    ranks = join("cpu")
    made = []
    for _ in range(2):
        plan = Plan(strategy="fsdp", dims=dims_for(parse_strategy("fsdp"), 2))
        session = Session(ranks=ranks, planner=lambda *_, plan=plan: plan)
        attribution = Attribution.attach(session)
        model = torch.nn.Linear(8, 8)
        outer, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = torch.randn(2, 8)
        made.append((attribution, outer, optimizer, session.run_windows(iter([[(batch, torch.zeros(2))]] * STEPS))))
    for _ in range(STEPS):
        for _, outer, optimizer, steps in made:
            step = next(steps)
            step.run(outer, lambda out, labels: out.square().sum())
            step.update(optimizer)
    for attribution, *_ in made:
        attribution.finish()
    assert COMM_TIMER.listener is None
    timings = [attribution.timing() for attribution, *_ in made]
    return [timing.seconds("exposed_dp") for timing in timings if timing is not None]


def test_each_of_two_sessions_has_its_own_waits():
    first, second = run_world(two_sessions, 2)[0]
    assert first > 0 and second > 0
    assert max(first, second) < 20 * min(first, second)


def own_backward() -> dict[str, Any] | None:
    """Between two steps the loop takes gradients of its own, and works on."""
    ranks = join("cpu")
    plan = Plan(strategy="ddp", dims=dims_for(parse_strategy("ddp"), 2))
    session = Session(ranks=ranks, planner=lambda *_: plan)
    attribution = Attribution.attach(session)
    model = torch.nn.Linear(8, 8)
    outer, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(4, 8)
    for step in session.run_windows(iter([[(batch, torch.zeros(4))]] * STEPS)):
        step.run(outer, lambda out, labels: out.square().sum())
        step.update(optimizer)
        outer(batch).sum().backward()
        optimizer.zero_grad()
        time.sleep(SLEEP)
    attribution.finish()
    timing = attribution.timing()
    return None if timing is None else timing.model_dump()


def test_gradients_of_the_loops_own_are_its_own_code():
    timing = Timing(**run_world(own_backward, 2)[0])
    assert timing.parts["other"].low_s >= SLEEP  # type: ignore[union-attr]
    assert timing.seconds("exposed_dp") + timing.seconds("slowest_rank") < SLEEP


def session_dropped() -> list[bool]:
    """Train a little, and forget the session without closing it."""
    ranks = join("cpu")
    plan = Plan(strategy="ddp", dims=dims_for(parse_strategy("ddp"), 2))
    session = Session(ranks=ranks, planner=lambda *_: plan)
    session.timekeeper = Attribution.attach(session)
    model = torch.nn.Linear(8, 8)
    outer, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(2, 8)
    for step in session.run_windows(iter([[(batch, torch.zeros(2))]] * STEPS)):
        step.run(outer, lambda out, labels: out.square().sum())
        step.update(optimizer)
    held = [weakref.ref(one) for one in (session, model, outer)]
    del session, model, outer, optimizer, step
    gc.collect()
    return [one() is None for one in held]


def test_a_session_that_nobody_closes_does_not_keep_its_model():
    assert all(run_world(session_dropped, 2)[0])
