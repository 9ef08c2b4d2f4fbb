"""The site for tests: built once, served on loopback below a path, as a static host does."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import which
from typing import ClassVar

from shardwise.web import site_parts
from tests.commands import ROOT

CACHE = ROOT / "build" / "parts"
AXE = (
    "axe-core@4.14.1",
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
)


def why_no_site() -> str | None:
    """What is missing to build the site; ``None`` where all is there."""
    missing = [name for name in ("npm", "node") if which(name) is None]
    return f"needs {' and '.join(missing)} to build the site" if missing else None


def axe_script(folder: Path) -> str:
    """The source of axe-core, which finds what a screen reader cannot use."""
    site_parts.unpack_npm(site_parts.npm_package(*AXE, CACHE), ("axe.min.js",), folder)
    return (folder / "axe.min.js").read_text()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    extensions_map: ClassVar = {
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".wasm": "application/wasm",
        ".mjs": "text/javascript",
    }

    def log_message(self, *words: object) -> None:
        """Write nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of the files of a folder."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
