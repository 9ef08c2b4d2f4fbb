"""A crash, a full disk, a broken disk at every call of a save: the last good checkpoint loads, and saving goes on."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.checkpoint.format import newest
from shardwise.checkpoint.messages import gather_counts
from shardwise.errors import CheckpointError, UserError
from tests.checkpoints import save_as_many
from tests.faults.disk import (
    assert_goes_on,
    assert_good,
    assert_survived,
    die_at,
    every_call,
    fail_at,
    names_in,
    no_act,
    photograph,
    save,
)
from tests.turns import by_turns
from tests.worlds import WorldError, run_world

AT_ONCE = 2
TURNS = 3
"""Of the calls of a save, each change has so many a part: all calls have their turn under each way to fail."""


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder with one checkpoint, of step 10."""
    save(tmp_path / "earlier", 10)
    return tmp_path / "earlier"


def calls_of_a_save(earlier: Path) -> list[str]:
    folder = shutil.copytree(earlier, earlier.with_name("counted"))
    with every_call(no_act) as seen:
        save(folder, 20)
    assert_good(folder, {20}, clean=True)
    return [name for name, _ in seen]


def killed_save(folder: str, nth: int, torn: bool, async_save: bool) -> None:
    with every_call(die_at(nth, torn=torn)):
        save(Path(folder), 20, async_save=async_save)


@pytest.mark.turns(1)
def test_a_kill_at_every_call(earlier: Path) -> None:
    calls = calls_of_a_save(earlier)
    told = Counter(calls)
    assert told["pwrite"] >= 10 and told["fsync"] >= 7 and told["rename"] >= 4 and told["mkdir"] >= 1
    assert told["unlink"] >= 2 and told["rmdir"] == 1 and told["open"] >= 3
    jobs = [(n, False, n % 3 == 0) for n in range(len(calls))]
    jobs += [(n, True, n % 2 == 0) for n, name in enumerate(calls) if name == "pwrite"]
    jobs = by_turns(jobs, TURNS, "kills")
    context = multiprocessing.get_context("forkserver")
    outcomes: Counter[int] = Counter()
    for begin in range(0, len(jobs), AT_ONCE):
        started = []
        for job in jobs[begin : begin + AT_ONCE]:
            folder = shutil.copytree(earlier, earlier.with_name(f"killed-{job[0]}-{job[1]}"))
            process = context.Process(target=killed_save, args=(str(folder), *job), daemon=True)
            process.start()
            started.append((folder, process))
        for folder, process in started:
            process.join()
            assert process.exitcode == -signal.SIGKILL, folder
            outcomes[assert_survived(folder, {10, 20})] += 1
            assert_goes_on(folder)
    assert outcomes[10] > outcomes[20] >= 1


@pytest.mark.turns(1)
@pytest.mark.parametrize("async_save", [False, True], ids=["foreground", "background"])
def test_what_a_kill_would_leave_at_every_call(earlier: Path, async_save: bool) -> None:
    folder, album = shutil.copytree(earlier, earlier.with_name("run")), earlier.with_name("album")
    with every_call(photograph(folder, album, "one")):
        save(folder, 20, async_save=async_save)
    photos = sorted(album.iterdir())
    assert len(photos) > 40
    steps = []
    for photo in by_turns(photos, TURNS, f"photos {async_save}"):
        steps.append(assert_survived(photo, {10, 20}))
        assert_goes_on(photo)
    assert steps == sorted(steps), "once the new one counts it does so for good"
    assert {*steps} == {10, 20}


def photographed(root: str, async_save: bool) -> None:
    rank, folder, album = dist.get_rank(), Path(root) / "run", Path(root) / "album"
    save_as_many(async_save)
    save(folder, 10)
    dist.barrier()
    with every_call(photograph(folder, album, f"rank-{rank}")):
        save(folder, 20, async_save=async_save)


@pytest.mark.turns(1)
@pytest.mark.parametrize("async_save", [False, True], ids=["foreground", "background"])
def test_what_a_kill_of_two_ranks_would_leave(tmp_path: Path, async_save: bool) -> None:
    run_world(photographed, 2, str(tmp_path), async_save)
    photos = sorted((tmp_path / "album").iterdir())
    assert {photo.name[:6] for photo in photos} == {"rank-0", "rank-1"}
    photos = by_turns(photos, TURNS, f"photos of two {async_save}")
    steps = {assert_survived(photo, {10, 20}) for photo in photos}
    assert steps == {10, 20}
    for photo in photos[::3]:
        assert_goes_on(photo)


def killed_in_a_world(root: str, victim: int, nth: int, async_save: bool) -> None:
    folder = Path(root)
    save_as_many(async_save)
    save(folder, 10)
    dist.barrier()
    if dist.get_rank() == victim:
        with every_call(die_at(nth, torn=True)):
            save(folder, 20, async_save=async_save)
    else:
        save(folder, 20, async_save=async_save)


@pytest.mark.parametrize(
    ("victim", "nth", "async_save"), [(0, 5, True), (0, 17, False), (0, 25, True), (1, 4, False), (1, 1, True)]
)
def test_a_rank_that_is_killed(tmp_path: Path, victim: int, nth: int, async_save: bool) -> None:
    with pytest.raises(WorldError, match=rf"\[rank {victim}\] died without a traceback, exit code -9"):
        run_world(killed_in_a_world, 2, str(tmp_path), victim, nth, async_save)
    assert_survived(tmp_path, {10, 20} if victim == 0 else {10})
    assert_goes_on(tmp_path)


def test_everything_is_durable_before_what_rests_on_it(earlier: Path) -> None:
    """What a power cut leaves: a file's bytes count after its fsync, a name after that of its folder."""
    dirty: dict[str, set[str]] = {"bytes": set(), "names": set()}
    folder = earlier
    steps: list[str] = []

    def where(handle: int) -> str:
        return os.readlink(f"/proc/self/fd/{handle}")

    def inside(place: Path) -> list[str]:
        return [path for paths in dirty.values() for path in paths if path.startswith(f"{place}/")]

    def act(number: int, name: str, args: tuple) -> None:
        if name in ("pwrite", "write", "ftruncate"):
            dirty["bytes"].add(where(args[0]))
        elif name == "open":
            dirty["names"].add(str(args[0]))
        elif name in ("fsync", "fdatasync"):
            place = where(args[0])
            dirty["bytes"].discard(place)
            dirty["names"] -= {path for path in dirty["names"] if os.path.dirname(path) == place}
        elif name in ("rename", "replace"):
            old, new = Path(args[0]), Path(args[1])
            assert str(old) not in dirty["bytes"], f"{old} is renamed before its bytes are durable"
            if old.is_dir():
                assert not inside(old), f"{old} is renamed before {inside(old)} is durable"
            if new.name == "latest":
                assert not inside(folder) or inside(folder) == [str(old)], "latest names what is not durable yet"
            if old.name == "step-00000010":
                assert not inside(folder), "the old one goes before the new one is durable"
            dirty["names"].discard(str(old))
            dirty["names"].add(str(new))
            steps.append(f"{old.name} to {new.name}")
        elif name in ("unlink", "rmdir") and "lock" not in str(args[0]):
            assert not dirty["names"], "something is removed before it is durable that nobody reads it"

    with every_call(act):
        save(folder, 20)
    assert [step for step in steps if "manifest" not in step] == [
        ".tmp-step-00000020 to step-00000020",
        ".tmp-latest to latest",
        "step-00000010 to .tmp-step-00000010-old",
    ]


def check_said(error: Exception, folder: Path, code: int) -> None:
    """The file, the numbers, the fix."""
    text, why = str(error), os.strerror(code)
    if code == errno.EROFS:
        assert isinstance(error, UserError)
        assert f"cannot write checkpoints to '{folder}': {why}; choose a folder you may write to" in text
        return
    assert isinstance(error, CheckpointError)
    assert f" could not write '{folder}" in text
    assert f"': {why}; " in text
    if "/step-" in text or "/.tmp-" in text or "/latest" in text:
        assert "; the checkpoint needs 2.08 KiB and " in text
    assert "iB are free; make room or choose a folder on another disk (train.output or checkpoint.folder). " in text
    assert "Earlier checkpoints are untouched." in text


def save_with(folder: Path, nth: int | None, code: int, async_save: bool) -> Exception | str:
    """Save step 20 with one call that fails; returns what was raised, or the warning where only an old one stays."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with every_call(no_act if nth is None else fail_at(nth, code)):
                save(folder, 20, async_save=async_save)
        except (CheckpointError, UserError) as error:
            assert not told, told[0].message
            return error
    return str(told[0].message) if told else ""


@pytest.mark.turns(1)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_an_error_at_every_call(earlier: Path, code: int) -> None:
    calls = calls_of_a_save(earlier)
    outcomes: Counter[str] = Counter()
    for nth in by_turns(range(len(calls)), TURNS, errno.errorcode[code]):
        folder = shutil.copytree(earlier, earlier.with_name(f"failed-{nth}"))
        error = save_with(folder, nth, code, async_save=nth % 2 == 0)
        if isinstance(error, str):  # the folder was there already, or the checkpoint before stays a while
            assert "could not be removed" in error or calls[nth] == "mkdir"
            assert_good(folder, {20}, clean=not error)
        else:
            check_said(error, folder, code)
            committed = "is complete, too" in str(error) or "step-00000020" in names_in(folder)
            assert_good(folder, {10, 20} if committed else {10}, clean=True)
            assert names_in(folder) == ["latest", "step-00000010", *(["step-00000020"] if committed else [])]
        outcomes["warned" if isinstance(error, str) else "raised"] += 1
        if nth % 3 or isinstance(error, str):
            assert_goes_on(folder)
        else:  # the same step again
            save(folder, 20)
            assert names_in(folder) == ["latest", "step-00000020"]
            assert_good(folder, {20}, clean=True)
    assert outcomes["warned"] >= 1 and outcomes["raised"] > 25 // TURNS


def errors_of_two_ranks(root: str, async_save: bool) -> int:
    rank, failed = dist.get_rank(), 0
    save_as_many(async_save)
    save(Path(root) / "earlier", 10)
    with every_call(no_act) as seen:
        save(Path(root) / "earlier", 20)
    for victim, number in enumerate(gather_counts(len(seen))):
        for nth in by_turns(range(number), TURNS, f"rank {victim} {async_save}"):
            folder = Path(root) / f"failed-{victim}-{nth}"
            save(folder, 10)
            dist.barrier()
            error = save_with(folder, nth if rank == victim else None, errno.ENOSPC, async_save)
            texts: list[str] = [""] * 2
            dist.all_gather_object(texts, "" if isinstance(error, str) else str(error))
            assert texts[0] == texts[1]
            raised = not isinstance(error, str)
            assert not raised or f"rank {victim} " in texts[0]
            late = raised and newest(folder) == folder / "step-00000020"  # all is done but for the folder's own fsync
            assert_good(folder, {20} if late or not raised else {10}, clean=raised)
            failed += raised
            dist.barrier()
            save(folder, 30)
            assert rank or names_in(folder) == ["latest", "step-00000030"]
    return failed


@pytest.mark.turns(1)
@pytest.mark.parametrize("async_save", [False, True], ids=["foreground", "background"])
def test_an_error_at_every_call_of_two_ranks(tmp_path: Path, async_save: bool) -> None:
    one, other = run_world(errors_of_two_ranks, 2, str(tmp_path), async_save)
    assert one == other > 30 // TURNS
