"""Check that DeepSpeed is installed and supports a plan, before ranks start."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.environment import compiler
from shardwise.errors import UserError
from shardwise.parallel.engines.deepspeed_nvme import path_problems

_OLD_NAMES = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"  # its names in 0.19
_EXPECTED = ("Setting accelerator to CPU", "with an untested optimizer")  # warnings about decisions of the plan
LOGGER = "DeepSpeed"
OLDEST = (0, 17)
_SHARED_MEMORY = "deepspeed_shm_comm"  # for inference on CPUs; would be compiled when a group is adopted
_OPS = ("pin_memory", "async_io")  # needed for swapping, compiled on first use
_BUILDERS = {"ninja", "g++", "c++", "cc1plus", "clang++", "as", "ld"}
_PROBE = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
_QUIET_S = 120.0  # a lock without a compiler process counts as stale after this long without output

Log = Callable[[str], None]


def import_deepspeed() -> Any:
    """Import ``deepspeed``; its log goes to stderr, so that stdout stays the command's own.

    Raises:
        UserError: it is not installed, too old, or cannot be imported.
    """
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(one, _Expected) for one in logger.filters):
        logger.addFilter(_Expected())
        warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "deepspeed":
            raise UserError(
                f"DeepSpeed cannot be imported: it needs '{error.name}'; pip install {error.name}"
            ) from None
        raise UserError(
            "the strategy runs on DeepSpeed, which is not installed; pip install 'shardwise[deepspeed]', or use the "
            "same plan on PyTorch (zero1, zero2, fsdp)"
        ) from None
    version = tuple(int(part) for part in deepspeed.__version__.split(".")[:2])
    if version < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise UserError(f"DeepSpeed {deepspeed.__version__} is too old: pip install -U 'deepspeed>={least}'")
    known = getattr(deepspeed.ops, "__compatible_ops__", {})
    if _SHARED_MEMORY in known:
        known[_SHARED_MEMORY] = False
    return deepspeed


class _Expected(logging.Filter):
    """Log filter that drops expected warnings."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(part in text for part in _EXPECTED)


def forget_groups() -> None:
    """Clear the process group that DeepSpeed has cached: the next session may use another one."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups._WORLD_GROUP = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def check_ready(*, nvme: bool, nvme_path: str | None, log: Log) -> None:
    """Check that DeepSpeed can start here and, if needed, swap.

    Compile its swap library if missing.

    Raises:
        UserError: lists all obstacles.
    """
    deepspeed = import_deepspeed()
    if not nvme:
        return
    problems = [*tool_problems(), *path_problems(nvme_path)]
    if problems:
        raise UserError(*problems)
    build_ops(deepspeed, log)


def tool_problems() -> list[str]:
    """List what is missing to compile DeepSpeed's swap library, each with its package."""
    compile_with = compiler()
    problems = []
    if shutil.which(compile_with) is None:
        problems.append(
            f"+nvme compiles DeepSpeed's async_io with a C++ compiler, and '{compile_with}' is not there; install it "
            "(Debian and Ubuntu: apt install g++), or set CXX to another one"
        )
    if shutil.which("ninja") is None:
        problems.append("+nvme compiles DeepSpeed's async_io with ninja, which is not there; pip install ninja")
    if shutil.which(compile_with) is not None and not _links_libaio(compile_with):
        problems.append(
            "+nvme needs libaio with its header, which the compiler does not find; install it (Debian and Ubuntu: "
            "apt install libaio-dev; Fedora: dnf install libaio-devel)"
        )
    return problems


def _links_libaio(compile_with: str) -> bool:
    """Return whether a program that calls ``io_submit`` compiles and links."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROBE)
        command = [compile_with, str(source), "-laio", "-o", str(Path(folder) / "probe")]
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


def build_ops(deepspeed: Any, log: Log, quiet_s: float = _QUIET_S) -> None:
    """Compile the swap library, which is cached for later runs.

    Remove the stale lock of a killed build.

    Raises:
        UserError: another process has been compiling for too long, or the compiler failed; with its last lines.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    for name in _OPS:
        free_lock(build_folder(name), log, quiet_s)
    if not (build_folder("async_io") / "async_io.so").is_file():
        log("compiling async_io for +nvme (a minute or two, once for this machine)")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, OSError, ImportError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        words = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no reason given")
        raise UserError(
            f"DeepSpeed's async_io cannot be compiled: {words.strip()}; take +nvme out, or repair the compiler and "
            f"remove '{build_folder('async_io')}'"
        ) from None


def build_folder(name: str) -> Path:
    """Return the folder in which PyTorch builds and caches an extension of that name."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def free_lock(folder: Path, log: Log, quiet_s: float = _QUIET_S, limit_s: float = 900.0) -> bool:
    """Wait for a build in ``folder``; remove the lock of a dead build and report it.

    PyTorch's own wait for a lock never ends. A build counts as dead if no compiler of this machine works in the folder
    and nothing in it has changed for ``quiet_s``. Returns whether a lock was removed.

    Raises:
        UserError: the build still runs after ``limit_s``.
    """
    lock, end, reported = folder / "lock", time.monotonic() + limit_s, False
    while lock.exists():
        silent = time.time() - max((path.stat().st_mtime for path in _entries(folder)), default=0.0)
        if not _builds_in(folder) and silent > quiet_s:
            lock.unlink(missing_ok=True)
            log(f"took away '{lock}', which a build that was killed {silent:.0f} s ago has left")
            return True
        if time.monotonic() > end:
            raise UserError(f"'{lock}' has been locked by another build for too long; remove it if there is none")
        if not reported:
            log(f"another process is compiling in '{folder}' (or was killed there, {silent:.0f} s ago): waiting")
            reported = True
        time.sleep(min(1.0, quiet_s / 4 + 0.01))
    return False


def _entries(folder: Path) -> list[Path]:
    found = []
    for path in [folder, *folder.glob("*")]:
        with contextlib.suppress(OSError):
            path.stat()
            found.append(path)
    return found


def _builds_in(folder: Path) -> bool:
    """Return whether a visible compiler process has ``folder`` as its working directory."""
    import psutil

    here = os.path.realpath(folder)
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error, OSError):
            if process.info["name"] in _BUILDERS and os.path.realpath(process.cwd()) == here:
                return True
    return False
