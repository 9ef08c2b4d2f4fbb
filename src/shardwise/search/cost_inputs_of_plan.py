"""Convert a plan's `AdapterOptions` to the profile and workload that the cost model reads."""

from __future__ import annotations

from functools import lru_cache

from shardwise.model.facts import itemsize_of
from shardwise.model.profile import ModelProfile
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import DeviceType, Plan, Precision
from shardwise.plan.strategy import Strategy
from shardwise.plan.tensor_types import TYPE_FIELDS
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Pins


def adapted(
    profile: ModelProfile, strategy: Strategy, workload: Workload, precision: Precision, device: DeviceType = "cuda"
) -> ModelProfile:
    """Return the profile with the workload's adapters as this package runs them.

    The base is stored in the compute dtype. Replicated fp32 adapters run under autocast, where each casts its input and
    saves the copy; sharded ones are gathered in low precision and share it.
    """
    from shardwise.model.lora import AdapterFacts, with_adapters

    program = workload.program
    wide = precision == "fp32" or program.adapters == "fp32"
    full = not strategy.shards_parameters and strategy.tp * strategy.pp == 1
    facts = AdapterFacts(
        rank=workload.lora_rank,
        targets=workload.lora_targets,
        double_quant=workload.double_quant,
        dropout=workload.lora_dropout > 0 or program.lora_dropout,
        dora=workload.lora_dora,
        base_bytes=4.0 if precision == "fp32" else 2.0,
        adapter_bytes=4.0 if wide else 2.0,
        copies_inputs=full and precision != "fp32" and wide,
        keeps_inputs=program.adapter_keeps_inputs,
        modules_to_save=workload.modules_to_save,
        mask_bytes=1 if device == "cuda" else itemsize_of(precision),
    )
    return with_adapters(profile, strategy.adapter, facts=facts)


def with_plan(workload: Workload, plan: Plan) -> Workload:
    """Return the workload with the adapters of ``plan``, where it names some, and with its types."""
    types = {name: getattr(plan, name) for name in TYPE_FIELDS}
    if workload.program.model_copy(update=types) != workload.program:
        workload = workload.model_copy(update={"program": workload.program.model_copy(update=types)})
    return workload if plan.adapter is None else with_adapter(workload, plan.adapter)


def with_adapter(workload: Workload, options: AdapterOptions) -> Workload:
    """Return the workload with these adapters."""
    return workload.model_copy(
        update={
            "lora_rank": options.rank,
            "lora_targets": options.targets,
            "lora_dropout": options.dropout,
            "lora_dora": options.dora,
            "double_quant": options.double_quant,
            "modules_to_save": options.modules_to_save,
        }
    )


@lru_cache(maxsize=64)
def _adapter_options(rank: int, targets: tuple[str, ...], dropout: float, dora: bool, double: bool) -> AdapterOptions:
    return AdapterOptions(
        rank=rank, targets=targets or ("all-linear",), dropout=dropout, dora=dora, double_quant=double
    )


def adapter_of(pins: Pins, workload: Workload) -> AdapterOptions:
    """Return the pinned adapters, else the workload's."""
    given = pins.options.get("adapter")
    if isinstance(given, AdapterOptions):
        return given
    made = _adapter_options(
        workload.lora_rank, workload.lora_targets, workload.lora_dropout, workload.lora_dora, workload.double_quant
    )
    return (
        made if not workload.modules_to_save else made.model_copy(update={"modules_to_save": workload.modules_to_save})
    )
