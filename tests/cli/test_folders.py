"""What a run folder holds already: another run, a finished one, a longer one, a plan."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.cli import configs


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and its finished ddp run of six steps; tests may only read it."""
    folder = tmp_path_factory.mktemp("finished")
    configs.train(configs.write_config(folder, train={"steps": 6}))
    return folder


def test_another_strategy_is_not_answered_by_a_finished_run(finished: Path) -> None:
    for words in (["--strategy", "fsdp"], ["parallel.precision=bf16"]):
        _, err = configs.train(finished / "config.toml", *words, exit_code=2)
        assert "finished with" in err
        assert "choose another train.output" in err
    _, err = configs.train(finished / "config.toml", "--json", "--strategy", "ddp")
    assert "finished: all 6 steps" in err


def test_what_was_changed_after_the_last_step_is_refused_and_nothing_is_lost(finished: Path) -> None:
    files = [finished / "run" / name for name in ("summary.json", "plan.toml")]
    before = [file.read_text() for file in files]
    _, err = configs.train(finished / "config.toml", "optimizer.lr=0.5", "--strategy", "fsdp", exit_code=2)
    assert "contains a finished run with optimizer.lr" in err and "(not 0.5); raise train.steps to continue it" in err
    assert [file.read_text() for file in files] == before


def test_what_trains_nothing_else_is_answered_by_a_finished_run(finished: Path, tmp_path: Path) -> None:
    """So is a summary of earlier versions, which has the keys that are no longer compared."""
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    summary = json.loads((run / "summary.json").read_text())
    summary["config"]["train"] |= {"watch": True, "micro_batch": None, "grad_accum": None}
    (run / "summary.json").write_text(json.dumps(summary))
    for output in (finished / "run", run):
        words = ("train.watch=false", "train.micro_batch=2", "train.grad_accum=2", f"train.output={output}")
        out, _ = configs.train(finished / "config.toml", *words)
        assert "finished: all 6 steps" in out


def test_evaluations_asked_for_after_the_last_step_are_refused_as_such(finished: Path) -> None:
    words = ("train.eval_every=2", 'train.generate=["def "]')
    _, err = configs.train(finished / "config.toml", *words, exit_code=2)
    assert "train.eval_every 0 (not 2)" in err and "nothing was trained or evaluated anew" in err
    _, err = configs.train(finished / "config.toml", *words, "train.seed=3", exit_code=2)
    assert "train.seed" in err and "evaluated anew" not in err


def test_fewer_steps_than_were_done(finished: Path) -> None:
    before = (finished / "run" / "summary.json").read_text()
    _, err = configs.train(finished / "config.toml", "train.steps=2", exit_code=2)
    assert "holds a run of 6 steps, and this one has 2" in err
    assert (finished / "run" / "summary.json").read_text() == before


def test_its_plan_can_be_run_elsewhere(finished: Path, tmp_path: Path) -> None:
    plan = finished / "run" / "plan.toml"
    config = configs.write_config(tmp_path, train={"steps": 2})
    out, _ = configs.train(config, "--json", "--plan", str(plan))
    assert json.loads(out.splitlines()[-1])["strategy"] == "ddp"
    _, err = configs.train(config, "--plan", str(plan), "train.global_batch=16", "train.steps=4", exit_code=2)
    assert "train.global_batch is 16, but the plan has 8" in err


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    config = configs.write_config(tmp_path, train={"steps": 3000, "eval_samples": 8})
    process = configs.start_train(config)
    configs.wait_for_step(process, tmp_path, 5)
    _, err = configs.train(config, exit_code=2)
    assert "another run is writing there now" in err
    assert configs.stop(process, signal.SIGINT) == 130


@pytest.mark.turns(2)
def test_an_interrupt_during_the_last_evaluation_loses_nothing(tmp_path: Path) -> None:
    changes = {"train": {"steps": 4, "eval_samples": 0, "global_batch": 2}, "checkpoint": {"every": 0}}
    config = configs.write_config(tmp_path, data={"path": "python:asyncio", "heldout_fraction": 0.9}, **changes)
    process = configs.start_train(config)
    configs.wait_for_step(process, tmp_path, 4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped after step 4 of 4, saved as" in err
    out, _ = configs.train(config, "--json")
    document = json.loads(out.splitlines()[-1])
    assert document["steps"] == 4
    assert document["heldout_bits_per_byte"] > 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_from_safetensors(tmp_path: Path, strategy: str) -> None:
    """The first loss is that of the weights in the folder, computed here without Shardwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwise.train.config import read_config
    from shardwise.train.data.corpus import prepare_corpus
    from shardwise.train.data.samples import order_for, samples_for
    from shardwise.train.loss import token_loss_sum

    facts = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(5)
    model = LlamaForCausalLM(facts)
    model.save_pretrained(tmp_path / "weights", max_shard_size="10KB")
    assert (tmp_path / "weights" / "model.safetensors.index.json").exists()
    source = str(tmp_path / "weights")
    path = configs.write_config(
        tmp_path, model={"factory": None, "config": source, "weights": source}, train={"steps": 2}
    )
    configs.train(path, "--strategy", strategy)
    config = read_config(path)
    corpus = prepare_corpus(config.data, tmp_path / "run" / "data", lambda text: None)
    samples = samples_for(corpus, config)
    inputs, labels = samples.batch(order_for(samples, config).ids(0, 8))
    with torch.no_grad():
        expected = float(token_loss_sum(model(**inputs), labels) / (labels != -100).sum())
    assert abs(float(configs.losses(tmp_path)[1]) - expected) < 1e-5
