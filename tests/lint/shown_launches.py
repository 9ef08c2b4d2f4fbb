"""Launch files and configs, run for real: each bad one does what its rule says, and its good one does not.

A launch file runs by bash in a network of its own, beside a ``train.py`` that writes down what its rank sees; where it
has ``srun``, by ``sbatch`` in a real Slurm. A config goes to the program that it is for. Needs root, and parts need
Slurm, DeepSpeed, accelerate or NCCL's library (``pip install nvidia-nccl-cu12``), which logs without a GPU, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests import netns, slurm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAITS_S, WORKS_S = 25.0, 150.0
"""How long a launch that waits in vain may take, and one that is to end: the machine may be busy."""
NETWORK = """
ip link set lo up
for n in 0 1; do
  ip link add eth$n type veth peer name peer$n
  ip addr add 10.78.$n.1/24 dev eth$n
  ip link set peer$n up && ip link set eth$n up
done
exec "$@"
"""
"""A machine with two network devices, of which programs take eth0 unless told otherwise."""
SEES = """
import json, os, sys, tempfile, time
seen = {"rank": os.environ.get("RANK"), "ranks": os.environ.get("WORLD_SIZE")}
def write():
    file, name = tempfile.mkstemp(dir=os.environ["SEEN"])
    os.write(file, json.dumps(seen).encode())
    os.rename(name, name + ".json")
"""
NCCL = """
if os.environ.get("NCCL_LIBRARY"):
    import ctypes
    ctypes.CDLL(os.environ["NCCL_LIBRARY"]).ncclGetUniqueId(ctypes.create_string_buffer(128))
"""
"""NCCL reads its variables and opens a socket: as far as it comes without a GPU."""
JOINS = """
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("JOINS_S", 60))))
dist.barrier()
"""


@dataclass(frozen=True)
class Seen:
    """What a run did: what its ranks wrote, what was printed, and whether it ended by itself."""

    ranks: list[dict[str, Any]]
    text: str
    ended: bool

    def each(self, key: str) -> list[Any]:
        """A value of all ranks, once."""
        return sorted({one[key] for one in self.ranks if key in one}, key=str)


@dataclass(frozen=True)
class Demonstration:
    """How a rule's fixtures run, and what is to be seen.

    ``promise`` is ``hang``, ``error`` with a part of its text, or ``result``. ``says`` puts into words what was seen;
    where it is not given, an error's text says it. ``needs`` names what has to be installed.
    """

    promise: str
    run: Callable[[Path], Seen]
    says: Callable[[Seen], str] = lambda seen: ""
    needs: str = ""


def run(
    script: Path,
    train: str,
    *,
    words: Sequence[str] = ("bash", "SCRIPT"),
    inside: Sequence[str] = ("unshare", "--net", "bash", "-c", NETWORK, "bash"),
    wait_s: float = WORKS_S,
    env: dict[str, str] | None = None,
) -> Seen:
    """Run ``words`` in a copy of the folder of the file ``script``, for whose name SCRIPT stands."""
    with _place(script, train) as (folder, seen):
        given = [word.replace("SCRIPT", script.name) for word in words]
        return _seen([_started([*inside, *given], folder, seen, env)], seen, wait_s)


def run_on_two(
    script: Path, train: str, *, words: Sequence[str] = ("bash", "SCRIPT", "HOST"), env: dict[str, str] | None = None
) -> Seen:
    """Run ``words`` on two hosts, node0 and node1: SCRIPT stands for the file, HOST for the number of the host."""
    with _place(script, train) as (folder, seen), netns.two_hosts(rate=None) as hosts:
        (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node0 n1\n10.77.0.2 node1 n2\n")
        named = ("unshare", "--uts", "bash", "-c", 'mount --bind hosts /etc/hosts; hostname $0; exec "$@"')
        started = []
        for host in range(2):
            given = [word.replace("HOST", str(host)).replace("SCRIPT", script.name) for word in words]
            command = hosts.command(host, [*named, f"node{host}", *given])
            mine = {"GLOO_SOCKET_IFNAME": hosts.devices[host], **(env or {})}
            started.append(_started(command, folder, seen, mine))
        is_good = script.stem == "good"
        return _seen(started, seen, WORKS_S if is_good else WAITS_S)


def submit(
    script: Path, train: str, *, options: Sequence[str] = (), env: dict[str, str] | None = None, **facts: Any
) -> Seen:
    """Submit the file to a Slurm of two nodes; ``options`` replace its own."""
    wait_s = WORKS_S if script.stem == "good" else WORKS_S / 2
    with _place(script, train) as (folder, seen), slurm.two_nodes(**facts) as cluster:
        report = folder / "report"
        given = {**_environment(seen), "HEAD": "localhost", "PORT": str(slurm.free_ports(1)[0]), **(env or {})}
        number = cluster.submit(folder / script.name, f"--output={report}", f"--chdir={folder}", *options, env=given)
        try:
            cluster.wait(number, wait_s)
            ended = True
        except AssertionError:
            ended = cluster.job(number)["JobState"] == "FAILED"
        return Seen(_written(seen), report.read_text() if report.exists() else "", ended)


@contextmanager
def _place(script: Path, train: str) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder, seen = Path(name) / "run", Path(name) / "seen"
        shutil.copytree(script.parent, folder)
        seen.mkdir()
        (folder / "train.py").write_text(SEES + train)
        yield folder, seen


def _environment(seen: Path) -> dict[str, str]:
    surrounding = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    env = {key: value for key, value in os.environ.items() if key not in surrounding}
    path = f"{Path(sys.executable).parent}:{env['PATH']}"
    return env | {"PATH": path, "SEEN": str(seen), "NCCL_LIBRARY": nccl(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def nccl() -> str:
    """Where NCCL's library is; nothing where it is not installed."""
    with suppress(ModuleNotFoundError):
        if (found := importlib.util.find_spec("nvidia.nccl")) is not None:
            return str(Path((found.submodule_search_locations or [""])[0]) / "lib" / "libnccl.so.2")
    return ""


def _started(command: list[str], folder: Path, seen: Path, env: dict[str, str] | None) -> subprocess.Popen[bytes]:
    """Start a command; all that it starts ends with it."""
    alone = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with tempfile.NamedTemporaryFile(dir=seen, suffix=".txt", delete=False) as file:
        return subprocess.Popen(
            [*alone, *command],
            cwd=folder,
            env=_environment(seen) | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _seen(started: list[subprocess.Popen[bytes]], seen: Path, wait_s: float) -> Seen:
    ended, deadline = True, time.monotonic() + wait_s
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = False
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = "\n".join(file.read_text(errors="replace") for file in sorted(seen.glob("*.txt")))
    return Seen(_written(seen), text, ended)


def _written(seen: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(seen.glob("*.json"))]


def ranks(seen: Seen) -> str:
    """How many ranks ran, and of how many they took themselves to be."""
    return f"{len(seen.ranks)} ranks run, WORLD_SIZE is {', '.join(seen.each('ranks'))}"


RENAMED = """
import runpy, torch, torch.distributed as dist
from torch._C._distributed_c10d import Logger, Reducer
dist.init_process_group = lambda backend: None  # there is no NCCL in it, but the logger of DDP reads its variables
runpy.run_path(sys.argv[1])
group = dist.ProcessGroup(0, 1)
group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
weights = list(torch.nn.Linear(2, 2).parameters())
logger = Logger(Reducer(weights, [[0, 1]], [1 << 20], group))
logger.set_construction_data_and_log("model", [], -1, True, False, False)
seen["handling"] = logger._get_ddp_logging_data().strs_map["nccl_async_error_handling"]
write()
"""
ADDRESSES = (
    NCCL
    + JOINS
    + """
import psutil
at = {one.address: name for name, all in psutil.net_if_addrs().items() for one in all}
listening = {one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"}
seen["gloo"] = sorted({at[ip] for ip in listening if ip in at})
write()
"""
)
TOGETHER = """
from pathlib import Path
write()
until = time.monotonic() + 10  # as long as the other run needs to come
while time.monotonic() < until and len(list(Path(os.environ["SEEN"]).glob("*.json"))) < 4:
    time.sleep(0.1)
"""
DEEPSPEED = """
import runpy, torch, torch.distributed as dist, deepspeed, deepspeed.ops
deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled
dist.init_process_group("gloo")
deepspeed.init_distributed(dist_backend="gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1].endswith(".py"):
    engine, *_ = runpy.run_path(sys.argv[1])["build"](model, optimizer)
else:
    config = json.load(open(sys.argv[1])) | {"zero_force_ds_cpu_optimizer": False}  # which would have to be compiled
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    seen["offloads"] = str(getattr(engine.optimizer, "offload_param", None))
    seen["held"] = sum(p.numel() for p in model.parameters())
seen["batch"] = engine.train_batch_size()
write()
"""
PLUGIN = """
from accelerate.utils import FullyShardedDataParallelPlugin
seen["reshards"] = FullyShardedDataParallelPlugin().reshard_after_forward
write()
"""
THREADS = """
import torch
seen["threads"] = torch.get_num_threads()
write()
"""
SEEN_CPUS = """
seen["cpus"] = len(os.sched_getaffinity(0))
write()
"""
GPUS = """
import torch
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
write()
"""
APART = """
import torch.distributed as dist
from datetime import timedelta
os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["JOINS_S"])))
dist.barrier()
write()
"""
PYTHON = """#!/bin/bash
export GLOO_SOCKET_IFNAME=$([ $SLURMD_NODENAME = n1 ] && echo {0[0]} || echo {0[1]})
exec ip netns exec $([ $SLURMD_NODENAME = n1 ] && echo {1[0]} || echo {1[1]}) bash -c \\
    'mount --bind {2}/hosts /etc/hosts; exec {3} "$@"' bash "$@"
"""


def submit_apart(script: Path) -> Seen:
    """Submit the file to a Slurm whose two nodes are two hosts for every ``python`` that they start."""
    with netns.two_hosts(rate=None) as hosts, tempfile.TemporaryDirectory() as name:
        python = Path(name) / "python"
        (Path(name) / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n")
        python.write_text(PYTHON.format(hosts.devices, hosts.names, name, sys.executable))
        python.chmod(0o755)
        path = f"{name}:{os.environ['PATH']}"
        seen = submit(script, APART, env={"PATH": path, "JOINS_S": "60" if script.stem == "good" else "8"})
        hosts.end_all()
        return seen


def run_without_address(script: Path) -> Seen:
    """Run the file on two hosts; where they wait in vain, for six seconds instead of many minutes."""
    soon = {"PET_RDZV_CONF": "timeout=6,join_timeout=6"} if script.stem == "bad" else {}
    return run_on_two(script, "write()\n", env=soon)


def run_with_nccl(script: Path) -> Seen:
    """Run the file; NCCL by itself is given what the file sets for it, as PyTorch may not come so far."""
    seen = run(script, JOINS + "write()\n")
    alone = ("bash", "-c", 'eval "$(grep ^export.NCCL SCRIPT)"; exec python train.py')
    own = run(script, NCCL, words=alone)
    return Seen(seen.ranks, seen.text + own.text, seen.ended)


def _has(text: bytes, name: bytes) -> bool:
    places = (match.start() for match in re.finditer(re.escape(name) + rb"(?!\w)", text))
    return any(not re.match(rb"\w", text[place - 1 : place]) for place in places)


def unread() -> str:
    """Whether the files of PyTorch and of NCCL have one of the names that nothing reads."""
    from shardwise.lint.rules.launching import _MISTAKEN

    package = Path(importlib.util.find_spec("torch").origin).parent
    files = [
        *package.glob("lib/libtorch*.so"),
        *package.glob("distributed/**/*.py"),
        *([Path(nccl())] if nccl() else []),
    ]
    texts = [file.read_bytes() for file in files]
    # a pattern that begins with its letters is found at once in gigabytes; a longer name that ends so is another one
    found = [name for name in _MISTAKEN if any(_has(text, name.encode()) for text in texts)]
    assert not found, f"something reads {found}"
    return f"no file of {'PyTorch and NCCL' if nccl() else 'PyTorch'} has one of the {len(_MISTAKEN)} names"


def devices(seen: Seen) -> str:
    """Through which devices gloo and NCCL talk."""
    used = sorted(set(re.findall(r"Bootstrap: Using (\w+):", seen.text)))
    mine = sorted({one for each in seen.ranks for one in each["gloo"]})
    return f"gloo uses {' and '.join(mine)}" + (f", NCCL {' and '.join(used)}" if nccl() else "")


def threads(seen: Seen) -> str:
    """Threads of all ranks of a machine."""
    return f"{sum(one['threads'] for one in seen.ranks)} threads on 2 CPUs"


PAIR = ("torchrun", "--nproc-per-node=2", "train.py", "SCRIPT")
ACCELERATE = ("accelerate", "launch", "--config_file", "SCRIPT")
NODES = ("--machine_rank", "HOST", "--main_process_ip", "node0", "--main_process_port", "29500")
CORPUS = f"ln -s {ROOT}/examples examples; mkdir corpus; cp {ROOT}/docs/*.md corpus"
SHARDWISE = f"{CORPUS}; shardwise train SCRIPT && python train.py"
SLURM = "Slurm"
SHOWS = {
    "SW701": Demonstration(
        "result",
        partial(run, train=RENAMED, words=("torchrun", "--nproc-per-node=1", "train.py", "SCRIPT")),
        lambda seen: f"PyTorch reads {seen.each('handling')[0]} for ..._ASYNC_ERROR_HANDLING=0 under torchrun",
    ),
    "SW702": Demonstration(
        "error TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL",
        run_with_nccl,
        lambda seen: f"NCCL logs {'something' if 'NCCL INFO' in seen.text else 'nothing'}",
        needs="NCCL",
    ),
    "SW703": Demonstration("result", partial(run, train=ADDRESSES, env={"NCCL_DEBUG": "INFO"}), devices, needs="NCCL"),
    "SW704": Demonstration("error environment variable RANK expected, but not set", partial(run, train="")),
    "SW705": Demonstration(
        "error Exited with exit code 1", partial(submit, train="write()\n", cpus=64, gpus=4), needs=SLURM
    ),
    "SW706": Demonstration("error invalid device ordinal", partial(run, train=GPUS), needs="a CUDA device"),
    "SW707": Demonstration("error EADDRINUSE", partial(run, train=TOGETHER), ranks),
    "SW708": Demonstration(
        "result",
        partial(submit, train=SEEN_CPUS, options=("--cpus-per-task=2",), plugin="task/affinity\nTaskPluginParam=Cores"),
        lambda seen: f"a task of 2 CPUs has {seen.each('cpus')[0]} where Slurm binds to cores",
        needs=SLURM,
    ),
    "SW709": Demonstration("hang", run_without_address),
    "SW710": Demonstration("hang", submit_apart, needs=SLURM),
    "SW713": Demonstration(
        "result", partial(submit, train=THREADS, options=("--cpus-per-task=2",)), threads, needs=SLURM
    ),
    "SW801": Demonstration(
        "error train_batch_size is not equal to", partial(run, train=DEEPSPEED, words=PAIR), needs="deepspeed"
    ),
    "SW802": Demonstration(
        "error bfloat16 and fp16 modes cannot be simultaneously enabled",
        partial(run, train=DEEPSPEED, words=PAIR),
        needs="deepspeed",
    ),
    "SW803": Demonstration(
        "error Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
        partial(run, train=DEEPSPEED, words=PAIR),
        needs="deepspeed",
    ),
    "SW804": Demonstration(
        "result",
        partial(run, train=DEEPSPEED, words=PAIR),
        lambda seen: (
            f"each rank holds {seen.each('held')[0]} of 4160 parameters, offloaded: {seen.each('offloads')[0]}"
        ),
        needs="deepspeed",
    ),
    "SW805": Demonstration(
        "error TypeError: '>' not supported", partial(run, train=DEEPSPEED, words=PAIR), needs="deepspeed"
    ),
    "SW811": Demonstration(
        "result",
        partial(run, train=PLUGIN, words=(*ACCELERATE, "train.py")),
        lambda seen: f"reshard_after_forward is {seen.each('reshards')[0]}",
        needs="accelerate",
    ),
    "SW812": Demonstration(
        "result",
        partial(run_on_two, train="write()\n", words=(*ACCELERATE, *NODES, "train.py")),
        ranks,
        needs="accelerate",
    ),
    "SW813": Demonstration(
        "result", partial(run, train="write()\n", words=(*ACCELERATE, "train.py")), ranks, needs="accelerate"
    ),
    "SW831": Demonstration("error stepps", partial(run, train="write()\n", words=("bash", "-c", SHARDWISE))),
}


def why_not(id: str) -> str | None:
    """Why a rule cannot be shown here; None where it can."""
    needs = SHOWS[id].needs
    if needs == "a CUDA device":
        import torch

        return None if torch.cuda.is_available() else f"needs {needs}"
    if needs == SLURM and (problem := slurm.why_not()):
        return problem
    if needs == "NCCL":
        return None if nccl() else "needs NCCL's library: pip install nvidia-nccl-cu12"
    missing = needs.islower() and importlib.util.find_spec(needs) is None
    return f"needs {needs}" if missing else netns.why_not()


def showing() -> dict[str, str]:
    """What each demonstration promises; all but those that need a CUDA device where there is none."""
    return {id: one.promise for id, one in SHOWS.items() if one.needs != "a CUDA device" or why_not(id) is None}


def fixture(id: str, kind: str) -> Path:
    """A rule's bad or good fixture."""
    return next(path for path in sorted((HERE / id).iterdir()) if path.stem == kind)


def show(id: str) -> dict[str, str]:
    """Run both fixtures of a rule; what they did, in words.

    Raises:
        AssertionError: the bad one does not show its fault, the good one shows one, or this machine lacks something.
    """
    assert (problem := why_not(id)) is None, f"{id}: not shown here: {problem}"
    one = SHOWS[id]
    bad, good = (one.run(fixture(id, kind)) for kind in ("bad", "good"))
    kind, _, text = one.promise.partition(" ")
    assert good.ended and "Traceback" not in good.text, f"{id}: the good fixture fails:\n{good.text[-2000:]}"
    assert good.ranks or id == "SW704", f"{id}: the good fixture starts no rank:\n{good.text[-2000:]}"
    words = [one.says(bad), one.says(good)]
    seen = f"{words[0]}; as repaired, {words[1]}"
    if kind == "hang":
        gave_up = re.search(r"timed out|Timeout|Connection closed|Connection refused", bad.text)
        assert not bad.ranks and (not bad.ended or gave_up), f"{id}: nobody waits: {bad.ranks}\n{bad.text[-2000:]}"
        return {"shows": kind, "says": "no rank meets another one until the timeout; as repaired, all do"}
    if kind == "error":
        assert text in bad.text and text not in good.text, f"{id}: nobody says '{text}':\n{bad.text[-2000:]}"
        return {"shows": kind, "says": f"an error with “{text}”" + (f". {seen}" if words[0] else "")}
    assert bad.ended and bad.ranks and words[0] != words[1], f"{id}: no difference: {seen}\n{bad.text[-2000:]}"
    return {"shows": kind, "says": seen + (f"; {unread()}" if id == "SW703" else "")}
