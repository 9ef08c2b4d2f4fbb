"""`Plan`: the frozen decision with a fingerprint; the only object passed between processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from shardwise.document import read_json, read_toml
from shardwise.errors import PlanError, did_you_mean
from shardwise.plan.dims import ParallelDims, spread_problem
from shardwise.plan.fp8_recipes import PlannedRecipe
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.objective import RUN_BY, SEQUENCES, Objective, Reference, reference_of
from shardwise.plan.parallel_options import (
    OPTION_DEFAULTS,
    OPTION_SPECS,
    ParallelOptions,
    StepOptions,
    changed,
    without_effect,
)
from shardwise.plan.strategy import Strategy, parse_strategy, runnable_strategy
from shardwise.plan.tensor_types import (
    BARE_STRATEGIES,
    TYPE_FIELDS,
    WEIGHT_WORDS,
    GradientType,
    Rounding,
    WeightType,
)
from shardwise.units import counted

RunPrecision = Literal["fp32", "bf16", "fp16"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]  # fp8: of other programs; a recipe of this one is `Plan.fp8`
Recompute = Literal["none", "selective", "full"]
DeviceType = Literal["cpu", "cuda"]

_STAGES = ("strategy", "dims", "pipeline_schedule", "virtual_stages")  # what the number of stages depends on
_PLANNED = " can be planned but is not run"
LAYERS_IDLE = "recompute_layers does nothing without recompute; set recompute to full or selective, or leave it out"
_NO_EFFECT = "gradient_sync = 'every' has no effect; remove it"


class Plan(StepOptions, ParallelOptions):
    """Decision how one global batch is computed.

    The strategy, the degrees, the batch split, the precision, the options. ``micro_batch`` and ``global_batch`` count
    samples; ``seq_len`` counts tokens (``None`` where samples are not sequences). `ParallelOptions` and `StepOptions`
    declare the options. ``stage_blocks`` is the number of blocks of each pipeline stage: the search and `prepare` write
    it, the split and the receipt read it. ``reason`` is why this plan was chosen: like ``nvme_path`` it is not part of
    the fingerprint. Under ``objective`` dpo a sample is a pair of sequences. ``weights``, ``accumulate`` and ``reduce``
    are types of tensors beside the compute type (`plan.tensor_types`); `unrun_types` tells which are only planned.
    ``fp8`` is torchao's recipe for the products of the blocks, and ``fp8_emulate`` computes them in fp32 on operands
    that were rounded to fp8, for devices without such products.
    ``program`` is the one whose costs were predicted (`plan.program`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    strategy: str = "ddp"
    dims: ParallelDims = ParallelDims()
    micro_batch: int | None = Field(default=None, ge=1)
    grad_accum: int = Field(default=1, ge=1)
    seq_len: int | None = Field(default=None, ge=1)
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    adapter: AdapterOptions | None = None
    stage_blocks: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    device: DeviceType = "cpu"
    objective: Objective = "lm"
    weights: WeightType = "fp32"
    accumulate: GradientType = "fp32"
    reduce: GradientType = "fp32"
    rounding: Rounding = "nearest"
    fp8: PlannedRecipe = "none"
    fp8_emulate: bool = False
    program: str = "shardwise"
    reason: str = ""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the plan; a change of its stages leaves out ``stage_blocks``, which are of the old ones."""
        update = dict(update or {})
        if any(name in update and update[name] != getattr(self, name) for name in _STAGES):
            update = {"stage_blocks": None} | update
        return super().model_copy(update=update, deep=deep)

    @property
    def parsed(self) -> Strategy:
        """Parsed strategy."""
        return parse_strategy(self.strategy)

    @property
    def global_batch(self) -> int | None:
        """Samples per optimizer step; ``None`` where the loader decides the micro batch."""
        return None if self.micro_batch is None else self.micro_batch * self.grad_accum * self.dims.dp

    @property
    def sequences(self) -> int:
        """Sequences of a micro batch: a preference pair is two samples of ``seq_len`` tokens."""
        return (self.micro_batch or 1) * SEQUENCES[self.objective]

    @property
    def reference(self) -> Reference:
        """Frozen model that a step of the objective runs forward, too."""
        return reference_of(self.objective, self.parsed.adapter)

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits over everything that changes the computation."""
        unseen = {name for name, spec in OPTION_SPECS.items() if not spec.computes}
        facts = self.model_dump(mode="json", by_alias=True, exclude={"reason", *unseen})
        facts["strategy"] = str(self.parsed)  # zero3 and fsdp are equivalent
        facts["dims"] = {axis: n for axis, n in facts["dims"].items() if axis != "ep" or n > 1}  # newer, as below
        # options newer than the first plans: omitted at the values that those plans ran with
        later = OPTION_DEFAULTS | {"adapter": None, "stage_blocks": None, "objective": "lm"} | TYPE_DEFAULTS
        facts = {key: value for key, value in facts.items() if key not in later or value != later[key]}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def syncs_every_micro_batch(self) -> bool:
        """Return True where sharded gradients are reduced after every micro batch of several."""
        return self.gradient_sync == "every" and self.grad_accum > 1 and self.parsed.shards_parameters

    def recomputed(self, blocks: int) -> int:
        """Return how many of the ``blocks`` of a pipeline stage are recomputed: the first so many.

        Backward reaches the first ones last, when all others have freed what they saved.
        """
        if self.recompute == "none":
            return 0
        return blocks if self.recompute_layers is None else min(self.recompute_layers, blocks)

    @property
    def recompute_words(self) -> str:
        """Format the mode, and of how many blocks where not of all: ``full of 12 blocks``."""
        layers = self.recompute_layers
        return self.recompute if layers is None else f"{self.recompute} of {counted(layers, 'block')}"

    @property
    def marks_used_parameters(self) -> bool:
        """Return True where DDP reduces a map of the parameters that a rank's graph contains."""
        return self.find_unused_parameters and not self.static_graph

    def batch_equation(self) -> str:
        """Format ``global batch 16 = micro batch 4 × accumulation 2 × dp 2``, with tokens if known."""
        left = "?" if self.global_batch is None else str(self.global_batch)
        micro = "the loader's" if self.micro_batch is None else str(self.micro_batch)
        text = f"global batch {left} = micro batch {micro} × accumulation {self.grad_accum} × dp {self.dims.dp}"
        if self.global_batch is not None and self.seq_len is not None:
            each = SEQUENCES[self.objective]
            tokens = counted(self.global_batch * each * self.seq_len, "token")
            pair = f"{each} × " if each > 1 else ""
            text += f"  ({self.global_batch} × {pair}{self.seq_len} = {tokens} a step)"
        return text

    def to_toml(self) -> str:
        """Serialize as a TOML document; `read_plan` reads it."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    def to_json(self) -> str:
        """Serialize as one line of JSON."""
        return self.model_dump_json(by_alias=True)


TYPE_DEFAULTS: dict[str, Any] = {
    name: Plan.model_fields[name].default for name in (*TYPE_FIELDS, "fp8_emulate", "program")
}
"""Fields newer than the first plans, which most plans do not change."""


def type_words(plan: Plan) -> list[str]:
    """Return the types of a plan, and its program, that are not the defaults."""
    words = [f"--program {plan.program}"] if plan.program != TYPE_DEFAULTS["program"] else []
    words += [WEIGHT_WORDS[plan.weights]] if plan.weights != "fp32" else []
    words += ["gradients accumulated in the compute type"] if plan.accumulate != "fp32" else []
    words += ["gradients reduced in the compute type"] if plan.reduce != "fp32" else []
    words += [f"{plan.rounding} rounding"] if plan.rounding != "nearest" else []
    return words + ([f"fp8 = '{plan.fp8}'"] if plan.fp8 != "none" else [])


_PROGRAMS_OF = {"deepspeed": ("deepspeed",), "torchtitan": ("torchtitan", "torchtitan-2024"), "trainer": ("trl",)}


def export_problems(plan: Plan, target: str) -> list[str]:
    """Return which types of a plan a file for ``target`` cannot say, unless its own program has them."""
    words = [] if plan.program in _PROGRAMS_OF.get(target, ()) else type_words(plan)
    return [f"no file for {target} says {' and '.join(words)}; plan without it"] if words else []


def products(plan: Plan) -> Precision:
    """Return the precision of the blocks' products."""
    return "fp8" if plan.fp8 != "none" else plan.precision


def gathers_fp8(plan: Plan) -> bool:
    """Return whether sharded weights of converted products are gathered in fp8: torchao has it for one scale each."""
    return plan.fp8 == "tensorwise" and plan.parsed.shards_parameters


def type_problems(plan: Plan) -> list[str]:
    """Return the contradictions of a plan's types."""
    found, low = [], plan.precision != "fp32"
    wide = [name for name in ("weights", "accumulate", "reduce") if getattr(plan, name) != TYPE_DEFAULTS[name]]
    if wide and not low:
        shown = " and ".join(f"{name} = '{getattr(plan, name)}'" for name in wide)
        found.append(f"{shown} with precision fp32: the compute type is fp32; take bf16, or leave it out")
    if plan.rounding != "nearest" and plan.weights != "compute":
        found.append(f"rounding = '{plan.rounding}' is of weights = 'compute'; with fp32 weights leave it out")
    if plan.accumulate != "fp32" and plan.weights != "masters":
        found.append("accumulate = 'compute' is of weights = 'masters'; other gradients have their weights' type")
    if plan.fp8 != "none" and plan.precision != "bf16":
        found.append(
            f"fp8 = '{plan.fp8}' with precision {plan.precision}: a recipe converts products of a bf16 model; set "
            "precision to bf16, or leave fp8 out"
        )
    if plan.fp8_emulate and plan.fp8 == "none":
        found.append("fp8_emulate = true does nothing without fp8; remove it")
    return found


def unrun_types(plan: Plan) -> list[str]:
    """Return why this version does not run the types of a plan, each with a fix; empty if it does."""
    return [line for _, line in _unrun_types(plan)]


def _unrun_types(plan: Plan) -> list[tuple[str, str]]:
    """Return the lines of `unrun_types`, each with what the types are not run beside; empty where they never are."""
    if not (shown := " and ".join(type_words(plan))):
        return []
    strategy, under = plan.parsed, f" under {plan.parsed}"
    if plan.program != TYPE_DEFAULTS["program"]:
        return [("", f"{shown}: can be planned but is not run by this version; make a plan without it")]
    if plan.precision != "bf16":
        fix = f"runs in bf16, and precision is {plan.precision}; set precision to bf16, or leave it out"
        return [(f" in {plan.precision}", f"{shown}: {fix}")]
    if str(strategy) not in BARE_STRATEGIES:
        fix = f"and is only planned for {strategy}; name one of them, or leave it out"
        return [(under, f"{shown}: runs under {', '.join(BARE_STRATEGIES)}, {fix}")]
    if plan.weights == "masters" and plan.accumulate == "fp32" and not strategy.shards_parameters:
        line = f"weights = 'masters'{under}: DDP's buckets have the weights' type, so fp32 gradients are not "
        return [(under, line + "accumulated; set accumulate = 'compute', or name zero2, fsdp or hsdp")]
    if plan.optimizer_in_backward:
        beside = " with optimizer_in_backward"
        return [(beside, f"{shown}: is not run{beside}; leave one of them out")]
    if plan.fp8 != "none" and plan.weights != "fp32":
        beside = f" with {WEIGHT_WORDS[plan.weights]}"
        line = f"fp8 = '{plan.fp8}'{beside}: a run casts fp32 weights to fp8; set weights to fp32, or leave fp8 out"
        return [(beside, line)]
    if plan.fp8 != "none" and plan.offload_activations:
        beside = " with offload_activations"
        line = f"fp8 = '{plan.fp8}'{beside} is not run by this version: weights that are cast for a product would be "
        return [(beside, line + "moved as if they were activations; leave one of them out")]
    return []


def read_plan(path: Path) -> Plan:
    """Read a plan from a TOML or JSON file.

    Raises:
        PlanError: the file is missing, is not TOML or JSON, or does not contain a plan.
    """
    if path.suffix in (".yaml", ".yml"):
        raise PlanError(
            f"plan '{path}' is YAML, and plans are TOML or JSON; from a trainer's file make one with: shardwise import "
            f"{path} -o NEW.toml"
        )
    try:
        data = read_json(path) if path.suffix == ".json" else read_toml(path)
    except OSError as error:
        raise PlanError(f"plan '{path}': {error.strerror or error}; give the path of a plan file") from None
    except ValueError as error:
        raise PlanError(f"plan '{path}' is not readable: {error}") from None
    if data == {}:
        raise PlanError(f"plan '{path}' is empty; make one with: shardwise plan MODEL -o {path}")
    if isinstance(data, dict):
        if {"model", "train"} <= data.keys():
            raise PlanError(f"plan '{path}' is a config of train; plan it with: shardwise plan {path} -o NEW.toml")
        data.pop("question", None)  # the request of ``shardwise plan``, stored beside its answer for ``explain``
    problems: list[str] = []
    try:
        if isinstance(data, dict) and isinstance(data.get("strategy"), str):
            parse_strategy(data["strategy"])
    except PlanError as error:
        problems += error.problems
    try:
        plan = Plan.model_validate(data)
        problems += [] if problems else axis_problems(plan)
    except ValidationError as error:
        problems += plan_problems(error)
    if problems:
        raise PlanError(*(f"plan '{path}': {problem}" for problem in problems))
    return plan


def runnable(plan: Plan) -> Plan:
    """Return ``plan`` if this version can run it.

    Raises:
        PlanError: this version plans it but does not run it, or it contradicts itself.
    """
    runnable_strategy(plan.strategy)
    if problems := axis_problems(plan):
        raise PlanError(*problems)
    if plan.precision == "fp8":
        raise PlanError(
            "precision fp8 can be planned but is not run by this version; use bf16, with fp8 = 'tensorwise' or "
            "'rowwise'"
        )
    if problems := unrun_types(plan):
        raise PlanError(*problems)
    if run_by := RUN_BY[plan.objective]:
        raise PlanError(
            f"objective {plan.objective} can be planned but is not run by this version; {run_by}: make a plan without "
            f"--objective {plan.objective}, or train with one of them"
        )
    return plan


def not_runnable(plan: Plan) -> tuple[str, ...]:
    """Return what of ``plan`` this version only plans; empty if it runs."""
    words = [*plan.parsed.not_runnable, *(["precision fp8"] if plan.precision == "fp8" else [])]
    words += [word + beside for beside, _ in _unrun_types(plan) for word in type_words(plan)]
    words += [f"objective {plan.objective} ({run_by})"] if (run_by := RUN_BY[plan.objective]) else []
    engine = engine_problems(plan) if plan.parsed.engine == "deepspeed" else []
    return (*words, *(line.partition(_PLANNED)[0] for line in engine if _PLANNED in line))


def axis_problems(plan: Plan) -> list[str]:
    """Return one line for each degree and option that does not match the plan's strategy."""
    strategy, dims = plan.parsed, plan.dims
    wrong = [
        f"{strategy} has {axis} {getattr(strategy, axis)}, but dims say {axis} {getattr(dims, axis)}"
        for axis in ("pp", "cp", "tp", "ep")
        if getattr(strategy, axis) > 1 and getattr(strategy, axis) != getattr(dims, axis)
    ]
    if plan.gradient_sync == "every" and not strategy.shards_parameters:
        wrong.append(f"{strategy} keeps full gradients: {_NO_EFFECT}")
    if plan.gradient_sync == "every" and strategy.pp > 1:
        wrong.append(f"{strategy} reduces gradients after the last micro batch: {_NO_EFFECT}")
    absent = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(strategy, axis) == 1]
    absent += [] if strategy.shards_parameters else ["dp_shard"]
    absent += ["dp_replicate"] if strategy.base in ("zero2", "fsdp") else []
    found = {axis: getattr(dims, axis) for axis in absent}
    wrong += [f"{strategy} has no {axis} axis, but dims say {axis} {n}" for axis, n in found.items() if n > 1]
    wrong += [problem] if not wrong and (problem := spread_problem(dims)) else []
    if plan.adapter is not None and strategy.adapter == "none":
        wrong.append(f"'adapter' does nothing under {strategy}; name a strategy with +lora or +qlora, or remove it")
    if plan.static_graph and plan.grad_accum > 1:
        wrong.append(
            f"static_graph with grad_accum {plan.grad_accum}: PyTorch's DDP fails on a first backward that does not "
            "reduce; set grad_accum to 1, or leave static_graph out"
        )
    if plan.recompute_layers is not None and plan.recompute == "none":
        wrong.append(LAYERS_IDLE)
    wrong += saved_problems(plan) if plan.offload_activations else []
    wrong += stage_problems(plan) + type_problems(plan)
    wrong += chunk_problems(plan) if plan.loss_chunks > 1 else []
    wrong += in_backward_problems(plan) if plan.optimizer_in_backward else []
    wrong += engine_problems(plan) if strategy.engine == "deepspeed" else []
    return wrong + without_effect(changed(vars(plan)), strategy)


def stage_problems(plan: Plan) -> list[str]:
    """Return why ``stage_blocks`` are not of this plan's stages."""
    given, stages = plan.stage_blocks, plan.dims.pp * plan.virtual_stages
    if given is None or (plan.dims.pp > 1 and len(given) == stages):
        return []
    if plan.dims.pp == 1:
        return ["'stage_blocks' does nothing without +pp; remove it"]
    return [
        f"stage_blocks {list(given)} are {len(given)} stages, but pp {plan.dims.pp} × virtual_stages "
        f"{plan.virtual_stages} = {stages}; give each stage its number of blocks, or remove the key"
    ]


def chunk_problems(plan: Plan) -> list[str]:
    """Return why the requested chunked loss is not possible."""
    strategy, dims, requested = plan.parsed, plan.dims, f"loss_chunks {plan.loss_chunks}"
    fix = "set loss_chunks to 1, or use ddp, zero1, zero2, fsdp or hsdp"
    if plan.objective != "lm":
        return [
            f"{requested} is not for objective {plan.objective}: its trainers take the logits of whole sequences; set "
            "loss_chunks to 1"
        ]
    if strategy.engine != "torch":
        return [f"{requested} is not for {strategy}, whose engine runs the head by itself; {fix}"]
    if max(strategy.tp, dims.tp) > 1:
        return [
            f"{requested}: under {strategy} the head is sharded, and loss_parallel shards the logits with it; {fix}"
        ]
    if max(strategy.pp, dims.pp) > 1:
        return [f"{requested}: under {strategy} the last stage must return its logits; {fix}"]
    return []


def engine_problems(plan: Plan) -> list[str]:
    """Return requests that DeepSpeed handles itself, or does not support."""
    strategy, wrong = plan.parsed, []
    if plan.precision == "fp16":
        full = strategy.base == "zero1" and strategy.offload  # zero1 of PyTorch keeps full parameters, on the device
        base = "zero2" if full else strategy.base
        twin = base + "+offload" * (strategy.offload or strategy.nvme)
        wrong.append(
            f"{strategy} with precision fp16 can be planned but is not run by this version; use precision bf16, or "
            f"strategy {twin}, which runs fp16 on PyTorch"
        )
    if plan.compile:
        wrong.append(f"{strategy} with compile can be planned but is not run by this version; take compile out")
    if plan.prefetch > 1:
        wrong.append(f"{strategy} gathers ahead by elements, not by blocks; take 'prefetch' out")
    if plan.gradient_sync == "every" and plan.program == TYPE_DEFAULTS["program"]:  # else it is a trait of that program
        wrong.append(f"{strategy} reduces gradients as its ZeRO stage does: {_NO_EFFECT}")
    if strategy.nvme and not plan.nvme_path:
        wrong.append(f"{strategy} swaps to a drive: set parallel.nvme_path (nvme_path in a plan) to a folder on it")
    return wrong


def saved_problems(plan: Plan) -> list[str]:
    """Return why what blocks save cannot be kept in host memory, where requested."""
    requested, wrong = "offload_activations = true", []
    if plan.recompute == "selective":
        wrong.append(
            f"{requested} with recompute = 'selective': what that keeps does not pass through autograd's hooks; set "
            "recompute to full or none"
        )
    if plan.compile:
        wrong.append(
            f"{requested} with compile = true: what compiled blocks save is the compiler's choice; leave one out"
        )
    if plan.parsed.engine != "torch":
        wrong.append(
            f"{requested} is not for {plan.parsed}, whose engine gathers weights inside of blocks, where they look "
            "like activations; use fsdp"
        )
    return wrong


def in_backward_problems(plan: Plan) -> list[str]:
    """Return why the optimizer cannot step parameters during the backward, where requested."""
    strategy, dims, requested = plan.parsed, plan.dims, "optimizer_in_backward"
    wrong = []
    if plan.grad_accum > 1:
        wrong.append(f"{requested} steps after one backward, but grad_accum is {plan.grad_accum}; set grad_accum to 1")
    if plan.precision == "fp16":
        wrong.append(f"{requested} steps before fp16's scaler has seen all gradients; use precision bf16")
    if strategy.engine != "torch":
        wrong.append(f"{requested} is not for {strategy}, whose engine steps by itself; use zero2, fsdp or hsdp")
    elif dims.tp * dims.pp > 1 or strategy.tp * strategy.pp > 1:
        wrong.append(
            f"{requested}: under {strategy} gradients are final only after the backward; use zero2, fsdp or hsdp"
        )
    elif strategy.base == "zero1":
        wrong.append(
            f"{requested}: under zero1 ranks send each other full parameters after the step; use zero2 or fsdp"
        )
    elif not strategy.shards_parameters and dims.dp * dims.cp > 1:
        wrong.append(f"{requested}: under {strategy} ranks reduce gradients in buckets, later; use zero2, fsdp or hsdp")
    return wrong


def plan_problems(error: ValidationError) -> list[str]:
    """Return one line for each problem in a plan document."""
    lines = []
    for item in error.errors():
        *above, name = [str(part) for part in item["loc"]] or ["the document"]
        where, rule = ".".join([*above, name]), item["msg"].replace("Input should", "must")
        if item["type"] == "extra_forbidden":
            known = ParallelDims.model_fields if above else ["schema", *Plan.model_fields]
            lines.append(f"{where}: no such key{did_you_mean(name, known)}")
        elif item["type"] == "value_error":
            lines.append(f"{where}: {item['ctx']['error']}")
        elif item["type"] == "model_type":
            lines.append(f"{where}: must be a table, got {item['input']!r}")
        else:
            lines.append(f"{where}: {rule}, got {item['input']!r}")
    return lines


def split_batch(
    dp: int, *, global_batch: int | None, micro_batch: int | None, grad_accum: int | None
) -> tuple[int, int]:
    """Solve ``global = micro × accumulation × dp``; return (micro, accumulation).

    With only a global batch the micro batch is a rank's full share. By default it is one sample.

    Raises:
        PlanError: no integers solve it; the message names the nearest global batches that do.
    """
    if global_batch is None:
        return micro_batch or 1, grad_accum or 1
    divisor = dp * (micro_batch or 1) * (grad_accum or 1)
    if global_batch % divisor or global_batch < divisor:
        factors = [f"dp {dp}"]
        factors += [f"micro batch {micro_batch}"] if micro_batch else []
        factors += [f"accumulation {grad_accum}"] if grad_accum else []
        below, above = global_batch // divisor * divisor, (global_batch // divisor + 1) * divisor
        nearest = f"{below} or {above}" if below else str(above)
        equation = " × ".join(factors) + (f" = {divisor}" if len(factors) > 1 else "")
        raise PlanError(
            f"global batch {global_batch} is not a multiple of {equation}; set train.global_batch to {nearest}"
        )
    share = global_batch // dp
    if micro_batch and grad_accum:
        if micro_batch * grad_accum != share:
            raise PlanError(
                f"global batch {global_batch} is not micro batch {micro_batch} × accumulation {grad_accum} × dp {dp} "
                f"= {micro_batch * grad_accum * dp}; leave one of the three out"
            )
        return micro_batch, grad_accum
    if micro_batch:
        return micro_batch, share // micro_batch
    if grad_accum:
        return share // grad_accum, grad_accum
    return share, 1
