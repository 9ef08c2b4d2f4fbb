"""`Plan`: the decision, frozen, with a fingerprint. The only thing that crosses a process border."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.document import read_json, read_toml
from shardwise.errors import PlanError, did_you_mean
from shardwise.plan.dims import ParallelDims
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.strategy import Strategy, parse_strategy, runnable_strategy

RunPrecision = Literal["fp32", "bf16", "fp16"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]  # fp8 matrix products are planned, not run
Recompute = Literal["none", "selective", "full"]
GradientSync = Literal["last", "every"]
DeviceType = Literal["cpu", "cuda"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]

# came later than the first plans did: left out of the fingerprint where they are as those plans were run
_LATER: dict[str, object] = {
    "gradient_sync": "last",
    "sequence_parallel": True,
    "loss_parallel": False,
    "pipeline_schedule": "1f1b",
    "virtual_stages": 1,
    "compile": False,
    "async_tp": False,
    "tp_styles": {},
    "prefetch": 1,
    "loss_chunks": 1,
    "adapter": None,
    "optimizer_in_backward": False,
}


def stages_of(schedule: PipelineSchedule) -> int:
    """Pipeline stages of a rank that a schedule needs at least."""
    return 1 if schedule in ("gpipe", "1f1b") else 2


_NO_EFFECT = "gradient_sync = 'every' has no effect; remove it"


class Plan(BaseModel):
    """How one global batch is computed: the strategy, the degrees, the batch split, the precision.

    ``micro_batch`` and ``global_batch`` count samples; ``seq_len`` counts tokens (``None`` where samples are
    no sequences). ``gradient_sync`` is for sharded strategies that accumulate: ``last`` reduces gradients after the
    last micro batch only and keeps whole ones until then, ``every`` reduces after each and keeps shards: more
    traffic, no whole gradient in memory.

    With tensor parallel, ``sequence_parallel`` cuts what lies between its regions along the sequence, ``loss_parallel``
    leaves logits cut over the vocabulary (the loss must know how to take them), ``tp_styles`` names how linear layers
    are cut (pattern of names to ``colwise``, ``rowwise``, ``replicate``; found by itself if empty), and ``async_tp``
    overlaps its collectives with matrix products (compiled, on GPUs). With pipeline parallel, ``pipeline_schedule``
    names the order of micro batches and ``virtual_stages`` the stages of each rank. ``compile`` runs ``torch.compile``
    on each block, and ``prefetch`` is how many blocks ahead sharded weights are gathered. ``loss_chunks`` is
    how many parts a micro batch's logits are made in, never more than one at once. ``optimizer_in_backward``
    steps each parameter as soon as its gradient is final, and frees the gradient. ``nvme_path`` is the folder on
    the drive that ``+nvme`` swaps to, and ``reason`` says why this plan was chosen: neither is part of the fingerprint.
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
    gradient_sync: GradientSync = "last"
    sequence_parallel: bool = True
    loss_parallel: bool = False
    pipeline_schedule: PipelineSchedule = "1f1b"
    virtual_stages: int = Field(default=1, ge=1)
    compile: bool = False
    async_tp: bool = False
    tp_styles: dict[str, str] = {}
    prefetch: int = Field(default=1, ge=1)
    loss_chunks: int = Field(default=1, ge=1)
    optimizer_in_backward: bool = False
    adapter: AdapterOptions | None = None
    device: DeviceType = "cpu"
    nvme_path: str | None = None
    reason: str = ""

    @property
    def parsed(self) -> Strategy:
        """The strategy string, read."""
        return parse_strategy(self.strategy)

    @property
    def global_batch(self) -> int | None:
        """Samples per optimizer step; ``None`` where the loader decides the micro batch."""
        return None if self.micro_batch is None else self.micro_batch * self.grad_accum * self.dims.dp

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits over everything that changes what is computed."""
        facts = self.model_dump(mode="json", by_alias=True, exclude={"reason", "nvme_path"})
        facts["strategy"] = str(self.parsed)  # zero3 and fsdp are one thing
        facts = {key: value for key, value in facts.items() if key not in _LATER or value != _LATER[key]}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def syncs_every_micro_batch(self) -> bool:
        """True where gradients are reduced, and kept as shards, after every micro batch of several."""
        return self.gradient_sync == "every" and self.grad_accum > 1 and self.parsed.shards_parameters

    def batch_equation(self) -> str:
        """``global batch 16 = micro batch 4 × accumulation 2 × dp 2``, with tokens where they are known."""
        left = "?" if self.global_batch is None else str(self.global_batch)
        micro = "the loader's" if self.micro_batch is None else str(self.micro_batch)
        text = f"global batch {left} = micro batch {micro} × accumulation {self.grad_accum} × dp {self.dims.dp}"
        if self.global_batch is not None and self.seq_len is not None:
            text += f"  ({self.global_batch} × {self.seq_len} = {self.global_batch * self.seq_len} tokens a step)"
        return text

    def to_toml(self) -> str:
        """The plan as a TOML document; `read_plan` reads it back."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return self.model_dump_json(by_alias=True)


def read_plan(path: Path) -> Plan:
    """Read a plan from a TOML or JSON file.

    Raises:
        PlanError: the file is missing, is not TOML or JSON, or holds something that is no plan.
    """
    try:
        data = read_json(path) if path.suffix == ".json" else read_toml(path)
    except OSError as error:
        raise PlanError(f"plan '{path}': {error.strerror or error}; give the path of a plan file") from None
    except ValueError as error:
        raise PlanError(f"plan '{path}' is not readable: {error}") from None
    if isinstance(data, dict):
        data.pop("question", None)  # what ``shardwise plan`` was asked, kept beside its answer for ``explain``
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
    """``plan`` itself.

    Raises:
        PlanError: this version plans it but does not run it, or it contradicts itself.
    """
    runnable_strategy(plan.strategy)
    if problems := axis_problems(plan):
        raise PlanError(*problems)
    if plan.precision == "fp8":
        raise PlanError("precision fp8 can be planned but is not run by this version; use bf16")
    return plan


def axis_problems(plan: Plan) -> list[str]:
    """One line for each degree and option of a plan that does not go with its strategy."""
    strategy, dims = plan.parsed, plan.dims
    wrong = [
        f"{strategy} has {axis} {getattr(strategy, axis)}, but dims say {axis} {getattr(dims, axis)}"
        for axis in ("pp", "cp", "tp")
        if getattr(strategy, axis) > 1 and getattr(strategy, axis) != getattr(dims, axis)
    ]
    if plan.gradient_sync == "every" and not strategy.shards_parameters:
        wrong.append(f"{strategy} keeps full gradients: {_NO_EFFECT}")
    if plan.gradient_sync == "every" and strategy.pp > 1:
        wrong.append(f"{strategy} reduces gradients after the last micro batch: {_NO_EFFECT}")
    absent = [axis for axis in ("pp", "cp", "tp") if getattr(strategy, axis) == 1]
    absent += [] if strategy.shards_parameters else ["dp_shard"]
    absent += ["dp_replicate"] if strategy.base in ("zero2", "fsdp") else []
    found = {axis: getattr(dims, axis) for axis in absent}
    wrong += [f"{strategy} has no {axis} axis, but dims say {axis} {n}" for axis, n in found.items() if n > 1]
    needs = dict.fromkeys(("loss_parallel", "sequence_parallel", "tp_styles", "async_tp"), ("+tp", strategy.tp > 1))
    needs |= dict.fromkeys(("pipeline_schedule", "virtual_stages"), ("+pp", strategy.pp > 1))
    needs["prefetch"] = ("sharded parameters (zero2, fsdp, hsdp)", strategy.shards_parameters)
    moot = [key for key, (_, there) in needs.items() if not there and getattr(plan, key) != _LATER[key]]
    if plan.adapter is not None and strategy.adapter == "none":
        wrong.append(f"'adapter' does nothing under {strategy}; name a strategy with +lora or +qlora, or take it out")
    wrong += chunk_problems(plan) if plan.loss_chunks > 1 else []
    wrong += in_backward_problems(plan) if plan.optimizer_in_backward else []
    wrong += engine_problems(plan) if strategy.engine == "deepspeed" else []
    return wrong + [f"'{key}' does nothing without {needs[key][0]}; take it out" for key in moot]


def chunk_problems(plan: Plan) -> list[str]:
    """Why the loss cannot be computed in chunks, where it is asked to."""
    strategy, dims, asked = plan.parsed, plan.dims, f"loss_chunks {plan.loss_chunks}"
    fix = "set loss_chunks to 1, or use ddp, zero1, zero2, fsdp or hsdp"
    if strategy.engine != "torch":
        return [f"{asked} is not for {strategy}, whose engine runs the head by itself; {fix}"]
    if max(strategy.tp, dims.tp) > 1:
        return [f"{asked}: under {strategy} the head is cut, and loss_parallel cuts the logits with it; {fix}"]
    if max(strategy.pp, dims.pp) > 1:
        return [f"{asked}: under {strategy} the last stage must return its logits; {fix}"]
    return []


def engine_problems(plan: Plan) -> list[str]:
    """What DeepSpeed does by itself, or not at all, and a plan asks for otherwise."""
    strategy, wrong = plan.parsed, []
    if plan.precision == "fp16":
        wrong.append(f"{strategy} with precision fp16 can be planned but is not run by this version; use bf16")
    if plan.compile:
        wrong.append(f"{strategy} with compile can be planned but is not run by this version; take compile out")
    if plan.prefetch > 1:
        wrong.append(f"{strategy} gathers ahead by elements, not by blocks; take 'prefetch' out")
    if plan.gradient_sync == "every":
        wrong.append(f"{strategy} reduces gradients as its ZeRO stage does: {_NO_EFFECT}")
    if strategy.nvme and not plan.nvme_path:
        wrong.append(f"{strategy} swaps to a drive: set parallel.nvme_path (nvme_path in a plan) to a folder on it")
    if not strategy.nvme and plan.nvme_path:
        wrong.append("'nvme_path' does nothing without +nvme; take it out")
    return wrong


def in_backward_problems(plan: Plan) -> list[str]:
    """Why the optimizer cannot step each parameter during the backward, where it is asked to."""
    strategy, dims, asked = plan.parsed, plan.dims, "optimizer_in_backward"
    wrong = []
    if plan.grad_accum > 1:
        wrong.append(f"{asked} steps after one backward, but grad_accum is {plan.grad_accum}; set grad_accum to 1")
    if plan.precision == "fp16":
        wrong.append(f"{asked} steps before fp16's scaler has seen all gradients; use precision bf16")
    if strategy.engine != "torch":
        wrong.append(f"{asked} is not for {strategy}, whose engine steps by itself; use zero2, fsdp or hsdp")
    elif dims.tp * dims.pp > 1 or strategy.tp * strategy.pp > 1:
        wrong.append(f"{asked}: under {strategy} gradients are final only after the backward; use zero2, fsdp or hsdp")
    elif strategy.base == "zero1":
        wrong.append(f"{asked}: under zero1 ranks send each other whole parameters after the step; use zero2 or fsdp")
    elif not strategy.shards_parameters and dims.dp * dims.cp > 1:
        wrong.append(f"{asked}: under {strategy} ranks reduce gradients in buckets, later; use zero2, fsdp or hsdp")
    return wrong


def plan_problems(error: ValidationError) -> list[str]:
    """One line for each thing that is wrong in a plan document."""
    lines = []
    for item in error.errors():
        *above, name = [str(part) for part in item["loc"]] or ["the document"]
        where, rule = ".".join([*above, name]), item["msg"].replace("Input should", "must")
        if item["type"] == "extra_forbidden":
            known = ParallelDims.model_fields if above else ["schema", *Plan.model_fields]
            lines.append(f"{where}: no such key{did_you_mean(name, known)}")
        elif item["type"] == "model_type":
            lines.append(f"{where}: must be a table, got {item['input']!r}")
        else:
            lines.append(f"{where}: {rule}, got {item['input']!r}")
    return lines


def split_batch(
    dp: int, *, global_batch: int | None, micro_batch: int | None, grad_accum: int | None
) -> tuple[int, int]:
    """Solve ``global = micro × accumulation × dp`` for what is not given; returns (micro, accumulation).

    With only a global batch the micro batch is the whole share of a rank. With nothing given it is one sample.

    Raises:
        PlanError: no whole numbers solve it; the message names the nearest global batches that do.
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
