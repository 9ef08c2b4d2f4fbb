"""Folders that Accelerate's own functions wrote: FSDP sharded and whole, DDP, one process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.readers.accelerate import AccelerateSource
from shardwise.checkpoint.readers.detect import open_source
from shardwise.errors import CheckpointError

pytest.importorskip("accelerate", reason="the folders are written by Accelerate itself: pip install accelerate")

ROOT = Path(__file__).parents[2]
WITH_OPTIMIZER = ("fsdp2-sharded", "fsdp2-full", "fsdp1-sharded", "fsdp1-full")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every folder that the writer makes."""
    target = tmp_path_factory.mktemp("accelerate")
    command = [sys.executable, "-W", "ignore", "-m", "tests.peers.write_accelerate", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-4000:]
    return target


def expected_of(folders, name):
    return torch.load(folders / f"{name}.expected.pt")


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", [*WITH_OPTIMIZER, "ddp", "plain", "plain-bin", "compiled"])
def test_everything_that_has_a_name_is_read_as_it_was_saved(folders, name):
    expected = expected_of(folders, name)
    with open_source(folders / name) as source:
        assert isinstance(source, AccelerateSource)
        assert source.place == str(folders / name)
        assert set(source.tensors) == set(expected)
        for key, tensor in expected.items():
            assert same(source.read(key, source.tensors[key].full), tensor), key


@pytest.mark.parametrize("name", WITH_OPTIMIZER)
def test_the_optimizer_of_fsdp_is_kept_by_name(folders, name):
    with AccelerateSource(folders / name) as source:
        assert source.kind == "Accelerate FSDP folder"
        assert source.step == 2
        assert source.notes == ()
        assert source.optimizer["name"] == "AdamW"
        groups = [(set(group["params"]), group["options"]["weight_decay"]) for group in source.optimizer["groups"]]
        assert groups == [({"0.weight", "1.weight", "2.weight"}, 0.01), ({"0.bias", "1.bias"}, 0.0)]
        assert {group["options"]["lr"] for group in source.optimizer["groups"]} == {0.25}


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 2), ("plain", 1), ("plain-bin", 1)])
def test_what_is_not_carried_over_is_said(folders, name, ranks):
    with AccelerateSource(folders / name) as source:
        assert source.kind == "Accelerate folder"
        assert source.optimizer is None
        by_number, files = source.notes
        assert by_number.startswith("'optimizer' keeps the state of 5 parameters by number")
        assert all(f"'random_states_{rank}.pkl'" in files for rank in range(ranks)) and "'scheduler.bin'" in files


def test_a_file_of_each_rank_is_refused(folders):
    with pytest.raises(CheckpointError) as caught:
        AccelerateSource(folders / "fsdp2-of-ranks")
    assert "'pytorch_model_fsdp_0_rank0.bin' and its like, a file of each rank" in str(caught.value)


class Payload:
    """What it does when it is loaded: make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("file", ["pytorch_model_fsdp.bin", "optimizer.bin"])
def test_a_payload_is_refused_and_does_not_run(folders, tmp_path, file):
    copy, proof = Path(shutil.copytree(folders / "fsdp2-full", tmp_path / "copy")), tmp_path / "ran"
    content = torch.load(copy / file)
    torch.save({**content, "more": Payload(proof)}, copy / file)
    torch.load(copy / file, weights_only=False)
    assert proof.exists(), "it is a real one"
    proof.unlink()
    with pytest.raises(CheckpointError) as caught:
        AccelerateSource(copy)
    assert "'posix.system'" in str(caught.value) and str(copy / file) in str(caught.value)
    assert not proof.exists()


def test_damage_and_what_is_missing(folders, tmp_path):
    copy = Path(shutil.copytree(folders / "fsdp2-sharded", tmp_path / "copy"))
    file = copy / "optimizer_0" / "__1_0.distcp"
    data = file.read_bytes()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"files are missing: '__1_0.distcp' \(part of optimizer\."):
        AccelerateSource(copy)
    file.write_bytes(data[:-100])
    with AccelerateSource(copy) as source:
        broken = [name for name in source.tensors if not readable(source, name)]
    assert broken and all(name.startswith("optimizer/") for name in broken)
    shutil.rmtree(copy / "optimizer_0")
    with AccelerateSource(copy) as source:
        assert all(name.startswith("model/") for name in source.tensors)
        assert source.optimizer is None and source.step is None
    shutil.rmtree(copy / "pytorch_model_fsdp_0")
    with pytest.raises(CheckpointError, match="has no weights of Accelerate"):
        AccelerateSource(copy)


def readable(source, name):
    try:
        source.read(name, source.tensors[name].full)
    except CheckpointError as error:
        assert "__1_0.distcp' is damaged" in str(error) and "optimizer.state." in str(error)
        return False
    return True


def test_of_several_models_the_first_is_taken(folders, tmp_path):
    copy = Path(shutil.copytree(folders / "fsdp2-full", tmp_path / "copy"))
    for name in ("pytorch_model_fsdp", "optimizer"):
        shutil.copy(copy / f"{name}.bin", copy / f"{name}_1.bin")
    with AccelerateSource(copy) as source:
        assert source.notes == (
            "there are several models or optimizers; only the first is carried over, not 'optimizer_1.bin', "
            "'pytorch_model_fsdp_1.bin'",
        )
