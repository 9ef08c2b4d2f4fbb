"""`kept`: what is computed once in a test session, by whichever rank comes first, and read by all others."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

FOLDER = "SHARDWISE_TESTS_KEPT"
Value = TypeVar("Value")


def kept(key: tuple[Any, ...], compute: Callable[[], Value]) -> Value:
    """``compute()``, or what it was for the same ``key`` before, in this process or another of the session."""
    folder = os.environ.get(FOLDER)
    if folder is None:  # a script that uses tests' models
        return compute()
    file = Path(folder) / hashlib.sha256(repr(key).encode()).hexdigest()
    if not file.exists():
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # others wait instead of computing the same on the same cores
            if not file.exists():
                torch.save(compute(), file.with_suffix(".partial"))
                file.with_suffix(".partial").rename(file)
    found: Value = torch.load(file, weights_only=False)  # a file of our own
    return found
