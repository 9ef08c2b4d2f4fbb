"""Time the step of Shardwise and of its peers turn by turn: the same weights, samples and losses, or no row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import nn

from shardwise.bench.step.peers import PEERS, STRATEGIES, end, recorded, version_of
from shardwise.bench.step.step_bench import Batch, TrainStep, plan_for, seeded_model, shardwise_loop
from shardwise.bench.step.step_ranks import facts, windows
from shardwise.distributed.process_group import Ranks, gather_ints
from shardwise.errors import UserError
from shardwise.measure.collectives import CollectiveRecorder
from shardwise.measure.comm_facts import Collective as Kind
from shardwise.measure.comm_facts import bus_factor
from shardwise.plan.plan import Plan
from shardwise.run.job import Job
from shardwise.train.config import Config, optimizer_problems
from shardwise.train.data.corpus import open_corpus
from shardwise.train.model import model_factory
from shardwise.train.optimizer import build_optimizer

OURS = "shardwise"
CHECKED = 20
"""Steps whose losses are compared; they warm up, too."""
LIMIT = 1e-5
"""Largest relative difference of a loss from Shardwise's."""
ALONE = 4


class AgainstTask(BaseModel):
    """Task of the ranks: each of ``plans`` by each peer. With ``alone`` this contender only, for memory and traffic."""

    model_config = ConfigDict(frozen=True)

    job: Job
    plans: tuple[Plan, ...]
    peers: tuple[str, ...]
    alone: str | None = None


class StepContender(BaseModel):
    """What was measured of a contender under one strategy.

    Seconds of each turn on rank 0, the whole loss of the first steps, the peak of memory beside what was there before
    the model (of the rank with most), bytes that a rank sends in a step by ring algorithms. ``void`` says why a row
    counts for nothing.
    """

    name: str
    version: str
    strategy: str
    batch: str
    step_s: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peak_bytes: int | None = None
    sent_bytes: int | None = None
    void: str = ""

    def ratios(self, ours: StepContender) -> list[float]:
        """Return its seconds over Shardwise's in each turn, sorted; above 1.00 Shardwise is faster."""
        return sorted(mine / other for mine, other in zip(self.step_s, ours.step_s, strict=True))


def plans_against(job: Job, strategies: list[str] | None) -> tuple[Plan, ...]:
    """Build the plan of each compared strategy, with the job's micro batch where it divides a rank's share.

    Raises:
        UserError: there are too few ranks, no peer has a strategy, or the optimizer cannot run under one.
    """
    world = job.plan.dims.world_size
    if world < 2:
        raise UserError("bench step compares distributed loops and needs 2 ranks or more; use --nproc 2")
    wanted = strategies or list(STRATEGIES)
    problems = [
        f"--strategy '{name}': no peer of --against has it here; use {', '.join(STRATEGIES)}"
        for name in wanted
        if name not in STRATEGIES
    ]
    if problems:
        raise UserError(*problems)
    found = []
    for name in wanted:
        plan = plan_for(job.plan, name, world)
        share, micro = plan.micro_batch or 1, job.plan.micro_batch or 1
        if share % micro == 0:
            plan = plan.model_copy(update={"micro_batch": micro, "grad_accum": share // micro})
        problems += optimizer_problems(job.config.optimizer, plan.parsed)
        found.append(plan)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return tuple(found)


def time_against(task: AgainstTask, ranks: Ranks) -> dict[str, Any] | None:
    """Measure each plan of the task and return the contenders on rank 0. Collective."""
    job, corpus = task.job, open_corpus(task.job.corpus)
    factory, steps = model_factory(job.config, corpus.vocab_size), job.config.train.steps or 1
    found: list[dict[str, Any]] = []
    for plan in task.plans:
        batches = windows(job, corpus, plan, ranks)
        if task.alone is not None:
            found.append(_alone(task.alone, job.config, plan, factory, batches, ranks))
        else:
            rows = _in_turns(task.peers, job.config, plan, factory, batches, ranks, steps)
            found += [row.model_dump() for row in rows]
    return {**facts(job, ranks), "rows": found} if ranks.is_main else None


def _step_of(
    name: str, config: Config, plan: Plan, factory: Callable[[], nn.Module], ranks: Ranks, sample: Any
) -> TrainStep:
    """Build a contender's step around a model with the seed's weights. Collective."""
    model, clip = seeded_model(factory, config.train.seed), config.optimizer.clip_norm

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(parameters, config.optimizer)

    if name == OURS:
        return shardwise_loop(model, plan, ranks, make_optimizer, clip, sample)
    return PEERS[name].build(model, plan, ranks, make_optimizer, clip)


def _in_turns(
    peers: tuple[str, ...],
    config: Config,
    plan: Plan,
    factory: Callable[[], nn.Module],
    batches: Iterator[list[Batch]],
    ranks: Ranks,
    steps: int,
) -> list[StepContender]:
    """Time ``steps`` turns of all contenders, in another order each; all ranks meet before a step."""
    sample = next(batches)[0][0]
    here = [name for name in peers if plan.parsed.base in PEERS[name].strategies]
    names = [OURS, *here]
    loops = {name: _step_of(name, config, plan, factory, ranks, sample) for name in names}
    step_s: dict[str, list[float]] = {name: [] for name in names}
    cpu_s: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(CHECKED + steps):
        micros, first = next(batches), turn % len(names)
        for name in [*names[first:], *names[:first]][:: 1 if turn // len(names) % 2 else -1]:
            torch.manual_seed(config.train.seed + turn)  # the same dropout for each
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            loss = loops[name](micros)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - begin, time.process_time() - cpu
            if turn >= CHECKED:
                step_s[name].append(took[0])
                cpu_s[name].append(took[1])
            else:
                losses[name].append(loss if name == OURS else _mean(loss, ranks))
    for loop in loops.values():
        end(loop)
    rows = []
    for name in (OURS, *peers):
        row = StepContender(
            name=name,
            version="" if name == OURS else version_of(name),
            strategy=plan.strategy,
            batch=plan.batch_equation(),
            void=f"not run: {PEERS[name].why}" if name not in loops else _difference(losses[name], losses[OURS]),
        )
        if name in loops:
            times = {"step_s": tuple(step_s[name]), "cpu_s": tuple(cpu_s[name]), "losses": tuple(losses[name])}
            row = row.model_copy(update=times)
        rows.append(row)
    return rows


def _mean(loss: float, ranks: Ranks) -> float:
    whole = torch.tensor(loss, dtype=torch.float64, device=ranks.device)
    dist.all_reduce(whole)
    return whole.item() / ranks.world_size


def _difference(losses: list[float], ours: list[float]) -> str:
    """Say at which step losses differ by more than `LIMIT`; empty where none does."""
    for number, (mine, other) in enumerate(zip(losses, ours, strict=True), 1):
        if not abs(mine - other) <= LIMIT * abs(other):
            return f"its loss of step {number} is {mine:.6f}, Shardwise's {other:.6f}"
    return ""


def _alone(
    name: str,
    config: Config,
    plan: Plan,
    factory: Callable[[], nn.Module],
    batches: Iterator[list[Batch]],
    ranks: Ranks,
) -> dict[str, Any]:
    """Measure the memory of a contender in a process of its own, then what it sends in a step."""
    micros = next(batches)
    before = _reset_peak(ranks.device)
    step = _step_of(name, config, plan, factory, ranks, micros[0][0])
    for _ in range(ALONE):
        step(next(batches))
    peak = None if before is None else max(gather_ints([_peak(ranks.device) - before], ranks))[0]
    recorder = CollectiveRecorder(lambda: "backward", lambda name, group: "")
    recorded(step, next(batches), recorder)
    end(step)
    # a broadcast is a ring's, too, which the calibration does not measure
    sent = sum(bus_factor(cast("Kind", one.name), ranks.world_size) * one.num_bytes for one in recorder.collectives)
    return {"strategy": plan.strategy, "peak_bytes": peak, "sent_bytes": int(sent)}


def _reset_peak(device: torch.device) -> int | None:
    """Forget the peak so far; returns the bytes in use, ``None`` where the system cannot forget it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # of Linux: the peak of the resident set begins anew
    except OSError:
        return None
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])
