"""`AbortHold`: a rank that a thread of native code is about to abort waits first, so that it can be asked why.

gloo throws in a thread of its own when more bytes arrive than a rank expects, which nobody catches: the process would
be gone at once, and its peers a moment later, before anybody has seen that they met in different collectives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

HOLD_S = 8.0
"""Time for the monitor to ask all ranks. If it ends none, the abort takes its course."""

_Handler = ctypes.CFUNCTYPE(None)


class AbortHold:
    """Handler of ``std::terminate``: it leaves the file ``rank-N.held`` in ``folder``, waits, and calls the earlier.

    A main thread that terminates is not held: what it calls raises an exception of Python's.

    Raises:
        OSError: there is no libstdc++.
        AttributeError: it has no ``std::set_terminate``.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"rank-{rank}.held"
        self._file.unlink(missing_ok=True)
        self._main, self._pid = threading.main_thread().ident, os.getpid()
        self._set = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]  # torch has loaded it
        self._set.restype, self._set.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._handler = _Handler(self._hold)  # as long as the process, which may be in it
        self._mine = ctypes.cast(self._handler, ctypes.c_void_p).value
        self._before = self._set(self._mine)

    def close(self) -> None:
        """Put the earlier handler back, unless somebody has set another one since."""
        current = self._set(self._before)
        if current != self._mine:
            self._set(current)

    def _hold(self) -> None:
        with contextlib.suppress(OSError):
            if threading.get_ident() != self._main and os.getpid() == self._pid:  # and not a worker, forked later
                self._file.touch(0o600)
                time.sleep(HOLD_S)
        if self._before:
            _Handler(self._before)()  # it prints the exception, and aborts
        os.abort()


def any_held(folder: Path) -> bool:
    """Return whether a rank is about to be aborted, and not one that has been aborted by now."""
    for file in folder.glob("rank-*.held"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime < HOLD_S:
                return True
    return False
