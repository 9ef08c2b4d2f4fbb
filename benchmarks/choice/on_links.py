"""Predicted against measured step times on CPU ranks over real links, and the chosen plan against the fastest.

    python -m benchmarks.choice.on_links --output benchmarks/choice/results/xeon

Two network namespaces joined by a link of known rate and delay (`tests/netns.py`), one or two gloo ranks in each. On
each link the ranks first measure it and themselves, as ``bench comm`` does, then take turns through every strategy that
runs, on each model, and measure again. `benchmarks/choice/judge.py` predicts from what they measured. Needs root, and a
machine with nothing else to do: the load is kept beside each row.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.choice.run import ChoiceTask, time_choices
from pydantic import BaseModel, ConfigDict

from shardwise.bench.comm.comm_report import calibration_file
from shardwise.bench.comm.fit_links import fit
from shardwise.bench.comm.time_collectives import bench_comm
from shardwise.bench.comm.time_compute import time_compute
from shardwise.cli.bench_comm import CommRequest, facts
from shardwise.distributed.process_group import Ranks
from shardwise.errors import DoesNotFit, PlanError, UserError
from shardwise.hardware.cluster import ClusterSpec, detect
from shardwise.launch.on_ranks import as_rank
from shardwise.measure.comm_facts import ladder
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.job import Job, prepare_job
from shardwise.train.config import read_config
from tests.netns import two_hosts, why_not

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
LINKS: dict[str, tuple[str | None, float]] = {  # rate, delay one way
    "unshaped": (None, 0.0),
    "1gbit": ("1gbit", 0.0),
    "100mbit": ("100mbit", 0.0),
    "1gbit-1ms": ("1gbit", 0.001),
    "100mbit-1ms": ("100mbit", 0.001),
    "1gbit-10ms": ("1gbit", 0.010),
    "100mbit-10ms": ("100mbit", 0.010),
}
MODELS = ("wide", "narrow", "vocabulary", "long")
STRATEGIES = {
    2: ("ddp", "zero1", "zero2", "fsdp", "ddp+tp2", "ddp+pp2", "ddp+cp2"),
    4: ("ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp+tp2", "ddp+tp2", "fsdp+pp2", "ddp+pp4", "fsdp+cp2"),
}
TURNS = (4, 12)  # at least and at most
BUDGET_S = 18.0  # of one model on one link
PROBE_S, LARGEST = 2.5, 8 << 20  # of each collective and axis
DELAYED_S, DELAYED_LARGEST = 8.0, 64 << 20  # over a delay of 10 ms: bench comm's defaults, as 8 MiB are mostly latency
TIMEOUT_S = 1500.0


class Task(BaseModel):
    """What the ranks of one link time: the plans of each model, on the data of its job."""

    model_config = ConfigDict(frozen=True)

    jobs: tuple[Job, ...]
    plans: tuple[tuple[Plan, ...], ...]
    cluster: ClusterSpec
    output: Path
    probe_s: float
    largest: int


def main() -> None:
    """Measure every link with two ranks and with four; one file for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--worlds", nargs="+", type=int, choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank is not None:
        as_rank(_rank, Task.model_validate_json(words.rank.read_text()), "cpu")
    if problem := why_not():
        raise SystemExit(f"no shaped link here: {problem}")
    words.output.mkdir(parents=True, exist_ok=True)
    for world in words.worlds:
        with tempfile.TemporaryDirectory() as folder:
            made = [_plans(model, world, Path(folder)) for model in words.models]
            for link in words.links:
                _measure(link, world, made, words.output / f"{link}_{world}-ranks.json")


def _plans(model: str, world: int, folder: Path) -> tuple[Job, tuple[Plan, ...]]:
    """The job of a model and the plan of each strategy that is laid out and runs."""
    words = [f"train.output={folder / 'run'}", f"parallel.nproc={world // 2}"]
    found: dict[str, Plan] = {}
    job: Job | None = None
    for strategy in STRATEGIES[world]:
        config = read_config(HERE / f"{model}.toml", [*words, f"parallel.strategy={strategy}"])
        try:
            prepared = prepare_job(config, lambda text: None, nodes=2)
        except (PlanError, DoesNotFit, UserError) as error:
            print(f"{model}, {strategy}: {error}", flush=True)
            continue
        job = job or prepared.job
        found[strategy] = prepared.job.plan
    assert job is not None
    return job, tuple(found.values())


def _measure(link: str, world: int, made: Sequence[tuple[Job, tuple[Plan, ...]]], file: Path) -> None:
    """Start the ranks on both ends of a link, and keep what they measured."""
    rate, delay_s = LINKS[link]
    probe_s, largest = (DELAYED_S, DELAYED_LARGEST) if delay_s >= 0.01 else (PROBE_S, LARGEST)
    jobs, plans = zip(*made, strict=True)
    cluster = detect("cpu", world // 2).model_copy(update={"nodes": 2})
    started = time.monotonic()
    with two_hosts(rate or "40gbit", delay_s) as hosts, tempfile.TemporaryDirectory() as folder:
        if rate is None:
            hosts.shape(None)
        task, output = Path(folder) / "task.json", Path(folder) / "found.json"
        task.write_text(
            Task(
                jobs=jobs, plans=plans, cluster=cluster, output=output, probe_s=probe_s, largest=largest
            ).model_dump_json(by_alias=True, exclude_unset=True)
        )
        argv = ["-m", "benchmarks.choice.on_links", "--rank", str(task)]
        ended = hosts.torchrun(argv, world // 2, timeout_s=TIMEOUT_S, cwd=ROOT)
        if any(one.returncode for one in ended):
            print(f"{link}, {world} ranks failed:\n{ended[0].stderr[-6000:]}\n{ended[1].stderr[-6000:]}", flush=True)
            return
        found = json.loads(output.read_text())
    document = {"schema": 1, "link": link, "rate": rate, "delay_s": delay_s, "ranks": world, "torch": torch.__version__}
    document |= {"date": time.strftime("%Y-%m-%d"), "cluster": cluster.model_dump(mode="json"), **found}
    file.write_text(json.dumps(document, indent=1) + "\n")
    count = sum(len(case["plans"]) for case in found["cases"])
    seconds = time.monotonic() - started
    print(
        f"{link}, {world} ranks: {count} configurations in {seconds:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True
    )


def _rank(task: Task, ranks: Ranks) -> None:
    """Measure the link and this rank before each model's plans, and at the end. Collective."""
    probes, cases = [], []
    for job, plans in zip(task.jobs, task.plans, strict=True):
        probes.append(_probe(task, ranks))
        began = time.time()
        found = time_choices(ChoiceTask(job=job, plans=plans, turns=TURNS, budget_s=BUDGET_S), ranks)
        case = {"model": Path(str(job.config.model.config)).stem, "plans": [plan.to_toml() for plan in plans]}
        cases.append(case | {"seconds": found and found["seconds"], "began": began, "load": os.getloadavg()[0]})
    probes.append(_probe(task, ranks))
    if ranks.is_main:
        task.output.write_text(json.dumps({"probes": probes, "cases": cases}))


def _probe(task: Task, ranks: Ranks) -> dict[str, Any]:
    """What ``bench comm`` would write for these ranks, on the axes of ddp and of hsdp."""
    measured, began = [], time.time()
    for strategy in ("ddp", "hsdp") if ranks.world_size > 2 else ("ddp",):
        dims = dims_for(parse_strategy(strategy), ranks.world_size, devices_per_node=task.cluster.devices_per_node)
        plan = Plan(strategy=strategy, dims=dims, device="cpu")
        measured += bench_comm(plan, ranks, ladder(1024, task.largest), task.probe_s)
    compute = time_compute(ranks)
    request = CommRequest(
        plan=plan,
        cluster=task.cluster,
        sizes_bytes=(1024, task.largest),
        seconds=task.probe_s,
        output=Path(),
        as_json=True,
    )
    known = facts(request, ranks) | {"compute": compute.model_dump(mode="json")}
    file = calibration_file(known, measured, [fit(one) for one in measured])
    return {"began": began, "calibration": file.model_dump(mode="json", by_alias=True, exclude_none=True)}


if __name__ == "__main__":
    main()
