"""Two hosts on one machine: network namespaces, and a link of known speed and delay between them.

The rate is that of ``tc tbf``, which counts whole Ethernet frames: `payload_share` says what is left of it for data.
The delay is one way, and comes from `tests/relay.py`, as a kernel need not have netem. Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAME = re.compile(r"^shardwise-(\d+)-\d+[ab]$")
TOOL_S = 20.0  # that one call of ip or tc may take
ENDS_S = 10.0
FIRST_PORT = 29500
TCP_HEADERS = 52  # bytes of IPv4 and of TCP with time stamps
FRAME = 14  # bytes of an Ethernet header, which tbf counts; a TUN device has none
JUMBO = 9000  # bytes of a packet through the relay, so that Python keeps up
BURST_S = (
    1e-3  # of the rate, that may pass at once: what late timers must make up for; half of it costs a third of 1 Gbit/s
)
QUEUE_BYTES = 64 << 20  # never full, so that nothing is dropped
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

_counter = itertools.count()


@cache
def why_not() -> str | None:
    """Why no such hosts can be made here; None where they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (package iproute2)"
    try:
        with two_hosts(rate="1gbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}"


def no_delay() -> str | None:
    """Why the link cannot have a delay; None where it can."""
    tun = os.access("/dev/net/tun", os.R_OK | os.W_OK)
    ping = None if shutil.which("ping") else "not installed: ping (package iputils-ping)"
    return why_not() or (ping if tun else "no /dev/net/tun for the relay")


@dataclass
class Hosts:
    """Two namespaces, their devices on the link, and what the link is like."""

    names: tuple[str, str]
    devices: tuple[str, str]
    rate: str | None
    delay_s: float
    mtu: int
    ports: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_PORT))

    @property
    def payload_share(self) -> float:
        """Data bytes of a full packet over the bytes of it that tbf counts."""
        return (self.mtu - TCP_HEADERS) / (self.mtu + (0 if self.delay_s else FRAME))

    @property
    def payload_bytes_per_s(self) -> float | None:
        """Data bytes a second, one way, that the link's rate leaves room for; None where the link has none."""
        return None if self.rate is None else bits_per_s(self.rate) / 8 * self.payload_share

    def shape(self, rate: str | None) -> None:
        """Another rate for the link, both ways; at once, whatever runs."""
        for name, device in zip(self.names, self.devices, strict=True):
            if rate is not None:
                burst = max(bits_per_s(rate) / 8 * BURST_S, 2 * (self.mtu + FRAME))
                limits = ("burst", str(int(burst)), "limit", str(QUEUE_BYTES))
                _tool("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, *limits)
            elif self.rate is not None:
                _tool("tc", "-n", name, "qdisc", "del", "dev", device, "root")
        self.rate = rate

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """``argv`` as it is run on host 0 or 1."""
        return ["ip", "netns", "exec", self.names[host], *argv]

    def environment(self, host: int, nproc_per_node: int = 1) -> dict[str, str]:
        """The environment of a process there: gloo talks over the link, ranks of both hosts share the cores."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("GLOO_")}
        env["GLOO_SOCKET_IFNAME"] = self.devices[host]
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // (2 * nproc_per_node))))
        env.setdefault("SHARDWISE_HISTORY", "off")
        return env

    def round_trip_s(self, count: int = 20) -> float:
        """The median round trip of a small packet, by ``ping``'s own clock: what the link really does."""
        argv = ["ping", "-c", str(count), "-i", "0.02", ADDRESSES[1]]
        done = subprocess.run(self.command(0, argv), capture_output=True, text=True, timeout=TOOL_S, check=True)
        times = sorted(float(value) for value in re.findall(r"time=([\d.]+) ms", done.stdout))
        return times[len(times) // 2] / 1e3

    def torchrun(
        self,
        argv: Sequence[str],
        nproc_per_node: int = 1,
        env: dict[str, str] | None = None,
        timeout_s: float = 150.0,
        cwd: Path | None = None,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run ``argv`` (such as ``["-m", "package.module", "argument"]``) as ranks on both hosts; host a has rank 0.

        Raises:
            subprocess.TimeoutExpired: they took longer; all of them have been ended.
        """
        port, processes, files = next(self.ports), [], []
        with tempfile.TemporaryDirectory() as folder:
            try:
                for host in (0, 1):
                    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}"]
                    launcher += [f"--nproc-per-node={nproc_per_node}", f"--master-addr={ADDRESSES[0]}"]
                    launcher += [f"--master-port={port}", *argv]
                    names = [Path(folder) / f"{host}.{stream}" for stream in ("out", "err")]
                    files.append(names)
                    with names[0].open("w") as out, names[1].open("w") as err:
                        processes.append(
                            subprocess.Popen(
                                self.command(host, launcher),
                                env={**self.environment(host, nproc_per_node), **(env or {})},
                                stdin=subprocess.DEVNULL,
                                stdout=out,
                                stderr=err,
                                cwd=cwd,
                            )
                        )
                self._wait(processes, timeout_s)
            except BaseException:
                self.end_all()
                for process in processes:
                    process.wait(ENDS_S)
                raise
            texts = [[name.read_text(errors="replace") for name in names] for names in files]
        return [
            subprocess.CompletedProcess(process.args, process.returncode, out, err)
            for process, (out, err) in zip(processes, texts, strict=True)
        ]

    def _wait(self, processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
        """Until all have ended. Once one has failed, the other has `ENDS_S` to notice."""
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes):
            if any(process.poll() not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + ENDS_S)
                timeout_s = min(timeout_s, ENDS_S)
                while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                    time.sleep(0.05)
                if any(process.poll() is None for process in processes):
                    self.end_all()
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(processes[0].args, timeout_s)
            time.sleep(0.05)

    def end_all(self) -> None:
        """End every process of both hosts; there are none in a namespace that were not started through here."""
        for name in self.names:
            _end(name)


@contextmanager
def two_hosts(rate: str | None = "1gbit", delay_s: float = 0.0) -> Iterator[Hosts]:
    """Two hosts, with a link of ``rate`` (as ``tc`` reads it) each way and ``delay_s`` one way. Gone at the end."""
    _sweep()
    number = next(_counter)
    names = (f"shardwise-{os.getpid()}-{number}a", f"shardwise-{os.getpid()}-{number}b")
    devices = (f"sw{os.getpid():x}n{number}a", f"sw{os.getpid():x}n{number}b")
    hosts = Hosts(names, devices, None, delay_s, mtu=JUMBO if delay_s else 1500)
    with ExitStack() as stack:
        for name in names:
            _tool("ip", "netns", "add", name)
            stack.callback(_tool, "ip", "netns", "del", name)
        stack.callback(hosts.end_all)
        if delay_s:
            stack.enter_context(_relayed(hosts))
        else:
            for name, device, other in zip(names, devices, devices[::-1], strict=True):
                if device == devices[0]:
                    _tool("ip", "-n", name, "link", "add", device, "type", "veth", "peer", "name", other)
                    _tool("ip", "-n", name, "link", "set", other, "netns", names[1])
        for name, device, address in zip(names, devices, ADDRESSES, strict=True):
            _tool("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            _tool("ip", "-n", name, "link", "set", device, "mtu", str(hosts.mtu), "txqueuelen", "10000", "up")
            _tool("ip", "-n", name, "link", "set", "lo", "up")
        hosts.shape(rate)
        yield hosts


@contextmanager
def _relayed(hosts: Hosts) -> Iterator[None]:
    """The devices of a link with delay, as long as the relay runs."""
    script = str(Path(__file__).with_name("relay.py"))
    places = [text for pair in zip(hosts.names, hosts.devices, strict=True) for text in pair]
    process = subprocess.Popen(
        [sys.executable, script, str(hosts.delay_s), *places],
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise subprocess.CalledProcessError(process.wait(ENDS_S), process.args, stderr="the relay did not start")
        yield
    finally:
        process.kill()
        process.wait(ENDS_S)
        process.stdout.close()


def bits_per_s(rate: str) -> float:
    """``tc``'s words for a rate, as a number.

    Raises:
        ValueError: it is not of the form ``100mbit``.
    """
    found = re.fullmatch(r"([\d.]+)(kbit|mbit|gbit)", rate)
    if found is None:
        raise ValueError(f"a rate is such as 100mbit or 1gbit, not '{rate}'")
    return float(found[1]) * UNITS[found[2]]


def _tool(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_S, check=True).stdout


def _end(namespace: str) -> None:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=TOOL_S)
    for pid in listed.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _sweep() -> None:
    """Remove what test processes left that were killed before they could."""
    for line in _tool("ip", "netns", "list").splitlines():
        found = NAME.match(line.split()[0]) if line.split() else None
        if found and not Path(f"/proc/{found[1]}").exists():
            _end(found[0])
            subprocess.run(["ip", "netns", "del", found[0]], capture_output=True, timeout=TOOL_S)
