"""Configs that could only do harm or wait for ever are refused by name at once, and what is sensible goes through."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import app
from shardwise.document import MOST_DEEP, read_json, read_toml
from shardwise.errors import ConfigError, DataError, ModelError, UserError
from shardwise.model.load_model import load_profile
from shardwise.train.causal import causal_configuration
from shardwise.train.config import read_config
from shardwise.train.config_data import DataTable
from shardwise.train.data.corpus import prepare_corpus
from shardwise.train.data.paths import matches

SMALL = """
[model]
factory = "package:make"
[data]
path = "corpus"
seq_len = 8
[train]
steps = 3
"""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(SMALL)
    return path


def refused(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        read_config(file, overrides)
    assert len(raised.value.problems) == 1
    return raised.value.problems[0]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a = " + b"[" * 5000 + b"]" * 5000, f"is not TOML: it is nested more than {MOST_DEEP} deep"),
        (b"a." * 5000 + b"a = 1", f"is not TOML: it is nested more than {MOST_DEEP} deep"),
        (b"a = " + b"9" * 6000, "is not TOML: a number in it has thousands of digits"),
        (b'a = "\x00"', "is not TOML: Illegal character"),
        (b'a = "\xc3"', "is not text in UTF-8"),
        (SMALL.encode("utf-16"), "is not text in UTF-8"),
        (b"#" * (2 << 20), "cannot be read: it has 2.00 MiB, and 1.00 MiB is the most for such a file"),
        (b"", None),
    ],
)
def test_files_that_are_no_config(file: Path, data: bytes, says: str | None) -> None:
    file.write_bytes(data)
    if says is None:
        with pytest.raises(ConfigError, match="model: is missing"):
            read_config(file)
        return
    assert refused(file).startswith(f"config '{file}' {says}")


def test_a_byte_order_mark_and_other_line_ends_are_no_mistake(file: Path) -> None:
    plain = read_config(file)
    for data in (
        b"\xef\xbb\xbf" + SMALL.encode(),
        SMALL.replace("\n", "\r\n").encode(),
        SMALL.replace("\n", "\r").encode(),
    ):
        file.write_bytes(data)
        assert read_config(file) == plain
    file.write_bytes(b"\xef\xbb\xbf{}")
    assert read_json(file) == {}


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    huge = tmp_path / "huge.toml"
    with huge.open("wb") as sparse:
        sparse.truncate(1 << 30)
    for path, says in (
        (pipe, "it is a pipe, not a file"),
        (Path("/dev/zero"), "it is a device, not a file"),
        (huge, "it has 1.00 GiB, and"),
        (tmp_path, "Is a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (Path("a\0b"), "its name is none: embedded null byte"),
    ):
        assert f"cannot be read: {says}" in refused(path)
        with pytest.raises(OSError, match=r"."):
            read_toml(path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.output=a\0b", "train.output: got 'a\\x00b'; it must be text without a NUL"),
        ("train.output=s3://bucket/run", "train.output: 's3://bucket/run' is a URL, and the run folder is on a disk"),
        ("train.output=", "train.output: is empty; name one"),
        ("data.path=", "data.path: is empty; name one"),
        ("model.weights= ", "model.weights: is empty; name one"),
        ("checkpoint.folder=memory://x", "checkpoint.folder: 'memory://x' is gone when a process ends"),
        ("checkpoint.folder=HTTPS://x/y", "checkpoint.folder: 'HTTPS://x/y' cannot be written to"),
        ("data.seq_len=100000000000", "data.seq_len: got 100000000000; it must be less than or equal to 134217728"),
        ("data.seq_len=1e11", "data.seq_len: got 100000000000.0; it must be a whole number"),
        ("train.global_batch=9999999999999999999", "it must be less than or equal to 16777216"),
        ("train.micro_batch=99999999", "it must be less than or equal to 16777216"),
        ("train.epochs=99999999", "it must be less than or equal to 1000000"),
        ("parallel.nproc=100000", "it must be less than or equal to 1024"),
        ("parallel.strategy=fsdp+tp" + "9" * 5000, "is a degree that no cluster has; write +tp2"),
        ("optimizer.lr=1e308", "optimizer.lr: got 1e+308; it must be less than or equal to 10000"),
        ("optimizer.lr=" + "1" + "0" * 400, "optimizer.lr: got 1"),
        ("optimizer.weight_decay=1e308", "it must be less than or equal to 100"),
        ("optimizer.eps=1e-50", "it must be 1e-38 or more"),
        ("optimizer.momentum=1", "optimizer.momentum: got 1"),
        ("optimizer.clip_norm=1e-300", "it must be 1e-12 or more"),
        ("lora.alpha=1e300", "lora.alpha: got 1e+300"),
        ("model.kwargs.when=1979-05-27", "model.kwargs.when: got the date 1979-05-27, which ranks would get as text"),
        ("model.kwargs.x=inf", "model.kwargs.x: got inf; it must be a finite number"),
        ("model.kwargs.x=\udcff", "model.kwargs.x: got '\\udcff'; it must be text in UTF-8"),
        ("train.output=\udcff", "it must be text in UTF-8"),
        (".".join("a" * 5000) + "=1", "names a table in 4998 others; 64 is the most"),
    ],
)
def test_values_that_could_only_do_harm(file: Path, override: str, says: str) -> None:
    assert says in refused(file, override)


def test_values_that_are_sensible_go_through(file: Path) -> None:
    words = [
        "optimizer.lr=30",
        "optimizer.eps=1",
        "optimizer.weight_decay=1",
        "data.seq_len=16000000",
        "train.epochs=none",
    ]
    words += [
        "checkpoint.folder=s3://bucket/run",
        "train.output=a b/\u00fc",
        "train.global_batch=1000000",
        "train.seed=0",
    ]
    config = read_config(file, words)
    assert (config.optimizer.lr, config.checkpoint.folder) == (30.0, "s3://bucket/run")
    assert read_config(file, ["train.output=a\nb = 1"]).train.output == "a\nb = 1", "one value, however many lines"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/", "is the system's own folder '/', not one of documents"),
        ("/proc/self", "is the system's own folder"),
        ("/dev", "is the system's own folder '/dev'"),
        ("~nobody-here/x", "that user has no home folder"),
        ("x" * 300, "cannot be read: File name too long"),
        ("nowhere", "does not exist"),
    ],
)
def test_places_that_hold_no_documents(tmp_path: Path, path: str, says: str) -> None:
    with pytest.raises(DataError, match=r"data\.path") as raised:
        prepare_corpus(DataTable(path=path, seq_len=8), tmp_path, lambda text: None)
    assert says in str(raised.value)


def test_patterns_of_many_folders_are_matched_at_once() -> None:
    path = Path("/".join("abcdefghijkl") + "/file.txt")
    assert matches(path, ["**/" * 40 + "*.txt"]) and not matches(path, ["**/" * 40 + "*.md"])
    assert matches(Path("a/b/c.txt"), ["a/**/c.txt"]) and matches(Path("c.txt"), ["**/*"])


@pytest.fixture
def configuration(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str | None = None, **changes: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**LLAMA, **changes}) if text is None else text)
        return path

    return write


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model_type": ["llama"]}, r"model_type is \['llama'\], it must be text"),
    ({"num_hidden_layers": 1_000_000}, "num_hidden_layers is 1,000,000, and 4096 is the most"),
    ({"num_hidden_layers": 10**40}, "num_hidden_layers is a number of 39 digits or so, and 4096 is the most"),
    ({"num_labels": 10**9}, "num_labels is 1,000,000,000, and 1048576 is the most"),
    ({"text": "[" * 100_000}, f"cannot be read as JSON: it is nested more than {MOST_DEEP} deep"),
    ({"text": "9" * 6000}, "cannot be read as JSON: a number in it has thousands of digits"),
    ({"text": "[]"}, r"holds \[\], not an object"),
]


@pytest.mark.parametrize(("changes", "says"), MISTAKES)
def test_configurations_that_cannot_be(configuration: Callable[..., Path], changes: dict[str, Any], says: str) -> None:
    path = configuration(**changes)
    with pytest.raises(ModelError, match=says):
        load_profile(str(path), seq_len=8)
    with pytest.raises(ModelError, match=says):
        causal_configuration(path)


def test_sizes_of_a_layers_tensors_are_not_counts_of_layers(configuration: Callable[..., Path]) -> None:
    path = configuration(vocab_size_per_layer_input=262_144, num_experts=16_384)  # Gemma 4's, Doge's
    assert load_profile(str(path), seq_len=8).num_parameters


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "is that of LlamaForSequenceClassification"),
        (
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
            "a causal language model, BertLMHeadModel",
        ),
        ({"model_type": "bert"}, r"reads in both directions \(is_decoder is not true\)"),
        ({"model_type": "xlnet", "d_head": 8}, "reads in both directions"),
        ({"model_type": "bart"}, "is an encoder and a decoder, and a causal language model has one stack"),
        ({"model_type": "t5"}, "model_type 't5' is not a causal language model"),
        ({"model_type": "vit", "hidden_size": 768}, "model_type 'vit' is not a causal language model"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            r"asks for quantized weights \(quantization_config: gptq\)",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys in `rope_parameters`"),
    ],
)
def test_what_is_no_causal_language_model_is_not_trained_as_one(
    configuration: Callable[..., Path], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        causal_configuration(configuration(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["LLaMAForCausalLM"]},
        {"architectures": ["LlamaModel"]},
        {"architectures": None, "quantization_config": None},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "gpt_neox"},
        {"model_type": "bert", "is_decoder": True},
    ],
)
def test_what_is_one_goes_through_without_a_word(configuration: Callable[..., Path], changes: dict[str, Any]) -> None:
    notes: list[str] = []
    causal_configuration(configuration(**changes), notes)
    assert notes == []


def test_a_misspelt_key_and_odd_rotations_are_said(configuration: Callable[..., Path]) -> None:
    notes: list[str] = []
    changes = {"num_key_value_head": 2, "rope_scaling": {"rope_type": "linear", "factor": -3}, "made_up": 1}
    causal_configuration(configuration(**changes), notes)
    assert len(notes) == 2
    assert (
        "'num_key_value_head' is no key of a llama and has no effect (did you mean 'num_key_value_heads'?)" in notes[0]
    )
    assert "factor field must be a float or int >= 1, got -3" in notes[1]


@pytest.mark.parametrize(
    "words",
    [
        ["--cluster", "99999999999xH100"],
        ["--cluster", "9" * 5000 + "xH100"],
        ["--cluster", "8xH100/ib" + "9" * 5000],
        ["--strategy", "fsdp+tp" + "9" * 5000],
        ["--seq-len", "99999999999"],
        ["--global-batch", "9999999999999999999"],
        ["--tokens", "1e30"],
        ["-o", "x" * 5000],
    ],
)
def test_questions_that_cannot_be_answered_end_with_2(words: list[str]) -> None:
    try:
        app(["plan", "gpt2", *words], prog_name="shardwise")
        ended = 0
    except UserError as error:
        ended = error.exit_code
        assert len(str(error)) < 12_000
    assert ended == 2
