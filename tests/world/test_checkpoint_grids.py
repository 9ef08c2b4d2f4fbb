"""Checkpoints as many ranks write them (schema 3), by few: each element once, into any strategy, damage named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint import spread_report
from shardwise.checkpoint.format import newest, read_manifest
from shardwise.checkpoint.inspect import inspect_checkpoint
from shardwise.checkpoint.integrity import verify_checkpoint
from shardwise.checkpoint.load import load_checkpoint
from shardwise.checkpoint.save import Saver
from shardwise.errors import CheckpointError
from tests.world.test_checkpoint_matrix import assert_all, load_each, prepared, save_each, set_all, step
from tests.worlds import run_world

WEIGHT = "optimizer/blocks.0.up.weight/exp_avg"  # 11 rows


def save_spread(root: str, strategies: list[str], options: dict) -> None:
    spread_report.SPREAD, spread_report.LISTED = 1, 1
    save_each(root, strategies, options)


def save_both(root: str) -> list[bool]:
    """One state, saved as few ranks and as many do, in the background the second time; what lies in memory after."""
    session, outer, optimizer = prepared("fsdp")
    step(session, outer, optimizer)
    set_all(session, optimizer)
    for name, spread in (("listed", 99), ("grids", 1)):
        spread_report.SPREAD, spread_report.LISTED = spread, 1
        with Saver(Path(root) / name, keep=1, async_save=spread == 1) as saver:
            rng = {"cpu": torch.tensor([session.ranks.rank], dtype=torch.uint8)}
            saver.save(20, model=session.module, optimizer=optimizer, plan=session.plan, state={"a": 1}, rng=rng)
    assert_all(session, optimizer, "after saving")
    errors = []
    table = Path(root) / "grids" / "step-00000020" / "rank-00001.hashes.json"
    whole = table.read_bytes()
    damages = [lambda: table.write_bytes(whole.replace(b"xxh3-128:", b"xxh3-128;", 1)), table.unlink]
    for damage in damages:
        if session.ranks.is_main:
            damage()
        spread_report.exchange.agree(None)  # all have seen it
        try:
            load_checkpoint(newest(Path(root) / "grids"), model=session.module, optimizer=optimizer)
        except CheckpointError as error:
            errors.append(str(error))
    return errors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """Checkpoints of two ranks, and what loading a damaged one said on each."""
    root = tmp_path_factory.mktemp("grids")
    return root, run_world(save_both, 2, str(root))


def test_the_same_tensors_and_bytes_as_in_a_list(saved: tuple[Path, list[list[str]]]) -> None:
    listed, grids = (saved[0] / name / "step-00000020" for name in ("listed", "grids"))
    one, other = read_manifest(listed), json.loads((grids / "manifest.json").read_text())
    assert (one.schema_version, other["schema"]) == (2, 3)
    assert "grid" not in json.dumps(json.loads((listed / "manifest.json").read_text()))
    assert [*other["tensors"]] == [*one.tensors], "in the model's order, not in that of who merged them"
    assert {name: entry["shape"] for name, entry in other["tensors"].items()} == {
        name: list(entry.shape) for name, entry in one.tensors.items()
    }
    steps = [entry for name, entry in other["tensors"].items() if name.endswith("/step")]
    tiny = {shard["file"] for entry in steps for shard in entry["shards"]}
    assert len(tiny) == 1, "a reader of tiny tensors opens one file"
    total = [
        sum(t.nbytes for file in path.glob("*.safetensors") for t in load_file(file).values())
        for path in (listed, grids)
    ]
    assert total[0] == total[1]


def test_damaged_tables_are_named_on_all_ranks(saved: tuple[Path, list[list[str]]]) -> None:
    table = saved[0] / "grids" / "step-00000020" / "rank-00001.hashes.json"
    for errors in saved[1]:
        assert f"'{table}' is damaged: its bytes are not those that were written" in errors[0]
        assert f"'{table}' cannot be read: No such file or directory" in errors[1]
    assert not verify_checkpoint(saved[0] / "listed").damage
    file = table.with_name("rank-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    found = verify_checkpoint(saved[0] / "grids").damage
    assert [(damage.file, damage.what) for damage in found] == [
        (table.name, "cannot be read: No such file or directory"),
        (file.name, "bytes are not those that were saved"),
    ], "what else is damaged is found, too"


def test_grids_into_any_strategy(tmp_path: Path) -> None:
    run_world(save_spread, 3, str(tmp_path), ["fsdp", "ddp"], {})
    run_world(save_spread, 4, str(tmp_path), ["hsdp"], {})
    manifest = read_manifest(tmp_path / "fsdp@3" / "step-00000020")
    entry = manifest.tensors[WEIGHT]
    assert entry.grid is not None and not entry.listed
    assert [(shard.offsets, shard.lengths) for shard in entry.shards] == [
        ((0, 0), (4, 5)),
        ((4, 0), (4, 5)),
        ((8, 0), (3, 5)),
    ]
    for folder in tmp_path.iterdir():
        assert not verify_checkpoint(folder).damage
        assert not inspect_checkpoint(folder).notes, "every file belongs to it"
    file = tmp_path / "ddp@3" / "step-00000020" / "rank-00000.safetensors"
    for world, strategies in ((1, ["one"]), (2, ["fsdp", "zero1"]), (3, ["fsdp"])):
        pairs = run_world(load_each, world, str(tmp_path), strategies, {})
        assert pairs == [3 * len(strategies)] * world
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    found = verify_checkpoint(tmp_path / "ddp@3").damage
    assert [(damage.file, damage.what) for damage in found] == [(file.name, "bytes are not those that were saved")]
