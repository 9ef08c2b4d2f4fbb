"""``shardwise bench step`` as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.bench.plots import draw_steps
from shardwise.bench.step.bubble import MICRO_BATCHES, SCHEDULES
from shardwise.cli.bench import run_bench_step
from shardwise.errors import UserError
from tests.cli.configs import write_config
from tests.commands import shardwise

LLAMA = {"model": {"config": "examples/llama-2m", "factory": None}, "data": {"seq_len": 16}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The folder, the document and what was said of a small run."""
    folder = tmp_path_factory.mktemp("bench")
    config = write_config(folder, **LLAMA, checkpoint={"every": None})
    words = [str(config), "--steps", "4", "--strategy", "ddp+tp2", "--strategy", "ddp+pp2", "--json"]
    done = shardwise("bench", "step", *words, "--output", str(folder / "out"))
    assert len(done.stdout.splitlines()) == 1, "with --json everything else is on stderr"
    return folder / "out", json.loads(done.stdout), done.stderr


@pytest.mark.turns(6)
def test_every_strategy_is_timed_turn_by_turn(found: tuple[Path, dict[str, Any], str]) -> None:
    folder, document, said = found
    assert [item["strategy"] for item in document["samples"]] == ["ddp+tp2", "ddp+pp2"]
    for item in document["samples"]:
        assert len(item["plain_s"]) == len(item["shardwise_s"]) == 4
        assert min(*item["plain_s"], *item["shardwise_s"]) > 0
        assert item["batch"].startswith("global batch 8 = ")
        assert document["median_ratio"][item["strategy"]] > 0
    kept = sorted(path.suffix for path in folder.iterdir())
    assert kept == [".json", ".png"]
    for name in ("ddp+tp2", "ddp+pp2", "pipeline bubble", "plot: "):
        assert name in said


def test_the_bubble_is_measured_for_each_schedule(found: tuple[Path, dict[str, Any], str]) -> None:
    _, document, _ = found
    cases = {(item["schedule"], item["micro_batches"]) for item in document["bubble"]}
    assert cases == {(schedule, micros) for schedule in SCHEDULES for micros in MICRO_BATCHES}
    for item in document["bubble"]:
        assert len(item["shares"]) == 4 and all(0 < share < 1 for share in item["shares"])
        assert item["virtual"] == (2 if item["schedule"] == "interleaved-1f1b" else 1)
    formula = {(item["schedule"], item["micro_batches"]): item["formula"] for item in document["median_bubble"]}
    assert formula["gpipe", 4] == formula["1f1b", 4] == pytest.approx(1 / 5)
    assert formula["interleaved-1f1b", 4] == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("strategies", "changes", "says"),
    [
        (["zero2"], {}, "strategy 'zero2': bench step has loops by hand for ddp and fsdp"),
        (["ddp+cp2"], {}, "bench step has loops by hand"),
        (["ddp+tp3"], {}, "does not divide the world size 2"),
        (["ddp+tp2", "zero1"], {}, "zero1"),
        (None, {"parallel": {"nproc": 1}}, "needs 2 ranks or more; use --nproc 2"),
        (None, {"parallel": {"nproc": 2, "recompute": "full"}}, "without recompute"),
        (None, {"train": {"loss_chunks": 2}}, "no hand-written loop with train.loss_chunks"),
        (None, {"optimizer": {"name": "adafactor"}}, "'adafactor' is not for"),
        (
            ["ddp+tp2"],
            {"model": {"factory": "tests.models:byte_decoder", "config": None}},
            "are for transformers'",
        ),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(
    tmp_path: Path, strategies: list[str] | None, changes: dict[str, Any], says: str
) -> None:
    config = write_config(tmp_path, **{**LLAMA, **changes})
    with pytest.raises(UserError, match=says):
        run_bench_step(config, [], steps=4, output=tmp_path / "out", as_json=False, strategies=strategies)
    assert not (tmp_path / "out").exists()


def test_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        {"strategy": name, "plain_s": [1.0, 1.1, 0.9, 1.0], "shardwise_s": [1.0] * 4} for name in ("ddp", "fsdp")
    ]
    bubble = [
        {"strategy": "ddp+pp2", "schedule": s, "stages": 2, "virtual": 1, "micro_batches": m, "shares": [0.3, 0.4, 0.2]}
        for s in ("gpipe", "1f1b")
        for m in (1, 2)
    ]
    facts = {"model": "m", "precision": "fp32", "ranks": 2, "threads_per_rank": 1, "device": "cpu", "date": "today"}
    assert draw_steps({**facts, "samples": samples, "bubble": bubble}, tmp_path / "both.png")
    assert draw_steps({**facts, "samples": samples, "bubble": []}, tmp_path / "ratios.png")
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "ratios.png").stat().st_size > 5_000
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw_steps({**facts, "samples": samples, "bubble": []}, tmp_path / "none.png")
