"""Reading Hugging Face folders and our own, finding out what lies at a place, and writing either anew."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.convert import conversion as convert_module
from shardwise.checkpoint.convert.conversion import Extras, convert, read_back, row_boxes
from shardwise.checkpoint.format import read_manifest
from shardwise.checkpoint.matching import Expected, select
from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.readers.huggingface import HuggingFaceSource
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.checkpoint.save import save_checkpoint
from shardwise.checkpoint.storage import local_storage as storage
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.errors import CheckpointError, ModelError, UserError
from shardwise.plan.plan import Plan
from tests.models import decoder, ragged_batches

WHOLE = {"weights_only": False, "reason": "", "dtype": None}


class Silent:
    """Progress that only counts."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.what = ""

    def begin(self, what: str, num_bytes: int) -> None:
        self.what = what
        self.done[what] = -num_bytes

    def tick(self, num_bytes: int) -> None:
        self.done[self.what] += num_bytes


def run(source, target, to="shardwise", *, limit=1 << 30, extras=None, expected=None, check=None, **options: Any):
    """Select and convert; returns what was written, and what ``check`` returned."""
    selection = select(source, expected, **{**WHOLE, **options})
    progress = Silent()
    result = convert(
        source,
        selection,
        target,
        to=to,
        max_shard_bytes=limit,
        extras=extras or Extras(),
        progress=progress,
        check=check or (lambda place: None),
    )
    assert set(progress.done.values()) <= {0}, "every byte is told, once"
    return result


def tensors() -> dict[str, torch.Tensor]:
    """Every shape that is awkward: 0-d, empty, uneven, wide, not floating point."""
    torch.manual_seed(3)
    return {
        "a.weight": torch.randn(17, 5),
        "a.half": torch.randn(3, 4).bfloat16(),
        "b.scale": torch.tensor(1.5),
        "b.empty": torch.empty(0, 4),
        "b.count": torch.tensor([1, 2, 3]),
        "c.flag": torch.tensor([True, False]),
        "c.wide": torch.randn(2, 3, 40),
        "d.long": torch.randn(301),
    }


@pytest.fixture
def saved(tmp_path) -> Path:
    """The folder of a checkpoint of ours with an optimizer, a tie and generator states."""
    model = decoder(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = ragged_batches(1)[0]
    model(inputs).flatten(0, 1).log_softmax(1)[range(14), labels.flatten() % 23].sum().backward()
    optimizer.step()
    plan = Plan(reason="test")
    rng = {"cpu": torch.arange(16, dtype=torch.uint8)}
    state = {"position": 7}
    return save_checkpoint(
        tmp_path / "run" / "checkpoints", 5, model=model, optimizer=optimizer, plan=plan, state=state, rng=rng, keep=2
    )


def everything(source) -> dict[str, torch.Tensor]:
    return {name: source.read(name, info.full) for name, info in source.tensors.items()}


def equal(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return ones.keys() == others.keys() and all(
        ones[name].dtype == others[name].dtype and torch.equal(ones[name], others[name]) for name in ones
    )


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (5, 3), (2, 3, 4), (3, 1, 50), (1, 1, 9), (4, 0)])
@pytest.mark.parametrize("limit", [4, 12, 40, 1000])
def test_row_boxes_are_the_whole_in_memory_order(shape, limit):
    full = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    boxes = list(row_boxes(shape, 4, limit))
    parts = [full[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.lengths, strict=True))] for b in boxes]
    assert all(part.numel() * 4 <= limit and part.numel() for part in parts)
    assert all(part.is_contiguous() for part in parts)
    joined = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)
    assert torch.equal(joined, full.reshape(-1))


class TestHuggingFaceSource:
    def sharded(self, folder: Path, *, index: bool = True) -> dict[str, torch.Tensor]:
        folder.mkdir()
        held = {"a": torch.randn(4, 3), "b": torch.randn(5), "c": torch.tensor(2.0)}
        files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        files["c"] = files["b"]
        for file in set(files.values()):
            save_file({key: held[key] for key in held if files[key] == file}, folder / file)
        if index:
            document = {"metadata": {}, "weight_map": files}
            (folder / "model.safetensors.index.json").write_text(json.dumps(document))
        return {f"model/{key}": tensor for key, tensor in held.items()}

    def test_one_file_by_its_name_and_by_its_folder(self, tmp_path):
        held = tensors()
        save_file(held, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text('{"model_type": "x"}')
        for place in (tmp_path, tmp_path / "model.safetensors"):
            with HuggingFaceSource(place) as source:
                assert equal(everything(source), {f"model/{key}": tensor for key, tensor in held.items()})
                part = source.tensors["model/c.wide"].full
                assert source.read("model/c.wide", type(part)((1, 0, 5), (1, 2, 30))).is_contiguous()
        assert source.config is None and HuggingFaceSource(tmp_path).config == {"model_type": "x"}

    @pytest.mark.parametrize("index", [True, False])
    def test_shards(self, tmp_path, index):
        held = self.sharded(tmp_path / "m", index=index)
        with HuggingFaceSource(tmp_path / "m") as source:
            assert equal(everything(source), held)
            assert [("no model.safetensors.index.json" in note) for note in source.notes] == ([] if index else [True])

    def test_a_missing_shard_is_named(self, tmp_path):
        for index in (True, False):
            self.sharded(tmp_path / f"m{index}", index=index)
            (tmp_path / f"m{index}" / "model-00002-of-00002.safetensors").unlink()
            with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
                HuggingFaceSource(tmp_path / f"m{index}")

    def test_an_index_that_lies(self, tmp_path):
        self.sharded(tmp_path / "m")
        file = tmp_path / "m" / "model.safetensors.index.json"
        document = json.loads(file.read_text())
        document["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
        file.write_text(json.dumps(document))
        with pytest.raises(CheckpointError, match="ghost"):
            HuggingFaceSource(tmp_path / "m")
        for wrong in ('{"weight_map": {"a": "../a.safetensors"}}', "[1]", "{", "{}"):
            file.write_text(wrong)
            with pytest.raises(CheckpointError, match=r"index\.json' is damaged"):
                HuggingFaceSource(tmp_path / "m")

    def test_what_an_index_leaves_out_is_said(self, tmp_path):
        self.sharded(tmp_path / "m")
        file = tmp_path / "m" / "model.safetensors.index.json"
        document = json.loads(file.read_text())
        del document["weight_map"]["c"]
        file.write_text(json.dumps(document))
        with HuggingFaceSource(tmp_path / "m") as source:
            assert "model/c" not in source.tensors and "1 tensors in the files are not in" in source.notes[0]

    def test_damage(self, tmp_path):
        save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
        data = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(data[:-10])
        with pytest.raises(CheckpointError, match=r"model\.safetensors' is damaged"):
            HuggingFaceSource(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(data)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"config\.json' is damaged"):
            HuggingFaceSource(tmp_path)

    def test_files_that_do_not_belong_together(self, tmp_path):
        for name in ("x", "y"):
            save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
        with pytest.raises(CheckpointError, match="2 that do not say which belongs to it"):
            HuggingFaceSource(tmp_path)


class TestOwnSource:
    def test_a_checkpoint_a_folder_of_them_and_a_run(self, saved):
        for place in (saved, saved.parent, saved.parent.parent):
            with OwnSource(place) as source:
                assert source.path == saved and source.step == 5
                assert source.aliases == {"model/head.weight": "model/embed.weight"}
                assert torch.equal(
                    source.read("model/embed.weight", source.tensors["model/embed.weight"].full),
                    load_file(saved / "rank-00000.safetensors")["model/embed.weight"],
                )

    def test_none_that_is_complete(self, tmp_path):
        (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
        with pytest.raises(CheckpointError, match="contains no complete one"):
            OwnSource(tmp_path)

    def test_a_flipped_bit_is_found_before_it_is_carried_on(self, saved):
        file = saved / "rank-00000.safetensors"
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
        with OwnSource(saved) as source, pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
            source.check()


class TestOpenSource:
    def test_what_lies_there_decides(self, saved, tmp_path):
        save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
        for place in (saved, saved.parent, saved.parent.parent, saved / "manifest.json"):
            with open_source(str(place)) as source:
                assert source.kind == "Shardwise checkpoint"
        with open_source(str(tmp_path)) as source:  # a run's folder is in it too, but the weights are nearer
            assert source.kind == "Hugging Face folder"
        with open_source(tmp_path / "model.safetensors") as source:
            assert source.kind == "safetensors file"

    @pytest.mark.parametrize(
        ("files", "reader"),
        [
            (["latest", "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeedSource"),
            (["mp_rank_00_model_states.pt"], "DeepSpeedSource"),
            (["latest", "global_step3/mp_rank_00_model_states.pt", "model.safetensors"], "DeepSpeedSource"),
            (["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"], "AccelerateSource"),
            (["pytorch_model_fsdp.bin"], "AccelerateSource"),
            (["model.safetensors", "optimizer.bin", "random_states_0.pkl"], "AccelerateSource"),
            ([".metadata", "__0_0.distcp"], "DcpSource"),
            (["__0_0.distcp"], "DcpSource"),
            (["model-00001-of-00002.safetensors"], "HuggingFaceSource"),
            (["adapter_model.safetensors"], "HuggingFaceSource"),
            (["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"], "HuggingFaceSource"),
            (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"], "StateDictSource"),
            (["last.ckpt"], "StateDictSource"),
            (["step-00000003/manifest.json"], "OwnSource"),
            (["checkpoints/step-00000003/manifest.json"], "OwnSource"),
        ],
    )
    def test_folders(self, tmp_path, monkeypatch, files, reader):
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("global_step3\n" if name == "latest" else "")
        monkeypatch.setattr("shardwise.checkpoint.readers.detect.import_path", lambda source: lambda path: source)
        assert open_source(str(tmp_path)).endswith(f":{reader}")

    @pytest.mark.parametrize(
        ("name", "data", "reader"),
        [
            ("weights.pt", b"", "StateDictSource"),
            ("odd-name", b"PK\x03\x04", "StateDictSource"),
            ("odder", b"\x80\x02}", "StateDictSource"),
            (".metadata", b"", "DcpSource"),
            ("zero_pp_rank_0_mp_rank_00_model_states.pt", b"", "DeepSpeedSource"),
            ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", b"", "DeepSpeedSource"),
            ("pytorch_model.bin.index.json", b"", "StateDictSource"),
        ],
    )
    def test_files(self, tmp_path, monkeypatch, name, data, reader):
        (tmp_path / name).write_bytes(data)
        monkeypatch.setattr("shardwise.checkpoint.readers.detect.import_path", lambda source: lambda path: source)
        assert open_source(str(tmp_path / name)).endswith(f":{reader}")

    def test_what_is_none_says_what_is_there_and_what_would_be(self, tmp_path):
        (tmp_path / "empty").mkdir()
        (tmp_path / "runs" / "checkpoint-20").mkdir(parents=True)
        (tmp_path / "notes.txt").write_text("hello")
        cases = {"nothing": "does not exist", "empty": "is empty", "notes.txt": "a file of another kind"}
        cases["runs"] = f"is it one of those inside, such as '{tmp_path / 'runs' / 'checkpoint-20'}'"
        for name, words in cases.items():
            with pytest.raises(UserError) as caught:
                open_source(tmp_path / name)
            assert words in str(caught.value) and "PyTorch DCP" in str(caught.value)


class TestSelect:
    EXPECTED = Expected(
        label="m",
        shapes={"body.a": (3,), "body.b": (2,)},
        ties={"head.a": "body.a"},
        transient=frozenset({"body.cache"}),
        ignored=(r"\.mask$",),
        base="body",
    )

    def chosen(self, tmp_path, held, expected=None, **options):
        save_file(held, tmp_path / "model.safetensors")
        with HuggingFaceSource(tmp_path) as source:
            return select(source, expected or self.EXPECTED, **{**WHOLE, **options})

    @pytest.mark.parametrize("prefix", ["", "module.", "net.model.", "-body"])
    def test_wrapping_is_taken_off_and_a_base_put_on(self, tmp_path, prefix):
        names = {"body.a": torch.ones(3), "body.b": torch.ones(2), "body.x.mask": torch.ones(1)}
        if prefix == "-body":
            held = {name.removeprefix("body."): tensor for name, tensor in names.items()}
        else:
            held = {f"{prefix}{name}": tensor for name, tensor in names.items()}
        selection = self.chosen(tmp_path, held)
        assert [item.name for item in selection.items] == ["model/body.a", "model/body.b"]
        assert selection.aliases == {"model/head.a": "model/body.a"}
        said = " ".join(selection.notes)
        assert ("the names" in said) == bool(prefix) and "body.x.mask" in said

    def test_all_problems_at_once(self, tmp_path):
        held = {"body.b": torch.ones(4), "extra.c": torch.ones(1), "body.cache": torch.ones(1)}
        with pytest.raises(ModelError) as caught:
            self.chosen(tmp_path, held)
        text = str(caught.value)
        for part in ("body.a (nor its tied names head.a)", "body.b: (4,) in the source, (2,) in the model", "extra.c"):
            assert part in text
        assert "body.cache" not in text and "nothing was written" in text

    def test_either_name_of_a_tie_will_do(self, tmp_path):
        selection = self.chosen(tmp_path, {"head.a": torch.ones(3), "body.b": torch.ones(2)})
        assert next((item.name, item.origin) for item in selection.items) == ("model/body.a", "model/head.a")

    def test_only_floating_weights_are_cast_and_it_is_said(self, tmp_path):
        held = {"w": torch.ones(2), "n": torch.ones(2, dtype=torch.int64), "h": torch.ones(2).half()}
        selection = self.chosen(tmp_path, held, Expected("m", {"w": (2,), "n": (2,), "h": (2,)}), dtype=torch.bfloat16)
        assert {i.name: i.info.dtype for i in selection.items} == {
            "model/w": torch.bfloat16,
            "model/n": torch.int64,
            "model/h": torch.bfloat16,
        }
        assert sorted(selection.notes) == [
            "1 tensors cast from float16 to bfloat16, rounded",
            "1 tensors cast from float32 to bfloat16, rounded",
        ]

    def test_state_of_the_optimizer_follows_its_parameter(self, saved):
        with OwnSource(saved) as source:
            wrapped = {f"model/{n.removeprefix('model/')}" for n in source.tensors if n.startswith("model/")}
            assert "model/embed.weight" in wrapped
            without = select(source, None, dtype=torch.bfloat16, weights_only=True, reason="no place")
            full = select(source, None, dtype=torch.bfloat16, weights_only=False, reason="")
        assert all(item.name.startswith("model/") for item in without.items)
        assert any("tensors of optimizer state" in note and "no place" in note for note in without.notes)
        kept = {item.name: item.info.dtype for item in full.items}
        assert kept["optimizer/embed.weight/exp_avg"] == torch.float64 and kept["model/embed.weight"] == torch.bfloat16


class TestConvert:
    @pytest.mark.parametrize("limit", [1024, 1 << 30])
    def test_ours_is_as_it_was(self, saved, tmp_path, limit):
        """Model, optimizer, generators, ties, state: through a new checkpoint with files of any size."""
        with OwnSource(saved) as source:
            written, _ = run(source, tmp_path / "new", limit=limit)
            with OwnSource(tmp_path / "new") as again:
                again.check()
                assert equal(everything(source), everything(again))
                old, new = source.manifest, again.manifest
        for key in ("step", "plan", "plan_fingerprint", "ranks", "aliases", "optimizer", "state"):
            assert getattr(old, key) == getattr(new, key), key
        assert written.place == tmp_path / "new" / "step-00000005" and new.schema_version == 2
        files = [path.stat().st_size for path in written.place.glob("*.safetensors")]
        assert len(files) == written.files and (max(files) < 4096 if limit == 1024 else len(files) == 1)
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["latest", "step-00000005"]
        assert not list(tmp_path.glob(".tmp*"))

    @pytest.mark.parametrize("limit", [1000, 1 << 30])
    def test_a_hugging_face_folder(self, tmp_path, limit):
        held = tensors()
        save_file(held, tmp_path / "in.safetensors")
        with HuggingFaceSource(tmp_path / "in.safetensors") as source:
            written, _ = run(source, tmp_path / "out", "hf", limit=limit, extras=Extras(config={"a": 1}))
        out = tmp_path / "out"
        files = sorted(out.glob("*.safetensors"))
        found = {key: tensor for file in files for key, tensor in load_file(file).items()}
        assert equal(found, held)
        for file in files:
            with safe_open(file, framework="pt") as opened:
                assert opened.metadata() == {"format": "pt"}
        assert json.loads((out / "config.json").read_text()) == {"a": 1}
        if limit > 1000:
            assert [file.name for file in files] == ["model.safetensors"] and not list(out.glob("*.index.json"))
            return
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held.values()) == written.num_bytes
        assert index["weight_map"].keys() == held.keys()
        assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
        for file in files:
            names = load_file(file)
            assert sum(tensor.nbytes for tensor in names.values()) <= limit or len(names) == 1

    def test_and_back(self, tmp_path):
        held = tensors()
        save_file(held, tmp_path / "in.safetensors")
        with HuggingFaceSource(tmp_path / "in.safetensors") as source:
            run(source, tmp_path / "own", limit=1024)
        with OwnSource(tmp_path / "own") as source:
            assert source.optimizer["name"] == "none" and source.step == 0
            run(source, tmp_path / "hf", "hf", weights_only=True)
        assert equal(load_file(tmp_path / "hf" / "model.safetensors"), held)

    def test_casting(self, tmp_path):
        save_file({"w": torch.tensor([1.0, 1e-3, 3e38])}, tmp_path / "in.safetensors")
        with HuggingFaceSource(tmp_path / "in.safetensors") as source:
            run(source, tmp_path / "bf16", "hf", dtype=torch.bfloat16)
            with pytest.raises(
                UserError, match=r"model/w holds 3e\+38, and float16 ends at 6.55e\+04; use --dtype bf16"
            ):
                run(source, tmp_path / "fp16", "hf", dtype=torch.float16)
        found = load_file(tmp_path / "bf16" / "model.safetensors")["w"]
        assert torch.equal(found, torch.tensor([1.0, 1e-3, 3e38]).bfloat16())
        assert not (tmp_path / "fp16").exists() and not list(tmp_path.glob(".tmp*"))

    def test_a_tie_is_written_once_where_it_is_one(self, tmp_path):
        expected = Expected("m", {"a": (3,), "c": (1,)}, ties={"b": "a"})
        same = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(1)}
        save_file(same, tmp_path / "same.safetensors")
        save_file({**same, "b": torch.zeros(3)}, tmp_path / "apart.safetensors")
        with HuggingFaceSource(tmp_path / "same.safetensors") as source:
            run(source, tmp_path / "hf", "hf", expected=expected)
        assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"a", "c"}
        apart = "a and b are one tensor in the model but have different values"
        with HuggingFaceSource(tmp_path / "apart.safetensors") as source, pytest.raises(ModelError, match=apart):
            run(source, tmp_path / "no", "hf", expected=expected)
        assert not (tmp_path / "no").exists()

    def test_a_target_that_is_taken(self, saved, tmp_path):
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "mine.txt").write_text("mine")
        (tmp_path / "empty").mkdir()
        with OwnSource(saved) as source:
            with pytest.raises(UserError, match="is there and not empty"):
                run(source, tmp_path / "taken")
            with pytest.raises(UserError, match="is a file"):
                run(source, tmp_path / "taken" / "mine.txt")
            run(source, tmp_path / "empty")
        assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine.txt"]
        assert (tmp_path / "empty" / "step-00000005" / "manifest.json").is_file()

    def test_no_room_is_known_before(self, saved, tmp_path, monkeypatch):
        monkeypatch.setattr(convert_module, "free_bytes", lambda folder: 100)
        with OwnSource(saved) as source, pytest.raises(CheckpointError, match="and 100 B are free there"):
            run(source, tmp_path / "new")
        assert not (tmp_path / "new").exists()

    @pytest.mark.turns(2)
    @pytest.mark.parametrize("to", ["hf", "shardwise"])
    def test_a_full_disk_at_every_write_leaves_nothing(self, saved, tmp_path, monkeypatch, to):
        left = [math.inf]

        def counted(real):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    left[0] = math.inf  # cleaning up works again
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*args, **kwargs)

            return call

        monkeypatch.setattr(os, "pwrite", counted(os.pwrite))
        monkeypatch.setattr(os, "fsync", counted(lambda handle: None))
        monkeypatch.setattr(os, "rename", counted(os.rename))
        failures = 0
        with OwnSource(saved) as source:
            while True:
                left[0] = failures
                try:
                    run(source, tmp_path / "new", to, limit=16384, extras=Extras(config={}), weights_only=to == "hf")
                    break
                except CheckpointError as error:
                    failures += 1
                    assert "No space left on device" in str(error) and "are free" in str(error)
                assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
        left[0] = math.inf
        assert failures > 20 and (tmp_path / "new").is_dir()

    def test_what_a_check_refuses_is_gone(self, saved, tmp_path):
        def check(place):
            assert read_manifest(place).step == 5 and place.name == "step-00000005"
            raise ModelError("no")

        with OwnSource(saved) as source, pytest.raises(ModelError, match="no"):
            run(source, tmp_path / "new", check=check)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]

    def test_what_a_killed_conversion_left_is_no_hindrance(self, saved, tmp_path):
        left = tmp_path / ".tmp-new" / "step-00000005"
        left.mkdir(parents=True)
        (left / "part-00099.safetensors").write_text("half")
        with OwnSource(saved) as source:
            run(source, tmp_path / "new")
        assert not list((tmp_path / "new").rglob("part-00099*")) and not (tmp_path / ".tmp-new").exists()

    def test_behind_a_url(self, saved):
        place = folder_of("memory://conversions/a")
        try:
            with OwnSource(saved) as source:
                run(source, place / "own", limit=4096)
                run(source, place / "hf", "hf", limit=4096, weights_only=True, extras=Extras(config={"a": 1}))
                with open_source(place / "own") as own, open_source(f"{place / 'hf'}") as hf:
                    assert equal(everything(own), everything(source))
                    weights = {n: t for n, t in everything(source).items() if n.startswith("model/")}
                    assert equal(everything(hf), weights) and hf.config == {"a": 1}
                    run(own, place / "again", "hf", weights_only=True)

                def refuse(there):
                    raise ModelError("no")

                for to in ("hf", "shardwise"):
                    with pytest.raises(ModelError, match="no"):
                        run(source, place / "refused", to, check=refuse, weights_only=to == "hf")
                    assert not (place / "refused").exists() or not list((place / "refused").iterdir())
        finally:
            storage.remove_folder(place)


def test_reading_back_finds_what_differs_worst_first(tmp_path):
    held = {"a": torch.randn(40, 3), "b": torch.randn(9), "c": torch.tensor([1, 2]), "d": torch.randn(5)}
    save_file(held, tmp_path / "in.safetensors")
    wrong = {**held, "a": held["a"].clone(), "b": held["b"] * 2}
    wrong["a"][39, 2] += 1e-3
    (tmp_path / "hf").mkdir()
    save_file(wrong, tmp_path / "hf" / "model.safetensors")
    with HuggingFaceSource(tmp_path / "in.safetensors") as source, HuggingFaceSource(tmp_path / "hf") as written:
        selection = select(source, None, **WHOLE)
        found = read_back(source, selection, written, Silent())
        assert not read_back(source, selection, source, Silent())
    assert [deviation.name for deviation in found] == ["model/b", "model/a"]
    assert found[1].difference == pytest.approx(1e-3, rel=1e-2)
    assert found[0].difference == pytest.approx(float(held["b"].abs().max()))


FRESH = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"
MEMORY = """
import resource, sys
import shardwise.checkpoint.readers.huggingface
import shardwise.checkpoint.readers.shardwise_reader
import shardwise.cli.convert
import shardwise.cli.checkpoint as cli

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for source, target, to, dtype in (sys.argv[1:5], sys.argv[5:9]):
    cli.run_convert(source, target, to=to, dtype=dtype or None, max_shard_size="200MB", model=None, verify=True,
                    optimizer=True, as_json=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.turns(6)
def test_memory_is_a_few_blocks(tmp_path):
    """600 MiB in nine tensors, there, and back with a cast; read back, too."""
    total, large = 0, 64 << 20
    for number in range(3):
        held = {f"t{number}.{part}": torch.zeros(large // 4096, 1024) for part in range(3)}
        save_file(held, tmp_path / f"model-{number + 1:05d}-of-00003.safetensors")
        total += sum(tensor.nbytes for tensor in held.values())
    own, hf = str(tmp_path / "own"), str(tmp_path / "hf")
    words = [str(tmp_path), own, "shardwise", "", own, hf, "hf", "bf16"]
    # by way of a small process, since a forked process begins with the peak of the one that forked it
    done = subprocess.run(
        [sys.executable, "-c", FRESH, sys.executable, "-c", MEMORY, *words],
        check=True,
        capture_output=True,
        timeout=150,
    )
    used = int(done.stdout.splitlines()[-1]) << 10
    assert used < large + (256 << 20), f"{used >> 20} MiB"
    assert sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors")) > total // 2 > 250 << 20
