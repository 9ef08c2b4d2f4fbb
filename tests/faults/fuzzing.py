"""Seeded mistakes: values, texts and bytes that people and broken tools write; and what may be answered to them."""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from shardwise.cli.main import app, print_error
from shardwise.errors import ShardwiseError

CPU_S, WALL_S = 6.0, 20.0
"""Of one case: processor time, which a busy machine changes little; and time on the clock, for what waits.

transformers copies and prints the names of 65,536 labels several times: 1.1 to 2.1 s.
"""

NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 64, 255, 1000, 65536, 10**6, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**19, 10**40, 10**4000),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -2.5, 1e-3, 1e-12, 1e-45, 5e-324, 1e11, 1e30, 1e38, 1e39, 1e308),
    *(float("inf"), float("-inf"), float("nan")),
]
WORDS = [
    *("", " ", "none", "None", "null", "auto", "true", "yes", "false", "0", "-", "x", "a/b", "..", ".", "~", "~nobody"),
    *("s3://bucket/run", "memory://x", "file:///x", "http://x/y", "gs://", "://", "python:", "python:stdlib", "C:\\x"),
    *(
        "\0",
        "a\0b",
        "\n",
        "\t",
        "a\nb=1",
        "ü",
        "日本語",
        "\u202e",
        "\ud800",
        "e\u0301",
        "😀" * 9,
        "x" * 300,
        "x" * 5000,
    ),
    *(
        "'",
        '"',
        '"a',
        "[",
        "[]",
        "[1",
        "{}",
        "{a=1}",
        "{a={b=2}}",
        "#",
        "=",
        "a=b",
        "a.b",
        ",",
        "%s",
        "{}{x}",
        "${HOME}",
    ),
    *("1979-05-27", "07:32:00", "0x10", "1_000", "1e400", "+5", "٣", "fsdp", "fsdp+tp2", "ddp+pp2+cp2", "fsdp+tp0"),
    *(
        "fsdp+tp" + "9" * 5000,
        "fsdp+" * 50,
        "hsdp+lora",
        "/dev/null",
        "/proc/self",
        "/proc/nothing/x",
        "**/" * 40 + "*",
    ),
    *("os:system", "json:loads", "torch.nn:Linear", "a b:c", "x:y:z", ":", "LlamaForCausalLM", "__class__", "model_"),
]


class Hang(BaseException):
    """A case took too long; not an `Exception`, so that nothing takes it for a mistake of its own."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise `Hang` inside where it takes more than `CPU_S` of the processor or `WALL_S` on the clock."""

    def end(number: int, _: FrameType | None) -> None:
        raise Hang(
            f"more than {CPU_S:g} s of processor time" if number == signal.SIGPROF else f"more than {WALL_S:g} s"
        )

    before = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)}
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def answer(call: Callable[[], Any]) -> str | None:
    """``None`` where ``call`` ends well or raises an error that is a message; else what is wrong with it."""
    try:
        with limited():
            call()
    except ShardwiseError as error:
        return _message_problem(error)
    except Hang as hang:
        return f"hang: {hang}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:500]
    return None


def command(words: list[str]) -> str | None:
    """Run ``shardwise WORDS`` inside this process; ``None`` where it ends with 0 to 3 and without a traceback."""
    said = io.StringIO()

    def call() -> None:
        try:
            app(words, prog_name="shardwise")
        except SystemExit as end:
            if end.code not in (0, None, 2):
                raise AssertionError(f"exit code {end.code}: {said.getvalue()[-300:]}") from None

    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        found = answer(call)
    return found or ("a traceback is shown" if "Traceback (most recent" in said.getvalue() else None)


def _message_problem(error: ShardwiseError) -> str | None:
    with contextlib.redirect_stderr(io.TextIOWrapper(io.BytesIO(), errors="backslashreplace")):
        print_error(error)
    text = str(error)
    if not text.strip() or "Traceback" in text:
        return f"{type(error).__name__} without a sentence: {text!r}"
    if error.exit_code not in (1, 2, 3):
        return f"exit code {error.exit_code}: {text}"
    if max(map(len, text.splitlines())) > 12_000:
        return f"a line of {max(map(len, text.splitlines()))} characters: {text[:200]}"
    return None


def any_value(rng: random.Random, depth: int = 0) -> Any:
    """A number, word, truth value, list or table."""
    kind = rng.randrange(10 if depth < 3 else 7)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(WORDS)
    if kind == 6:
        return rng.choice([True, False, None])
    if kind < 9:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(WORDS): any_value(rng, depth + 1) for _ in range(rng.randrange(3))}


def broken_bytes(rng: random.Random, data: bytes) -> bytes:
    """``data`` with one to three things done to it that editors, disks and people do."""
    for _ in range(rng.randint(1, 3)):
        data = _broken_once(rng, data)
    return data


def _broken_once(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    to = min(len(data), at + rng.choice([1, 1, 2, 10, 100]))
    before, hit, after = data[:at], data[at:to], data[to:]
    ways: list[Callable[[], bytes]] = [
        lambda: before,
        lambda: before + after,
        lambda: before + hit * rng.randint(2, 5) + after,
        lambda: before + rng.randbytes(len(hit)) + after,
        lambda: before + rng.choice(_PIECES) + hit + after,
        lambda: before + rng.choice(_PIECES) + after,
        lambda: rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\n", b"#"]) + data,
        lambda: data.replace(b"\n", rng.choice([b"\r\n", b"\r", b""])),
        lambda: data.decode("latin-1").encode(rng.choice(["utf-16", "utf-32", "cp500"])),
        lambda: data + data,
    ]
    return rng.choice(ways)()


_PIECES = [
    *(
        b"[" * 5000,
        b"]" * 50,
        b"{" * 3000,
        b"[[a]]\n",
        b"[a.b.c]\n",
        b"a." * 3000 + b"a = 1\n",
        b"9" * 6000,
        b"-",
        b"'''",
    ),
    *(
        b'"',
        b"'",
        b"=",
        b"\x00",
        b"\x1b[31m",
        b"\xff",
        b"\xc3",
        "ü".encode(),
        b"\\u0000",
        b"\\ud800",
        b"\\",
        b"#",
        b",",
    ),
    *(
        b"nan",
        b"inf",
        b"-inf",
        b"1e999",
        b"true",
        b"null",
        b"NaN",
        b"Infinity",
        b"1979-05-27T07:32:00Z",
        b"0x" + b"f" * 9000,
    ),
    *(b"\n[train]\n", b"\nsteps = 3\n", b'"model_type": ["a"],', b"{}", b"[]", b"\n\n\n", b"\t"),
]


def changed_json(rng: random.Random, base: dict[str, Any], keys: list[str]) -> bytes:
    """A configuration with some keys set to anything, taken out or misspelt; seldom broken as text."""
    found = dict(base)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        key = rng.choice([*base, *keys])
        turn = rng.randrange(12)
        if turn == 0:
            found.pop(key, None)
        elif turn == 1 and key in found:
            found[key[: rng.randrange(1, len(key))] + key[-1]] = found.pop(key)
        else:
            found[key] = any_value(rng)
    text = json.dumps(found, ensure_ascii=rng.random() < 0.5, default=str)
    data = text.encode("utf-8", "surrogatepass")
    return broken_bytes(rng, data) if rng.random() < 0.15 else data
