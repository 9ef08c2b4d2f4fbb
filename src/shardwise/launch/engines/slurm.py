"""Slurm: an sbatch script around ``srun torchrun``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path, PurePosixPath

from shardwise.environment import FIRST_PORT, PORTS
from shardwise.launch.engines.launch_request import LaunchRequest
from shardwise.launch.engines.render import render, sbatch_value, unfit_for_sbatch

NAMED = ("partition", "account", "qos", "time")
_OWN = {
    "job-name": "--name",
    "nodes": "--nodes",
    "gpus-per-node": "--nproc",
    "cpus-per-task": "--cpus",
    "signal": "--grace",
    "output": "train.output",
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "time": "--time",
    "no-kill": "launch.min_nodes",
    "test-only": "--dry-run",
    "ntasks": None,
    "ntasks-per-node": None,
    "tasks-per-node": None,
    "parsable": None,
    "open-mode": None,
    "requeue": None,
    "no-requeue": None,
    "array": None,
}
"""Options of sbatch that the script gives itself, and what sets them."""


def render_slurm(request: LaunchRequest, file: str, header: str) -> str:
    """Return the sbatch script of ``request``."""
    log = str(PurePosixPath(request.output.replace("%", "%%")) / "slurm-%j.log")
    named = [f"--{name}={sbatch_value(value)}" for name in NAMED if (value := request.options.get(name)) is not None]
    more = [_written(item) for item in request.options.get("sbatch_option") or ()]
    ended = str(PurePosixPath(request.output) / "first-node-ended")
    facts = {"options": [*named, *more], "log": log, "ended": ended, "first_port": FIRST_PORT, "ports": PORTS}
    return render("slurm.sh.j2", request, file=file, header=header, **facts)


def slurm_problems(request: LaunchRequest) -> list[str]:
    """List what an sbatch script cannot hold, or sets itself."""
    given = {f"--{name}": request.options.get(name) for name in NAMED} | {"train.output": request.output}
    problems = [
        f"{key} '{text}': {why}; choose another"
        for key, text in given.items()
        if text is not None and (why := unfit_for_sbatch(text)) is not None
    ]
    given_before = set()
    for item in request.options.get("sbatch_option") or ():
        key = item.partition("=")[0].lstrip("-")
        if key in given_before:
            problems.append(f"--sbatch-option '{item}': {key} is given twice; give it once")
        given_before.add(key)
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            problems.append(
                f"--sbatch-option '{item}' must be KEY or KEY=VALUE, with the long name of an sbatch option"
            )
        elif key in _OWN:
            instead = _OWN[key]
            fix = "leave it out" if instead is None else f"use {instead}"
            problems.append(f"--sbatch-option '{item}': the script sets {key} itself; {fix}")
        elif (why := unfit_for_sbatch(item)) is not None:
            problems.append(f"--sbatch-option '{item}': {why}; choose another")
    return problems


def submit_slurm(request: LaunchRequest, file: Path) -> list[str]:
    """Return the command that submits ``file``."""
    return ["sbatch", "--parsable", str(file)]


def follow_slurm(request: LaunchRequest, answer: str) -> str:
    """Return the line that follows a job's output; it begins when the job does."""
    return shlex.join(["tail", "-F", f"{request.output}/slurm-{answer.partition(';')[0]}.log"])


def _written(item: str) -> str:
    key, equals, value = item.partition("=")
    return f"--{key.lstrip('-')}" + (f"={sbatch_value(value)}" if equals else "")
