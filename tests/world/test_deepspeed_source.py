"""DeepSpeed's checkpoints, written by itself on gloo ranks, against what those ranks held."""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from upath import UPath

from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.readers import deepspeed_zero
from shardwise.checkpoint.readers.deepspeed import DeepSpeedSource
from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.storage import local_storage as storage
from shardwise.errors import CheckpointError, UserError
from tests.peers import write_deepspeed
from tests.peers.write_deepspeed import CASES, STATE, STEPS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

MATRICES = ("cube", "shift", "embed.weight", "up.weight", "down.weight")
VECTORS = ("gain", "norm.weight", "norm.bias", "up.bias")
FROZEN = ("fixed.weight", "fixed.bias")
BY_NUMBER = "stage0-fp32-2"
TAG = f"global_step{STEPS}"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder with all checkpoints and what the ranks held."""
    folder = tmp_path_factory.mktemp("deepspeed")
    script = [sys.executable, write_deepspeed.__file__, str(folder)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=write_deepspeed.TIMEOUT_S + 60)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture
def copy_of(written, tmp_path):
    """Copies a checkpoint, to be damaged; gives its folder with the files."""

    def copy(name):
        return Path(shutil.copytree(written / name, tmp_path / name)) / TAG

    return copy


def case_named(name):
    return next(case for case in CASES if case.name == name)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def boxes(shape, count=6):
    """Boxes of any size and place."""
    generator = random.Random(f"{shape}")
    for _ in range(count):
        begins = [generator.randint(0, size) for size in shape]
        yield Box(tuple(begins), tuple(generator.randint(0, size - b) for b, size in zip(begins, shape, strict=True)))


def cut(tensor, box):
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]


def full(source, name):
    return source.read(name, source.tensors[name].full)


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_every_tensor_is_what_the_ranks_held(written, name):
    case = case_named(name)
    held = load_file(written / f"{name}.safetensors")
    rounded = {key.removeprefix("rounded/"): held.pop(key) for key in list(held) if key.startswith("rounded/")}
    if name == BY_NUMBER:
        held = {key: value for key, value in held.items() if key.startswith("model/")}
    with DeepSpeedSource(written / name) as source:
        steps = {key for key in source.tensors if key.endswith("/step") and key not in held}
        assert set(source.tensors) - steps == set(held)
        for key, wanted in held.items():
            assert same(full(source, key), wanted), key
            for box in boxes(wanted.shape):
                assert same(source.read(key, box), cut(wanted, box)), (key, box)
        for key in steps:
            assert same(full(source, key), torch.tensor(float(STEPS)))
        for key, value in rounded.items():  # in the training dtype, as the model computes with it
            assert torch.equal(full(source, f"model/{key}").to(value.dtype), value), key
        assert source.step == STEPS and source.stage == case.stage
        assert source.kind == f"DeepSpeed folder, ZeRO stage {case.stage}"
        assert source.aliases == {"model/head.weight": "model/embed.weight"}
        if case.stage:
            states = [*STATE[case.optimizer], "step"] if case.optimizer == "AdamW" else STATE[case.optimizer]
            named = {f"optimizer/{parameter}/{key}" for parameter in MATRICES + VECTORS for key in states}
            assert named == {key for key in source.tensors if key.startswith("optimizer/")}


def test_masters_are_fp32_and_what_has_none_is_as_stored(written):
    for name in ("stage1-bf16-2", "stage3-bf16-3"):
        with DeepSpeedSource(written / name) as source:
            dtypes = {key: info.dtype for key, info in source.tensors.items()}
        assert {dtypes[f"model/{key}"] for key in MATRICES + VECTORS} == {torch.float32}
        assert {dtypes[f"model/{key}"] for key in FROZEN} == {torch.bfloat16}
        assert dtypes["model/seen"] == torch.int64


def test_the_optimizers_groups_and_class(written):
    for name in ("stage1-fp32-3", "stage1-bf16-fp32grads-2", "stage2-bf16-3", "stage3-fp32-3", "stage0-fp32-1"):
        with DeepSpeedSource(written / name) as source:
            optimizer = source.optimizer
        assert optimizer["name"] == "AdamW"
        assert optimizer["state"] == {}
        empty = {"nothing", "nil"} if name.startswith("stage0") else set()
        groups = [(set(group["params"]), group["options"]["weight_decay"]) for group in optimizer["groups"]]
        assert groups == [(set(MATRICES) | empty, 0.1), (set(VECTORS), 0.0)]
        assert optimizer["groups"][0]["options"]["betas"] == [0.9, 0.999]
        assert not {"params", "param_names", "step"} & set(optimizer["groups"][0]["options"])
    with DeepSpeedSource(written / "stage1-sgd-1") as source:
        assert source.optimizer["name"] == "SGD"


def test_what_is_not_carried_over_is_said(written):
    beside = {
        "stage2-fp32-2": "epoch, lr_scheduler, note",
        "stage3-bf16-3": "lr_scheduler",
        "stage0-bf16-2": "lr_scheduler",
    }
    for name, names in beside.items():
        with DeepSpeedSource(written / name) as source:
            assert list(source.notes) == [f"saved beside the model and not carried over: {names}"]
    with DeepSpeedSource(written / "stage2-elastic-2") as source:
        assert any("options (lr, betas, weight_decay) are not in the files" in note for note in source.notes)
        assert any("class of the optimizer is not in the files" in note for note in source.notes)
    with DeepSpeedSource(written / BY_NUMBER) as source:
        assert source.optimizer is None
        assert any("stored by number, without parameter names" in note for note in source.notes)


def test_a_folder_is_found_by_its_tag_by_latest_and_by_what_lies_in_it(written):
    place = written / "stage2-fp32-2"
    for path in (place, place / TAG):
        with open_source(path) as source:
            assert isinstance(source, DeepSpeedSource)
            assert source.folder == place / TAG and source.place == str(path)


def test_a_folder_behind_a_url(written):
    held = load_file(written / "stage3-bf16-3.safetensors")
    remote = UPath("memory://deepspeed-source")
    try:
        for path in (written / "stage3-bf16-3").rglob("*"):
            if path.is_file():
                (remote / path.relative_to(written)).parent.mkdir(parents=True, exist_ok=True)
                (remote / path.relative_to(written)).write_bytes(path.read_bytes())
        with DeepSpeedSource(remote / "stage3-bf16-3") as source:
            for name in source.tensors.keys() & held.keys():
                assert same(full(source, name), held[name]), name
    finally:
        remote.rmdir(recursive=True)


def test_pieces_smaller_than_a_tensor_give_the_same(written, monkeypatch):
    monkeypatch.setattr(deepspeed_zero, "CHUNK", 24)
    for name in ("stage1-fp32-3", "stage3-fp32-3"):
        held = load_file(written / f"{name}.safetensors")
        with DeepSpeedSource(written / name) as source:
            for key in ("model/cube", "model/embed.weight", "optimizer/up.weight/exp_avg_sq", "model/fixed.weight"):
                for box in (source.tensors[key].full, *boxes(held[key].shape)):
                    assert same(source.read(key, box), cut(held[key], box)), (key, box)


def test_only_the_rows_that_are_wanted_are_read(written, monkeypatch):
    read = []
    real = storage.RangeReader.read_into

    def counted(self, begin, buffer):
        read.append((Path(self.path).name, len(memoryview(buffer).cast("B"))))
        real(self, begin, buffer)

    with DeepSpeedSource(written / "stage3-fp32-2") as source:
        source.read("model/embed.weight", Box((0, 0), (1, 1)))  # where the bytes of a storage lie is found out once
        source.read("model/embed.weight", Box((10, 0), (1, 1)))
        monkeypatch.setattr(storage.RangeReader, "read_into", counted)
        source.read("model/embed.weight", Box((4, 0), (3, 6)))  # the ranks hold 33 of 66 elements each
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    assert read == [(names[0], 9 * 4), (names[1], 9 * 4)]


@pytest.mark.parametrize(
    "name, lost",
    [
        ("stage2-bf16-3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage2-bf16-3", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("stage3-fp32-3", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("stage3-fp32-3", "zero_pp_rank_2_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_of_a_rank_is_named(copy_of, name, lost):
    folder = copy_of(name)
    (folder / lost).unlink()
    with pytest.raises(CheckpointError, match=f"saved by 3 ranks, and files of them are missing: {lost}"):
        DeepSpeedSource(folder)


def test_no_optimizer_files_at_all(copy_of):
    folder = copy_of("stage2-bf16-3")
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"(?s)missing: .*bf16_zero_pp_rank_0_.*bf16_zero_pp_rank_2_"):
        DeepSpeedSource(folder)


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_truncated_file_is_named(copy_of, kind):
    folder = copy_of("stage3-fp32-3")
    path = folder / f"zero_pp_rank_1_mp_rank_00_{kind}_states.pt"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(CheckpointError, match=path.name):
        DeepSpeedSource(folder)


def test_files_of_other_runs_are_not_mixed(copy_of, written):
    folder = copy_of("stage2-fp32-2")
    one = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(one, folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="2 ranks, and has files of more: zero_pp_rank_2_mp_rank_00"):
        DeepSpeedSource(folder)
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    shutil.copy(one, folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"(?s)files of two runs: .*bf16_zero_pp_rank_1_mp_rank_00"):
        DeepSpeedSource(folder)
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    shutil.copy(written / "stage1-fp32-3" / TAG / one.name, one)
    with pytest.raises(CheckpointError, match="different checkpoints"):
        DeepSpeedSource(folder)


def test_files_whose_ranks_are_swapped_are_found_out(copy_of):
    folder = copy_of("stage1-fp32-3")
    one, other = (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 2))
    data = one.read_bytes()
    shutil.move(other, one)
    other.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"flat partition 0 has 65 in 'zero_pp_rank_0.*split evenly"):
        DeepSpeedSource(folder)


def test_files_of_different_steps_are_not_mixed(copy_of):
    folder = copy_of("stage2-fp32-2")
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    rewrite(path, lambda data: struct.pack("<f", 7.0) if data == struct.pack("<f", float(STEPS)) else data)
    with pytest.raises(CheckpointError, match=rf"(?s)different steps.*rank_0.*: {STEPS}.0.*rank_1.*: 7.0"):
        DeepSpeedSource(folder)


def rewrite(path, change):
    """Put other bytes into a torch file: ``change`` gets those of each entry."""
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries:
            archive.writestr(name, change(data))


def plant(path, marker):
    """Make the file run a shell command when it is opened in the usual way."""

    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    call = pickle.dumps(Payload(), protocol=2)[2:-1]  # without the head and the end
    pickle.loads(b"\x80\x02" + call + b".")
    assert marker.exists(), "the payload does nothing"
    marker.unlink()
    rewrite(path, lambda data: data[:2] + call + b"0" + data[2:] if data.startswith(b"\x80\x02}") else data)


@pytest.mark.parametrize(
    "name, file",
    [
        ("stage1-fp32-3", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("stage1-fp32-3", "mp_rank_00_model_states.pt"),
        ("stage3-fp32-3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ],
)
def test_a_planted_payload_is_refused_by_name_and_does_not_run(copy_of, tmp_path, name, file):
    folder = copy_of(name)
    marker = tmp_path / "was-run"
    plant(folder / file, marker)
    with pytest.raises(CheckpointError) as raised:
        DeepSpeedSource(folder)
    assert f"{os.system.__module__}.system" in str(raised.value) and file in str(raised.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "file, words",
    [
        ("zero", "universal checkpoint.*give the folder that it was made from"),
        ("layer_00-model_00-model_states.pt", "pipeline.*layer_00-model_00-model_states.pt.*full weights"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts.*layer_0_expert_1.*full weights"),
        ("mp_rank_01_model_states.pt", "tensor-parallel.*mp_rank_01.*full weights"),
        ("offloaded_tensors", "NVMe.*offload_optimizer.device 'cpu' and save again"),
    ],
)
def test_kinds_that_are_not_read_are_named(copy_of, file, words):
    folder = copy_of("stage1-fp32-1")
    if "." in file:
        (folder / file).touch()
    else:
        (folder / file).mkdir()
    with pytest.raises(UserError, match=words):
        DeepSpeedSource(folder)


@pytest.mark.parametrize(
    "name, words",
    [
        ("quantized", r"quantised.*'state1', torch.uint8.*zero_to_fp32.py"),
        ("parallel", "tensor-parallel.*full weights"),
        ("mics", r"mics_shard_size 2\).*full weights"),
        ("nvme", "NVMe.*save again"),
        ("experts", "experts.*full weights"),
    ],
)
def test_layouts_that_are_not_read_are_named(written, name, words):
    with pytest.raises(UserError, match=words):
        DeepSpeedSource(written / f"refused-{name}")


def test_places_without_a_checkpoint(copy_of, tmp_path):
    folder = copy_of("stage1-fp32-1").parent
    (folder / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match="names 'global_step9', which is not there"):
        DeepSpeedSource(folder)
    (folder / "latest").write_text(f"../{folder.name}/{TAG}")
    with pytest.raises(CheckpointError, match="not a folder beside it"):
        DeepSpeedSource(folder)
    (folder / "latest").unlink()
    with pytest.raises(UserError, match=f"has no 'latest'; give one of '{TAG}'"):
        DeepSpeedSource(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="contains no DeepSpeed checkpoint"):
        DeepSpeedSource(tmp_path / "empty")


@pytest.mark.parametrize(
    "content",
    [
        {"weight": torch.ones(2)},
        {"module": {"w": torch.ones(2)}, "param_shapes": 3, "frozen_param_shapes": {"w": [-1]}},
        {"module": {"w": torch.ones(2)}, "shared_params": ["w"]},
        {"module": {3: torch.ones(2)}, "buffer_names": []},
        {"module": {}, "param_shapes": [{"w": (2,)}], "dp_world_size": 1 << 40},
        {"module": {"w": torch.ones(2)}, "optimizer": {"param_groups": [3]}},
    ],
)
def test_a_file_made_by_hand_is_no_traceback(tmp_path, content):
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=f"{tmp_path}"):
        DeepSpeedSource(tmp_path)
