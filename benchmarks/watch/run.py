"""Injects faults into real runs on gloo ranks, and holds the watchdog's verdict and its time against what was injected.

``python -m benchmarks.watch.run --output benchmarks/watch --faults 200 --clean-steps 2000``; raw results are kept. A
part of the faults (``--turns 50 100``) adds to those that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import psutil
import torch

from shardwise.watch import monitor
from tests import netns
from tests.cli.configs import ROOT, environment, write_config
from tests.commands import shardwise

APART = ("different collectives", "different shapes", "wait for each other")
EXPECTED: dict[str, tuple[str, ...]] = {
    "sleep": ("is in other code",),
    "stop": ("is stopped (SIGSTOP)",),
    "native": ("native code holds the interpreter",),
    "loader": ("waits for its data loader",),
    "order": ("wait for each other",),
    "collective": APART,
    "skip": APART,  # which of them depends on the groups of the strategy
    "extra": APART,
    "shape": APART,
    "exit": ("ended with exit code 0", "without a word"),
    "leave": ("sys.exit was called",),
    "kill": ("SIGKILL",),
    "segfault": ("SIGSEGV",),
    "exception": ("came to harm",),
    "slow": ("is slow: in the last",),
    "disk": ("No space left on device",),
    "memory": ("out of memory: the kernel killed",),
    "cut": ("a link is cut", "a link to it is cut"),
    "batch": ("more batches than the others have",),
}
"""Words of the message, one of which must be there, of each fault."""
PLAIN = ("batch",)
"""Faults of a loop of plain PyTorch, as Shardwise's own gives all ranks as many batches."""
ANYWHERE = ("disk", "cut")
"""Faults of a machine or a link, which any rank may meet."""
GROUP = Path(f"/sys/fs/cgroup/memory/shardwise-watch-{os.getpid()}")
MEMORY_LIMIT = 3 << 30
LIMIT_S = 150.0
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
NEEDS_FOUR = ("hsdp",)
SLOW_FIRST = {"factory": "tests.faulty:model", "kwargs": {"kind": "slow_first", "rank": 1, "step": 1}}
LLAMA = {"factory": None, "config": "examples/llama-2m"}
CLEAN: tuple[tuple[str, dict[str, object], dict[str, object]], ...] = (
    *((strategy, SLOW_FIRST, {}) for strategy in STRATEGIES),
    *((strategy, LLAMA, {}) for strategy in ("fsdp+tp2", "ddp+pp2", "ddp+cp2")),
    *((strategy, {}, {"compile": True}) for strategy in ("ddp", "fsdp")),
)
"""Strategies, models and options of clean runs."""


@dataclass(frozen=True)
class Trial:
    kind: str
    strategy: str
    world: int
    rank: int
    step: int
    launcher: str = "local"


def trials(number: int, seed: int) -> list[Trial]:
    """Faults in turn, each on a random rank and step of a random strategy, with both launchers by turns."""
    draw = random.Random(seed)
    found = []
    for turn, kind in enumerate(itertools.islice(itertools.cycle(EXPECTED), number)):
        strategy = draw.choice(STRATEGIES)
        world = 4 if strategy in NEEDS_FOUR else draw.choice((2, 3, 4))
        launcher = "torchrun" if turn // len(EXPECTED) % 2 else "local"
        if kind == "cut":
            strategy, world, launcher = draw.choice(("ddp", "fsdp")), 2, "two hosts"
        if kind in ("disk", "memory"):
            launcher = "local"
        if kind in PLAIN:
            strategy, launcher = "ddp", "torchrun"
        found.append(Trial(kind, strategy, world, draw.randrange(world), draw.randrange(4, 10), launcher))
    return found


def run(trial: Trial) -> dict[str, object]:
    """One run with a fault: what was said, and how long after the fault."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        mark, report = folder / "fault", folder / "run" / "watch.json"
        kwargs = {"kind": trial.kind, "rank": trial.rank, "step": trial.step, "mark": str(mark)}
        config = write_config(
            folder,
            model={"factory": "tests.faulty:model", "kwargs": kwargs},
            parallel={"nproc": trial.world if trial.launcher == "local" else None, "strategy": trial.strategy},
            train={"steps": 16, "global_batch": 8 if trial.world != 3 else 6, "output": f"{folder}/run"},
            checkpoint={"every": trial.step + 1 if trial.kind == "disk" else 3},
        )
        if trial.kind in PLAIN:
            (folder / "run").mkdir()
        if trial.kind == "disk":
            checkpoints = folder / "run" / "checkpoints"
            checkpoints.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(checkpoints)], check=True)
            stack.callback(subprocess.run, ["umount", str(checkpoints)], check=True)
        code, said = _run(trial, folder, config, stack)
        ended = time.time()
        reports = [report, *folder.glob("run/watch-*.json")]
        events = [one for file in reports if file.exists() for one in json.loads(file.read_text())["events"]]
        mark = folder / "run" / "fault" if trial.kind in PLAIN else mark
        at = float(mark.read_text()) if mark.exists() else None
    first = min(events, key=lambda one: float(one["time"]), default=None)
    named = [trial.rank] if first is None else first["ranks"]
    right_rank = trial.kind in ANYWHERE or (trial.rank in named and _names(trial, said))
    right_reason = any(words in said for words in EXPECTED[trial.kind])
    return {
        **asdict(trial),
        "exit_code": code,
        "right_rank": right_rank,
        "right_reason": right_reason,
        "ranks_named": named,
        "reason_named": None if first is None else first["reason"],
        "seconds_to_verdict": None if at is None else round((ended if first is None else first["time"]) - at, 2),
        "said": said[-2500:] if not (right_rank and right_reason) else "",
    }


def _names(trial: Trial, said: str) -> bool:
    """Whether the message names the rank, or torchrun's table of failures does."""
    return re.search(rf"\brank(s [\d, and]*| ){trial.rank}\b|rank      : {trial.rank} ", said) is not None


def _run(trial: Trial, folder: Path, config: Path, stack: contextlib.ExitStack) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    command = [sys.executable, "-m", "shardwise", "train", str(config)]
    launch = [sys.executable, "-m", "torch.distributed.run"]
    if trial.launcher == "local" and trial.kind != "memory":
        done = shardwise("train", str(config), exit_code=None)
        return done.returncode, done.stdout + done.stderr
    if trial.kind == "memory":
        GROUP.mkdir(exist_ok=True)
        stack.callback(GROUP.rmdir)
        (GROUP / "memory.limit_in_bytes").write_text(str(MEMORY_LIMIT))
        script = f'echo $$ > {GROUP}/cgroup.procs; exec "$@"'
        return _watched([["sh", "-c", script, "sh", *command]], [environment()], folder, until_named=False)
    if trial.launcher == "torchrun":
        words = [*launch, "--standalone", f"--nproc-per-node={trial.world}"]
        if trial.kind in PLAIN:
            words += ["-m", "tests.plain_loop_faults", trial.kind, str(folder / "run"), str(trial.rank)]
        else:
            words += command[1:]
        return _watched([words], [environment()], folder)
    hosts = stack.enter_context(netns.two_hosts())
    port = next(hosts.ports)
    agents = []
    for host in (0, 1):
        words = [*launch, "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1", *command[1:]]
        words[3:3] = [f"--master-addr={netns.ADDRESSES[0]}", f"--master-port={port}"]
        agents.append(hosts.command(host, words))
    cut = ["ip", "-n", hosts.names[1], "link", "set", hosts.devices[1], "down"]
    return _watched(agents, [{**environment(), **hosts.environment(host)} for host in (0, 1)], folder, cut)


def _watched(
    commands: list[list[str]],
    environments: list[dict[str, str]],
    folder: Path,
    at_mark: Sequence[str] = (),
    *,
    until_named: bool = True,
) -> tuple[int, str]:
    """Run launchers that are processes of their own until they end, or have named a rank; ``at_mark``: with the fault.

    What the ranks have left is ended with them.
    """
    said = folder / "said"
    processes = []
    with said.open("w") as output:
        for command, variables in zip(commands, environments, strict=True):
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output, start_new_session=True)
            )
    deadline, marked = time.monotonic() + LIMIT_S, False
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if not marked and at_mark and (folder / "fault").exists():
            marked = True
            subprocess.run(at_mark, check=True)
        if until_named and list(folder.glob("run/watch*.json")) and "slow rank" not in said.read_text():
            time.sleep(4.0)  # torchrun's own table comes after it
            break
        time.sleep(0.1)
    for process in processes:
        for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.kill()
        process.wait()
    return processes[0].returncode, said.read_text(errors="replace")


def clean(steps: int) -> list[dict[str, object]]:
    """Runs without a fault, with evaluations, checkpoints and a first step that is far longer than the others."""
    found = []
    each = -(-steps // len(CLEAN))
    for strategy, model, options in CLEAN:
        with tempfile.TemporaryDirectory() as folder:
            config = write_config(
                Path(folder),
                model=model,
                parallel={"nproc": 4 if strategy in NEEDS_FOUR else 2, "strategy": strategy, **options},
                train={"steps": each, "eval_every": 50, "log_every": 1, "output": f"{folder}/run"},
                checkpoint={"every": 50},
            )
            done = shardwise("train", str(config), exit_code=None)
            said = done.stdout + done.stderr
            alarms = (Path(folder) / "run" / "watch.json").exists() or "no gradient any more" in said
            lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        found.append(
            {
                "strategy": strategy,
                **options,
                "steps": max((line["step"] for line in lines), default=0),
                "exit_code": done.returncode,
                "alarm": alarms,
            }
        )
        print(found[-1], said[-2000:] if alarms or done.returncode else "", flush=True)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path, default=Path("benchmarks/watch"))
    options.add_argument("--faults", type=int, default=200)
    options.add_argument("--clean-steps", type=int, default=2000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--turns", type=int, nargs=2, default=(0, 1 << 30), help="only these of the faults: from, to")
    options.add_argument("--kinds", nargs="*", default=list(EXPECTED), help="only these faults")
    given = options.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    kept = given.output / "results.json"
    results = json.loads(kept.read_text())["results"] if given.turns[0] and kept.exists() else []
    with mock.patch.object(monitor, "RECOVER_S", 1.0):  # after the verdict, which is what is timed
        for number, trial in list(enumerate(trials(given.faults, given.seed)))[slice(*given.turns)]:
            if trial.kind not in given.kinds:
                continue
            results.append(run(trial))
            one = results[-1]
            said = (one["right_rank"], one["right_reason"], one["seconds_to_verdict"], one["ranks_named"])
            print(number, trial, *said, one["said"], flush=True)
            kept.write_text(json.dumps(summary(results), indent=1) + "\n")
    document = {**summary(results), "clean": clean(given.clean_steps) if given.clean_steps else []}
    kept.write_text(json.dumps(document, indent=1) + "\n")
    print({key: value for key, value in document.items() if key != "results"})


def summary(results: list[dict[str, object]]) -> dict[str, object]:
    """How many were right, and how soon."""
    times = [float(str(one["seconds_to_verdict"])) for one in results if one["seconds_to_verdict"] is not None]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {torch.__version__}, gloo",
        "faults": len(results),
        "right_rank": sum(bool(one["right_rank"]) for one in results),
        "right_reason": sum(bool(one["right_reason"]) for one in results),
        "seconds_to_verdict": {"median": statistics.median(times or [0]), "worst": max(times or [0])},
        "results": results,
    }


if __name__ == "__main__":
    main()
