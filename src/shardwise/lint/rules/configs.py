"""Rules about configs: of DeepSpeed, of accelerate, and Shardwise's own."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

from shardwise.errors import ConfigError
from shardwise.lint.config_document import ConfigDocument
from shardwise.lint.rule import Fault, rule
from shardwise.lint.script import Script, keyword


def _number(read: ConfigDocument, key: str) -> int | None:
    value = read.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@rule(
    "SW801",
    "deepspeed-batches-do-not-multiply",
    kinds=("config",),
    message="No number of ranks makes these batch sizes agree: DeepSpeed stops with an AssertionError.",
    why="""train_batch_size has to be train_micro_batch_size_per_gpu * gradient_accumulation_steps * the number of
    ranks.""",
    fix="leave train_batch_size out; DeepSpeed computes it from the other two",
)
def deepspeed_batches(read: ConfigDocument) -> Iterator[Fault]:
    """train_batch_size that is no multiple of the micro batch times the accumulation."""
    total, micro = _number(read, "train_batch_size"), _number(read, "train_micro_batch_size_per_gpu")
    steps = _number(read, "gradient_accumulation_steps") or 1
    if read.tool == "deepspeed" and total and micro and total % (micro * steps):
        text = (
            f"train_batch_size = {total} is no multiple of {micro} * {steps}: DeepSpeed stops with an AssertionError."
        )
        yield read.fault("train_batch_size", text)


@rule(
    "SW802",
    "deepspeed-two-precisions",
    kinds=("config",),
    message="fp16 and bf16 are both enabled: DeepSpeed stops with an AssertionError.",
    why='"bfloat16 and fp16 modes cannot be simultaneously enabled".',
    fix="enable one of them; bf16 needs no loss scaling",
)
def deepspeed_precisions(read: ConfigDocument) -> Iterator[Fault]:
    """fp16.enabled and bf16.enabled both true."""
    both = read.get("fp16.enabled") is True and (
        read.get("bf16.enabled") is True or read.get("bfloat16.enabled") is True
    )
    if read.tool == "deepspeed" and both:
        yield read.fault("bf16" if read.get("bf16") else "bfloat16")


@rule(
    "SW803",
    "deepspeed-without-a-batch-size",
    kinds=("config",),
    message="""Neither train_batch_size nor train_micro_batch_size_per_gpu is given: DeepSpeed stops with an
    AssertionError.""",
    why="gradient_accumulation_steps alone says nothing about the size of a batch.",
    fix="give train_micro_batch_size_per_gpu",
)
def deepspeed_without_batch(read: ConfigDocument) -> Iterator[Fault]:
    """A DeepSpeed config without either size of a batch."""
    given = {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(read.data)
    if read.tool == "deepspeed" and not given:
        yield read.fault("zero_optimization")


@rule(
    "SW804",
    "deepspeed-option-of-another-stage",
    kinds=("config",),
    severity="warning",
    message="This option has an effect in ZeRO stage 3 only, and the stage is lower: it does nothing.",
    why="Stages 1 and 2 keep all parameters on every GPU: there is nothing to offload, prefetch or gather.",
    fix="set stage to 3, or leave the option out",
)
def deepspeed_other_stage(read: ConfigDocument) -> Iterator[Fault]:
    """offload_param or stage3_* with a stage below 3."""
    zero = read.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if read.tool != "deepspeed" or not isinstance(zero, dict) or not isinstance(stage, int) or stage >= 3:
        return
    device = read.get("zero_optimization.offload_param.device")
    if device not in (None, "none"):
        yield read.fault(
            "zero_optimization.offload_param", f"offload_param has an effect in ZeRO stage 3 only, not in {stage}."
        )
    for key in (
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_prefetch_bucket_size",
        "stage3_max_live_parameters",
    ):
        if key in zero and zero[key] != "auto":
            yield read.fault(f"zero_optimization.{key}", f"{key} has an effect in ZeRO stage 3 only, not in {stage}.")


@rule(
    "SW805",
    "deepspeed-auto-without-transformers",
    message="""The config has "auto" values, and nothing in this script fills them in: DeepSpeed fails, or takes a
    default.""",
    why='"auto" is for the transformers Trainer and accelerate, which put numbers there; DeepSpeed itself does not.',
    fix="write the numbers into the config",
)
def deepspeed_auto(script: Script) -> Iterator[Fault]:
    """deepspeed.initialize(config="x.json") without transformers or accelerate, where x.json has "auto" batch sizes."""
    if script.imports("transformers", "accelerate", "lightning", "pytorch_lightning"):
        return
    for call in script.calls:
        given = keyword(call, "config") or keyword(call, "config_params")
        held = script.origin(given)
        name = held.value if isinstance(held, ast.Constant) else None
        if script.name(call.func) != "deepspeed.initialize" or not isinstance(name, str):
            continue
        try:
            data = json.loads((script.path.parent / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if given is not None and (keys := sorted(_autos(data))):
            yield script.fault(given, f'{name} has "auto" for {", ".join(keys[:3])}, and nothing here fills it in.')


def _autos(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            if value == "auto":
                yield key
            yield from _autos(value)


@rule(
    "SW811",
    "fsdp1-option-with-fsdp2",
    kinds=("config",),
    severity="warning",
    message="accelerate does not read this option with fsdp_version: 2.",
    why="""FSDP2 has fsdp_reshard_after_forward in place of fsdp_sharding_strategy, always keeps the original
    parameters, and has no sync_module_states or prefetch options: SHARD_GRAD_OP, say, becomes full sharding without a
    word.""",
    fix="use fsdp_reshard_after_forward: false for SHARD_GRAD_OP, and leave the others out",
)
def fsdp1_option(read: ConfigDocument) -> Iterator[Fault]:
    """fsdp_version: 2 with options of FSDP1 that differ from what FSDP2 does anyway."""
    if read.tool != "accelerate" or read.get("fsdp_config.fsdp_version") != 2:
        return
    harmless = {"fsdp_sharding_strategy": ("FULL_SHARD", 1, "1"), "fsdp_use_orig_params": (True,)}
    for key in ("fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_forward_prefetch"):
        value = read.get(f"fsdp_config.{key}")
        if value is not None and value is not False and value not in harmless.get(key, ()):
            yield read.fault(f"fsdp_config.{key}", f"accelerate does not read {key} with fsdp_version: 2.")


@rule(
    "SW812",
    "processes-do-not-divide",
    kinds=("config",),
    message="num_processes is no multiple of num_machines: accelerate starts fewer processes than that.",
    why="num_processes counts all machines; each starts num_processes // num_machines.",
    fix="set num_processes to the GPUs of all machines together",
)
def processes_do_not_divide(read: ConfigDocument) -> Iterator[Fault]:
    """num_processes % num_machines in an accelerate config."""
    processes, machines = _number(read, "num_processes"), _number(read, "num_machines")
    if read.tool == "accelerate" and processes and machines and processes % machines:
        each = processes // machines
        text = f"num_processes = {processes} over {machines} machines: accelerate starts {each} on each."
        yield read.fault("num_processes", text)


@rule(
    "SW813",
    "many-gpus-one-process",
    kinds=("config",),
    severity="warning",
    message="distributed_type is that of several processes and num_processes is 1: one GPU trains, the others idle.",
    why="accelerate starts num_processes over all machines, one for each GPU.",
    fix="set num_processes to the number of GPUs, or distributed_type to 'NO'",
)
def many_gpus_one_process(read: ConfigDocument) -> Iterator[Fault]:
    """MULTI_GPU or FSDP with num_processes: 1."""
    if (
        read.tool == "accelerate"
        and read.get("distributed_type") in ("MULTI_GPU", "FSDP")
        and _number(read, "num_processes") == 1
    ):
        yield read.fault("num_processes")


@rule(
    "SW821",
    "two-precisions",
    message="fp16 and bf16 are both on: TrainingArguments raises ValueError.",
    why='"At most one of fp16 and bf16 can be True, but not both".',
    fix="keep bf16=True on GPUs that have it, else fp16=True",
)
def two_precisions(script: Script) -> Iterator[Fault]:
    """TrainingArguments(fp16=True, bf16=True)."""
    for call in script.calls:
        if script.name(call.func).rpartition(".")[2].endswith("TrainingArguments") and script.imports("transformers"):
            both = [keyword(call, name) for name in ("fp16", "bf16")]
            if all(isinstance(one, ast.Constant) and one.value is True for one in both):
                yield script.fault(call)


@rule(
    "SW831",
    "shardwise-config",
    kinds=("config",),
    message="shardwise train refuses this config.",
    why="The same checks run before every training.",
    fix="see docs/config.md for each key",
)
def shardwise_config(read: ConfigDocument) -> Iterator[Fault]:
    """A config of Shardwise that `shardwise train` refuses."""
    if read.tool != "shardwise":
        return
    from shardwise.train.config import read_config

    try:
        read_config(read.path)
    except ConfigError as error:
        for problem in error.problems:
            key = problem.partition(" ")[0].strip("'\"`:")
            yield read.fault(
                key if read.get(key.partition(".")[0]) is not None else "", f"shardwise train: {problem.rstrip('.')}."
            )
