"""Host checks without GPU: cores, memory, limits, shared memory, disk.

Functions from facts to checks.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.doctor.check import Check, error, ok, unknown, warning, worst
from shardwise.doctor.machine_facts import HostFacts, Limit
from shardwise.units import GIB, MIB, bytes_text, counted, seconds_text

FILES_ENOUGH, FILES_LEAST = 4096, 256
"""Open files of a process. A loader worker opens one for each tensor in transit; 1,024 is a common default."""
PROCESSES_A_RANK = 200
"""Upper estimate of the threads of a rank: torch's pools, gloo, NCCL, CUDA and some loader workers."""
SHM_ENOUGH, SHM_DEFAULT = GIB, 64 * MIB
"""NVIDIA's containers ask for 1 GiB (NCCL, troubleshooting: sharing data); a container has 64 MiB by default."""
RAM_LEAST, RAM_ENOUGH, RAM_CUDA = GIB // 2, 2 * GIB, 4 * GIB
"""Host memory of a rank: torch alone takes about 0.3 GiB, with CUDA's libraries and NCCL some 3 GiB."""
WRITE_SLOW, FREE_LEAST, FREE_ENOUGH, FILES_FREE = 100e6, GIB, 20 * GIB, 1000
CORES_A_GPU = 4
"""Cores for each GPU: the rank's own thread, backward's, and two loader workers."""
OTHERS_BUSY = 0.25
"""Share of the cores used by other processes from which it is reported."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def check_host(facts: HostFacts) -> list[Check]:
    """Run all checks of this file, in display order."""
    checks: list[Callable[[HostFacts], list[Check]]] = [cores, memory, limits, shm, disk]
    return [found for check in checks for found in check(facts)]


def cores(facts: HostFacts) -> list[Check]:
    """Check cores against ranks and their threads, and current use by other processes."""
    have = min(facts.cores, facts.allowed.cores or facts.cores)
    limited = facts.allowed.cores is not None and facts.allowed.cores < facts.cores
    where = f"{have:g} cores" + (f" (a container's limit; {facts.cores} are visible)" if limited else "")
    threads, found = facts.threads, []
    if facts.ranks > have:
        found.append(
            warning(
                "cores",
                f"{facts.ranks} ranks share {where}: they take turns, and every collective waits for the slowest",
                "use fewer ranks (--nproc), or a machine with more cores",
            )
        )
    elif threads is not None and threads * facts.ranks > have:
        most = max(1, int(have // facts.ranks))
        found.append(
            warning(
                "cores",
                f"{facts.ranks} ranks × {threads} threads (OMP_NUM_THREADS) want {threads * facts.ranks} of {where}",
                f"unset OMP_NUM_THREADS, or set it to {most}",
            )
        )
    elif facts.gpus.gpus and have < CORES_A_GPU * facts.ranks:
        found.append(
            warning(
                "cores",
                f"{where} for {facts.ranks} GPUs: fewer than {CORES_A_GPU} each, so that loading data may starve them",
                "ask the scheduler for more cores a GPU (Slurm: --cpus-per-gpu), or load with fewer workers",
            )
        )
    if facts.busy_cores is not None and facts.busy_cores > OTHERS_BUSY * facts.cores:
        found.append(
            warning(
                "cores",
                f"other programs keep {facts.busy_cores:.1f} of {facts.cores} cores busy now: what is measured now is "
                "slower than it need be",
                "end them (top shows which), or measure when they are done",
            )
        )
    return worst(found, ok("cores", f"{where} for {counted(facts.ranks, 'rank')}"))


def memory(facts: HostFacts) -> list[Check]:
    """Check free host memory per rank, of the machine or of the container."""
    total, free = facts.memory_bytes, facts.available_bytes
    limit = facts.allowed.memory_bytes
    whose = ""
    if limit is not None and limit < total:
        used = facts.allowed.memory_used_bytes or 0
        total, free, whose = limit, min(free, max(0, limit - used)), " (a container's limit)"
    each, ranks = free / facts.ranks, counted(facts.ranks, "rank")
    wanted = RAM_CUDA if facts.gpus.gpus else RAM_ENOUGH
    text = f"{bytes_text(free)} of {bytes_text(total)}{whose} free: {bytes_text(each)} for each of {ranks}"
    if each < RAM_LEAST:
        return [
            error("memory", f"{text}; a rank takes more before it does anything", "use fewer ranks, or free memory")
        ]
    if each < wanted:
        more = "; CUDA's libraries and the loader's workers need some" if facts.gpus.gpus else ""
        return [warning("memory", f"{text}{more}; the system kills what asks for more", "use fewer ranks, free memory")]
    return [ok("memory", text)]


def limits(facts: HostFacts) -> list[Check]:
    """Check ulimits: open files, locked memory, processes, core dumps."""
    return [*_files(facts), *_locked(facts), *_processes(facts), *_core(facts)]


def _files(facts: HostFacts) -> list[Check]:
    limit = facts.limits.get("nofile")
    if limit is None:
        return [unknown("open files", "the system does not report its limit")]
    text = f"a process may open {_number(limit.soft)} files"
    if limit.soft is None or limit.soft >= FILES_ENOUGH:
        return [ok("open files", text)]
    fix = _raise("n", 65536, limit, "--ulimit nofile=65536")
    reason = "loader workers open one for each tensor in transit ('Too many open files')"
    level = error if limit.soft < FILES_LEAST else warning
    return [level("open files", f"{text}; {reason}", fix)]


def _locked(facts: HostFacts) -> list[Check]:
    limit = facts.limits.get("memlock")
    if limit is None:
        return [unknown("locked memory", "the system does not report its limit")]
    text = "unlimited" if limit.soft is None else f"at most {bytes_text(limit.soft)}"
    if limit.soft is None:
        return [ok("locked memory", text)]
    if not facts.rdma:
        return [ok("locked memory", f"{text}; it matters for InfiniBand and RoCE only, of which there is none here")]
    return [
        error(
            "locked memory",
            f"{text}, and {', '.join(facts.rdma)} must lock the buffers that they send: NCCL fails to register them",
            _raise("l", None, limit, "--ulimit memlock=-1"),
        )
    ]


def _processes(facts: HostFacts) -> list[Check]:
    limit = facts.limits.get("nproc")
    soft = limit.soft if limit else None
    group = facts.allowed.processes
    most = min((n for n in (soft, group) if n is not None), default=None)
    need, ranks = PROCESSES_A_RANK * facts.ranks, counted(facts.ranks, "rank")
    if most is None or most >= need:
        return [ok("processes", f"{_number(most)} processes and threads; {ranks} may start {need}")]
    if group is not None and most == group:
        fix = "start the container with --pids-limit=-1"
    else:
        fix = _raise("u", 65536, limit, "--ulimit nproc=65536")
    return [warning("processes", f"at most {most} processes and threads, and {ranks} may start {need}", fix)]


def _core(facts: HostFacts) -> list[Check]:
    limit = facts.limits.get("core")
    if limit is None:
        return [unknown("core dumps", "the system does not report its limit")]
    if limit.soft == 0:
        return [ok("core dumps", "none is written when a rank crashes (ulimit -c unlimited, to look into one)")]
    to_a_program = (facts.core_pattern or "").startswith("|")
    free = None if facts.disk is None else facts.disk.free_bytes
    size = min(limit.soft or facts.memory_bytes, facts.memory_bytes)
    if to_a_program or free is None or size * facts.ranks < free:
        return [ok("core dumps", f"a rank that crashes writes up to {bytes_text(size)}")]
    return [
        warning(
            "core dumps",
            f"each rank that crashes writes up to {bytes_text(size)}; of {facts.ranks}, that is more than is free",
            "ulimit -c 0, unless you want to look into one",
        )
    ]


def shm(facts: HostFacts) -> list[Check]:
    """Check /dev/shm: NCCL's buffers between local ranks, and the batches of loader workers."""
    if facts.system != "Linux":
        return [unknown("shared memory", f"/dev/shm is checked on Linux only; this is {facts.system or 'unknown'}")]
    fix = "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium Memory)"
    size, free = facts.shm_bytes, facts.shm_free_bytes
    if size is None or free is None:
        return [error("shared memory", "/dev/shm is not there: loader workers and NCCL cannot share data", fix)]
    text = f"/dev/shm has {bytes_text(size)}, {bytes_text(free)} free"
    reason = "loader workers hand batches over through it, and NCCL its buffers; a bus error is how it ends when full"
    if free < SHM_DEFAULT / 2 or (size <= SHM_DEFAULT and len(facts.gpus.gpus) > 1):
        return [
            error("shared memory", f"{text}; {reason}", fix if size <= SHM_ENOUGH else f"{fix}, or remove old files")
        ]
    if free < SHM_ENOUGH:
        return [warning("shared memory", f"{text}; {reason}", fix)]
    return [ok("shared memory", text)]


def disk(facts: HostFacts) -> list[Check]:
    """Check free space and speed of the checkpoint folder."""
    found = facts.disk
    if found is None:
        return [unknown("disk", "no folder was checked")]
    where = f"'{found.folder}'" + ("" if found.kind is None else f" ({found.kind})")
    if found.problem is not None:
        return [
            error(
                "disk", f"{where} cannot be written: {found.problem}", "choose another --folder, or its rights or room"
            )
        ]
    return [*_room(facts, where), *_speed(facts, where)]


def _room(facts: HostFacts, where: str) -> list[Check]:
    found = facts.disk
    assert found is not None
    text = f"{bytes_text(found.free_bytes)} of {bytes_text(found.total_bytes)} free under {where}"
    devices = sum(gpu.memory_bytes or 0 for gpu in facts.gpus.gpus)
    if found.kind in IN_MEMORY:
        return [warning("disk space", f"{text}: it is memory, and gone after a restart", "choose a --folder on a disk")]
    if found.free_files is not None and found.free_files < FILES_FREE:
        return [warning("disk space", f"only {found.free_files} more files fit under {where}", "remove old files")]
    if found.free_bytes < FREE_LEAST:
        return [error("disk space", f"{text}: too little for any checkpoint", "free room, or choose another --folder")]
    if devices > found.free_bytes:
        return [
            warning(
                "disk space",
                f"{text}; a checkpoint of a model that fills these GPUs ({bytes_text(devices)}) would not fit",
                "choose another --folder, or see what shardwise plan says that a checkpoint takes",
            )
        ]
    if found.free_bytes < FREE_ENOUGH:
        return [warning("disk space", f"{text}: room for few checkpoints", "free room, or choose another --folder")]
    return [ok("disk space", text)]


def _speed(facts: HostFacts, where: str) -> list[Check]:
    found = facts.disk
    if found is None or found.write_bytes_per_s is None:
        return [unknown("disk speed", f"{where} could not be tried")]
    write, read = found.write_bytes_per_s, found.read_bytes_per_s
    text = f"{where} takes {write / 1e6:.0f} MB/s for good (fsync)"
    text += "" if read is None else f" and gives {read / 1e6:.0f} MB/s"
    tried = f"one file of {bytes_text(found.tried_bytes)}, by one process"
    if write < WRITE_SLOW:
        slow = f"10 GiB take {seconds_text(10 * GIB / write)}"
        return [warning("disk speed", f"{text}: {slow}", "save to a local disk, or less often", tried)]
    return [ok("disk speed", text, tried)]


def _raise(option: str, to: int | None, limit: Limit | None, container: str) -> str:
    """Return how to raise a limit: in the shell up to the hard limit, else by an administrator."""
    wanted = "unlimited" if to is None else str(to)
    hard = limit.hard if limit else None
    if hard is None or (to is not None and hard >= to):
        return f"ulimit -{option} {wanted}, before you start the run"
    return f"the hard limit is {hard}: {container} for a container, else /etc/security/limits.conf, then log in again"


def _number(value: int | None) -> str:
    return "any number of" if value is None else f"{value:,}"
