"""Training runs on real ranks with one thing made slow on purpose, and what diagnosis says of them.

A run has three parts: clean, with the cause, clean again. The cause's cost is known (a sleep), or is what its part took
longer than the clean ones around it. Also a rank of its own: ``python -m tests.injections CASE.json RESULT.json
[FOLDER]``, where ``FOLDER``, which all ranks see, is for checkpoints.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardwise
from shardwise.diagnosis.diagnose import diagnose
from shardwise.diagnosis.finding import Finding
from shardwise.diagnosis.observe import HostRecorder, observe
from shardwise.diagnosis.observed import SaveStall
from shardwise.distributed.process_group import join, leave
from shardwise.measure.step_time.attribution import Attribution
from shardwise.measure.step_time.timing import Timing
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests.netns import bits_per_s

Cause = Literal[
    "none", "data", "data on one rank", "forward on one rank", "code on one rank", "save", "early sync", "link",
    "core taken", "one core", "busy core",
]  # fmt: skip
VOCAB, LENGTH, BLOCKS = 257, 64, 3
WARM_UP, SETTLE = 4, 2  # steps before the first part, and at each border of two parts, that are not counted
SAVE_AT = 3  # of each `save_every` steps: not at the border of two parts
LATE_RANK = 1  # the last of the ranks that the cases have


class Case(BaseModel):
    """One run. ``seconds`` is what the cause adds to a step, or to a save; ``expected`` is the kind that must lead.

    ``link_speed`` stands in for what the driver says that the interface carries.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    cause: Cause = "none"
    expected: str = "healthy"
    seconds: float = 0.0
    strategy: str = "ddp"
    world: int = 2
    grad_accum: int = 1
    width: int = 160
    samples: int = 16
    steps: int = 20
    clean_steps: int = 12
    save_every: int = 5
    workers: int = 0
    rate: str = ""
    link_speed: float | None = None


class Result(BaseModel):
    """What came of a case: what was injected, and what diagnosis made of it; ``others`` are cores that others used."""

    case: Case
    injected_s: float | None = None
    attributed_s: float | None = None
    timing: Timing
    clean_step_s: float | None = None
    others: float | None = None
    findings: tuple[Finding, ...]

    @property
    def lead(self) -> Finding:
        """The finding that leads."""
        return self.findings[0]

    @property
    def right(self) -> bool:
        """Whether the cause leads, at the place where it is, and is the only alarm."""
        alarms = [finding.kind for finding in self.findings if finding.level == "alarm"]
        wanted = [] if self.case.expected == "healthy" else [self.case.expected]
        there = self.case.cause.endswith("one rank") and self.lead.rank != LATE_RANK
        return self.lead.kind == self.case.expected and alarms == wanted and not there


class Model(nn.Module):
    """Residual blocks of two matrix products over embedded bytes: the same work in every step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)  # [tokens, width]: FSDP2 warns of modules that return views
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Batches(Dataset[Any]):
    """Micro batches of random bytes; each takes ``wait`` seconds to get while it is above 0."""

    def __init__(self, samples: int, number: int, wait: Any) -> None:
        self.samples, self.number, self.wait = samples, number, wait

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.wait.value > 0:
            time.sleep(self.wait.value)
        ids = torch.randint(VOCAB, (self.samples, LENGTH + 1), generator=torch.Generator().manual_seed(index))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Loop:
    """The training loop of a case on this rank; ``on`` is whether the cause is there."""

    def __init__(self, case: Case, session: Session, folder: str) -> None:
        self.case, self.session, self.folder = case, session, folder
        self.on, self.saved_s = False, 0.0
        self.thief: int | None = None  # writes to it take this rank's core away
        self.late = session.ranks.rank == LATE_RANK
        self.wait = multiprocessing.Value("d", 0.0)
        torch.manual_seed(0)
        model = Model(case.width)
        self.model, self.optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        number = (3 * case.clean_steps + case.steps + 20) * case.grad_accum * case.world
        dataset = Batches(case.samples, number, self.wait)
        kept = {"persistent_workers": True} if case.workers else {}
        loader = DataLoader(dataset, batch_size=None, num_workers=case.workers, **kept)
        self.steps = iter(session.steps(loader))

    def run(self, steps: int) -> None:
        """So many steps."""
        cause = self.case.cause if self.on else "none"
        delayed = cause == "data" or (cause == "data on one rank" and self.late)
        self.wait.value = self.case.seconds / self.case.grad_accum if delayed else 0.0
        for _ in range(steps):
            step = next(self.steps)
            if self.thief is not None:
                os.write(self.thief, b"x")
            for micro in step:
                if cause == "early sync" and self.case.strategy == "ddp":
                    self.model.require_backward_grad_sync = True  # what a loop does that knows no accumulation
                outputs = self.model(micro.inputs)
                self._sleep(cause == "forward on one rank")
                step.backward(token_loss_sum(outputs, micro.labels), count=micro.num_tokens)
            self._sleep(cause == "code on one rank")
            step.update(self.optimizer, clip_norm=1.0)
            if self.case.cause == "save" and step.number % self.case.save_every == SAVE_AT and self.on:
                began = time.perf_counter()
                self.session.save(self.folder)
                self.saved_s += time.perf_counter() - began

    def _sleep(self, wanted: bool) -> None:
        if wanted and self.late:
            time.sleep(self.case.seconds / (self.case.grad_accum if self.session.phase == "forward" else 1))


def plan_of(case: Case) -> Plan:
    """The plan that a case runs."""
    dims = dims_for(parse_strategy(case.strategy), case.world)
    return Plan(strategy=case.strategy, dims=dims, micro_batch=case.samples, grad_accum=case.grad_accum, device="cpu")


def run_case(case: Case, folder: str | None = None) -> Result | None:
    """Run a case on this rank; the result is on rank 0."""
    every = case.cause == "early sync" and case.strategy != "ddp"
    with ExitStack() as stack:
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory())
        clean = _measure(case, plan_of(case), folder, cause=False) if every else None
        plan = plan_of(case).model_copy(update={"gradient_sync": "every"}) if every else plan_of(case)
        return _measure(case, plan, folder, cause=True, clean_step_s=clean and clean.timing.step_s)


def _measure(case: Case, plan: Plan, folder: str, *, cause: bool, clean_step_s: float | None = None) -> Any:
    session = shardwise.start(plan, receipts=False)
    watch = HostRecorder()
    session.observers.append(watch)
    loop = Loop(case, session, folder)
    attribution = session.timekeeper
    assert isinstance(attribution, Attribution)
    loop.run(WARM_UP)
    clean = [_window(loop, attribution, case.clean_steps)] if case.cause != "none" else []
    loop.on = cause
    with _outside(case, loop) if cause else ExitStack():
        loop.run(SETTLE)
        watch.restart()
        if session.saver is not None:
            session.saver.reports.clear()
        loop.saved_s = 0.0
        attribution.window()
        loop.run(case.steps)
        host = watch.finish(session.ranks)
        if host is not None and case.link_speed is not None:
            host = host.model_copy(update={"nic_speed": case.link_speed})
        loop.on = False
        loop.run(1)  # the last step is told with the next one's message
        found = attribution.window()
    saves = _saves(session)
    if case.cause != "none":
        clean.append(_window(loop, attribution, case.clean_steps))
    attribution.finish()
    result = None
    if session.ranks.is_main and found is not None:
        known = [one.step_s for one in clean if one is not None]
        clean_step_s = clean_step_s or (sum(known) / len(known) if known else None)
        observed = observe(session, found, host=host, loader_workers=case.workers, saves=saves,
                           save_every=case.save_every if case.cause == "save" else None)  # fmt: skip
        findings = diagnose(observed)
        result = Result(
            case=case,
            injected_s=injected(loop, found, clean_step_s),
            attributed_s=next((f.seconds for f in findings if f.kind == case.expected), None),
            timing=found,
            clean_step_s=clean_step_s,
            others=None if host is None else host.others,
            findings=findings,
        )
    session.close()
    return result


def _window(loop: Loop, attribution: Attribution, steps: int) -> Timing | None:
    loop.run(SETTLE)
    attribution.window()
    loop.run(steps)
    return attribution.window()


def _saves(session: Session) -> list[SaveStall]:
    done = [] if session.saver is None else session.saver.reports
    return [
        SaveStall(step=r.step, stall_s=r.stall_s, write_s=r.write_s, num_bytes=r.num_bytes, background=r.background)
        for r in done
    ]


def injected(loop: Loop, found: Timing, clean_step_s: float | None) -> float | None:
    """Seconds of a step that the cause took: the sleep, a stopwatch around the saves, or the longer steps."""
    case = loop.case
    if case.cause == "none" or clean_step_s is None:
        return None
    if case.cause == "save":
        return loop.saved_s / found.steps
    return case.seconds or found.step_s - clean_step_s


@contextmanager
def _outside(case: Case, loop: Loop) -> Iterator[None]:
    """Causes that are not in the loop."""
    session = loop.session
    with ExitStack() as stack:
        if case.cause == "core taken":
            stack.enter_context(_taken_core(loop))
        if case.cause == "save":
            stack.enter_context(_slow_writes(case.seconds))
        if case.cause == "one core":
            stack.enter_context(_one_core())
        if case.cause == "busy core" and session.ranks.is_main:
            stack.enter_context(_busy_process())
        if case.cause == "link":
            stack.enter_context(_shaped(case.rate))
        yield


@contextmanager
def _slow_writes(seconds: float) -> Iterator[None]:
    from shardwise.checkpoint import save

    plain = save.write_share

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return plain(*args, **kwargs)

    save.write_share = slow
    try:
        yield
    finally:
        save.write_share = plain


THIEF = """
import os, sys, time
core, seconds = int(sys.argv[1]), float(sys.argv[2])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
print("ready", flush=True)
while os.read(0, 1):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
"""


@contextmanager
def _taken_core(loop: Loop) -> Iterator[None]:
    """Each rank keeps to a core of its own, and the late rank's is taken away for some time in each step, by a process
    that the kernel puts before all ordinary ones. Needs root.
    """
    cores = os.sched_getaffinity(0)
    mine = sorted(cores)[loop.session.ranks.rank % len(cores)]
    os.sched_setaffinity(0, {mine})
    try:
        if not loop.late:
            yield
            return
        argv = [sys.executable, "-c", THIEF, str(mine), str(loop.case.seconds)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            loop.thief = process.stdin.fileno()
            try:
                yield
            finally:
                loop.thief = None
                process.stdin.close()
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _one_core() -> Iterator[None]:
    """All threads of this rank on the machine's first core."""
    cores = os.sched_getaffinity(0)
    try:
        _pin({min(cores)})
        yield
    finally:
        _pin(cores)


def _pin(cores: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue


@contextmanager
def _busy_process() -> Iterator[None]:
    """Another process that computes all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _shaped(rate: str) -> Iterator[None]:
    """What this host sends is limited to ``rate``: run inside of its namespace (`tests.netns`)."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    burst = str(max(4000, int(bits_per_s(rate) / 8 * 1e-3)))  # less loses much of the rate
    limits = ["burst", burst, "limit", str(64 << 20)]
    subprocess.run(["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, *limits], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=True)


def main() -> None:
    """A rank of its own: the case's file, and the file for the result."""
    torch.set_num_threads(1)
    case = Case.model_validate_json(Path(sys.argv[1]).read_text())
    ranks = join("cpu")  # sessions of one process share its group
    with tempfile.TemporaryDirectory() as folder:
        result = run_case(case, sys.argv[3] if len(sys.argv) > 3 else folder)
    if result is not None:
        Path(sys.argv[2]).write_text(result.model_dump_json())
    leave(ranks)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own exit races with gloo's threads


if __name__ == "__main__":
    main()
