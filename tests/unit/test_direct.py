"""Writes past the page cache: every byte arrives, wherever it begins; what cannot go there takes the usual way."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.checkpoint import shard_files as shards
from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.save_plan import SavePlan, ShardWrite
from shardwise.checkpoint.staging import Stage
from shardwise.checkpoint.storage import direct_io as direct
from shardwise.checkpoint.storage import local_storage as storage
from shardwise.checkpoint.storage.direct_io import BLOCK, LEAST, DirectWriter, aligned, is_on_disk
from shardwise.checkpoint.storage.local_storage import MIB, FileWriter

real_pwrite = os.pwrite


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a disk that can be written to past the page cache."""
    if not is_on_disk(tmp_path) or not hasattr(os, "O_DIRECT"):
        pytest.skip(f"{tmp_path} is on no block device, so nothing is written past the page cache there")
    file = tmp_path / "probe"
    handle = os.open(file, os.O_WRONLY | os.O_CREAT)
    writer = DirectWriter(file, handle)
    works = writer._works
    writer.discard()
    os.close(handle)
    if not works:
        pytest.skip(f"the file system of {tmp_path} has no writes past the page cache")
    return tmp_path


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """Bytes that went past the page cache (``True``) and through it."""
    found = {True: 0, False: 0}

    def pwrite(handle: int, data: Any, offset: int) -> int:
        done = real_pwrite(handle, data, offset)
        found[bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)] += done
        return done

    monkeypatch.setattr(os, "pwrite", pwrite)
    return found


def noise(num_bytes: int, shift: int = 0) -> np.ndarray:
    """Random bytes in memory that begins ``shift`` bytes after a block does."""
    room = aligned(num_bytes + shift)
    room[:] = np.random.default_rng(num_bytes).integers(0, 256, len(room), dtype=np.uint8)
    return room[shift:]


def pieces_of(total: int, seed: int) -> list[tuple[int, int]]:
    """Runs that cover everything, short and long ones, in random order."""
    chance, cuts, place = random.Random(seed), [], 0
    while place < total:
        length = chance.choice([1, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 5, LEAST, LEAST + BLOCK + 1, 3 * MIB + 11])
        cuts.append((place, min(total, place + length)))
        place += length
    chance.shuffle(cuts)
    return cuts


@pytest.mark.parametrize("shift", [0, 4, 512, 513])
def test_every_byte_arrives(disk: Path, written: dict[bool, int], shift: int) -> None:
    data = noise(24 * MIB + 4321, shift)
    with FileWriter(disk / "a", len(data)) as file, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda cut: file.write_at(cut[0], data[cut[0] : cut[1]].data), pieces_of(len(data), shift)))
    assert (disk / "a").read_bytes() == data.tobytes()
    assert written[True] > 15 * MIB, "the long runs went past the page cache"
    assert written[True] + written[False] == len(data)


def test_short_files_and_unknown_lengths_are_written_as_ever(disk: Path, written: dict[bool, int]) -> None:
    data = noise(2 * MIB)
    for size in (None, len(data)):
        with FileWriter(disk / f"{size}", size) as file:
            file.write_at(0, data.data)
        assert (disk / f"{size}").read_bytes() == data.tobytes()
    assert written == {True: 0, False: 2 * len(data)}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_where_the_system_refuses_the_page_cache_takes_over(
    disk: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    left = [3]  # of the writes that it takes, so that it refuses in the middle

    def pwrite(handle: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
        return real_pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = noise(40 * MIB, 1)
    with FileWriter(disk / "a", len(data)) as file:
        file.write_at(5, data[5:].data)
        file.write_at(0, data[:5].data)
    assert left[0] < 0, "it has refused"
    assert (disk / "a").read_bytes() == data.tobytes()


def test_memory_that_the_device_cannot_read_goes_through_the_buffer(
    disk: Path, written: dict[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "memory_block", lambda handle: 1)  # the device says that it takes any
    data = noise(20 * MIB, 1)
    with FileWriter(disk / "a", len(data)) as file:
        file.write_at(0, data.data)
    assert (disk / "a").read_bytes() == data.tobytes()
    assert written[True] == len(data), "the system refused it once, and then the buffer was taken"


def test_writes_that_stop_half_way_are_gone_on_with(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)

    def pwrite(handle: int, data: Any, offset: int) -> int:
        is_direct = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT
        step = BLOCK if is_direct and chance.random() < 0.8 else 1 if len(data) < MIB else 512
        return real_pwrite(handle, data[: max(step, len(data) // 2 // step * step)], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = noise(17 * MIB + 99, 3)
    with FileWriter(disk / "a", len(data)) as file:
        file.write_at(0, data.data)
    assert (disk / "a").read_bytes() == data.tobytes()


def test_a_full_disk_is_no_refusal(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(handle: int, data: Any, offset: int) -> int:
        if offset >= 8 * MIB:
            raise OSError(errno.ENOSPC, "full")
        return real_pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    before = len(os.listdir("/proc/self/fd"))
    data = noise(20 * MIB)
    with pytest.raises(OSError, match="full") as caught, FileWriter(disk / "a", len(data)) as file:
        file.write_at(0, data.data)
    assert caught.value.errno == errno.ENOSPC
    assert not (disk / "a").exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_and_network_file_systems_are_written_to_as_ever(written: dict[bool, int]) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or is_on_disk(shared):
        pytest.skip("there is no file system in memory at /dev/shm")
    file = shared / f"shardwise-test-{os.getpid()}"
    data = noise(17 * MIB, 1)
    try:
        with FileWriter(file, len(data)) as writer:
            writer.write_at(0, data.data)
        assert file.read_bytes() == data.tobytes()
    finally:
        file.unlink(missing_ok=True)
    assert written == {True: 0, False: len(data)}


def named(count: int) -> dict[str, torch.Tensor]:
    """Tensors of several widths and sizes that are no multiple of anything."""
    made = {f"w{i}": torch.randn(700 + i, 1031) for i in range(count)}
    made |= {f"half{i}": torch.randn(401 + i, 999).bfloat16() for i in range(3)}
    return made | {"step": torch.tensor(3.0), "bytes": torch.arange(77, dtype=torch.uint8)}


@pytest.mark.parametrize("where", ["live", "staged"])
def test_a_file_of_tensors(disk: Path, written: dict[bool, int], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    from safetensors.torch import load_file

    tensors = named(9)
    held: dict[str, torch.Tensor] = tensors
    expected = shards.write_file(disk / "b.safetensors", tensors)
    written[True] = 0
    if where == "staged":
        full = {
            n: ShardWrite("F32", tuple(t.shape), Box((0,) * t.dim(), tuple(t.shape)), t, t, True)
            for n, t in tensors.items()
        }
        stage = Stage()
        share = stage.begin(SavePlan(pieces=full)).finish()
        held = {name: piece.tensor for name, piece in share.pieces.items()}
        monkeypatch.setattr(direct, "aligned", refuse("a copy of what lies in the stage as in the file"))
    hashes = shards.write_file(disk / "a.safetensors", held)
    found = load_file(disk / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert hashes == expected
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert written[True] > 0.9 * sum(tensor.nbytes for tensor in tensors.values())
    assert (disk / "a.safetensors").stat().st_size >= storage.DIRECT


def refuse(what: str) -> Callable[..., Any]:
    def refused(*args: Any) -> Any:
        raise AssertionError(what)

    return refused
