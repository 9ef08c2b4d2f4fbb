"""`ParallelOptions` and `StepOptions`: each option of a plan, declared once.

A declaration has the type, the default, the help text, the requirements of the option, the key of the config
file that sets it and the line of the receipt that shows it. The ``[parallel]`` table, `Plan`, the pins of a search and
the receipts read the declaration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from shardwise.plan.strategy import Strategy

GradientSync = Literal["last", "every"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]
Requirement = Literal[
    "+tp", "+pp", "+nvme", "sharded parameters (zero2, fsdp, hsdp)", "full parameters (ddp, zero1; not with +tp or +pp)"
]
SHARDED_PARAMETERS: Requirement = "sharded parameters (zero2, fsdp, hsdp)"
FULL_PARAMETERS: Requirement = "full parameters (ddp, zero1; not with +tp or +pp)"


@dataclass(frozen=True)
class OptionSpec:
    """Facts of an option besides its type, default and help.

    ``requires`` is what a strategy must have for the option to have an effect, ``receipt`` the line that shows it in
    the effects receipt, ``config`` the key of a config file (``parallel.NAME`` by default), and ``computes`` is false
    for an option that changes the placement of tensors and not the result: it is not part of a plan's fingerprint.
    ``in_train`` is the default where the loss is the one of ``train``; a custom loop's loss may not be able to do it.
    """

    receipt: str
    requires: Requirement | None = None
    config: str | None = None
    computes: bool = True
    in_train: Any = None


class ParallelOptions(BaseModel):
    """Options of ``[parallel]``: how the axes of a strategy are run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence_parallel: Annotated[bool, OptionSpec("sequence parallel", "+tp")] = Field(
        True, description="+tp: shard activations between its regions along the sequence"
    )
    loss_parallel: Annotated[bool, OptionSpec("loss parallel", "+tp", in_train=True)] = Field(
        False,
        description="+tp: logits stay sharded over the vocabulary up to the loss, which must take them so",
    )
    tp_styles: Annotated[dict[str, str], OptionSpec("parameters held", "+tp")] = Field(
        default_factory=dict,
        description="+tp: patterns of linear layers to colwise, rowwise or replicate; found automatically if left out",
    )
    async_tp: Annotated[bool, OptionSpec("async tensor parallel", "+tp")] = Field(
        False, description="+tp: overlap its collectives with matrix products (compiled, on GPUs)"
    )
    pipeline_schedule: Annotated[PipelineSchedule, OptionSpec("pipeline schedule", "+pp")] = Field(
        "1f1b", description="+pp: the order of micro batches"
    )
    virtual_stages: Annotated[int, Field(ge=1, le=2**16), OptionSpec("stages here", "+pp")] = Field(
        1, description="+pp: stages of a rank; what the schedule needs if left out"
    )
    recompute_layers: Annotated[int | None, Field(ge=1, le=2**16), OptionSpec("blocks recomputed")] = Field(
        None, description="recompute: only the first so many blocks, of each pipeline stage; all, if left out or `all`"
    )
    offload_activations: Annotated[bool, OptionSpec("activations offloaded")] = Field(
        False, description="keep what blocks save for the backward in host memory; with recompute full their inputs"
    )
    compile: Annotated[bool, OptionSpec("blocks compiled")] = Field(False, description="torch.compile on each block")
    prefetch: Annotated[int, Field(ge=1, le=2**16), OptionSpec("blocks gathered ahead", SHARDED_PARAMETERS)] = Field(
        1, description="blocks ahead of which sharded weights are gathered"
    )
    find_unused_parameters: Annotated[bool, OptionSpec("unused parameters looked for", FULL_PARAMETERS)] = Field(
        False,
        description="ddp, zero1: DDP looks in each forward for parameters without a gradient; not needed for them",
    )
    static_graph: Annotated[bool, OptionSpec("static graph", FULL_PARAMETERS)] = Field(
        False, description="ddp, zero1: DDP takes it that each step uses the same parameters, as often"
    )
    bucket_cap_mb: Annotated[int | None, Field(ge=1, le=2**16), OptionSpec("largest bucket", FULL_PARAMETERS)] = Field(
        None, description="ddp, zero1: MiB of gradients that DDP reduces together; 25, and 1 in the first, if left out"
    )
    nvme_path: Annotated[str | None, OptionSpec("swapped to NVMe", "+nvme", computes=False)] = Field(
        None, description="+nvme: folder on the drive that weights and states are swapped to"
    )

    def options_for(self, strategy: Strategy) -> dict[str, Any]:
        """Return the options with an effect under a strategy, by name.

        Virtual stages are as the schedule needs them.
        """
        found = {name: getattr(self, name) for name in ParallelOptions.model_fields if has_effect(name, strategy)}
        return found | ({"virtual_stages": self.stages_per_rank} if "virtual_stages" in found else {})

    @property
    def stages_per_rank(self) -> int:
        """``virtual_stages``, or the schedule's default."""
        given = "virtual_stages" in self.model_fields_set
        return self.virtual_stages if given else stages_of(self.pipeline_schedule)


class StepOptions(BaseModel):
    """Options of a step's gradients and loss, set by other config tables or by the search."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gradient_sync: Annotated[GradientSync, OptionSpec("reduce_scatter per step", config="")] = Field(
        "last", description="reduce sharded gradients after the last micro batch or after every one"
    )
    loss_chunks: Annotated[int, Field(ge=1, le=2**16), OptionSpec("logits at once", config="train.loss_chunks")] = (
        Field(1, description="chunks in which a micro batch's logits are computed, one at a time")
    )
    optimizer_in_backward: Annotated[bool, OptionSpec("stepped during backward", config="optimizer.in_backward")] = (
        Field(False, description="step each parameter as soon as its gradient is final, and free the gradient")
    )


def stages_of(schedule: PipelineSchedule) -> int:
    """Return the minimum number of pipeline stages per rank of a schedule."""
    return 1 if schedule in ("gpipe", "1f1b") else 2


def _declared(model: type[BaseModel]) -> dict[str, tuple[FieldInfo, OptionSpec]]:
    return {
        name: (field, next(item for item in field.metadata if isinstance(item, OptionSpec)))
        for name, field in model.model_fields.items()
    }


_DECLARED = _declared(ParallelOptions) | _declared(StepOptions)
OPTION_SPECS: dict[str, OptionSpec] = {name: spec for name, (_, spec) in _DECLARED.items()}
OPTION_DEFAULTS: dict[str, Any] = {
    name: field.get_default(call_default_factory=True) for name, (field, _) in _DECLARED.items()
}
TRAIN_DEFAULTS: dict[str, Any] = {
    name: default if spec.in_train is None else spec.in_train
    for (name, default), spec in zip(OPTION_DEFAULTS.items(), OPTION_SPECS.values(), strict=True)
}
"""Defaults of a plan for ``train``, and so of the planner."""
CONFIG_KEYS: dict[str, str] = {
    name: spec.config or f"parallel.{name}" for name, spec in OPTION_SPECS.items() if spec.config != ""
}
"""Options that a config file sets → their keys there."""


def has_effect(name: str, strategy: Strategy) -> bool:
    """Return whether an option has an effect under a strategy."""
    match OPTION_SPECS[name].requires:
        case "+tp":
            return strategy.tp > 1
        case "+pp":
            return strategy.pp > 1
        case "+nvme":
            return strategy.nvme
        case None:
            return True
        case _ if OPTION_SPECS[name].requires == SHARDED_PARAMETERS:
            return strategy.shards_parameters
        case _:
            full = strategy.engine == "torch" and not strategy.shards_parameters
            return full and strategy.tp == strategy.pp == 1


def without_effect(given: Iterable[str], strategy: Strategy) -> list[str]:
    """Return one line for each option of ``given`` without effect under a strategy."""
    return [
        f"'{name}' does nothing without {OPTION_SPECS[name].requires}; remove it"
        for name in given
        if not has_effect(name, strategy)
    ]


def changed(values: Mapping[str, Any]) -> list[str]:
    """Return the options among ``values`` that differ from their defaults."""
    return [name for name, default in OPTION_DEFAULTS.items() if values.get(name, default) != default]


def option_field(name: str) -> Any:
    """Build the config field of an option: its default in ``train``, and its help."""
    return Field(TRAIN_DEFAULTS[name], description=_DECLARED[name][0].description)
