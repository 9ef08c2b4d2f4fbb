"""Leaving a world: threads that still need the interpreter are waited for, within a bound."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.distributed import process_group as group


def _works(seconds: float) -> threading.Thread:
    """A thread that runs outside of the interpreter, as a thread of PyTorch does."""
    block = bytes(1 << 24)
    end = time.monotonic() + seconds

    def hashes() -> None:
        while time.monotonic() < end:
            hashlib.sha256(block)

    thread = threading.Thread(target=hashes)
    thread.start()
    return thread


def _seconds(call: Callable[[], None]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux tells the state of a thread")
def test_a_thread_at_work_is_waited_for() -> None:
    thread = _works(0.6)
    spent = _seconds(group._drain_gloo_threads)
    thread.join()
    assert spent > 0.4


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux tells the state of a thread")
def test_but_not_for_ever() -> None:
    thread = _works(1.0)
    spent = _seconds(lambda: group._drain_gloo_threads(limit_s=0.2))
    assert thread.is_alive()
    thread.join()
    assert spent < 0.9
