"""Files of other trainers: every key is taken, listed with the reason, or refused; none is accepted and ignored."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.interop.files.import_file import FORMATS, config_document, format_of, import_file, read_file
from shardwise.interop.files.key_table import Reading, Rules, read_keys
from shardwise.train.config import Config
from tests.cli.configs import ROOT

FILES = ROOT / "tests" / "import_files"
FULL: dict[str, dict[str, Any]] = {
    "accelerate": {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}},
    "axolotl": {
        "base_model": "m",
        "datasets": [{"path": "d", "type": "chat_template"}],
        "sequence_len": 8,
        "micro_batch_size": 1,
        "learning_rate": 1e-4,
        "max_steps": 100,
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_modules": ["q_proj"],
        "val_set_size": 0.1,
    },
    "llama-factory": {
        "model_name_or_path": "m",
        "dataset": "d",
        "stage": "sft",
        "max_steps": 100,
        "fsdp": True,
        "eval_strategy": "steps",
        "disable_gradient_checkpointing": True,
        "val_size": 0.1,
    },
    "trainer": {
        "output_dir": "o",
        "max_steps": 100,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 10, "decay_type": "linear"},
        "fsdp": True,
        "eval_strategy": "steps",
    },
    "torchtitan": {
        "parallelism": {"pipeline_parallel_degree": 2},
        "checkpoint": {"enable": True},
        "validation": {"enable": True},
    },
}
MERELY_SAID = {  # what these keys ask for is so whatever they say, and the row says that
    "axolotl": {"fsdp_config.auto_wrap_policy", "fsdp_config.transformer_layer_cls_to_wrap"},
    "llama-factory": {
        "quantization_method",
        "fsdp_config.auto_wrap_policy",
        "fsdp_config.transformer_layer_cls_to_wrap",
    },
    "trainer": {"fsdp_config.auto_wrap_policy", "fsdp_config.transformer_layer_cls_to_wrap"},
    "accelerate": {"num_machines", "fsdp_config.auto_wrap_policy", "fsdp_config.transformer_layer_cls_to_wrap"},
    "torchtitan": set(),
}
VALUES: tuple[Any, ...] = (
    True, False, 1, 2, 0.5, 0, 40, "no", "epoch", "steps", "full", "bf16", "none", "cpu", "cosine", "never",
    "zbvzerobubble", "qlora", "lora", "INDUCTOR", "float32", "SHARD_GRAD_OP", "a,b", ["q_proj"], ["full_shard"],
    {"zero_optimization": {"stage": 2}},
)  # fmt: skip


def told(tool: str, values: Mapping[str, Any]) -> Any:
    """What an import says apart from its rows: the plan, the config, what it means, what is left, or the problems."""
    try:
        found = import_file(tool, values, ranks=8, device="cuda")
    except PlanError as error:
        return tuple(error.problems)
    return found.plan.model_dump_json(), json.dumps(found.keys), found.means, [(row.key, row.why) for row in found.open]


def joint(rules: Rules, prefix: str = "") -> list[str]:
    """The keys whose meaning is for the tool's `finish` to find, those in tables, too."""
    found = []
    for key, rule in rules.items():
        if rule.__qualname__.startswith("part_of"):
            found.append(f"{prefix}{key}")
        elif rule.__qualname__.startswith("inner"):
            table = next(cell.cell_contents for cell in rule.__closure__ or () if isinstance(cell.cell_contents, dict))
            found += joint(table, f"{key}.")
    return found


@pytest.mark.parametrize("tool", FORMATS)
def test_what_is_taken_with_others_makes_a_difference(tool: str) -> None:
    idle = []
    for key in joint(FORMATS[tool].rules):
        table, _, name = key.rpartition(".")
        outcomes = set()
        for value in VALUES:
            document = copy.deepcopy(FULL[tool])
            if table == "deepspeed_config":
                document |= {"distributed_type": "DEEPSPEED", table: {"zero_stage": 3}}
            (document.setdefault(table, {}) if table else document)[name] = value
            if name in ("num_epochs", "num_train_epochs"):
                del document["max_steps"]
            if tool == "axolotl" and "fsdp" in key:
                document.setdefault("fsdp", ["full_shard"])
            if name == "wandb_project":
                document["use_wandb"] = False
            if table == "fsdp_config" and "version" not in name and "sharding" in name:
                document[table] = {**document[table], "version": 1, "fsdp_version": 1}
            outcomes.add(str(told(tool, document)))
        short = key.replace("fsdp_config.fsdp_", "fsdp_config.")
        if len(outcomes) < 2 and short not in MERELY_SAID[tool]:
            idle.append(key)
    assert not idle


@pytest.mark.parametrize("tool", FORMATS)
def test_each_key_has_a_row_or_a_problem(tool: str) -> None:
    for key in FORMATS[tool].rules:
        for value in ("x", True, 3, {"y": 1}, ["z"]):
            reading = Reading(tool)
            read_keys(reading, {key: value}, FORMATS[tool].rules)
            rows = [*reading.taken, *reading.not_taken, *reading.no_effect, *reading.open]
            assert rows or reading.problems, (key, value)


@pytest.mark.parametrize("tool", FORMATS)
def test_a_key_of_nobodys_is_refused(tool: str) -> None:
    with pytest.raises(PlanError, match=r"has no such key.*correct it or remove it"):
        import_file(tool, {**FULL[tool], "fsdp_confg": 1}, ranks=8)


def test_the_tables_have_every_key_of_the_installed_tools() -> None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from transformers import TrainingArguments

    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= set(FORMATS["trainer"].rules)
    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= set(FORMATS["llama-factory"].rules)
    for kind in (ClusterConfig, SageMakerConfig):
        assert {field.name for field in dataclasses.fields(kind)} <= set(FORMATS["accelerate"].rules)


EXPECTED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # file: tool, strategy, fields of the plan, keys of the config
    "accelerate-fsdp2.yaml": ("accelerate", "zero2+offload", {"precision": "bf16", "recompute": "full"}, {}),
    "accelerate-fsdp-cpu.yaml": ("accelerate", "ddp", {"device": "cpu"}, {}),
    "accelerate-zero3.yaml": ("accelerate", "deepspeed-zero3+offload", {"grad_accum": 4}, {"optimizer.clip_norm": 0.5}),
    "axolotl-qlora.yaml": (
        "axolotl",
        "fsdp+qlora",
        {"micro_batch": 2, "grad_accum": 4, "precision": "bf16", "recompute": "full"},
        {"data.loss_on": "assistant", "data.pack": "isolated", "lora.rank": 32, "optimizer.betas": [0.9, 0.999]},
    ),
    "axolotl-full.yaml": ("axolotl", "ddp", {"micro_batch": 1}, {"data.loss_on": "all", "optimizer.warmup_steps": 20}),
    "llama-factory-lora.yaml": (
        "llama-factory",
        "ddp+lora",
        {"micro_batch": 1, "grad_accum": 8, "recompute": "full"},
        {"lora.rank": 8, "lora.alpha": 16.0, "optimizer.schedule": "cosine", "train.epochs": 3},
    ),
    "trainer-fsdp.json": (
        "trainer",
        "fsdp",
        {"micro_batch": 4, "precision": "bf16"},
        {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0.1, "train.steps": 500, "train.seed": 42},
    ),
    "trainer-fsdp-cpu.json": ("trainer", "ddp", {"micro_batch": 8}, {"train.epochs": 3, "optimizer.lr": 5e-5}),
    "torchtitan.toml": (
        "torchtitan",
        "fsdp+tp2",
        {"micro_batch": 2, "grad_accum": 4, "precision": "bf16", "recompute": "selective"},
        {"optimizer.schedule": "wsd", "optimizer.decay_fraction": 0.8, "train.steps": 1000, "checkpoint.every": 500},
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file(name: str) -> None:
    tool, strategy, plan, keys = EXPECTED[name]
    values = read_file(FILES / name)
    assert format_of(FILES / name, values) == tool
    found = import_file(tool, values, ranks=8)
    assert str(found.plan.parsed) == strategy
    assert {key: getattr(found.plan, key) for key in plan} == plan
    assert {key: found.keys.get(key) for key in keys} == keys
    rows = {row.key for kind in ("taken", "not_taken", "no_effect", "open") for row in getattr(found, kind)}
    assert leaves(values) <= {row.partition("[")[0] if row.startswith("datasets") else row for row in rows}


def leaves(values: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The dotted keys of a file that are not tables; tables in a list count as their list."""
    found = set()
    for key, value in values.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}"}
    return found


def test_what_a_file_means_against_what_it_says() -> None:
    wanted = {
        "accelerate-fsdp-cpu.yaml": "trains DDP without a word",
        "trainer-fsdp-cpu.json": "trains DDP without a word",
        "accelerate-fsdp2.yaml": "reduced in bf16 there, and in fp32 here",
        "axolotl-full.yaml": "prompts are labels, too",
        "llama-factory-lora.yaml": "unless disable_gradient_checkpointing",
        "trainer-fsdp.json": "no biases and no norms",
    }
    for name, words in wanted.items():
        found = import_file(EXPECTED[name][0], read_file(FILES / name), ranks=8)
        assert any(words in line for line in found.means), name


_TITAN_RESHARD = "parallelism.fsdp_reshard_after_forward"
ODD: list[tuple[str, dict[str, Any], dict[str, Any] | str]] = [
    # tool, keys over FULL or a plain file, and what the plan and the config have of them, or why they are refused
    ("trainer", {"adam_beta1": 0.0}, {"optimizer.betas": [0.0, 0.999]}),
    ("axolotl", {"adam_beta1": 0.0}, {"optimizer.betas": [0.0, 0.999]}),
    ("trainer", {"lr_scheduler_type": "constant", "warmup_steps": 9}, {"optimizer.warmup_steps": None}),
    ("trainer", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}, {"optimizer.warmup_steps": 9}),
    ("axolotl", {"lr_scheduler": "constant", "warmup_steps": 9}, {"optimizer.warmup_steps": None}),
    ("trainer", {"lr_scheduler_kwargs": {"num_decay_steps": 10}}, "decay_type is 'cosine'"),
    ("trainer", {"lr_scheduler_kwargs": {"decay_type": "linear"}}, "num_decay_steps is missing"),
    ("trainer", {"fsdp": "shard_grad_op auto_wrap offload"}, {"strategy": "zero2+offload"}),
    ("trainer", {"fsdp": ["shard_grad_op"]}, {"strategy": "zero2"}),
    ("trainer", {"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}}, {"strategy": "fsdp"}),
    ("trainer", {"fsdp": "hybrid_shard"}, "fsdp is 'hybrid_shard'"),
    ("trainer", {"fsdp": "hybrid_shard", "fsdp_config": {"version": 1}}, {"strategy": "hsdp"}),
    ("trainer", {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP", "version": 1}}, {"strategy": "fsdp"}),
    ("trainer", {"torch_compile_backend": "inductor"}, {"compile": True}),
    ("trainer", {"torch_compile_backend": "eager"}, "the compiler is inductor"),
    ("trainer", {"num_train_epochs": 0, "max_steps": -1}, "train.epochs: got 0"),
    ("axolotl", {"num_epochs": 0, "max_steps": -1}, "num_epochs is 0"),
    ("axolotl", {}, {"precision": "bf16", "optimizer.warmup_steps": 3}),
    ("axolotl", {"bf16": False}, {"precision": "fp32"}),
    ("axolotl", {"activation_offloading": True}, {"parallel.offload_activations": True}),
    ("axolotl", {"activation_offloading": "legacy"}, "is not run; it is true or false"),
    ("axolotl", {"warmup_ratio": 0.015}, {"optimizer.warmup_steps": 2}),
    ("axolotl", {"fsdp": ["full_shard", "offload"]}, {"strategy": "fsdp+offload+lora"}),
    ("axolotl", {"fsdp": ["hybrid_shard"]}, {"strategy": "hsdp+lora"}),
    ("axolotl", {"dp_shard_size": 4}, "dp_shard 4 is not the world size 8"),
    ("accelerate", {"parallelism_config": {"parallelism_config_dp_shard_size": 4}}, "make 4 ranks"),
    (
        "accelerate",
        {
            "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
            "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4},
        },
        "replicas of shard groups are resharded here",
    ),
    (
        "accelerate",
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "x.json", "zero_stage": 3}},
        "deepspeed_config.zero_stage is 3: Accelerate refuses it",
    ),
    ("torchtitan", {"parallelism": {"fsdp_reshard_after_forward": "allways"}}, f"{_TITAN_RESHARD} is 'allways'"),
    (
        "torchtitan",
        {"parallelism": {"fsdp_reshard_after_forward": "never", "data_parallel_replicate_degree": 2}},
        f"{_TITAN_RESHARD} is 'never'",
    ),
    ("torchtitan", {"parallelism": {"data_parallel_shard_degree": 4}}, "dp_shard 4 is not the world size 8"),
    (
        "torchtitan",
        {"parallelism": {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 4}},
        "dp_replicate 4 × dp_shard 1 is not the world size 8",
    ),
]


@pytest.mark.parametrize(("tool", "given", "wanted"), ODD)
def test_an_odd_value_means_what_it_does_there(tool: str, given: dict[str, Any], wanted: dict[str, Any] | str) -> None:
    document = {**FULL[tool], **given}
    if isinstance(wanted, str):
        with pytest.raises(PlanError) as caught:
            import_file(tool, document, ranks=8, device="cuda")
        assert any(wanted in problem for problem in caught.value.problems), caught.value.problems
        return
    found = import_file(tool, document, ranks=8, device="cuda")
    have = {**found.plan.model_dump(), "strategy": str(found.plan.parsed), **found.keys}
    assert {key: have.get(key) for key in wanted} == wanted


def test_what_a_tool_does_by_itself_is_said() -> None:
    for tool, given, words in (
        ("trainer", {"save_steps": 5}, "all checkpoints are kept there"),
        ("torchtitan", {"checkpoint": {"enable": True, "keep_latest_k": 0}}, "all checkpoints are kept there"),
        ("torchtitan", {}, "with a pipeline, parameters stay gathered there"),
        ("accelerate", {"distributed_type": "NO"}, "accelerate launch starts one process"),
        ("axolotl", {}, "bf16 is left out, and is auto there"),
        ("axolotl", {}, "3 % of the steps there"),
    ):
        found = import_file(tool, {**FULL[tool], **given}, ranks=8, device="cuda")
        assert any(words in line for line in found.means), (tool, words)


def test_what_is_not_run_is_refused_all_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        import_file("axolotl", read_file(FILES / "axolotl-not-run.yaml"), ranks=8)
    for words in ("rl is 'dpo'", "optimizer is 'muon'", "relora", "num_epochs", "datasets[0].type", "lora_rr"):
        assert any(words in problem for problem in caught.value.problems), words


def test_the_config_is_one_of_train_wherever_the_model_and_the_data_are_here() -> None:
    for name, (tool, *_) in EXPECTED.items():
        found = import_file(tool, read_file(FILES / name), ranks=8)
        if "model.config" in found.keys and ("data.path" in found.keys or "data.sources" in found.keys):
            Config.model_validate(config_document(found.keys))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, text, words in (
        ("twice.yaml", "a: 1\na: 2\n", "says 'a' twice"),
        ("list.yaml", "- a\n", "not a table"),
        ("broken.yaml", "a: [\n", "not readable"),
        ("python.yaml", "a: !!python/object:os.system x\n", "not readable"),
        ("words.txt", "a", "none of .json, .yaml and .toml"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(PlanError, match=words):
            read_file(tmp_path / name)
    (tmp_path / "nobody.yaml").write_text("a: 1\n")
    with pytest.raises(PlanError, match="--tool"):
        format_of(tmp_path / "nobody.yaml", {"a": 1})


@pytest.mark.parametrize("path", ["x" * 5000, "~no-such-user-here/model", "a\0b"])
def test_a_path_that_no_file_can_have_is_left_to_the_user(path: str) -> None:
    document = {**FULL["axolotl"], "base_model": path, "datasets": [{"path": path, "type": "chat_template"}]}
    found = import_file("axolotl", document, ranks=1, device="cpu", here="cpu", given={})
    assert {"base_model", "datasets[0].path"} <= {row.key for row in found.open}


def test_a_model_that_is_a_list_is_refused() -> None:
    with pytest.raises(PlanError, match=r"base_model is .*must be the folder of a model"):
        import_file("axolotl", {**FULL["axolotl"], "base_model": ["m"]}, ranks=1, device="cpu", here="cpu", given={})


@pytest.mark.parametrize("name", ["empty.yaml", "empty.toml"])
def test_an_empty_file_is_called_empty(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(PlanError, match="is empty; give the configuration file of a trainer"):
        read_file(tmp_path / name)


def test_a_file_given_to_the_wrong_tool_names_the_right_one() -> None:
    with pytest.raises(PlanError, match="has keys of Accelerate, not of axolotl; try --tool accelerate"):
        import_file("axolotl", FULL["accelerate"], ranks=8)


def test_the_file_s_ranks_are_named_beside_other_ones() -> None:
    found = import_file("accelerate", FULL["accelerate"] | {"num_processes": 4}, ranks=8, device="cuda")
    assert found.ranks_from == "as asked for; 4 in the file"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [("folder", None, "is a folder"), ("bad.yaml", "a: b\n  c: d\n", "not allowed here at line 2, column 4")],
)
def test_unreadable_files_say_why(tmp_path: Path, name: str, text: str | None, why: str) -> None:
    path = tmp_path / name
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(PlanError, match=why):
        read_file(path)
