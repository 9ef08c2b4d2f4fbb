"""State dicts of torch.save, of Lightning and of Hugging Face's older folders, as a source."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn

from shardwise.checkpoint.format import OptimizerEntry
from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.readers.state_dict import StateDictSource
from shardwise.errors import CheckpointError, ShardwiseError, UserError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


class Asks:
    """Pickled as a call of the shell."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def everything(source: StateDictSource) -> dict[str, torch.Tensor]:
    found = {name: source.read(name, info.full) for name, info in source.tensors.items()}
    return found | {alias: found[name] for alias, name in source.aliases.items()}


def check(source: StateDictSource, wanted: dict[str, torch.Tensor]) -> None:
    found = everything(source)
    assert {n.removeprefix("model/") for n in found if n.startswith("model/")} == wanted.keys()
    for name, tensor in wanted.items():
        other = found[f"model/{name}"]
        assert other.dtype == tensor.dtype and torch.equal(other, tensor), name


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def said(source: StateDictSource) -> str:
    return "\n".join(source.notes)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("key", [None, "state_dict", "model", "module", "model_state_dict"])
def test_weights_are_found(model, key, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    state = model.state_dict()
    torch.save(state if key is None else {key: state, "epoch": 3, "arch": "tied"}, path)
    with StateDictSource(path) as source:
        assert isinstance(source, Source)
        assert (source.kind, source.place, source.optimizer, source.step) == (
            "PyTorch state dict",
            str(path),
            None,
            None,
        )
        check(source, dict(state))
        assert source.aliases == {"model/head.weight": "model/embed.weight"}
        assert ("'arch'" in said(source) and "'epoch'" in said(source)) == (key is not None)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: name.replace(".", "._fsdp_wrapped_module.", 1),
        lambda name: f"_fsdp_wrapped_module.{name.replace('.', '._checkpoint_wrapped_module.', 1)}",
    ],
)
def test_names_lose_what_wrapping_adds(model, wrap, tmp_path):
    state = model.state_dict()
    torch.save({"model": {wrap(name): tensor for name, tensor in state.items()}}, tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        check(source, dict(state))


def test_module_stays_in_a_name_where_it_belongs(tmp_path):
    state = {"module.weight": torch.ones(2), "head.weight": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        check(source, state)


def test_two_names_that_become_one_are_refused(tmp_path):
    torch.save({"weight": torch.ones(2), "_orig_mod.weight": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt'.*model/weight is there twice"):
        StateDictSource(tmp_path / "a.pt")


def test_a_dict_under_an_unusual_key_is_said(model, tmp_path):
    torch.save(
        {"net": model.state_dict(), "rng_state": torch.get_rng_state(), "step": torch.tensor(7)}, tmp_path / "a.pt"
    )
    with StateDictSource(tmp_path / "a.pt") as source:
        check(source, dict(model.state_dict()))
        assert "the weights are those under 'net'" in said(source) and "'rng_state'" in said(source)
        assert source.step == 7


def test_a_dict_of_dicts_without_a_tensor_is_not_taken_for_weights(model, tmp_path):
    beside = {"arguments": {"stopping": {"best": 1.0}, "kept": {}}, "progress": {"fit": {"epoch": {"now": 1}}}}
    torch.save({"net": model.state_dict(), **beside}, tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        check(source, dict(model.state_dict()))
        assert "the weights are those under 'net'" in said(source)


def test_weights_in_nested_dicts_have_joined_names(tmp_path):
    torch.save(
        {"model": {"encoder": {"weight": torch.ones(2)}, "decoder": {"weight": torch.zeros(3)}}}, tmp_path / "a.pt"
    )
    with StateDictSource(tmp_path / "a.pt") as source:
        check(source, {"encoder.weight": torch.ones(2), "decoder.weight": torch.zeros(3)})


def test_what_is_not_weights_is_said_and_left_out(model, tmp_path):
    content = {"model": model.state_dict(), "ema": model.state_dict(), "rng": torch.get_rng_state(), "lr": 0.1}
    torch.save(content, tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        check(source, dict(model.state_dict()))
        assert all(word in said(source) for word in ("not carried over", "'ema'", "'rng'", "'lr'"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda state: {"generator": state, "discriminator": state}, "'generator', .*'discriminator'.*not clear"),
        (lambda state: {"state_dict": state, "model": state}, "'state_dict', .*'model'.*not clear"),
        (lambda state: {"ema": state, "weight": torch.ones(2)}, "'ema', 1 tensors beside them"),
        (lambda state: {"epoch": 3}, "none of its values is or contains a tensor"),
        (lambda state: {}, "none of its values"),
        (lambda state: list(state.values()), "holds a list, not a dict of tensors"),
        (lambda state: torch.ones(2), "holds a StoredTensor, not a dict"),
    ],
)
def test_what_is_not_clear_is_refused(make, says, model, tmp_path):
    torch.save(make(model.state_dict()), tmp_path / "a.pt")
    with pytest.raises(UserError, match=says) as caught:
        StateDictSource(tmp_path / "a.pt")
    assert str(tmp_path / "a.pt") in str(caught.value) and caught.value.exit_code == 2


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model.head(model.norm(model.embed(torch.arange(10)))).logsumexp(1).sum().backward()
        optimizer.step()
    return optimizer


def test_optimizer_state_by_number_is_said_and_left_out(model, tmp_path):
    content = {"model": model.state_dict(), "optimizer": trained(model).state_dict(), "step": 2}
    torch.save(content, tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        assert not any(name.startswith("optimizer/") for name in source.tensors)
        assert source.optimizer is None and source.step == 2
        assert "'optimizer' keeps the state of 3 parameters by number" in said(source)


def test_optimizer_state_by_name_is_carried_over(model, tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, trained(model))
    torch.save({"model": weights, "optimizer": state}, tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        found = everything(source)
        for name, values in state["state"].items():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(found[f"optimizer/{name}/{key}"], values[key])
        entry = OptimizerEntry.model_validate(source.optimizer)
        assert entry.name == "AdamW" and entry.groups[0].options["lr"] == 0.01
        assert set(entry.groups[0].params) == set(state["state"])


def test_options_that_are_tensors_become_numbers(model, tmp_path):
    groups = [{"params": ["embed.weight"], "lr": torch.tensor(0.5), "betas": (0.9, torch.ones(2))}]
    state = {"embed.weight": {"step": torch.tensor(2.0)}}
    torch.save({"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}, tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        assert source.optimizer["groups"][0]["options"] == {"lr": 0.5}
        assert "betas" in said(source)


def test_a_part_is_read(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        found = source.read("model/embed.weight", Box((2, 1), (3, 2)))
        assert torch.equal(found, model.embed.weight.detach()[2:5, 1:3])


def test_other_tensors_of_one_storage_are_not_tied(tmp_path):
    base = torch.arange(6.0)
    torch.save({"a": base[:3], "b": base[3:], "c": base[:3], "d": base[:0], "e": base[:0]}, tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        assert source.aliases == {"model/c": "model/a"}
        assert source.read("model/b", Box((0,), (3,))).tolist() == [3, 4, 5]


# folders


def sharded(folder, model) -> None:
    state = dict(model.state_dict())
    names = list(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[:3], "pytorch_model-00002-of-00002.bin": names[3:]}
    for file, held in parts.items():
        torch.save({name: state[name] for name in held}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def test_folders_of_one_or_several_files(model, tmp_path):
    sharded(tmp_path, model)
    with StateDictSource(tmp_path) as source:
        assert source.kind == "PyTorch state dict in several files"
        check(source, dict(model.state_dict()))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with StateDictSource(tmp_path) as source:
        assert source.kind == "PyTorch state dict"
        check(source, dict(model.state_dict()))


def test_damaged_folders(model, tmp_path):
    with pytest.raises(UserError, match=r"neither pytorch_model\.bin nor"):
        StateDictSource(tmp_path)
    sharded(tmp_path, model)
    index = tmp_path / "pytorch_model.bin.index.json"
    good = json.loads(index.read_text())
    for places, says in (
        (
            {**good["weight_map"], "more": "pytorch_model-00001-of-00002.bin"},
            "more in 'pytorch_model-00001-of-00002.bin'",
        ),
        ({"a": "../pytorch_model-00001-of-00002.bin"}, "does not map names to file names"),
        ({"a": "/etc/passwd"}, "does not map names to file names"),
        ({"a": 5}, "is damaged"),
        ([1], "is damaged"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match=says):
            StateDictSource(tmp_path)
    index.write_text(json.dumps(good))
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.bin' cannot be opened"):
        StateDictSource(tmp_path)


def test_a_payload_is_refused_in_every_place(model, tmp_path):
    mark = tmp_path / "ran"
    evil = Asks(f"touch {mark}")
    sharded(tmp_path, model)
    for content in ({**model.state_dict(), "x": evil}, {"model": model.state_dict(), "optimizer": evil}, evil):
        torch.save(content, tmp_path / "a.pt")
        torch.save(content, tmp_path / "pytorch_model-00002-of-00002.bin")
        for place in (tmp_path / "a.pt", tmp_path):
            with pytest.raises(CheckpointError, match=r"'posix\.system'"):
                StateDictSource(place)
    assert not mark.exists()


def test_an_error_names_file_and_tensor(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        os.truncate(tmp_path / "a.pt", 64)
        with pytest.raises(CheckpointError, match=r"model/embed\.weight: .*a\.pt' is damaged"):
            source.read("model/embed.weight", Box((0, 0), (10, 4)))


def test_names_and_notes_cannot_write_to_the_terminal(tmp_path):
    torch.save({"a": torch.ones(1), "bad\x1b[2J": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"control characters: model/bad\\x1b\[2J"):
        StateDictSource(tmp_path / "a.pt")
    torch.save({"model": {"a": torch.ones(1)}, "bad\x1b[2J": 5}, tmp_path / "a.pt")
    with StateDictSource(tmp_path / "a.pt") as source:
        assert "\x1b" not in said(source) and "bad" in said(source)


def test_mutated_objects_are_sorted_out_or_refused(model, tmp_path):
    path = tmp_path / "a.pt"
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)  # so that the checksum does not find it first
        torch.save({"model": model.state_dict(), "optimizer": trained(model).state_dict(), "step": 2}, path)
    finally:
        torch.serialization.set_crc32_options(before)
    data = path.read_bytes()
    begin = data.index(b"data.pkl") + 8
    end = data.index(b"PK\x03\x04", begin)
    generator = random.Random(1)
    read = refused = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 1, 3))):
            changed[generator.randrange(begin, end)] = generator.randrange(256)
        path.write_bytes(changed)
        try:
            with StateDictSource(path) as source:
                everything(source)
            read += 1
        except ShardwiseError as error:
            assert str(path) in str(error)
            refused += 1
    assert read > 20 and refused > 50


# Lightning

SCRIPT = """
import sys, warnings, pathlib
warnings.simplefilter("ignore")
import torch, lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

torch.manual_seed(0)
folder = pathlib.Path(sys.argv[1])

class Model(L.LightningModule):
    def __init__(self, width=4, root=folder):
        super().__init__()
        self.save_hyperparameters()
        self.embed = torch.nn.Embedding(10, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.head(self.norm(self.embed(batch))), batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

model = Model()
callbacks = [ModelCheckpoint(folder / "kept", monitor="loss"), EarlyStopping("loss")]
trainer = L.Trainer(max_steps=3, accelerator="cpu", logger=False, callbacks=callbacks, enable_progress_bar=False,
                    enable_model_summary=False, default_root_dir=folder)
trainer.fit(model, torch.utils.data.DataLoader(torch.arange(40) % 10, batch_size=4))
trainer.save_checkpoint(folder / "trainer.ckpt")
trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)

fabric = L.Fabric(accelerator="cpu")
layer = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(layer.parameters())
layer, optimizer = fabric.setup(layer, optimizer)
fabric.backward(layer(torch.ones(2, 3)).sum())
optimizer.step()
fabric.save(folder / "fabric.ckpt", {"model": layer, "optimizer": optimizer, "step": 5})
"""


@pytest.fixture(scope="module")
def lightning(tmp_path_factory):
    pytest.importorskip("lightning", reason="Lightning, which writes these files, is not installed")
    folder = tmp_path_factory.mktemp("lightning")
    done = subprocess.run([sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", ["trainer.ckpt", "weights.ckpt", "kept"])
def test_lightning_checkpoints(lightning, name):
    path = lightning / name if name != "kept" else next((lightning / name).iterdir())
    wanted = torch.load(path, weights_only=False)
    with StateDictSource(path) as source:
        assert source.kind == "Lightning checkpoint" and source.step == wanted["global_step"] == 3
        check(source, dict(wanted["state_dict"]))
        assert source.aliases == {"model/head.weight": "model/embed.weight"}
        assert "'hyper_parameters'" in said(source)
        assert ("'optimizer_states.0' keeps the state of 3" in said(source)) == (name != "weights.ckpt")


def test_fabric_checkpoints(lightning):
    wanted = torch.load(lightning / "fabric.ckpt", weights_only=False)
    with StateDictSource(lightning / "fabric.ckpt") as source:
        check(source, dict(wanted["model"]))
        assert source.step == 5 and "'optimizer' keeps the state of 2 parameters by number" in said(source)
