"""Grids of shards against the lists that they stand for, and the manifest of a thousand ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.format import MANIFEST, Manifest, read_manifest
from shardwise.checkpoint.grid import Grid, grid_of, runs_of
from shardwise.checkpoint.inspect import readable_shards
from shardwise.checkpoint.save_report import ManifestHead, merged
from shardwise.checkpoint.spread_report import merge_rows, write_table
from shardwise.errors import CheckpointError
from shardwise.plan.plan import Plan


def cut(shape: tuple[int, ...], begins: list[list[int]]) -> list[Box]:
    """The cells of a grid, one after the other."""
    boxes = [Box((), ())]
    for places, size in zip(begins, shape, strict=True):
        ends = [*places[1:], size]
        boxes = [
            Box((*box.offsets, at), (*box.lengths, end - at))
            for box in boxes
            for at, end in zip(places, ends, strict=True)
        ]
    return boxes


def test_a_grid_is_the_list_of_its_boxes() -> None:
    draw = random.Random(0)
    for _ in range(200):
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 3)))
        begins = [sorted({0, *draw.choices(range(size), k=draw.randint(0, 4))}) for size in shape]
        boxes = cut(shape, begins)
        files = draw.sample(range(500), len(boxes))
        pairs = [*zip(boxes, files, strict=True)]
        draw.shuffle(pairs)
        grid = grid_of(shape, pairs)
        assert grid is not None
        assert [grid.box(cell, shape) for cell in range(grid.cells)] == boxes
        assert [grid.file(cell) for cell in range(grid.cells)] == files
        low = tuple(draw.randrange(size) for size in shape)
        mine = Box(low, tuple(draw.randint(0, size - at) for size, at in zip(shape, low, strict=True)))
        expected = [
            number
            for number, box in enumerate(boxes)
            if all(
                max(a, b) < min(a + n, b + m)
                for a, n, b, m in zip(box.offsets, box.lengths, mine.offsets, mine.lengths, strict=True)
            )
        ]
        assert grid.overlapping(mine) == expected
        if len(boxes) > 1:
            hole = pairs[1:]
            assert grid_of(shape, hole) is None or len(shape) == 0, "a cell is missing"
            longer = [(Box(pairs[0][0].offsets, tuple(n + 1 for n in pairs[0][0].lengths)), 0), *hole]
            assert grid_of(shape, longer) is None
            assert grid_of(shape, [(box, 0) for box in boxes]) is None, "a file has one tensor of a name"


def test_runs() -> None:
    assert runs_of([0, 8, 16, 24]) == ((0, 8, 4),)
    assert runs_of([3, 3, 3]) == ((3, 0, 3),)
    assert runs_of([5, 1]) == ((5, 0, 1), (1, 0, 1))
    assert runs_of([]) == ()


@pytest.mark.parametrize(
    ("begins", "files", "says"),
    [
        ([[[1, 1, 2]]], [[0, 1, 2]], "begin at 0"),
        ([[[0, 0, 2]]], [[0, 1, 2]], "in order"),
        ([[[0, 4, 3], [8, 4, 2]]], [[0, 1, 5]], "in order"),
        ([[[0, 1, 1 << 40]]], [[0, 1, 1 << 40]], "a grid of 1099511627776 cells"),
        ([[[0, 4, 2]]], [[0, 1, 3]], "3 files for 2 cells"),
        ([[[0, 4, 0]]], [], "cells"),
    ],
)
def test_what_is_no_grid(begins: Any, files: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Grid.model_validate({"begins": begins, "files": files})


WORLD = 1024
SHAPES = {f"model/blocks.{block}.w{number}": [8192, 64] for block in range(4) for number in range(7)}


def reports(folder: Path, *, without: int = -1) -> list[dict[str, Any]]:
    """What ``WORLD`` ranks report of rows that fsdp gives them, merged by four ranks; no tensor is written."""
    rows: list[dict[str, Any]] = []
    for rank in range(WORLD):
        at = [[8 * rank, 0], [8, 64]]
        rows.append({name: ["F32", shape, at if rank != without else None, "x"] for name, shape in SHAPES.items()})
    found = []
    for rank in range(WORLD):
        mine = [name for at, name in enumerate(SHAPES) if at % WORLD == rank]
        file = f"rank-{rank:05d}.safetensors"
        (folder / file).touch()
        part = merge_rows([{name: row[name] for name in mine} for row in rows])
        base = {"rank": rank, "file": file, "size": 0, "entries": {}, "scalars": {}, "aliases": {}}
        found.append({**base, "order": [*SHAPES], "groups": [] if rank == 0 else None, "table": "xxh3-128:0", **part})
    return found


def test_a_thousand_ranks_have_a_small_manifest(tmp_path: Path) -> None:
    head = ManifestHead(20, Plan(strategy="fsdp"), {}, "AdamW", None, ())
    given = reports(tmp_path)
    keys = dict.fromkeys(SHAPES, "xxh3-128:" + "5" * 32)
    given[700]["table"] = write_table(tmp_path, given[700]["file"], keys)
    forged: Any = [*keys]
    given[702]["table"] = write_table(tmp_path, given[702]["file"], forged)
    manifest = merged(tmp_path, given, head)
    document = manifest.to_json()
    assert len(document) < 90_000, "of 28,672 shards; most of it are names of files"
    (tmp_path / MANIFEST).write_text(document)
    again = read_manifest(tmp_path)
    assert again == manifest
    shards = again.tensors["model/blocks.3.w2"].shards
    assert len(shards) == WORLD
    assert (shards[700].file, shards[700].offsets, shards[700].lengths) == (
        "rank-00700.safetensors",
        (5600, 0),
        (8, 64),
    )
    assert shards[700].hash == "xxh3-128:" + "5" * 32
    with pytest.raises(CheckpointError, match=r"rank-00701\.hashes\.json' cannot be read"):
        shards[701]
    with pytest.raises(CheckpointError, match=r"rank-00702\.hashes\.json' is damaged: it is no table of hashes"):
        shards[702]
    files, damage = readable_shards(tmp_path, again)
    assert {file: len(found) for file, found in files.items()} == {given[700]["file"]: len(SHAPES)}
    assert [one.file for one in damage] == [f"rank-{rank:05d}.hashes.json" for rank in range(WORLD) if rank != 700]
    assert str(damage[0]).startswith("rank-00000.hashes.json: cannot be read: No such file or directory (model/")
    without = again.model_copy(update={"tensors": {}})
    assert len(readable_shards(tmp_path, without)[1]) == WORLD - 1, "tables that no grid needs are read, too"


def test_a_rank_that_wrote_nothing_is_missed(tmp_path: Path) -> None:
    head = ManifestHead(20, Plan(strategy="fsdp"), {}, "AdamW", None, ())
    with pytest.raises(
        CheckpointError, match=r"do not have all of the state:\s+model/blocks.0.w0.*the shards contain 523776 of 524288"
    ):
        merged(tmp_path, reports(tmp_path, without=5), head)
    given = reports(tmp_path)
    given[9]["odd"] = "model/x has another shape or dtype on rank 3 than on others"
    with pytest.raises(CheckpointError, match="model/x has another shape or dtype on rank 3"):
        merged(tmp_path, given, head)


def test_a_difference_between_ranks_is_named() -> None:
    rows = [{"a": ["F32", [2], [[0], [1]], "x"]}, {"a": ["F32", [3], [[1], [1]], "x"]}]
    assert merge_rows(rows)["odd"] == "a has another shape or dtype on rank 1 than on others"
    rows = [{"a": ["F32", [8, 2], [[rank, 0], [1, 2]], "x"]} for rank in range(5)]
    rows.append({"a": ["F32", [8], [[5], [1]], "x"]})
    assert merge_rows(rows)["odd"] == "a has another shape or dtype on rank 5 than on others"


def test_grids_outside_of_their_tensor_or_files(tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads(
        merged(tmp_path, reports(tmp_path), ManifestHead(20, Plan(strategy="fsdp"), {}, "AdamW", None, ())).to_json()
    )
    one = document["tensors"]["model/blocks.0.w0"]
    for change, says in (
        ({"shape": [8, 64]}, "reaches outside"),
        ({"shape": [8192]}, "a grid of 2 dimensions"),
        ({"grid": {**one["grid"], "files": [[1, 1, WORLD]]}}, "in file 1024 of 1024"),
        ({"grid": {**one["grid"], "files": [[0, 1, WORLD - 1], [7, 0, 1]]}}, "1024 cells has several in one file"),
        (
            {"shape": [1 << 26, 64], "grid": {"begins": [[[0, 1, 1 << 26]], [[0, 0, 1]]], "files": [[0, 0, 1 << 26]]}},
            "67108864 cells has several in one file",
        ),
    ):
        changed = {**document, "tensors": {**document["tensors"], "model/blocks.0.w0": {**one, **change}}}
        with pytest.raises(ValidationError, match=says):
            Manifest.model_validate(changed)
