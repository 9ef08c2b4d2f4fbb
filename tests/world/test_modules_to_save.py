"""Modules that are trained in full beside adapters: the gradient of one process, kept, resumed, merged, exported."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwise.checkpoint.format import newest
from shardwise.cli.export_model import export_model
from shardwise.errors import ModelError
from shardwise.model.read import clean_name
from shardwise.parallel.lora.adapters import add_adapters, parameters_in_full
from shardwise.parallel.lora.quantize import pack
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.metrics import read_metrics
from tests.contract import CLIP, LIMIT, Case, Watch, ragged, reference, worst
from tests.families import configuration, family
from tests.world.test_adapters import _with_values
from tests.world.test_added_tokens import EMBEDDING, NEW, base, config, job_of, trained
from tests.worlds import run_each, run_world

OPTIONS = AdapterOptions(rank=4, modules_to_save=("embed_tokens", "lm_head"))


def adapted(case: Case, seed: int = 0) -> nn.Module:
    model = family(case.model, seed=seed)
    torch.manual_seed(seed)
    add_adapters(model, case.plan)
    with torch.no_grad():
        return _with_values(model)


def gradients(case: Case) -> tuple[float, str, list[str], list[str]]:
    """The worst error of a window, where, the names of the gradients, and what the receipt alarms of."""
    from shardwise.receipts.effects import EffectsRecorder

    batches = ragged(case.plan.dims.dp * case.accum)
    watch, probe = Watch(), EffectsRecorder(strict=False)
    session = start(case.plan, receipts=False)
    session.observers += [watch, probe]
    model = adapted(case, 0 if session.ranks.is_main else 7)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = session.prepare(model, torch.optim.SGD(trained, lr=0.0), batches[0][0])
    errors = [(0.0, "")]
    one = adapted(case)
    if case.plan.parsed.adapter == "qlora":
        pack(one)
    raw, clipped, _, _ = reference(one, batches)
    expected = [{clean_name(n): value for n, value in kind.items()} for kind in (raw, clipped)]
    for _ in range(2):
        for step in session.steps(batches):
            step.run(model, token_loss_sum)
            step.update(optimizer, clip_norm=CLIP)
        errors += [worst(watch.raw, expected[0]), worst(watch.clipped, expected[1])]
    session.close()
    alarms = [f"{x.name}: {x.planned}, {x.found}" for x in probe.receipt.lines if x.ok is False]
    said = [x.found for x in probe.receipt.lines if x.name == "modules trained in full"]
    return *max(errors), sorted(watch.raw), [*alarms, *(f"said {x}" for x in said if "embed_tokens" not in x)]


CASES = [
    Case(world, f"{strategy}+lora", model, options={"adapter": OPTIONS})
    for world, strategies in ((2, ("ddp", "zero1", "zero2", "fsdp")), (4, ("hsdp",)))
    for strategy in strategies
    for model in ("llama", "qwen3")  # untied, and tied
]
CASES += [
    Case(2, "fsdp+lora", "llama", options={"adapter": OPTIONS, "loss_chunks": 2, "recompute": "full"}),
    Case(2, "fsdp+cp2+lora", "llama", options={"adapter": OPTIONS}),
    Case(
        1, "ddp+lora", "llama", options={"adapter": OPTIONS.model_copy(update={"modules_to_save": ("embed_tokens",)})}
    ),
]


@pytest.mark.turns(3)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_gradient_of_one_process(world: int) -> None:
    cases = [case for case in CASES if case.world == world]
    for case, ranks in zip(cases, run_each(gradients, world, [(case,) for case in cases]), strict=True):
        for error, name, names, alarms in ranks:
            assert EMBEDDING in names, case
            assert error <= LIMIT, f"{case}: {error:.2e} at {name}"
            assert not alarms, f"{case}: {alarms}"


def test_beside_a_quantized_base() -> None:
    cases = [Case(2, strategy, "wide-llama", options={"adapter": OPTIONS}) for strategy in ("ddp+qlora", "fsdp+qlora")]
    for case, ranks in zip(cases, run_each(gradients, 2, [(case,) for case in cases]), strict=True):
        for error, name, names, alarms in ranks:
            assert EMBEDDING in names and not alarms, f"{case}: {alarms}"
            assert error <= 2e-6, f"{case}: {error:.2e} at {name}"  # packed layers compute in fp32


def test_in_bf16_they_stay_fp32(tmp_path: Path) -> None:
    for strategy in ("fsdp+lora", "ddp+lora"):
        run = {"steps": 2, "output": str(tmp_path / strategy)}
        asked = full_run(tmp_path, False, strategy, parallel={"precision": "bf16"}, **run)
        run_world(trained, 2, job_of(asked).to_json())  # it raises where a receipt alarms
        saved = json.loads((newest(tmp_path / strategy / "checkpoints") / "manifest.json").read_text())["tensors"]
        assert saved[f"model/{EMBEDDING}"]["dtype"] == "F32"


def test_names_that_cannot_be_trained_in_full() -> None:
    model = family("llama")
    assert parameters_in_full(model, ["lm_head"]) == ("lm_head.weight",)
    assert set(parameters_in_full(family("qwen3"), ["lm_head"])) == {EMBEDDING, "lm_head.weight"}  # tied
    for name, text in (
        ("embed_token", "'embed_token' is no module of the model (did you mean 'embed_tokens'?)"),
        ("q_proj", "has an adapter; take one out (lora.targets)"),
        ("rotary_emb", "has no parameters to train"),
    ):
        options = AdapterOptions(rank=2, modules_to_save=(name,))
        with pytest.raises(ModelError) as error:
            add_adapters(family("llama"), Plan(strategy="ddp+lora", adapter=options))
        assert text in str(error.value), error.value
    options = AdapterOptions(rank=2, targets=("attention",), modules_to_save=("up_proj",))
    with pytest.raises(ModelError, match="is packed in 4 bits and cannot be trained"):
        add_adapters(family("wide-llama"), Plan(strategy="ddp+qlora", adapter=options))


def full_run(folder: Path, tied: bool, strategy: str, parallel: dict[str, Any] | None = None, **train: Any) -> Any:
    model = folder / "base"
    if not model.exists():
        base(model, tied=tied)
    names = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    tables = {"lora": {"rank": 4, "modules_to_save": names}, "checkpoint": {"every": 2}}
    asked = {"steps": 4, "output": str(folder / "run"), "export": "hf", **train}
    where = {"strategy": strategy, "nproc": 2, "device": "cpu", **(parallel or {})}
    return config(model, strategy, 2, train=asked, parallel=where, **tables)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("tied", "strategy"), [(False, "fsdp+lora"), (True, "ddp+lora")])
def test_new_tokens_beside_adapters_from_training_to_both_exports(
    tmp_path: Path, tied: bool, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained in two parts: kept in adapter checkpoints; merged and peft's folder give the same outputs."""
    from peft import PeftModel
    from rich.console import Console
    from transformers import AutoModelForCausalLM

    from shardwise.cli.checkpoint import run_convert

    run_world(trained, 2, job_of(full_run(tmp_path, tied, strategy, steps=2)).to_json())
    asked = full_run(tmp_path, tied, "zero2+lora" if tied else "ddp+lora")
    run_world(trained, 2, job_of(asked).to_json())
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4]
    export_model(asked, Console(), as_json=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert merged.get_input_embeddings().weight.shape[0] == NEW
    began = load_file(tmp_path / "base" / "model.safetensors")[EMBEDDING]
    assert (merged.get_input_embeddings().weight[257:] - began.mean(0)).abs().max() > 1e-3
    source = newest(tmp_path / "run" / "checkpoints")
    run_convert(str(source), str(tmp_path / "peft"), to="peft", model=None, as_json=False)
    told = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert [name.rpartition(".")[2] for name in told["modules_to_save"]] == ["embed_tokens", "lm_head"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain.resize_token_embeddings(NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft about transformers, and about tied weights, which it copies
        beside = PeftModel.from_pretrained(plain, str(tmp_path / "peft"))
    ids = torch.tensor([[257, 65, 66, 259, 258, 67]])
    torch.testing.assert_close(merged(ids).logits, beside(ids).logits, rtol=1e-4, atol=1e-5)
    capsys.readouterr()


def test_frozen_rows_of_new_tokens_are_refused(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", tied=False)
    for names in ([], ["lm_head"]):
        with pytest.raises(ModelError) as error:
            job_of(config(folder, "fsdp+lora", 2, lora={"rank": 4, "modules_to_save": names}))
        assert "3 tokens that are new to model.config, and +lora freezes their rows" in str(error.value)
        assert 'set lora.modules_to_save = ["' in str(error.value) and '"embed_tokens"' in str(error.value)
    with pytest.raises(
        ModelError, match=r"model\.freeze .* freezes their rows in model\.embed_tokens\.weight; take that"
    ):
        frozen = {"config": str(folder), "weights": str(folder), "freeze": ["*embed_tokens*"]}
        job_of(config(folder, "fsdp", 2, model=frozen))


def test_the_planner_counts_what_is_trained_in_full(tmp_path: Path) -> None:
    from shardwise.model.load_model import load_profile
    from shardwise.model.lora import AdapterFacts, with_adapters
    from shardwise.model.trace import trace_module

    for name in ("llama-3.1-8b", "llama-3.2-1b"):  # untied, tied
        profile = load_profile(name, seq_len=128)
        few = with_adapters(profile, "lora", facts=AdapterFacts())
        more = with_adapters(profile, "lora", facts=AdapterFacts(modules_to_save=("embed_tokens", "lm_head")))
        embedding = sum(
            w.num_elements for u in profile.units if u.kind != "block" for w in u.weights if len(w.shape) > 1
        )
        assert more.num_trainable == few.num_trainable + embedding
        heads = [next(op for op in p.units[-1].ops if op.kind == "matmul") for p in (few, more)]
        assert [(op.weight, op.saved > 0) for op in heads] == [(False, False), (True, True)]
    drawn = family("gpt2")  # its positions have the shape of its embedding, which the head shares
    add_adapters(drawn, Plan(strategy="ddp+lora", adapter=AdapterOptions(rank=4, modules_to_save=("lm_head",))))
    facts = AdapterFacts(rank=4, modules_to_save=("lm_head",))
    planned = with_adapters(trace_module(lambda: family("gpt2"), seq_len=16), "lora", facts=facts)
    assert planned.num_trainable == sum(p.numel() for p in drawn.parameters() if p.requires_grad)
    folder = base(tmp_path / "base", tied=False)
    jobs = [
        job_of(
            config(
                folder, "ddp+lora", 2, data={"tokenizer": "bytes", "chat_template": "chatml"},
                lora={"rank": 4, **({"modules_to_save": ["embed_tokens", "lm_head"]} if full else {})},
            )
        )
        for full in (False, True)
    ]  # fmt: skip
    elements = 2 * 257 * 32
    for part, times in (("gradients", 4), ("optimizer", 8)):
        there = getattr(jobs[1].estimate, part) - getattr(jobs[0].estimate, part)
        assert there == pytest.approx(elements * times, rel=0.01), part


def test_new_tokens_in_rows_of_padding_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model with more rows than its own tokenizer has ids is not resized, and such rows were never trained."""
    import transformers

    from shardwise.train.data.tokenizer import save_tokenizer

    base(tmp_path / "base", tied=False)
    facts = configuration("llama", 2)
    facts.vocab_size = 264
    padded = tmp_path / "padded"
    transformers.AutoModelForCausalLM.from_config(facts).save_pretrained(padded)
    save_tokenizer("bytes", None, padded)
    said = "3 ids more than the tokenizer of model.config: where they occur, +lora freezes rows"
    for names, expected in (([], True), (["embed_tokens", "lm_head"], False)):
        caplog.clear()
        job_of(config(padded, "ddp+lora", 1, lora={"rank": 4, "modules_to_save": names}))
        assert (said in caplog.text) is expected, caplog.text
