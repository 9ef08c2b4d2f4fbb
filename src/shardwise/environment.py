"""Process environment: the only file that reads or writes it. No torch here."""

from __future__ import annotations

import os
import re
import socket
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import UserError

_ERROR_FILE = "SHARDWISE_ERROR_FILE"
_PARENT_FD = "SHARDWISE_PARENT_FD"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_THREADS = "OMP_NUM_THREADS"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_INTERFACE = "GLOO_SOCKET_IFNAME"
SET_BY_LIBRARIES = {
    "TORCHINDUCTOR_CACHE_DIR": "torch's compiler",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "accelerate",
    "KMP_DUPLICATE_LIB_OK": "scikit-learn",
    "KMP_INIT_AT_FORK": "scikit-learn",
    "PYTEST_CURRENT_TEST": "pytest",
}
"""Variables that libraries set when they are imported, and who does; each import sets them anew, and no other one reads
them, so a rank may be forked from a process that lacks them."""
_HISTORY = "SHARDWISE_HISTORY"
_JOIN_S = "SHARDWISE_JOIN_S"
_FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDED = "256"  # collectives that torch's flight recorder keeps
_PROFILER_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"  # above the highest existing level
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_RENDEZVOUS = (*_NUMBERS, "MASTER_ADDR")
_LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "Open MPI's mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Launchers that name ranks in variables of their own: rank, world size, rank on the node, ranks on the node."""
FIRST_PORT, PORTS = 15000, 16000  # below the range that systems hand out by themselves
_STEERING = ("TORCH", "PYTORCH", "NCCL", "GLOO", "CUDA", "CUBLAS", "NVIDIA_TF32", "OMP", "KMP", "GOMP", "MKL", "LD_")
_SECRET = re.compile("KEY|SECRET|PASSWORD|CREDENTIAL|TOKEN")


@dataclass(frozen=True)
class Rendezvous:
    """Identity of this rank, and the address where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def rendezvous() -> Rendezvous | None:
    """The rendezvous that torchrun, srun, mpirun, mpiexec, DeepSpeed or Shardwise itself put in the environment.

    ``None`` when RANK or WORLD_SIZE is missing: this process was not launched as a
    rank. Any missing variable or invalid number is a `UserError` that names each variable.
    """
    if not is_rank():
        return None
    if not os.environ.get("LOCAL_WORLD_SIZE") and os.environ.get("LOCAL_SIZE"):  # DeepSpeed's launcher
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_SIZE"]
    problems = [_missing(name) for name in _RENDEZVOUS if not os.environ.get(name)]
    numbers: dict[str, int] = {}
    for name in _NUMBERS:
        text = os.environ.get(name)
        if text and text.isascii() and text.isdigit():
            numbers[name] = int(text)
        elif text:
            problems.append(f"{name} is '{text}' in the environment: it must be an integer of 0 or more")
    if not problems:
        problems = _out_of_range(numbers) or _two_launchers(numbers)
    if problems:
        raise UserError(*problems)
    return Rendezvous(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        master_addr=os.environ["MASTER_ADDR"],
        master_port=numbers["MASTER_PORT"],
    )


def rank_environment(
    rendezvous: Rendezvous,
    threads: int,
    *,
    parent_hosts_store: bool = False,
    error_file: Path | None = None,
    parent_fd: int | None = None,
) -> dict[str, str]:
    """Build the environment of one child rank from a copy of this process's.

    ``threads`` is for OMP_NUM_THREADS, unless the user has set it already. With ``parent_hosts_store`` even rank 0 is a
    client of the store at ``master_addr:master_port``, as it is under torchrun, and gloo talks over loopback unless the
    user has named an interface: a laptop's host name often resolves to an address that does not exist. ``error_file``
    is where the rank reports its failure, ``parent_fd`` the pipe that closes when its parent exits. Unless the user has
    configured PyTorch's CUDA allocator, its segments are expandable: the estimate assumes it, and without it up to a
    tenth more is reserved.
    """
    env = {k: v for k, v in os.environ.items() if k not in (_ERROR_FILE, _PARENT_FD, _AGENT_STORE)}
    env.update(
        RANK=str(rendezvous.rank),
        WORLD_SIZE=str(rendezvous.world_size),
        LOCAL_RANK=str(rendezvous.local_rank),
        LOCAL_WORLD_SIZE=str(rendezvous.local_world_size),
        MASTER_ADDR=rendezvous.master_addr,
        MASTER_PORT=str(rendezvous.master_port),
    )
    if not any(env.get(name) for name in _ALLOCATOR):
        env[_ALLOCATOR[0]] = "expandable_segments:True"
    if not env.get(_THREADS):
        env[_THREADS] = str(threads)
    if parent_hosts_store:
        env[_AGENT_STORE] = "True"
        env.setdefault(_INTERFACE, "lo0" if sys.platform == "darwin" else "lo")
    if error_file is not None:
        env[_ERROR_FILE] = str(error_file)
    if parent_fd is not None:
        env[_PARENT_FD] = str(parent_fd)
    if not any(env.get(name) for name in _FLIGHT_RECORDER):
        env[_FLIGHT_RECORDER[0]] = _RECORDED
    return env


def record_collectives() -> None:
    """Let torch's flight recorder keep the last collectives, for the watchdog; a size that the user has set is kept.

    Before the first process group of the process.
    """
    if not any(os.environ.get(name) for name in _FLIGHT_RECORDER):
        os.environ[_FLIGHT_RECORDER[0]] = _RECORDED


def is_rank() -> bool:
    """Whether a launcher has made this process a rank; nothing is checked, as by `rendezvous`.

    Ranks of srun, mpirun and mpiexec get torchrun's variables here, so that PyTorch and other libraries find them too.
    A world of one task is nobody's rank: ``srun -n1 shardwise train`` starts its own ranks.

    Raises:
        UserError: the launcher does not say where ranks on several nodes meet.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        for launcher, names in _LAUNCHERS.items():
            rank, size, *_ = names
            if rank in os.environ and os.environ.get(size, "1") != "1":
                os.environ.update(_as_torchrun(launcher, names))
                break
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_by() -> tuple[str, ...]:
    """Return the words that started this rank of another launcher, whose own are not known."""
    launcher = ("torchrun", "...", "-m") if "TORCHELASTIC_RUN_ID" in os.environ else ("...",)
    return (*launcher, "shardwise", *sys.argv[1:])


def launcher() -> str:
    """Return what started this rank: ``torchrun``, ``shardwise`` itself, srun and the like, or only variables."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if uses_agent_store():
        return "shardwise"
    return next((name for name, names in _LAUNCHERS.items() if names[0] in os.environ), "RANK and WORLD_SIZE")


def node_name() -> str:
    """Return the name of this node: Slurm's, or that of the host."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def join_limit_s() -> float:
    """Return the seconds that ranks wait for the next one to come: SHARDWISE_JOIN_S, 45 by default."""
    text = os.environ.get(_JOIN_S, "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 45.0


def gloo_interfaces() -> list[str]:
    """Return the network interfaces that GLOO_SOCKET_IFNAME names."""
    return [name.strip() for name in os.environ.get(_INTERFACE, "").split(",") if name.strip()]


def nccl_interfaces() -> tuple[list[str], bool]:
    """Return what NCCL_SOCKET_IFNAME names, and whether these are whole names; it may also begin or exclude names."""
    text = os.environ.get("NCCL_SOCKET_IFNAME", "").strip()
    if text.startswith("^"):
        return [], False
    return [name.strip() for name in text.removeprefix("=").split(",") if name.strip()], text.startswith("=")


def _as_torchrun(launcher: str, names: Sequence[str]) -> dict[str, str]:
    """torchrun's variables from those of another launcher. MASTER_ADDR and MASTER_PORT stay where they are set."""
    rank, size, local_rank, local_size = (os.environ.get(name, "") for name in names)
    node = int(os.environ.get("SLURM_NODEID", "0"))
    if launcher == "srun":
        local_size = _tasks_on_node(local_size, node)
        master = _first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
        meeting = int(os.environ.get("SLURM_JOB_ID", "0")) * 7 + int(os.environ.get("SLURM_STEP_ID", "0"))
    else:
        master = "127.0.0.1" if local_size == size else ""
        job = os.environ.get("PMIX_NAMESPACE", "")  # elsewhere all ranks of a node have one parent
        meeting = zlib.crc32(job.encode()) if job else os.getppid()
    given = os.environ.get("MASTER_ADDR") or master
    if not given:
        raise UserError(
            f"{launcher} started {size} ranks on several nodes, and MASTER_ADDR is not set: name the node of rank 0 "
            "and a free port, such as: mpirun -x MASTER_ADDR=node-0 -x MASTER_PORT=29500 ...; or start torchrun on "
            "each node"
        )
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": given,
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(FIRST_PORT + meeting % PORTS),
    }


def _tasks_on_node(text: str, node: int) -> str:
    """Tasks on a node from Slurm's ``4(x2),3``: four on each of two nodes, three on the next."""
    counts: list[str] = []
    for group in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group.strip())
        counts += [found[1]] * int(found[2] or 1) if found else []
    return counts[node] if node < len(counts) else ""


def _first_host(text: str) -> str:
    """The first host of Slurm's ``gpu[01-03,7],login``."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", text)
    return "" if found is None else f"{found[1]}{found[2] or ''}{found[3] or ''}"


def snapshot() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def threads() -> int:
    """Return OMP_NUM_THREADS, as `rank_environment` has set it; 1 where it is not a number."""
    text = os.environ.get(_THREADS, "").split(",")[0]
    return int(text) if text.isascii() and text.isdigit() and int(text) else 1


def one_thread(env: dict[str, str]) -> dict[str, str]:
    """Return ``env`` for a process that only forks: OpenMP creates no threads in it."""
    return {**env, _THREADS: "1"}


def same_but_for_rank(env: dict[str, str], other: dict[str, str]) -> bool:
    """Return whether two environments differ only in the variables of `rank_environment`."""
    mine = {
        *_RENDEZVOUS,
        _ERROR_FILE,
        _PARENT_FD,
        _AGENT_STORE,
        _THREADS,
        _ALLOCATOR[0],
        _INTERFACE,
        _FLIGHT_RECORDER[0],
        *SET_BY_LIBRARIES,
    }
    return all(env.get(name) == other.get(name) for name in {*env, *other} - mine)


def become_rank(env: dict[str, str], parent_fd: int) -> None:
    """Adopt a rank's environment in a forked process, where the pipe has another number."""
    os.environ.clear()
    os.environ.update({**env, _PARENT_FD: str(parent_fd)})


def take_error_file() -> Path | None:
    """Return the file for this rank's failure report.

    Read once: the variable is removed, so that a child process does not see it.
    """
    text = os.environ.pop(_ERROR_FILE, None)
    return Path(text) if text else None


def agent_error_file() -> Path | None:
    """Return the file in which torchrun's agent looks for this rank's failure."""
    text = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(text) if text else None


def take_parent_fd() -> int | None:
    """Return the pipe that closes with the parent.

    Read once: in a child process the number would mean something else.
    """
    text = os.environ.pop(_PARENT_FD, None)
    return int(text) if text and text.isascii() and text.isdigit() else None


def history_file() -> Path | None:
    """Return the path of this machine's prediction history; ``None``: none is stored.

    SHARDWISE_HISTORY is ``off`` (or ``0``, ``no``, ``false``), or the file itself; else it is
    ``shardwise/history.jsonl`` in XDG_DATA_HOME, or in ``~/.local/share`` where that is not set or is not an absolute
    path.
    """
    text = os.environ.get(_HISTORY, "").strip()
    if text.lower() in ("off", "0", "no", "false"):
        return None
    if text:
        return Path(text).expanduser().absolute()
    data = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not data.is_absolute():
        home = Path(os.path.expanduser("~"))
        if not home.is_absolute():
            return None
        data = home / ".local" / "share"
    return data / "shardwise" / "history.jsonl"


def wandb_mode() -> str | None:
    """Return WANDB_MODE, the user's choice of network use by W&B; ``None`` if not set."""
    return os.environ.get("WANDB_MODE", "").strip() or None


def accelerate_fsdp() -> bool:
    """Return whether accelerate was asked for FSDP, by its launcher or by a plugin."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def settings() -> dict[str, str]:
    """Return the set variables that affect torch, NCCL, gloo, CUDA, OpenMP and the rendezvous.

    Selected by name prefix; those of Shardwise itself, and anything that looks like a secret, are omitted.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_STEERING) or name in _RENDEZVOUS) and not _SECRET.search(name)
    }


def uses_agent_store() -> bool:
    """Return whether another process hosts the rendezvous store (torchrun, or the launcher)."""
    return os.environ.get(_AGENT_STORE) == str(True)


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Silence torch's profiler messages on stderr; it reads the level on its first use.

    A level that the user has set (KINETO_LOG_LEVEL) is kept. The first use decides for the whole process.
    """
    if _PROFILER_LEVEL in os.environ:
        yield
        return
    os.environ[_PROFILER_LEVEL] = _SILENT
    try:
        yield
    finally:
        del os.environ[_PROFILER_LEVEL]


def silence_torch() -> None:
    """Keep torch's C++ log off this process's console, unless TORCH_CPP_LOG_LEVEL is set; before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def compiler() -> str:
    """Return CXX, the C++ compiler of extensions; ``c++`` by default, as in PyTorch."""
    return os.environ.get("CXX", "").strip() or "c++"


@contextmanager
def local_rank_told(local_rank: int) -> Iterator[None]:
    """Set LOCAL_RANK inside, for a library that needs it; a launcher's value is kept."""
    if os.environ.get("LOCAL_RANK"):
        yield
        return
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]


def look_like_torchelastic() -> None:
    """Set what torchrun sets beside the rank, for a library that asks whether it started these ranks; to the end.

    The process group exists already, so that nobody connects to the address.
    """
    usual = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in usual.items():
        os.environ.setdefault(name, value)


def visible_devices() -> list[str] | None:
    """Return CUDA_VISIBLE_DEVICES as a list; ``None`` when it is not set (every device).

    As in CUDA, a negative number hides itself and all that follow.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    devices: list[str] = []
    for device in (part.strip() for part in text.split(",")):
        if not device or device.startswith("-"):
            break
        devices.append(device)
    return devices


def _missing(name: str) -> str:
    return (
        f"{name} is not set in the environment, though RANK and WORLD_SIZE are: "
        "start the ranks with torchrun, which sets them all, or unset RANK and WORLD_SIZE"
    )


def _out_of_range(numbers: dict[str, int]) -> list[str]:
    problems = []
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers[rank] >= numbers[size]:
            problems.append(
                f"{rank} is {numbers[rank]} and {size} is {numbers[size]} in the environment: {rank} counts from 0 and "
                f"must be less than {size}"
            )
    if numbers["LOCAL_WORLD_SIZE"] > numbers["WORLD_SIZE"]:
        problems.append("LOCAL_WORLD_SIZE is greater than WORLD_SIZE in the environment")
    if not 1 <= numbers["MASTER_PORT"] <= 65535:
        problems.append(f"MASTER_PORT is {numbers['MASTER_PORT']} in the environment: a port is from 1 to 65535")
    return problems


def _two_launchers(numbers: dict[str, int]) -> list[str]:
    """Return where srun or mpirun says otherwise than RANK and WORLD_SIZE, which a shell may have kept."""
    if launcher() in ("torchrun", "shardwise"):
        return []
    problems = []
    for name, (rank, size, *_) in _LAUNCHERS.items():
        task, tasks = os.environ.get(rank, ""), os.environ.get(size, "")
        if not (task.isdigit() and tasks.isdigit()) or int(tasks) < 2:
            continue
        world = numbers["WORLD_SIZE"]  # a launcher below this one makes it larger
        if world < int(tasks) or (world == int(tasks) and numbers["RANK"] != int(task)):
            problems.append(
                f"RANK = {numbers['RANK']} and WORLD_SIZE = {world} are in the environment, but {name} says that this "
                f"is task {task} of {tasks}: unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or start "
                f"torchrun below {name}"
            )
    return problems


def one_tokenizer_thread() -> None:
    """Let the ``tokenizers`` library use one thread: several processes tokenise, one for each core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
