"""Folders of PyTorch's distributed checkpoints, written by itself on gloo ranks: whole, in boxes, hostile, damaged."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from upath import UPath

from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.readers.dcp import DcpSource, pieces
from shardwise.checkpoint.readers.dcp_metadata import cover_problem
from shardwise.checkpoint.storage import local_storage as storage
from shardwise.errors import CheckpointError
from tests.peers import write_dcp
from tests.worlds import run_world

LAYOUTS = [
    (1, "one", "nested"),
    (1, "fsdp", "flat"),
    (2, "fsdp", "app"),
    (2, "ddp", "nested"),
    (2, "tp", "flat"),
    (4, "fsdp", "nested"),
    (4, "2d", "flat"),
    (4, "hsdp", "weights"),
    (2, "fsdp", "old"),
    (2, "fsdp", "of ranks"),
    (2, "fsdp", "many files"),
]


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """What every layout holds, as one process computes it; and that process's folder."""
    folder = tmp_path_factory.mktemp("dcp") / "one"
    return run_world(write_dcp.save, 1, str(folder), "one")[0], folder


@pytest.fixture
def folder(truth, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(truth[1], tmp_path / "copy"))


def boxes(shape, count):
    """Boxes of any size and place, the empty one too."""
    generator = random.Random(f"{shape}")
    for _ in range(count):
        begins = [generator.randint(0, size) for size in shape]
        yield Box(tuple(begins), tuple(generator.randint(0, size - b) for b, size in zip(begins, shape, strict=True)))


def cut(tensor, box):
    return tensor[tuple(slice(b, b + n) for b, n in zip(box.offsets, box.lengths, strict=True))]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous() and torch.equal(a, b)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("world", "layout", "form"), LAYOUTS, ids=lambda value: str(value).replace(" ", "-"))
def test_everything_is_read_as_it_was_saved(world, layout, form, truth, tmp_path):
    expected = run_world(write_dcp.save, world, str(tmp_path), layout, form)[0]
    if form == "weights":
        expected = {name: tensor for name, tensor in expected.items() if name.startswith("model/")}
    with DcpSource(tmp_path) as source:
        assert set(source.tensors) == set(expected)
        for name, tensor in expected.items():
            assert same(tensor, truth[0][name]), "the layouts hold the same"
            assert same(source.read(name, source.tensors[name].full), tensor), name
            for box in boxes(tensor.shape, 6):
                assert same(source.read(name, box), cut(tensor, box)), (name, box)
        assert source.step == (None if form == "weights" else 3)
        if form == "weights":
            assert source.optimizer is None
            return
        assert source.optimizer["name"] == "AdamW"
        assert source.optimizer["state"] == {}
        groups = source.optimizer["groups"]
        assert [group["options"]["weight_decay"] for group in groups] == [0.01, 0.0]
        assert [group["options"]["betas"] for group in groups] == [[0.5, 0.75]] * 2
        parameters = {name.split("/")[1] for name in expected if name.startswith("optimizer/")}
        assert {name for group in groups for name in group["params"]} == parameters
        assert {"short", "embed.weight"} <= set(groups[0]["params"]) and "scale" in groups[1]["params"]
        json.dumps(source.optimizer)
        assert any("'epoch', 'lr_scheduler'" in note for note in source.notes) == (form != "app")


def test_names_that_wrapping_made(tmp_path):
    expected = run_world(write_dcp.save, 2, str(tmp_path), "ddp", "raw")[0]
    source = DcpSource(tmp_path)
    assert set(source.tensors) == {name for name in expected if name.startswith("model/")}
    assert source.optimizer is None
    assert "'optimizer' keeps the state of 7 parameters by number" in source.notes[0]


def test_many_read_at_once(truth):
    expected, folder = truth
    source = DcpSource(folder)
    names = list(expected) * 4
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: source.read(name, source.tensors[name].full), names))
    assert all(same(tensor, expected[name]) for name, tensor in zip(names, found, strict=True))


def test_a_folder_behind_a_url(truth):
    expected, folder = truth
    remote = UPath("memory://dcp-source/saved")
    try:
        for file in folder.iterdir():
            (remote / file.name).write_bytes(file.read_bytes())
        source = DcpSource(remote)
        assert source.place == "memory://dcp-source/saved"
        assert source.optimizer == DcpSource(folder).optimizer
        for name, tensor in expected.items():
            assert same(source.read(name, source.tensors[name].full), tensor)
    finally:
        remote.fs.rm("/dcp-source", recursive=True)


def test_a_part_of_a_large_tensor_reads_no_more_than_that(tmp_path, monkeypatch):
    full = run_world(write_dcp.save_large, 2, str(tmp_path), 4096, 512)[0]
    source = DcpSource(tmp_path)
    sizes = []
    fill = storage.RangeReader.read_into

    def counted(self, begin, buffer):
        sizes.append(memoryview(buffer).nbytes)
        return fill(self, begin, buffer)

    monkeypatch.setattr(storage.RangeReader, "read_into", counted)
    headers = 40_000  # of the torch files that the pieces are in
    rows = Box((2040, 0), (16, 512))  # across the border of the two ranks
    assert same(source.read("model/large", rows), cut(full, rows))
    assert 4 * rows.numel <= sum(sizes) < 4 * rows.numel + headers
    sizes.clear()
    spot = Box((100, 17), (8, 3))
    assert same(source.read("model/large", spot), cut(full, spot))
    assert sum(sizes) < 8 * 512 * 4 + headers, "the rows it is in, not the tensor of 8 MiB"


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (1, 7, 3), (4, 4, 4)])
def test_pieces_are_small_and_cover_the_box(shape):
    box = Box((2,) * len(shape), shape)
    parts = list(pieces(box, 4, 40))
    assert sum(part.numel for part in parts) == box.numel
    assert not parts or not cover_problem([n + 2 for n in shape], parts).startswith("the pieces at")
    assert all(4 * part.numel <= 40 or math.prod(part.lengths[:-1]) == 1 for part in parts)


# hostile


class Payload:
    """What it does when it is loaded: make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def edit(folder, change):
    """Change the metadata, as an object, in place."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def rename(metadata, old, new):
    """Give an entry another key."""
    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
    path = metadata.planner_data.pop(old)
    metadata.planner_data[new] = (*path[:-1], new.removeprefix("model."))
    for index in [index for index in metadata.storage_data if index.fqn == old]:
        metadata.storage_data[MetadataIndex(new, index.offset)] = metadata.storage_data.pop(index)


def refusal_of(folder, name=None):
    with pytest.raises(CheckpointError) as caught:
        source = DcpSource(folder)
        if name is not None:
            source.read(name, source.tensors[name].full)
    return str(caught.value)


def put_item(folder, index, data):
    """Let the item of ``index`` be ``data``, at the end of its file."""

    def change(metadata):
        info = metadata.storage_data[index]
        path = folder / info.relative_path
        info.offset, info.length = path.stat().st_size, len(data)
        path.write_bytes(path.read_bytes() + data)

    edit(folder, change)


def saved(value, path):
    torch.save(value, path)
    return path.read_bytes()


def test_a_payload_in_the_metadata_is_refused_and_does_not_run(folder, tmp_path):
    proof = tmp_path / "ran"
    edit(folder, lambda metadata: metadata.planner_data.update(more=Payload(proof)))
    pickle.loads((folder / ".metadata").read_bytes())
    assert proof.exists(), "it is a real one"
    proof.unlink()
    message = refusal_of(folder)
    assert "'posix.system'" in message and "refused and not run" in message and f"{folder / '.metadata'}" in message
    assert not proof.exists()


def test_a_payload_in_a_value_is_refused_and_does_not_run(folder, tmp_path):
    proof = tmp_path / "ran"
    data = saved(Payload(proof), tmp_path / "item")
    put_item(folder, MetadataIndex("optim.param_groups.0.lr"), data)
    torch.load(tmp_path / "item", weights_only=False)
    assert proof.exists(), "it is a real one"
    proof.unlink()
    message = refusal_of(folder)
    assert "'posix.system'" in message and "__0_0.distcp" in message and "optim.param_groups.0.lr" in message
    assert not proof.exists()


def test_a_payload_in_a_tensor_is_refused_and_does_not_run(folder, tmp_path):
    proof = tmp_path / "ran"
    tensor = torch.zeros(7, 5)
    tensor.more = Payload(proof)
    data = saved(tensor, tmp_path / "item")
    put_item(folder, MetadataIndex("model.embed.weight", [0, 0]), data)
    torch.load(tmp_path / "item", weights_only=False)
    assert proof.exists(), "it is a real one"
    proof.unlink()
    message = refusal_of(folder, "model/embed.weight")
    assert "'posix.system'" in message and "__0_0.distcp" in message and "model.embed.weight" in message
    assert not proof.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b.distcp", ""])
def test_files_outside_of_the_folder_are_refused(folder, name):
    def change(metadata):
        metadata.storage_data[MetadataIndex("model.embed.weight", [0, 0])].relative_path = name

    edit(folder, change)
    assert f"'{name}' is not a plain file name" in refusal_of(folder)


# damaged

HEAD = MetadataIndex("model.blocks.0.weight", [0, 0])


def moved(**changes):
    def change(metadata):
        vars(metadata.storage_data[HEAD]).update(changes)

    return change


def other_place(metadata):
    metadata.storage_data[HEAD] = metadata.storage_data[MetadataIndex("model.embed.weight", [0, 0])]


def resized(size):
    def change(metadata):
        metadata.state_dict_metadata[HEAD.fqn].size = torch.Size(size)

    return change


def twice(metadata):
    chunks = metadata.state_dict_metadata[HEAD.fqn].chunks
    chunks.append(type(chunks[0])(torch.Size([4, 4]), torch.Size([1, 1])))
    metadata.storage_data[MetadataIndex(HEAD.fqn, [4, 4])] = metadata.storage_data[HEAD]


def without_place(metadata):
    del metadata.storage_data[HEAD]


def transformed(metadata):
    metadata.storage_data[HEAD].transform_descriptors = ["stream.zstd/1"]


def of_dtype(metadata):
    metadata.state_dict_metadata[HEAD.fqn].properties.dtype = torch.int32


DAMAGE = {
    "offset": (moved(offset=13), "'__0_0.distcp", HEAD.fqn),
    "behind the end": (moved(offset=1 << 40), "__0_0.distcp' is damaged: bytes 1099511627776", HEAD.fqn),
    "length": (moved(length=9), ".metadata' is damaged", "9 bytes in '__0_0.distcp' are too few for [5, 5]", HEAD.fqn),
    "another tensor": (other_place, "torch.float32 of [7, 5]", "not torch.float32 of [5, 5]", HEAD.fqn),
    "dtype": (of_dtype, "torch.float32 of [5, 5]", "not torch.int32", HEAD.fqn),
    "hole": (resized([6, 5]), f"{HEAD.fqn}: the pieces contain 25 of 30 elements"),
    "outside": (resized([5, 4]), f"{HEAD.fqn}: the piece at [0, 0] of [5, 5] reaches outside of [5, 4]"),
    "dimensions": (resized([25]), f"{HEAD.fqn}: a piece has 2 dimensions, the tensor 1"),
    "overlap": (twice, f"{HEAD.fqn}: the pieces at [0, 0] and [4, 4] overlap"),
    "no place": (without_place, ".metadata' is damaged", HEAD.fqn),
    "missing": (moved(relative_path="__9_0.distcp"), f"files are missing: '__9_0.distcp' (part of {HEAD.fqn})"),
    "compressed": (transformed, "'__0_0.distcp' was written through the transform ['stream.zstd/1']"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(folder, kind):
    change, *words = DAMAGE[kind]
    edit(folder, change)
    message = refusal_of(folder, "model/blocks.0.weight")
    assert all(word.strip("'") in message for word in words), message


def test_damaged_files_are_named(folder):
    file, metadata = folder / "__0_0.distcp", folder / ".metadata"
    data, told = file.read_bytes(), metadata.read_bytes()
    last = max(pickle.loads(told).storage_data.items(), key=lambda item: item[1].offset)[0].fqn
    name = "model/" + last.removeprefix("model.")
    if last.startswith("optim.state."):
        parameter, key = last.removeprefix("optim.state.").rsplit(".", 1)
        name = f"optimizer/{parameter}/{key}"
    file.write_bytes(data[:-100])
    message = refusal_of(folder, name)
    assert f"{last}: '{file}' is damaged" in message
    file.unlink()
    assert "files are missing: '__0_0.distcp' (part of " in refusal_of(folder)
    file.write_bytes(data)
    for broken in (told[:-40], told[:200], b"", b"no pickle", told[:300] + b"\xff" + told[301:]):
        metadata.write_bytes(broken)
        assert f"'{metadata}' is damaged" in refusal_of(folder)
    metadata.write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    assert "a dict where a Metadata belongs" in refusal_of(folder)
    metadata.unlink()
    assert "the save was interrupted" in refusal_of(folder)
    assert "has no .metadata" in refusal_of(folder / "nowhere")


def test_names_that_would_play_with_a_terminal(folder):
    edit(folder, lambda metadata: rename(metadata, "epoch", "epoch\x1b[2J"))
    assert any("epoch\\x1b[2J" in note for note in DcpSource(folder).notes)
    edit(folder, lambda metadata: rename(metadata, HEAD.fqn, "model.\x1b[2J"))
    assert "names with control characters: model/\\x1b[2J" in refusal_of(folder)


def test_boxes_that_do_not_cover():
    halves = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]
    assert not cover_problem((4, 4), halves)
    assert not cover_problem((4, 4), [Box((0, 0), (4, 1)), Box((0, 1), (3, 3)), Box((3, 1), (1, 3))])
    assert not cover_problem((), [Box((), ())])
    assert not cover_problem((0, 4), [])
    assert cover_problem((), []) == "the pieces contain 0 of 1 elements"
    assert "overlap" in cover_problem((), [Box((), ()), Box((), ())])
    crossing = [Box((0, 0), (4, 1)), Box((1, 1), (1, 3)), Box((2, 0), (1, 4)), Box((0, 3), (1, 1))]
    assert cover_problem((4, 4), crossing) == "the pieces at [0, 0] and [2, 0] overlap"
    assert cover_problem((4, 4), halves[:1]) == "the pieces contain 8 of 16 elements"


# forms


def test_a_step_that_is_none(folder, tmp_path):
    put_item(folder, MetadataIndex("step"), saved("many", tmp_path / "item"))
    source = DcpSource(folder)
    assert source.step is None
    assert "'step' is not a step count and is not carried over" in source.notes


def test_the_step_that_lightning_keeps_beside(folder):
    edit(folder, lambda metadata: metadata.state_dict_metadata.pop("step"))
    assert DcpSource(folder).step == 3, "the optimizer's own count"
    torch.save({"global_step": 17, "pytorch-lightning_version": "2.6.6", "loops": {}}, folder / "meta.pt")
    source = DcpSource(folder)
    assert source.step == 17
    assert "of 'meta.pt' (loops, schedulers, callbacks) only the step is carried over" in source.notes
    torch.save({"global_step": 17, "more": Payload(folder / "ran")}, folder / "meta.pt")
    source = DcpSource(folder)
    assert source.step == 3
    assert any("'meta.pt' is not carried over" in note and "posix.system" in note for note in source.notes)
    assert not (folder / "ran").exists()
