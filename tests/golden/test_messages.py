"""A user's mistakes and what the command says to each: exit code and text, word for word as in ``messages.json``.

``python -m tests.golden.test_messages --write`` writes that file anew; read the difference before you keep it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.cli.main import main
from shardwise.train.config import read_config
from tests.fp8 import FOLDER as TORCHAO

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("messages.json")
FACTORY = "tests.golden.models:"
CONFIG = f"""
[model]
factory = "{FACTORY}tiny"
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
LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
HOST_BYTES = 8 * 1024**3  # what the machine is said to have, so that messages do not depend on it
NO_SOURCE = "model.factory=none"

OVERRIDES: dict[str, list[str]] = {
    "unknown key": ["train.stepz=5"],
    "unknown key far from all": ["data.zzz=5"],
    "unknown table": ["trian.steps=5"],
    "override below a key that is no table": ["train.steps.more=16"],
    "wrong types": ["train.steps=many", "checkpoint.resume=3", "data.include=a", "optimizer.betas=[0.9]"],
    "a table that is a number": ["optimizer.lr=1", "data=3"],
    "several at once": ["train.stepz=5", "data.seq_len=0", "optimizer.lr=-1", "parallel.strategy=fsdb", "junk"],
    "word that is no choice": ["data.format=json", "optimizer.schedule=cosin", "parallel.precision=fp8"],
    "infinite numbers": ["optimizer.lr=inf", "optimizer.clip_norm=nan"],
    "lora: layers that are not there": ["parallel.strategy=fsdp+lora", 'lora.targets=["linar", "mlp"]'],
    "lora: a rank too large": ["parallel.strategy=fsdp+lora", "lora.rank=512"],
    "lora: a table without the strategy": ["parallel.strategy=fsdp", "lora.rank=4"],
    "lora: what does nothing": ["parallel.strategy=ddp+lora", "lora.quant_type=fp4", 'model.freeze=["*"]'],
    "lora: with tensor parallel": ["parallel.strategy=fsdp+tp2+lora"],
    "DeepSpeed in fp16": ["parallel.strategy=deepspeed-zero2+offload", "parallel.precision=fp16"],
    "lora: with an engine": ["parallel.strategy=deepspeed-zero3+qlora"],
    "lora: rows that cannot be packed": ["parallel.strategy=fsdp+qlora", "lora.rank=1"],
    "betas out of range": ["optimizer.betas=[0.9, 1.5]"],
    "seed too large": ["train.seed=100000000000000000000"],
    "neither config nor factory": [NO_SOURCE],
    "both config and factory": ["model.config=llama"],
    "kwargs without a factory": [NO_SOURCE, "model.config=llama", "model.kwargs={width=3}", "optimizer.kwargs={a=1}"],
    "neither steps nor epochs": ["train.steps=none"],
    "both steps and epochs": ["train.epochs=1"],
    "bad override": ["train.steps"],
    "unknown strategy": ["parallel.strategy=fsdp2"],
    "ddp with offload": ["parallel.strategy=ddp+offload"],
    "tensor parallel": ["parallel.strategy=fsdp+tp2"],
    "adapters alone": ["parallel.strategy=lora"],
    "auto with a degree": ["parallel.strategy=auto+tp2"],
    "unknown option of a strategy": ["parallel.strategy=zero2+offlaod"],
    "global batch does not divide": ["train.global_batch=9", "train.micro_batch=2"],
    "global batch smaller than the world": ["train.global_batch=1"],
    "batch equation contradicts itself": ["train.micro_batch=2", "train.grad_accum=3", "train.global_batch=24"],
    "corpus is missing": ["data.path=nowhere"],
    "held-out corpus is missing": ["data.heldout_path=nowhere"],
    "no such python package": ["data.path=python:NOSUCH"],
    "tokenizer is missing": ["data.tokenizer=nowhere"],
    "not a saved dataset": ["data.format=dataset"],
    "nothing to train": ['model.freeze=["*"]'],
    "freeze matches nothing": ['model.freeze=["blocks.9.*"]'],
    "factory without a function": ["model.factory=tests.golden.models"],
    "factory is not importable": ["model.factory=no_such_package.models:tiny"],
    "factory in a file that is missing": ["model.factory=nowhere.py:build"],
    "factory in a file without a function": ["model.factory=model.py"],
    "factory has no such function": [f"model.factory={FACTORY}tinny"],
    "factory is no function": [f"model.factory={FACTORY}NUMBER"],
    "factory returns no module": [f"model.factory={FACTORY}no_module"],
    "factory raises": [f"model.factory={FACTORY}raises"],
    "kwargs that the factory does not take": ["model.kwargs.widht=16"],
    "optimizer factory returns no optimizer": [f"optimizer.factory={FACTORY}no_optimizer"],
    "optimizer factory does not take kwargs": [f"optimizer.factory={FACTORY}no_optimizer", "optimizer.kwargs={rho=1}"],
    "model returns a tuple": [f"model.factory={FACTORY}in_a_tuple"],
    "model returns one row of logits": [f"model.factory={FACTORY}one_for_a_sample"],
    "vocabulary of the factory is too small": ["model.kwargs={vocab=100}"],
    "recompute without blocks": [f"model.factory={FACTORY}without_blocks", "parallel.recompute=full"],
    "hsdp degrees do not divide": ["parallel.strategy=hsdp", "parallel.nproc=4", "parallel.dp_replicate=3"],
    "hsdp on three ranks": ["parallel.strategy=hsdp", "parallel.nproc=3", "train.global_batch=9"],
    "ddp with dp_shard": ["parallel.strategy=ddp", "parallel.dp_shard=2"],
    "auto with degrees that do not divide": ["parallel.dp_shard=3"],
    "fsdp with options of ddp": ["parallel.strategy=fsdp", "parallel.static_graph=true", "parallel.bucket_cap_mb=50"],
    "ddp: a bucket of nothing": ["parallel.strategy=ddp", "parallel.bucket_cap_mb=0"],
    "nothing fits": ["data.seq_len=16000000"],
    "gpu without a gpu": ["parallel.device=cuda"],
    "fp8 on a cpu": ["parallel.strategy=fsdp", "parallel.precision=bf16", "parallel.fp8=tensorwise"],
    "fp8 with axes that split the model": [
        *["parallel.strategy=fsdp+tp2", "parallel.precision=bf16", "parallel.fp8=rowwise", "parallel.fp8_emulate=true"],
    ],
    "activations offloaded beside what does not do it": [
        *["parallel.strategy=deepspeed-zero3", "parallel.offload_activations=true", "parallel.compile=true"],
        *["parallel.recompute=selective", "parallel.recompute_layers=2", "train.stepz=5", "data.path=nowhere"],
    ],
    "activations offloaded beside what does not do it, under any strategy": [
        *["parallel.offload_activations=true", "parallel.compile=true", "data.path=nowhere"],
    ],
    "activations offloaded beside fp8": [
        *["parallel.strategy=fsdp", "parallel.precision=bf16", "parallel.fp8=rowwise", "data.path=nowhere"],
        *["parallel.offload_activations=true"],
    ],
    "fp8 in fp32": ["parallel.strategy=ddp", "parallel.precision=fp32", "parallel.fp8=rowwise"],
    "fp8 of bf16 weights": [
        *["parallel.strategy=fsdp", "parallel.precision=bf16", "parallel.fp8=rowwise", "parallel.weights=compute"],
    ],
    "fp8 in blocks": ["parallel.strategy=fsdp", "parallel.precision=bf16", "parallel.fp8=blockwise"],
    "fp8 in microscaling format": [
        *["parallel.strategy=fsdp", "parallel.precision=bf16", "parallel.fp8=mxfp8"],
    ],
    "fp4": ["parallel.strategy=fsdp", "parallel.precision=bf16", "parallel.fp8=nvfp4"],
    "fp8 of a word that is none": ["parallel.strategy=fsdp", "parallel.precision=bf16", "parallel.fp8=tensor"],
    "fp8 of a model without such layers": [
        *["parallel.strategy=fsdp", "parallel.precision=bf16", "parallel.fp8=rowwise", "parallel.fp8_emulate=true"],
    ],
    "config of a model is missing": [NO_SOURCE, "model.config=nowhere"],
}


LLAMA_WORDS = [NO_SOURCE, "model.config=llama.json"]


def llama(**changes: Any) -> dict[str, str]:
    """The file of a Hugging Face configuration of which some keys are changed."""
    return {"llama.json": json.dumps(LLAMA | changes)}


FILES: dict[str, tuple[dict[str, str], list[str]]] = {
    "config is not toml": ({"config.toml": "[model]\nfactory = tiny\n"}, []),
    "empty config": ({"config.toml": ""}, []),
    "corpus of empty files": ({"empty.txt": ""}, ["data.path=empty.txt"]),
    "corpus without the column": ({"rows.jsonl": '{"texts": "a story"}'}, ["data.path=rows.jsonl"]),
    "corpus with broken rows": ({"rows.jsonl": '{"text": "a story"}\n{"text": \n'}, ["data.path=rows.jsonl"]),
    "held-out documents too short": ({"letter.txt": "a"}, ["data.heldout_path=letter.txt"]),
    "tokenizer is damaged": ({"tokenizer.json": "{}"}, ["data.tokenizer=tokenizer.json"]),
    "factory with a syntax error": ({"golden_broken.py": "def tiny(:"}, ["model.factory=golden_broken:tiny"]),
    "factory in a file that is broken": ({"model.py": "1 / 0"}, ["model.factory=model.py:tiny"]),
    "factory in a file has no such function": ({"model.py": "def tiny(): ..."}, ["model.factory=model.py:tinny"]),
    "factory that needs a package": ({"golden_needy.py": "import no_such"}, ["model.factory=golden_needy:tiny"]),
    "vocabulary and positions too small": (llama(vocab_size=256), [*LLAMA_WORDS, "data.seq_len=65"]),
    "model type is unknown": (llama(model_type="lama"), LLAMA_WORDS),
    "model type is no language model": (llama(model_type="vit"), LLAMA_WORDS),
    "model config has a wrong type": (llama(hidden_size="wide"), LLAMA_WORDS),
    "model config contradicts itself": (llama(hidden_size=9), LLAMA_WORDS),
    "model config wants code": (llama(auto_map={"AutoConfig": "evil.Config"}), LLAMA_WORDS),
    "model config is not json": ({"llama.json": "[]"}, LLAMA_WORDS),
    "plan is a list": ({"plan.json": "[]"}, ["--plan", "plan.json"]),
    "plan is empty": ({"plan.toml": ""}, ["--plan", "plan.toml"]),
    "plan is a config": ({"plan.toml": "[model]\n[train]\n"}, ["--plan", "plan.toml"]),
    "plan is bad": (
        {"plan.json": '{"strateggy": "ddp", "strategy": "fsdb", "dims": {"tq": 0}, "micro_batch": "two"}'},
        ["--plan", "plan.json"],
    ),
    "plan with axes that no strategy has": (
        {"plan.toml": 'strategy = "fsdp"\n[dims]\ntp = 2\ndp_replicate = 2'},
        ["--plan", "plan.toml"],
    ),
    "plan of preference tuning": (
        {"plan.toml": 'strategy = "fsdp"\nobjective = "dpo"\n[dims]\ndp_shard = 2'},
        ["--plan", "plan.toml"],
    ),
    "plan with stages of another model": (
        {"plan.toml": 'strategy = "ddp+pp2"\ngrad_accum = 4\nstage_blocks = [4, 4]\n[dims]\npp = 2'},
        ["--plan", "plan.toml"],
    ),
    "plan with stages that it has not": (
        {"plan.toml": 'strategy = "ddp+pp2"\ngrad_accum = 4\nstage_blocks = [2, 1, 1]\n[dims]\npp = 2'},
        ["--plan", "plan.toml"],
    ),
    "plan with stages and no pipeline": ({"plan.toml": "stage_blocks = [2]"}, ["--plan", "plan.toml"]),
    "plan for another world": ({"plan.toml": 'strategy = "fsdp"\n[dims]\ndp_shard = 4'}, ["--plan", "plan.toml"]),
    "plan for another device and length": (
        {"plan.toml": 'device = "cuda"\nseq_len = 32\n[dims]\ndp_replicate = 2'},
        ["--plan", "plan.toml"],
    ),
    "plan and strategy": ({"plan.toml": "[dims]\ndp_replicate = 2"}, ["--plan", "plan.toml", "--strategy", "fsdp"]),
    "output is a file": ({"file": ""}, ["train.output=file"]),
    "finished run must not resume": ({"run/summary.json": "{}"}, ["checkpoint.resume=false"]),
    "run that is there must not resume": (
        {"run/checkpoints/step-00000002/manifest.json": "{}"},
        ["checkpoint.resume=false"],
    ),
    "weights are missing": ({}, ["model.weights=nowhere", "parallel.nproc=1"]),
    "weights are pickled": ({"weights/model.bin": ""}, ["model.weights=weights", "parallel.nproc=1"]),
    "plan is missing": ({}, ["--plan", "nowhere.toml"]),
    "port is too large": ({}, ["--master-port", "70000"]),
    "unknown option": ({}, ["--strateggy", "fsdp"]),
    "no rank at all": ({}, ["--nproc", "0"]),
}
PLAN = ["--cluster", "8xA100-80GB", "--seq-len", "1024", "--global-batch", "64"]
PLANS = {
    "plan without a model": [],
    "plan of an unknown model": ["llama-3.1-70", *PLAN],
    "plan of a model that is far from all": ["zzz", *PLAN],
    "plan of experts on ranks that do not divide them": ["mixtral-8x7b", *PLAN, "--strategy", "fsdp+ep3"],
    "plan of more ranks than experts": [
        "mixtral-8x7b",
        "--cluster",
        "16xA100-80GB",
        *PLAN[2:],
        "--strategy",
        "fsdp+ep16",
    ],
    "plan of experts that are not there": ["gpt2", *PLAN, "--strategy", "fsdp+ep2"],
    "plan on an unknown gpu": ["gpt2", "--cluster", "8xA100-80BG"],
    "plan on an unknown link": ["gpt2", "--cluster", "4xRTX4090@nvlnk"],
    "plan on a cluster that is no cluster": ["gpt2", "--cluster", "eight"],
    "plan of fp8 on GPUs without": ["gpt2", *PLAN, "--fp8", "tensorwise"],
    "plan of fp8 in blocks": ["gpt2", "--cluster", "8xH100", *PLAN[2:], "--fp8", "blockwise"],
    "plan of fp8 in fp32": ["gpt2", "--cluster", "8xH100", *PLAN[2:], "--fp8", "rowwise", "--precision", "fp32"],
    "plan of another program's fp8": [
        *["gpt2", "--cluster", "8xH100", *PLAN[2:], "--fp8", "tensorwise", "--program", "megatron"],
    ],
    "plan with an unknown strategy": ["gpt2", *PLAN, "--strategy", "fsdb+tp2"],
    "plan with degrees that do not divide": ["gpt2", *PLAN, "--strategy", "fsdp+tp5+pp13"],
    "plan with a batch that does not divide": ["gpt2", *PLAN[:-1], "60", "--strategy", "fsdp"],
    "plan with a micro batch that does not divide": ["gpt2", *PLAN, "--strategy", "fsdp", "--micro-batch", "3"],
    "plan with a sequence too long": ["gpt2", *PLAN[:2], *PLAN[4:], "--seq-len", "2048"],
    "plan with words that are no choice": [
        *["gpt2", *PLAN, "--precision", "bf61", "--recompute", "ful", "--optimizer", "adam", "--tokens", "many"],
        *["--framework-overhead", "of", "--objective", "ppo"],
    ],
    "plan of preference pairs of images": ["resnet50", *PLAN, "--objective", "dpo"],
    "plan of an optimizer that does not step what is sharded": [
        *["gpt2", *PLAN, "--strategy", "fsdp+tp2", "--optimizer", "muon"],
    ],
    "serving with degrees that do not divide": ["qwen2.5-7b", "--cluster", "8xA100-80GB", "--serve", "--tp", "8"],
    "serving a context that is too long": [*["gpt2", "--cluster", "1xT4", "--serve", "--context", "2048"]],
    "serving with all wrong at once": [
        *["llama-3.1-8b", "--cluster", "8xZ100", "--serve", "--quant", "int5", "--kv-cache", "fp9", "--context", "4q"],
        *["--seq-len", "512", "--optimizer", "lion"],
    ],
    "serving a model that reads": ["bert-base", "--cluster", "1xT4", "--serve"],
    "serving code of one's own": [f"{FACTORY}tiny", "--cluster", "1xT4", "--serve"],
    "serving on several clusters": ["gpt2", "--cluster", "1xT4", "--cluster", "1xL4", "--serve", "--where"],
    "serving options without --serve": ["gpt2", "--cluster", "1xT4", "--context", "8k", "--tp", "2", "--budget", "9"],
    "where with a cluster": ["gpt2", *PLAN, "--where", "-o", "plan.toml", "--concurrency", "2"],
    "where with wrong words": ["gpt2", "--where", "--deadline", "soon", "--tokens", "many", "--prices", "absent.csv"],
    "where with a degree that divides no heads": ["gpt2", "--where", "--tokens", "1B", "--strategy", "fsdp+tp5"],
    "where with a program that has no such axis": [
        *["gpt2", "--where", "--tokens", "1B", "--program", "deepspeed", "--strategy", "fsdp+tp2"],
    ],
    "several clusters with a file for one": ["gpt2", "--cluster", "1xT4", "--cluster", "1xL4", "-o", "plan.toml"],
    "plan with all wrong at once": ["gtp2", "--cluster", "8xZ100", "--strategy", "fsdb", "--precision", "bf61"],
    "plan with prices that are missing": ["gpt2", *PLAN, "--price", "nowhere.toml"],
    "plan of a configuration that is missing": ["nowhere/config.json", *PLAN],
    "plan of a factory that is missing": [f"{FACTORY}tinny", *PLAN],
    "plan of a factory that raises": [f"{FACTORY}raises", *PLAN],
    "plan of a factory that gives no module": [f"{FACTORY}no_module", *PLAN],
    "plan of a package that is missing": ["no_such_package.models:tiny", *PLAN],
    "plan of a version that is not there": ["llama-4", *PLAN],
    "plan of auto with adapters on two clusters": [
        *["gpt2", *PLAN[:2], *PLAN[4:], "--cluster", "2xT4", "--seq-len", "4q", "--strategy", "qlora+fsdp"],
    ],
    "plan with a list that is none": ["--list", "gpu"],
    "plan of a config with a mistake": ["config-that-is-not.toml", "--cluster", "8xZ100"],
    "plan that does not fit": ["llama-3.1-8b", "--cluster", "1xA100-80GB", "--strategy", "ddp", *PLAN[2:]],
    "proof of a plan that is not run": ["gpt2", *PLAN, "--strategy", "zero1+tp2", "--prove"],
}
RECORDED = ROOT / "tests" / "deepspeed_configs"
IMPORTS = {
    "import of a file that is missing": ["nowhere.json"],
    "import of auto values": [str(RECORDED / "hf-auto.json"), "--nproc", "2"],
    "import of what is not run": [str(RECORDED / "not-run.json"), "--nproc", "4"],
    "import of fp16 for DeepSpeed": [str(RECORDED / "zero1-fp16.json"), "--nproc", "2"],
    "import of a batch that does not divide": [str(RECORDED / "zero2-bf16.json"), "--nproc", "3"],
    "import that does not say how many ranks": [str(RECORDED / "zero3-nvme.json")],
    "import with words that are no choice": [
        str(RECORDED / "zero2-bf16.json"),
        "--engine",
        "torhc",
        "--recompute",
        "ful",
    ],
}
WORDS = {
    **{name: ["import", *words] for name, words in IMPORTS.items()},
    "export to what is not written": ["export", "nowhere.toml", "--to", "onnx"],
    "export to a target that is misspelt": ["export", "nowhere.toml", "--to", "depspeed"],
    **{name: ["plan", *words] for name, words in PLANS.items()},
    "verify with adapters": ["verify", "config.toml", "--strategy", "fsdp+lora", "--strategy", "ddp+qlora"],
    "bench step with adapters": ["bench", "step", "config.toml", "parallel.strategy=fsdp+qlora"],
    "explain a file that is missing": ["explain", "nowhere.toml"],
    "a config key as an option": ["train", "config.toml", "--lr", "3e-4"],
    "a config key of two tables as an option": ["verify", "config.toml", "--kwargs={}"],
    "another tool's name of a config key": ["train", "config.toml", "--per-device-train-batch-size=4"],
    "a config key misspelt as an option": ["train", "config.toml", "--warmup-stepz", "4"],
    "config is missing": ["train", "nowhere.toml"],
    "config is a folder": ["train", "corpus"],
    "no config": ["train"],
    "unknown verb": ["trian", "config.toml"],
}


def config_is_not_text(folder: Path, stack: ExitStack) -> list[str]:
    (folder / "config.toml").write_bytes(b"\xff\xfe\x00")
    return []


def empty_corpus_folder(folder: Path, stack: ExitStack) -> list[str]:
    (folder / "empty").mkdir()
    return ["data.path=empty"]


def corpus_too_short(folder: Path, stack: ExitStack) -> list[str]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "word": 1}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "blank.txt").write_text("  \n")
    return ["data.path=blank.txt", "data.tokenizer=tokenizer.json"]


def mount(folder: Path, options: str, stack: ExitStack) -> None:
    """A small file system of its own at ``folder``; taken away with ``stack``."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a file system, and not everywhere")
    stack.callback(subprocess.run, ["umount", str(folder)], check=True)


def output_is_read_only(folder: Path, stack: ExitStack) -> list[str]:
    mount(folder / "read-only", "ro,size=64k", stack)
    return ["train.output=read-only/run"]


def disk_is_full_before_the_start(folder: Path, stack: ExitStack) -> list[str]:
    data = folder / "run" / "data"
    data.rename(folder / "data")
    (folder / "run").rmdir()
    mount(folder / "run", "size=256k", stack)
    shutil.move(folder / "data", data)
    (folder / "run" / "filler").write_bytes(bytes(shutil.disk_usage(folder / "run").free))
    return []


def port_is_in_use(folder: Path, stack: ExitStack) -> list[str]:
    holder = stack.enter_context(socket.socket())
    holder.bind(("127.0.0.1", 0))
    holder.listen()
    return ["--master-port", str(holder.getsockname()[1])]


def launched_by_half(folder: Path, stack: ExitStack) -> list[str]:
    stack.enter_context(mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "two"}))
    return []


def launched_by_mpiexec_on_two_nodes(folder: Path, stack: ExitStack) -> list[str]:
    given = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    stack.enter_context(mock.patch.dict(os.environ, given))
    return []


Setup = Callable[[Path, ExitStack], list[str]]
SETUPS: dict[str, Setup] = {
    name.replace("_", " "): found
    for name, found in list(globals().items())
    if isinstance(found, types.FunctionType) and found.__annotations__ == config_is_not_text.__annotations__
}
CASES = [*OVERRIDES, *FILES, *WORDS, *SETUPS]


def prepare(name: str, folder: Path, stack: ExitStack) -> list[str]:
    """Make what the case needs in ``folder``; returns the words of the command."""
    if name in WORDS:
        return WORDS[name]
    files, words = FILES.get(name, ({}, OVERRIDES.get(name, [])))
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return ["train", "config.toml", *(SETUPS[name](folder, stack) if name in SETUPS else words)]


def make_shared(folder: Path) -> Path:
    """The corpus of most cases, and its prepared tokens: making them takes longer than all the rest."""
    from shardwise.train.data.corpus import prepare_corpus

    (folder / "corpus").mkdir()
    for number in range(4):
        (folder / "corpus" / f"{number}.txt").write_text(f"{number} bottles of milk on the wall. " * 20)
    (folder / "config.toml").write_text(CONFIG)
    with contextlib.chdir(folder):
        prepare_corpus(read_config(Path("config.toml")).data, Path("run/data"), lambda text: None)
    return folder


def run_case(name: str, shared: Path, folder: Path) -> dict[str, Any]:
    """Run the command in ``folder`` as a user would; what it ended with and what it said on stderr."""
    shutil.copytree(shared / "run", folder / "run")
    (folder / "corpus").symlink_to(shared / "corpus")
    (folder / "config.toml").write_text(CONFIG)
    said, code = io.StringIO(), 0
    with ExitStack() as stack:
        words = prepare(name, folder, stack)
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(mock.patch.object(sys, "argv", ["shardwise", *words]))
        stack.enter_context(mock.patch.object(sys, "path", [*sys.path, str(TORCHAO)]))
        stack.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "120", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}))
        stack.enter_context(mock.patch("psutil.virtual_memory", lambda: types.SimpleNamespace(total=HOST_BYTES)))
        stack.enter_context(mock.patch("shardwise.hardware.cluster._nvml_devices", list))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(said))
        try:
            main()
        except SystemExit as end:
            code = end.code
    return {"exit_code": code, "message": portable(said.getvalue(), folder, words)}


def portable(text: str, folder: Path, words: list[str]) -> str:
    """The text without what is different on another machine or at another time."""
    text = text.replace(str(folder.resolve()), "<folder>").replace(str(folder), "<folder>").replace(str(ROOT), "<root>")
    if "--master-port" in words:
        text = text.replace(words[words.index("--master-port") + 1], "<port>")
    return re.sub(r"[\d.]+ (B|KiB|MiB|GiB) are free", "<free> are free", text)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shared(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def test_every_message_has_its_case(golden: dict[str, Any]) -> None:
    assert sorted(golden) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, shared: Path, golden: dict[str, Any], tmp_path: Path) -> None:
    found = run_case(name, shared, tmp_path)
    assert found == golden[name]
    assert "Traceback" not in found["message"]
    assert found["exit_code"] in (1, 2, 3)
    assert found["message"].strip()


def test_interrupted_before_there_are_ranks(shared: Path, tmp_path: Path) -> None:
    with mock.patch("shardwise.run.job.prepare_job", side_effect=KeyboardInterrupt):
        found = run_case("port is in use", shared, tmp_path)
    assert found["exit_code"] == 130
    assert found["message"] == (
        "shardwise: interrupted before the first step: nothing was trained or saved; the same command starts again\n"
    )


def test_interrupted_in_any_other_verb(shared: Path, tmp_path: Path) -> None:
    with mock.patch("shardwise.cli.export_plan.read_plan", side_effect=KeyboardInterrupt):
        found = run_case("export to what is not written", shared, tmp_path)
    assert found == {"exit_code": 130, "message": "shardwise: interrupted\n"}


def test_none_is_nothing_only_where_a_key_can_be_left_out(shared: Path) -> None:
    words = ["parallel.recompute=none", "optimizer.clip_norm=none", "model.kwargs.width=16", "model.kwargs.kind=none"]
    config = read_config(shared / "config.toml", words)
    assert config.parallel.recompute == "none"
    assert config.optimizer.clip_norm is None
    assert config.model.kwargs == {"width": 16, "kind": "none"}


def write() -> None:
    """Run every case and write what it says, without what this machine has learnt from earlier runs."""
    found = {}
    logging.getLogger("torchao").addHandler(logging.NullHandler())  # else what it cannot load is printed
    with tempfile.TemporaryDirectory() as top, mock.patch.dict(os.environ, {"SHARDWISE_HISTORY": "off"}):
        (Path(top) / "shared").mkdir()
        shared = make_shared(Path(top) / "shared")
        for number, name in enumerate(CASES):
            (Path(top) / str(number)).mkdir()
            found[name] = run_case(name, shared, Path(top) / str(number))
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.golden.test_messages --write")
    write()
