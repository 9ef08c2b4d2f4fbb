"""Where a rank stood when it ended: from the stacks that it left, or from a traceback."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from shardwise.launch.rank import crash_file
from shardwise.watch.lines import telling_line

_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_COLLECTIVES = ("/torch/distributed/", "_engine_run_backward")
_SIZES_DIFFER = "Is there a distributed collective mismatch"  # of gloo's message


def take_stacks(error_file: Path, log: Path) -> str:
    """Move the stacks that a fault in native code has left beside a rank's report to its log; return them."""
    file = crash_file(error_file)
    with contextlib.suppress(OSError):
        text = file.read_text(errors="replace")
        file.unlink()
        if text:
            with open(log, "a", encoding="utf-8") as output:
                output.write(text)
        return text
    return ""


def stood_at(crash: str) -> str:
    """Line on which a rank's main thread stood when native code ended it; empty if unknown."""
    return _text(telling_line(_main_thread(crash)[::-1], lambda frame: frame[0]))


def raised_at(traceback: str) -> str:
    """Innermost line of the user's own in a traceback; empty if there is none."""
    return _text(telling_line(_FRAME.findall(traceback), lambda frame: frame[0]))


def met_another_collective(crash: str, log: str) -> bool:
    """Return whether a rank that SIGABRT ended had met other ranks in another collective, or another shape.

    gloo says so in the log. Rank 0's is the console; there a collective in which it stood makes it likely, no more.
    """
    stack = _main_thread(crash)[:8]
    return _SIZES_DIFFER in log or (not log and any(part in " ".join(one) for one in stack for part in _COLLECTIVES))


def _main_thread(crash: str) -> list[tuple[str, str, str]]:
    """Frames of the main thread, innermost first: faulthandler writes it last."""
    return _FRAME.findall(crash.split("hread 0x")[-1])


def _text(frame: tuple[str, str, str] | None) -> str:
    return "" if frame is None else "{}:{} in {}".format(*frame)
