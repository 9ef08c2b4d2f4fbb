"""`LaunchRequest`: what is asked of an engine, and the words of torchrun that all engines share."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from shardwise.environment import FIRST_PORT, PORTS
from shardwise.hardware.gpus import GpuSpec
from shardwise.train.run_files import RunFile

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
NO_INTERFACE = "NCCL and gloo each choose a network interface. If they choose wrong: shardwise launch --interface NAME."
RANKS_END_S = 20  # of the grace period, for torchrun and the engine to end after the ranks
LONGEST_NAME = 40  # a pod's host name adds to it, and has at most 63 letters


@dataclass(frozen=True)
class Variable:
    """Environment variable, with the reason that the engine's file gives for it."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class LaunchRequest:
    """Run to start on ``nodes`` machines with ``nproc`` ranks each.

    The paths are those on the nodes. ``train_words`` follow the config file in the command of the ranks; ``documents``
    are the texts of the config and of a plan, for engines that carry them along. The engine restarts a run ``restarts``
    times, torchrun itself its ranks ``agent_restarts`` times. ``options`` are of the one engine.
    """

    name: str
    config_file: str
    train_words: tuple[str, ...]
    output: str
    folder: str
    python: str
    nodes: int
    nproc: int
    min_nodes: int
    max_nodes: int
    device: Literal["cpu", "cuda"]
    cores: int
    restarts: int
    agent_restarts: int
    grace_s: int
    gpu: GpuSpec | None = None
    interface: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues with fewer or more nodes."""
        return (self.min_nodes, self.max_nodes) != (self.nodes, self.nodes)

    @property
    def nnodes(self) -> str:
        """Nodes as torchrun reads them: ``4``, or ``2:8``."""
        return f"{self.min_nodes}:{self.max_nodes}" if self.is_elastic else str(self.nodes)

    @property
    def port(self) -> int:
        """Port of the rendezvous, where the engine has no job number to take it from."""
        return FIRST_PORT + zlib.crc32(f"{self.name} {self.output}".encode()) % PORTS

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Environment of torchrun on each node."""
        save_s, threads = self.grace_s - RANKS_END_S, max(1, self.cores // self.nproc)
        found = [
            Variable(
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
                "1",
                "Workers of a restart would find the store's keys of the attempt before, and gloo would hang on them.",
            ),
            Variable(
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
                str(save_s),
                f"torchrun kills ranks that are still saving {save_s} s after a signal; its default is 30 s.",
            ),
            Variable(
                "OMP_NUM_THREADS",
                str(threads),
                "The cores of a node, divided by its ranks; torchrun's default is one thread for each rank.",
            ),
        ]
        if self.device == "cuda":
            why = "The plan's memory assumes it: without it PyTorch reserves up to a tenth more."
            found.append(Variable("PYTORCH_ALLOC_CONF", "expandable_segments:True", why))
        if self.interface is not None:
            nccl = "The network interface of NCCL, as given by --interface; it would choose one by itself."
            gloo = "The same for gloo, which carries control messages, and all that ranks on CPUs exchange."
            found.append(Variable("NCCL_SOCKET_IFNAME", self.interface, nccl))
            found.append(Variable("GLOO_SOCKET_IFNAME", self.interface, gloo))
        given = [Variable(name, value, "As given by --env.") for name, value in self.env.items()]
        return (*(one for one in found if one.name not in self.env), *given)

    @property
    def torchrun_options(self) -> tuple[str, ...]:
        """Options of torchrun that each engine gives in the same way."""
        return (f"--signals-to-handle={SIGNALS}", f"--max-restarts={self.agent_restarts}")

    @property
    def train(self) -> tuple[str, ...]:
        """Module and arguments of the ranks."""
        return ("-m", "shardwise", "train", self.config_file, *self.train_words)

    @property
    def preempted(self) -> str:
        """File that rank 0 writes when it has saved and wants to be started again."""
        return str(PurePosixPath(self.output) / RunFile.PREEMPTED)


def job_name(text: str) -> str:
    """Return ``text`` as a name that each engine takes: lower-case letters, digits and dashes."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".strip("-")
