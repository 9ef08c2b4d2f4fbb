"""``shardwise checkpoint convert``: both ways with Hugging Face, verified by what the models compute."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.convert import check_outputs as forward
from shardwise.checkpoint.convert import conversion as convert_module
from shardwise.checkpoint.format import newest, read_manifest
from shardwise.checkpoint.load import load_checkpoint
from shardwise.cli.checkpoint import run_convert
from shardwise.cli.convert import read_size
from shardwise.cli.main import app
from shardwise.errors import CheckpointError, ModelError, ReceiptError, UserError
from tests.cli.configs import train, write_config
from tests.models import ByteDecoder, byte_decoder

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.arange(48).reshape(2, 24) * 5 % 300
FACTORY = "tests.models:byte_decoder"


def model_of(keys: dict[str, Any], seed: int = 0, **changes: Any):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[keys["model_type"]].from_dict({**keys, **changes})
        ).eval()


def published(folder: Path, keys: dict[str, Any], seed: int = 0, **changes: Any) -> Path:
    """A folder as ``save_pretrained`` writes it, with a tokenizer and code beside it."""
    shard = changes.pop("max_shard_size", "5GB")
    model_of(keys, seed, **changes).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    (folder / "modeling_own.py").write_text("raise SystemExit(9)")
    return folder


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # mapped files lie anywhere, and kernels round as memory lies
        return model(IDS).logits


def converted(source: Path, target: Path, capsys, **options: Any) -> dict[str, Any]:
    """Run the verb in this process; the document, with what was said as ``text``."""
    words: dict[str, Any] = {"to": None, "dtype": None, "max_shard_size": None, "model": None}
    words |= {"verify": True, "optimizer": True, **options}
    try:
        run_convert(str(source), str(target), as_json=True, **words)
    finally:
        said = capsys.readouterr()
    return {**json.loads(said.out.splitlines()[-1]), "text": said.err}


@pytest.fixture(autouse=True, scope="module")
def transformers_is_loaded(tmp_path_factory) -> Iterator[None]:
    """Once, before anybody looks: what it brings with it sets environment variables when it is first used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        logits(published(tmp_path_factory.mktemp("first"), LLAMA))
    yield


@pytest.mark.parametrize(  # each pair of any two
    ("size", "tied", "keys"),
    [
        pytest.param("60KB", True, LLAMA, id="sharded-tied-llama"),
        pytest.param("60KB", False, GPT2, id="sharded-untied-gpt2"),
        pytest.param("5GB", True, GPT2, id="single-tied-gpt2"),
        pytest.param("5GB", False, LLAMA, id="single-untied-llama"),
    ],
)
def test_there_and_back_the_logits_are_the_same_bits(tmp_path, capsys, keys, tied, size):
    folder = published(tmp_path / "hf", keys, tie_word_embeddings=tied, max_shard_size=size)
    there = converted(folder, tmp_path / "own", capsys, max_shard_size=size)
    assert there["verified"] is True and there["max_difference"] == 0.0 and there["source"]["step"] is None
    manifest = read_manifest(Path(there["target"]))
    assert manifest.model["config"]["model_type"] == keys["model_type"]
    head = "model/lm_head.weight"
    assert (head in manifest.aliases) == tied and (head in manifest.tensors) != tied
    back = converted(tmp_path / "own", tmp_path / "again", capsys, max_shard_size=size)
    assert back["verified"] is True and back["max_difference"] == 0.0 and back["to"] == "hf"
    files = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert ("model.safetensors.index.json" in files) == (size == "60KB")
    keys_written = {
        key for name in files if name.endswith(".safetensors") for key in load_file(tmp_path / "again" / name)
    }
    assert keys_written == {k for name in folder.glob("*.safetensors") for k in load_file(name)}
    assert torch.equal(logits(tmp_path / "again"), logits(folder))
    live = model_of(keys, seed=1, tie_word_embeddings=tied)
    load_checkpoint(newest(tmp_path / "own"), model=live, optimizer=None)
    with torch.no_grad():
        assert torch.equal(live(IDS).logits, logits(folder))


def test_transformers_loads_it_without_a_word(tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    published(tmp_path / "hf", LLAMA, tie_word_embeddings=True)
    converted(tmp_path / "hf", tmp_path / "own", capsys)
    converted(tmp_path / "own", tmp_path / "out", capsys, model=str(tmp_path / "hf"))
    _, said = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ], "what belongs to the model, and never code"


def test_casting_says_what_it_costs(tmp_path, capsys):
    folder = published(tmp_path / "hf", LLAMA, tie_word_embeddings=True)
    for dtype, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        answer = converted(folder, tmp_path / dtype, capsys, to="hf", dtype=dtype)
        assert answer["verified"] is True and 0 < answer["max_difference"] < 0.1
        assert f"20 tensors cast from float32 to {name}, rounded" in answer["text"]
        assert f"dtype is {name}, as the weights are (it was float32)" in answer["text"]
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == name
        assert {t.dtype for t in load_file(tmp_path / dtype / "model.safetensors").values()} == {getattr(torch, name)}
        assert float((logits(tmp_path / dtype) - logits(folder)).abs().max()) > 0
    own = converted(tmp_path / "bf16", tmp_path / "own", capsys, dtype="fp32")
    assert own["verified"] is True, own["text"]


def test_what_was_trained_here_is_a_model_there(tmp_path, capsys):
    """The whole way: two steps of ``shardwise train``, the command, transformers."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    config = write_config(
        tmp_path,
        model={"factory": None, "config": str(tmp_path / "config.json")},
        train={"steps": 2, "eval_samples": None},
        data={"heldout_fraction": 0.0},
        checkpoint={"every": 0},
        parallel={"nproc": 1},
    )
    train(config)
    app(["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--json"], standalone_mode=False)
    said = capsys.readouterr()
    answer = json.loads(said.out.splitlines()[-1])
    assert answer["verified"] is True and answer["source"]["step"] == 2 and answer["max_difference"] == 0.0
    assert "not carried over: 60 tensors of optimizer state" in said.err
    assert "the position in the data" in said.err and "no tokenizer is written" in said.err
    live = model_of(LLAMA, tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in live.named_parameters()}
    load_checkpoint(newest(tmp_path / "run" / "checkpoints"), model=live, optimizer=None)
    assert any(not torch.equal(before[name], tensor) for name, tensor in live.named_parameters())
    with torch.no_grad():
        assert torch.equal(live(IDS).logits, logits(tmp_path / "hf"))
    with pytest.raises(UserError, match="is there and not empty"):
        converted(tmp_path / "run", tmp_path / "hf", capsys)


class TestSabotage:
    """One wrong number, on its way from the source to the target."""

    def plant(self, monkeypatch, name: str, row: int) -> None:
        real = convert_module._blocks

        def wrong(source, item, box, progress):
            for part in real(source, item, box, progress):
                if item.name == name:
                    part = part.clone()
                    part[row, 0] += 0.5
                yield part

        monkeypatch.setattr(convert_module, "_blocks", wrong)

    @pytest.mark.parametrize("to", ["hf", "shardwise"])
    def test_the_forward_pass_sees_it(self, tmp_path, capsys, monkeypatch, to):
        folder = published(tmp_path / "hf", LLAMA, tie_word_embeddings=False)
        self.plant(monkeypatch, "model/model.layers.1.mlp.up_proj.weight", 3)
        monkeypatch.setattr(forward, "read_back", lambda *args: [])  # by itself
        with pytest.raises(ReceiptError, match="outputs on fixed inputs differ from the source's by up to") as caught:
            converted(folder, tmp_path / "out", capsys, to=to)
        assert caught.value.exit_code == 1 and caught.value.verdict.max_difference > 1e-4
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]

    def test_the_tensor_is_named(self, tmp_path, capsys, monkeypatch):
        folder = published(tmp_path / "hf", LLAMA, tie_word_embeddings=False)
        self.plant(monkeypatch, "model/model.layers.1.mlp.up_proj.weight", 3)
        with pytest.raises(
            ReceiptError, match=r"worst tensor is model/model\.layers\.1\.mlp\.up_proj\.weight.* by up to 0\.5"
        ):
            converted(folder, tmp_path / "out", capsys)
        assert not (tmp_path / "out").exists()

    def test_a_row_that_no_input_touches(self, tmp_path, capsys, monkeypatch):
        folder = published(tmp_path / "hf", LLAMA, tie_word_embeddings=False)
        used = set(forward.fixed_inputs(model_of(LLAMA))[0].flatten().tolist())
        unused = next(row for row in range(300) if row not in used)
        self.plant(monkeypatch, "model/model.embed_tokens.weight", unused)
        with pytest.raises(ReceiptError, match=r"model\.embed_tokens\.weight"):
            converted(folder, tmp_path / "out", capsys)

    def test_without_a_model_each_tensor_is_compared_all_the_same(self, tmp_path, capsys, monkeypatch):
        save_file({"w": torch.ones(4, 4)}, tmp_path / "w.safetensors")
        self.plant(monkeypatch, "model/w", 2)
        with pytest.raises(ReceiptError, match="the worst tensor is model/w"):
            converted(tmp_path / "w.safetensors", tmp_path / "out", capsys)
        out = converted(tmp_path / "w.safetensors", tmp_path / "unchecked", capsys, verify=False)
        assert out["verified"] is None and "not verified: --no-verify was given" in out["text"]

    def test_the_document_says_so(self, tmp_path, capsys, monkeypatch):
        save_file({"w": torch.ones(4, 4)}, tmp_path / "w.safetensors")
        self.plant(monkeypatch, "model/w", 2)
        words = {"to": None, "dtype": None, "max_shard_size": None, "model": None, "verify": True, "optimizer": True}
        with pytest.raises(ReceiptError):
            run_convert(str(tmp_path / "w.safetensors"), str(tmp_path / "out"), as_json=True, **words)
        answer = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert answer["verified"] is False and "model/w" in answer["verdict"] and answer["files"] == 0


class TestWhichModel:
    def test_a_wrong_one_is_refused_before_anything_is_written(self, tmp_path, capsys, monkeypatch):
        folder = published(tmp_path / "hf", LLAMA)
        other = published(tmp_path / "other", {**LLAMA, "num_hidden_layers": 3, "intermediate_size": 48})
        monkeypatch.setattr(convert_module, "_write_file", lambda *args, **kwargs: pytest.fail("something was written"))
        for model, words in (
            (
                other,
                [
                    "model.layers.2.self_attn.q_proj.weight: in the model, not in the source",
                    "(64, 32) in the source, (48, 32)",
                ],
            ),
            (
                published(tmp_path / "gpt2", GPT2),
                ["transformer.wpe.weight: in the model, not in the source", "and 37 more"],
            ),
        ):
            with pytest.raises(ModelError) as caught:
                run_convert(
                    str(folder),
                    str(tmp_path / "out"),
                    to="hf",
                    dtype=None,
                    max_shard_size=None,
                    model=str(model),
                    verify=True,
                    optimizer=True,
                    as_json=False,
                )
            assert all(word in str(caught.value) for word in words), str(caught.value)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp*"))

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            ("nowhere", "is none of: a folder with config.json"),
            ("nowhere.json", "there is no file 'nowhere.json'"),
            ("tests.models:nothing", "has no 'nothing'"),
            ("tests.nothing:build", "no module named 'tests.nothing'"),
            ("tests.models:VOCAB", "is 23"),
        ],
    )
    def test_what_is_no_model(self, tmp_path, capsys, model, words):
        save_file({"w": torch.ones(4)}, tmp_path / "w.safetensors")
        with pytest.raises(UserError, match=words):
            run_convert(
                str(tmp_path / "w.safetensors"),
                str(tmp_path / "out"),
                to=None,
                dtype=None,
                max_shard_size=None,
                model=model,
                verify=True,
                optimizer=True,
                as_json=False,
            )

    def test_a_factory(self, tmp_path, capsys):
        """The user's own module, from a wrapped ``.pt``, to ours and to safetensors."""
        torch.manual_seed(4)
        model = byte_decoder()
        torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "ddp.pt")
        own = converted(tmp_path / "ddp.pt", tmp_path / "own", capsys, model=FACTORY)
        assert own["verified"] is True and own["max_difference"] == 0.0
        manifest = read_manifest(Path(own["target"]))
        assert manifest.model == {"kind": "factory", "factory": FACTORY, "kwargs": {}}
        assert "model/embed.weight" in manifest.tensors and manifest.aliases == {
            "model/head.weight": "model/embed.weight"
        }
        hf = converted(tmp_path / "own", tmp_path / "hf", capsys, model=FACTORY)
        assert hf["verified"] is True and "no config.json is written" in hf["text"]
        weights = load_file(tmp_path / "hf" / "model.safetensors")
        assert torch.equal(weights["embed.weight"], model.embed.weight) and "head.weight" not in weights

    def test_no_code_is_run_because_a_file_names_it(self, tmp_path, capsys):
        """Neither a factory in a manifest nor a module beside a configuration."""
        model = byte_decoder()
        save_file(
            {name: t.clone() for name, t in model.state_dict().items() if name != "head.weight"},
            tmp_path / "w.safetensors",
        )
        own = converted(tmp_path / "w.safetensors", tmp_path / "own", capsys, model=FACTORY)
        manifest = read_manifest(Path(own["target"]))
        named = manifest.model_copy(update={"model": {"kind": "factory", "factory": "os:abort", "kwargs": {}}})
        (Path(own["target"]) / "manifest.json").write_text(named.to_json())
        answer = converted(tmp_path / "own", tmp_path / "hf", capsys)
        assert answer["verified"] is None
        assert "the checkpoint names 'os:abort', and nothing is run because a file names it" in answer["verdict"]

        folder = published(tmp_path / "remote", LLAMA)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
        (folder / "config.json").write_text(json.dumps(config))
        answer = converted(folder, tmp_path / "own2", capsys)
        assert answer["verified"] is None and "names code of its own to be run (auto_map)" in answer["verdict"]

    def test_no_model_at_all(self, tmp_path, capsys):
        save_file({"w": torch.ones(4)}, tmp_path / "w.safetensors")
        answer = converted(tmp_path / "w.safetensors", tmp_path / "out", capsys)
        assert answer["verified"] is None and answer["max_difference"] is None
        assert answer["verdict"] == "not verified by a forward pass: no model known; give --model"

    def test_one_that_does_not_fit(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(forward, "free_memory", lambda: 1 << 20)
        answer = converted(published(tmp_path / "hf", LLAMA), tmp_path / "out", capsys)
        assert answer["verified"] is None
        assert "the model needs 512.14 MiB of memory, and 1.00 MiB are free" in answer["verdict"]

    def test_one_that_does_not_run(self, tmp_path, capsys, monkeypatch):
        def forward_fails(self, ids):
            raise RuntimeError("no kernel for this")

        monkeypatch.setattr(ByteDecoder, "forward", forward_fails)
        torch.save(byte_decoder().state_dict(), tmp_path / "m.pt")
        answer = converted(tmp_path / "m.pt", tmp_path / "out", capsys, model=FACTORY)
        assert answer["verified"] is None and "forward raised RuntimeError: no kernel for this" in answer["verdict"]

    def test_old_files_without_the_base_model_s_name(self, tmp_path, capsys):
        """As the first GPT-2 files are: no ``transformer.``, and masks that are made since."""
        from transformers import GPT2Model

        folder = published(tmp_path / "hf", GPT2, tie_word_embeddings=True)
        assert GPT2Model.base_model_prefix == "transformer"
        weights = {k.removeprefix("transformer."): t for k, t in load_file(folder / "model.safetensors").items()}
        weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        answer = converted(folder, tmp_path / "own", capsys)
        assert answer["verified"] is True
        assert "'transformer.' was put before the names" in answer["text"] and "h.0.attn.bias" in answer["text"]

    def test_experts_keep_the_names_of_their_files(self, tmp_path, capsys):
        mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
        folder = published(tmp_path / "hf", mixtral)
        assert any(".experts.1.w1" in key for key in load_file(folder / "model.safetensors"))
        answer = converted(folder, tmp_path / "out", capsys, to="hf")
        assert answer["verified"] is None and "under other names than its modules have" in answer["verdict"]
        assert torch.equal(logits(tmp_path / "out"), logits(folder))


def test_optimizer_state_goes_where_there_is_room_for_it(tmp_path, capsys):
    model = byte_decoder(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(12).reshape(2, 6)).square().mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "both.pt")
    first = converted(tmp_path / "both.pt", tmp_path / "own", capsys, model=FACTORY)
    again = converted(tmp_path / "own", tmp_path / "again", capsys, model=FACTORY, to="shardwise", max_shard_size="2KB")
    without = converted(tmp_path / "own", tmp_path / "less", capsys, model=FACTORY, to="shardwise", optimizer=False)
    old, new = (read_manifest(Path(answer["target"])) for answer in (first, again))
    assert old.optimizer == new.optimizer and old.tensors.keys() == new.tensors.keys()
    assert again["files"] > 5 and again["verified"] is True
    assert all(name.startswith("model/") for name in read_manifest(Path(without["target"])).tensors)
    if any(name.startswith("optimizer/") for name in old.tensors):
        assert "--no-optimizer was given" in without["text"]


def test_a_damaged_source_is_not_carried_on(tmp_path, capsys):
    save_file({"w": torch.ones(64)}, tmp_path / "w.safetensors")
    own = converted(tmp_path / "w.safetensors", tmp_path / "own", capsys)
    file = next(Path(own["target"]).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=file.name):
        run_convert(
            str(tmp_path / "own"),
            str(tmp_path / "hf"),
            to=None,
            dtype=None,
            max_shard_size=None,
            model=None,
            verify=True,
            optimizer=True,
            as_json=False,
        )
    assert not (tmp_path / "hf").exists()


def test_all_mistakes_in_the_words_at_once(tmp_path):
    with pytest.raises(UserError) as caught:
        run_convert(
            "nothing",
            str(tmp_path / "out"),
            to="safetensors",
            dtype="bf61",
            max_shard_size="5 apples",
            model=None,
            verify=True,
            optimizer=True,
            as_json=False,
        )
    assert list(caught.value.problems) == [
        "--to safetensors: give hf, shardwise or peft",
        "--dtype bf61: give bf16, fp16 or fp32 (did you mean 'bf16'?)",
        "--max-shard-size 5 apples: give a size such as 5GB or 500MiB",
    ]
    assert [read_size(text) for text in ("5GB", "1.5KiB", "2000", "3 mib", "1tb")] == [
        5_000_000_000,
        1536,
        2000,
        3 << 20,
        10**12,
    ]
    with pytest.raises(UserError, match="must have room for 1024 bytes"):
        read_size("1000")


def test_progress_is_shown_on_a_terminal_only(tmp_path, capsys, monkeypatch):
    save_file({"w": torch.ones(1 << 20)}, tmp_path / "w.safetensors")
    quiet = converted(tmp_path / "w.safetensors", tmp_path / "quiet", capsys)["text"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = converted(tmp_path / "w.safetensors", tmp_path / "shown", capsys)["text"]
    assert "reading back" in shown and "reading back" not in quiet and "\x1b" not in quiet
