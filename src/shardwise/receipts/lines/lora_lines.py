"""Receipt lines on adapters: adapted layers, frozen parameters, and the quantized base."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.cost.memory.estimate_memory import local_elements
from shardwise.measure import state
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name, dtype_name
from shardwise.parallel.lora.adapters import NAME, Adapters, adapted_layers, adapters_of
from shardwise.parallel.precision import DTYPES
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan
from shardwise.receipts.expected_part import shard_rank, used_spec
from shardwise.receipts.receipt import Line
from shardwise.train.session import Session
from shardwise.units import bytes_text

_PARTS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.")


def adapter_lines(session: Session) -> Iterator[Line]:
    """Yield the lines that this rank can check alone; none if plan and module have no adapters."""
    plan, module = session.plan, session.module
    found = adapters_of(module)
    if plan.parsed.adapter == "none" and found is None:
        return
    layers = adapted_layers(module)
    planned = _planned_text(plan.adapter or AdapterOptions(), () if found is None else found.targets)
    yield _same("adapters", planned, _found_text(layers))
    in_full = () if found is None else found.in_full
    yield from _base_lines(plan, module, in_full)
    if in_full:
        trained = [clean_name(n) for n, p in module.named_parameters() if p.requires_grad and clean_name(n) in in_full]
        there = [clean_name(n) for n, _ in module.named_parameters() if clean_name(n) in in_full]
        yield _same("modules trained in full", ", ".join(there), ", ".join(trained) or "none")
    if plan.parsed.adapter == "qlora" and found is not None:
        yield from _packed_lines(session, used_spec(session), found)


def _planned_text(options: AdapterOptions, targets: tuple[str, ...]) -> str:
    return _text(len(targets), {options.rank}, {options.scale}, {options.dropout}, {options.dora})


def _found_text(layers: dict[str, nn.Module]) -> str:
    ranks, scales, dropouts, doras = set(), set(), set(), set()
    for layer in layers.values():
        local: Any = layer
        ranks |= {local.lora_A[NAME].weight.shape[0], local.lora_B[NAME].weight.shape[1]}
        scales.add(local.scaling[NAME])
        dropouts.add(getattr(local.lora_dropout[NAME], "p", 0.0))
        doras.add(NAME in local.lora_magnitude_vector)
    active = [local for local in layers.values() if not getattr(local, "disable_adapters", False)]
    return _text(len(active), ranks, scales, dropouts, doras)


def _text(number: int, ranks: set[int], scales: set[float], dropouts: set[float], doras: set[bool]) -> str:
    text = f"{number} layers, rank {_joined(ranks)}, scale {_joined(scales)}, dropout {_joined(dropouts)}"
    return f"{text}, DoRA" if doras == {True} else text


def _joined(values: set[Any]) -> str:
    return "/".join(f"{value:.4g}" for value in sorted(values)) or "none"


def _base_lines(plan: Plan, module: nn.Module, in_full: Collection[str]) -> Iterator[Line]:
    """Check that the base is frozen and stored in the compute dtype.

    Quantized weights are separate.
    """
    named = {clean_name(name): p for name, p in module.named_parameters()}
    base = [p for name, p in named.items() if name not in in_full and not any(part in name for part in _PARTS)]
    trained = sum(p.requires_grad for p in base)
    kept = [p for p in base if p.is_floating_point()]
    found = f"{state.dtypes(kept)}, {trained} trained"
    planned = state.dtypes(kept) if plan.precision == "fp32" else dtype_name(DTYPES[plan.precision])
    yield _same("base weights", f"{planned}, 0 trained", found)


def _packed_lines(session: Session, spec: ModelSpec, adapters: Adapters) -> Iterator[Line]:
    """Count the bytes of local 4-bit weights, and of their scales, which every rank has in full."""
    from shardwise.parallel.lora.quantize import packing_layers

    names = {f"{name}.weight" for name in adapters.packed}
    full = sum(p.num_elements for p in spec.parameters if p.name in names)
    rank = shard_rank(session)
    planned = sum(local_elements(p, session.plan, rank) for p in spec.parameters if p.name in names)
    here, kinds = 0, set()
    for layer in packing_layers(session.module):
        weight = layer.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        here += local.nbytes if layer.quant_state is not None else 0
        state_of = layer.quant_state
        kinds.add("not packed" if state_of is None else _packing_text(state_of.quant_type, state_of.nested))
    options = session.plan.adapter or AdapterOptions()
    kind = _packing_text(options.quant_type, options.double_quant)

    def text(number: int, kind: str) -> str:
        return f"{number} bytes of {full} ({number / max(1, full):.1%}, {bytes_text(number)}), {kind}"

    yield _same("packed weights held", text(planned, kind), text(here, "/".join(sorted(kinds))))


def _packing_text(kind: str, nested: bool) -> str:
    return f"{kind}, scales packed" if nested else kind


def _same(name: str, planned: str, found: str) -> Line:
    return Line(name=name, planned=planned, found=found, ok=planned == found)
