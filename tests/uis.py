"""A real ``shardwise ui`` in a process of its own, and raw requests over real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Answer:
    """Answer of the server: status, headers by lower-case name, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


class Server:
    """A server that runs, its port and its token."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.port = urlsplit(url).port or 0
        self.token = urlsplit(url).query.removeprefix("token=")
        self.cookie = f"shardwise-ui-{self.port}={self.token}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def request(self, path: str, method: str = "GET", **headers: str | None) -> bytes:
        """A request with the right host and cookie, unless ``headers`` has others; ``None`` leaves one out."""
        given = {"host": f"127.0.0.1:{self.port}", "cookie": self.cookie, "connection": "close"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{name}: {value}" for name, value in given.items() if value is not None]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1")

    def get(self, path: str, method: str = "GET", **headers: str | None) -> Answer:
        with self.connect() as found:
            found.sendall(self.request(path, method, **headers))
            data = b""
            while chunk := found.recv(2**20):
                data += chunk
        return parsed(data)

    def keys(self) -> dict[str, str]:
        """Keys of the runs that are listed, by what is shown as their name."""
        return {name: key for key, name in re.findall(r'<a href="/runs/(\w+)">(.*?)</a>', self.get("/").text)}

    def descriptors(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def memory(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Exit code, and what is on stderr after the first lines."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=20)
        return self.process.returncode, err


def parsed(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(chunks(body))
    return Answer(int(first.split()[1]), headers, body)


def chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, rest = body.partition(b"\r\n")
        yield rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]


@contextmanager
def server(runs: Path, *words: str, before: Sequence[str] = (), cwd: Path = ROOT) -> Iterator[Server]:
    """``shardwise ui`` on a free port until the end; ``before`` is a command that starts it."""
    command = [sys.executable, "-m", "shardwise", "ui", "--runs", str(runs), "--port", "0", "--no-browser", "--json"]
    process = subprocess.Popen(
        [*before, *command, *words],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield Server(process, json.loads(line)["url"])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
