"""What the kernel says about a rank's process: its state, its work, and its connections."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

GONE = ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_PROC = Path("/proc")
_ESTABLISHED = "01"


@dataclass(frozen=True)
class ProcessFacts:
    """State of a process in psutil's word ("" if it is gone), and processor seconds of it and its descendants."""

    status: str
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> ProcessFacts:
        """Read them."""
        try:
            process = psutil.Process(pid)
            status = process.status()
            seconds = sum(process.cpu_times()[:2])
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    seconds += sum(child.cpu_times()[:2])
        except (psutil.Error, OSError):
            return cls("", 0.0)
        return cls(status, seconds)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or waits for its parent to take note."""
    try:
        return psutil.Process(pid).status() in GONE
    except psutil.Error:
        return True


def unanswered_peers(pid: int) -> list[str]:
    """Addresses to which a process has sent what nobody acknowledges: the kernel sends it again and again (Linux)."""
    inodes = set()
    with contextlib.suppress(OSError):
        for fd in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(fd.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    peers = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / str(pid) / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                queued, again = int(words[4].partition(":")[0], 16), int(words[6], 16)
                if words[9] in inodes and words[3] == _ESTABLISHED and queued and again:
                    peers.append(_address(words[2].partition(":")[0]))
    return sorted(set(peers))


def _address(text: str) -> str:
    """Readable address from the kernel's hexadecimal one, in words of the machine's byte order."""
    words = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    if len(words) == 16 and words[:12] == bytes(10) + b"\xff\xff":
        words = words[12:]
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
