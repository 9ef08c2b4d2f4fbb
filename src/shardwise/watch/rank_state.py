"""`RankState`: where a rank stands, in Python and in collectives; and the thread that tells it on request.

The thread answers while the main thread is stuck in a collective, which does not hold the interpreter. A rank that
is stopped, or in native code that holds it, gives no answer.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_LARGEST = 1 << 18
_FRAMES, _COLLECTIVES = 40, 64
_END, _ASK = b"end", b"state"
_SECRET_BYTES = 16
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
    """Answer of a rank: the main thread's stack, innermost last, and the last collectives, oldest first.

    ``cuda``: it computes on a GPU, whose collectives (NCCL's) are not among them.
    """

    rank: int
    stack: tuple[Frame, ...] = ()
    collectives: tuple[CollectiveCall, ...] = field(default=())
    cuda: bool = False

    @property
    def newest_ns(self) -> int:
        """When the newest collective began."""
        return max((call.created_ns for call in self.collectives), default=0)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> RankState:
        """Read what ``dataclasses.asdict`` has made of one, and JSON of that."""
        return cls(
            rank=found["rank"],
            cuda=found["cuda"],
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
    """Thread of a rank that answers the monitor; it sleeps until it is asked.

    Its address and the secret that a request must carry are in the file ``rank-N.key`` of ``folder``, for this user
    alone: every user of the machine sees addresses, and a request may end the rank.

    Raises:
        OSError: no socket, or no file.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank, self._main = rank, threading.main_thread().ident
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        name = secrets.token_hex(_SECRET_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(f"\0shardwise-{name}".encode())  # an abstract address of Linux leaves nothing on a disk
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
            file = os.open(_key_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(file, "w", encoding="ascii") as key:
                key.write(f"{name} {self._secret.hex()}")
        except OSError:
            self._socket.close()
            raise
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
            secret, request = message[:_SECRET_BYTES], message[_SECRET_BYTES:]
            if not hmac.compare_digest(secret, self._secret):
                continue
            if request == _END:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(_EXIT_CODE)
            if request == _ASK and asker:
                with contextlib.suppress(OSError):
                    self._socket.sendto(self._secret + json.dumps(asdict(self._state())).encode(), asker)

    def _state(self) -> RankState:
        frame = sys._current_frames().get(self._main or 0)
        stack = [] if frame is None else traceback.extract_stack(frame)[-_FRAMES:]
        return RankState(
            rank=self._rank,
            stack=tuple(Frame(one.filename, one.lineno or 0, one.name, one.line or "") for one in stack),
            collectives=collectives(),
            cuda="torch.cuda" in sys.modules and sys.modules["torch.cuda"].is_initialized(),
        )


def ask(folder: Path, ranks: Iterable[int], limit_s: float) -> dict[int, RankState]:
    """Ask ranks where they stand; those that do not answer within ``limit_s`` are left out."""
    answers: dict[int, RankState] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
        mine.bind(b"")  # autobind
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LARGEST)
        keys = {secret: rank for rank in ranks if (secret := _send(mine, folder, rank, _ASK)) is not None}
        deadline = time.monotonic() + limit_s
        while len(answers) < len(keys) and (left := deadline - time.monotonic()) > 0:
            mine.settimeout(left)
            try:
                answer = mine.recv(_LARGEST)
            except OSError:
                break
            if (rank := keys.get(answer[:_SECRET_BYTES])) is not None:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    answers[rank] = RankState.from_dict(json.loads(answer[_SECRET_BYTES:]))
    return answers


def tell_end(folder: Path, rank: int) -> None:
    """Let a rank's process end with exit code 3, if it answers."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
        _send(mine, folder, rank, _END)


def _send(mine: socket.socket, folder: Path, rank: int, request: bytes) -> bytes | None:
    """Send a rank a request; return its secret, which its answer begins with, or ``None`` if nobody is there."""
    try:
        name, text = _key_file(folder, rank).read_text("ascii").split()
        secret = bytes.fromhex(text)
        mine.sendto(secret + request, socket.MSG_DONTWAIT, f"\0shardwise-{name}".encode())
    except (OSError, ValueError):
        return None
    return secret


def _key_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.key"


def collectives() -> tuple[CollectiveCall, ...]:
    """Last collectives of this process; empty where torch's flight recorder is off or not there."""
    library = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(library, "_dump_fr_trace_json", None)
    if dump is None:
        return ()
    try:
        found = json.loads(dump(includeCollectives=True, onlyActive=False))
        members, background = _members(), _background()
        mine = [one for one in found.get("entries", ()) if one.get("thread_id") not in background]
        return tuple(_collective(one, members) for one in mine[-_COLLECTIVES:])
    except (RuntimeError, ValueError, KeyError, TypeError):
        return ()


def _background() -> set[str]:
    """Threads beside the one that trains, as the recorder names them: a save in the background waits for itself alone.

    A backward's threads are not Python's, and stay.
    """
    main = threading.main_thread()
    dummy = threading._DummyThread  # what Python makes of a thread that it has not started
    return {str(one.ident) for one in threading.enumerate() if one is not main and not isinstance(one, dummy)}


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
