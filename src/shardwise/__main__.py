"""``python -m shardwise``."""

from __future__ import annotations

import atexit
import gc
import os
import sys

from shardwise.collector import no_collector

_INTERRUPTED = 130


def main() -> None:
    """Import and run the command line; Ctrl-C ends it, and the import, with a sentence and one exit status."""
    try:
        with no_collector():
            from shardwise.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
    except SystemExit as ended:
        if ended.code != _INTERRUPTED:
            raise
    else:
        return
    finally:
        if "torch" not in sys.modules:  # the interpreter's end would look for garbage: a sixth of `--help` and `plan`
            gc.freeze()
    # Not the interpreter's own end: where Ctrl-C came within an exec of source (a dataclass is made so), Python kills
    # itself with SIGINT at its end, whatever the exit status is.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
