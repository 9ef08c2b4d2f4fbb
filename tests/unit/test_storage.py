"""Files and folders of checkpoints: on a disk, in memory and on a real S3 server, the same."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import s3fs
from upath import UPath

from shardwise.checkpoint.storage import remote
from shardwise.checkpoint.storage.local_storage import (
    MIB,
    FileWriter,
    Folder,
    RangeReader,
    folder_of,
    free_bytes,
    is_local,
    remove_folder,
    rename_folder,
    sync_folder,
    write_small,
)
from shardwise.errors import CheckpointError, UserError
from tests.s3 import BUCKET, Store, serve


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with serve() as store:
        yield store


@pytest.fixture
def s3(server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty bucket, and the environment that leads to it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.forget()
    return server


@pytest.fixture(params=["disk", "file", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """The same empty folder in four places."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return folder_of(f"s3://{BUCKET}/run")
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]
        return folder_of("memory://place/run")
    place = folder_of(f"file://{tmp_path}/run" if request.param == "file" else str(tmp_path / "run"))
    assert is_local(place)
    return place


def noise(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


def names(folder: Folder) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_what_is_written_is_read(folder: Folder) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    data = noise(3 * MIB + 17)
    with FileWriter(folder / "a.bin") as file:
        file.write_at(0, data[:1000])
        file.write_at(1000, memoryview(data)[1000:MIB])
        file.write_at(MIB, bytearray(data[MIB:]))
    write_small(folder / "latest", b"old\n")
    write_small(folder / "latest", b"new\n")
    with FileWriter(folder / "empty") as file:
        pass
    assert names(folder) == ["a.bin", "empty", "latest"]
    assert (folder / "latest").read_bytes() == b"new\n" and (folder / "empty").read_bytes() == b""
    with RangeReader(folder / "a.bin") as reader:
        assert reader.size == len(data) == (folder / "a.bin").stat().st_size
        assert reader.read(0, len(data)) == data
        buffer = bytearray(MIB)
        reader.read_into(2 * MIB, buffer)
        assert buffer == data[2 * MIB : 3 * MIB]
        assert reader.read(len(data), 0) == b"" and reader.read(5, 0) == b""
        for begin, length in ((0, len(data) + 1), (len(data), 1), (len(data) + 5, 1), (0, 1 << 60)):
            with pytest.raises(EOFError, match=f"ends at byte {len(data)}, {begin + length} are needed"):
                reader.read(begin, length)
        with pytest.raises(EOFError, match=f"ends at byte {len(data)}, {len(data) + 3} are needed"):
            reader.read_into(len(data) - 5, bytearray(8))


def test_many_threads_read_one_file(folder: Folder) -> None:
    folder.mkdir(parents=True)
    data = noise(5 * MIB)
    with FileWriter(folder / "a.bin") as file:
        file.write_at(0, data)
    rng = random.Random(1)
    places = [(rng.randrange(len(data)), rng.choice([1, 8, 900, 70_000, 2 * MIB])) for _ in range(60)]
    places += [(begin, 4096) for begin in range(0, 400_000, 4096)]  # one after the other
    wanted = [(begin, min(length, len(data) - begin)) for begin, length in places]
    with RangeReader(folder / "a.bin") as reader, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda place: reader.read(*place), wanted))
    assert all(held == data[begin : begin + length] for held, (begin, length) in zip(found, wanted, strict=True))


def test_a_file_that_is_discarded_leaves_nothing(folder: Folder) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_small(folder / "other", b"stays")
    with pytest.raises(ZeroDivisionError), FileWriter(folder / "a.bin") as file:
        file.write_at(0, bytes(100))
        raise ZeroDivisionError
    file.discard()  # once more does no harm
    assert names(folder) == ["other"]


def test_a_folder_is_removed_with_all_that_is_in_it(folder: Folder) -> None:
    for name in ("step-1", "step-10"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            write_small(folder / name / f"{number}", b"x")
    assert (folder / "step-1").is_dir() and not (folder / "step-1").is_file()
    remove_folder(folder / "step-1")
    assert not (folder / "step-1").exists() and names(folder / "step-10") == ["0", "1", "2"]
    with pytest.raises(FileNotFoundError):
        remove_folder(folder / "step-1")


def test_what_is_not_there(folder: Folder) -> None:
    missing = folder / "nothing"
    assert not missing.exists() and not missing.is_file() and not missing.is_dir()
    for do in (lambda: RangeReader(missing), missing.read_bytes, missing.stat):
        with pytest.raises(FileNotFoundError) as found:
            do()
        assert found.value.errno == errno.ENOENT and found.value.strerror == "No such file or directory"
        assert "nothing" in str(found.value.filename)


# on a disk: what makes bytes durable, in which order


def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was synced and renamed, as it happened; a folder ends with a slash."""
    seen: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        seen.append(f"sync {Path(path).name}{'/' if stat.S_ISDIR(os.fstat(handle).st_mode) else ''}")
        real_sync(handle)

    def rename(old: Path, new: Path) -> None:
        seen.append(f"rename {old.name} {new.name}")
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files come from /proc")
def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = traced(monkeypatch)
    write_small(tmp_path / "latest", b"x")
    assert seen == ["sync .tmp-latest", "rename .tmp-latest latest", f"sync {tmp_path.name}/"]
    seen.clear()
    (tmp_path / "old").mkdir()
    rename_folder(tmp_path / "old", tmp_path / "new")
    assert seen == ["rename old new", f"sync {tmp_path.name}/"]
    seen.clear()
    with FileWriter(tmp_path / "a") as file:
        file.write_at(0, b"x")
        assert seen == []
    assert seen == ["sync a"]


def test_a_sync_that_fails_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small(tmp_path / "latest", b"old")

    def sync(handle: int) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "fsync", sync)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="broken disk"):
        write_small(tmp_path / "latest", b"new")
    with pytest.raises(OSError, match="broken disk"), FileWriter(tmp_path / "a"):
        pass
    with pytest.raises(OSError, match="broken disk"):
        sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before, "files are still open"
    assert names(tmp_path) == ["latest"] and (tmp_path / "latest").read_bytes() == b"old"


def test_a_file_system_that_cannot_sync_folders_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def sync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(handle)

    monkeypatch.setattr(os, "fsync", sync)
    write_small(tmp_path / "latest", b"x")
    assert (tmp_path / "latest").read_bytes() == b"x"


def test_a_disk_file_is_written_by_many_threads(tmp_path: Path) -> None:
    data = noise(4 * MIB)
    with FileWriter(tmp_path / "a") as file, ThreadPoolExecutor(8) as pool:
        assert file.parallel
        list(pool.map(lambda at: file.write_at(at, data[at : at + 70_001]), range(0, len(data), 70_001)))
    assert (tmp_path / "a").read_bytes() == data


def test_free_bytes(tmp_path: Path) -> None:
    assert (free_bytes(tmp_path) or 0) > 0
    assert free_bytes(tmp_path / "no") is None and free_bytes(folder_of("memory://x/y")) is None


# on a server


def test_a_large_file_goes_up_in_equal_parts(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    part = 5 * MIB + 3
    monkeypatch.setattr(remote, "PART", part)
    data = noise(3 * part + 100)
    folder = folder_of(f"s3://{BUCKET}/run")
    with FileWriter(folder / "a.bin", size=len(data)) as file:
        assert not file.parallel
        for begin in range(0, len(data), 999_983):
            file.write_at(begin, data[begin : begin + 999_983])
        with pytest.raises(ValueError, match="written in order"):
            file.write_at(5, b"x")
        assert not (folder / "a.bin").exists()
    puts = [line for line in s3.requests if line.startswith("PUT")]
    assert sorted(line.split("partNumber=")[1].split("&")[0] for line in puts) == ["1", "2", "3", "4"]
    client = s3.client()
    parts = [client.head_object(Bucket=BUCKET, Key="run/a.bin", PartNumber=n)["ContentLength"] for n in (1, 2, 3, 4)]
    assert parts == [part, part, part, 100], "some servers (R2) take equal parts only"
    assert (folder / "a.bin").read_bytes() == data


def test_parts_grow_with_the_file() -> None:
    sizes = []
    for size in (None, 10, 9000 * 32 * MIB, 2 << 40, 5 << 40):
        upload = remote.start_upload(UploadTarget(), size)  # type: ignore[arg-type]
        sizes.append(upload.part // MIB)  # type: ignore[attr-defined]
        assert size is None or -(-size // upload.part) <= 10_000  # type: ignore[attr-defined]
    assert sizes == [64, 32, 32, 234, 583]


class UploadTarget:
    """As much of a path as an upload looks at before it sends anything."""

    path = "bucket/key"

    class fs:
        call_s3 = None

        @staticmethod
        def split_path(path: str) -> tuple[str, str, None]:
            return "bucket", path, None


def test_an_upload_that_is_broken_off_leaves_nothing(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART", 5 * MIB)
    folder = folder_of(f"s3://{BUCKET}/run")
    write_small(folder / "a.bin", b"from before")
    with pytest.raises(ZeroDivisionError), FileWriter(folder / "a.bin", size=12 * MIB) as file:
        file.write_at(0, bytes(12 * MIB))
        assert s3.uploads() == ["run/a.bin"]
        raise ZeroDivisionError
    assert s3.uploads() == [] and (folder / "a.bin").read_bytes() == b"from before"


def test_a_part_that_does_not_arrive_is_an_error(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART", 5 * MIB)
    folder = folder_of(f"s3://{BUCKET}/run")
    file = FileWriter(folder / "a.bin", size=12 * MIB)
    file.write_at(0, bytes(6 * MIB))
    with s3.refusing(), pytest.raises(UserError, match=r"run/a\.bin.*(access denied|credentials)"):
        file.write_at(6 * MIB, bytes(60 * MIB))
        file.close()
    file.discard()
    assert not (folder / "a.bin").exists() and s3.uploads() == []


def test_few_requests(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(f"s3://{BUCKET}/run")
    data = noise(40 * MIB)
    with FileWriter(folder / "a.bin") as file:
        file.write_at(0, data)
    s3.requests.clear()
    with RangeReader(folder / "a.bin") as reader:
        reader.read(0, 8)
        reader.read(8, 200_000)
        reader.read(200_008, 20)
        assert s3.requests == ["HEAD /checkpoints/run/a.bin", "GET /checkpoints/run/a.bin"], "a header"
        s3.requests.clear()
        reader.read(MIB, 30 * MIB)
        assert len(s3.requests) == 1, "a large tensor"
        s3.requests.clear()
        for number in range(1000):
            begin = 33 * MIB + number * 2064
            assert reader.read(begin, 2048) == data[begin : begin + 2048]
        assert len(s3.requests) <= 2, "a thousand small tensors that follow each other"
        s3.requests.clear()
        asked = []
        monkeypatch.setattr(reader, "_ask", lambda begin, length: asked.append(length) or bytes(length))
        for number in range(20):
            reader.read((7 * number % 20) * MIB + 5 * MIB, 100)
        assert asked == [100] * 20, "and small ones here and there: nothing is read that nobody wants"


def test_what_another_process_writes_is_seen(s3: Store) -> None:
    folder = folder_of(f"s3://{BUCKET}/run")
    write_small(folder / "one", b"1")
    assert names(folder) == ["one"] and not (folder / "two").is_file()
    client = s3.client()
    client.put_object(Bucket=BUCKET, Key="run/two", Body=b"22")
    assert names(folder) == ["one", "two"] and (folder / "two").is_file()
    client.put_object(Bucket=BUCKET, Key="run/two", Body=b"333")
    assert (folder / "two").stat().st_size == 3 and (folder / "two").read_bytes() == b"333"
    client.delete_object(Bucket=BUCKET, Key="run/two")
    assert names(folder) == ["one"] and not (folder / "two").exists()
    client.delete_object(Bucket=BUCKET, Key="run/one")
    assert not folder.is_dir() and not folder.exists()


def test_paths_made_of_a_strict_one_are_strict(s3: Store) -> None:
    folder = folder_of(f"s3://{BUCKET}/run")
    write_small(folder / "a" / "b", b"1")
    made = [folder / "a", folder.parent, folder.joinpath("a", "b"), (folder / "a").with_name("c"), *folder.iterdir()]
    made += [folder_of(UPath(f"s3://{BUCKET}/run")), folder_of(folder)]
    assert all(type(path.fs) is remote.StrictFiles for path in made)
    seen = []
    thread = threading.Thread(target=lambda: seen.append((folder / "x").fs))
    thread.start()
    thread.join()
    assert seen == [folder.fs], "one connection for all threads"


def test_no_bucket(s3: Store) -> None:
    folder = folder_of("s3://no-such-bucket/run")
    calls = [
        folder.is_dir,
        (folder / "x").is_file,
        (folder / "x").exists,
        (folder / "x").stat,
        (folder / "x").read_bytes,
        lambda: folder.mkdir(parents=True, exist_ok=True),
        lambda: write_small(folder / "x", b""),
        lambda: RangeReader(folder / "x"),
    ]
    for call in calls:
        with pytest.raises(UserError, match=r"'s3://no-such-bucket.*there is no such bucket; make it first"):
            call()
    with pytest.raises(UserError, match="no such bucket"), FileWriter(folder / "x") as file:
        file.write_at(0, b"1")
    assert [bucket["Name"] for bucket in s3.client().list_buckets()["Buckets"]] == [BUCKET], "and none was made"


def test_no_credentials(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    folder = folder_of(f"s3://{BUCKET}/run")
    for call in (folder.is_dir, (folder / "x").is_file, (folder / "x").read_bytes, folder.mkdir):
        with pytest.raises(UserError, match=f"'s3://{BUCKET}.*no valid credentials.*AWS_ACCESS_KEY_ID"):
            call()


def test_access_denied(s3: Store) -> None:
    folder = folder_of(f"s3://{BUCKET}/run")
    write_small(folder / "x", b"1")
    with RangeReader(folder / "x") as reader:
        calls = [
            (folder / "x").is_file,
            folder.is_dir,
            lambda: list(folder.iterdir()),
            lambda: write_small(folder / "x", b"2"),
            lambda: reader.read(0, 1),
            lambda: remove_folder(folder),
        ]
        with s3.refusing():
            for call in calls:
                with pytest.raises(UserError, match=f"'s3://{BUCKET}/run.*(access denied|no valid credentials)"):
                    call()
            folder.mkdir(parents=True, exist_ok=True)  # who may write but not look at buckets can go on


def test_a_server_that_is_not_there(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    folder = folder_of(f"s3://{BUCKET}/run")
    with pytest.raises(CheckpointError, match=rf"'s3://{BUCKET}/run/x': the server does not answer .*AWS_ENDPOINT_URL"):
        (folder / "x").is_file()


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("nonsense://x/y", "'nonsense://x/y': .*nonsense.*; give a path, or a URL that fsspec supports"),
        ("s3://", "'s3://' names no bucket; give a path"),
        ("s3:///run", "'s3:///run' names no bucket"),
    ],
)
def test_urls_that_cannot_be(place: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        folder_of(place)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match="'gs://' needs a package that is not installed; pip install gcsfs"):
        folder_of("gs://bucket/run")


def test_defects_stay_what_they_are() -> None:
    for error in (TypeError("x"), KeyError("x"), UserError("x")):
        assert remote.plain_error(error, "s3://b/x") is error


def test_a_server_that_sends_more_than_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("memory://long/run")
    write_small(folder / "a", bytes(100))
    monkeypatch.setattr(folder.fs.files, "cat_file", lambda path, start, end: bytes(100))
    with RangeReader(folder / "a") as reader, pytest.raises(OSError, match="100 bytes came where 5 were asked for"):
        reader._read_some(3, memoryview(bytearray(5)))


def test_nothing_of_the_store_is_imported_for_a_disk(tmp_path: Path) -> None:
    code = "import sys; from shardwise.checkpoint.storage import local_storage as s\n"
    code += "s.write_small(s.folder_of(sys.argv[1]), b'x'); "
    code += "print({'upath', 'fsspec', 's3fs', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, f"file://{tmp_path}/a"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "set()", done.stderr
