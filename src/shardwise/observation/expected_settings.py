"""Read expectations: a strategy, a plan, accelerate's `Accelerator`, transformers' `TrainingArguments`.

Other tools' objects are read by their attributes, so none of the tools is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.environment import accelerate_fsdp
from shardwise.errors import UserError
from shardwise.observation.expectation import Expectation, of_strategy
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy

_PRECISIONS = ("fp32", "bf16", "fp16")
_FSDP1 = {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2", "HYBRID_SHARD": "hsdp", "NO_SHARD": "ddp"}


def expectation_of(expect: Any, stated: Mapping[str, Any]) -> Expectation:
    """Return the expectation of ``expect``, with the settings of ``stated`` that are not ``None`` in place of its own.

    Raises:
        UserError: settings are impossible, or ``expect`` is of no known kind.
    """
    precision, accum, clip = (stated.get(name) for name in ("precision", "grad_accum", "clip_norm"))
    recompute, tied = stated.get("recompute"), stated.get("tied") or ()
    problems = []
    if precision not in (None, *_PRECISIONS):
        problems.append(f"precision = {precision!r}: use {', '.join(_PRECISIONS)}")
    if accum is not None and (not isinstance(accum, int) or isinstance(accum, bool) or accum < 1):
        problems.append(f"grad_accum = {accum!r}: use the number of micro batches of a step on one rank, from 1")
    if clip is not None and (not isinstance(clip, int | float) or isinstance(clip, bool) or not clip > 0):
        problems.append(f"clip_norm = {clip!r}: use a norm above 0, or leave it out")
    if not isinstance(recompute, bool | None):
        problems.append(f"recompute = {recompute!r}: use True or False")
    if any(isinstance(group, str) or len(group) < 2 for group in tied):
        problems.append(f"tied = {tied!r}: use a list of groups, such as [('embed.weight', 'head.weight')]")
    if problems:
        raise UserError("observe: " + "; ".join(problems))
    return _base(expect).model_copy(update={name: value for name, value in stated.items() if value is not None})


def _base(expect: Any) -> Expectation:
    if expect is None:
        return Expectation()
    if isinstance(expect, Expectation):
        return expect
    if isinstance(expect, str):
        return of_strategy(expect)
    if isinstance(expect, Plan):
        own = of_strategy(expect.strategy, f"plan {expect.strategy}")
        recompute = None if expect.compile else expect.recompute != "none"  # graphs recompute unseen
        return own.model_copy(
            update={"precision": expect.precision, "grad_accum": expect.grad_accum, "recompute": recompute}
        )
    kinds = {(base.__module__.partition(".")[0], base.__name__) for base in type(expect).__mro__}
    if ("accelerate", "Accelerator") in kinds:
        return of_accelerator(expect)
    if ("transformers", "TrainingArguments") in kinds:
        return of_training_arguments(expect)
    raise UserError(
        f"observe: expect = {type(expect).__name__}: give a strategy such as 'fsdp', a Plan, an Expectation, an "
        "Accelerator, or TrainingArguments"
    )


def of_accelerator(accelerator: Any) -> Expectation:
    """Return what an `Accelerator` was asked for: its plugins, not what it made of them."""
    state = accelerator.state
    fsdp, deepspeed = getattr(state, "fsdp_plugin", None), getattr(state, "deepspeed_plugin", None)
    if fsdp is not None:
        found = _of_fsdp_plugin(fsdp)
    elif deepspeed is not None:
        found = of_strategy(f"deepspeed-zero{deepspeed.zero_stage}" if deepspeed.zero_stage else "ddp")
    elif accelerate_fsdp():  # its state forgets the plugin where it does not use it, as on CPUs
        found = of_strategy("fsdp", "FSDP, by its plugin or launcher")
    else:
        found = of_strategy("ddp").model_copy(update={"source": "ddp, as no plugin is set"})
    found = _with_axes(found, getattr(accelerator, "parallelism_config", None))
    mixed = str(accelerator.mixed_precision)
    precision = {"no": "fp32"}.get(mixed, mixed)
    steps = int(accelerator.gradient_accumulation_steps)
    return found.model_copy(
        update={
            "source": f"Accelerator: {found.source}",
            # "no" leaves the model's own dtype alone
            "precision": precision if precision in _PRECISIONS and mixed != "no" else None,
            "grad_accum": steps if steps > 1 else None,  # with 1, the loop may accumulate by itself
        }
    )


def of_training_arguments(arguments: Any) -> Expectation:
    """Return what `TrainingArguments` ask for."""
    config = arguments.fsdp_config if isinstance(arguments.fsdp_config, Mapping) else {}
    if arguments.fsdp:
        found = _of_fsdp_config(config)
    elif getattr(arguments, "hf_deepspeed_config", None) is not None:
        stage = arguments.hf_deepspeed_config.get_value("zero_optimization.stage", 0)
        found = of_strategy(f"deepspeed-zero{stage}" if stage else "ddp")
    else:
        found = of_strategy("ddp").model_copy(update={"source": "ddp, as fsdp and deepspeed are not set"})
    found = _with_axes(found, getattr(arguments, "parallelism_config", None))
    compiled = bool(getattr(arguments, "torch_compile", False))
    recompute = bool(arguments.gradient_checkpointing or config.get("activation_checkpointing"))
    precision = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else None
    return found.model_copy(
        update={
            "source": f"TrainingArguments: {found.source}",
            "precision": None if compiled else precision,
            "grad_accum": int(arguments.gradient_accumulation_steps),
            "clip_norm": float(arguments.max_grad_norm) if arguments.max_grad_norm else None,
            "recompute": None if compiled else recompute,
        }
    )


def of_lightning(strategy: Any, precision: str) -> Expectation:
    """Return what a strategy of Lightning or Fabric asks for; its name alone where its user shards by hand."""
    kinds = {base.__name__ for base in type(strategy).__mro__}
    own = getattr(strategy, "shardwise_plan", None)
    if own is not None:
        found = Expectation() if parse_strategy(own).splits_model else of_strategy(own)
    elif "FSDPStrategy" in kinds:
        word = getattr(strategy.sharding_strategy, "name", str(strategy.sharding_strategy))
        found = of_fsdp1(word, bool(getattr(strategy.cpu_offload, "offload_params", False)))
    else:
        found = of_strategy("ddp") if "DDPStrategy" in kinds else Expectation()
    kind, _, how = precision.partition("-")
    mixed = {"bf16": "bf16", "16": "fp16"}.get(kind) if how == "mixed" else None
    return found.model_copy(update={"source": type(strategy).__name__, "precision": mixed})


def _with_axes(found: Expectation, config: Any) -> Expectation:
    """Return the expectation under accelerate's `ParallelismConfig`: replicas of shard groups, or nothing of tp and cp.

    Ranks of one group have the same samples, and a layer's norm has fewer shards than its matrices.
    """
    sizes = {axis: int(getattr(config, f"{axis}_size", 1) or 1) for axis in ("tp", "cp", "sp", "dp_replicate")}
    if config is None or found.strategy is None or max(sizes.values()) == 1:
        return found
    shards = int(getattr(config, "dp_shard_size", 1) or 1)
    if max(sizes["tp"], sizes["cp"], sizes["sp"]) == 1 and found.strategy.base in ("fsdp", "ddp"):
        if found.strategy.base == "ddp":
            return found
        if shards > 1:
            text = str(found.strategy).replace("fsdp", "hsdp", 1)
            return found.model_copy(update={"strategy": of_strategy(text).strategy, "source": f"{found.source}, hsdp"})
    return found.model_copy(update={"strategy": None, "source": f"{found.source}; its axes are not judged"})


def _of_fsdp_plugin(plugin: Any) -> Expectation:
    policy = plugin.cpu_offload  # FSDP1's CPUOffload, FSDP2's policy, or a bool
    offload = type(policy).__name__ == "CPUOffloadPolicy" or getattr(policy, "offload_params", policy is True)
    recompute = True if plugin.activation_checkpointing else None
    if plugin.fsdp_version == 2:
        found = _fsdp2(bool(plugin.reshard_after_forward), bool(offload))
    else:
        word = getattr(plugin.sharding_strategy, "name", str(plugin.sharding_strategy))
        found = of_fsdp1(word, bool(offload))
    return found.model_copy(update={"recompute": recompute})


def _of_fsdp_config(config: Mapping[str, Any]) -> Expectation:
    offload = _is_true(config.get("cpu_offload", False))
    reshard = config.get("reshard_after_forward", True)
    if int(config.get("version", 2)) == 2:
        return _fsdp2(_is_true(reshard), offload)
    return of_fsdp1("FULL_SHARD" if isinstance(reshard, bool) else str(reshard), offload)


def _fsdp2(reshard: bool, offload: bool) -> Expectation:
    word = "fsdp" if reshard else "zero2"
    text = f"FSDP2, reshard_after_forward {str(reshard).lower()}"
    return of_strategy(word + "+offload" * offload, text).model_copy(update={"wrapper": "FSDP2"})


def of_fsdp1(word: str, offload: bool) -> Expectation:
    """Return the expectation of FSDP1 with a word of its `ShardingStrategy`."""
    base = _FSDP1.get(word.upper(), "fsdp")
    return of_strategy(base + "+offload" * offload, f"FSDP1, {word.lower()}").model_copy(update={"wrapper": "FSDP1"})


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")
