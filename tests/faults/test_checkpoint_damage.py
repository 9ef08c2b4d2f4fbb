"""Damaged, foreign and misplaced checkpoints: the error names file and tensor, and what it advises helps."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from shardwise.checkpoint.commit import FolderLock
from shardwise.checkpoint.format import newest, read_manifest
from shardwise.checkpoint.load import load_checkpoint, newest_of_all, rng_for
from shardwise.errors import CheckpointError, UserError
from tests.cli import configs
from tests.faults.disk import Small, assert_goes_on, assert_good, assert_whole, made, names_in, save
from tests.turns import by_turns
from tests.worlds import run_world

ONE, TWO = "rank-00000.safetensors", "rank-00001.safetensors"
FLIPS = 250
TURNS = 3  # a third of the flips for each change


def save_steps(root: str) -> None:
    for step in (10, 20):
        save(Path(root), step, keep=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two steps, each in two files."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_world(save_steps, 2, str(folder))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def load(path: Path, **options: bool) -> None:
    model, optimizer = made(0)
    load_checkpoint(path, model=model, optimizer=optimizer, **options)


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    return str(caught.value)


def assert_advice_helps(folder: Path, text: str) -> None:
    """The error says that the checkpoint is to be removed, and then the one before loads and saving goes on."""
    assert "remove this checkpoint and load an earlier one" in text or "load an earlier checkpoint" in text
    assert newest(folder) == folder / "step-00000020"
    shutil.rmtree(folder / "step-00000020")
    assert assert_good(folder, {10}) == 10
    assert_goes_on(folder, 20)


def cut(keep: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = (path / TWO).read_bytes()
        (path / TWO).write_bytes(data[: keep(len(data))])

    return damage


def swap(path: Path) -> None:
    (path / ONE).rename(path / "aside")
    (path / TWO).rename(path / ONE)
    (path / "aside").rename(path / TWO)


def of_another_step(path: Path) -> None:
    shutil.copy(path.with_name("step-00000010") / TWO, path / TWO)


def missing(path: Path) -> None:
    (path / TWO).unlink()


def directory(path: Path) -> None:
    missing(path)
    (path / TWO).mkdir()


def zeroed(path: Path) -> None:
    (path / TWO).write_bytes(bytes((path / TWO).stat().st_size))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut(lambda size: 0), f"{TWO}' is damaged: the file ends at byte 0, 8 are needed"),
        (cut(lambda size: 5), f"{TWO}' is damaged: the file ends at byte 5"),
        (cut(lambda size: 60), f"{TWO}' is damaged: the header claims to have"),
        (cut(lambda size: size - 1), f"{TWO}' is damaged: it ends at byte"),
        (cut(lambda size: size - 600), "needs it up to byte"),
        (swap, "is not in it"),
        (of_another_step, "bytes that are not those that were saved: "),
        (missing, f"{TWO}' is missing"),
        (directory, f"{TWO}' cannot be read: it is a folder, not a file"),
        (zeroed, f"{TWO}' is damaged: "),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_damaged_file(folder: Path, damage: Callable[[Path], None], said: str) -> None:
    path = folder / "step-00000020"
    damage(path)
    text = error_of(path)
    assert said in text
    assert str(path) in text
    assert assert_whole(folder / "step-00000010") == 10
    assert_advice_helps(folder, text)


def places(path: Path) -> dict[str, tuple[str, int, int]]:
    """Tensor to its file and the bytes of it there, as the safetensors header has them."""
    found = {}
    for file in (ONE, TWO):
        data = (path / file).read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        header.pop("__metadata__")
        found |= {
            key: (file, begin + item["data_offsets"][0], begin + item["data_offsets"][1])
            for key, item in header.items()
        }
    return found


def flip(file: Path, byte: int, bit: int) -> bytes:
    good = file.read_bytes()
    bad = bytearray(good)
    bad[byte] ^= 1 << bit
    file.write_bytes(bad)
    return good


def test_a_flipped_bit_in_any_tensor_is_named(folder: Path) -> None:
    path = folder / "step-00000020"
    names = read_manifest(path).tensors
    where = places(path)
    assert {*where} == {*names}
    for name, (file, begin, end) in where.items():
        good = flip(path / file, random.Random(name).randrange(begin, end), 3)
        if name.startswith("rng/"):
            load(path)
            with pytest.raises(CheckpointError, match=f"{name} in '.*{file}'"):
                rng_for(path, int(name.split("/")[1]))
        else:
            assert f"not those that were saved: {name} in '{path / file}'; remove this" in error_of(path)
        (path / file).write_bytes(good)
    assert assert_whole(path) == 20


@pytest.mark.turns(1)
def test_a_flipped_bit_anywhere_is_found_or_does_not_matter(folder: Path) -> None:
    path, rng_state = folder / "step-00000020", random.Random(5)
    found = 0
    for file in (ONE, TWO):
        size = (path / file).stat().st_size
        header = 8 + int.from_bytes((path / file).read_bytes()[:8], "little")
        spots = [(byte, bit) for byte in range(8) for bit in range(8)]
        spots += [(rng_state.randrange(8, header), rng_state.randrange(8)) for _ in range(FLIPS)]
        spots += [(rng_state.randrange(header, size), rng_state.randrange(8)) for _ in range(20)]
        spots = by_turns(spots, TURNS, file)
        for byte, bit in spots:
            good = flip(path / file, byte, bit)
            try:
                assert assert_whole(path) == 20  # in a comment of the header
            except CheckpointError as error:
                assert file in str(error)
                found += 1
            (path / file).write_bytes(good)
    assert found > 1.8 * FLIPS / TURNS


def test_a_flipped_bit_in_the_manifest_is_found_wherever_it_is(folder: Path) -> None:
    path, rng_state = folder / "step-00000020", random.Random(6)
    file = path / "manifest.json"
    size = file.stat().st_size
    start = file.read_bytes().index(b'"schema"')
    spots = [(byte, bit) for byte in range(start, start + 12) for bit in range(8)]
    spots += [(rng_state.randrange(size), rng_state.randrange(8)) for _ in range(FLIPS)]
    for byte, bit in spots:
        good = flip(file, byte, bit)
        text = error_of(path)
        assert str(path) in text
        file.write_bytes(good)
    file.write_bytes(file.read_bytes()[:-1])
    assert_advice_helps(folder, error_of(path))


def rewritten(path: Path, **changes: object) -> None:
    """The manifest with other fields, and a hash that is right."""
    data = json.loads((path / "manifest.json").read_bytes()) | changes
    data["hash"] = "xxh3-128:" + "0" * 32
    made_of = xxhash.xxh3_128(json.dumps(data).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(data | {"hash": f"xxh3-128:{made_of}"}))


def test_a_later_schema_and_a_manifest_that_is_none(folder: Path) -> None:
    path = folder / "step-00000020"
    rewritten(path, step=20)
    load(path)
    rewritten(path, schema=4, unheard="of")
    text = error_of(path)
    assert f"checkpoint '{path}' has schema 4, and this version of shardwise reads up to 3; update shardwise" in text
    assert assert_whole(folder / "step-00000010") == 10
    for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema": 2}', b'{"schema": "2"}'):
        (path / "manifest.json").write_bytes(content)
        text = error_of(path)
        assert f"'{path / 'manifest.json'}' is damaged: " in text
        assert len(text) < 1500
    assert_advice_helps(folder, text)


def test_no_manifest_is_no_checkpoint(folder: Path) -> None:
    path = folder / "step-00000020"
    (path / "manifest.json").unlink()
    assert "has no manifest.json (No such file or directory); load an earlier checkpoint" in error_of(path)
    assert newest(folder) == folder / "step-00000010"  # although ``latest`` names the other
    with pytest.raises(CheckpointError, match=f"'{path}' exists but has no manifest.json; remove it and save again"):
        save(folder, 20)
    shutil.rmtree(path)
    assert_goes_on(folder, 20)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\n", b"step-00000099\n", b"garbage", b"\xff\x00\xfe", b"../checkpoints/step-00000020", b"x" * 10**6],
    ids=["missing", "empty", "line", "dangling", "garbage", "binary", "path", "long"],
)
def test_whatever_latest_says_the_newest_is_found(folder: Path, content: bytes | None) -> None:
    (folder / "latest").unlink()
    if content is not None:
        (folder / "latest").write_bytes(content)
    assert newest(folder) == folder / "step-00000020"
    assert newest_of_all(folder) == folder / "step-00000020"
    assert_goes_on(folder)


def test_latest_may_name_an_earlier_one_and_what_lies_around_does_not_matter(folder: Path) -> None:
    (folder / "latest").write_text("step-00000010")
    assert assert_good(folder, {10}) == 10
    (folder / "latest").unlink()
    (folder / "latest").mkdir()
    (folder / "step-00000030").write_text("a file")
    (folder / "step-00000040" / "manifest.json").mkdir(parents=True)
    (folder / "step-50").mkdir()
    (folder / ".tmp-step-00000060").mkdir()
    (folder / "notes.txt").write_text("of a user")
    (folder / "step-00000020" / "notes.txt").write_text("of a user")
    assert assert_good(folder, {20}) == 20
    (folder / "latest").rmdir()
    save(folder, 70)
    assert names_in(folder) == ["latest", "notes.txt", "step-00000030", "step-00000040", "step-00000070", "step-50"]


def test_going_on_from_an_earlier_one_another_way(folder: Path) -> None:
    """A step that was saved by the run that was left does not stand in for the one of this run."""
    (folder / "latest").write_text("step-00000010\n")
    rewritten(folder / "step-00000020", state={"stale": True})
    save(folder, 20, keep=2)
    assert (folder / "latest").read_text() == "step-00000020\n"
    assert assert_good(folder, {20}) == 20
    assert read_manifest(folder / "step-00000020").state == {"step": 20}
    assert names_in(folder) == ["latest", "step-00000010", "step-00000020"]


def test_another_model_or_dtype(folder: Path) -> None:
    path = folder / "step-00000020"
    for model, said in (
        (Small().to(torch.bfloat16), "model/one.weight: F32 in the checkpoint, BF16 in the model"),
        (nn.Linear(2, 2), "model/weight: not in the checkpoint"),
    ):
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(CheckpointError, match=said) as caught:
            load_checkpoint(path, model=model, optimizer=None)
        assert f"checkpoint '{path}' does not fit" in str(caught.value)
        assert "choose another output folder" in str(caught.value)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert assert_whole(path) == 20


def second_run(root: str) -> str:
    with pytest.raises(UserError) as caught:
        save(Path(root), 30)
    return str(caught.value)


def first_run(root: str, other: str) -> None:
    """Saves once more and more until the other one has been turned away."""
    from shardwise.checkpoint.save import Saver
    from shardwise.plan.plan import Plan

    model, optimizer = made(1)
    with Saver(root, keep=2, async_save=True) as saver:
        for step in range(1, 10_000):
            saver.save(step, model=model, optimizer=optimizer, plan=Plan(), state={}, rng=None)
            if dist.get_rank() == 0 and step == 5:
                (Path(other) / "begun").touch()
            over = torch.tensor((Path(other) / "over").exists())
            dist.broadcast(over, src=0)
            if over:
                return


def test_two_worlds_and_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = threading.Thread(target=run_world, args=(first_run, 2, str(folder), str(tmp_path)))
    first.start()
    try:
        while not (tmp_path / "begun").exists():
            assert first.is_alive()
            first.join(0.01)
        one, other = run_world(second_run, 2, str(folder))
        with pytest.raises(UserError, match="another run is saving checkpoints"):
            FolderLock(folder)
        assert first.is_alive()
    finally:
        (tmp_path / "over").touch()
        first.join()
    assert one == other
    assert f"another run is saving checkpoints to '{folder}'; wait for it, or choose another folder" in one
    assert [name[:4] for name in names_in(folder)] == ["late", "step", "step"]
    load_checkpoint(newest(folder), model=Small(), optimizer=None)


@pytest.mark.turns(2)
def test_two_runs_of_the_command_and_one_folder(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    texts = {}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        texts[name] = configs.write_config(
            tmp_path / name,
            train={"steps": 100_000, "eval_samples": 8, "eval_every": 0},
            checkpoint={"every": 5, "folder": shared},
            parallel={"strategy": "ddp", "nproc": 2},
        )
    process = configs.start_train(texts["first"])
    try:
        configs.wait_for_step(process, tmp_path / "first", 20)
        _, said = configs.train(texts["second"], exit_code=2)
        assert "Traceback" not in said
        assert f"another run is saving checkpoints to '{shared}'" in said
        assert said.count("another run is saving") == 1
        assert process.poll() is None
        before = newest(Path(shared))
        assert before is not None
        before_step = read_manifest(before).step
    finally:
        code = configs.stop(process, signal.SIGINT)
    assert code == 130
    last = newest(Path(shared))
    assert last is not None and read_manifest(last).step >= before_step
    assert not list(Path(shared).glob(".tmp-*"))
