"""kill -9 wherever it hurts: every resume is bit-identical to a run that was never interrupted.

A dozen kills for each change, at least one of each aim; fifty with ``-m soak``.
"""

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
DOZEN = [*AIMS, *AIMED][:12]


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


@pytest.mark.soak
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fifty_resumes_are_bit_identical(
    tmp_path: Path, uninterrupted: Callable[[Setting], tuple[Path, Whole]], strategy: str, background: bool
) -> None:
    mine = STRATEGIES.index(strategy) * 2 + background
    are_bit_identical(tmp_path, uninterrupted, strategy, background, AIMED[mine :: 2 * len(STRATEGIES)])


@pytest.mark.turns(2)
@pytest.mark.parametrize(("strategy", "background"), list(zip(STRATEGIES, (False, True) * 2, strict=True)))
def test_every_resume_is_bit_identical(
    tmp_path: Path, uninterrupted: Callable[[Setting], tuple[Path, Whole]], strategy: str, background: bool
) -> None:
    kills = DOZEN[STRATEGIES.index(strategy) :: len(STRATEGIES)]
    are_bit_identical(tmp_path, uninterrupted, strategy, background, kills)


def are_bit_identical(
    tmp_path: Path,
    uninterrupted: Callable[[Setting], tuple[Path, Whole]],
    strategy: str,
    background: bool,
    kills: list[str],
) -> None:
    setting = Setting(strategy, 4 if strategy == "hsdp" else 3, background)
    texts, full = uninterrupted(replace(setting, async_save=False))
    trial = Trial(tmp_path / "run", texts, setting, full)
    rng_state = random.Random(f"{SEED} {strategy} {background}")
    for number, call in enumerate(kills, 1):
        kill = draw(rng_state, full, call)
        with said(f"{setting}, seed {SEED}, kill {number} of {len(kills)}, {kill}"):
            trial.kill(kill)
    with said(f"{setting}, seed {SEED}, after {len(kills)} kills"):
        trial.end()
    assert sum(trial.done.values()) == len(kills)


@pytest.mark.turns(2)
@pytest.mark.parametrize("strategy", ["fsdp+tp2", "ddp+pp2"])
def test_a_model_that_is_cut_resumes_bit_identically(tmp_path: Path, strategy: str) -> None:
    setting = Setting(strategy, 4, factory="tests.models:byte_attention", micro_batch=4, epochs=2)
    texts = write_texts(tmp_path / "texts")
    full = run_whole(tmp_path / "whole", texts, setting)
    trial = Trial(tmp_path / "run", texts, replace(setting, async_save=True), full)
    rng_state = random.Random(f"{SEED} {strategy}")
    for call in ("pwrite", "", "rename"):
        kill = draw(rng_state, full, call)
        with said(f"{setting}, seed {SEED}, {kill}"):
            trial.kill(kill)
    with said(f"{setting}, seed {SEED}, after the kills"):
        trial.end()
    assert sum(trial.done.values()) == 3


def test_there_are_fifty_and_a_dozen_of_every_aim() -> None:
    assert len(AIMED) == 50
    assert len(DOZEN) == 12 and set(DOZEN) == set(AIMS)
    assert AIMED.count("") == 25
