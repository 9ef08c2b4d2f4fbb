"""Fifty times kill -9, wherever it hurts: every resume is bit-identical to a run that was never interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.kills import AIMS, Setting, Trial, Whole, draw, run_whole, said, write_texts

SEED = 1
STRATEGIES = ("ddp", "zero1", "fsdp", "hsdp")
AIMED = [call for call, number in AIMS.items() for _ in range(number)]
random.Random(SEED).shuffle(AIMED)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Setting], tuple[Path, Whole]]:
    """The corpus and the whole run of a setting, which is the same however it is saved."""
    folder = tmp_path_factory.mktemp("whole")
    texts = write_texts(folder / "texts")
    known: dict[str, Whole] = {}

    def of(setting: Setting) -> tuple[Path, Whole]:
        if setting.strategy not in known:
            known[setting.strategy] = run_whole(folder / setting.strategy, texts, setting)
        return texts, known[setting.strategy]

    return of


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_resume_is_bit_identical(
    tmp_path: Path, uninterrupted: Callable[[Setting], tuple[Path, Whole]], strategy: str, background: bool
) -> None:
    setting = Setting(strategy, 4 if strategy == "hsdp" else 3, background)
    texts, whole = uninterrupted(replace(setting, async_save=False))
    trial = Trial(tmp_path / "run", texts, setting, whole)
    mine = STRATEGIES.index(strategy) * 2 + background
    kills = AIMED[mine :: 2 * len(STRATEGIES)]
    luck = random.Random(f"{SEED} {strategy} {background}")
    for number, call in enumerate(kills, 1):
        kill = draw(luck, whole, call)
        with said(f"{setting}, seed {SEED}, kill {number} of {len(kills)}, {kill}"):
            trial.kill(kill)
    with said(f"{setting}, seed {SEED}, after {len(kills)} kills"):
        trial.end()
    assert sum(trial.done.values()) == len(kills)


@pytest.mark.parametrize("strategy", ["fsdp+tp2", "ddp+pp2"])
def test_a_model_that_is_cut_resumes_bit_identically(tmp_path: Path, strategy: str) -> None:
    setting = Setting(strategy, 4, factory="tests.models:byte_attention")
    texts = write_texts(tmp_path / "texts")
    whole = run_whole(tmp_path / "whole", texts, setting)
    trial = Trial(tmp_path / "run", texts, replace(setting, async_save=True), whole)
    luck = random.Random(f"{SEED} {strategy}")
    for call in ("pwrite", "", "rename"):
        kill = draw(luck, whole, call)
        with said(f"{setting}, seed {SEED}, {kill}"):
            trial.kill(kill)
    with said(f"{setting}, seed {SEED}, after the kills"):
        trial.end()
    assert sum(trial.done.values()) == 3


def test_there_are_fifty() -> None:
    assert len(AIMED) == 50
    assert AIMED.count("") == 25
