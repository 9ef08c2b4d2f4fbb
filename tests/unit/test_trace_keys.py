"""The keys of ``[train]`` that ask for a trace and for trackers."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.config import read_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib.toml"


def read(*overrides: str):
    return read_config(EXAMPLE, ["train.steps=50", *overrides]).train


@pytest.mark.parametrize(
    ("text", "profiled"), [("20:3", (20, 3)), ("4", (4, 1)), (" 50 ", (50, 1)), ("41:10", (41, 10))]
)
def test_steps_to_trace(text, profiled):
    assert read(f'train.profile="{text}"').profiled == profiled


def test_none_is_the_default_and_can_be_said():
    assert read().profiled is None and read('train.profile="none"').profiled is None
    assert read().trackers == [] and read().profile_ranks == [0]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('train.profile="x"', "it must be STEP or STEP:COUNT"),
        ('train.profile="-5"', "it must be STEP or STEP:COUNT"),
        ('train.profile="20:"', "it must be STEP or STEP:COUNT"),
        ('train.profile="3:2"', "begin at 4 or later"),
        ('train.profile="20:0"', "a trace has 1 to 100"),
        ('train.profile="20:101"', "a trace has 1 to 100"),
        ('train.profile="49:3"', "asks for steps 49 to 51, and 'steps' is 50"),
        ('train.profile="51"', "asks for step 51, and 'steps' is 50"),
        ("train.profile=20", "text, in quotes"),
        ("train.profile_ranks=[0, 1]", "does nothing without 'profile'"),
        ('train.trackers=["wand"]', "did you mean 'wandb'?"),
        ('train.trackers=["wandb", "trackio", "wandb"]', "names wandb more than once"),
    ],
)
def test_what_cannot_be_is_refused(override, says):
    with pytest.raises(ConfigError) as raised:
        read(override)
    assert says in str(raised.value)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as raised:
        read("train.epochs=1", 'train.profile="2"', 'train.trackers=["wandb", "wandb"]')
    for word in ("'steps' and 'epochs'", "'profile' begins at step 2", "more than once"):
        assert word in str(raised.value)
