"""`ProgramTraits`: what a training program does that a plan does not say, and the table of known programs.

A plan (strategy, batch, precision, recompute) leaves open how a program stores gradients, which allocator setting it
runs under, how it takes its loss. The cost model reads that from here. The table is ``programs.toml`` beside this
file, with a source for each trait; ``shardwise plan --program`` takes a name of it or a file of the same keys. The
defaults of `ProgramTraits` are this package's own program.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.document import read_toml
from shardwise.errors import PlanError, did_you_mean
from shardwise.plan.fp8_recipes import PlannedRecipe
from shardwise.plan.strategy import Base, Strategy
from shardwise.plan.tensor_types import GradientType, Rounding, WeightType

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Program that runs where an axis shards the model: this package's, Megatron-LM's (also what is planned for ``zero1``
# beside tensor or pipeline parallel, which this version does not run), or torchtitan's, i.e. PyTorch's modules
# with ring attention. In the latter two, embedding and head work on sharded sequences, too.
Framework = Literal["shardwise", "megatron", "torchtitan"]
AttentionKernel = Literal["flash", "cudnn", "flash-1", "unfused"]
Axis = Literal["tp", "pp", "cp", "ep"]
AXES: dict[str, str] = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
OWN = "shardwise"
LONGEST_SHOWN = 80  # characters of a wrong value in a message


class ProgramTraits(BaseModel):
    """Traits of a program; the field descriptions are the documentation of the table."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(OWN, pattern=r"^[^\s\pC]([^\pC]*[^\s\pC])?$")
    # what it can lay out
    bases: tuple[Base, ...] = Field(get_args(Base), min_length=1, description="data-parallel strategies that it has")
    axes: tuple[Axis, ...] = Field(get_args(Axis), description="model-parallel axes that it has")
    modules: Framework | None = Field(
        None, description="whose modules run where an axis shards the model; shardwise's own where left out"
    )
    # memory
    expandable_segments: bool = Field(True, description="PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True")
    weights: WeightType = Field(
        "fp32", description="at rest: fp32; compute (pure bf16); masters (compute, and fp32 masters as state)"
    )
    accumulate: GradientType = Field("fp32", description="type of gradients at rest beside masters")
    reduce: GradientType = Field("fp32", description="type in which gradients are reduced over ranks")
    rounding: Rounding = Field("nearest", description="of updates of weights in the compute type")
    fp8: PlannedRecipe = Field("none", description="torchao's recipe for the products of the blocks")
    zero: Literal["torch", "megatron", "deepspeed"] = Field(
        "torch", description="layout of zero1 and zero2: by parameter, one flat buffer, or DeepSpeed's partitions"
    )
    bucket_elements: int = Field(
        0, ge=0, le=2**40, description="elements of the communication buffers of reduced gradients"
    )
    flat_parameters: bool = Field(False, description="FSDP1: a block is one flat parameter with one gradient")
    adds_in_buckets: bool = Field(
        False, description="gradients of micro batches are added in the buckets, not in a second copy (no_sync)"
    )
    gradient_sync: Literal["last", "every"] | None = Field(
        None, description="when sharded gradients are reduced; what is faster and fits where left out"
    )
    loss: Literal["plain", "fused", "compiled"] = Field(
        "plain", description="fused: never widens the logits to fp32; compiled: fused where blocks are compiled"
    )
    logit_bytes: float | None = Field(
        None, ge=0, le=2**10, description="bytes that live for each logit at the end of the loss's forward"
    )
    fp8_activations: bool = Field(False, description="fp8 products save their inputs in 8 bits for the backward")
    fused_kernels: bool = Field(
        False,
        description="its own kernels fuse memory-bound operations as a compiler would; the host calls each module",
    )
    # adapters
    adapters: GradientType = Field("fp32", description="type of LoRA weights, gradients and state")
    adapter_keeps_inputs: bool = Field(False, description="4-bit layers save their inputs (bitsandbytes < 0.43.2)")
    lora_dropout: bool = Field(False, description="its recipes have dropout in front of adapters")
    # time
    attention: AttentionKernel | None = Field(None, description="attention kernel")
    sequence_parallel: bool | None = Field(None, description="beside +tp; the plan's where left out")
    async_tp: bool | None = Field(None, description="hides tensor-parallel traffic; the plan's where left out")
    pads_vocab: bool = Field(False, description="rounds the vocabulary up to 128 without tensor parallelism, too")
    expert_dispatch: Literal["copies", "ranks"] = Field(
        "copies", description="what is sent of a token: a copy for each of its experts, or one a rank and one a node"
    )
    balanced_experts: bool = Field(
        False, description="its routers are made to load all experts alike, as benchmarks do"
    )
    overlaps_dispatch: bool = Field(
        False, description="hides what experts exchange behind other micro batches' products"
    )
    overlaps_zero1: bool = Field(False, description="zero1's weights are gathered behind the next forward")
    host: float = Field(
        1.0, gt=0, le=1e6, description="host time of an operation, in that of eager PyTorch with autocast"
    )

    @property
    def is_own(self) -> bool:
        """Return whether this is this package's program, with the types of another run or not."""
        return self.name == OWN

    def refuses(self, strategy: Strategy) -> str:
        """Return why the program does not run ``strategy``; empty if it does."""
        if strategy.engine == "deepspeed" and self.name not in (OWN, "deepspeed"):
            return f"--program {self.name} is not counted on DeepSpeed; take --program deepspeed"
        if strategy.base not in self.bases:
            return f"--program {self.name} has no {strategy.base}; it has {', '.join(self.bases)}"
        for axis in AXES:
            degree = getattr(strategy, axis)
            if degree > 1 and axis not in self.axes:
                has = " and ".join(f"+{one}" for one in self.axes) or "no model-parallel axis"
                return f"--program {self.name} has no {AXES[axis]} parallelism (+{axis}{degree}); it has {has}"
        return ""

    @property
    def plan_options(self) -> dict[str, bool]:
        """Options of a plan's axes that the program decides."""
        given = {"sequence_parallel": self.sequence_parallel, "async_tp": self.async_tp}
        return {name: value for name, value in given.items() if value is not None}


SHARDWISE = ProgramTraits()
# pydantic's names of types, in the words of TOML
_MUST_BE = {
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "string_pattern_mismatch": "must be a text of one line, without blanks at its ends",
    "string_type": "must be a text",
    "too_short": f"must have one at least of {', '.join(get_args(Base))}",
    "tuple_type": "must be a list",
}
# traits that are without effect where the condition does not hold, and what they are of
_NEEDS: tuple[tuple[tuple[str, ...], Callable[[ProgramTraits], bool], str], ...] = (
    (
        ("accumulate",),
        lambda one: one.weights == "masters",
        "is of weights = 'masters'; other gradients have their weights' type",
    ),
    (("rounding",), lambda one: one.weights == "compute", "is of weights = 'compute'; leave it out"),
    (("overlaps_zero1",), lambda one: "zero1" in one.bases, "is of zero1, which bases leave out"),
    (
        ("expert_dispatch", "overlaps_dispatch", "balanced_experts"),
        lambda one: "ep" in one.axes,
        "is of experts over ranks, which axes leave out",
    ),
    (
        ("sequence_parallel", "async_tp"),
        lambda one: "tp" in one.axes,
        "is of tensor parallelism, which axes leave out",
    ),
)


@lru_cache(maxsize=1)
def program_table() -> dict[str, dict[str, Any]]:
    """Rows of ``programs.toml`` by name, each with its ``about`` and ``sources``."""
    table: dict[str, dict[str, Any]] = tomllib.loads(
        files("shardwise.plan").joinpath("programs.toml").read_text(encoding="utf-8")
    )
    return table


def program_names() -> tuple[str, ...]:
    """Names that ``--program`` takes, beside a file."""
    return tuple(program_table())


def find_program(text: str) -> ProgramTraits:
    """Return the traits of a named program, or of a TOML file of them.

    Raises:
        PlanError: no such program or file, or the file has unknown keys or wrong values.
    """
    if text in program_table():
        return _named(text)
    if not text.lower().endswith(".toml"):
        names = program_names()
        raise PlanError(
            f"--program '{text}' must be one of {', '.join(names)}, or a TOML file of traits{did_you_mean(text, names)}"
        )
    path = Path(text)
    try:
        data = read_toml(path)
    except OSError as error:
        raise PlanError(f"--program '{text}': {error.strerror or error}; give a program's name or its file") from None
    except ValueError as error:
        raise PlanError(f"--program '{text}' is not readable: {error}") from None
    return _of_file(text, data, path.stem)


@lru_cache(maxsize=64)
def _named(name: str) -> ProgramTraits:
    row = program_table()[name]
    base = _named(row["base"]).model_dump() if "base" in row else {}
    own = {key: value for key, value in row.items() if key not in ("about", "sources", "base")}
    return ProgramTraits.model_validate(base | own | {"name": name})


def _of_file(text: str, data: Mapping[str, Any], stem: str) -> ProgramTraits:
    """Return the traits of a user's file; ``base`` names the program that it starts from."""
    data = dict(data)
    data.pop("about", None)
    data.pop("sources", None)
    start, known = data.pop("base", OWN), tuple(ProgramTraits.model_fields)
    problems = []
    if not isinstance(start, str) or start not in program_table():
        hint = did_you_mean(start, program_names()) if isinstance(start, str) else ""
        problems.append(f"base = {_shown(start)} must be one of {', '.join(program_names())}{hint}")
        start = OWN
    problems += [
        f"'{key}' is not a trait{did_you_mean(key, known)}; docs/programs.md lists them"
        for key in data
        if key not in known
    ]
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items() if key in known}
    stem = " ".join(stem.split())
    named = given.setdefault("name", stem if stem != OWN else f"{stem}.toml")
    if isinstance(named, str) and named in program_table():
        problems.append(f"name = '{named}' is a known program's; give the file's program another name")
    try:
        traits = ProgramTraits.model_validate(_named(start).model_dump() | given, strict=True)
    except ValidationError as error:
        problems += [_wrong(given, one) for one in error.errors()]
    else:
        problems += _contradictions(traits, given)
        traits = _without_idle(traits)
    if problems:
        raise PlanError(*(f"--program '{text}': {problem}" for problem in problems))
    return traits


def _wrong(given: Mapping[str, Any], error: ErrorDetails) -> str:
    """Return what is wrong with a key, and its rule."""
    key, *inside = error["loc"]
    rule = _MUST_BE.get(error["type"], error["msg"].replace("Input should be", "must be"))
    of = f": {_shown(error['input'])}" if inside else ""  # which of a list
    return f"{key} = {_shown(given[str(key)])}{of} {rule}"


def _shown(value: object) -> str:
    """Return a value of a file in a few words."""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _idle(traits: ProgramTraits) -> Iterator[tuple[str, str]]:
    """Yield traits that have no effect beside the others, and why."""
    for names, holds, why in _NEEDS:
        for name in () if holds(traits) else names:
            if getattr(traits, name) != getattr(SHARDWISE, name):
                yield name, why


def _contradictions(traits: ProgramTraits, given: Mapping[str, Any]) -> list[str]:
    """Return the traits of ``given`` that have no effect beside the others; inherited ones are not the file's."""
    return [f"{name} = {_shown(getattr(traits, name))} {why}" for name, why in _idle(traits) if name in given]


def _without_idle(traits: ProgramTraits) -> ProgramTraits:
    """Return the traits with those that lost their meaning as in this package's program."""
    return traits.model_copy(update={name: getattr(SHARDWISE, name) for name, _ in _idle(traits)})
