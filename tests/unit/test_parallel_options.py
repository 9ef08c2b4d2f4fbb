"""Each option of a plan is declared once: table, plan, pins and receipts follow the declaration."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import tomli_w

from shardwise.errors import ConfigError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.plan.parallel_options import (
    CONFIG_KEYS,
    FULL_PARAMETERS,
    OPTION_DEFAULTS,
    OPTION_SPECS,
    TRAIN_DEFAULTS,
    ParallelOptions,
    StepOptions,
    has_effect,
)
from shardwise.plan.plan import Plan, axis_problems
from shardwise.plan.strategy import parse_strategy
from shardwise.run.job import draft_plan, with_options
from shardwise.search.candidate import Pins
from shardwise.search.search import axis_options
from shardwise.train.config import ParallelTable, read_config
from tests.unit.test_plan import OTHERS

WITHOUT = {FULL_PARAMETERS: "fsdp", "+tp": "fsdp", "+pp": "fsdp", "+nvme": "deepspeed-zero3", None: None}
WITH = {FULL_PARAMETERS: "ddp", "+tp": "fsdp+tp2", "+pp": "fsdp+pp2", "+nvme": "deepspeed-zero3+nvme"}
ON_GPUS = {"async_tp"}  # its sabotage needs two of them
OPTIONS = list(OPTION_SPECS)
BESIDE = {"recompute_layers": {"recompute": "full"}}  # what an option is of, besides a strategy
CONFIG = """
model = {factory = "a:b"}
data = {path = "x", seq_len = 8}
train = {steps = 1}
optimizer = {clip_norm = "none"}
"""


def strategies(option: str) -> tuple[str, str | None]:
    """One under which an option has an effect, and one under which it has none, if there is one."""
    needs = OPTION_SPECS[option].requires
    return WITH.get(needs or "", "fsdp"), WITHOUT.get(needs, "ddp")


@pytest.mark.parametrize("option", OPTIONS)
def test_a_plan_refuses_it_where_it_has_no_effect(option: str) -> None:
    there, elsewhere = strategies(option)
    assert has_effect(option, parse_strategy(there))
    if elsewhere is not None:
        plan = Plan(strategy=elsewhere, **{option: OTHERS[option]})
        assert any(option in problem and "does nothing" in problem for problem in axis_problems(plan))


@pytest.mark.parametrize("option", list(ParallelOptions.model_fields))
def test_the_table_has_it_and_refuses_it_where_it_has_no_effect(option: str) -> None:
    there, elsewhere = strategies(option)
    assert ParallelTable.model_fields[option].description == ParallelOptions.model_fields[option].description
    beside = BESIDE.get(option, {})
    assert getattr(ParallelTable(strategy=there, **{option: OTHERS[option]}, **beside), option) == OTHERS[option]
    if elsewhere is not None:
        with pytest.raises(ValueError, match=f"'{option}' does nothing without"):
            ParallelTable(strategy=elsewhere, **{option: OTHERS[option]})


@pytest.mark.parametrize("option", list(CONFIG_KEYS))
def test_a_config_carries_it_into_the_plan(option: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(CONFIG)
    there, _ = strategies(option)
    table, _, key = CONFIG_KEYS[option].partition(".")
    with file.open("a") as config_file:
        given = {key: OTHERS[option], **BESIDE.get(option, {})}
        config_file.write(tomli_w.dumps({table: given}) if table == "parallel" else "")
    overrides = [] if table == "parallel" else [f"{table}.{key}={json.dumps(OTHERS[option])}"]
    config = read_config(file, [*overrides, f"parallel.strategy={there}"])
    assert getattr(with_options(Plan(strategy=there), config), option) == OTHERS[option]


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(CONFIG)
    with pytest.raises(ConfigError, match="did you mean 'prefetch'"):
        read_config(file, ["parallel.prefech=2"])


def test_a_search_leaves_pins_out_where_they_have_no_effect() -> None:
    pins = Pins(options={name: OTHERS[name] for name in OPTIONS})
    for text in ("ddp", "fsdp", "fsdp+tp2", "ddp+pp2"):
        strategy = parse_strategy(text)
        kept = axis_options(pins, strategy)
        assert set(kept) == {name for name in OPTIONS if has_effect(name, strategy)}


def test_virtual_stages_follow_the_schedule_where_they_are_left_out() -> None:
    table = ParallelTable(strategy="ddp+pp2", pipeline_schedule="zbv")
    assert table.options_for(parse_strategy("ddp+pp2"))["virtual_stages"] == 2
    given = ParallelTable(strategy="ddp+pp2", pipeline_schedule="interleaved-1f1b", virtual_stages=3)
    assert given.options_for(parse_strategy("ddp+pp2"))["virtual_stages"] == 3


def test_defaults_are_those_of_a_plan() -> None:
    plan = Plan()
    assert {name: getattr(plan, name) for name in OPTIONS} == OPTION_DEFAULTS
    assert set(OPTIONS) == {*ParallelOptions.model_fields, *StepOptions.model_fields}


def test_every_option_has_a_line_that_a_sabotage_makes_false() -> None:
    folders = [Path(__file__).parents[1] / name for name in ("faults", "cli")]
    words = {
        node.value
        for folder in folders
        for file in folder.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [name for name in OPTIONS if OPTION_SPECS[name].receipt not in words] == sorted(ON_GPUS)


def test_train_and_planner_have_one_set_of_defaults() -> None:
    strategy = parse_strategy("fsdp+tp2")
    planned = {**OPTION_DEFAULTS, **axis_options(Pins(), strategy)}
    assert {name: planned[name] for name in OPTIONS} == TRAIN_DEFAULTS
    table = ParallelTable(strategy="fsdp+tp2").options_for(strategy)
    assert table == {name: TRAIN_DEFAULTS[name] for name in table} and table["loss_parallel"] is True


@pytest.mark.parametrize(("cluster", "precision"), [("2xA100-80GB", "bf16"), ("2xT4", "fp16"), ("2xcpu", "fp32")])
def test_train_computes_in_what_plan_assumes(cluster: str, precision: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(CONFIG)
    assert draft_plan(read_config(file), parse_cluster(cluster)).precision == precision
    named = read_config(file, ["parallel.precision=fp32"])
    assert draft_plan(named, parse_cluster(cluster)).precision == "fp32"
