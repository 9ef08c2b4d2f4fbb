"""`RankState`: where a rank stands, in Python and in collectives; and the thread that tells it on request.

The thread answers while the main thread is stuck in a collective, which does not hold the interpreter. A rank that
is stopped, or in native code that holds it, gives no answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

_LARGEST = 1 << 18
_FRAMES, _COLLECTIVES = 40, 64
END = b"end"
_ASK = b"state"
_EXIT_CODE = 3


@dataclass(frozen=True)
class Frame:
    """Line of a stack."""

    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True)
class CollectiveCall:
    """Collective of torch's flight recorder.

    ``number`` counts those of the group on this rank; ``pending`` if it has not ended; ``peer`` for a send or
    a receive, which has a count of its own. ``members`` are the ranks of the group; empty if they are unknown.
    """

    group: str
    label: str
    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    pending: bool
    created_ns: int
    peer: bool = False
    members: tuple[int, ...] = ()

    @property
    def call(self) -> str:
        """Call as people write it: ``all_reduce(float32 [16, 4])``."""
        what = ", ".join(f"{kind.lower()} {list(size)}" for kind, size in zip(self.dtypes, self.sizes, strict=False))
        return f"{self.name}({what})"


@dataclass(frozen=True)
class RankState:
    """Answer of a rank: the main thread's stack, innermost last, and the last collectives, oldest first."""

    rank: int
    stack: tuple[Frame, ...] = ()
    collectives: tuple[CollectiveCall, ...] = field(default=())

    def to_json(self) -> str:
        """Serialise."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankState:
        """Read what `to_json` has written."""
        found = json.loads(text)
        return cls(
            rank=found["rank"],
            stack=tuple(Frame(**one) for one in found["stack"]),
            collectives=tuple(
                CollectiveCall(
                    **{
                        **one,
                        "sizes": tuple(map(tuple, one["sizes"])),
                        "dtypes": tuple(one["dtypes"]),
                        "members": tuple(one["members"]),
                    }
                )
                for one in found["collectives"]
            ),
        )


class Responder:
    """Thread of a rank that answers the monitor; it sleeps until it is asked."""

    def __init__(self, rank: int) -> None:
        self._rank, self._main = rank, threading.main_thread().ident
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address_of(os.getpid()))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
        threading.Thread(target=self._serve, name="shardwise-watch", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                message, asker = self._socket.recvfrom(64)
            except OSError:
                return
            if message == END:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(_EXIT_CODE)
            if message == _ASK and asker:
                with contextlib.suppress(OSError):
                    self._socket.sendto(self._state().to_json().encode(), asker)

    def _state(self) -> RankState:
        frame = sys._current_frames().get(self._main or 0)
        stack = [] if frame is None else traceback.extract_stack(frame)[-_FRAMES:]
        return RankState(
            rank=self._rank,
            stack=tuple(Frame(one.filename, one.lineno or 0, one.name, one.line or "") for one in stack),
            collectives=_collectives(),
        )


def address_of(pid: int) -> bytes:
    """Address of a process's `Responder`, in the abstract namespace of Linux: nothing is left on a disk."""
    return f"\0shardwise-watch-{pid}".encode()


def ask(pids: dict[int, int], limit_s: float) -> dict[int, RankState]:
    """Ask ranks (rank: process) where they stand; those that do not answer within ``limit_s`` are left out."""
    answers: dict[int, RankState] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
        mine.bind(b"")  # autobind
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LARGEST)
        waiting = 0
        for pid in pids.values():
            with contextlib.suppress(OSError):
                mine.sendto(_ASK, socket.MSG_DONTWAIT, address_of(pid))
                waiting += 1
        mine.settimeout(limit_s)
        while len(answers) < waiting:
            try:
                state = RankState.from_json(mine.recv(_LARGEST))
            except (OSError, ValueError, KeyError, TypeError):
                break
            answers[state.rank] = state
    return answers


def tell_end(pid: int) -> None:
    """Let the process end with exit code 3, if it answers."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
        mine.sendto(END, socket.MSG_DONTWAIT, address_of(pid))


def _collectives() -> tuple[CollectiveCall, ...]:
    """Last collectives of this process; empty where torch's flight recorder is off or not there."""
    library = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(library, "_dump_fr_trace_json", None)
    if dump is None:
        return ()
    try:
        found = json.loads(dump(includeCollectives=True, onlyActive=False))
        members = _members()
        return tuple(_collective(one, members) for one in found.get("entries", ())[-_COLLECTIVES:])
    except (RuntimeError, ValueError, KeyError, TypeError):
        return ()


def _members() -> dict[str, tuple[int, ...]]:
    """Ranks of each group of this process, by its name: the recorder does not know them under gloo."""
    with contextlib.suppress(Exception):  # not public; without it only ranks that have used a group count as members
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        return {name: tuple(sorted(world.pg_group_ranks[group])) for group, name in world.pg_names.items()}
    return {}


def _collective(entry: dict[str, Any], members: dict[str, tuple[int, ...]]) -> CollectiveCall:
    group, label = entry["process_group"]
    peer = entry["is_p2p"]
    ranks = members.get(group, ())
    return CollectiveCall(
        group=f"{group} of ranks {', '.join(map(str, ranks))}" if ranks else group,
        peer=peer,
        members=ranks,
        label=label,
        number=entry["p2p_seq_id"] if peer else entry["collective_seq_id"],
        name=entry["profiling_name"].partition(":")[2].partition(" ")[0] or entry["profiling_name"],
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        dtypes=tuple(entry["input_dtypes"]),
        pending=not entry["retired"],
        created_ns=entry["time_created_ns"],
    )
