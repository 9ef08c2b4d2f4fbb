"""Size of the site, and what a reader waits for: the first answer, and an answer while a slider moves.

``make site``, then from the repository ``python benchmarks/site/site_speed.py [CASE ...] --write``: headless Chromium,
the site served on loopback by a server that compresses as static hosts do, an empty cache for each first load. Cases:

- ``first``: from the navigation to the complete answer
- ``slider``: from the event of a slider (samples, tokens per sample, GPUs) to the first new answer, and to the complete
  one; with ``--before SITE`` the same of another build, in turns
- ``slow-cpu``: both, while Chromium has a quarter of the CPUs (by cgroup: DevTools slows the page, not its workers)
- ``slow-network``: the first load at 10 Mbit/s and 40 ms, which the server keeps to (DevTools' limits spare workers)
"""

from __future__ import annotations

import argparse
import gzip
import http.server
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlencode

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.pages import Browser, browser  # noqa: E402

USUAL = {"model": "llama-3.1-8b", "cluster": "8xA100-SXM-80GB", "seq-len": "4096", "global-batch": "64"}
MEGABIT, LATENCY_S, CHUNK = 1e6 / 8, 0.04, 2**15
# powers of two that each slider moves to, none of them twice: an answer that is known takes no time
MOVES = {"global_batch": [7, 8, 9, 10, 5, 4, 3, 11, 12, 13], "seq_len": [13, 11, 10, 14, 9], "devices": [4, 5, 2, 6, 1]}
SLIDER = """
const done = arguments[arguments.length - 1], slider = document.getElementById(arguments[1] + "-slider");
const body = document.body, quick = body.dataset.quick, full = body.dataset.answered, found = {};
slider.value = arguments[0];
const began = performance.now();
const watch = new MutationObserver(() => {
  const now = (performance.now() - began) / 1000, complete = body.dataset.answered !== full;
  if (complete || body.dataset.quick !== quick) found.quick ??= now;
  if (complete) { watch.disconnect(); done({ ...found, full: now }); }
});
watch.observe(body, { attributes: true });
slider.dispatchEvent(new Event("input"));
"""


class _Host(http.server.SimpleHTTPRequestHandler):
    """A static host: gzip, which it keeps, and the types of WebAssembly and modules."""

    protocol_version = "HTTP/1.1"
    packed: ClassVar[dict[str, bytes]] = {}
    sent: ClassVar[list[tuple[str, int]]] = []
    bytes_per_s: ClassVar[float | None] = None
    line: ClassVar = threading.Lock()
    extensions_map: ClassVar = {
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".wasm": "application/wasm",
        ".mjs": "text/javascript",
    }

    def do_GET(self) -> None:
        path = self.translate_path(self.path)
        if not os.path.isfile(path):
            self.send_error(404)
            return
        if path not in self.packed:
            self.packed[path] = gzip.compress(Path(path).read_bytes(), 6)
        data = self.packed[path]
        self.sent.append((os.path.basename(path), len(data)))
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Last-Modified", self.date_time_string(int(os.path.getmtime(path))))  # or nothing is cached
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.pace(data)

    def pace(self, data: bytes) -> None:
        """Send a body, all connections together no faster than the limit."""
        if self.bytes_per_s is None:
            self.wfile.write(data)
            return
        time.sleep(LATENCY_S)
        for start in range(0, len(data), CHUNK):
            with self.line:
                time.sleep(len(data[start : start + CHUNK]) / self.bytes_per_s)
            self.wfile.write(data[start : start + CHUNK])

    def log_message(self, *words: object) -> None:
        """Write nothing."""


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *words: object) -> None:
        """Write nothing: a browser that ends drops its connections."""


@contextmanager
def host(site: Path) -> Iterator[str]:
    """Address of the site."""
    server = _Server(("127.0.0.1", 0), partial(_Host, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def until_answered(chromium: Browser, words: dict[str, str], limit_s: float = 120) -> None:
    """Wait for the complete answer to a question."""
    end = time.monotonic() + limit_s
    while not chromium.run("return globalThis.shardwise?.isShown(arguments[0]) ?? false", urlencode(words)):
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {limit_s} s: {words}")
        time.sleep(0.01)


def first_answer(address: str) -> dict[str, Any]:
    """Seconds from the navigation to the answer, in a browser of its own, whose cache is empty."""
    _Host.sent.clear()
    with browser() as chromium:
        began = time.monotonic()
        chromium.driver.get(f"{address}/index.html#{urlencode(USUAL)}")
        until_answered(chromium, USUAL)
        seconds = time.monotonic() - began
    return {"seconds": seconds, "bytes": sum(size for _, size in _Host.sent), "load": os.getloadavg()[0]}


def moves(addresses: list[str], number: int, slider: str = "global_batch") -> list[list[dict[str, Any]]]:
    """Seconds of the answers to a slider's moves, each to a question that was not asked before.

    Each move is made in a browser for each address, one after the other.
    """
    found: list[list[dict[str, Any]]] = [[] for _ in addresses]
    with ExitStack() as stack:
        open_here = [stack.enter_context(browser()) for _ in addresses]
        for chromium, address in zip(open_here, addresses, strict=True):
            chromium.driver.set_script_timeout(120)
            chromium.driver.get(f"{address}/index.html#{urlencode(USUAL)}")
            until_answered(chromium, USUAL)
            chromium.wait("return document.body.dataset.fast === 'ready'")
        for power in MOVES[slider][:number]:
            for chromium, samples in zip(open_here, found, strict=True):
                time.sleep(1.5)  # a reader looks at the answer
                seconds = chromium.driver.execute_async_script(SLIDER, power, slider)
                samples.append({**seconds, "load": os.getloadavg()[0]})
    return found


@contextmanager
def quarter() -> Iterator[None]:
    """This process and what it starts at a quarter of its CPUs, by a quota of the kernel."""
    cpus, period = os.cpu_count() or 1, 20_000  # short: a long one stops everything for long
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    base = Path("/sys/fs/cgroup") if v2 else Path("/sys/fs/cgroup/cpu")
    group = base / f"site-speed-{os.getpid()}"
    group.mkdir()
    if v2:
        (group / "cpu.max").write_text(f"{period * cpus // 4} {period}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(period))
        (group / "cpu.cfs_quota_us").write_text(str(period * cpus // 4))
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (base / "cgroup.procs").write_text(str(os.getpid()))
        time.sleep(1)
        group.rmdir()


def sizes(site: Path) -> dict[str, Any]:
    """Bytes of the site's parts, as they are and gzipped, and of the largest files."""
    files = [path for path in site.rglob("*") if path.is_file()]
    parts: dict[str, list[Path]] = {"engine": [], "docs": [], "page": []}
    for path in files:
        part = path.relative_to(site).parts[0]
        parts[part if part in parts else "page"].append(path)
    packed = {name: sum(len(gzip.compress(p.read_bytes(), 6)) for p in found) for name, found in parts.items()}
    plain = {name: sum(p.stat().st_size for p in found) for name, found in parts.items()}
    return {name: {"files": len(parts[name]), "bytes": plain[name], "gzipped": packed[name]} for name in parts}


def measure(cases: list[str], site: Path, number: int, before: Path | None = None) -> dict[str, Any]:
    """Run the cases, and return their samples."""
    samples: dict[str, Any] = {"sizes": sizes(site)}
    with host(site) as address:
        first_answer(address)  # the server compresses, the system reads Chromium
        if "first" in cases:
            samples["first"] = [first_answer(address) for _ in range(number)]
        if "slider" in cases:
            with host(before or site) as other:
                for name in MOVES:
                    names = [f"slider {name}", *([f"slider {name} before"] if before else [])]
                    samples |= zip(names, moves([address, other][: len(names)], number, name), strict=True)
        if "slow-cpu" in cases:
            with quarter():
                samples["slow-cpu first"] = [first_answer(address) for _ in range(max(3, number // 2))]
                samples["slow-cpu slider"] = moves([address], 5)[0]
        if "slow-network" in cases:
            _Host.bytes_per_s = 10 * MEGABIT
            samples["slow-network first"] = [first_answer(address) for _ in range(max(3, number // 2))]
    return samples


def summary(samples: dict[str, Any]) -> list[str]:
    """Lines: medians, fastest and slowest."""
    lines = []
    for name, found in samples.items():
        for key in ("seconds", "quick", "full"):
            values = [one[key] for one in found if key in one] if isinstance(found, list) else []
            if values:
                low, middle, high = min(values), statistics.median(values), max(values)
                lines.append(f"{name} {key}: median {middle:.2f} s, {low:.2f} to {high:.2f} s, {len(values)} samples")
    return lines


def main() -> None:
    """Measure, print the medians, and keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["first", "slider", "slow-cpu", "slow-network"])
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--before", type=Path, help="another build of the site, whose sliders move in turns with these")
    parser.add_argument("--number", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="keep the samples beside this file")
    words = parser.parse_args()
    samples = measure(words.cases, words.site, words.number, words.before)
    print(json.dumps(samples["sizes"], indent=1), *summary(samples), sep="\n")
    if words.write:
        kept = HERE / f"site_speed_{date.today()}.json"
        before = json.loads(kept.read_text()) if kept.is_file() else {}
        facts = {"cpus": os.cpu_count(), "chromium": _version()}
        kept.write_text(json.dumps({**before, **samples, "machine": facts}, indent=1) + "\n")


def _version() -> str:
    with browser() as chromium:
        return str(chromium.driver.capabilities["browserVersion"])


if __name__ == "__main__":
    main()
