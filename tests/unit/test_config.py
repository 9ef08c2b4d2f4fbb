"""The config file: every problem at once, overrides as typed as TOML, and a schema that fits the example.

What is said word for word is kept by the golden messages; here it counts which key is blamed, and what is offered.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from shardwise.errors import ConfigError
from shardwise.train.config import Config, json_schema, read_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib.toml"
SMALLEST = """
[model]
factory = "package:make"
[data]
path = "python:stdlib"
seq_len = 8
[train]
steps = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(SMALLEST)
    return path


def problems(file, *overrides, text=None):
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_config(file, overrides)
    assert raised.value.exit_code == 2
    return list(raised.value.problems)


class TestFile:
    def test_the_example_is_read(self):
        config = read_config(EXAMPLE)
        document = tomllib.loads(EXAMPLE.read_text())
        assert config.train.global_batch == document["train"]["global_batch"]
        assert config.optimizer.betas == document["optimizer"]["betas"]
        assert config.model.config == "examples/llama-2m" and config.model.factory is None

    def test_a_plans_strategy_stands_where_the_config_leaves_it_open(self, file):
        words = ["lora.rank=4", "optimizer.in_backward=true", 'optimizer.clip_norm="none"']
        config = read_config(file, words, planned="fsdp+qlora")
        assert (config.parallel.strategy, config.lora.rank) == ("fsdp+qlora", 4)
        with pytest.raises(ConfigError, match=r"^'model\.freeze' does nothing under fsdp"):
            read_config(file, ["model.freeze=['*']"], planned="fsdp+lora")
        assert read_config(file, ["parallel.strategy=ddp"], planned="fsdp").parallel.strategy == "ddp"

    def test_what_is_wrong_between_tables_begins_with_the_problem(self, file):
        said = problems(file, "lora.rank=4")
        assert len(said) == 1 and said[0].startswith("'lora' does nothing under the strategy auto")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["train.export=hf"], "'train.export' needs model.config, which transformers builds the model from"),
            (
                ["train.export=peft", "parallel.strategy=ddp"],
                "'train.export' is peft, and ddp has no adapters to write",
            ),
        ],
    )
    def test_an_export_that_could_not_be_written(self, file, words, message):
        assert any(said.startswith(message) for said in problems(file, *words))

    def test_what_is_left_out_has_its_default(self, file):
        config = read_config(file)
        assert config.optimizer.name == "adamw" and config.optimizer.clip_norm == 1.0
        assert config.parallel.strategy == "auto" and config.checkpoint.keep == 2
        assert config.data.include == ["**/*"]

    def test_all_problems_are_told_at_once(self, file):
        text = """
        [model]
        config = "a"
        factory = "b"
        [data]
        path = 3
        [optimizer]
        lr = -1.0
        name = "adam"
        betas = [0.9]
        [train]
        stpes = 20
        global_batch = "16"
        [parallel]
        strategy = "fdsp+ofload"
        [paralel]
        nproc = 2
        """
        found = problems(file, "no-override", "train.seed=-1", text=text)
        said = {problem.partition(": ")[0]: problem for problem in found}
        assert len(said) == len(found)
        assert set(said) == {
            "model",
            "data.path",
            "data.seq_len",
            "optimizer.lr",
            "optimizer.name",
            "optimizer.betas",
            "train.stpes",
            "train.global_batch",
            "train.seed",
            "parallel",
            "paralel",
            next(problem for problem in found if problem.startswith("override 'no-override' ")),
        }
        for key, value in {
            "data.path": "3",
            "optimizer.lr": "-1.0",
            "optimizer.name": "'adam'",
            "optimizer.betas": "[0.9]",
            "train.global_batch": "'16'",
            "train.seed": "-1",
        }.items():
            assert f"got {value}" in said[key]
        assert "'config' and 'factory'" in said["model"] and "both" in said["model"]
        assert "missing" in said["data.seq_len"]
        assert "'adamw'" in said["optimizer.name"] and "'adafactor' or 'muon'" in said["optimizer.name"]
        assert "(did you mean 'steps'?)" in said["train.stpes"] and "global_batch" in said["train.stpes"]
        assert "'fdsp' is none of" in said["parallel"] and "'+ofload'" in said["parallel"]
        assert "(did you mean 'parallel'?)" in said["paralel"] and "checkpoint" in said["paralel"]

    def test_nothing_is_suggested_for_what_is_like_nothing(self, file):
        (problem,) = problems(file, "train.zzz=1")
        assert "did you mean" not in problem

    @pytest.mark.parametrize("table", ["model", "data", "train"])
    def test_a_table_that_is_missing(self, file, table):
        before, _, rest = SMALLEST.partition(f"[{table}]")
        after = rest[rest.index("[") :] if "[" in rest else ""
        (problem,) = problems(file, text=before + after)
        assert problem.startswith(f"{table}: ") and "missing" in problem

    def test_types_are_not_converted_silently(self, file):
        for override in ('train.steps="3"', "train.steps=3.0", "train.steps=true", "data.pack=1", "train.output=7"):
            assert len(problems(file, override)) == 1, override
        assert read_config(file, ["optimizer.lr=1"]).optimizer.lr == 1.0, "a whole number is a number"

    @pytest.mark.parametrize(
        "override",
        [
            "train.steps=0",
            "train.micro_batch=0",
            "train.seed=-1",
            "data.heldout_fraction=1.0",
            "data.heldout_fraction=-0.1",
            "data.seq_len=0",
            "optimizer.min_lr_ratio=1.5",
            "optimizer.clip_norm=0",
            "optimizer.lr=0.0",
            "optimizer.lr=nan",
            "optimizer.lr=inf",
            "optimizer.warmup_steps=-1",
            "optimizer.betas=[0.9, 0.9, 0.9]",
            "checkpoint.keep=0",
            "parallel.precision=fp8",
            "parallel.recompute=some",
        ],
    )
    def test_values_that_cannot_be(self, file, override):
        (problem,) = problems(file, override)
        key, _, value = override.partition("=")
        assert problem.startswith(f"{key}: ") and value in problem

    @pytest.mark.parametrize("override", ["optimizer.betas=[0.9, 1.5]", "optimizer.betas=[-0.1, 0.9]"])
    def test_betas_that_cannot_be(self, file, override):
        (problem,) = problems(file, override)
        assert problem.startswith("optimizer.betas")

    def test_a_config_cannot_be_changed(self, file):
        with pytest.raises(ValidationError):
            read_config(file).train.steps = 5

    def test_ranks_read_the_same_config_from_json(self, file):
        for path in (file, EXAMPLE):
            config = read_config(path)
            assert Config.model_validate_json(config.model_dump_json(exclude_unset=True)) == config


class TestExclusiveKeys:
    @pytest.mark.parametrize(
        ("override", "table", "keys", "given"),
        [
            ("model.config=a", "model", "'config' and 'factory'", "both"),
            ("model.factory=none", "model", "'config' and 'factory'", "neither"),
            ("train.epochs=2", "train", "'steps' and 'epochs'", "both"),
            ("train.steps=none", "train", "'steps' and 'epochs'", "neither"),
        ],
    )
    def test_one_is_needed_and_only_one(self, file, override, table, keys, given):
        (problem,) = problems(file, override)
        assert problem.startswith(f"{table}: ") and keys in problem and given in problem

    def test_the_other_one_is_as_good(self, file):
        config = read_config(file, ["train.steps=none", "train.epochs=2", "model.factory=none", "model.config=a"])
        assert (config.train.steps, config.train.epochs) == (None, 2)
        assert (config.model.factory, config.model.config) == (None, "a")


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "table", "key", "value"),
        [
            ("train.steps=20", "train", "steps", 20),
            ("train.steps = 20", "train", "steps", 20),
            (" train.steps=1_000", "train", "steps", 1000),
            ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
            ("optimizer.betas=[0.8, 0.9]", "optimizer", "betas", [0.8, 0.9]),
            ("data.pack=false", "data", "pack", "none"),
            ("train.output=runs/a b", "train", "output", "runs/a b"),
            ("train.output=a=b", "train", "output", "a=b"),
            ("train.output='7'", "train", "output", "7"),
            ('train.output="x"', "train", "output", "x"),
            ("parallel.strategy=fsdp+offload", "parallel", "strategy", "fsdp+offload"),
            ("data.include=['*.py', '*.md']", "data", "include", ["*.py", "*.md"]),
            ("model.kwargs={width = 3, deep = true}", "model", "kwargs", {"width": 3, "deep": True}),
            ("model.kwargs.width=3", "model", "kwargs", {"width": 3}),
            ("optimizer.clip_norm=none", "optimizer", "clip_norm", None),
            ("data.heldout_path=none", "data", "heldout_path", None),
        ],
    )
    def test_a_value_is_toml_or_else_a_bare_string(self, file, override, table, key, value):
        found = getattr(getattr(read_config(file, [override]), table), key)
        assert found == value and type(found) is type(value)

    def test_the_last_one_wins_and_the_rest_stays(self, file):
        config = read_config(file, ["train.steps=5", "checkpoint.keep=9", "train.steps=6"])
        assert (config.train.steps, config.checkpoint.keep, config.data.seq_len) == (6, 9, 8)
        assert tomllib.loads(file.read_text())["train"]["steps"] == 3, "the file is not touched"

    @pytest.mark.parametrize("override", ["steps=3", "train.steps", "train", "=3", "train.=3", ".steps=3", ""])
    def test_what_is_no_override(self, file, override):
        (problem,) = problems(file, override)
        assert problem.startswith(f"override '{override}' is not table.key=value")

    def test_a_key_or_a_table_that_is_none(self, file):
        (problem,) = problems(file, "trian.steps=5")
        assert problem.startswith("trian: no such table (did you mean 'train'?)")
        (problem,) = problems(file, "optimizer.weight_decya=5")
        assert problem.startswith("optimizer.weight_decya: no such key (did you mean 'weight_decay'?)")

    def test_a_table_that_the_file_has_as_something_else(self, file):
        found = problems(file, "checkpoint.keep=3", text="checkpoint = 7\n" + SMALLEST)
        assert found[0].startswith("override 'checkpoint.keep=3': 'checkpoint' is not a table")
        assert found[1].startswith("checkpoint: got 7")


class TestUnreadable:
    def test_a_file_that_is_missing(self, tmp_path):
        (problem,) = problems(tmp_path / "no.toml")
        assert problem.startswith(f"config '{tmp_path / 'no.toml'}' does not exist")

    def test_a_folder(self, tmp_path):
        (problem,) = problems(tmp_path)
        assert problem.startswith(f"config '{tmp_path}' ")

    def test_text_that_is_not_toml(self, file):
        (problem,) = problems(file, text="[train\nsteps = 3")
        assert problem.startswith(f"config '{file}' is not TOML") and "line 1" in problem

    def test_quotes_are_spoken_of_where_they_are_missing_alone(self, file):
        (problem,) = problems(file, text="[train]\nsteps = 3\nsteps = 4\n")
        assert "is not TOML: Cannot overwrite a value" in problem and problem.endswith("repair it there")
        (problem,) = problems(file, text="[train]\nout = runs\n")
        assert problem.endswith("repair it there (text needs quotes)")

    def test_bytes_that_are_no_text(self, file):
        file.write_bytes(b"\xff\xfe[train]")
        (problem,) = problems(file)
        assert problem.startswith(f"config '{file}' is not ")


def misfits(value: Any, schema: dict[str, Any], top: dict[str, Any], where: str = "") -> list[str]:
    """Where ``value`` does not go with ``schema``; knows as much of JSON Schema as the config needs."""
    if "$ref" in schema:
        return misfits(value, top["$defs"][schema["$ref"].rpartition("/")[2]], top, where)
    if "anyOf" in schema:
        found = [misfits(value, choice, top, where) for choice in schema["anyOf"]]
        return [] if any(not wrong for wrong in found) else [f"{where}: nothing of anyOf"]
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    wrong = []
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return [f"{where}: no {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        wrong.append(f"{where}: none of {schema['enum']}")
    for key, fits in (
        ("minimum", lambda limit: value >= limit),
        ("maximum", lambda limit: value <= limit),
        ("exclusiveMinimum", lambda limit: value > limit),
        ("exclusiveMaximum", lambda limit: value < limit),
        ("minItems", lambda limit: len(value) >= limit),
        ("maxItems", lambda limit: len(value) <= limit),
    ):
        if key in schema and not fits(schema[key]):
            wrong.append(f"{where}: {key} {schema[key]}")
    if isinstance(value, dict) and "properties" in schema:
        wrong += [f"{where}.{key}: missing" for key in schema.get("required", []) if key not in value]
        for key, inner in value.items():
            if key in schema["properties"]:
                wrong += misfits(inner, schema["properties"][key], top, f"{where}.{key}")
            elif schema.get("additionalProperties") is False:
                wrong.append(f"{where}.{key}: not known")
    if isinstance(value, list) and "items" in schema:
        wrong += [bad for item in value for bad in misfits(item, schema["items"], top, f"{where}[]")]
    return wrong


class TestSchema:
    def test_the_example_fits_the_schema(self):
        schema = json.loads(json_schema())
        assert misfits(tomllib.loads(EXAMPLE.read_text()), schema, schema) == []

    @pytest.mark.parametrize(
        ("table", "key", "value", "wrong"),
        [
            ("train", "stpes", 3, ".train.stpes: not known"),
            ("train", "steps", 0, ".train.steps: nothing of anyOf"),
            (
                "optimizer",
                "name",
                "adam",
                ".optimizer.name: none of ['adamw', 'adamw8bit', 'sgd', 'adafactor', 'muon']",
            ),
            ("optimizer", "lr", 0, ".optimizer.lr: exclusiveMinimum 0"),
            ("optimizer", "betas", [0.9], ".optimizer.betas: minItems 2"),
            ("data", "path", 3, ".data.path: nothing of anyOf"),
            ("tarin", "x", 3, ".tarin: not known"),
        ],
    )
    def test_what_does_not_fit_the_config_does_not_fit_the_schema(self, file, table, key, value, wrong):
        document = tomllib.loads(SMALLEST)
        document.setdefault(table, {})[key] = value
        schema = json.loads(json_schema())
        assert misfits(document, schema, schema) == [wrong]
        with pytest.raises(ValidationError):
            Config.model_validate(document)

    def test_a_required_key_is_required_by_both(self):
        document = tomllib.loads(SMALLEST)
        del document["data"], document["train"]
        schema = json.loads(json_schema())
        assert sorted(misfits(document, schema, schema)) == [".data: missing", ".train: missing"]

    def test_every_key_is_in_the_schema(self):
        defined = json.loads(json_schema())["$defs"]
        for field in Config.model_fields.values():
            table = field.annotation
            assert issubclass(table, BaseModel)
            assert set(defined[table.__name__]["properties"]) == set(table.model_fields)
