"""Thousands of broken configs, overrides, ``config.json`` files, plans, command lines: each gets a sentence, at once.

Every case is made from a seed and runs in this process, up to where ranks would start. A failure prints its seed.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from shardwise.cost.link_calibration import read_calibration
from shardwise.cost.price import read_prices
from shardwise.interop.deepspeed.import_config import import_deepspeed, read_document
from shardwise.model.load_model import load_profile
from shardwise.parallel.materialize import build
from shardwise.plan.plan import read_plan
from shardwise.run.checks import check_output
from shardwise.run.job import prepare_job
from shardwise.run.run_summary import finished
from shardwise.search.plan_request import find_cluster
from shardwise.train.config import Config, read_config
from shardwise.train.model import model_factory
from tests.faults import fuzzing
from tests.faults.fuzzing import NUMBERS, WORDS, answer, any_value, broken_bytes, changed_json, command
from tests.turns import by_turns

ROOT = Path(__file__).parents[2]
SMALL = """
[model]
factory = "tests.models:byte_decoder"
[data]
path = "corpus"
seq_len = 16
[train]
steps = 4
global_batch = 8
output = "run"
[parallel]
nproc = 2
"""
LLAMA = json.loads((ROOT / "examples" / "llama-2m" / "config.json").read_text())
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FAMILIES: list[dict[str, Any]] = [
    LLAMA,
    *(
        {"model_type": kind, **SIZES}
        for kind in ("mistral", "qwen2", "qwen3", "gemma2", "gpt_neox", "bert", "vit", "mixtral")
    ),
    {"model_type": "gpt2", **GPT2},
    {"model_type": "gptj", **GPT2, "rotary_dim": 4},
    {"model_type": "opt", **SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    {"model_type": "mpt", "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 300, "max_seq_len": 64},
    {"model_type": "bart", "d_model": 32, "vocab_size": 300},
    {"model_type": "t5", "d_model": 32, "num_layers": 2, "vocab_size": 300},
    {"model_type": "gemma3", "text_config": SIZES, "vision_config": {"num_hidden_layers": 2}},
]
KEYS = [
    *("model_type", "architectures", "auto_map", "quantization_config", "rope_scaling", "rope_theta", "sliding_window"),
    *("tie_word_embeddings", "torch_dtype", "dtype", "head_dim", "num_key_value_heads", "max_position_embeddings"),
    *("hidden_act", "attention_bias", "num_local_experts", "num_labels", "id2label", "text_config", "is_decoder"),
    *("is_encoder_decoder", "use_cache", "rms_norm_eps", "initializer_range", "attn_implementation", "layer_types"),
    *("pad_token_id", "type_vocab_size", "image_size", "patch_size", "n_inner", "attention_dropout", "_name_or_path"),
]


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a small corpus, where relative paths lead; the slow imports are done before a case is timed."""
    folder = tmp_path_factory.mktemp("fuzzed")
    (folder / "corpus").mkdir()
    for number in range(30):
        (folder / "corpus" / f"{number}.txt").write_text(f"document {number} says {number * number}. " * 20)
    (folder / "small.toml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(ROOT))
        file = folder / "config.json"
        file.write_text(json.dumps(LLAMA))
        load_profile(str(file), seq_len=16, traced=True)
        prepare_job(read_config(folder / "small.toml"), lambda text: None)
        for family in FAMILIES:
            file.write_text(json.dumps(family))
            build_and_plan(file)
        yield folder


def tried(seeds: range, make: Callable[[random.Random], Any], call: Callable[[Any], str | None]) -> None:
    """Make a case of each seed and let ``call`` judge it; all that fail are told, with their seeds."""
    wrong = []
    for seed in seeds:
        case = make(random.Random(seed))
        found = call(case)
        if found is not None:
            wrong.append(f"seed {seed}: {found}\n    case: {case!r:.300}")
    assert not wrong, f"{len(wrong)} of {len(seeds)} cases\n" + "\n".join(wrong[:25])


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += leaves(inner, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found


def toml_text(rng: random.Random, value: Any) -> str:
    """A value as a user writes it after ``=``: sometimes TOML, sometimes bare, sometimes neither."""
    if isinstance(value, str):
        return rng.choice([value, f'"{value}"', f"'{value}'", json.dumps(value)])
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{value:g}" if rng.random() < 0.5 else repr(value)
    if isinstance(value, bool):
        return rng.choice([str(value), str(value).lower(), f'"{value}"'])
    if isinstance(value, list):
        return "[" + ", ".join(toml_text(rng, item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_text(rng, item)}" for key, item in value.items()) + "}"
    return str(value) if not isinstance(value, int) or abs(value) < 10**4000 else hex(value)


def overrides(rng: random.Random) -> list[str]:
    """One to four overrides, most of a known key."""
    found = []
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        key = rng.choice(leaves(Config))
        turn = rng.randrange(20)
        if turn == 0:
            key = key[: rng.randrange(len(key))] + key[rng.randrange(len(key)) :]
        elif turn == 1:
            key += "." + rng.choice(WORDS)
        elif turn == 2:
            key = rng.choice(["model.kwargs.", "optimizer.kwargs.", "parallel.tp_styles.", ""]) + rng.choice(WORDS)
        elif turn == 3:
            key = key.upper()
        elif turn == 4:
            key = ".".join(["a"] * rng.choice([3, 100, 5000]))
        equals = rng.choice(["=", "=", "=", "=", " = ", "==", "", ":"])
        found.append(f"{key}{equals}{toml_text(rng, any_value(rng))}")
    return found


def read_and_send(file: Path, words: list[str]) -> None:
    """Read a config; one that is accepted says the same to the ranks, and its folder can be made."""
    config = read_config(file, words)
    again = Config.model_validate_json(config.model_dump_json(exclude_unset=True))
    assert again == config, "the ranks read another config"
    check_output(Path(config.train.output))


def build_and_plan(file: Path) -> str | None:
    """What ``plan`` and ``train`` do with a ``config.json``: profile, check, and build without weights."""

    def train() -> None:
        config = Config.model_validate(
            {"model": {"config": str(file)}, "data": {"path": "corpus", "seq_len": 16}, "train": {"steps": 1}}
        )
        from shardwise.run.checks import check_model_path
        from shardwise.run.inspect_model import users_code

        check_model_path(config)
        factory = model_factory(config, 257)
        with users_code("model.config"):
            build(factory, 0, real=False)

    return answer(lambda: load_profile(str(file), seq_len=16)) or answer(train)


def test_toml_that_is_broken(here: Path) -> None:
    good = [SMALL.encode(), *((ROOT / "examples" / f"{n}.toml").read_bytes() for n in ("stdlib", "lora", "qlora"))]
    file = here / "broken.toml"

    def call(data: bytes) -> str | None:
        file.write_bytes(data)
        return answer(lambda: read_and_send(file, []))

    tried(range(700), lambda rng: broken_bytes(rng, rng.choice(good)), call)


def test_overrides_that_are_anything(here: Path) -> None:
    tried(range(1000, 2200), overrides, lambda words: answer(lambda: read_and_send(here / "small.toml", words)))


def test_jobs_of_configs_that_are_accepted(here: Path) -> None:
    """Each key alone, up to where ranks would start: the data is read, the model is built, the plan is made."""

    def one(rng: random.Random) -> list[str]:
        key = rng.choice([key for key in leaves(Config) if key != "train.output"])
        return [f"{key}={toml_text(rng, rng.choice([*NUMBERS, *WORDS, *WORDS, True, False, ['x'], [0, 5]]))}"]

    def call(words: list[str]) -> str | None:
        def until_ranks_would_start() -> None:
            config = read_config(here / "small.toml", words)
            if finished(config) is None:
                prepare_job(config, lambda text: None)

        return answer(until_ranks_would_start)

    tried(range(3000, 3250), one, call)


@pytest.mark.turns(1)
def test_configurations_of_models(here: Path) -> None:
    file = here / "config.json"

    def call(data: bytes) -> str | None:
        file.write_bytes(data)
        return build_and_plan(file)

    tried(by_turns(range(4000, 4450), 4, "models"), lambda rng: changed_json(rng, rng.choice(FAMILIES), KEYS), call)


def test_plan_files_clusters_prices_and_deepspeed(here: Path) -> None:
    plan = b'strategy = "fsdp+tp2"\nmicro_batch = 2\ngrad_accum = 4\nseq_len = 128\n[dims]\ndp_shard = 4\ntp = 2\n'
    cluster = b'gpu = "H100-SXM"\nnodes = 2\ndevices_per_node = 8\nlink = "nvlink"\nnetwork = "ib400"\n'
    cluster += b"host_memory_bytes = 2e12\nnvme_bytes_per_s = 6e9\nprice_per_device_hour = 2.2\n"
    deepspeed = [file.read_bytes() for file in sorted((ROOT / "tests" / "deepspeed_configs").glob("*.json"))]

    def deepspeed_file(file: Path) -> Any:
        return import_deepspeed(read_document(file), ranks=8)

    readers: list[tuple[str, list[bytes], Callable[[Path], Any]]] = [
        ("plan.toml", [plan], read_plan),
        ("cluster.toml", [cluster], lambda file: find_cluster(str(file))),
        ("prices.toml", [b"A100-80GB = 1.89\nper_kwh = 0.2\n[buy]\nRTX4090 = 1900\n"], read_prices),
        ("links.toml", [plan, cluster], read_calibration),
        ("ds.json", deepspeed, deepspeed_file),
    ]

    def make(rng: random.Random) -> tuple[str, bytes, Callable[[Path], Any]]:
        name, good, read = rng.choice(readers)
        if name == "ds.json" and rng.random() < 0.7:
            return name, changed_json(rng, json.loads(rng.choice(deepspeed)), ["zero_optimization", "fp16"]), read
        return name, broken_bytes(rng, rng.choice(good)), read

    def call(case: tuple[str, bytes, Callable[[Path], Any]]) -> str | None:
        name, data, read = case
        (here / name).write_bytes(data)
        return answer(lambda: read(here / name))

    tried(range(5000, 5400), make, call)


CLUSTERS = [
    *("8xA100-80GB", "2x8xH100-SXM", "4xRTX4090@pcie4", "cpu", "2xcpu", "1xT4", "64xH100/ib400", "0xH100", "3x", "x"),
    *(
        "99999999999xH100",
        "1x99999xT4",
        "9" * 5000 + "xT4",
        "8xH100@nvlink99/ib0",
        "8xH100@/",
        "8xB9000",
        "nowhere.toml",
    ),
    *("-1xH100", "8xH100/ib" + "9" * 400, "1e3xH100", "٣xH100", "\0.json"),
]
PLAIN = ["--seq-len", "--global-batch", "--micro-batch", "--lora-rank", "--loss-chunks"]


def plan_words(rng: random.Random, file: str) -> list[str]:
    known = [file, file, "gpt2", "llama-3.1-8b", "resnet50"]
    words = ["plan", rng.choice(known if rng.random() < 0.8 else WORDS)]
    words += ["--cluster", rng.choice(CLUSTERS[:7] if rng.random() < 0.7 else [*CLUSTERS, *WORDS])]
    for option in rng.sample(PLAIN, rng.randint(0, 2)):
        words += [option, str(rng.choice([n for n in NUMBERS if n != 10**4000]))]
    for option in rng.sample(
        ["--tokens", "--strategy", "--recompute", "--precision", "--optimizer", "--price"], rng.randint(0, 1)
    ):
        words += [option, rng.choice([*WORDS, "1e12", "300B", "fsdp", "ddp", "full", "bf16", "sgd", "9" * 500])]
    words += ["-o", rng.choice(WORDS)] if rng.random() < 0.05 else []
    return [*words, *rng.sample(["--compile", "--json", "--nonsense", "-o"], rng.choice([0, 0, 0, 1]))]


@pytest.mark.turns(1)
def test_questions_to_plan(here: Path) -> None:
    file = here / "asked.json"
    file.write_text(json.dumps(LLAMA))
    tried(by_turns(range(6000, 6200), 3, "questions"), lambda rng: plan_words(rng, str(file)), command)


def test_every_kind_of_mistake_is_found_by_the_fuzzer_itself() -> None:
    def hang() -> None:
        while True:
            pass

    fuzzing.CPU_S, before = 0.2, fuzzing.CPU_S
    try:
        assert str(answer(hang)).startswith("hang")
    finally:
        fuzzing.CPU_S = before
    assert answer(lambda: json.loads("{")) is not None
    assert answer(lambda: read_config(Path("no such file"))) is None
