"""Control messages that every rank sends and receives, and errors for absent ranks.

Control messages have their own gloo group: on the group that FSDP2 uses, a message from one rank would
match a gather or a reduction of the others, which aborts the process where sizes differ, and else mixes the two up.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import re
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from shardwise.errors import AnswerIsNo, MachineError, RankError, TrainingError

WIDTH = 96
"""Integers of a message, so that ranks at different points can still decode each other's."""
TAG = 3
"""Integers of it that name the operation, 8 letters each."""
HERE_S = 10.0
"""Seconds after which a waiting rank records so in the store: the others wait for ranks without a record."""
ANNOUNCE_S = 30.0
"""Seconds after which the first of the waiting ranks reports the missing ones."""
LIMIT_S = 600.0
"""Longest wait of a rank within a step: NCCL's default for a collective, so if ranks are further apart in
one step, plain PyTorch ends, too. Between steps a rank may do its own work, and the group's timeout applies."""

_GONE = re.compile(r"closed|reset by peer|broken pipe|not connected", re.IGNORECASE)
_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)
_FIXES = {
    "session.save": "session.save is for all ranks, whatever the strategy: move it out of `if session.ranks.is_main`",
    "session.load": "session.load is for all ranks, whatever the strategy: move it out of `if session.ranks.is_main`",
    "an evaluation": "A forward needs all ranks where weights are sharded, and where ddp sends batch norm's "
    "buffers: move the evaluation out of `if session.ranks.is_main`, and give each rank as many batches",
    "a forward of a step": "A forward gathers sharded weights from all ranks: call the model as often on each in a "
    "micro batch, or use ddp or zero1",
    "step.backward": "A forward gathers sharded weights from all ranks: call the model as often on each in a micro "
    "batch, or use ddp or zero1",
}


Table = npt.NDArray[np.int64]
"""Integers of all ranks: a row for each, in rank order."""


class Meeting:
    """Exchange of one message of integers between all ranks. Collective.

    The ranks must have a control group.

    ``what`` names this rank's operation, in at most 24 letters; if ranks are in different operations, each waiting for
    the others to join, all of them raise. The wait for a rank that has not come ends after ``limit_s`` (else: the
    group's timeout), and the group cannot be used from then on.
    """

    def __init__(
        self, values: list[int], group: dist.ProcessGroup, what: str = "", *, limit_s: float | None = None
    ) -> None:
        self._group, self._what, self._limit_s = group, what, limit_s
        self._head = [len(values), *_tag(what)]
        self.fits = len(values) <= WIDTH - len(self._head)
        sent = [*self._head, *(values if self.fits else ())]
        self._mine = torch.tensor(sent + [0] * (WIDTH - len(sent)), dtype=torch.int64)
        self._world = dist.get_world_size(group)
        self._rows = torch.empty(self._world * WIDTH, dtype=torch.int64)
        options = AllgatherOptions()
        if limit_s is not None:  # gloo itself gives up then: a group with a pending message could never be destroyed
            options.timeout = timedelta(seconds=limit_s)
        with self._named():
            self._work = group._allgather_base(self._rows, self._mine, options)

    def wait(self, *, patient: bool = True) -> None:
        """Wait until all ranks' messages have arrived.

        Unless ``patient``, report the missing ranks after a while.

        Raises:
            TrainingError: ranks did not come, or have left.
            RankError: a rank's process has ended.
        """
        with self._named():
            if self._came(HERE_S):
                return
        _mark(self._group, "waits", there=True)
        try:
            with self._named():
                self._refuse_left()
                if self._came(ANNOUNCE_S - HERE_S):
                    return
                if not patient:
                    self._log()
                while not self._came(ANNOUNCE_S):
                    self._refuse_left()
        finally:
            _mark(self._group, "waits", there=False)

    def rows(self) -> Table:
        """Return each rank's integers, a row in rank order, once they have arrived: [ranks, integers].

        Without columns where they did not fit.

        Raises:
            TrainingError: on all ranks, if they are in different operations.
        """
        self.wait()
        rows: Table = self._rows.numpy().reshape(self._world, WIDTH)
        size = len(self._head)
        heads = rows[:, :size]
        if (heads != self._head).any():
            other = int((heads != heads[0]).any(axis=1).argmax())
            texts = [heads[rank, 1:].tobytes().decode(errors="replace").strip() for rank in (0, other)]
            first, second = (text or "another exchange" for text in texts)
            raise TrainingError(
                f"ranks wait for each other at different points: rank 0 at {first}, rank {other} at {second}. "
                "Sharded weights and steps need every rank: call what rank 0 alone calls (an evaluation, a save) on "
                "all ranks, with as many batches on each"
            )
        return rows[:, size : size + self._head[0]] if self.fits else rows[:, :0]

    def _came(self, seconds: float) -> bool:
        """Return whether all ranks' messages have arrived after at most ``seconds``."""
        try:
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            if self._work.is_completed():
                raise
            return False
        return True

    def _log(self) -> None:
        """Report the missing ranks, on the first of the waiting ranks."""
        missing, mine = _without(self._group, "waits"), dist.get_rank(self._group)
        if missing and all(rank in missing for rank in range(mine)):
            logging.getLogger("shardwise").warning(
                f"rank {mine} has waited for {ANNOUNCE_S:g} s at {self._what}: {ranks_text(missing)} "
                f"{'has' if len(missing) == 1 else 'have'} not come there. {_FIXES.get(self._what, '')}".rstrip()
            )

    def _refuse_left(self) -> None:
        """Raise if a rank has left while its process still runs, which gloo does not detect."""
        if self._left():
            # destroying a group waits for its pending message: this one stays until the process ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            raise self._gone()

    def _left(self) -> list[int]:
        if not _is_marked(_anyone(self._group)):  # one question of each waiting rank, and not one for each rank
            return []
        without = {*_without(self._group, "left")}
        return [rank for rank in range(self._world) if rank not in without]

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Translate gloo's errors for ranks that have left or did not come into sentences."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if _GONE.search(text):
                raise self._gone() from error
            if _LATE.search(text):
                raise self._late() from error
            raise

    def _gone(self) -> AnswerIsNo | MachineError:
        where, me = self._what or "an exchange of all ranks", dist.get_rank(self._group)
        left = self._left()
        if not left:
            return RankError(f"rank {me} waits at {where}, but another rank has ended; its output shows the reason")
        fix = _FIXES.get(self._what, "End the loop on all ranks at the same step")
        have = "has" if len(left) == 1 else "have"
        return TrainingError(f"{ranks_text(left)} {have} left the session, and rank {me} waits at {where}. {fix}")

    def _late(self) -> TrainingError:
        missing, me = _without(self._group, "waits"), dist.get_rank(self._group)
        within = "the timeout of the process group" if self._limit_s is None else f"{self._limit_s:g} s"
        text = (
            f"rank {me} is at {self._what or 'an exchange of all ranks'}, and "
            f"{ranks_text(missing) if missing and me not in missing else 'another rank'} did not come there within "
            f"{within}. {_FIXES.get(self._what, 'Steps need every rank')}"
        )
        with contextlib.suppress(RuntimeError):  # ranks that did not come learn it when this rank ends
            dist.distributed_c10d._get_default_store().set(_verdict(self._group), text)
        return TrainingError(text)


@contextlib.contextmanager
def collective_of(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run a collective in which another rank may have ended.

    Raises:
        TrainingError: the reason that rank gave, unless it was waiting for this one.
        RankError: that it has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if group is None or not _GONE.search(str(error)):
            raise
        text = ""
        with contextlib.suppress(RuntimeError):
            store = dist.distributed_c10d._get_default_store()
            text = store.get(_verdict(group)).decode() if store.check([_verdict(group)]) else ""
        if text:
            raise TrainingError(text) from error
        raise RankError("a rank has ended in the middle of a step; its output shows the reason") from error


def ranks_text(ranks: list[int]) -> str:
    """Format ranks: ``rank 1``, ``ranks 1, 2``; of many the first four."""
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def announce_joined(group: dist.ProcessGroup) -> None:
    """Record that this rank joined.

    A store that outlives its world may have an older group of this name.
    """
    _mark(group, "left", there=False)


def announce_left(group: dist.ProcessGroup) -> None:
    """Record that this rank has left the session, so that waiting ranks can report it."""
    with contextlib.suppress(RuntimeError):
        dist.distributed_c10d._get_default_store().set(_anyone(group), "1")
    _mark(group, "left", there=True)


def _without(group: dist.ProcessGroup, mark: str) -> list[int]:
    everyone = range(dist.get_world_size(group))
    with contextlib.suppress(RuntimeError):  # the store may have ended with the rank that hosts it
        store = dist.distributed_c10d._get_default_store()
        return [rank for rank in everyone if not store.check([_key(group, mark, rank)])]
    return list(everyone)


@functools.cache  # a step has two of them
def _tag(what: str) -> list[int]:
    """Encode the operation's name as integers."""
    tag = what.encode()[: 8 * TAG].ljust(8 * TAG, b" ")
    return [int.from_bytes(tag[at : at + 8], "little", signed=True) for at in range(0, len(tag), 8)]


def _mark(group: dist.ProcessGroup, mark: str, *, there: bool) -> None:
    with contextlib.suppress(RuntimeError):
        store, key = dist.distributed_c10d._get_default_store(), _key(group, mark, dist.get_rank(group))
        if there:
            store.set(key, "1")
        else:
            store.delete_key(key)


def _is_marked(key: str) -> bool:
    """Return whether a key is in the store; True where the store has ended, and nobody knows."""
    with contextlib.suppress(RuntimeError):
        return bool(dist.distributed_c10d._get_default_store().check([key]))
    return True


def _anyone(group: dist.ProcessGroup) -> str:
    return f"shardwise/{group.group_name}/left"


def _verdict(group: dist.ProcessGroup) -> str:
    return f"shardwise/{group.group_name}/verdict"


def _key(group: dist.ProcessGroup, mark: str, rank: int) -> str:
    return f"shardwise/{group.group_name}/{mark}/{rank}"
