"""The loop of `shardwise train` in real ranks that are killed with SIGKILL, and what must be true after every kill.

A kill is aimed at a system call of the checkpoints (before it, after it, or half a write into it) or comes at a time.
It hits one rank, and the others end by themselves, or all ranks at once. Whatever it was, the next attempt must go on
from the newest checkpoint, and every loss and the last checkpoint must be those of a run that was never interrupted.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardwise.checkpoint.format import newest, read_manifest
from shardwise.launch.rank import is_peer_symptom
from shardwise.train.metrics import read_metrics
from tests import worlds  # noqa: F401 it says what the fork server loads
from tests.cli import configs

LOADING = "preadv"
AIMS = {  # at which calls 50 kills are aimed; the others come at any time
    "pwrite": 7,  # of shards and manifests
    "fsync": 5,
    "rename": 4,  # of manifests, checkpoints, latest, and of what is pruned
    "mkdir": 2,
    "unlink": 2,
    "rmdir": 1,
    "replace": 1,  # of the metrics
    LOADING: 3,
    "": 25,
}
LOADS = 12  # a rank of the models here reads at least so many ranges
GRACE_S = 3.0  # for the ranks that were not killed, to see that a peer is gone
LIMIT_S = 100.0


@dataclass(frozen=True)
class Setting:
    """How a run is spread and saved, and how its batches are cut."""

    strategy: str
    world: int
    async_save: bool = False
    every: int = 2
    keep: int = 2
    micro_batch: int = 2
    pack: bool = True
    factory: str = "tests.models:byte_decoder"
    epochs: int = 3

    def __str__(self) -> str:
        how = "in the background" if self.async_save else "in the foreground"
        samples = "packed" if self.pack else "documents"
        return (
            f"{self.strategy} on {self.world}, saved every {self.every} steps {how}, {self.keep} kept, "
            f"micro batch {self.micro_batch}, {samples}"
        )


@dataclass(frozen=True)
class Kill:
    """SIGKILL for ``rank`` or all, at the ``nth`` of its ``call``s or, without a call, after a ``share`` of a run."""

    rank: int
    everyone: bool
    call: str = ""
    nth: int = 0
    when: str = "before"  # or after, or torn: half of the bytes of a write
    share: float = 0.0

    def __str__(self) -> str:
        whom = "all ranks" if self.everyone else f"rank {self.rank}"
        if not self.call:
            return f"{whom} after {self.share:.3f} of a run"
        return f"{whom} {self.when} {self.call} {self.nth} of rank {self.rank}"

    def sooner(self) -> Kill:
        """For where the run was over before."""
        return replace(self, nth=max(1, self.nth // 2), share=self.share / 2)


@dataclass(frozen=True)
class Whole:
    """A run that nobody interrupted: the losses as written, the last checkpoint's hashes, each rank's calls."""

    losses: dict[int, str]
    hashes: dict[str, list[str]]
    calls: list[dict[str, int]]
    seconds: float


@dataclass(frozen=True)
class Attempt:
    """How a start of the ranks went. ``first`` is the step it went on from; ``None`` where it did not get there."""

    killed: bool
    first: int | None
    seconds: float
    calls: list[dict[str, int]]


class Trial:
    """One run that is killed again and again; the methods raise AssertionError where it differs from ``full``."""

    def __init__(self, folder: Path, texts: Path, setting: Setting, full: Whole) -> None:
        self.folder, self.setting, self.full = folder, setting, full
        self.job = prepared(folder, texts, setting)
        self.ended = 0
        self.done: Counter[str] = Counter()

    def kill(self, kill: Kill) -> None:
        """Make it happen: where the run is over before, it is checked, and killed sooner in a new one."""
        for _ in range(8):
            if self._attempt(kill):
                whom = "all ranks" if kill.everyone else "one rank"
                self.done[f"{whom}, {kill.when + ' ' + kill.call if kill.call else 'at a time'}"] += 1
                return
            if kill.call != LOADING:  # which needs a checkpoint
                self._begin_again()
            kill = kill.sooner()
        raise AssertionError(f"{kill} was never reached")

    def end(self) -> None:
        """Let the run end."""
        assert not self._attempt(None)

    def _attempt(self, kill: Kill | None) -> bool:
        before = self._newest_step()
        found = attempt(self.job, self.setting.world, kill, self.full.seconds)
        assert found.first in (None, before), f"began at step {found.first}, the newest checkpoint is of step {before}"
        after = self._newest_step()
        assert after >= before, f"the newest checkpoint was of step {before}, now it is of step {after}"
        losses = [(line["step"], repr(line["loss"])) for line in self._metrics() if "loss" in line]
        expected = list(self.full.losses.items())
        wrong = [pair for pair in zip(losses, expected, strict=False) if pair[0] != pair[1]]
        assert not wrong and len(losses) <= len(expected), f"losses (found, expected): {wrong[:3]}, {len(losses)} lines"
        if not found.killed:
            self.ended += 1
            assert len(losses) == len(expected), f"{len(losses)} losses, {len(expected)} expected"
            hashes = last_hashes(self.folder)
            other = [name for name in self.full.hashes if self.full.hashes[name] != hashes.get(name)]
            assert hashes == self.full.hashes, f"the last checkpoint has other bytes: {other[:5]}"
        return found.killed

    def _newest_step(self) -> int:
        path = newest(self.folder / "run" / "checkpoints")
        return read_manifest(path).step if path else 0

    def _metrics(self) -> Iterator[dict[str, Any]]:
        return read_metrics(self.folder / "run" / "metrics.jsonl")

    def _begin_again(self) -> None:
        shutil.rmtree(self.folder / "run" / "checkpoints")
        (self.folder / "run" / "metrics.jsonl").unlink()


def write_texts(folder: Path, documents: int = 10) -> Path:
    """A corpus of a few thousand bytes: an epoch is some steps long."""
    folder.mkdir(parents=True, exist_ok=True)
    rng_state = random.Random(5)
    for index in range(documents):
        words = [
            "".join(rng_state.choices("abcdefgh", k=rng_state.randint(1, 7))) for _ in range(rng_state.randint(20, 90))
        ]
        (folder / f"{index:02d}.txt").write_text(" ".join(words))
    return folder


def prepared(folder: Path, texts: Path, setting: Setting) -> str:
    """The job of a run in ``folder``, as the command prepares it; dropout, epochs, clipping, schedule, evaluation."""
    from shardwise.run.job import prepare_job
    from shardwise.train.config import read_config

    folder.mkdir(parents=True)
    changes: dict[str, dict[str, Any]] = {
        "model": {"factory": setting.factory},
        "data": {"path": str(texts), "heldout_fraction": 0.2, "pack": setting.pack},
        "optimizer": {"clip_norm": 0.5},
        "train": {"steps": None, "epochs": setting.epochs},
        "parallel": {"strategy": setting.strategy, "nproc": setting.world},
        "checkpoint": {"every": setting.every, "keep": setting.keep, "async_save": setting.async_save},
    }
    changes["train"] |= {"global_batch": setting.world * 4, "micro_batch": setting.micro_batch}
    changes["train"] |= {"eval_every": 5, "eval_samples": 8, "seed": 3}
    config = read_config(configs.write_config(folder, **changes))
    return prepare_job(config, lambda text: None).job.to_json()


def run_whole(folder: Path, texts: Path, setting: Setting) -> Whole:
    """A run without interruption."""
    found = attempt(prepared(folder, texts, setting), setting.world)
    return Whole(configs.losses(folder), last_hashes(folder), found.calls, found.seconds)


def last_hashes(folder: Path) -> dict[str, list[str]]:
    """The hashes of a run's newest checkpoint: weights, optimizer and random states."""
    path = newest(folder / "run" / "checkpoints")
    assert path is not None, "there is no checkpoint"
    return configs.hashes(path)


def draw(rng_state: random.Random, full: Whole, call: str) -> Kill:
    """A kill at that ``call`` of any rank that makes it, or at any time; one in four hits all ranks."""
    rank, everyone = rng_state.randrange(len(full.calls)), rng_state.random() < 0.25
    if not call:
        return Kill(rank, everyone, share=rng_state.uniform(0.0, 0.8))
    when = rng_state.choice(("before", "torn", "after") if call == "pwrite" else ("before", "after"))
    if call == LOADING:
        return Kill(rank, everyone, call, rng_state.randint(1, LOADS), when)
    rank = rng_state.choice([rank for rank, calls in enumerate(full.calls) if calls.get(call)])
    return Kill(rank, everyone, call, rng_state.randint(1, max(1, full.calls[rank][call] // 3)), when)


@contextmanager
def said(what: str) -> Iterator[None]:
    """An assertion that fails inside says what was being done."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def attempt(job: str, world: int, kill: Kill | None = None, seconds: float = 0.0) -> Attempt:
    """Start the ranks, kill as is asked for, and wait until all are gone. ``seconds`` is how long a run takes.

    Raises:
        AssertionError: a rank failed, and not because a peer was gone.
    """
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        context = torch.multiprocessing.start_processes(
            _rank_main, (world, place, job, kill), world, join=False, daemon=True, start_method="forkserver"
        )
        started = float("nan")
        try:
            started = _watch(context.processes, place, kill, seconds)
        finally:
            exits = [process.exitcode for process in context.processes]
            for process in context.processes:
                process.kill()
                process.join()
        killed = -signal.SIGKILL in exits
        errors = [file.read_text() for file in sorted(place.glob("*.err"))]
        own = [text for text in errors if not (killed and is_peer_symptom(text))]
        assert not own and (killed or not any(exits)), f"the ranks ended with {exits}\n" + "\n".join(own)
        begun = place / "begun"
        return Attempt(
            killed,
            int(begun.read_text()) if begun.exists() else None,
            time.monotonic() - started,
            [json.loads(file.read_text()) for file in sorted(place.glob("*.calls"))],
        )


def _watch(processes: Sequence[Any], place: Path, kill: Kill | None, seconds: float) -> float:
    """Wait until all ranks are gone, or those left had time to see that another is; returns when all had joined.

    A kill at a time is done here.
    """
    deadline, joined = time.monotonic() + LIMIT_S, float("inf")
    timed = kill if kill is not None and not kill.call else None
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if joined == float("inf") and len(list(place.glob("*.pid"))) == len(processes):
            joined = time.monotonic()
        if timed is not None and time.monotonic() >= joined + timed.share * seconds:
            for process in processes if timed.everyone else [processes[timed.rank]]:
                process.kill()
            timed = None
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.005)
    return joined


def _rank_main(rank: int, world: int, place: Path, job: str, kill: Kill | None) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 20)  # as `worlds` has it
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    code = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=world)
        (place / f"{rank}.pid").write_text(str(os.getpid()))
        dist.barrier()  # everybody can be killed now
        calls = _counted(place, job, kill if kill is not None and kill.call and kill.rank == rank else None)
        _train(job, place)
        dist.barrier()
        (place / f"{rank}.calls").write_text(json.dumps(calls))
    except BaseException:
        (place / f"{rank}.err").write_text(traceback.format_exc())
        code = 1
    os._exit(code)  # the interpreter's own exit races with gloo's threads


def _train(text: str, place: Path) -> None:
    """What `shardwise.run.rank_main` does, without the receipts."""
    from shardwise.distributed.process_group import join
    from shardwise.run.job import Job
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.loop import TrainingRun
    from shardwise.train.session import Session

    job = Job.model_validate_json(text)
    session = Session(ranks=join(job.plan.device), planner=lambda *_: job.plan)
    TrainingRun(job.config, job.plan, open_corpus(job.corpus), session, _Quiet(place)).train()
    session.close()


class _Quiet:
    """Tells the parent where the run began, and nobody anything else."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def begin(self, first: int, total: int) -> None:
        (self.place / "begun").write_text(str(first))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def _counted(place: Path, job: str, kill: Kill | None) -> dict[str, int]:
    """Count this process's calls in the run's folder from now on, and die at the one that ``kill`` names."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    folder = json.loads(job)["config"]["train"]["output"]

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            by_path = not isinstance(args[0], int) and kwargs.get("dir_fd") is None
            if by_path and not os.fspath(args[0]).startswith(folder):
                return real(*args, **kwargs)
            with lock:
                counts[name] += 1
                due = kill if kill is not None and (name, counts[name]) == (kill.call, kill.nth) else None
            if due is None:
                return real(*args, **kwargs)
            if due.when == "torn":
                handle, data, offset = args
                real(handle, data[: len(data) // 2], offset)
            elif due.when == "after":
                real(*args, **kwargs)
            _die(place, due.everyone)

        return call

    for name in filter(None, AIMS):
        setattr(os, name, watched(name, getattr(os, name)))
    return counts


def _die(place: Path, everyone: bool) -> NoReturn:
    pids = [int(file.read_text()) for file in place.glob("*.pid")] if everyone else []
    for pid in [pid for pid in pids if pid != os.getpid()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit  # not reached
