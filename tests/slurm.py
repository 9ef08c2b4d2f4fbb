"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd in a temporary folder, on free ports.

Needs root and Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from shardwise.environment import PORTS
from tests.ledger import uncounted

NODES = ("n1", "n2")
TOOL_S = 60.0  # that one call of sbatch, squeue or scontrol may take
READY_S = 60.0
SETTLED_S = 5.0
"""A job that starts sooner is broken: slurmd refuses what slurmctld signed in the second in which it ended the job's
last start, and a node that has come back says that start is over, which takes the node from the new one."""
DAEMONS = ("munged", "slurmctld", "slurmd")
CONF = """\
ClusterName=shardwise
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin={plugin}
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
SlurmdTimeout={timeout}
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000
{more}{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why Slurm cannot run here; None where it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a Slurm of one's own needs root on Linux"
    missing = [name for name in (*DAEMONS, "sbatch", "setpriv") if shutil.which(name, path=_path()) is None]
    return f"not installed: {', '.join(missing)} (packages slurm-wlm and munge)" if missing else None


@dataclass
class Slurm:
    """The running daemons and the folder that they live in."""

    folder: Path
    env: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def tool(self, *words: str) -> str:
        """Run a command of Slurm; returns its output."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=TOOL_S)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, *words: str, env: Mapping[str, str] | None = None) -> str:
        """``sbatch``; returns the job's number."""
        given = {**self.env, **(env or {})}
        done = subprocess.run(
            ["sbatch", "--parsable", *words, str(script)], env=given, capture_output=True, text=True, timeout=TOOL_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol show job`` says, such as JobState, ExitCode and Restarts."""
        words = self.tool("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(
        self, done: Callable[[], bool], report: Path, seconds: float = 120.0, *, pause_s: float = 0.01
    ) -> None:
        """Wait until ``done``; fails with the end of a job's output, in ``report``."""
        _wait(done, seconds, lambda: report.read_text()[-4000:] if report.exists() else "", pause_s)

    def wait(self, number: str, seconds: float = 180.0, *, report: Path | None = None) -> dict[str, str]:
        """Wait until a job is over; fails with the end of its output, in ``report``, unless it has succeeded."""

        def output() -> str:
            return report.read_text()[-4000:] if report is not None and report.exists() else ""

        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        _wait(lambda: self.job(number)["JobState"] in over, seconds, lambda: f"{self.job(number)}\n{output()}")
        found = self.job(number)
        assert found["JobState"] == "COMPLETED", f"{found}\n{output()}"
        return found

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node; it registers by itself."""
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, name: str) -> None:
        """End a node at once: its slurmd, its jobs' processes and the slurmstepd above them."""
        daemon = self.daemons.pop(name)
        tasks = _of(self.folder, lambda env: env.get("SLURMD_NODENAME") == name)
        _kill([psutil.Process(daemon.pid), *_steps_of(tasks), *tasks])
        daemon.wait()

    def hurry(self, number: str, restarts: int, seconds: float = 120.0) -> None:
        """Start a requeued job once both nodes have been idle for `SETTLED_S`; Slurm itself would wait two minutes."""

        def is_now(state: str) -> bool:
            found = self.job(number)
            return found["JobState"] == state and found["Restarts"] == str(restarts)

        def why() -> str:
            return f"{self.job(number)}\n{self.logs()}"

        _wait(lambda: is_now("PENDING"), seconds, why)
        self.wait_for_nodes()
        time.sleep(SETTLED_S)
        self.tool("scontrol", "update", f"JobId={number}", "StartTime=now")
        _wait(lambda: is_now("RUNNING"), seconds, why)

    def tasks_of(self, number: str) -> list[psutil.Process]:
        """Processes of a job."""
        return _of(self.folder, lambda env: env.get("SLURM_JOB_ID") == number)

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        paths = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        words = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in paths.items()]
        self._start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *words)
        _wait(paths["socket"].exists, READY_S, self.logs)
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for name in NODES:
            self.start_node(name)
        self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        """Wait until both nodes are idle."""

        def idle() -> bool:
            done = subprocess.run(["sinfo", "-h", "-o", "%t %D"], env=self.env, capture_output=True, text=True)
            return done.stdout.split() == ["idle", str(len(NODES))]

        _wait(idle, READY_S, self.logs)

    def end(self) -> None:
        """End all daemons, and every process of a job."""
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        while tasks := _of(self.folder, lambda env: True):  # one may fork another meanwhile
            _kill([*_steps_of(tasks), *tasks])
        for child in psutil.Process().children():  # orphans, which become this process's where it forks ranks
            if child.name().startswith("slurm"):
                child.wait(TOOL_S)

    def logs(self) -> str:
        """The ends of all daemons' logs."""
        return "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in sorted(self.folder.glob("*.log")))

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *words],  # a test that is killed ends nothing itself
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


@contextmanager
def two_nodes(timeout_s: int = 5, cpus: int = 2, gpus: int = 0, plugin: str = "task/none") -> Iterator[Slurm]:
    """A Slurm whose nodes are n1 and n2; a node that does not answer for ``timeout_s`` is down. Gone at the end.

    The nodes say that they have ``cpus`` and ``gpus``, whatever is there; ``plugin`` is TaskPlugin.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path has at most 107 letters
    folder.chmod(0o755)
    ports = free_ports(1 + len(NODES))
    host = socket.gethostname()
    has, more = f"CPUs={cpus} RealMemory=4000", ""
    if gpus:
        (folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[1-{gpus}]\n")  # any devices
        has, more = f"{has} Gres=gpu:{gpus}", "GresTypes=gpu\n"
    if cpus > 2:
        more += "SlurmdParameters=config_overrides\n"
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {has} State=UNKNOWN"
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    (folder / "state").mkdir()
    first = os.getpid() % PORTS + 1  # a port comes from a job's number: two Slurms of this machine share none
    facts = {"nodes": nodes, "more": more, "plugin": plugin, "timeout": timeout_s, "first": first}
    conf = CONF.format(host=host, ctld=ports[0], folder=folder, **facts)
    (folder / "slurm.conf").write_text(conf)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "GLOO_"))}
    env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path(), "SHARDWISE_HISTORY": "off"}
    slurm = Slurm(folder, env)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.end()
        shutil.rmtree(folder, ignore_errors=True)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def free_ports(number: int) -> list[int]:
    """Ports of this machine that nobody listens at."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports: list[int] = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _wait(done: Callable[[], bool], seconds: float, why: Callable[[], str], pause_s: float = 0.3) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with uncounted():
            if done():
                return
        assert time.monotonic() < deadline, f"not within {seconds:g} s\n{why()}"
        time.sleep(pause_s)


def _of(folder: Path, wanted: Callable[[Mapping[str, str]], bool]) -> list[psutil.Process]:
    """Processes that have this Slurm's configuration in their environment: the daemons, their steps, the jobs."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            env = process.environ()
            if env.get("SLURM_CONF") == str(folder / "slurm.conf") and wanted(env):
                found.append(process)
    return found


def _steps_of(tasks: list[psutil.Process]) -> list[psutil.Process]:
    """The slurmstepd above tasks; one writes its title over its environment."""
    parents = set()
    for task in tasks:
        with suppress(psutil.Error):
            parents.add(task.parent())
    return [parent for parent in parents if parent is not None and parent.name().startswith("slurmstepd")]


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
