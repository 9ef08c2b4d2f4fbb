"""`save_checkpoint` and `Saver`: each rank writes what it owns, rank 0 commits, and all agree how it went.

In the foreground everything is done when the call returns. In the background the call returns when it is settled who
writes what; the copy to a staging buffer goes on until the optimizer next changes the weights (nothing else does), and
the writing until it is done. Ranks speak over a group of their own then, beside the training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from shardwise.checkpoint import exchange
from shardwise.checkpoint.commit import FolderLock, abandon, begin, commit, move_latest, prune
from shardwise.checkpoint.format import MANIFEST, step_folder
from shardwise.checkpoint.report import Head, failure_of, fault_of, merged, write_share
from shardwise.checkpoint.share import Holdings, Share, deal, holdings_of
from shardwise.checkpoint.stage import Copy, Stage
from shardwise.checkpoint.storage import Folder, folder_of
from shardwise.errors import UserError
from shardwise.plan.plan import Plan


@dataclass(frozen=True)
class SaveReport:
    """What a save cost this rank.

    ``num_bytes`` is what this rank wrote, ``stall_s`` how long the training stood still for it, ``write_s`` how long it
    took until the checkpoint was durable.
    """

    step: int
    num_bytes: int
    stall_s: float
    write_s: float
    background: bool


@dataclass
class _Pending:
    """A save that is under way in the background."""

    step: int
    thread: threading.Thread
    staged: threading.Event
    stall_s: float
    num_bytes: int
    write_s: float = 0.0
    failure: exchange.Failure | None = None


class Saver:
    """Saves the checkpoints of one run into one folder; a context manager. Collective: all ranks make one.

    The folder, on a disk that all ranks see or behind a URL, is this run's as long as the saver lives. The ``keep``
    newest checkpoints stay, and always the one just written. With ``async_save`` a save waits for the one before and
    returns early. ``guarded`` says that somebody calls `before_update` before the weights change; without that the
    state is copied before `save` returns.

    Raises:
        UserError: ``keep`` is less than 1, another run is saving there, or the folder cannot be written to.
    """

    def __init__(self, folder: str | Folder, *, keep: int, async_save: bool = False, guarded: bool = False) -> None:
        if keep < 1:
            raise UserError(f"keep {keep}: at least one checkpoint must be kept; set checkpoint.keep to 1 or more")
        self.folder = folder_of(folder)
        self.keep = keep
        self.async_save = async_save
        self.guarded = guarded
        self.reports: list[SaveReport] = []
        self._lock: FolderLock | None = None
        self._stage = Stage()
        self._pending: _Pending | None = None
        failure: exchange.Failure | None = None
        if exchange.rank() == 0:
            try:
                self._lock = FolderLock(self.folder)
            except Exception as error:
                failure = self._rank_0s(error)
        failure = exchange.broadcast_json(failure)
        if failure:
            raise exchange.revive(failure)
        self._group = exchange.side_group() if async_save else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        state: dict[str, Any],
        rng: dict[str, torch.Tensor] | None = None,
        model_facts: dict[str, Any] | None = None,
    ) -> Folder:
        """Save everything as ``step-00000020``; a step that is there already is left alone.

        ``state`` is JSON, and rank 0's is kept. ``rng`` holds this rank's generator states as uint8 tensors. Buffers
        that are not sharded are rank 0's. ``model_facts`` says how the model is built; see `Manifest.model`. Nobody
        sees a half checkpoint: what has the name is complete, and ``latest`` names it only then. Collective.

        Raises:
            UserError: the folder cannot be written to, or another run writes there.
            CheckpointError: a rank could not write its part (the same text on every rank), now or in the background
                before. Earlier checkpoints stay.
        """
        self.wait()
        started = time.perf_counter()
        target = self.folder / step_folder(step)
        working = self._begin(step, target)
        if working is None:
            return target
        make_head = partial(Head.of, step, plan, state, optimizer, model_facts)
        head, share = self._settle(working, make_head, model, optimizer, rng)
        if not self.async_save:
            failure = self._write(working, target, share, head)
            if failure:
                raise exchange.revive(failure)
            spent = time.perf_counter() - started
            self.reports.append(SaveReport(step, share.num_bytes, spent, spent, background=False))
            return target
        self._go_on(working, target, share, head, started)
        return target

    def before_update(self) -> None:
        """Wait until nothing of the live weights is needed any more; at once where no save is under way."""
        pending = self._pending
        if pending is not None and not pending.staged.is_set():
            started = time.perf_counter()
            pending.staged.wait()
            pending.stall_s += time.perf_counter() - started

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            UserError: as `save`.
            CheckpointError: as `save`.
        """
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter()
        pending.thread.join()
        self._pending = None
        waited = time.perf_counter() - started
        if pending.failure:
            raise exchange.revive(pending.failure)
        self.reports.append(
            SaveReport(pending.step, pending.num_bytes, pending.stall_s + waited, pending.write_s, background=True)
        )

    def close(self, *, wait: bool = True) -> None:
        """Wait for what is under way (raising what went wrong, with ``wait``), and let go of the folder."""
        try:
            if wait:
                self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
            if wait:
                exchange.close_group(self._group)
            self._group = None

    def _begin(self, step: int, target: Folder) -> Folder | None:
        """Where to write; ``None`` where the step is saved already. Collective."""
        answer: dict[str, Any] = {"working": None, "failure": None}
        if exchange.rank() == 0:
            try:
                if self._lock is not None:
                    self._lock.check()
                if (target / MANIFEST).is_file():
                    self._point_to(target)
                else:
                    answer["working"] = str(begin(self.folder, step))
            except Exception as error:
                answer["failure"] = self._rank_0s(error)
        answer = exchange.broadcast_json(answer)
        if answer["failure"]:
            raise exchange.revive(answer["failure"])
        return folder_of(answer["working"]) if answer["working"] else None

    def _settle(
        self,
        working: Folder,
        head_of: Callable[[], Head],
        model: nn.Module,
        optimizer: Optimizer,
        rng: dict[str, torch.Tensor] | None,
    ) -> tuple[Head, Share]:
        """Who writes what; what is wrong on any rank is raised on all. Collective."""
        wrong: Exception | None = None
        made: list[tuple[Head, Share]] = []
        holdings = Holdings()
        try:
            holdings = holdings_of(model, optimizer, rng)
        except Exception as error:
            wrong = error
        loads = exchange.gather_counts(holdings.own_bytes)
        try:
            if wrong is None:
                made.append((head_of(), deal(holdings, loads)))
        except Exception as error:
            wrong = error
        fault = None if wrong is None else {"rank": exchange.rank(), "path": str(working), "fault": fault_of(wrong)}
        faults = [found for found in exchange.gather_json(fault) if found]
        if faults:  # on rank 0, which knows before the others do
            abandon(working)
        failure = exchange.broadcast_json(failure_of(faults, self.folder, 0) if faults else None)
        if failure:
            raise exchange.revive(failure)
        return made[0]

    def _write(
        self,
        working: Folder,
        target: Folder,
        share: Share,
        head: Head,
        group: ProcessGroup | None = None,
        wrong: Exception | None = None,
    ) -> exchange.Failure | None:
        """Write, gather, commit, prune; what went wrong, the same on every rank. Collective over ``group``."""
        reports = exchange.gather_json(write_share(working, share, wrong), group)
        failure: exchange.Failure | None = None
        if exchange.rank() == 0:
            failure = self._finish(working, target, reports, head)
            if failure is None:
                prune(self.folder, self.keep, target)
        failure = exchange.broadcast_json(failure, group)
        return failure

    def _finish(
        self, working: Folder, target: Folder, reports: list[dict[str, Any]], head: Head
    ) -> exchange.Failure | None:
        """Rank 0: commit where every rank wrote its part, otherwise remove the parts and say what went wrong."""
        faults = [report for report in reports if report["fault"]]
        needed = sum(report["needed"] for report in reports)
        try:
            if not faults:
                commit(working, target, merged(working, reports, head))
                self._point_to(target)
                return None
        except Exception as error:
            faults = [{"rank": 0, "path": str(working / MANIFEST), "fault": fault_of(error)}]
        if not (target / MANIFEST).is_file():
            abandon(working)
        return failure_of(faults, self.folder, needed)

    def _point_to(self, target: Folder) -> None:
        move_latest(self.folder, target)
        if self._lock is not None:
            self._lock.moved(target)

    def _rank_0s(self, error: Exception) -> exchange.Failure:
        return failure_of([{"rank": 0, "path": str(self.folder), "fault": fault_of(error)}], self.folder, 0)

    def _go_on(self, working: Folder, target: Folder, share: Share, head: Head, started: float) -> None:
        """Copy and write in a thread of its own; returns early."""
        copy = self._stage.begin(share)
        staged = threading.Event()

        def work() -> None:
            begun = time.perf_counter()
            try:
                ready, wrong = _copied(copy, staged)
                pending.failure = self._write(working, target, ready, head, self._group, wrong)
            except Exception as error:  # the group broke: others are gone
                pending.failure = exchange.describe(error)
            pending.write_s = time.perf_counter() - begun

        thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._pending = pending = _Pending(head.step, thread, staged, 0.0, share.num_bytes)
        thread.start()
        if not self.guarded:
            staged.wait()
        pending.stall_s = time.perf_counter() - started


def save_checkpoint(
    folder: str | Folder,
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    state: dict[str, Any],
    rng: dict[str, torch.Tensor] | None,
    keep: int,
) -> Folder:
    """Save one checkpoint, in the foreground; see `Saver.save`. Collective over the default group.

    Raises:
        UserError: the folder cannot be written to, another run writes there, or ``keep`` is less than 1.
        CheckpointError: a rank could not write its part (the same text on every rank). Earlier checkpoints stay.
    """
    with Saver(folder, keep=keep) as saver:
        return saver.save(step, model=model, optimizer=optimizer, plan=plan, state=state, rng=rng)


def _copied(copy: Copy, staged: threading.Event) -> tuple[Share, Exception | None]:
    """The staged share, or what went wrong; either way nobody needs to wait for it any longer."""
    try:
        return copy.finish(), None
    except Exception as error:
        return copy.share, error
    finally:
        staged.set()
