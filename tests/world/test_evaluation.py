"""Evaluations of a run: the same numbers and text under every strategy; the best checkpoint; early stopping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError, PlanError
from shardwise.run.job import prepare_job
from shardwise.run.rank_main import run_job
from shardwise.train.best import Best
from shardwise.train.config import Config, read_config
from shardwise.train.evaluate import Evaluation
from tests.cli import configs
from tests.turns import by_turns
from tests.worlds import run_world

STRATEGIES = ("ddp", "fsdp", "ddp+tp2", "ddp+pp2")


def share_right(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A metric of one's own: how often the likeliest token is right."""
    kept = labels != -100
    return ((outputs.logits.argmax(-1) == labels) & kept).sum(), kept.sum()


def _rank(text: str) -> None:
    from shardwise.run.job import Job

    run_job(Job.model_validate_json(text))


def config(folder: Path, strategy: str, **train: Any) -> Config:
    chats = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}, {i + 1}"}]}
        for i in range(80)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    (folder / "notes.txt").write_text("one two three " * 40)
    (folder / "other.txt").write_text("four five six " * 40)
    facts = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts))
    changes: dict[str, dict[str, Any]] = {
        "model": {"factory": None, "config": str(folder / "config.json")},
        "data": {
            "path": None,
            "sources": [
                {"path": str(folder / "chats.jsonl")},
                {"path": str(folder), "name": "notes", "include": ["*.txt"]},
            ],
            "chat_template": "chatml",
            "seq_len": 128,
        },
        "train": {
            "steps": 3, "eval_every": 2, "output": str(folder / strategy), "eval_samples": 0,
            "metrics": ["tests.world.test_evaluation:share_right"], "generate": ["7?", "8?"], "generate_tokens": 6,
            **train,
        },
        "parallel": {"strategy": strategy},
    }  # fmt: skip
    return read_config(configs.write_config(folder, **changes))


def run(asked: Config) -> dict[str, Any]:
    run_world(_rank, 2, prepare_job(asked, lambda text: None).job.to_json())
    found: dict[str, Any] = json.loads((Path(asked.train.output) / "summary.json").read_text())
    return found


@pytest.mark.turns(1)
def test_every_strategy_measures_and_writes_the_same(tmp_path: Path) -> None:
    found, texts = {}, {}
    strategies = by_turns(STRATEGIES, 3, "evaluation")
    for strategy in strategies:
        asked = config(tmp_path, strategy)
        found[strategy] = run(asked)["evaluation"]
        texts[strategy] = (Path(asked.train.output) / "samples.jsonl").read_text()
    names = {"heldout_loss", "heldout_perplexity", "heldout_bits_per_byte", "share_right"}
    assert set(found["ddp"]) == names | {"heldout_loss/chats", "heldout_loss/notes"}
    for strategy in strategies[1:]:
        for name, value in found["ddp"].items():
            assert found[strategy][name] == pytest.approx(value, rel=1e-5), (strategy, name)
        assert texts[strategy] == texts["ddp"], strategy
    assert len(texts["ddp"].splitlines()) == 4
    of_all, chats, notes = (found["ddp"][name] for name in ("heldout_loss", "heldout_loss/chats", "heldout_loss/notes"))
    assert min(chats, notes) < of_all < max(chats, notes)


def test_the_best_checkpoint_stays_and_the_run_ends_early(tmp_path: Path) -> None:
    asked = config(
        tmp_path, "ddp", steps=40, eval_every=2, generate=[], generate_tokens=None, best_metric="heldout_loss/notes",
        early_stopping=2,
    )  # fmt: skip
    asked = asked.model_copy(
        update={
            "optimizer": asked.optimizer.model_copy(update={"lr": 0.3, "schedule": "constant", "warmup_steps": 0}),
            "checkpoint": asked.checkpoint.model_copy(update={"every": 1, "keep": 1}),
        }
    )
    found = run(asked)
    best, steps = found["best"], found["steps"]
    kept = sorted(path.name for path in (tmp_path / "ddp" / "checkpoints").glob("step-*"))
    assert steps < 40 and best["worse"] >= 2 and best["step"] + 4 <= steps
    assert kept == [f"step-{best['step']:08d}", f"step-{steps:08d}"]
    again = run(asked)  # resumed, and not one step more
    assert (again["steps"], again["best"]["step"]) == (steps, best["step"])


def test_what_is_better() -> None:
    best = Best("heldout_loss", "lowest")
    evaluations = [Evaluation(loss, 0.0) for loss in (3.0, 2.0, float("nan"), 2.5, 2.0, 1.0)]
    assert [best.is_better(one, step) for step, one in enumerate(evaluations)] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    other = Best("heldout_loss", "lowest")
    other.restore(best.state())
    assert other == best
    with pytest.raises(ConfigError, match="'accuracy' is not measured; known are heldout_loss, heldout_bits_per_byte"):
        Best("accuracy").is_better(evaluations[0], 1)


def test_prompts_that_cannot_be_continued(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.generate: the longest prompt and train.generate_tokens 99 are"):
        prepare_job(config(tmp_path, "ddp", generate_tokens=99), lambda text: None)
    with pytest.raises(PlanError, match=r"is not for ddp\+cp2"):
        prepare_job(config(tmp_path, "ddp+cp2"), lambda text: None)
