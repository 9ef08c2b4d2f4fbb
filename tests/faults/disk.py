"""Every call that changes a disk, one by one: counted, failed, cut in half, or the last thing that a process does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.format import newest, read_manifest, saved_steps
from shardwise.checkpoint.load import load_checkpoint, rng_for
from shardwise.checkpoint.save import Saver
from shardwise.plan.plan import Plan

CALLS = ("open", "pwrite", "write", "fsync", "fdatasync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate")
ORIGINAL = {name: getattr(os, name) for name in CALLS}

Act = Callable[[int, str, tuple[Any, ...]], None]


@contextmanager
def every_call(act: Act) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """``act(number, name, arguments)`` comes before each call, from 0 on; yields the list of calls so far."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    lock = threading.RLock()  # others wait; what ``act`` itself does is not seen
    acting: list[bool] = []

    def patched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return ORIGINAL[name](*args, **kwargs)
            with lock:
                if not acting:
                    acting.append(True)
                    try:
                        seen.append((name, args))
                        act(len(seen) - 1, name, args)
                    finally:
                        acting.pop()
            return ORIGINAL[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, patched(name))
    try:
        yield seen
    finally:
        for name, original in ORIGINAL.items():
            setattr(os, name, original)


def no_act(number: int, name: str, args: tuple[Any, ...]) -> None:
    """Only count."""


def die_at(nth: int, *, torn: bool) -> Act:
    """SIGKILL before the ``nth`` call; with ``torn`` half of the bytes are written before."""

    def act(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == nth:
            if torn and name == "pwrite":
                handle, data, offset = args
                ORIGINAL["pwrite"](handle, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def fail_at(nth: int, code: int) -> Act:
    """The ``nth`` call fails, once."""

    def act(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == nth:
            raise OSError(code, os.strerror(code))

    return act


def _copy(source: str, target: str) -> None:
    """Copy a file, unless another rank has removed it since the folder was listed."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def photograph(folder: Path, album: Path, label: str) -> Act:
    """A copy of ``folder`` before each call, and with half of each write: what a kill at this moment would leave."""

    def act(number: int, name: str, args: tuple[Any, ...]) -> None:
        shutil.copytree(folder, album / f"{label}-{number:03d}-{name}", copy_function=_copy)
        if name == "pwrite":
            handle, data, offset = args
            ORIGINAL["pwrite"](handle, data[: len(data) // 2], offset)
            shutil.copytree(folder, album / f"{label}-{number:03d}-torn", copy_function=_copy)

    return act


class Small(nn.Module):
    """Two layers and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3)
        self.two = nn.Linear(3, 40)
        self.register_buffer("count", torch.tensor(0))


def made(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer whose every element is a function of its place and the step."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001 * step)
    with torch.no_grad():
        for number, tensor in enumerate((*model.parameters(), *model.buffers())):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 1000 * step + 100 * number)
        for parameter in model.parameters() if step else ():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": parameter.detach() * 2,
                "exp_avg_sq": parameter.detach() * 4,
            }
    return model, optimizer


def save(folder: Path, step: int, *, keep: int = 1, async_save: bool = False) -> Path:
    """Save what is `made` of the step, to the end."""
    model, optimizer = made(step)
    with Saver(folder, keep=keep, async_save=async_save) as saver:
        path = saver.save(
            step,
            model=model,
            optimizer=optimizer,
            plan=Plan(),
            state={"step": step},
            rng={"torch": torch.full((8,), step, dtype=torch.uint8)},
        )
        saver.wait()
        return path


def assert_whole(path: Path) -> int:
    """A checkpoint is, bit for bit, what was `made` of its step; returns the step."""
    step = read_manifest(path).step
    model, optimizer = made(0)
    load_checkpoint(path, model=model, optimizer=optimizer)
    wanted, other = made(step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), wanted.buffers(), strict=True))
    a, b = optimizer.state_dict(), other.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    assert all(torch.equal(a["state"][n][key], t) for n, s in b["state"].items() for key, t in s.items())
    rng = rng_for(path, 0)
    assert rng is not None and torch.equal(rng["torch"], torch.full((8,), step, dtype=torch.uint8))
    return step


def names_in(folder: Path) -> list[str]:
    """What is there beside the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def assert_good(folder: Path, steps: set[int], *, clean: bool = False) -> int:
    """Everything that has a checkpoint's name is whole, and the newest is one of ``steps``; returns its step."""
    for _, path in saved_steps(folder):
        assert_whole(path)
    path = newest(folder)
    assert path is not None, names_in(folder)
    step = assert_whole(path)
    assert step in steps
    if clean:
        left = [name for name in names_in(folder) if name.startswith(".")]
        assert not left, left
    return step


def assert_survived(folder: Path, steps: set[int]) -> int:
    """As `assert_good`, and ``latest`` names what is there."""
    assert (folder / (folder / "latest").read_text().strip() / "manifest.json").is_file()
    return assert_good(folder, steps)


def assert_goes_on(folder: Path, step: int = 30) -> None:
    """A following save works, and nothing of what happened before is left."""
    assert save(folder, step) == folder / f"step-{step:08d}"
    assert names_in(folder) == ["latest", f"step-{step:08d}"]
    assert (folder / "latest").read_text() == f"step-{step:08d}\n"
    assert assert_good(folder, {step}, clean=True) == step
