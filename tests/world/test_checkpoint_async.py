"""Saving in the background: the state of the moment of the save, whatever the training and the other ranks do."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint import commit as commit_module
from shardwise.checkpoint import save as save_module
from shardwise.checkpoint import staging as stage_module
from shardwise.checkpoint.commit import FolderLock
from shardwise.checkpoint.format import newest, read_manifest
from shardwise.checkpoint.layout import engine_of
from shardwise.checkpoint.load import load_checkpoint, rng_for
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage import local_storage as storage_module
from shardwise.errors import CheckpointError, UserError
from shardwise.run.job import Job, prepare_job
from shardwise.run.rank_main import run_job
from shardwise.run.start import start
from shardwise.train.config import read_config
from tests.cli import configs
from tests.world.test_checkpoint_matrix import here, plan_for
from tests.worlds import run_world

SOON_S = 0.05  # for another thread to get to where it waits
STUCK_S = 20.0


class Moody(nn.Module):
    """Batch norm and dropout: a forward changes buffers and the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.last = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.dropout(self.norm(self.first(x)), 0.5, True))


def prepared(strategy: str):
    torch.manual_seed(3)
    model = Moody()
    session = start(plan_for(strategy, exchange_world()), device="cpu", receipts=False)
    session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return session


def exchange_world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def forward(session) -> None:
    session.applied.outer(torch.randn(8, 6)).square().mean().backward()


def state_of(session) -> dict:
    """A copy of everything that a checkpoint holds of this rank, and of the hyperparameters."""
    names = {id(p): name for name, p in session.module.named_parameters()}
    found = {**dict(session.module.named_parameters()), **dict(session.module.named_buffers())}
    for p, state in engine_of(session.optimizer).state.items():
        found |= {f"{names[id(p)]}/{key}": value for key, value in state.items()}
    held = {name: here(tensor).clone() for name, tensor in found.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in session.optimizer.param_groups]
    return held | {"groups": groups, "rng": torch.get_rng_state()}


def same(a: dict, b: dict) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)


def save(saver: Saver, number: int, session) -> Path:
    return saver.save(
        number,
        model=session.module,
        optimizer=session.optimizer,
        plan=session.plan,
        state={"number": number},
        rng={"torch": torch.get_rng_state()},
    )


def loaded(path: Path, strategy: str) -> dict:
    session = prepared(strategy)
    load_checkpoint(path, model=session.module, optimizer=session.optimizer)
    torch.set_rng_state(rng_for(path, dist.get_rank() if dist.is_initialized() else 0)["torch"])
    return state_of(session)


@contextmanager
def held_up(module, name: str, times: int = 1) -> Iterator[threading.Event]:
    """The first calls of a function wait until the event is set; ``gate.through`` is set when one has ended."""
    gate, original, left = threading.Event(), getattr(module, name), [times]
    gate.through = threading.Event()

    def late(*args, **kwargs):
        if left[0] > 0:
            left[0] -= 1
            assert gate.wait(STUCK_S)
        try:
            return original(*args, **kwargs)
        finally:
            gate.through.set()

    setattr(module, name, late)
    try:
        yield gate
    finally:
        gate.set()
        setattr(module, name, original)


def later(gate: threading.Event) -> None:
    threading.Timer(SOON_S, gate.set).start()


def training_goes_on(root: str, strategies: list[str]) -> None:
    for strategy in strategies:
        for guarded in (True, False):
            session = prepared(strategy)
            forward(session)
            session.optimizer.step()
            folder = Path(root) / f"{strategy}-{guarded}"
            with (
                Saver(folder, keep=1, async_save=True, guarded=guarded) as saver,
                held_up(stage_module.Copy, "finish") as gate,
            ):
                if not guarded:
                    later(gate)
                then = state_of(session)
                save(saver, 1, session)
                assert gate.through.is_set() != guarded, "who is not guarded gets a copy at once"
                forward(session)  # changes buffers and the generator
                session.optimizer.param_groups[0]["lr"] = 0.7
                assert not same(then, state_of(session))
                if guarded:
                    later(gate)
                session.optimizer.step()  # waits for the copy by itself
                assert gate.through.is_set()
                now = state_of(session)
                saver.wait()
                (report,) = saver.reports
                assert report.background and report.stall_s > 0 and report.num_bytes > 100
            assert same(loaded(folder / "step-00000001", strategy), then), f"{strategy}, guarded {guarded}"
            assert not same(now, then)


def test_what_is_saved_is_the_state_at_the_save(tmp_path: Path) -> None:
    run_world(training_goes_on, 2, str(tmp_path), ["ddp", "zero1", "fsdp"])


def times(session, factor: float) -> None:
    with torch.no_grad():
        for p in session.module.parameters():
            p.mul_(factor)


def behind_the_back(root: str, strategy: str) -> list[str]:
    session = prepared(strategy)
    forward(session)
    session.optimizer.step()
    said = []
    for number, how in enumerate(("no_grad", "load_state_dict", "buffer")):
        folder = Path(root) / f"{strategy}-{how}"
        with (
            Saver(folder, keep=1, async_save=True, guarded=True) as saver,
            held_up(stage_module.Copy, "finish", 2) as gate,
        ):
            gate.set()
            then = state_of(session)
            save(saver, 1, session)
            saver.wait()
            gate.clear()
            save(saver, 2, session)
            dist.barrier()
            if how == "buffer":
                session.module.norm.running_mean.add_(1)  # copied already: anybody may
            elif how == "load_state_dict":
                session.module.load_state_dict(session.module.state_dict())
            elif dist.get_rank() == 1:
                times(session, 2.0)
            gate.set()
            try:
                saver.wait()
            except CheckpointError as error:
                said.append(str(error))
                times(session, 0.5 if dist.get_rank() == 1 and how == "no_grad" else 1.0)
                assert same(loaded(folder / "step-00000001", strategy), then)
        assert len(said) == min(2, number + 1)
    assert newest(folder) == folder / "step-00000002"
    return said


def test_a_change_that_nobody_waited_for_is_refused(tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        one, other = run_world(behind_the_back, 2, str(tmp_path), strategy)
        assert one == other
        assert one[0].startswith("rank 1: model/")
        assert one[1].startswith("rank 0 (ranks 1 too): ")
        assert all("changed while being saved in the background; change weights only by" in text for text in one)
        folder = tmp_path / f"{strategy}-no_grad"
        assert newest(folder) == folder / "step-00000001"
        assert sorted(p.name for p in folder.iterdir()) == [".lock", "latest", "step-00000001"]


def complete(folder: Path) -> None:
    """What is named is there, all of it."""
    path = newest(folder)
    if path is not None:
        manifest = read_manifest(path)
        for entry in manifest.tensors.values():
            assert all((path / shard.file).is_file() for shard in entry.shards)
        latest = folder / "latest"
        assert not latest.exists() or (folder / latest.read_text().strip() / "manifest.json").is_file()


@contextmanager
def watched(folder: Path, told: list[str]) -> Iterator[None]:
    """Look at the folder before and after every call that changes it."""
    originals = {name: getattr(os, name) for name in ("pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir")}

    def watch(name: str):
        def call(*args, **kwargs):
            told.append(name)
            complete(folder)
            result = originals[name](*args, **kwargs)
            complete(folder)
            return result

        return call

    for name in originals:
        setattr(os, name, watch(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def one_after_the_other(root: str) -> None:
    session = prepared("ddp")
    folder, told = Path(root), []
    states, rooms = {}, set()
    with Saver(folder, keep=2, async_save=True, guarded=True) as saver:
        with held_up(save_module, "write_share") as gate, watched(folder, told):
            for number in range(1, 5):
                forward(session)
                session.optimizer.step()
                states[number] = state_of(session)
                if number == 2:
                    assert newest(folder) is None
                    later(gate)
                save(saver, number, session)  # waits for the one before
                assert number == 1 or (folder / "latest").read_text() == f"step-{number - 1:08d}\n"
                assert [report.step for report in saver.reports] == list(range(1, number))
                rooms.add(saver._stage._room.data_ptr())
        saver.wait()
        assert len(rooms) == 1 if dist.get_rank() == 0 else len(rooms) <= 2  # the first save has no optimizer state
    assert len(told) > 40 or dist.get_rank()
    for number in (3, 4):
        assert same(loaded(folder / f"step-{number:08d}", "ddp"), states[number])


def test_the_next_save_waits_and_latest_names_what_is_complete(tmp_path: Path) -> None:
    run_world(one_after_the_other, 2, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "step-00000003", "step-00000004"]
    assert newest(tmp_path) == tmp_path / "step-00000004"


def full_disk(*args) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fails_in_the_background(root: str) -> list[str]:
    session = prepared("fsdp")
    forward(session)
    session.optimizer.step()
    said, pwrite, room = [], os.pwrite, stage_module.Stage.room
    for number, raised_by in enumerate(("wait", "save", "close", "memory")):
        folder = Path(root) / raised_by
        saver = Saver(folder, keep=1, async_save=True, guarded=True)
        then = state_of(session)
        save(saver, 1, session)
        saver.wait()
        if dist.get_rank() == 1:
            if raised_by == "memory":
                stage_module.Stage.room = lambda *args, **more: (_ for _ in ()).throw(MemoryError("no room"))
            else:
                storage_module.os.pwrite = full_disk
        save(saver, 2, session)  # says nothing yet
        with pytest.raises(CheckpointError) as caught:
            if raised_by == "save":
                save(saver, 3, session)
            elif raised_by == "close":
                saver.close()
            else:
                saver.wait()
        said.append(str(caught.value).replace(str(folder), "FOLDER"))
        os.pwrite, stage_module.Stage.room = pwrite, room
        assert newest(folder) == folder / "step-00000001"
        assert same(loaded(folder / "step-00000001", "fsdp"), then)
        dist.barrier()
        if raised_by != "close":
            save(saver, 4, session)  # the next one works
            saver.close()
            assert newest(folder) == folder / "step-00000004"
        assert number == len(said) - 1
        assert not list(folder.glob(".tmp-*"))
    return said


def test_what_goes_wrong_in_the_background_is_raised_by_all_at_the_next_occasion(tmp_path: Path) -> None:
    one, other = run_world(fails_in_the_background, 2, str(tmp_path))
    assert one == other
    for text in one[:3]:
        assert text.startswith("rank 1 could not write 'FOLDER/.tmp-step-00000002/rank-00001.safetensors': No space")
        assert "Earlier checkpoints are untouched" in text
    assert "rank 1: MemoryError: no room" in one[3]


def has_ended(saver: Saver) -> None:
    """Wait for a save that was left alone, and for the thread that then gives the folder back."""
    saver._pending.thread.join()
    deadline = time.monotonic() + STUCK_S
    while saver._lock is not None and saver._lock._handle >= 0 and time.monotonic() < deadline:
        time.sleep(0.01)


def fails_in_the_foreground(root: str) -> None:
    """The training fails while a save is under way."""
    session = prepared("ddp")
    folder = Path(root)
    # one: the writing takes longer than anybody waits
    save_module.GRACE_S = 4 * SOON_S
    with held_up(save_module, "write_share") as gate:
        with pytest.raises(ZeroDivisionError), Saver(folder, keep=1, async_save=True, guarded=True) as saver:
            save(saver, 1, session)
            raise ZeroDivisionError
        if dist.get_rank() == 0:
            with pytest.raises(UserError, match="another run is saving checkpoints"):
                FolderLock(folder)  # it is still being written there
        assert newest(folder) is None
        dist.barrier()
        gate.set()
        has_ended(saver)
    dist.barrier()
    assert newest(folder) == folder / "step-00000001"
    # two: there is time enough
    save_module.GRACE_S = STUCK_S
    with (
        held_up(save_module, "write_share") as gate,
        pytest.raises(ZeroDivisionError),
        Saver(folder, keep=1, async_save=True, guarded=True) as saver,
    ):
        save(saver, 2, session)
        later(gate)
        raise ZeroDivisionError
    dist.barrier()
    assert newest(folder) == folder / "step-00000002"
    # three: it is stopped by hand
    with held_up(save_module, "write_share") as gate:
        started = time.perf_counter()
        with pytest.raises(KeyboardInterrupt), Saver(folder, keep=1, async_save=True, guarded=True) as saver:
            save(saver, 3, session)
            raise KeyboardInterrupt
        assert time.perf_counter() - started < STUCK_S / 2
        gate.set()
        has_ended(saver)
    dist.barrier()
    # four: it fails in the background, too
    pwrite = os.pwrite
    with (
        held_up(save_module, "write_share") as gate,
        pytest.raises(ZeroDivisionError) as caught,
        Saver(folder, keep=1, async_save=True, guarded=True) as saver,
    ):
        save(saver, 4, session)
        os.pwrite = full_disk
        later(gate)
        raise ZeroDivisionError
    os.pwrite = pwrite
    assert "the save of step 4 in the background: rank 0 (ranks 1 too) could not write" in caught.value.__notes__[0]
    # five: the world is left while it is written; what is left alone must not take itself for all
    with held_up(save_module, "write_share") as gate:
        saver = Saver(folder, keep=1, async_save=True, guarded=True)
        save(saver, 5, session)
        dist.barrier()
        saver.close(wait=False)
        dist.destroy_process_group()
        gate.set()
        saver._pending.thread.join()
        assert saver._pending.failure
    assert newest(folder) == folder / "step-00000003"
    with pytest.raises(UserError, match="the process group that this Saver was made in is gone"):
        saver._pending = None
        save(saver, 6, session)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=int(os.environ["RANK"]), world_size=2)


def test_a_training_that_fails_while_a_save_is_under_way(tmp_path: Path) -> None:
    run_world(fails_in_the_foreground, 2, str(tmp_path))


def test_the_lock_is_not_inherited_and_is_done_without_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FolderLock(tmp_path):
        with pytest.raises(UserError, match="another run is saving checkpoints to"):
            FolderLock(tmp_path)
        run_world(hold_on, 1, str(tmp_path))
    FolderLock(tmp_path).release()

    def flock(*args) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(commit_module.fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="has no locks .*: nothing keeps a second run out"):
        lock = FolderLock(tmp_path)
    lock.check()
    (tmp_path / "latest").write_text("step-00000001\n")
    with pytest.raises(UserError, match="another run is saving"):
        lock.check()


def hold_on(root: str) -> None:
    folder = Path(root) / "inner"
    lock = FolderLock(folder)
    theirs, mine = os.pipe()
    child = os.fork()  # as a data loader's worker, which may live a little longer than its parent
    if not child:
        os.write(mine, b"!")
        time.sleep(STUCK_S)
        os._exit(0)
    try:
        with pytest.raises(UserError, match="another run is saving"):
            FolderLock(folder)
        assert os.read(theirs, 1) == b"!"  # it runs
        lock.release()
        FolderLock(folder).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def train(job: str) -> None:
    run_job(Job.model_validate_json(job))


def test_receipts_are_true_while_saves_are_under_way(tmp_path: Path) -> None:
    """What the ranks of ``shardwise train`` do, with a save in the background after every step."""
    often = {"every": 1, "async_save": True}
    few = {"steps": 5, "eval_samples": 8}
    jobs = {}
    for strategy in ("ddp", "fsdp"):
        (tmp_path / strategy).mkdir()
        file = configs.write_config(tmp_path / strategy, parallel={"strategy": strategy}, checkpoint=often, train=few)
        jobs[strategy] = prepare_job(read_config(file), lambda text: None).job.to_json()
    for strategy, job in jobs.items():
        run_world(train, 2, job)
        run = tmp_path / strategy / "run"
        receipts = json.loads((run / "summary.json").read_text())["receipts"]
        assert receipts["effects"]["ok"] is True
        assert receipts["fit"]["ok"] is True
        peaks = [line["found"] for line in receipts["fit"]["lines"] if line["name"].startswith("peak in")]
        assert len(peaks) == 3
        assert all(float(re.search(r"([\d.]+) × plan", peak)[1]) < 1.1 for peak in peaks), peaks
        written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in written if "checkpoint_stall_s" in line] == [1, 2, 3, 4, 5]
        assert newest(run / "checkpoints").name == "step-00000005"
