"""The config that the command-line tests train with: a small corpus, a small model, seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.commands import shardwise, start_servers

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, **changes: dict[str, Any]) -> Path:
    """A TOML config in ``folder``; ``changes`` are tables with keys to set or replace, or to drop with ``None``."""
    import tomli_w

    document: dict[str, dict[str, Any]] = {
        "model": {"factory": "tests.models:byte_decoder"},
        "data": {"path": "python:json", "seq_len": 32, "heldout_fraction": 0.2},
        "optimizer": {"lr": 1e-2, "warmup_steps": 3},
        "train": {"steps": 12, "global_batch": 8, "output": str(folder / "run"), "eval_samples": 16},
        "parallel": {"nproc": 2},
        "checkpoint": {"every": 3},
    }
    for table, keys in changes.items():
        document.setdefault(table, {}).update(keys)
        document[table] = {key: value for key, value in document[table].items() if value is not None}
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(document))
    return path


def environment() -> dict[str, str]:
    """This process's environment without what a surrounding launcher or test may have put there."""
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")
    return {key: value for key, value in os.environ.items() if key not in mine}


def start_train(config: Path, *words: str) -> subprocess.Popen[str]:
    """``shardwise train`` in a process of its own."""
    command = [sys.executable, "-m", "shardwise", "train", str(config), *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def train(config: Path, *words: str, exit_code: int = 0, cwd: Path = ROOT) -> tuple[str, str]:
    """Run to the end; returns stdout and stderr."""
    done = shardwise("train", str(config), *words, exit_code=exit_code, cwd=cwd)
    return done.stdout, done.stderr


def losses(folder: Path) -> dict[int, str]:
    """Step → loss exactly as written."""
    lines = (json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: repr(line["loss"]) for line in lines if "loss" in line}


def hashes(checkpoint: Path) -> dict[str, list[str]]:
    """The hash of every tensor's shards in a checkpoint."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return {name: [s["hash"] for s in entry["shards"]] for name, entry in manifest["tensors"].items()}


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Return as soon as the run has logged ``step``."""
    _wait_for_step(lambda: process.poll() is None, folder, step)


def _wait_for_step(runs: Callable[[], bool], folder: Path, step: int) -> None:
    file = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while runs() and time.monotonic() < deadline:
        text = file.read_text() if file.exists() else ""
        if f'{{"step": {step}, "loss"' in text:
            return
        time.sleep(0.004)
    assert runs(), "the run ended before the step"
    raise AssertionError(f"step {step} was not reached")


def train_and(
    do: Callable[[list[psutil.Process]], None],
    folder: Path,
    step: int,
    config: Path,
    *words: str,
    exit_code: int = 0,
    cwd: Path = ROOT,
) -> tuple[str, str]:
    """`train`; ``do`` is given the ranks' processes as soon as the run has logged ``step``."""
    start_servers()
    before = {child.pid for child in psutil.Process().children()}
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def watch() -> None:
            _wait_for_step(lambda: not ended.is_set(), folder, step)
            do([child for child in psutil.Process().children() if child.pid not in before])

        done = pool.submit(watch)
        try:
            texts = train(config, *words, exit_code=exit_code, cwd=cwd)
        finally:
            ended.set()
        done.result()
    return texts


def stop(process: subprocess.Popen[str], number: signal.Signals) -> int:
    """Signal the command itself and wait for its end."""
    process.send_signal(number)
    process.communicate(timeout=100)
    return process.returncode
