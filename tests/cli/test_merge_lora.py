"""``shardwise checkpoint merge-lora``, and ``convert --to peft``: what was trained, in the formats of others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise.checkpoint.convert import check_merged as merged
from shardwise.checkpoint.convert import check_outputs as forward
from shardwise.checkpoint.convert import merge_lora as merge_module
from shardwise.checkpoint.format import MANIFEST, Manifest, newest
from shardwise.checkpoint.inspect import inspect_checkpoint
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.weights import BaseWeights
from shardwise.cli.checkpoint import run_convert, run_merge
from shardwise.cli.main import app
from shardwise.errors import AnswerIsNo, CheckpointError, UserError
from shardwise.parallel.lora.adapters import add_adapters, set_magnitudes
from shardwise.parallel.lora.quantize import pack
from shardwise.parallel.materialize import materialize
from shardwise.parallel.meta_parameters import parameters_on_meta
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan
from shardwise.report.checkpoint_table import print_inspection
from tests.cli.configs import train, write_config
from tests.families import VOCAB, configuration

IDS = torch.arange(48).reshape(2, 24) * 5 % VOCAB
LAYERS = 2
PLAIN = AdapterOptions(rank=4, alpha=8)
FULL = AdapterOptions(rank=4, alpha=8, modules_to_save=("embed_tokens", "lm_head", "input_layernorm"))


def model_of(name: str, seed: int = 0) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(configuration(name, LAYERS), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms start as constants, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.eval()


@dataclass(frozen=True)
class Case:
    """A run of a few lines: what is trained beside which base, and how far the merged outputs may be off."""

    name: str
    kind: str
    options: AdapterOptions = PLAIN
    base: torch.dtype = torch.float32
    precision: str = "fp32"
    within: float = 2e-5

    def __str__(self) -> str:
        o = self.options
        known = (("dora", o.dora), ("rslora", o.rslora), ("full", o.modules_to_save), (o.targets[0], True))
        marks = [w for w, there in known if there]
        return "-".join([self.name, self.kind, *marks, str(self.base).removeprefix("torch."), self.precision])


CASES = [
    Case("llama", "lora"),
    Case("qwen3", "lora", AdapterOptions(rank=4, alpha=8, targets=("q_proj", "mlp"), rslora=True)),  # tied
    Case("gpt2", "lora", AdapterOptions(rank=4, alpha=8, targets=("attention",))),  # weights [inputs, outputs], tied
    Case("gpt2", "lora", AdapterOptions(rank=3, alpha=8, dora=True)),
    Case("llama", "lora", AdapterOptions(rank=4, alpha=8, dora=True, rslora=True)),
    Case("llama", "lora", base=torch.bfloat16, precision="bf16", within=0.2),
    Case("wide-llama", "qlora", AdapterOptions(rank=4, alpha=8, targets=("attention",))),
    Case("wide-llama", "qlora", AdapterOptions(rank=4, alpha=8, dora=True, quant_type="fp4", double_quant=False)),
    Case("wide-llama", "qlora", AdapterOptions(rank=4, alpha=8, dora=True), precision="bf16", within=0.2),
    Case("llama", "lora", FULL, base=torch.bfloat16, precision="bf16", within=0.2),
    Case("gpt2", "lora", FULL.model_copy(update={"modules_to_save": ("wte",), "targets": ("attention",)})),  # tied
]


def train_a_little(folder: Path, case: Case) -> torch.Tensor:
    """``folder/base`` as others publish it, ``folder/run`` with adapters beside it; the outputs of what was trained."""
    base = folder / "base"
    model_of(case.name).to(case.base).save_pretrained(base)
    (base / "tokenizer.json").write_text('{"made": "up"}')
    plan = Plan(strategy=f"ddp+{case.kind}", adapter=case.options, precision=case.precision)
    with parameters_on_meta():
        model = model_of(case.name, seed=1)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        adapters = add_adapters(model, plan)
    fill = BaseWeights(model, str(base))
    materialize(model, torch.device("cpu"), broadcast=False)
    fill(model)
    if case.kind == "qlora":
        pack(model)
    set_magnitudes(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    facts = {
        "kind": "transformers",
        "config": json.loads((base / "config.json").read_text()),
        "adapter": adapters.facts(),
        "base": {"weights": str(base), "digest": fill.digest},
    }
    fill.close()
    with Saver(folder / "run" / "checkpoints", keep=1) as saver:
        optimizer = torch.optim.SGD(trained, lr=0.1)
        saver.save(3, model=model, optimizer=optimizer, plan=plan, state={}, model_facts=facts)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision]
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        return model.eval()(IDS).logits.float()


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


def run(source: Path, target: Path, capsys, **options: Any) -> dict[str, Any]:
    """Run the verb in this process; the document, with what was said as ``text``."""
    words: dict[str, Any] = {"base": None, "onto": None, "model": None, "dtype": None, "max_shard_size": None}
    words |= {"check": True, **options}
    try:
        run_merge(str(source), str(target), as_json=True, **words)
    finally:
        said = capsys.readouterr()
    return {**json.loads(said.out.splitlines()[-1]), "text": said.err}


def edit(run: Path, change) -> None:
    """Change the manifest of the one checkpoint of a run."""
    path = newest(run / "checkpoints") / MANIFEST
    document = json.loads(path.read_text())
    change(document)
    path.write_text(Manifest.model_validate(document).to_json())


@pytest.fixture(autouse=True, scope="module")
def transformers_is_loaded(tmp_path_factory) -> Iterator[None]:
    """Once, before anybody looks: what it brings with it sets environment variables when it is first used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        folder = tmp_path_factory.mktemp("first")
        train_a_little(folder, CASES[0])
        logits(folder / "base")
    yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """A run, which no test may change, and the outputs of its model."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, train_a_little(folder, CASES[0])


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """The same of a run with a packed base."""
    folder = tmp_path_factory.mktemp("packed")
    return folder, train_a_little(folder, CASES[6])


@pytest.mark.turns(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_merged_model_is_what_was_trained(tmp_path, capsys, case):
    trained = train_a_little(tmp_path, case)
    found = run(tmp_path / "run", tmp_path / "out", capsys, max_shard_size="20KB")
    assert found["verified"] is True, found["text"]
    assert 0 < found["max_difference"] <= found["bound"] / 4
    assert found["bound"] < found["adapters_change"] / (1000 if case.base == torch.float32 else 2)
    assert found["onto"] == ("unpacked" if case.kind == "qlora" else None) and found["files"] > 1
    base, there = load(tmp_path / "base"), load(tmp_path / "out")
    assert {n: (t.dtype, t.shape) for n, t in there.items()} == {n: (t.dtype, t.shape) for n, t in base.items()}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(case.base)[6:]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert (logits(tmp_path / "out") - trained).abs().max() <= case.within
    assert (logits(tmp_path / "base") - trained).abs().max() > 2 * case.within


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_a_run_of_the_command_from_a_base_that_was_drawn(tmp_path, capsys):
    """The whole way: a run on two ranks, and the verb."""
    configuration("llama", LAYERS).save_pretrained(tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config = write_config(
        tmp_path,
        model={"factory": None, "config": str(tmp_path / "config.json")},
        train={"steps": 2, "eval_samples": None},
        data={"heldout_fraction": 0.0},
        checkpoint={"every": 0},
        parallel={"strategy": "fsdp+lora"},
        lora={"rank": 4, "dropout": 0.1},
    )
    train(config)
    output = ["-o", str(tmp_path / "out"), "--json"]
    app(["checkpoint", "merge-lora", str(tmp_path / "run"), *output], standalone_mode=False)
    said = capsys.readouterr()
    answer = json.loads(said.out.splitlines()[-1])
    assert answer["verified"] is True and answer["source"]["step"] == 2 and answer["base"]["digest"] is None
    assert "drawn from seed" in said.err and answer["adapter"] == {
        "kind": "lora",
        "options": AdapterOptions(rank=4, alpha=32, dropout=0.1).model_dump(mode="json"),
        "scale": 8.0,
        "layers": 14,
    }
    assert answer["adapters_change"] > 20 * answer["bound"]
    with pytest.raises(UserError, match=r"drew its base from seed .*; leave --base out"):
        run(tmp_path / "run", tmp_path / "no", capsys, base=str(tmp_path / "out"))


def test_onto_the_original_weights(tmp_path, capsys, packed):
    folder, trained = packed
    found = run(folder / "run", tmp_path / "out", capsys, onto="original")
    assert found["verified"] is True and found["onto"] == "original"
    assert "outputs are not those of what was trained" in found["text"]
    apart = float((logits(tmp_path / "out") - trained).abs().max())
    assert apart > 100 * found["bound"] and found["from_packed"] > 100 * found["bound"]
    assert apart / 5 < found["from_packed"] < 5 * apart  # of other inputs
    base, there = load(folder / "base"), load(tmp_path / "out")
    same = {name for name in base if torch.equal(base[name], there[name])}
    assert {name for name in base if "self_attn" not in name} == same
    dequantized = run(folder / "run", tmp_path / "unpacked", capsys)
    assert dequantized["from_packed"] is None
    there = load(tmp_path / "unpacked")
    assert {name for name in base if "layers" not in name or "norm" in name} == {
        name for name in base if torch.equal(base[name], there[name])
    }


def test_another_dtype_is_rounded_once(tmp_path, capsys, llama):
    folder, _ = llama
    found = run(folder / "run", tmp_path / "bf16", capsys, dtype="bf16")
    assert found["verified"] is True and found["bound"] > 1e-3
    assert "14 merged weights are rounded once, to bfloat16; --dtype fp32 keeps more" in found["text"]
    run(folder / "run", tmp_path / "fp32", capsys, check=False)
    wide, narrow = load(tmp_path / "fp32"), load(tmp_path / "bf16")
    assert all(torch.allclose(wide[n], t.float(), rtol=2**-8, atol=0) for n, t in narrow.items())
    assert {t.dtype for t in narrow.values()} == {torch.bfloat16}


def test_too_large_a_value_for_a_dtype_is_said(tmp_path, capsys, llama):
    folder, _ = llama
    large = {n: t * 1e6 if "down_proj" in n else t for n, t in load(folder / "base").items()}
    (tmp_path / "base").mkdir()
    save_file(large, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    copy = copied(folder, tmp_path)
    edit(copy, lambda document: document["model"]["base"].update(digest=None, weights=None))
    with pytest.raises(UserError, match=r"down_proj.weight with its adapter holds .*, and float16 ends at 6.55e\+04"):
        run(copy, tmp_path / "out", capsys, base=str(tmp_path / "base"), dtype="fp16")
    assert not (tmp_path / "out").exists()


def copied(folder: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder / "run", tmp_path / "run"))


class TestWhatIsWrong:
    def test_another_base(self, tmp_path, capsys, llama):
        model_of("llama", seed=5).save_pretrained(tmp_path / "base")
        with pytest.raises(UserError, match=r"its digest is [0-9a-f]{16}, and .* one of [0-9a-f]{16} \('.*base'\)"):
            run(llama[0] / "run", tmp_path / "out", capsys, base=str(tmp_path / "base"))
        assert not (tmp_path / "out").exists()

    def test_a_base_that_is_gone(self, tmp_path, capsys, llama):
        copy = copied(llama[0], tmp_path)
        edit(copy, lambda document: document["model"]["base"].update(weights="nowhere/base"))
        with pytest.raises(UserError, match=r"is not where it was \('nowhere/base' does not exist.*--base FOLDER"):
            run(copy, tmp_path / "out", capsys)
        assert run(copy, tmp_path / "out", capsys, base=str(llama[0] / "base"))["verified"] is True

    def test_no_adapters(self, tmp_path, capsys, llama):
        with pytest.raises(UserError, match=r"\(Hugging Face folder\) contains no adapters"):
            run(llama[0] / "base", tmp_path / "out", capsys)

    def test_shapes_and_names(self, tmp_path, capsys, llama):
        copy = copied(llama[0], tmp_path)
        edit(copy, lambda document: document["model"]["adapter"]["options"].update(rank=5))
        with pytest.raises(UserError, match=r"q_proj.lora_A.weight: \(4, 32\), and the base's weight \(32, 32\) asks"):
            run(copy, tmp_path / "out", capsys)
        edit(copy, lambda document: document["model"]["adapter"]["options"].update(rank=4, dora=True))
        with pytest.raises(UserError, match=r"(?s)lacks .*lora_magnitude_vector"):
            run(copy, tmp_path / "out", capsys)
        edit(copy, lambda document: document["model"]["adapter"].update(options={"rank": 4, "more": 1}))
        with pytest.raises(UserError, match="described in a way that this version does not support"):
            run(copy, tmp_path / "out", capsys)

    def test_words(self, tmp_path, capsys, llama):
        with pytest.raises(UserError) as caught:
            run(llama[0] / "run", tmp_path / "out", capsys, onto="unpackd", dtype="int8", max_shard_size="big")
        assert list(caught.value.problems) == [
            "--onto unpackd: give unpacked or original (did you mean 'unpacked'?)",
            "--dtype int8: give bf16, fp16 or fp32",
            "--max-shard-size big: give a size such as 5GB or 500MiB",
        ]
        with pytest.raises(UserError, match=r"--onto original: .*trained with \+lora, whose base is not packed"):
            run(llama[0] / "run", tmp_path / "out", capsys, onto="original")
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "file").write_text("")
        with pytest.raises(UserError, match="is there and not empty"):
            run(llama[0] / "run", tmp_path / "taken", capsys)

    def test_a_factory_is_not_run_because_a_file_names_it(self, tmp_path, capsys, llama):
        copy = copied(llama[0], tmp_path)
        facts = {"kind": "factory", "factory": "os:abort", "kwargs": {}}
        edit(copy, lambda document: document["model"].update(facts))
        with pytest.raises(UserError, match=r"nothing is run because a file names it; give --model os:abort"):
            run(copy, tmp_path / "out", capsys)
        found = run(copy, tmp_path / "out", capsys, model=str(llama[0] / "base"))
        assert found["verified"] is True

    def test_a_loop_of_ones_own_says_no_base(self, tmp_path, capsys, llama):
        copy = copied(llama[0], tmp_path)
        edit(copy, lambda document: document.update(model=None))
        words = {"model": str(llama[0] / "base")}
        with pytest.raises(UserError, match=r"does not say what its base was; .*--base FOLDER"):
            run(copy, tmp_path / "out", capsys, **words)
        found = run(copy, tmp_path / "out", capsys, base=str(llama[0] / "base"), **words)
        assert found["verified"] is True and "nothing shows that it was this one" in found["text"]
        assert (logits(tmp_path / "out") - llama[1]).abs().max() < 1e-5

    def test_damaged_adapters_are_not_carried_on(self, tmp_path, capsys, llama):
        copy = copied(llama[0], tmp_path)
        file = next(newest(copy / "checkpoints").glob("rank-*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-5] ^= 64
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="lora_"):
            run(copy, tmp_path / "out", capsys)
        assert not (tmp_path / "out").exists()


class TestTheCheckCanFail:
    @pytest.mark.parametrize("share", [0.999, 1.001])
    def test_a_scale_that_is_off(self, tmp_path, capsys, monkeypatch, llama, share):
        scale = merge_module._Layer.__init__

        def wrong(self, *args):
            scale(self, *args[:6], args[6] * share, args[7])

        monkeypatch.setattr(merge_module._Layer, "__init__", wrong)
        with pytest.raises(AnswerIsNo, match="the merge does not verify"):
            run(llama[0] / "run", tmp_path / "out", capsys)
        assert not (tmp_path / "out").exists() and not list(tmp_path.iterdir())

    def test_weights_that_were_packed_another_way(self, tmp_path, capsys, monkeypatch, packed):
        monkeypatch.setattr(merge_module, "packed_and_unpacked", lambda weight, nested, kind: weight)
        with pytest.raises(AnswerIsNo, match="the merge does not verify"):
            run(packed[0] / "run", tmp_path / "out", capsys)

    def test_a_value_that_was_written_wrong(self, tmp_path, capsys, monkeypatch, llama):
        check = merged._compare

        def change(pieces, source, selection, place, progress):
            verdict = check(pieces, source, selection, place, progress)
            held = load_file(place / "model.safetensors")
            held["model.embed_tokens.weight"][VOCAB - 1, 0] += 1e-6
            save_file(held, place / "model.safetensors", {"format": "pt"})
            return verdict

        monkeypatch.setattr(merged, "_compare", change)
        with pytest.raises(AnswerIsNo, match=r"not what was written .*: model\.embed_tokens\.weight"):
            run(llama[0] / "run", tmp_path / "out", capsys)

    def test_too_little_memory_is_said(self, tmp_path, capsys, monkeypatch, llama):
        monkeypatch.setattr(forward, "free_memory", lambda: 1 << 20)
        found = run(llama[0] / "run", tmp_path / "out", capsys)
        assert found["verified"] is None and "of memory, and 1.00 MiB are free" in found["verdict"]
        assert (logits(tmp_path / "out") - llama[1]).abs().max() < 1e-5

    def test_adapters_that_do_nothing_are_said(self, tmp_path, capsys, monkeypatch, llama):
        monkeypatch.setattr(AdapterOptions, "scale", 1e-12)
        from peft.tuners.lora import LoraLayer

        update = LoraLayer.update_layer

        def small(self, *args, **kwargs):
            update(self, *args, **kwargs)
            self.scaling["default"] = 1e-12

        monkeypatch.setattr(LoraLayer, "update_layer", small)
        found = run(llama[0] / "run", tmp_path / "out", capsys)
        assert found["verified"] is True and "which is too little to be seen" in found["verdict"]


class TestPeft:
    @pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[6]], ids=str)
    def test_its_loader_gives_the_model_that_was_trained(self, tmp_path, capsys, case):
        trained = train_a_little(tmp_path, case)
        found = export(tmp_path / "run", tmp_path / "out", capsys)
        assert found["verified"] is True and found["max_difference"] == 0.0 and found["to"] == "peft"
        files = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert files == ["adapter_config.json", "adapter_model.safetensors"]
        there = peft_logits(tmp_path)
        if case.kind == "qlora":
            assert "beside one that is not packed, outputs are others" in found["text"]
            run(tmp_path / "run", tmp_path / "merged", capsys, onto="original")
            trained = logits(tmp_path / "merged")
        assert (there - trained).abs().max() < case.within
        assert (logits(tmp_path / "base") - trained).abs().max() > 0.05

    def test_a_scale_that_is_lost_is_found(self, tmp_path, capsys, monkeypatch, llama):
        from shardwise.checkpoint.convert import peft

        config = peft.peft_config
        monkeypatch.setattr(peft, "peft_config", lambda *a, **k: {**config(*a, **k), "use_rslora": True})
        with pytest.raises(AnswerIsNo, match="where peft has loaded the adapters"):
            export(llama[0] / "run", tmp_path / "out", capsys)
        assert not (tmp_path / "out").exists()

    def test_what_is_no_model_is_not_made_one(self, tmp_path, capsys, llama):
        for to in (None, "hf", "shardwise"):
            with pytest.raises(UserError, match=r"holds adapters only, .*merge-lora .* -o FOLDER; .*--to peft"):
                export(llama[0] / "run", tmp_path / "out", capsys, to=to)
        with pytest.raises(UserError, match="contains no adapters"):
            export(llama[0] / "base", tmp_path / "out", capsys)
        with pytest.raises(UserError, match="has one file of adapters; take it out"):
            export(llama[0] / "run", tmp_path / "out", capsys, max_shard_size="5GB")


def export(source: Path, target: Path, capsys, **options: Any) -> dict[str, Any]:
    words: dict[str, Any] = {"to": "peft", "dtype": None, "max_shard_size": None, "model": None}
    try:
        run_convert(str(source), str(target), as_json=True, verify=True, optimizer=True, **{**words, **options})
    finally:
        said = capsys.readouterr()
    return {**json.loads(said.out.splitlines()[-1]), "text": said.err}


def peft_logits(folder: Path) -> torch.Tensor:
    import warnings

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(base, folder / "out").eval()(IDS).logits


def test_inspect_says_what_they_are(packed, capsys):
    from rich.console import Console

    print_inspection(inspect_checkpoint(packed[0] / "run"), Console(width=200))
    said = capsys.readouterr().out
    assert "adapters only: qlora, rank 4, alpha 8, base packed to nf4, scales too; 8 layers (q_proj, k_proj" in said
    assert re.search(r"base: '.*base', digest [0-9a-f]{16}; merge with: checkpoint merge-lora", said)


FRESH = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"
MEMORY = """
import resource, sys
import torch
import shardwise.cli.checkpoint as cli
import shardwise.cli.merge
from shardwise.checkpoint.convert.known_model import KnownModel
from shardwise.parallel.lora.adapters import add_adapters, linear_layers
from shardwise.checkpoint.readers.detect import open_source

lora, qlora, target = sys.argv[1:]
with open_source(lora) as opened:  # the libraries, and the model on the meta device, are not what is measured
    known = shardwise.cli.merge.find_model(None, opened)
    linear_layers(known.build(real=False)), known.expected()
    from shardwise.parallel.lora.quantize import packed_and_unpacked
    packed_and_unpacked(torch.randn(64, 64), True, "nf4")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for run in (lora, qlora):  # the one that needs more comes last
    cli.run_merge(run, target + run[-5:], base=None, onto=None, model=None, dtype=None, max_shard_size="100MB",
                  check=False, as_json=False)
    print("KIB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.turns(6)
def test_memory_is_a_few_of_the_largest_weights(tmp_path):
    """A base of 136 MiB whose largest weight has 16: blocks of rows, or what packing one weight takes."""
    side, layers = 2048, 4
    keys = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": side,
        "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(keys))
    write_large(tmp_path, keys)
    places = [str(tmp_path / name) for name in ("lora", "qlora", "out")]
    command = [sys.executable, "-c", FRESH, sys.executable, "-c", MEMORY, *places]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=150)
    plain, packed = (int(line.split()[1]) << 10 for line in done.stdout.splitlines() if line.startswith("KIB"))
    largest = side * side * 4
    assert plain < largest + (32 << 20), f"{plain >> 20} MiB"
    assert packed < 4 * largest + (32 << 20), f"{packed >> 20} MiB"
    assert sum(path.stat().st_size for path in (tmp_path / "outqlora").glob("*.safetensors")) > 8 * largest


def write_large(folder: Path, keys: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    for kind in ("lora", "qlora"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**keys), dtype=torch.float32)
        if kind == "lora":
            shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            held = {name: torch.rand(shape) for name, shape in shapes.items()}
            save_file(held, folder / "base" / "model.safetensors", {"format": "pt"})
            del held
        plan = Plan(strategy=f"ddp+{kind}", adapter=AdapterOptions(rank=2))
        adapters = add_adapters(model, plan)
        fill = BaseWeights(model, str(folder / "base"))
        facts = {
            "kind": "transformers", "config": keys, "adapter": adapters.facts(),
            "base": {"weights": str(folder / "base"), "digest": fill.digest},
        }  # fmt: skip
        fill.close()
        with Saver(folder / kind / "checkpoints", keep=1) as saver:
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            saver.save(1, model=model, optimizer=optimizer, plan=plan, state={}, model_facts=facts)
