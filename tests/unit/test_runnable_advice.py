"""What the planner recommends or advises runs: for every optimizer under every strategy, pinned and free."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.model.profile import ModelProfile
from shardwise.plan.optimizers import OPTIMIZERS, refusals
from shardwise.plan.plan import Plan, axis_problems, runnable
from shardwise.plan.program import ProgramTraits
from shardwise.plan.strategy import BASES, DEEPSPEED, parse_strategy
from shardwise.plan.workload import Workload
from shardwise.search import advice
from shardwise.search.candidate import Candidate, Pins
from shardwise.search.search import search
from shardwise.train.config import OptimizerTable, optimizer_problems

AXES = ("", "+tp2", "+pp2", "+cp2", "+tp2+pp2")
MEMORY = ("", "+offload", "+lora", "+qlora")


@cache
def profile() -> ModelProfile:
    return load_profile("llama-3.2-1b", seq_len=4096)


def parsed(text: str) -> bool:
    try:
        parse_strategy(text)
    except PlanError:
        return False
    return True


STRATEGIES = [s for s in map("".join, product([*BASES, *DEEPSPEED], AXES, MEMORY)) if parsed(s)]


def problems(plan: Plan, optimizer: str) -> list[str]:
    """What the runner says of a plan: its own checks, without a model or ranks."""
    table = OptimizerTable(name=optimizer, in_backward=plan.optimizer_in_backward, clip_norm=None)
    found = [*axis_problems(plan), *optimizer_problems(table, plan.parsed)]
    try:
        runnable(plan)
    except PlanError as error:
        found += error.problems
    return found


@pytest.mark.turns(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_pinned_strategy_runs_or_says_why_not(optimizer: str) -> None:
    cluster, refused = parse_cluster("2x4xA100-80GB"), 0
    for strategy in STRATEGIES:
        pins = Pins(strategy=parse_strategy(strategy), recompute="none", micro_batch=1)
        try:
            (only,) = search(
                profile(), Workload(optimizer=optimizer, global_batch=8, seq_len=4096), cluster, pins
            ).candidates
        except PlanError as error:
            expected = refusals(optimizer, parse_strategy(strategy))
            assert expected and all(any(line in said for said in error.problems) for line in expected), strategy
            refused += 1
            continue
        assert only.runnable == (not problems(only.plan, optimizer)), (strategy, only.why_not_runnable)
    assert bool(refused) == bool(OPTIMIZERS[optimizer].refuses)


@pytest.mark.parametrize("machine", ["2xRTX4090", "8xRTX3090", "2x8xA100-80GB"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_recommended_or_advised_runs(optimizer: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Plan, str]] = []
    asked, work = advice._candidate_text, Workload(optimizer=optimizer, global_batch=16, seq_len=4096)

    def note(candidate: Candidate, cluster: ClusterSpec) -> str:
        told.append((candidate.plan, optimizer))
        return asked(candidate, cluster)

    def command(options, candidate: Candidate) -> str:
        told.append((candidate.plan, options.get("--optimizer", optimizer)))
        return ""

    monkeypatch.setattr(advice, "_candidate_text", note)
    cluster = parse_cluster(machine)
    for name in ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"):
        model = load_profile(name, seq_len=4096)
        found = advice.search_and_advise(model, work, cluster, saves_memory=True, command=command)
        if found.recommended is not None:
            told.append((found.candidates[found.recommended].plan, found.optimizer or optimizer))
    assert told
    for plan, name in told:
        assert not problems(plan, name), (plan.strategy, name)


@pytest.mark.parametrize("pinned", ["zero1+tp2", "ddp+tp2", "fsdp+tp2", "zero1+pp2"])
def test_advice_about_a_pinned_strategy_runs(pinned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Plan, str]] = []

    def command(options, candidate: Candidate) -> str:
        told.append((candidate.plan, options.get("--optimizer", "adamw")))
        return ""

    pins, work = Pins(strategy=parse_strategy(pinned)), Workload(global_batch=16, seq_len=4096)
    model, cluster = load_profile("llama-3.1-8b", seq_len=4096), parse_cluster("2xRTX4090")
    found = advice.search_and_advise(model, work, cluster, pins, saves_memory=True, command=command)
    assert found.recommended is None and found.advice
    for plan, name in told:
        assert not problems(plan, name), (plan.strategy, name)


def test_advice_beside_fp8_products_can_be_trained() -> None:
    """Adapters and the optimizer in the backward are not run with fp8: their commands leave it out, and say so."""
    told: list[tuple[str, str, Plan]] = []

    def command(options, candidate: Candidate) -> str:
        told.append((str(candidate.plan.parsed), options.get("--fp8", ""), candidate.plan))
        return "COMMAND"

    work = Workload(global_batch=16, seq_len=4096, program=ProgramTraits(fp8="rowwise"), compiled=True)
    model, cluster = load_profile("llama-3.1-70b", seq_len=4096), parse_cluster("8xH100-SXM")
    found = advice.search_and_advise(model, work, cluster, saves_memory=True, command=command)
    assert {name.partition("+")[2] for name, _, _ in told} >= {"lora", "qlora"}
    for name, option, plan in told:
        assert not problems(plan, "adafactor"), name
        assert (option == "none") == (plan.fp8 == "none"), name
    lines = [line for line in found.other_trainings if "adapters" in line]
    assert len(lines) == 2 and all("; without --fp8 rowwise: COMMAND" in line for line in lines), lines
