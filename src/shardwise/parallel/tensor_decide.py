"""How a model is cut over tensor-parallel ranks: decided on the untouched module, proven on it before ranks start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from shardwise.errors import ModelError
from shardwise.parallel.tensor_check import Check
from shardwise.parallel.tensor_layout import Entry, Held, ModuleCut, Slices, TensorLayout, chunk
from shardwise.parallel.tensor_regions import Depends, Regions, find_regions
from shardwise.plan.plan import Plan
from shardwise.spec.flow import BlockRun, Call, Flow, Product, short_sample
from shardwise.spec.model import ModelSpec


def decide_layout(
    module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any, styles: dict[str, str] | None
) -> TensorLayout:
    """See `tensor.tensor_layout`."""
    args, kwargs = short_sample(sample, plan.dims.tp)
    with Flow(module, spec.blocks) as flow:
        output = flow.run(args, kwargs)
        blocks = {}
        for name, run in flow.runs.items():
            blocks[name] = find_regions(run, flow, plan.dims.tp, None)
            if plan.sequence_parallel:
                add_entries(run, blocks[name])
            problems = blocks[name].problems
            why = None if problems else Check(flow, run, plan.dims.tp, sequence=plan.sequence_parallel).settle(blocks[name])
            if problems or why:
                raise ModelError(*problems, *([f"{name}: {why}"] if why else []))
        head = find_head(flow, output)
        return build(flow, spec, plan, blocks, head)


def add_entries(run: BlockRun, found: Regions) -> None:
    """Gather at the smallest module that holds all readers of one tensor and is given it."""
    prefix = f"{run.name}."
    by_group: dict[int, list[Call]] = {}
    for call in run.calls:
        name = call.product.name.removeprefix(prefix)
        if name in found.groups:
            by_group.setdefault(found.groups[name], []).append(call)
    for group, calls in by_group.items():
        holders = [
            (name.removeprefix(prefix), place)
            for name, place, value in run.arguments
            if value is calls[0].value and all(call.product.name.startswith(f"{name}.") for call in calls)
        ]
        if holders:
            name, place = holders[-1]
            found.entries[name] = (place, group)


def find_head(flow: Flow, output: Any) -> tuple[Product, str | int] | None:
    """The linear layer whose results are the model's output, and where in it."""
    last = next((call for call in reversed(flow.calls) if call.block is None and not call.product.is_lookup), None)
    if last is None:
        return None
    depends = Depends()
    items = output.items() if hasattr(output, "items") else enumerate(output) if isinstance(output, tuple) else [("", output)]
    for place, value in items:
        if isinstance(value, torch.Tensor) and value.shape[-1:] == (last.product.outputs,) and id(last.leaf) in depends(value):
            return last.product, place
    return None


def build(flow: Flow, spec: ModelSpec, plan: Plan, blocks: dict[str, Regions], head: Any) -> TensorLayout:
    """Everything that was found, as data."""
    tp, sequence = plan.dims.tp, plan.sequence_parallel
    canonical = {alias: p.name for p in spec.parameters for alias in (p.name, *p.aliases)}
    shapes = {p.name: p.shape for p in spec.parameters}
    products = {product.name: product for product in flow.products.values()}
    modules: dict[str, ModuleCut] = {}
    entries: dict[str, tuple[Entry, ...]] = {}
    attributes: dict[str, dict[str, int]] = {}
    for block, found in blocks.items():
        gathered = {group for _, group in found.entries.values()}
        for name, uses in found.columns.items():
            product = products[f"{block}.{name}"]
            held = {"weight": column(shapes[canonical[product.weight]], uses, tp, 0 if product.outputs_first else 1)}
            if product.bias is not None:
                held["bias"] = column(shapes[canonical[product.bias]], uses, tp, 0)
            group = found.groups[name]
            modules[product.name] = ModuleCut("colwise", held, "" if group in gathered else f"block:{block}:{group}")
        for name in found.rows:
            product = products[f"{block}.{name}"]
            held = {"weight": Held(dim=1 if product.outputs_first else 0)}
            if product.bias is not None:
                held["bias"] = Held(partial=sequence)
            modules[product.name] = ModuleCut("rowwise", held)
        for name, cut in found.inside.items():
            parent, _, key = f"{block}.{name}".rpartition(".")
            held_one = Held(partial=True) if cut is None else column(shapes[canonical[f"{block}.{name}"]], cut[1], tp, cut[0])
            modules.setdefault(parent, ModuleCut("reads")).held[key] = held_one
        for name, (place, group) in found.entries.items():
            entries[f"{block}.{name}"] = (Entry(place, f"block:{block}:{group}"),)
        for name, changed in found.attributes.items():
            attributes[f"{block}.{name}"] = changed
    vocab, logits = 0, None
    if head is not None:
        product, place = head
        vocab = product.outputs
        kind = "colwise_loss" if plan.loss_parallel else "colwise_gather"
        logits = place if plan.loss_parallel else None
        held = {"weight": Held(dim=0 if product.outputs_first else 1)}
        if product.bias is not None:
            held["bias"] = Held(dim=0)
        modules[product.name] = ModuleCut(kind, held, "head")
        for lookup in flow.products.values():
            if lookup.is_lookup and lookup.inputs == vocab:
                modules[lookup.name] = ModuleCut("embedding", {"weight": Held(dim=0)})
    shard_dim = {}
    for name, cut in modules.items():
        for key, held_one in cut.held.items():
            if held_one.dim is not None:
                shard_dim[canonical[f"{name}.{key}"]] = held_one.dim
    for parameter in spec.parameters:
        for full in (parameter.name, *parameter.aliases):
            parent, _, key = full.rpartition(".")
            cut = modules.get(parent)
            if cut is None or key not in cut.held:
                partial = sequence and parameter.block is not None
                modules.setdefault(parent, ModuleCut("reads")).held[key] = Held(partial=partial, dim=shard_dim.get(parameter.name))
    first, last = (spec.blocks[0], spec.blocks[-1]) if sequence and blocks else ("", "")
    place = next(iter(flow.runs.values())).place if flow.runs else ("args", 0)
    return TensorLayout(
        shard_dim=shard_dim, modules=modules, entries=entries, attributes=attributes,
        first=first, last=last, hidden=place, logits=logits, vocab=vocab,
    )


def column(shape: tuple[int, ...], uses: tuple[Slices, ...], tp: int, dim: int) -> Held:
    """How a parameter is held whose columns the ranks use so; cut plainly where that is what they use."""
    size = shape[dim]
    if size % tp:
        return Held(uses=uses, uses_dim=dim, partial=True)
    if all(used == (chunk(size, tp, rank),) for rank, used in enumerate(uses)):
        return Held(dim=dim)
    return Held(dim=dim, uses=uses, uses_dim=dim)
