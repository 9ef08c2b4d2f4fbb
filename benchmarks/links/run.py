"""``bench comm`` against links of known speed and delay: two network namespaces, `tc tbf`, and a relay for delay.

    python -m benchmarks.links.run --output benchmarks/links/results

For each link: what it was made to be, what ``ping`` and a plain TCP stream see of it, and what ``bench comm`` found. Of
the rate, data gets the share that headers leave (`tests.netns.Hosts.payload_share`). Needs root and a machine with
nothing else to do; the load average before and after each link is kept beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.netns import ADDRESSES, Hosts, no_delay, two_hosts, why_not

ROOT = Path(__file__).parents[2]
LINKS: dict[str, tuple[str, float, str]] = {  # rate, delay one way, largest message
    "1gbit": ("1gbit", 0.0, "32MiB"),
    "100mbit": ("100mbit", 0.0, "8MiB"),
    "1gbit-5ms": ("1gbit", 0.005, "16MiB"),
    "100mbit-5ms": ("100mbit", 0.005, "8MiB"),
    "100mbit-20ms": ("100mbit", 0.020, "8MiB"),
}
PORT = 5201
STREAM_S = 3.0
TIMEOUT_S = 900.0
RECEIVE = f"""
import socket, time
waiting, _ = socket.create_server(("{ADDRESSES[0]}", {PORT})).accept()
count, started = len(waiting.recv(1)), time.perf_counter()
while part := waiting.recv(1 << 20):
    count += len(part)
print(count / (time.perf_counter() - started))
"""
SEND = f"""
import socket, sys, time
while True:
    try:
        out = socket.create_connection(("{ADDRESSES[0]}", {PORT}))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
out.sendall(bytes(int(sys.argv[1])))
"""


def main() -> None:
    """Measure every link, print a line each, write all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--seconds", type=float, default=20.0, help="for each collective")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    words = parser.parse_args()
    problem = why_not()
    if problem:
        raise SystemExit(f"no shaped link here: {problem}")
    words.output.mkdir(parents=True, exist_ok=True)
    for name in words.links:
        rate, delay_s, largest = LINKS[name]
        if delay_s and no_delay():
            raise SystemExit(f"no delay here: {no_delay()}")
        rows = [one_row(name, rate, delay_s, largest, words.seconds) for _ in range(words.repeats)]
        (words.output / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


def one_row(name: str, rate: str, delay_s: float, largest: str, seconds: float) -> dict[str, Any]:
    """One link, made anew: what it is, and what ``bench comm`` says."""
    with two_hosts(rate, delay_s) as hosts, tempfile.TemporaryDirectory() as folder:
        payload = hosts.payload_bytes_per_s or 0.0
        row: dict[str, Any] = {
            "link": name,
            "rate": rate,
            "delay_s": delay_s,
            "payload_bytes_per_s": payload,
            "one_way_s": hosts.round_trip_s(50) / 2,
            "stream_bytes_per_s": stream(hosts, int(payload * STREAM_S)),
            "load_before": os.getloadavg()[0],
        }
        argv = ["-m", "shardwise", "bench", "comm", "--device", "cpu", "--max-size", largest, "--json"]
        argv += ["--seconds", str(seconds), "--output", folder]
        ranks = hosts.torchrun(argv, timeout_s=TIMEOUT_S, cwd=ROOT)
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"bench comm failed:\n{ranks[0].stderr}\n{ranks[1].stderr}")
        found = json.loads(ranks[0].stdout.splitlines()[-1])
        kept = {key: value for key, value in found.items() if not key.endswith("_file")}
        row |= {"load_after": os.getloadavg()[0], "found": kept}
    print(line(row), flush=True)
    return row


def stream(hosts: Hosts, count: int) -> float:
    """Bytes a second of one TCP stream over the link, with nothing of torch."""
    receiver = subprocess.Popen(hosts.command(0, [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE, text=True)
    subprocess.run(hosts.command(1, [sys.executable, "-c", SEND, str(count)]), check=True, timeout=TIMEOUT_S)
    return float(receiver.communicate(timeout=TIMEOUT_S)[0])


def line(row: dict[str, Any]) -> str:
    """The link and each collective's figures over the truth."""
    found = {item["collective"]: item for item in row["found"]["measured"]}
    payload, delay_s = row["payload_bytes_per_s"], row["delay_s"]
    parts = [f"{row['link']}: TCP stream {row['stream_bytes_per_s'] / payload:.3f} of what the rate leaves for data"]
    for name, item in found.items():
        bus, latency = item["bus_bytes_per_s"], item["latency_s"]
        share = "unknown" if bus is None else f"{bus / payload:.3f}"
        delays = "unknown" if latency is None else f"{latency * 1e3:.3g} ms"
        parts.append(
            f"{name} {share}, {delays}" + (f" = {latency / delay_s:.2f} × delay" if latency and delay_s else "")
        )
    return "; ".join(parts) + f" (load {row['load_before']:.1f})"


if __name__ == "__main__":
    main()
