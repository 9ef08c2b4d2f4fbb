"""Causes that are put into real runs on gloo ranks, and found there. Bounds are wide: what they are exactly is measured
in ``benchmarks/diagnosis``, on a machine that does nothing else.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise.diagnosis.diagnose import diagnose
from shardwise.diagnosis.observe import HostRecorder, device_state, gpu_states, observe
from shardwise.diagnosis.observed import HostUse
from shardwise.distributed.process_group import Ranks, join
from shardwise.measure.gpu.nvml import DeviceTrack, GpuTrack
from shardwise.measure.step_time.attribution import Attribution
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from tests.injections import Case, Result, run_case
from tests.netns import two_hosts, why_not
from tests.worlds import run_world

SHORT = {"steps": 8, "clean_steps": 3, "width": 32, "samples": 2}


def result(tmp_path: Path, **facts: object) -> Result:
    found = run_world(run_case, int(str(facts.get("world", 2))), Case.model_validate(SHORT | facts), str(tmp_path))
    assert found[1:] == [None] * (len(found) - 1), "rank 0 alone tells"
    assert isinstance(found[0], Result)
    return found[0]


def kinds(of: Result, level: str = "alarm") -> list[str]:
    return [finding.kind for finding in of.findings if finding.level == level]


@pytest.mark.turns(2)
@pytest.mark.parametrize("world", [1, 2])
def test_a_delay_of_all_loaders_is_the_loaders(tmp_path: Path, world: int) -> None:
    found = result(tmp_path, name="data", cause="data", seconds=0.08, expected="data-loader", world=world)
    assert "data-loader" in kinds(found)
    assert found.attributed_s is not None
    assert 0.07 < found.attributed_s < 0.2
    assert "straggler" not in kinds(found)


@pytest.mark.turns(3)
@pytest.mark.parametrize("cause", ["forward on one rank", "code on one rank", "data on one rank"])
def test_a_delay_of_one_rank_is_that_ranks(tmp_path: Path, cause: str) -> None:
    found = result(tmp_path, name="late", cause=cause, seconds=0.15, expected="straggler")
    straggler = next(finding for finding in found.findings if finding.kind == "straggler")
    assert straggler.level == "alarm"
    assert straggler.rank == 1
    part = {"forward": "forward", "code": "the loop's own code", "data": "waiting for data"}[cause.split()[0]]
    assert straggler.evidence[0].startswith(part)
    assert straggler.seconds is not None
    assert 0.1 < straggler.seconds < 0.4
    assert "data-loader" not in kinds(found)


def test_a_slow_save_is_a_stall(tmp_path: Path) -> None:
    found = result(tmp_path, name="save", cause="save", seconds=0.4, expected="checkpoint-stall")
    assert "checkpoint-stall" in kinds(found)
    assert found.attributed_s is not None
    assert found.injected_s is not None
    assert found.attributed_s == pytest.approx(found.injected_s, rel=0.3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_reductions_before_the_last_micro_batch_are_counted(tmp_path: Path, strategy: str) -> None:
    found = result(tmp_path, name="early", cause="early sync", strategy=strategy, grad_accum=3, expected="early-sync")
    assert found.timing.early_reduces == pytest.approx(2.0)
    clean = result(tmp_path, name="clean", strategy=strategy, grad_accum=3)
    assert clean.timing.early_reduces == 0.0
    assert "early-sync" not in [finding.kind for finding in clean.findings]


def test_ranks_that_share_a_core_have_too_few(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: there is none to take away")
    found = result(tmp_path, name="core", cause="one core", expected="cpu-oversubscription", width=160, samples=8)
    crowded = next(finding for finding in found.findings if finding.kind == "cpu-oversubscription")
    assert crowded.level == "alarm"
    assert "2 ranks on 1" in crowded.text


@pytest.mark.turns(6)
def test_a_link_that_is_shaped_is_slow(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    case = Case(name="link", cause="link", expected="slow-link", rate="100mbit", steps=6, clean_steps=2, samples=2)
    question, answer = tmp_path / "case.json", tmp_path / "result.json"
    question.write_text(case.model_dump_json())
    with two_hosts(rate=None) as hosts:
        done = hosts.torchrun(["-m", "tests.injections", str(question), str(answer)], cwd=Path(__file__).parents[2])
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    found = Result.model_validate_json(answer.read_text())
    slow = next(finding for finding in found.findings if finding.kind == "slow-link")
    assert "10 Gbit/s" in slow.evidence[1]
    assert slow.seconds is not None
    assert 0.15 < slow.seconds < 1.0  # 2.9 MB at 12.5 MB/s are 0.23 s


def host_use(busy_s: float) -> HostUse | None:
    watch, ranks = HostRecorder(), join("cpu")
    begun = time.process_time()
    while time.process_time() - begun < busy_s:
        pass
    return watch.finish(ranks)


def test_the_host_counts_what_its_ranks_used() -> None:
    first, second = run_world(host_use, 2, 0.3)
    assert second is None
    assert first.local_ranks == 2
    assert first.cores == len(os.sched_getaffinity(0))
    assert first.own * first.seconds == pytest.approx(0.6, abs=0.3)
    assert first.busy >= first.own * 0.8
    assert first.others is not None


def findings() -> list[str] | None:
    """What the end of a loop comes to, on this rank."""
    session = shardwise.start(Plan(strategy="ddp", dims=ParallelDims(dp_replicate=2), grad_accum=1), receipts=False)
    watch, model = HostRecorder(), nn.Linear(8, 8)
    session.observers.append(watch)
    prepared, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    slow = ((time.sleep(0.1), (torch.ones(2, 8), torch.zeros(2, 8)))[1] for _ in range(40))
    for step in session.steps(slow, limit=12):
        for micro in step:
            step.backward((prepared(micro.inputs) - micro.labels).square().sum())
        step.update(optimizer)
    attribution = session.timekeeper
    assert isinstance(attribution, Attribution)
    attribution.finish()
    host = watch.finish(session.ranks)
    timing = attribution.timing()
    found = () if timing is None else diagnose(observe(session, timing, host=host))
    session.close()
    return [finding.kind for finding in found] if session.ranks.is_main else None


def test_a_loop_of_ones_own_is_diagnosed() -> None:
    first, second = run_world(findings, 2)
    assert "data-loader" in first
    assert second is None


def devices() -> list[str]:
    ranks: Ranks = join("cpu")
    seen = DeviceTrack(
        index=0, name="A100", samples=9, busy=9, mean_sm_clock_hz=1e9, reasons={"idle": 0.1, "power cap": 0.5}
    )
    track = GpuTrack(interval_s=1.0, devices=(seen,)) if ranks.rank else None
    return [state.model_dump_json() for state in gpu_states(track, ranks)]


def test_devices_of_all_ranks_come_together_and_unknown_ones_are_left_out() -> None:
    for found in run_world(devices, 2):
        assert len(found) == 1
        assert '"rank":1' in found[0]
        assert "idle" not in found[0]


def test_a_device_that_nobody_asked_is_not_there() -> None:
    assert device_state(3, DeviceTrack(index=0, name="T4", samples=0, busy=0)).throttled == {}


def test_a_case_can_be_wrong(tmp_path: Path) -> None:
    """What the benchmark calls right depends on what was found, so that it can fail."""
    found = result(tmp_path, name="data", cause="data", seconds=0.3, expected="data-loader", world=1)
    assert found.lead.kind == "data-loader"
    other = found.model_copy(update={"case": found.case.model_copy(update={"expected": "straggler"})})
    assert not other.right
