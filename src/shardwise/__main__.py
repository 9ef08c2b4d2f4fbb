"""``python -m shardwise``."""

from __future__ import annotations

import sys


def main() -> None:
    """Import and run the command line; Ctrl-C ends the import with a sentence, too."""
    try:
        from shardwise.cli.main import main as run
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
