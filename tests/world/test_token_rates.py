"""Tokens a second are all tokens of documents, whatever has a loss; the labels are told beside them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from shardwise.report.progress import ProgressReporter
from shardwise.train.config import Config
from shardwise.train.data.corpus import Tokens, prepare_corpus
from shardwise.train.data.samples import (
    DocumentSamples,
    IsolatedSamples,
    JoinedSources,
    NumberedSamples,
    PackedSamples,
    samples_for,
)
from shardwise.train.metrics import read_metrics
from tests.world.test_added_tokens import base, config, job_of, trained
from tests.worlds import run_world


def test_tokens_of_samples_are_those_that_are_not_padding() -> None:
    generator = np.random.default_rng(2)
    lengths = [3, 9, 2, 30, 5, 4, 17]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    drawn = generator.integers(1, 60, starts[-1]).astype(np.uint8)  # 0 is padding below
    marked, plain = (Tokens(drawn, starts, int(starts[-1]), "here", marks) for marks in (drawn & 1, None))
    for of in (
        lambda tokens: PackedSamples(tokens, 8, 0, False),
        lambda tokens: DocumentSamples(tokens, 8, 0),
        lambda tokens: IsolatedSamples(tokens, 8, 0),
        lambda tokens: JoinedSources([IsolatedSamples(tokens, 8, 0), DocumentSamples(tokens, 8, 0)], ["a", "b"]),
    ):
        samples: NumberedSamples = of(marked)
        if isinstance(samples, JoinedSources):
            assert samples.num_tokens(np.array([-1])) == 0
            assert samples.num_tokens(np.arange(len(samples))) == sum(
                part.num_tokens(np.arange(len(part))) for part in samples.parts
            )
            continue
        for number in range(-1, len(samples)):
            inputs, _ = samples.batch(np.array([number]))
            row = inputs["input_ids"] if isinstance(inputs, dict) else inputs
            assert samples.num_tokens(np.array([number])) == int((row != 0).sum()), (type(samples), number)
        unmarked = of(plain)
        everything = np.arange(len(unmarked))
        assert unmarked.num_tokens(everything) == int((unmarked.batch(everything)[1] != -100).sum())


def test_a_step_without_a_label_has_no_loss_and_json_has_no_nan(tmp_path: Path) -> None:
    train = {"steps": 8, "global_batch": 1, "log_every": 1, "output": str(tmp_path / "run")}
    data = {"seq_len": 8, "pack": "joined"}
    folder = base(tmp_path / "base", tied=True)
    table = config(folder, "ddp", 1).data.model_dump(exclude_unset=True)
    run_world(trained, 1, job_of(config(folder, "ddp", 1, train=train, data=table | data)).to_json())

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in (json.loads(text, parse_constant=refuse) for text in written) if "loss" in line]
    labels = np.diff([0, *(line["labels"] for line in lines)])
    assert len(lines) == 8 and 0 < (labels == 0).sum() < 8
    assert [line["loss"] is None for line in lines] == (labels == 0).tolist()


def test_a_run_tells_both_sums_and_goes_on_with_them(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", tied=True)

    def asked(steps: int, world: int) -> Config:
        return config(folder, "ddp", world, train={"steps": steps, "output": str(tmp_path / "run")})

    run_world(trained, 2, job_of(asked(2, 2)).to_json())
    run_world(trained, 1, job_of(asked(4, 1)).to_json())
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    samples = samples_for(prepare_corpus(asked(4, 1).data, tmp_path / "cache", print), asked(4, 1))
    each = samples.num_tokens(np.arange(len(samples))) / len(samples)
    assert [line["tokens"] for line in lines] == sorted({line["tokens"] for line in lines})
    assert lines[-1]["tokens"] == pytest.approx(4 * 4 * each, rel=0.3)
    for line in lines:
        assert 0 < line["labels"] < 0.6 * line["tokens"]
    news = [
        line["tokens"] - before for line, before in zip(lines, [0, *(line["tokens"] for line in lines)], strict=False)
    ]
    for line, new in zip(lines, news, strict=True):
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(new, rel=1e-6)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["tokens"], summary["labels"]) == (lines[-1]["tokens"], lines[-1]["labels"])


def test_the_share_is_printed_where_it_is_not_all(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = ProgressReporter()
    reporter.console = Console(width=200)
    reporter.begin(0, 4)
    reporter.step(1, 2.0, 1234.0)
    reporter.step(2, 2.0, 1234.0, trained_share=0.135)
    said = capsys.readouterr().out
    assert "tokens/s  " in said and "tokens/s, 13.5% with a loss" in said
    assert said.count("with a loss") == 1
