"""`run_world`: call a function once per gloo rank, on a fork server that has torch loaded already."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tests.ledger import spent

multiprocessing.set_forkserver_preload(["tests.preload"])


class WorldError(AssertionError):
    """One or more ranks failed; what happened first comes first."""


def run_world(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``fn(*args)`` once per rank and return the results in rank order."""
    spent("ranks", world_size)
    with tempfile.TemporaryDirectory() as tmp:
        context = torch.multiprocessing.start_processes(
            _rank_main,
            args=(world_size, tmp, fn, args),
            nprocs=world_size,
            join=False,
            daemon=True,
            start_method="forkserver",
        )
        deadline = time.monotonic() + timeout_s
        running = {p.sentinel: p for p in context.processes}
        while running and (left_s := deadline - time.monotonic()) > 0:
            for sentinel in wait(list(running), left_s):
                ended = running.pop(sentinel)
                ended.join()
                if ended.exitcode:
                    deadline = min(deadline, time.monotonic() + 2.0)  # let the peers say what they saw
        exits = [p.exitcode for p in context.processes]  # None: still running
        files = sorted(Path(tmp).glob("*.err"), key=lambda f: f.stat().st_mtime_ns)
        errors = {int(f.stem): f.read_text() for f in files}
        for p in context.processes:  # only now: killing a rank makes its peers fail
            p.kill()
            p.join()
        quiet = [r for r in range(world_size) if r not in errors]
        report = [f"[rank {r}] died without a traceback, exit code {exits[r]}" for r in quiet if exits[r]]
        report += [f"[rank {r}] {text}" for r, text in errors.items()]
        report += [f"[rank {r}] still in {fn.__name__} after {timeout_s} s" for r in quiet if exits[r] is None]
        if report:
            raise WorldError("\n".join(report))
        return [torch.load(Path(tmp) / f"{r}.pt", weights_only=False) for r in range(world_size)]


def run_each(
    fn: Callable[..., Any], world_size: int, calls: Sequence[tuple[Any, ...]], timeout_s: float = 120.0
) -> list[list[Any]]:
    """``fn(*args)`` for the arguments of each of ``calls``, one after the other in one world: `run_world`'s results.

    Where one comes to harm, each has a world of its own: all that fail are named, not only the first.
    """
    try:
        by_rank = run_world(_each, world_size, fn, calls, timeout_s=timeout_s)
        return [list(results) for results in zip(*by_rank, strict=True)]
    except WorldError as together:
        failed = []
        for args in calls:
            try:
                run_world(fn, world_size, *args, timeout_s=timeout_s)
            except WorldError as alone:
                failed.append(f"{', '.join(map(str, args))}:\n{alone}")
        raise WorldError("\n".join(failed) or f"one after the other, and not alone:\n{together}") from together


def _each(fn: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [fn(*args) for args in calls]


def _rank_main(rank: int, world_size: int, tmp: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 20)  # a rank does not live long, and the collector takes a tenth of what it does
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    code = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{tmp}/store", rank=rank, world_size=world_size)
        torch.save(fn(*args), Path(tmp) / f"{rank}.pt")
        dist.barrier()
    except BaseException:
        (Path(tmp) / f"{rank}.err").write_text(traceback.format_exc())
        code = 1
    os._exit(code)  # the interpreter's own exit races with gloo's threads
