"""Engines by name: what each renders, refuses and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.engines.kubernetes import (
    follow_kubernetes,
    kubernetes_problems,
    render_kubernetes,
    submit_kubernetes,
)
from shardwise.launch.engines.launch_request import LaunchRequest
from shardwise.launch.engines.skypilot import follow_skypilot, render_skypilot, skypilot_problems, submit_skypilot
from shardwise.launch.engines.slurm import follow_slurm, render_slurm, slurm_problems, submit_slurm
from shardwise.launch.engines.torchrun import render_torchrun, torchrun_problems


@dataclass(frozen=True)
class LaunchEngine:
    """Engine: its file's ending, its client, and how its pieces are made.

    ``shares_files`` tells whether nodes see the files of this machine, at the same paths. ``submit`` is None where the
    file is not submitted but run; ``follow`` returns the line that shows the output of what the client answered.
    """

    client: str
    suffix: str
    render: Callable[[LaunchRequest, str, str], str]
    problems: Callable[[LaunchRequest], list[str]]
    submit: Callable[[LaunchRequest, Path], list[str]] | None = None
    follow: Callable[[LaunchRequest, str], str] | None = None
    shares_files: bool = True


ENGINES = {
    "torchrun": LaunchEngine("ssh", ".torchrun.sh", render_torchrun, torchrun_problems),
    "slurm": LaunchEngine("sbatch", ".sbatch", render_slurm, slurm_problems, submit_slurm, follow_slurm),
    "kubernetes": LaunchEngine(
        "kubectl",
        ".kubernetes.yaml",
        render_kubernetes,
        kubernetes_problems,
        submit_kubernetes,
        follow_kubernetes,
        False,
    ),
    "skypilot": LaunchEngine(
        "sky", ".sky.yaml", render_skypilot, skypilot_problems, submit_skypilot, follow_skypilot, False
    ),
}
