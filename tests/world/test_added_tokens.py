"""Tokens that are new to a pretrained model: the same new rows under every strategy, through training to an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.added_rows import SourceWithAddedRows
from shardwise.checkpoint.added_tokens import AddedTokens
from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.matching import MODEL
from shardwise.checkpoint.readers.detect import open_source
from shardwise.cli.export_model import export_model
from shardwise.errors import ModelError
from shardwise.model.read import clean_name
from shardwise.parallel.ownership import ownership_of
from shardwise.receipts.lines.sample_lines import added_rows_line
from shardwise.run.job import Job, prepare_job
from shardwise.run.run_summary import keep_job
from shardwise.train.config import Config
from shardwise.train.data.tokenizer import save_tokenizer
from shardwise.train.measure_added_rows import AddedRowsMeasurement
from tests.contract import full
from tests.families import configuration
from tests.world.test_resume import _Listener
from tests.worlds import run_each, run_world

OLD, NEW = 257, 260
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WORDS = ("<user>", "<assistant>", "<end>")
TEMPLATE = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}{% endfor %}"
CHATS = [
    {"messages": [{"role": "user", "content": f"{i} and 1?"}, {"role": "assistant", "content": f"{i + 1}"}]}
    for i in range(24)
]


def base(folder: Path, *, tied: bool, bias: bool = False) -> Path:
    """A Hugging Face folder of a model of bytes, and beside it a tokenizer with three words more."""
    import transformers
    from tokenizers import AddedToken, Tokenizer

    folder.mkdir(parents=True)
    torch.manual_seed(3)
    facts = configuration("qwen3" if tied else "llama", 2)
    facts.vocab_size = OLD
    transformers.AutoModelForCausalLM.from_config(facts).save_pretrained(folder)
    tokens = folder.parent / "tokenizer"
    tokens.mkdir(exist_ok=True)
    save_tokenizer("bytes", None, tokens)
    made = Tokenizer.from_file(str(tokens / "tokenizer.json"))
    made.add_special_tokens([AddedToken(word, special=True) for word in WORDS])
    made.save(str(tokens / "tokenizer.json"))
    settings = json.loads((tokens / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "<end>", "chat_template": TEMPLATE}
    settings.pop("added_tokens_decoder", None)
    (tokens / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder.parent / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    return folder


def config(folder: Path, strategy: str, world: int, **tables: dict[str, Any]) -> Config:
    given: dict[str, dict[str, Any]] = {
        "model": {"config": str(folder), "weights": str(folder)},
        "data": {
            "path": str(folder.parent / "chats.jsonl"), "tokenizer": str(folder.parent / "tokenizer"), "seq_len": 64,
            "heldout_fraction": 0.0,
        },
        "train": {"steps": 2, "global_batch": 4, "output": str(folder.parent / f"{folder.name}-{strategy}")},
        "parallel": {"strategy": strategy, "nproc": world, "device": "cpu"},
        "optimizer": {"lr": 0.01},
    }  # fmt: skip
    return Config.model_validate(
        {name: {**given.get(name, {}), **tables.get(name, {})} for name in {**given, **tables}}
    )


def job_of(config: Config) -> Job:
    job = prepare_job(config, lambda text: None).job
    keep_job(job)
    return job


def prepared(text: str) -> tuple[dict[str, torch.Tensor], AddedRowsMeasurement | None]:
    """The embedding and the head as training begins, of those that this rank holds, and what is said of them."""
    from shardwise.distributed.process_group import join
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.loop import TrainingRun
    from shardwise.train.session import Session

    job = Job.model_validate_json(text)
    session = Session(ranks=join(job.plan.device), planner=lambda *_: job.plan)
    run = TrainingRun(job.config, job.plan, open_corpus(job.corpus), session, _Listener())
    run._prepare()
    home = ownership_of(session.module)
    named = {clean_name(n): p for n, p in session.module.named_parameters()}
    named = {n if home is None else home.canonical(n): p for n, p in named.items()}
    found = {name: full(p.detach()).clone() for name, p in named.items() if name in (EMBEDDING, HEAD)}
    session.close()
    return found, run.added_rows


def trained(text: str) -> None:
    from shardwise.run.rank_main import run_job

    run_job(Job.model_validate_json(text))


def widened(rows: torch.Tensor) -> torch.Tensor:
    mean = rows.double().mean(0).to(rows.dtype)
    return torch.cat([rows, mean.expand(NEW - OLD, *mean.shape)])


def test_any_part_of_a_resized_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    full = {"embed": torch.randn(OLD, 6), "bias": torch.randn(OLD), "other": torch.randn(OLD, 4)}
    save_file(full, tmp_path / "model.safetensors")
    with SourceWithAddedRows(open_source(str(tmp_path)), ["embed", "bias", "absent"], AddedTokens(OLD, NEW)) as source:
        assert {name.removeprefix(MODEL): info.shape[0] for name, info in source.tensors.items()} == {
            "embed": NEW, "bias": NEW, "other": OLD
        }  # fmt: skip
        for begin, count in ((0, NEW), (0, OLD), (250, 9), (OLD, 3), (258, 2), (3, 4), (NEW, 0)):
            for left, width in ((0, 6), (2, 3)):
                part = source.read(f"{MODEL}embed", Box((begin, left), (count, width)))
                wanted = widened(full["embed"])[begin : begin + count, left : left + width]
                torch.testing.assert_close(part, wanted, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(
                source.read(f"{MODEL}bias", Box((begin,), (count,))), widened(full["bias"])[begin : begin + count]
            )
        assert torch.equal(source.read(f"{MODEL}other", Box((0, 0), (OLD, 4))), full["other"])


STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "ddp+tp2", "fsdp+tp2", "ddp+pp2")


@pytest.mark.turns(2)
@pytest.mark.parametrize("tied", [False, True])
def test_every_strategy_begins_with_the_same_rows(tmp_path: Path, tied: bool) -> None:
    folder = base(tmp_path / "base", tied=tied)
    stored = load_file(folder / "model.safetensors")
    names = {EMBEDDING} if tied else {EMBEDDING, HEAD}
    strategies = [s for s in STRATEGIES if not (tied and s == "ddp+tp2")]
    jobs = [job_of(config(folder, strategy, 2)) for strategy in strategies]
    assert all(job.estimate.parameters > 0 for job in jobs)
    for strategy, ranks in zip(strategies, run_each(prepared, 2, [(job.to_json(),) for job in jobs]), strict=True):
        seen: set[str] = set()
        for found, rows in ranks:
            for name, value in found.items():
                torch.testing.assert_close(value, widened(stored[name]), rtol=1e-6, atol=1e-8)
                seen.add(name)
            assert rows is not None and added_rows_line(rows).ok is True, strategy
        assert seen == names, strategy


def test_rows_that_are_not_the_mean_are_seen() -> None:
    for distance, ok in ((0.0, True), (0.003, True), (0.2, False), (None, None)):
        assert added_rows_line(AddedRowsMeasurement(AddedTokens(OLD, NEW), (EMBEDDING,), distance)).ok is ok


def test_from_new_tokens_to_a_folder_that_transformers_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base(tmp_path / "base", tied=True)
    asked = config(folder, "fsdp", 2, train={"steps": 3, "output": str(tmp_path / "run"), "export": "hf"})
    run_world(trained, 2, job_of(asked).to_json())
    export_model(asked, Console(), as_json=False)
    target = tmp_path / "run" / "model"
    assert json.loads((target / "config.json").read_text())["vocab_size"] == NEW
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    assert model.get_input_embeddings().weight.shape[0] == NEW
    ids = tokenizer.apply_chat_template(CHATS[0]["messages"], return_tensors="pt", return_dict=True)
    assert {OLD, OLD + 1, OLD + 2} <= set(ids["input_ids"][0].tolist())
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    began = widened(load_file(folder / "model.safetensors")[EMBEDDING])
    assert (model.get_input_embeddings().weight[OLD:] - began[OLD:]).abs().min() > 0  # they were trained
    receipt = (tmp_path / "run" / "report.json").read_text()
    assert "3 rows, the mean of the other 257" in receipt
    capsys.readouterr()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    import transformers

    folder = base(tmp_path / "base", tied=True)
    facts = configuration("qwen3", 2)
    facts.vocab_size = 100
    small = tmp_path / "small"
    transformers.AutoModelForCausalLM.from_config(facts).save_pretrained(small)
    with pytest.raises(ModelError, match="more than 1 in 4 of its rows would be new"):
        job_of(config(folder, "ddp", 1, model={"config": str(small), "weights": str(small)}))
    with pytest.raises(ModelError, match="vocab_size 257 is smaller than the tokenizer's 260; set it to 260 or more"):
        job_of(config(folder, "ddp", 1, model={"config": str(folder), "weights": None}))


def test_the_planner_counts_the_new_rows_and_train_says_them(tmp_path: Path) -> None:
    from tests.cli import configs
    from tests.commands import shardwise

    folder = base(tmp_path / "base", tied=False)
    file = configs.write_config(
        tmp_path,
        model={"config": str(folder), "weights": str(folder), "factory": None, "kwargs": None},
        data={"path": str(tmp_path / "chats.jsonl"), "tokenizer": str(tmp_path / "tokenizer"), "heldout_fraction": 0.0},
    )
    done = shardwise("train", str(file), "--dry-run")
    assert "3 tokens of data.tokenizer are new to it" in done.stdout
    assert "are resized from 257 to 260 rows" in done.stdout
    planned = shardwise("plan", str(file), "--json")
    counted = json.loads(planned.stdout)["model"]
    assert counted["vocab_size"] == NEW, counted


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_models_of_rows_are_resized_too(tmp_path: Path, kind: str) -> None:
    import transformers

    from shardwise.train.tasks.pretrained import pretrained
    from shardwise.train.tasks.registry import ROW_TASKS

    facts: Any = configuration("bert", 2)
    if kind == "t5":
        facts = transformers.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    task = ROW_TASKS["masked-lm" if kind == "bert" else "seq2seq"]
    torch.manual_seed(1)
    model = getattr(transformers, task.auto_class).from_config(facts)
    model.save_pretrained(tmp_path)
    rows = model.get_input_embeddings().weight.detach()
    found = pretrained(task, facts, str(tmp_path), AddedTokens(64, 67), lambda text: None)
    wanted = torch.cat([rows, rows.mean(0).expand(3, -1)])
    torch.testing.assert_close(found.get_input_embeddings().weight.detach(), wanted, rtol=1e-5, atol=1e-7)
    ids = torch.tensor([[1, 64, 66]])
    more = {"decoder_input_ids": ids} if kind == "t5" else {}
    assert found(input_ids=ids, **more).logits.shape == (1, 3, 67)


def test_a_vocabulary_in_a_text_config_is_compared_too(tmp_path: Path) -> None:
    from shardwise.train.model import added_tokens, model_factory

    folder = base(tmp_path / "base", tied=True)
    text = {"vocab_size": OLD, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    asked = config(folder, "ddp", 1)
    assert added_tokens(asked, NEW) == AddedTokens(OLD, NEW) and added_tokens(asked, OLD) is None
    with pytest.raises(ModelError, match=r"vocab_size 257 is smaller than the tokenizer's 260, .* in text_config"):
        model_factory(asked, NEW)
