"""Nodes that come and go: torchrun's elastic agents, each a node of this machine, that are killed, stopped and started.

The rendezvous is at a store in this process, so that any node may be lost.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore

from shardwise.train.metrics import read_metrics
from tests.cli import configs

NAMES = ("a", "b")
ENDS_S = 60.0
PROGRESS_S = 90.0
"""A run that makes no step for so long hangs."""
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3,is_host=false"


@dataclass
class Nodes:
    """The agents that run, by name; each has ``ranks`` workers."""

    config: Path
    ranks: int
    store: TCPStore
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Where the config is."""
        return self.config.parent

    def start(self, name: str) -> None:
        """A node comes, or comes back."""
        self.log.append(f"step {self.step()}: {name} starts")
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            f"1:{len(NAMES)}",
            "--max-restarts",
            "99",
        ]
        launcher += ["--nproc-per-node", str(self.ranks), "--monitor-interval", "0.2", "--local-addr", "127.0.0.1"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.store.port}", "--rdzv-id", "nodes"]
        launcher += ["--rdzv-conf", RENDEZVOUS, "-m", "shardwise", "train", str(self.config)]
        env = configs.environment() | {"OMP_NUM_THREADS": "1", "SLURMD_NODENAME": name}
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SHARDWISE_HISTORY": "off"}  # see docs/slow-or-dead-runs.md
        with (self.folder / f"{name}.log").open("ab") as output:
            self.agents[name] = subprocess.Popen(launcher, cwd=configs.ROOT, env=env, stdout=output, stderr=output)

    def kill_agent(self, name: str) -> None:
        """The agent alone is killed; its workers must end by themselves."""
        self._note(name, "its agent is killed")
        agent = self.agents.pop(name)
        workers = psutil.Process(agent.pid).children()
        agent.kill()
        agent.wait()
        _, left = psutil.wait_procs(workers, timeout=10)
        assert not left, "workers outlive their agent"

    def lose(self, name: str) -> None:
        """The node is gone: agent and workers at once."""
        self._note(name, "is lost")
        agent = self.agents.pop(name)
        for process in (*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()

    def preempt(self, name: str) -> None:
        """The node is taken away in order: SIGTERM."""
        self._note(name, "is preempted")
        agent = self.agents.pop(name)
        agent.send_signal(signal.SIGTERM)
        agent.wait(ENDS_S)

    def step(self) -> int:
        """The last step that the run has logged."""
        return max((line["step"] for line in self.lines()), default=0)

    def lines(self) -> list[dict[str, Any]]:
        """The lines about steps in the run's metrics."""
        file = self.folder / "run" / "metrics.jsonl"
        return [line for line in read_metrics(file) if "loss" in line] if file.exists() else []

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until ``done``; fails where no step is made for `PROGRESS_S`."""
        step, since = self.step(), time.monotonic()
        while not done():
            if (now := self.step()) != step:
                step, since = now, time.monotonic()
            late = time.monotonic() - since > PROGRESS_S
            assert not late, f"{what}: no step after {step} for {PROGRESS_S:g} s\n{self.history()}"
            ended = {name: code for name, agent in self.agents.items() if (code := agent.poll()) is not None}
            assert not ended or done(), f"{what}: agents ended with {ended}\n{self.history()}"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has logged ``step``."""
        self.wait(lambda: self.step() >= step, f"waiting for step {step}")

    def wait_for_world(self, nodes: int) -> None:
        """Wait until the run trains on so many nodes."""
        job = self.folder / "run" / "job.json"

        def there() -> bool:
            with suppress(OSError, ValueError):
                cluster = json.loads(job.read_text())["cluster"]
                return bool(cluster["nodes"] == nodes)
            return False

        self.wait(there, f"waiting for {nodes} nodes")

    def wait_for_end(self) -> None:
        """Wait until the run is done; the last agent that trained says so."""
        summary = self.folder / "run" / "summary.json"
        self.wait(summary.exists, "waiting for the end")
        codes = [agent.wait(ENDS_S) for agent in self.agents.values()]
        assert 0 in codes, f"agents ended with {codes}\n{self.history()}"

    def history(self) -> str:
        """What was done, and the ends of the agents' output."""
        ends = [f"{file.name}: {file.read_text(errors='replace')[-3000:]}" for file in self.folder.glob("?.log")]
        return "\n".join([*self.log, *ends])

    def _note(self, name: str, what: str) -> None:
        self.log.append(f"step {self.step()}: {name} {what}")


@contextmanager
def elastic(config: Path, ranks: int) -> Iterator[Nodes]:
    """Nodes for the run of ``config``, none of which is started yet; all are gone at the end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = Nodes(config, ranks, store)
    try:
        yield nodes
    finally:
        for name in [*nodes.agents]:
            if nodes.agents[name].poll() is None:
                nodes.lose(name)
