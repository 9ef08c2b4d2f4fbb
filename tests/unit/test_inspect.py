"""What `inspect_checkpoint` and `verify_checkpoint` find, in whole checkpoints and in damaged ones."""

from __future__ import annotations

import gc
import itertools
import json
import random
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpoint import boxes as boxes_module
from shardwise.checkpoint import integrity as verify_module
from shardwise.checkpoint.boxes import coverage_fault
from shardwise.checkpoint.format import MANIFEST, Manifest, Shard, TensorEntry, read_manifest
from shardwise.checkpoint.inspect import Damage, inspect_checkpoint
from shardwise.checkpoint.integrity import structure_faults, verify_checkpoint
from shardwise.checkpoint.shard_files import read_header
from shardwise.checkpoint.storage.local_storage import Folder, RangeReader, folder_of
from shardwise.errors import UserError
from tests.checkpoints import full_tensors, write_checkpoint

FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty folder for checkpoints."""
    if request.param == "disk":
        return tmp_path / "run" / "checkpoints"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    return folder_of("memory://place/run/checkpoints")


def change(path: Folder, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)


def flip(path: Folder, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    change(path, bytes(data))


def places(path: Folder) -> dict[str, tuple[int, int]]:
    """Tensor to where its bytes are in the file."""
    with RangeReader(path) as reader:
        return {name: (stored.begin, stored.end) for name, stored in read_header(reader).items()}


def test_what_is_in_a_checkpoint(folder: Folder) -> None:
    path = write_checkpoint(folder, step=20, ranks=2)
    found = inspect_checkpoint(path)
    full = full_tensors()
    assert found.kind == "Shardwise checkpoint" and found.place == str(path) and found.step == 20
    assert {line.name for line in found.lines} == set(full)
    for line in found.lines:
        tensor = full[line.name]
        assert line.shape == tuple(tensor.shape) and line.num_bytes == tensor.nbytes
    by_name = {line.name: line for line in found.lines}
    assert [by_name[name].shards for name in ("model/embed.weight", "model/scale", "model/none")] == [2, 1, 0]
    assert by_name["model/half"].dtype == "BF16" and by_name["model/embed.weight"].dtype == "F32"
    assert found.num_bytes == sum(tensor.nbytes for tensor in full.values())
    assert found.rng == {"0": ["cpu", "numpy"], "1": ["cpu", "numpy"]}
    assert found.aliases == {"model/head.weight": "model/embed.weight"}
    assert found.optimizer and found.optimizer["name"] == "AdamW"
    assert dict(found.sizes) == {item.name: item.stat().st_size for item in path.iterdir()}
    assert found.manifest and found.manifest.state["position"] == 160
    assert not found.damage and not found.notes and not found.others


def test_no_data_is_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(folder)
    seen = []
    real = RangeReader.read_into

    def read_into(reader: RangeReader, begin: int, buffer: bytearray) -> None:
        seen.append((reader.path.name, begin, len(buffer)))
        real(reader, begin, buffer)

    monkeypatch.setattr(RangeReader, "read_into", read_into)
    inspect_checkpoint(path)
    assert sorted(one for one in seen if one[0] != MANIFEST) == [(FIRST, 0, 8), (SECOND, 0, 8)]


def test_a_run_and_a_folder_of_checkpoints_stand_for_the_one_to_go_on_from(folder: Folder) -> None:
    paths = [write_checkpoint(folder, step) for step in (10, 30, 20)]
    for place in (folder, folder.parent, str(folder)):
        found = inspect_checkpoint(place)
        assert found.place == str(paths[2]), "the one that latest names"
        assert list(found.others) == ["step-00000030", "step-00000010"]
    assert inspect_checkpoint(paths[0]).others == []
    assert inspect_checkpoint(paths[0] / MANIFEST).place == str(paths[0])


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for look in (inspect_checkpoint, verify_checkpoint):
        with pytest.raises(UserError, match=r"holds 'a\.txt', which is not a known checkpoint format"):
            look(tmp_path)
        with pytest.raises(UserError, match="does not exist"):
            look(tmp_path / "nothing")


def test_the_collector_is_left_as_it_was(folder: Folder) -> None:
    path = write_checkpoint(folder)
    inspect_checkpoint(path)
    assert gc.isenabled()
    with pytest.raises(UserError):
        inspect_checkpoint(folder / "nothing")
    assert gc.isenabled()


def test_everything_is_as_it_was_saved(folder: Folder) -> None:
    path = write_checkpoint(folder, ranks=3)
    totals, parts = [], []
    found = verify_checkpoint(path, totals.append, parts.append)
    with_rng = sum(tensor.nbytes for tensor in full_tensors().values()) + 3 * 2 * 9
    assert not found.damage and found.hashed and found.step == 20 and found.files == 3
    assert found.num_bytes == with_rng and totals == [with_rng] and sum(parts) == with_rng
    assert found.tensors == len(full_tensors()) + 6


def test_every_bit_counts(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    for file in (FIRST, SECOND):
        good = (path / file).read_bytes()
        for name, (begin, end) in places(path / file).items():
            for place in {begin, end - 1}:
                flip(path / file, place)
                found = verify_checkpoint(path)
                assert found.damage == [Damage(file, "bytes are not those that were saved", (name,))]
                assert not inspect_checkpoint(path).damage, "data is not looked at"
                (path / file).write_bytes(good)


@pytest.mark.parametrize("file", [SECOND, MANIFEST])
def test_every_bit_of_a_header_and_of_the_manifest_counts(tmp_path: Path, file: str) -> None:
    path = write_checkpoint(tmp_path)
    good = (path / file).read_bytes()
    end = 8 + int.from_bytes(good[:8], "little") if file == SECOND else len(good)
    said_nothing = good.index(b'{"__metadata__"') + 1 if file == SECOND else end
    last = len(good[:end].rstrip())
    for place in [*range(100), *range(100, last, 13)]:
        flip(path / file, place)
        damage = verify_checkpoint(path).damage
        assert {one.file for one in damage} <= {file}
        assert damage or said_nothing <= place <= said_nothing + 31, f"byte {place} of {file}"
        (path / file).write_bytes(good)
    assert not verify_checkpoint(path).damage


def test_a_file_that_is_missing(folder: Folder) -> None:
    path = write_checkpoint(folder)
    (path / SECOND).unlink()
    for look in (inspect_checkpoint, verify_checkpoint):
        (damage,) = look(path).damage
        assert damage.file == SECOND and damage.what == "is missing"
        assert "model/embed.weight" in damage.tensors and "rng/1/cpu" in damage.tensors
        assert "model/scale" not in damage.tensors
        assert str(damage).startswith(f"{SECOND}: is missing (model/embed.weight, ")


def test_a_file_that_is_cut_names_what_is_lost(folder: Folder) -> None:
    path = write_checkpoint(folder)
    good = (path / SECOND).read_bytes()
    where = places(path / SECOND)
    head = 8 + int.from_bytes(good[:8], "little")
    for size in {0, 4, 8, head - 1, head, head + 5, len(good) // 2, len(good) - 1}:
        change(path / SECOND, good[:size])
        expected = {name for name, (_, end) in where.items() if end > size}
        for look in (inspect_checkpoint, verify_checkpoint):
            (damage,) = look(path).damage
            assert damage.file == SECOND and set(damage.tensors) == expected, size
            assert str(size) in damage.what
            assert size < head or damage.what == f"is truncated: it has {size} bytes, and {len(good)} are needed"


def test_a_file_that_is_longer_than_its_header_says(folder: Folder) -> None:
    path = write_checkpoint(folder)
    good = (path / FIRST).read_bytes()
    change(path / FIRST, good + b"x")
    for look in (inspect_checkpoint, verify_checkpoint):
        (damage,) = look(path).damage
        assert str(damage) == f"{FIRST}: has {len(good) + 1} bytes, and its header accounts for {len(good)}"


def test_a_file_with_other_tensors(folder: Folder) -> None:
    path = write_checkpoint(folder)
    save_file({"model/other": torch.ones(3)}, (tmp := Path(str(path) if "://" not in str(path) else "/tmp")) / "x.st")
    change(path / FIRST, (tmp / "x.st").read_bytes())
    (tmp / "x.st").unlink()
    for look in (inspect_checkpoint, verify_checkpoint):
        (damage,) = look(path).damage
        assert damage.file == FIRST and "header does not match the manifest" in damage.what
        assert "model/scale" in damage.tensors


def test_all_damage_is_named_at_once(folder: Folder) -> None:
    path = write_checkpoint(folder, ranks=3)
    (path / FIRST).unlink()
    where = places(path / SECOND)
    flip(path / SECOND, where["model/embed.weight"][0])
    flip(path / SECOND, where["optimizer/embed.weight/exp_avg"][0])
    (missing, wrong) = verify_checkpoint(path).damage
    assert missing.file == FIRST and wrong.file == SECOND
    assert sorted(wrong.tensors) == ["model/embed.weight", "optimizer/embed.weight/exp_avg"]


def test_a_save_that_was_never_finished(folder: Folder) -> None:
    path = write_checkpoint(folder)
    (path / MANIFEST).unlink()
    for look in (inspect_checkpoint, verify_checkpoint):
        (damage,) = look(path).damage
        assert damage.file == MANIFEST and f"has no {MANIFEST}" in damage.what


def test_a_manifest_of_a_later_version_says_what_to_do(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    document = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(document | {"schema": 99}))
    (damage,) = verify_checkpoint(path).damage
    assert "schema 99" in damage.what and "update shardwise" in damage.what


def test_files_that_belong_to_nothing_are_noted(folder: Folder) -> None:
    path = write_checkpoint(folder)
    change(path / "notes.txt", b"x")
    assert inspect_checkpoint(path).notes == ["not part of the checkpoint: notes.txt"]
    assert not verify_checkpoint(path).damage


# other tools


def test_another_tools_checkpoint_is_read_and_nothing_compared(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(300, 70), "b": torch.tensor(2, dtype=torch.int64)}
    save_file(weights, tmp_path / "model.safetensors")
    found = inspect_checkpoint(tmp_path)
    assert {line.name: (line.dtype, line.shape, line.shards) for line in found.lines} == {
        "model/a.weight": ("F32", (300, 70), None),
        "model/b": ("I64", (), None),
    }
    assert found.manifest is None and found.step is None
    parts = []
    checked = verify_checkpoint(tmp_path, tick=parts.append)
    assert not checked.hashed and not checked.damage and sum(parts) == checked.num_bytes == 300 * 70 * 4 + 8
    assert checked.notes[0].startswith("this format has no hashes")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-5])
    for look in (inspect_checkpoint, verify_checkpoint):
        (damage,) = look(tmp_path).damage
        assert "model.safetensors" in damage.what and "ends at byte" in damage.what


def test_large_tensors_of_others_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "BLOCK", 1000)
    save_file({"a": torch.randn(300, 70), "none": torch.zeros(0, 4)}, tmp_path / "model.safetensors")
    parts = []
    assert not verify_checkpoint(tmp_path, tick=parts.append).damage
    assert len([part for part in parts if part]) == 100 and max(parts) == 3 * 70 * 4 and sum(parts) == 300 * 70 * 4


# structure


def entry(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> TensorEntry:
    shards = tuple(
        Shard(file=f"{n}", key="k", offsets=offsets, lengths=lengths, hash="")
        for n, (offsets, lengths) in enumerate(boxes)
    )
    return TensorEntry(dtype="F32", shape=shape, shards=shards)


def fault_in(one: TensorEntry) -> str | None:
    return coverage_fault(one.shape, one.shards)


def test_shards_that_overlap_are_named() -> None:
    good = [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]
    assert fault_in(entry((4, 4), good)) is None
    twice = [((0, 0), (2, 4)), ((0, 0), (2, 2)), ((2, 2), (2, 2))]
    fault = fault_in(entry((4, 4), twice)) or ""
    assert fault == "shards overlap: 'k' in 0 at [0, 0] and 'k' in 1 at [0, 0]"
    shifted = [((0, 0), (2, 4)), ((1, 0), (2, 2)), ((2, 2), (2, 2))]
    assert "shards overlap" in (fault_in(entry((4, 4), shifted)) or "")
    gap = [((0,), (3,)), ((1,), (3,)), ((8,), (4,))]
    assert fault_in(entry((10,), [*gap[:2], ((6,), (4,))])) is not None
    assert fault_in(entry((), [((), ())])) is None
    assert fault_in(entry((0, 3), [])) is None


def cut_up(rng: random.Random, box: tuple[tuple[int, ...], tuple[int, ...]], depth: int) -> list:
    """A box cut into boxes, at random."""
    offsets, lengths = box
    axes = [axis for axis, length in enumerate(lengths) if length > 1]
    if not axes or not depth:
        return [box]
    axis = rng.choice(axes)
    at = rng.randrange(1, lengths[axis])
    parts = []
    for begin, length in ((0, at), (at, lengths[axis] - at)):
        low, size = list(offsets), list(lengths)
        low[axis] += begin
        size[axis] = length
        parts += cut_up(rng, (tuple(low), tuple(size)), depth - 1)
    return parts


def test_coverage_against_counting_every_element() -> None:
    rng = random.Random(3)
    verdicts = {True: 0, False: 0}
    for _ in range(300):
        shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
        boxes = cut_up(rng, ((0,) * len(shape), shape), rng.randrange(1, 5))
        if rng.random() < 0.6:  # move one, so that it still lies inside and the number of elements stays
            number = rng.randrange(len(boxes))
            _, lengths = boxes[number]
            moved = tuple(rng.randrange(size - length + 1) for size, length in zip(shape, lengths, strict=True))
            boxes[number] = (moved, lengths)
        rng.shuffle(boxes)
        cells = [
            cell
            for offsets, lengths in boxes
            for cell in itertools.product(*(range(a, a + n) for a, n in zip(offsets, lengths, strict=True)))
        ]
        good = len(set(cells)) == len(cells)
        assert (fault_in(entry(shape, boxes)) is None) == good, (shape, boxes)
        verdicts[good] += 1
    assert min(verdicts.values()) > 50


def test_a_pinwheel_has_no_cut_through_all_of_it() -> None:
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert fault_in(entry((3, 3), boxes)) is None
    assert fault_in(entry((3, 3), [*boxes[:4], ((0, 0), (1, 1))])) is not None


@pytest.mark.parametrize("sides", [(4096, 1), (1, 4096), (64, 64)])
def test_coverage_is_not_quadratic(sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    real = boxes_module._clip

    def clip(*args):
        calls[0] += 1
        return real(*args)

    monkeypatch.setattr(boxes_module, "_clip", clip)
    boxes = [((2 * i, 3 * j), (2, 3)) for i in range(sides[0]) for j in range(sides[1])]
    random.Random(0).shuffle(boxes)
    assert fault_in(entry((2 * sides[0], 3 * sides[1]), boxes)) is None
    assert calls[0] <= 2 * 4096 * 13


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    good = read_manifest(path)
    assert structure_faults(good) == []

    def changed(**changes) -> list[str]:
        document = good.model_dump(by_alias=True) | changes
        return [
            str(fault).removeprefix(f"{MANIFEST}: ") for fault in structure_faults(Manifest.model_validate(document))
        ]

    groups = [{"params": ["embed.weight", "ghost", "scale"], "options": {}}, {"params": ["scale"], "options": {}}]
    assert changed(optimizer={"name": "AdamW", "groups": groups, "state": {"spirit": {"x": 1}}}) == [
        "parameter groups of the optimizer name something that is not a tensor of the model (ghost)",
        "parameters in several groups of the optimizer (scale)",
        "state of the optimizer for something that is not a tensor of the model (spirit)",
        "state of the optimizer for parameters in none of its groups (blocks.0.weight, blocks.1.weight)",
    ]
    assert changed(aliases={"model/scale": "model/embed.weight"}) == [
        "tied names that are stored on their own, too (model/scale)"
    ]


def test_a_broken_structure_is_damage_even_where_all_bytes_are_right(tmp_path: Path) -> None:
    groups = ({"params": ("ghost",), "options": {}},)
    path = write_checkpoint(tmp_path, optimizer={"name": "AdamW", "groups": groups})
    assert any("ghost" in one.tensors for one in verify_checkpoint(path).damage)
