"""`save_checkpoint` and `Saver`: ranks write shards, rank 0 commits, all agree on the result.

In the foreground everything is done when the call returns. In the background the call returns once the save plan is
agreed; the copy to a staging buffer continues until the optimizer next changes the weights (nothing else does), and the
write until it is done. Ranks then communicate over a separate group, concurrently with the training.
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
from torch.utils.hooks import RemovableHandle

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.commit import FolderLock, abandon, begin, commit, move_latest, prune, take_away
from shardwise.checkpoint.engine_state import shadow_of
from shardwise.checkpoint.format import LATEST, MANIFEST, newest, step_folder
from shardwise.checkpoint.layout import part_of
from shardwise.checkpoint.parts import is_in_parts, owners_of
from shardwise.checkpoint.save_plan import Average, LocalState, SavePlan, deal, holdings_of
from shardwise.checkpoint.save_report import ManifestHead, failure_of, fault_of, merged, write_share
from shardwise.checkpoint.spread_report import is_spread, spread_report
from shardwise.checkpoint.staging import Copy, Stage
from shardwise.checkpoint.storage.local_storage import Folder, folder_of
from shardwise.errors import UserError
from shardwise.plan.plan import Plan

GRACE_S = 20.0  # a background save gets this long to end after the training has failed


@dataclass(frozen=True)
class SaveReport:
    """Cost of a save on this rank.

    ``num_bytes`` is what this rank wrote, ``stall_s`` the training time lost to it, ``write_s`` the time until the
    checkpoint was durable.
    """

    step: int
    num_bytes: int
    stall_s: float
    write_s: float
    background: bool


@dataclass
class _Pending:
    """Save in progress in the background."""

    step: int
    thread: threading.Thread
    staged: threading.Event
    stall_s: float
    num_bytes: int
    hook: RemovableHandle | None = None
    write_s: float = 0.0
    failure: exchange.Failure | None = None

    def hold(self) -> None:
        """Wait until the live tensors are copied."""
        if not self.staged.is_set():
            started = time.perf_counter()
            self.staged.wait()
            self.stall_s += time.perf_counter() - started


class Saver:
    """Save the checkpoints of one run into one folder; a context manager.

    Collective: every rank creates one. The folder, on a disk that all ranks see or behind a URL, is this run's as long
    as the saver lives. The ``keep`` newest checkpoints are kept, and always the one just written. With ``async_save`` a
    save waits for the previous one and returns early; the optimizer's next step waits until the state is copied.
    ``guarded`` promises that nothing else changes weights without calling `before_update`; otherwise the state is
    copied before `save` returns. If an error leaves the ``with``, a background save gets `GRACE_S` to end.

    Raises:
        UserError: ``keep`` is less than 1, another run is saving there, or the folder cannot be written to.
    """

    def __init__(self, folder: str | Folder, *, keep: int, async_save: bool = False, guarded: bool = False) -> None:
        if keep < 1:
            raise UserError(f"keep {keep}: at least one checkpoint must be kept; set checkpoint.keep to 1 or more")
        self.folder = folder_of(folder)
        self.keep = keep
        self.protected: tuple[str, ...] = ()  # names of checkpoints that stay, however old; see `prune`
        self.async_save = async_save
        self.guarded = guarded
        self.reports: list[SaveReport] = []
        self._lock: FolderLock | None = None
        self._stage = Stage()
        self._pending: _Pending | None = None
        self._rank, self._world = exchange.rank(), exchange.world_size()
        failure: exchange.Failure | None = None
        if self._rank == 0:
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
        pending = self._pending
        if pending is not None and isinstance(error, Exception):
            pending.thread.join(GRACE_S)
            if pending.failure:
                error.add_note(f"and the save of step {pending.step} in the background: {pending.failure['text']}")
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
        average: Average | None = None,
    ) -> Folder:
        """Save everything as ``step-00000020``; a no-op where that is already the newest checkpoint.

        ``state`` is JSON, taken from rank 0. ``rng`` are this rank's generator states as uint8 tensors. Unsharded
        buffers are taken from rank 0. ``model_facts`` describes how the model is built; see `Manifest.model`.
        ``average`` are averages of weights by the id of the weight, in its layout. A partial
        checkpoint is never visible: a folder with this name is complete, and ``latest`` names it only then. Collective.

        Raises:
            UserError: the folder cannot be written to, another run writes there, or the process group was left.
            CheckpointError: a rank could not write its part (the same text on every rank), now or in the background
                before. Earlier checkpoints are kept.
        """
        self.wait()
        if (exchange.rank(), exchange.world_size()) != (self._rank, self._world):
            raise UserError("the process group that this Saver was made in is gone; make a Saver for the new one")
        started = time.perf_counter()
        target = self.folder / step_folder(step)
        working = self._begin(step, target)
        if working is None:
            return target
        shadow = shadow_of(model, filled=True)
        if shadow is not None:
            model, optimizer = shadow.model, shadow.optimizer
        ownership = part_of(model)
        make_head = partial(
            ManifestHead.of,
            step,
            plan,
            state,
            optimizer,
            model_facts,
            names=() if ownership is None else ownership.names,
        )
        head, share = self._agree_on_save_plan(
            working, make_head, lambda: holdings_of(model, optimizer, rng, average), model
        )
        if not self.async_save:
            failure = self._write(working, target, share, head)
            if failure:
                raise exchange.revive(failure)
            spent = time.perf_counter() - started
            self.reports.append(SaveReport(step, share.num_bytes, spent, spent, background=False))
            return target
        self._go_on(working, target, share, head, started, optimizer)
        return target

    def before_update(self) -> None:
        """Wait until the save in progress no longer needs the live weights."""
        if self._pending is not None:
            self._pending.hold()

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
        if pending.hook is not None:
            pending.hook.remove()
        self._pending = None
        waited = time.perf_counter() - started
        if pending.failure:
            raise exchange.revive(pending.failure)
        self.reports.append(
            SaveReport(pending.step, pending.num_bytes, pending.stall_s + waited, pending.write_s, background=True)
        )

    def close(self, *, wait: bool = True) -> None:
        """Wait for the save in progress (raising its error), and release the folder.

        Without ``wait`` the folder is released when the save has ended, if this process lives that long.

        """
        pending, lock = self._pending, self._lock
        if not wait and pending is not None and pending.thread.is_alive() and lock is not None:
            threading.Thread(target=_release_after, args=(pending.thread, lock), daemon=True).start()
            return
        try:
            if wait:
                self.wait()
        finally:
            if lock is not None:
                lock.release()
            if wait:
                exchange.close_group(self._group)
            self._group = None

    def _begin(self, step: int, target: Folder) -> Folder | None:
        """Begin a save and return its working folder; ``None`` where the step is saved already.

        Collective.
        """
        answer: dict[str, Any] = {"working": None, "failure": None}
        if self._rank == 0:
            try:
                if self._lock is not None:
                    self._lock.check()
                there = (target / MANIFEST).is_file()
                last = newest(self.folder) if there else None
                if last is not None and last.name == target.name:
                    self._point_to(target)
                    prune(self.folder, self.keep, target, self.protected)
                else:
                    if there:  # of a run that diverged at an earlier step, or that died before it counted
                        take_away(target)
                    answer["working"] = str(begin(self.folder, step))
            except Exception as error:
                answer["failure"] = self._rank_0s(error)
        answer = exchange.broadcast_json(answer)
        if answer["failure"]:
            raise exchange.revive(answer["failure"])
        return folder_of(answer["working"]) if answer["working"] else None

    def _agree_on_save_plan(
        self,
        working: Folder,
        head_of: Callable[[], ManifestHead],
        holdings_here: Callable[[], LocalState],
        model: nn.Module,
    ) -> tuple[ManifestHead, SavePlan]:
        """Agree on the save plan; an error on any rank is raised on all. Collective."""
        wrong: Exception | None = None
        made: list[tuple[ManifestHead, SavePlan]] = []
        local_state = LocalState()
        try:
            local_state = holdings_here()
        except Exception as error:
            wrong = error
        if is_in_parts(model):
            local_state.leave(owners_of(local_state.buffers))
        loads = exchange.gather_counts(local_state.own_bytes)
        marks = exchange.gather_counts(-1 if wrong else local_state.mark)
        try:
            if wrong is None:
                made.append((head_of(), deal(local_state, loads, marks, spread=is_spread(self._world))))
        except Exception as error:
            wrong = error
        fault = None if wrong is None else {"rank": self._rank, "path": str(working), "fault": fault_of(wrong)}
        faults = [found for found in exchange.gather_json(fault) if found]
        if faults:  # on rank 0, which knows before the others do
            abandon(working)
        failure = exchange.broadcast_json(failure_of(faults, self.folder) if faults else None)
        if failure:
            raise exchange.revive(failure)
        return made[0]

    def _write(
        self,
        working: Folder,
        target: Folder,
        share: SavePlan,
        head: ManifestHead,
        group: ProcessGroup | None = None,
        wrong: Exception | None = None,
    ) -> exchange.Failure | None:
        """Write, gather, commit, prune; return the error, the same on every rank.

        Collective over ``group``.
        """
        spread = is_spread(self._world)
        report = write_share(working, share, self._rank, wrong, spread=spread)
        if spread:
            report = spread_report(report, self._world, group)
        reports = exchange.gather_json(report, group)
        failure: exchange.Failure | None = None
        if self._rank == 0:
            failure = self._finish(working, target, reports, head)
        failure = exchange.broadcast_json(failure, group)
        return failure

    def _finish(
        self, working: Folder, target: Folder, reports: list[dict[str, Any]], head: ManifestHead
    ) -> exchange.Failure | None:
        """Commit and prune on rank 0 where all shards were written; else remove them and report why.

        Never raises: the others wait for an answer.
        """
        faults = [report for report in reports if report["fault"]]
        needed = sum(report["needed"] for report in reports)
        place, committed = target / MANIFEST, False
        try:
            if not faults:
                commit(working, target, merged(working, reports, head))
                place, committed = self.folder / LATEST, True
                self._point_to(target)
                prune(self.folder, self.keep, target, self.protected)
                return None
        except Exception as error:
            faults = [{"rank": 0, "path": str(place), "fault": fault_of(error)}]
        if not committed:
            abandon(working)
        failure = failure_of(faults, self.folder, needed)
        if committed:
            failure["text"] += f" '{target}' is complete, too."
        return failure

    def _point_to(self, target: Folder) -> None:
        move_latest(self.folder, target)
        if self._lock is not None:
            self._lock.moved(target)

    def _rank_0s(self, error: Exception) -> exchange.Failure:
        return failure_of([{"rank": 0, "path": str(self.folder), "fault": fault_of(error)}], self.folder)

    def _go_on(
        self, working: Folder, target: Folder, share: SavePlan, head: ManifestHead, started: float, optimizer: Optimizer
    ) -> None:
        """Copy and write in a background thread; returns early."""
        copy: Copy | Exception
        try:
            copy = self._stage.begin(share)
        except Exception as error:  # out of memory: the thread informs the other ranks
            copy = error
        staged, group = threading.Event(), self._group

        def work() -> None:
            begun = time.perf_counter()
            try:
                ready, wrong = _copied(copy, share, staged)
                pending.failure = self._write(working, target, ready, head, group, wrong)
            except Exception as error:  # the group broke: other ranks have died
                pending.failure = exchange.describe(error)
            pending.write_s = time.perf_counter() - begun

        thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._pending = pending = _Pending(head.step, thread, staged, 0.0, share.num_bytes)
        if self.guarded:
            pending.hook = optimizer.register_step_pre_hook(lambda *_: pending.hold())
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
    """Save one checkpoint, in the foreground; see `Saver.save`.

    Collective over the default group.

    Raises:
        UserError: the folder cannot be written to, another run writes there, or ``keep`` is less than 1.
        CheckpointError: a rank could not write its part (the same text on every rank). Earlier checkpoints are kept.
    """
    with Saver(folder, keep=keep) as saver:
        return saver.save(step, model=model, optimizer=optimizer, plan=plan, state=state, rng=rng)


def _copied(copy: Copy | Exception, share: SavePlan, staged: threading.Event) -> tuple[SavePlan, Exception | None]:
    """Copy the share to staging memory; return it, or the error.

    Either way no waiter is left blocked.
    """
    try:
        if isinstance(copy, Exception):
            raise copy
        return copy.finish(), None
    except Exception as error:
        return share, error
    finally:
        staged.set()


def _release_after(thread: threading.Thread, lock: FolderLock) -> None:
    thread.join()
    lock.release()
