"""The manifest: what is accepted, what is not, and what a reader is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import xxhash

from shardwise.checkpoint.dtypes import CODES
from shardwise.checkpoint.format import (
    Manifest,
    OptimizerEntry,
    ParamGroup,
    Shard,
    TensorEntry,
    read_manifest,
    saved_steps,
    short_list,
    step_folder,
)
from shardwise.errors import CheckpointError


def manifest() -> Manifest:
    shards = (
        Shard(file="rank-00000.safetensors", key="model/a", offsets=(0, 0), lengths=(2, 3), hash="00"),
        Shard(file="rank-00001.safetensors", key="model/a", offsets=(2, 0), lengths=(1, 3), hash="01"),
    )
    groups = (ParamGroup(params=("a",), options={"lr": 0.1, "betas": [0.9, 0.99]}),)
    return Manifest(
        step=20,
        plan={"strategy": "fsdp"},
        plan_fingerprint="0123456789abcdef",
        versions={"torch": "2"},
        ranks=2,
        tensors={"model/a": TensorEntry(dtype="F32", shape=(3, 3), shards=shards)},
        aliases={"model/b": "model/a"},
        optimizer=OptimizerEntry(name="AdamW", groups=groups, state={"a": {"kind": "x"}}),
        state={"position": 2**60, "best": float("inf")},
    )


def write(folder: Path, change=lambda data: None) -> Path:
    data = json.loads(manifest().to_json())
    change(data)
    data["hash"] = f"xxh3-128:{'0' * 32}"  # the first in the file: its digits count as zeros
    made = xxhash.xxh3_128(json.dumps(data).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**data, "hash": f"xxh3-128:{made}"}))
    return folder


def test_round_trip(tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path)) == manifest()
    assert json.loads(manifest().to_json())["schema"] == 2
    assert manifest().entry("model/b") is manifest().entry("model/b") or manifest().entry("model/b").shape == (3, 3)
    assert manifest().entry("model/c") is None


def test_a_field_that_is_not_known_is_ignored(tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path, lambda data: data.update(later=1))) == manifest()


def test_a_flipped_bit_of_the_manifest_is_found(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "manifest.json"
    good = file.read_bytes()
    at = good.index(b'"lr": 0.1') + 6
    for place, value in ((at, b"2"), (good.index(b"xxh3-128:") + 9, b"g")):
        file.write_bytes(good[:place] + value + good[place + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest.json' is damaged: its bytes are not those that were"):
            read_manifest(tmp_path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has schema 4, and this version of shardwise reads up to 3; update"):
        read_manifest(write(tmp_path, lambda data: data.update(schema=4, tensors="of another kind")))


def _gap(data: dict) -> None:
    data["tensors"]["model/a"]["shards"].pop()


def _outside(data: dict) -> None:
    data["tensors"]["model/a"]["shards"][1]["offsets"] = [3, 0]


def _dimensions(data: dict) -> None:
    data["tensors"]["model/a"]["shards"][1]["offsets"] = [2]


def _path(data: dict) -> None:
    data["tensors"]["model/a"]["shards"][1]["file"] = "../other.safetensors"


def _dtype(data: dict) -> None:
    data["tensors"]["model/a"]["dtype"] = "F33"


def _alias(data: dict) -> None:
    data["aliases"]["model/c"] = "model/d"


def _no_schema(data: dict) -> None:
    data["schema"] = 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_gap, "contain 6 of 9 elements"),
        (_outside, "reaches outside"),
        (_dimensions, "another number of dimensions"),
        (_path, "is not a plain file name"),
        (_dtype, "dtype 'F33' is unknown"),
        (_alias, "aliases of nothing: model/c"),
        (_no_schema, "schema"),
    ],
)
def test_damage_is_named(tmp_path: Path, change, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        read_manifest(write(tmp_path, change))
    assert "manifest.json" in str(caught.value)
    assert "load an earlier checkpoint" in str(caught.value)


def test_no_manifest_and_half_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema": 1,')
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(tmp_path)


def test_saved_steps_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    for step in (5, 100_000_000, 99_999_999):
        (tmp_path / step_folder(step)).mkdir()
        (tmp_path / step_folder(step) / "manifest.json").write_text("{}")
    for other in ("step-1", ".tmp-step-00000009", "step-00000007x", "best"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "manifest.json").write_text("{}")
    (tmp_path / step_folder(6)).mkdir()
    assert [step for step, _ in saved_steps(tmp_path)] == [100_000_000, 99_999_999, 5]


def test_an_empty_tensor_needs_no_shard() -> None:
    assert TensorEntry(dtype="F32", shape=(0, 3)).shards == ()
    with pytest.raises(ValueError, match="contain 0 of 1 elements"):
        TensorEntry(dtype="F32", shape=())


def test_short_list() -> None:
    assert short_list(["a"]) == "a"
    assert short_list([str(n) for n in range(12)]).split("\n")[-1].strip() == "and 2 more"
    assert len(short_list([str(n) for n in range(10)]).split("\n")) == 11


def test_every_code_is_what_safetensors_calls_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from shardwise.checkpoint.shard_files import write_file

    tensors = {code: torch.zeros(3, 2).to(dtype) for dtype, code in CODES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "columns": torch.arange(6).reshape(2, 3).t()}
    hashes = write_file(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in tensors.items()}
    assert torch.equal(found["columns"], tensors["columns"])
    assert found["scalar"].shape == ()
    assert float(found["scalar"]) == 2.5
    assert all(re.fullmatch("xxh3-128:[0-9a-f]{32}", value) for value in hashes.values())
