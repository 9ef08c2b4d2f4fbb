"""The rules of diagnosis, on timings that are made up: each cause is found, weighed and told apart from the others."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwise.cost.time.step_time import StepTime
from shardwise.diagnosis.diagnose import diagnose, why_nothing
from shardwise.diagnosis.finding import Finding
from shardwise.diagnosis.observe import _catalogue, price_of
from shardwise.diagnosis.observed import DeviceState, HostUse, LinkUse, LossSpike, LostGradient, Observed, SaveStall
from shardwise.diagnosis.waits import workers_needed
from shardwise.diagnosis.weight import ALARM, HEAVY, HINT, MIN_STEPS, percent, rate, span
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.measure.step_time.timing import BETWEEN, PHASES, PhaseStats, Timing
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.report.terminal import print_findings
from shardwise.search.alternatives import Alternative, changes
from shardwise.train.metrics import logged_losses, logged_spikes

CLEAN = {"forward": 0.030, "backward": 0.060, "exposed_dp": 0.002, "optimizer": 0.005, "control": 0.001, "data": 0.001}


def spread_of(values: list[float]) -> PhaseStats:
    high = max(range(len(values)), key=lambda rank: values[rank])
    return PhaseStats(mean_s=sum(values) / len(values), low_s=min(values), high_s=values[high], highest_rank=high)


def timing(*changed: dict[str, float], steps: int = 40, **more: Any) -> Timing:
    """A timing of as many ranks as there are dicts (2 of them if none): the clean one with these parts changed."""
    rows = [{**CLEAN, "slowest_rank": 0.0, **row} for row in (changed or ({}, {}))]
    if len(rows) == 1:
        rows[0].pop("exposed_dp"), rows[0].pop("slowest_rank")
    kept = [part for part in PHASES if all(part in row for row in rows)]
    ranks = tuple({part: row.get(part, 0.0) for part in (*PHASES, *BETWEEN)} for row in rows)
    facts: dict[str, Any] = {
        "steps": steps,
        "warm_up": 3,
        "world_size": len(rows),
        "step_s": sum(sum(row[part] for part in kept) for row in rows) / len(rows),
        "median_step_s": 0.1,
        "parts": {part: spread_of([row[part] for row in rows]) if part in kept else None for part in PHASES},
        "between_s": dict.fromkeys(BETWEEN, 0.0),
        "ranks": ranks,
        "late_share": 0.0,
        "cpu_wait_s": spread_of([0.0005] * len(rows)),
        "early_reduce_s": 0.0,
        "early_reduces": 0.0,
    }
    return Timing(**(facts | more))


def late(rank: int, part: str, seconds: float = 0.05, world: int = 2, share: float = 0.95, **more: Any) -> Timing:
    """One rank spends ``seconds`` more in ``part``, and the others wait for it."""
    rows = [{"slowest_rank": seconds} if r != rank else {part: CLEAN.get(part, 0.0) + seconds} for r in range(world)]
    return timing(*rows, late_rank=rank, late_share=share, **more)


def observed(of: Timing, **facts: Any) -> Observed:
    plan = facts.pop("plan", Plan(strategy="ddp", dims=ParallelDims(dp_replicate=of.world_size), micro_batch=4))
    return Observed(timing=of, plan=plan, **facts)


def alarms(found: tuple[Finding, ...]) -> list[str]:
    return [finding.kind for finding in found if finding.level == "alarm"]


def only(found: tuple[Finding, ...]) -> Finding:
    """The single alarm, which must lead."""
    assert [finding.level for finding in found].count("alarm") == 1, found
    assert found[0].level == "alarm"
    return found[0]


@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_clean_run_is_healthy_and_said_to_be(world: int) -> None:
    found = diagnose(observed(timing(*[{}] * world), price=2.0))
    assert [finding.kind for finding in found] == ["healthy"]
    assert found[0].level == "fine"
    assert "computation" in found[0].text
    assert found[0].seconds is None
    assert found[0].money is None


def test_only_computation_is_called_so() -> None:
    copied = diagnose(observed(timing({"transfer": 0.2}, {"transfer": 0.2})))[0].text
    assert "32 % of a step" in copied and "the largest remaining component is host to device, 200 ms" in copied
    evaluated = diagnose(observed(timing(between_s={"checkpoint": 0.0, "evaluation": 1.0})))[0].text
    assert "9 % of a step" in evaluated and "the largest remaining component is evaluation, 1 s" in evaluated
    assert "the largest remaining component is exposed communication, dp, 2 ms" in diagnose(observed(timing()))[0].text


def test_too_few_steps_are_not_judged() -> None:
    few = timing({"data": 0.5}, {"data": 0.5}, steps=MIN_STEPS - 1)
    assert diagnose(observed(few)) == ()
    assert str(MIN_STEPS) in why_nothing(few)
    assert why_nothing(timing()) == ""


def test_a_slow_loader_is_found_with_its_cost_and_the_workers_that_would_do() -> None:
    found = only(diagnose(observed(timing({"data": 0.03}, {"data": 0.03}), loader_workers=0, price=2.0)))
    assert found.kind == "data-loader"
    assert found.seconds == pytest.approx(0.03)
    assert found.share == pytest.approx(0.03 / 0.128)
    assert found.money == pytest.approx(2 * 2.0 * 0.03 / 0.128)
    assert "num_workers=1," in found.fix


def test_where_a_price_is_from_is_said() -> None:
    assert price_of(parse_cluster("8xA100-80GB"))[1].startswith("the hardware table")
    assert price_of(parse_cluster("2xcpu")) == (None, "")
    own = parse_cluster("8xA100-80GB").model_copy(update={"price_per_device_hour": 3.0})
    assert price_of(own) == (3.0, "the price of this cluster")
    found = diagnose(
        observed(timing({"data": 0.03}, {"data": 0.03}), price=3.0, price_from="the price of this cluster")
    )
    assert found[0].evidence[-1] == "$3.00 an hour of a device: the price of this cluster"


@pytest.mark.parametrize(
    ("waits", "step", "have", "needed"),
    [
        (0.03, 0.13, 0, 1),  # 30 ms of making against 100 ms of computing
        (0.30, 0.40, 0, 3),  # 300 ms of making against 100 ms
        (0.30, 0.40, 1, 4),  # one worker makes a batch in 400 ms
        (0.10, 0.20, 2, 4),
        (0.02, 1.00, 2, 3),  # never fewer than there are, as they do not keep up
        (0.03, 0.03, 0, 30_000_000),  # nothing but waiting
    ],
)
def test_how_many_workers_would_do(waits: float, step: float, have: int, needed: int) -> None:
    assert workers_needed(waits, step, have) == needed


def test_one_rank_that_is_fed_hides_no_slow_loader() -> None:
    found = only(diagnose(observed(timing({"slowest_rank": 0.05}, *[{"data": 0.05}] * 7))))
    assert found.kind == "data-loader"
    half = timing(*[{"slowest_rank": 0.1}] * 2, *[{"data": 0.1}] * 2, late_rank=2, late_share=0.9)
    assert alarms(diagnose(observed(half))) == ["straggler"]


def test_a_number_of_workers_that_nobody_can_start_is_no_advice() -> None:
    fix = only(diagnose(observed(timing({"data": 10.0}, {"data": 10.0}), loader_workers=0))).fix
    assert "num_workers" not in fix and "beforehand" in fix


def test_workers_that_the_cores_cannot_feed_are_said_aloud() -> None:
    host = HostUse(cores=2, machine_cores=2, local_ranks=2, threads=1)
    text = only(diagnose(observed(timing({"data": 0.4}, {"data": 0.4}), loader_workers=0, host=host))).fix
    assert "on 2 cores" in text
    roomy = host.model_copy(update={"cores": 64, "machine_cores": 64})
    assert "on 64" not in diagnose(observed(timing({"data": 0.4}, {"data": 0.4}), loader_workers=0, host=roomy))[0].fix


@pytest.mark.parametrize("part", ["forward", "other", "data", "optimizer"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_late_rank_is_named_with_the_part_it_is_late_in(part: str, world: int) -> None:
    found = only(diagnose(observed(late(1, part, world=world))))
    assert (found.kind, found.rank) == ("straggler", 1)
    assert found.seconds == pytest.approx(0.05)
    assert found.evidence[0].endswith(": 50 ms more than the other ranks")


def test_little_time_in_the_loop_of_train_is_nobodys_to_mend() -> None:
    """3 ms are a tenth of a short step, and its code is not the user's; their own loop is."""
    short = {"forward": 0.005, "backward": 0.01, "slowest_rank": 0.003}
    brief = timing(short, {**short, "other": 0.004, "slowest_rank": 0.0}, late_rank=1, late_share=0.95)
    assert alarms(diagnose(observed(brief))) == ["straggler"]
    assert "straggler" not in str(diagnose(observed(brief, own_loop=True)))
    found = only(diagnose(observed(late(1, "other"), own_loop=True)))
    assert (found.kind, found.rank) == ("straggler", 1) and "logging" not in str(found.fix)
    assert "straggler" not in str(diagnose(observed(late(1, "other", seconds=0.019), own_loop=True)))


def test_a_rank_that_waits_for_its_own_data_is_no_slow_loader_of_all() -> None:
    assert alarms(diagnose(observed(late(1, "data", seconds=0.2)))) == ["straggler"]


def test_ranks_that_take_turns_raise_no_alarm() -> None:
    turns = timing({"slowest_rank": 0.03}, {"slowest_rank": 0.03}, late_rank=0, late_share=0.5)
    found = diagnose(observed(turns))
    assert [finding.kind for finding in found] == ["healthy", "straggler"]
    assert found[1].rank is None


def test_a_rank_that_is_late_now_and_then_is_a_hint() -> None:
    found = diagnose(observed(late(1, "forward", share=0.5)))
    assert alarms(found) == []
    assert [finding.kind for finding in found] == ["healthy", "straggler"]


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    plan = Plan(strategy="ddp+pp2", dims=ParallelDims(pp=2), micro_batch=4, grad_accum=8)
    assert alarms(diagnose(observed(late(1, "forward"), plan=plan))) == []


def test_stages_without_a_peer_are_not_said_to_be_alike() -> None:
    plan = Plan(strategy="ddp+pp2", dims=ParallelDims(pp=2), micro_batch=4, grad_accum=8)
    found = diagnose(observed(timing({"slowest_rank": 0.05}, {"forward": 0.08}), plan=plan))
    assert "none can be compared" in next(one for one in found if one.kind == "straggler").evidence[0]


def test_missing_cores_lead_and_the_late_rank_follows_from_them() -> None:
    waits = spread_of([0.002, 0.048])
    host = HostUse(cores=2, machine_cores=2, local_ranks=2, threads=1, busy=2.0, own=1.0, seconds=10)
    found = diagnose(observed(late(1, "backward", cpu_wait_s=waits), host=host))
    assert alarms(found) == ["cpu-oversubscription"]
    assert found[0].rank == 1
    assert found[0].seconds == pytest.approx(0.046)
    follower = next(finding for finding in found if finding.kind == "straggler")
    assert follower.level == "hint"
    assert "follows from" in follower.evidence[-1]


def test_ranks_that_all_wait_a_little_for_cores_are_no_alarm_but_one_that_waits_more_is() -> None:
    assert alarms(diagnose(observed(timing(cpu_wait_s=spread_of([0.014, 0.016]))))) == []
    assert alarms(diagnose(observed(timing(cpu_wait_s=spread_of([0.001, 0.016]))))) == ["cpu-oversubscription"]
    assert alarms(diagnose(observed(timing(cpu_wait_s=spread_of([0.024, 0.026]))))) == ["cpu-oversubscription"]


def test_a_late_rank_that_had_its_core_stays_a_straggler() -> None:
    found = diagnose(observed(late(1, "forward", seconds=0.08, cpu_wait_s=spread_of([0.02, 0.02]))))
    assert alarms(found)[0] == "straggler"


@pytest.mark.parametrize(
    ("host", "words", "fix"),
    [
        ({"cores": 1, "machine_cores": 2, "local_ranks": 2, "threads": 1}, "2 ranks on 1", "no more than 1 rank "),
        ({"cores": 4, "machine_cores": 4, "local_ranks": 2, "threads": 4}, "4 threads on 4", "parallel.threads=2"),
        (
            {"cores": 4, "machine_cores": 4, "local_ranks": 2, "threads": 2, "busy": 4.0, "own": 2.5, "seconds": 1.0},
            "keep 1.5 of 4 busy",
            "stop the other processes",
        ),
        ({"cores": 2, "machine_cores": 8, "local_ranks": 2, "threads": 1}, "may use 2 of 8", "taskset"),
    ],
)
def test_who_crowds_the_cores_is_said(host: dict[str, Any], words: str, fix: str) -> None:
    crowded = timing(cpu_wait_s=spread_of([0.05, 0.05]))
    found = only(diagnose(observed(crowded, host=HostUse(**host))))
    assert found.kind == "cpu-oversubscription"
    assert words in found.text
    assert fix in found.fix


def test_a_save_that_stalls_is_found_with_the_interval_that_would_do() -> None:
    stalled = timing(between_s={"checkpoint": 0.1, "evaluation": 0.0})
    saves = tuple(SaveStall(step=n, stall_s=0.5, write_s=0.5, num_bytes=10**8) for n in (5, 10))
    found = only(diagnose(observed(stalled, saves=saves, save_every=5)))
    assert found.kind == "checkpoint-stall"
    assert found.share == pytest.approx(0.1 / 0.199)
    assert "async_save=true" in found.fix
    assert "checkpoint.every is 5" in found.evidence
    assert "checkpoint.every=253 " in found.fix  # 0.5 s / (0.02 × 0.099 s)
    assert "200 MB/s" in found.evidence[1]
    behind = tuple(save.model_copy(update={"background": True}) for save in saves)
    assert "async_save=true" not in diagnose(observed(stalled, saves=behind))[0].fix


def link(bytes_per_step: float | None, expected: float | None) -> LinkUse:
    return LinkUse(axis="dp", name="eth0", bytes_per_step=bytes_per_step, expected=expected, expected_from="its driver")


def test_a_link_that_carries_too_little_is_slow() -> None:
    shaped = timing({"exposed_dp": 0.09}, {"exposed_dp": 0.09})
    found = only(diagnose(observed(shaped, links=(link(11e6, 1.25e9),))))
    assert found.kind == "slow-link"
    assert found.seconds == pytest.approx(0.09 - 11e6 / 1.25e9, rel=0.01)
    assert "978 Mbit/s" in found.text
    assert "10 Gbit/s" in found.text


@pytest.mark.parametrize(
    "what",
    [link(11e6, None), link(None, 1.25e9), link(11e6, 125e6), link(11e6, 500e6), link(1000.0, 1.25e9)],
    ids=["speed unknown", "bytes unknown", "as fast as it should be", "not much slower", "few bytes: latency"],
)
def test_a_link_that_is_not_known_to_be_slow_is_not_called_so(what: LinkUse) -> None:
    waits = HEAVY * 1.2 * 0.1
    shaped = timing({"exposed_dp": waits}, {"exposed_dp": waits})
    found = diagnose(observed(shaped, links=(what,)))
    assert "slow-link" not in [finding.kind for finding in found]
    assert "communication" in [finding.kind for finding in found]


def test_small_messages_that_wait_as_planned_are_no_slow_link() -> None:
    plan = Plan(strategy="ddp+tp8", dims=ParallelDims(tp=8), micro_batch=4)
    sheet = LinkUse(axis="tp", name="the nvlink link", bytes_per_step=1e9, expected=330e9, expected_from="a sheet")
    waits = timing(*[{"exposed_tp": 0.02}] * 8)

    def kind(predicted: float | None, of: LinkUse = sheet) -> str:
        time = None if predicted is None else StepTime(step_s=0.1, low_s=0.1, high_s=0.1, exposed_tp_s=predicted)
        found = diagnose(observed(waits, plan=plan, device="cuda", backend="nccl", links=(of,), predicted=time))
        return next(one.kind for one in found if one.kind in ("slow-link", "communication"))

    assert [kind(seconds) for seconds in (None, 0.003, 0.015)] == ["slow-link", "slow-link", "communication"]
    over_a_slow_one = sheet.model_copy(update={"measured": 50e9, "measured_from": "bench comm"})
    assert kind(0.015, over_a_slow_one) == "slow-link", "planned with the slow link itself"


def test_what_a_link_should_carry_is_what_collectives_get_of_it() -> None:
    plan = Plan(strategy="ddp", dims=ParallelDims(dp_replicate=8), micro_batch=4)
    mesh, pair = parse_cluster("8xMI300X"), Plan(strategy="ddp", dims=ParallelDims(dp_replicate=2), micro_batch=4)
    assert mesh.link is not None
    full, source = _catalogue(mesh, mesh.link, "dp", plan, 8)
    two, _ = _catalogue(mesh, mesh.link, "dp", pair, 2)
    assert full is not None and two is not None
    assert two == pytest.approx(full / 7), "one of seven links"
    assert full < mesh.link.bytes_per_s
    assert source.startswith("what NCCL gets of it: ")
    nodes = parse_cluster("2x8xH100/ib400")
    assert nodes.network is not None
    got, _ = _catalogue(nodes, nodes.network, "tp", Plan(strategy="ddp+tp16", dims=ParallelDims(tp=16)), 8)
    assert got is not None and got > nodes.network.bytes_per_s, "a group of a whole node has all of its cards"
    assert _catalogue(None, None, "dp", plan, 8) == (None, "")


def test_sharding_inside_a_node_is_advised_only_where_there_are_nodes() -> None:
    for accum in (1, 4):
        plan = Plan(strategy="fsdp", dims=ParallelDims(dp_shard=2), micro_batch=4, grad_accum=accum)
        waits = timing({"exposed_dp": 0.1}, {"exposed_dp": 0.1})
        advised = ["hsdp" in only(diagnose(observed(waits, plan=plan, nodes=nodes))).fix for nodes in (1, 2)]
        assert advised == [False, True]


def test_gloo_is_not_measured_by_what_it_cannot_reach() -> None:
    def kinds(bytes_per_step: float, **facts: Any) -> list[str]:
        shaped = timing({"exposed_dp": 0.05}, {"exposed_dp": 0.05}, **facts)
        return alarms(diagnose(observed(shaped, links=(link(bytes_per_step, 12.5e9),), backend="gloo")))

    assert kinds(0.05 * 0.3e9) == ["communication"]
    assert kinds(0.05 * 0.2e9) == ["slow-link"]
    assert kinds(0.05 * 0.2e9, cpu_wait_s=spread_of([0.04, 0.04])) == ["cpu-oversubscription"]


def test_much_communication_is_an_alarm_and_some_is_a_hint() -> None:
    levels = {}
    for waits in (0.001, 0.02, 0.09):
        found = diagnose(observed(timing({"exposed_dp": waits}, {"exposed_dp": waits})))
        levels[waits] = next((finding.level for finding in found if finding.kind == "communication"), None)
    assert levels == {0.001: None, 0.02: "hint", 0.09: "alarm"}


def test_waiting_for_a_late_rank_is_not_the_links_fault() -> None:
    found = diagnose(observed(late(1, "forward", seconds=0.3), links=(link(11e6, 1.25e9),)))
    assert alarms(found) == ["straggler"]


def test_tensor_parallel_across_nodes_is_the_wrong_topology() -> None:
    plan = Plan(strategy="ddp+tp2", dims=ParallelDims(dp_replicate=2, tp=2), micro_batch=4)
    shaped = timing(*[{"exposed_tp": 0.05}] * 4)
    found = only(diagnose(observed(shaped, plan=plan, nodes=4)))
    assert found.kind == "slow-link"
    assert "topology" in found.text
    assert alarms(diagnose(observed(shaped, plan=plan, nodes=2))) == ["communication"]


def test_gradients_reduced_after_every_micro_batch_are_found() -> None:
    plan = Plan(strategy="ddp", dims=ParallelDims(dp_replicate=2), micro_batch=4, grad_accum=4)
    early = timing({"exposed_dp": 0.08}, {"exposed_dp": 0.08}, early_reduce_s=0.06, early_reduces=3.0)
    found = diagnose(observed(early, plan=plan))
    assert alarms(found) == ["early-sync"]
    assert found[0].seconds == pytest.approx(0.06)
    assert "4 times a step" in found[0].text


def test_a_plan_that_must_reduce_early_to_fit_is_not_scolded() -> None:
    plan = Plan(strategy="fsdp", dims=ParallelDims(dp_shard=2), micro_batch=4, grad_accum=4, gradient_sync="every")
    early = timing({"exposed_dp": 0.08}, {"exposed_dp": 0.08}, early_reduce_s=0.06, early_reduces=3.0)
    last = plan.model_copy(update={"gradient_sync": "last"})
    for fits, level in ((True, "alarm"), (False, "hint"), (None, "alarm")):
        other = Alternative(kind="schedule", plan=last, fits=fits)
        found = diagnose(observed(early, plan=plan, alternatives=(other,)))
        assert next(f.level for f in found if f.kind == "early-sync") == level


def test_reductions_that_come_too_early_are_not_sharding_too() -> None:
    plan = Plan(strategy="fsdp", dims=ParallelDims(dp_shard=2), micro_batch=4, grad_accum=4, gradient_sync="every")
    ddp = next(other for kind, other in changes(plan) if kind == "strategy")
    fitting = Alternative(kind="strategy", plan=ddp, fits=True, memory_bytes=1 << 30, step_s=0.1, now_s=0.15)
    early = timing({"exposed_dp": 0.1}, {"exposed_dp": 0.1}, early_reduce_s=0.06, early_reduces=3.0)
    found = {one.kind: one.seconds or 0.0 for one in diagnose(observed(early, plan=plan, alternatives=(fitting,)))}
    assert found["early-sync"] + found["needless-sharding"] <= 0.1
    assert found["needless-sharding"] == pytest.approx(0.04 * 7 / 9)  # 8 gathers and a reduction, of which ddp has 2


def test_a_bubble_is_weighed_by_its_formula() -> None:
    plan = Plan(strategy="ddp+pp2", dims=ParallelDims(pp=2), micro_batch=4, grad_accum=2)
    found = only(diagnose(observed(timing({"pipeline": 0.06}, {"pipeline": 0.06}), plan=plan)))
    assert found.kind == "pipeline-bubble"
    assert "train.grad_accum=9" in found.fix
    facts: dict[str, Any] = {"micro_batch": 4, "grad_accum": 4, "pipeline_schedule": "interleaved-1f1b"}
    wide = Plan(strategy="ddp+pp4", dims=ParallelDims(pp=4), virtual_stages=2, **facts)
    rounds = only(diagnose(observed(timing(*[{"pipeline": 0.06}] * 4), plan=wide)))
    assert "train.grad_accum=16" in rounds.fix, "14 are enough, and are no whole rounds of 4"


@pytest.mark.parametrize(("fits", "expected"), [(True, ["recompute"]), (False, []), (None, [])])
def test_recompute_is_an_alarm_only_where_it_is_known_not_to_be_needed(fits: bool | None, expected: list[str]) -> None:
    plan = Plan(strategy="ddp", dims=ParallelDims(dp_replicate=2), micro_batch=4, recompute="full")
    other = Alternative(
        kind="recompute", plan=plan.model_copy(update={"recompute": "none"}), fits=fits, memory_bytes=1 << 30
    )
    found = diagnose(observed(timing({"recompute": 0.03}, {"recompute": 0.03}), plan=plan, alternatives=(other,)))
    assert alarms(found) == expected
    assert ("recompute" in [finding.kind for finding in found]) == (fits is not False)


def test_sharding_that_is_not_needed_is_an_alarm() -> None:
    plan = Plan(strategy="fsdp", dims=ParallelDims(dp_shard=2), micro_batch=4)
    ddp = next(other for kind, other in changes(plan) if kind == "strategy")
    shaped = timing({"exposed_dp": 0.1}, {"exposed_dp": 0.1})
    fitting = Alternative(kind="strategy", plan=ddp, fits=True, memory_bytes=1 << 30, step_s=0.1, now_s=0.15)
    found = diagnose(observed(shaped, plan=plan, alternatives=(fitting,)))
    assert alarms(found) == ["needless-sharding"], "much waiting follows from it, and is no second alarm"
    assert found[1].kind == "communication" and "follows from the needless sharding" in found[1].evidence[-1]
    tensor = plan.model_copy(update={"strategy": "fsdp+tp2", "dims": ParallelDims(dp_shard=2, tp=2)})
    both = timing(*[{"exposed_dp": 0.05, "exposed_tp": 0.2}] * 4)
    assert len(alarms(diagnose(observed(both, plan=tensor, alternatives=(fitting,))))) == 1, "tp has no such root"
    slow = link(11e6, 1.25e9)
    assert alarms(diagnose(observed(shaped, plan=plan, alternatives=(fitting,), links=(slow,)))) == ["slow-link"]
    sharding = next(finding for finding in found if finding.kind == "needless-sharding")
    assert sharding.seconds == pytest.approx(0.1 / 3)  # two parts of three are sent by ddp, too
    slower = fitting.model_copy(update={"step_s": 0.2})
    unfit = fitting.model_copy(update={"fits": False})
    for other in (slower, unfit):
        kinds = [finding.kind for finding in diagnose(observed(shaped, plan=plan, alternatives=(other,)))]
        assert "needless-sharding" not in kinds


@pytest.mark.parametrize(("mfu", "level"), [(None, "hint"), (0.2, "alarm"), (0.5, None)])
def test_a_small_micro_batch_needs_a_measured_low_mfu_to_be_an_alarm(mfu: float | None, level: str | None) -> None:
    plan = Plan(strategy="ddp", dims=ParallelDims(dp_replicate=2), micro_batch=1, grad_accum=8)
    larger = next(other for kind, other in changes(plan) if kind == "micro batch")
    other = Alternative(kind="micro batch", plan=larger, fits=True, memory_bytes=1, step_s=0.07, now_s=0.1)
    found = diagnose(observed(timing(), plan=plan, alternatives=(other,), mfu=mfu))
    assert next((finding.level for finding in found if finding.kind == "small-micro-batch"), None) == level


def gpu(rank: int, clock: float, **reasons: float) -> DeviceState:
    words = {name.replace("_", " "): share for name, share in reasons.items()}
    return DeviceState(rank=rank, name="A100", clock=clock * 1e6, max_clock=1410e6, temperature=88, throttled=words)


def test_a_hot_device_leads_and_its_rank_follows() -> None:
    gpus = (gpu(0, 1400), gpu(1, 700, hardware_thermal_slowdown=0.9))
    found = diagnose(observed(late(1, "backward"), device="cuda", gpus=gpus))
    assert alarms(found) == ["throttling"]
    assert found[0].rank == 1
    assert "700 MHz" in found[0].text
    assert "1400 MHz" in found[0].text
    assert "straggler" in [finding.kind for finding in found if finding.level == "hint"]


def test_a_hot_device_is_said_even_where_it_costs_little_so_far() -> None:
    gpus = (gpu(0, 1400), gpu(1, 1390, hardware_thermal_slowdown=0.3))
    found = diagnose(observed(timing(), device="cuda", gpus=gpus))
    assert [finding.kind for finding in found] == ["healthy", "throttling"]
    capped = (gpu(0, 1400), gpu(1, 1390, power_cap=0.3))
    assert [finding.kind for finding in diagnose(observed(timing(), device="cuda", gpus=capped))] == ["healthy"]


def test_hot_devices_of_one_machine_are_one_alarm_with_one_price() -> None:
    gpus = tuple(gpu(rank, 700 - rank, hardware_thermal_slowdown=0.9) for rank in range(8))
    found = only(diagnose(observed(timing(*[{}] * 8), device="cuda", gpus=gpus, price=2.0)))
    assert (found.kind, found.rank) == ("throttling", 7)
    assert "7 more: ranks 0, 1, 2, 3, 4, 5, 6" in found.evidence[-1]
    assert found.money is not None and found.money <= 8 * 2.0


def test_devices_at_their_power_cap_are_no_alarm() -> None:
    gpus = tuple(gpu(rank, 1200, power_cap=0.9) for rank in range(2))
    found = diagnose(observed(timing(), device="cuda", gpus=gpus))
    assert alarms(found) == []


def test_the_dearest_cause_comes_first() -> None:
    both = timing({"data": 0.05}, {"data": 0.05}, between_s={"checkpoint": 0.2, "evaluation": 0.0})
    assert alarms(diagnose(observed(both))) == ["checkpoint-stall", "data-loader"]


def test_levels_follow_the_share_of_the_step() -> None:
    found = {}
    for share in (HINT * 0.8, (HINT + ALARM) / 2, ALARM * 1.2):
        rest = 0.1 * share / (1 - share)
        kinds = diagnose(observed(timing({"data": rest}, {"data": rest})))
        found[share] = next((finding.level for finding in kinds if finding.kind == "data-loader"), None)
    assert list(found.values()) == [None, "hint", "alarm"]


def test_tiny_steps_are_not_judged_by_their_shares() -> None:
    tiny = {part: seconds / 1000 for part, seconds in CLEAN.items()}
    assert alarms(diagnose(observed(timing({**tiny, "data": 0.0004}, {**tiny, "data": 0.0004})))) == []


def test_text_of_numbers() -> None:
    assert [span(s) for s in (0.0302, 0.00042, 1.2, 130.0)] == ["30.2 ms", "0.42 ms", "1.2 s", "130 s"]
    assert [percent(s) for s in (0.37, 0.004)] == ["37 %", "0.4 %"]
    assert rate(1.25e9) == "1.25 GB/s (10 Gbit/s)"
    assert rate(12.5e6) == "12.5 MB/s (100 Mbit/s)"


def printed(findings: tuple[Finding, ...], nothing: str = "") -> str:
    out = StringIO()
    print_findings(findings, Console(file=out, width=400), nothing=nothing)
    return out.getvalue()


def test_findings_are_printed_with_evidence_cost_and_fix() -> None:
    found = diagnose(observed(timing({"data": 0.03}, {"data": 0.03}), loader_workers=0, price=2.0))
    text = printed(found)
    assert text.startswith("alarm  The loader is slower")
    assert "no worker processes" in text
    assert "cost: $0.94 an hour" in text
    assert "fix: make batches in 1 process" in text
    assert "cost:" not in printed(diagnose(observed(timing({"data": 0.03}, {"data": 0.03}))))


def test_what_comes_from_outside_is_no_markup() -> None:
    finding = Finding(kind="healthy", level="fine", text="a [bold]name[/bold]", evidence=("[red]x",))
    assert "[bold]name[/bold]" in printed((finding,))
    assert "[red]x" in printed((finding,))


def test_where_there_are_no_findings_the_reason_is_printed() -> None:
    assert printed((), "no diagnosis: 2 steps") == "no diagnosis: 2 steps\n"
    assert printed(()) == ""


def curve(*losses: float, every: int = 10) -> tuple[tuple[int, float], ...]:
    return tuple(((at + 1) * every, loss) for at, loss in enumerate(losses))


def test_a_loss_that_stands_at_chance_is_found() -> None:
    chance = math.log(1000)
    stuck = curve(*[chance + 0.05 * (-1) ** n for n in range(40)])
    found = only(diagnose(observed(timing(), losses=stuck, vocab_size=1000, price=2.0)))
    assert found.kind == "loss-at-chance" and found.share == 1.0 and found.money == pytest.approx(4.0)
    assert found.text == (
        "The model does not learn: after 400 steps its loss is 6.908, and guessing among 1000 tokens has "
        "ln(1000) = 6.908."
    )
    assert "model.freeze" in found.fix


@pytest.mark.parametrize(
    ("losses", "vocabulary"),
    [
        (curve(*[6.908] * 19), 1000),  # a warm-up takes as long
        (curve(*[6.908] * 30, *[6.5] * 10), 1000),  # it has begun to fall
        (curve(*[6.908] * 40), None),
        (curve(*[6.908] * 40), 50_000),  # far below guessing, if for other reasons no lower
        ((), 1000),
    ],
)
def test_a_loss_is_at_chance_only_for_long_and_of_a_known_vocabulary(losses: Any, vocabulary: int | None) -> None:
    assert diagnose(observed(timing(), losses=losses, vocab_size=vocabulary))[0].kind == "healthy"


def test_a_loss_that_ends_above_its_beginning_is_found() -> None:
    rising = curve(*[3.0] * 10, 2.5, *[3.5] * 20)
    found = only(diagnose(observed(timing(), losses=rising)))
    assert found.kind == "loss-rises"
    assert found.text == "The loss rises: it is 3.500 at the end and was 3.000 at the beginning."
    assert found.evidence[1] == "lowest: 2.500 after step 110"
    for fine in (curve(*[3.0] * 10, *[3.1] * 20), curve(*[3.0] * 5, *[4.0] * 14), curve(*[3.0] * 20, 9.0, *[2.9] * 20)):
        assert diagnose(observed(timing(), losses=fine))[0].kind == "healthy"


def test_loss_spikes_are_one_finding_with_the_samples_of_the_highest() -> None:
    spikes = [LossSpike(step=step, loss=loss, median=2.0, samples=(tuple(range(10)), (3,))) for step, loss in
              ((40, 3.0), (90, 7.5), (120, 4.0), (130, 3.5))]  # fmt: skip
    found = next(one for one in diagnose(observed(timing(), spikes=tuple(spikes))) if one.kind == "loss-spike")
    assert (found.level, found.seconds) == ("hint", None)
    assert found.text == (
        "The loss of step 90 is 7.500, the median of those before it 2.000. There are 4 such steps in all."
    )
    assert found.evidence[0] == (
        "step 90, loss 7.500, samples of replica 0: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more; replica 1: 3"
    )
    assert [text.split(",")[0] for text in found.evidence] == ["step 90", "step 120", "step 130"]


def test_lost_gradients_are_one_finding() -> None:
    names = tuple(f"layer.{number}" for number in range(8))
    lost = (LostGradient(parameters=names, since=40), LostGradient(parameters=("head",), since=90))
    found = next(one for one in diagnose(observed(timing(), lost_gradients=lost)) if one.kind == "lost-gradient")
    assert (found.level, found.seconds) == ("hint", None)
    assert found.text == "9 parameters have no gradient any more: the loss stopped depending on them in step 40."
    assert found.evidence == (f"since step 40: {', '.join(names[:6])} and 2 more", "since step 90: head")


def test_losses_are_those_that_were_logged(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 2.5}, {"step": 1, "heldout_bits_per_byte": 3.0}, {"step": 2, "loss": math.nan}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    assert logged_losses(tmp_path / "metrics.jsonl") == [(1, 2.5)]
    assert logged_losses(tmp_path / "none") == []
    line = {"step": 1, "loss": 9.0, "loss_spike": {"median": 2.0, "samples": [[3], [4]]}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert logged_spikes(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 9.0, "median": 2.0, "samples": [[3], [4]]}]


def test_a_step_without_cores_is_not_said_to_be_all_computation() -> None:
    (healthy,) = (f for f in diagnose(observed(timing(cpu_wait_s=spread_of([0.006] * 2)))) if f.level == "fine")
    assert "6 ms of a step of 99 ms (6 %) without a core count as the part that waits for one" in healthy.evidence
    assert not any("without a core" in line for line in diagnose(observed(timing()))[0].evidence)
