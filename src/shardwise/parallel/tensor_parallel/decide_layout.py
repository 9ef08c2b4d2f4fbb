"""Decide how tensor parallel shards a model, on the untouched module, and verify it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from shardwise.errors import ModelError
from shardwise.model.facts import ModelSpec
from shardwise.model.flow import BlockRun, Call, Flow, short_sample
from shardwise.model.read import clean_name
from shardwise.parallel.tensor_parallel.build_layout import Findings, VocabHead, build
from shardwise.parallel.tensor_parallel.check_block import BlockCheck
from shardwise.parallel.tensor_parallel.regions import Depends, Regions, find_regions
from shardwise.parallel.tensor_parallel.styles import chosen_styles, starred
from shardwise.parallel.tensor_parallel.tensor_layout import TensorLayout, chunk
from shardwise.plan.plan import Plan

LARGE = 4096  # a last layer with at least as many outputs is a vocabulary, whatever the model's inputs


def decide_layout(
    module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any, given: Mapping[str, str] | None
) -> TensorLayout:
    """Decide the layout; see `tensor.tensor_layout`."""
    if not spec.blocks:
        raise ModelError(
            f"{plan.strategy}: tensor parallel shards repeated blocks (a ModuleList, ModuleDict or Sequential with two "
            "or more children of one type), and the model has none; use fsdp"
        )
    problems = _length_problems(plan, sample)
    try:
        return _decided(module, spec, plan, sample, given, problems, torch.float64)
    except _NotRun as error:
        if not isinstance(error.__cause__, RuntimeError):
            raise
        # some operations do not support float64
        return _decided(module, spec, plan, sample, given, problems, torch.float32)


class _NotRun(ModelError):
    """Raised when the model's forward raises."""


def _decided(
    module: nn.Module,
    spec: ModelSpec,
    plan: Plan,
    sample: Any,
    given: Mapping[str, str] | None,
    problems: list[str],
    dtype: torch.dtype,
) -> TensorLayout:
    args, kwargs = short_sample(sample, plan.dims.tp, dtype)
    with Flow(module, spec.blocks, dtype) as flow:
        names = [product.name for product in flow.products.values()]
        styles, is_own = chosen_styles(module, given, names, spec.blocks)
        output = _run(flow, plan, args, kwargs)
        blocks, more = _blocks(flow, plan, styles)
        head, others = _head(flow, spec, plan, output, styles if is_own else None)
        problems = [*problems, *more, *others, *_side_results(flow, plan, output)]
        if head is not None and head.place is not None and not problems:
            problems += _logits_problems(flow, plan, args, kwargs, output, head)
        if problems:
            raise ModelError(*dict.fromkeys(problems))
        external_params = {
            name: tuple(sorted(o for r, o in flow.external_params if r == name)) for name, _ in flow.external_params
        }
        findings = Findings(
            blocks, head, external_params, next(iter(flow.runs.values())).place, _notes(module, spec, blocks)
        )
        return build(flow, spec, plan, findings)


def _run(flow: Flow, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return flow.run(args, kwargs)
    except Exception as error:
        text = " ".join(str(error).split())
        raise _NotRun(
            f"{plan.strategy} traces one short forward of the model, which raised {type(error).__name__}: "
            f"{text[:200]}; pass the model's input for one micro batch: session.prepare(model, optimizer, sample)"
        ) from error


def _side_results(flow: Flow, plan: Plan, output: Any) -> list[str]:
    """List outputs besides the last block's; on each rank they would cover only a part.

    Examples: router logits of experts, attention maps, penalties. The gradient of a loss on them would not be summed.
    """
    depends = Depends()
    inside = tuple(f"{block}." for block in flow.blocks)
    allowed = {id(call.leaf) for call in flow.calls}
    allowed |= {id(p) for name, p in flow.parameters.items() if not name.startswith(inside)}
    allowed |= depends(flow.last) if flow.last is not None else set()
    named = output.items() if isinstance(output, Mapping) else enumerate(_pytree.tree_leaves(output))
    for key, value in named:
        for leaf in _pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and depends(leaf) - allowed:
                return [
                    f"the model gives '{key}', which is computed inside its blocks: under {plan.strategy} each "
                    "rank would compute it from its own shard, and a loss on it would have a wrong gradient; turn "
                    "that output off, or use fsdp"
                ]
    return []


def _length_problems(plan: Plan, sample: Any) -> list[str]:
    """Check the sample length if it is known; otherwise the forward checks it."""
    if not plan.sequence_parallel:
        return []
    leaves = [leaf for leaf in _pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
    ids = next((leaf for leaf in leaves if leaf.ndim == 2 and not leaf.is_floating_point()), None)
    length = plan.seq_len if ids is None else ids.shape[1]
    tp = plan.dims.tp
    # the full sample's length, of which context parallel gives each rank a part
    return [] if length is None else _odd_length(length // plan.dims.cp, tp)


def _odd_length(length: int, tp: int) -> list[str]:
    if length % tp == 0:
        return []
    return [
        f"sequence parallel shards the sequence over tp {tp} ranks, and its length {length} is not a multiple of {tp}; "
        f"make it {-(-length // tp) * tp} or set parallel.sequence_parallel to false"
    ]


def _blocks(flow: Flow, plan: Plan, styles: dict[str, str] | None) -> tuple[dict[str, Regions], list[str]]:
    """Decide how each block is sharded, and list obstacles; identical blocks are inspected once."""
    found: dict[str, Regions] = {}
    tp, sequence = plan.dims.tp, plan.sequence_parallel
    for name, run in flow.runs.items():
        found[name] = found[run.like] if run.like else find_regions(run, flow, tp, styles, sequence=sequence)
    first = {name: run for name, run in flow.runs.items() if not run.like}
    problems = [
        f"{name} runs more than once in one forward, which tensor parallel does not support; use fsdp"
        for name, run in flow.runs.items()
        if run.repeated
    ]
    problems += [problem for name in first for problem in found[name].problems]
    if not problems and not any(regions.columns for regions in found.values()):
        problems.append(
            f"{plan.strategy}: no block of the model has a linear layer whose results go to another one that gives the "
            "block's width back, so there is nothing to shard; use fsdp, or name the layers in tp_styles"
        )
    if sequence and not problems:
        problems += _odd_length(next(iter(first.values())).hidden.shape[1], tp)
        apart = [name for name, run in flow.runs.items() if not run.follows][1:]
        problems += [
            f"{name} is not given what the block before it gives: something else runs between them, and it would see a "
            "part of the sequence; set parallel.sequence_parallel to false"
            for name in apart[:1]
        ]
    for name, run in first.items() if not problems else ():
        mixed = _mixed(flow, run, found[name], tp)
        if sequence:
            _add_entries(run, found[name])
        why = None if mixed else BlockCheck(flow, run, tp, sequence=sequence).materialize_unit(found[name])
        problems += mixed if why is None else [_reason(flow, run, found[name], plan, why)]
    passed = [(a, b) for a, b in sorted(flow.passed) if a in found and found[a].columns]
    problems += [
        f"{first} hands {second} more than hidden states, and each rank would have only a part of it; use fsdp"
        for first, second in passed[:1]
    ]
    sharded = {f"{block}.{name}" for block, regions in found.items() for name in (*regions.columns, *regions.rows)}
    problems += [
        f"{reader} computes with the parameters of {owner}, which tensor parallel shards; call {owner} instead"
        for reader, owner in sorted(flow.external_params)
        if owner in sharded
    ]
    return found, problems


def _add_entries(run: BlockRun, found: Regions) -> None:
    """Gather the sequence at the smallest module with all readers of one tensor.

    A module may use its input's shape for the results of its linear layers.
    """
    prefix = f"{run.name}."
    by_group: dict[int, list[Call]] = {}
    for call in run.calls:
        group = found.groups.get(call.product.name.removeprefix(prefix))
        if group is not None:
            by_group.setdefault(group, []).append(call)
    for group, calls in by_group.items():
        local = [name for name, _, value in run.arguments if value is calls[0].value]
        for call in calls:
            outer = [name for name in local if call.product.name.startswith(f"{name}.")]
            shared = [name for name in outer if all(c.product.name.startswith(f"{name}.") for c in calls)]
            holder = (shared or outer)[-1] if outer else None
            if holder is not None:
                place = next(p for n, p, value in run.arguments if n == holder and value is calls[0].value)
                found.entries[holder.removeprefix(prefix)] = (place, group)
        if any(not any(c.product.name.startswith(f"{prefix}{e}.") for e in found.entries) for c in calls):
            found.entries = {name: entry for name, entry in found.entries.items() if entry[1] != group}


def _mixed(flow: Flow, run: BlockRun, found: Regions, tp: int) -> list[str]:
    """List linear layers of which every rank needs all columns, for the next reduction."""
    prefix = f"{run.name}."
    if max([a.kv_heads for a in run.attentions], default=0) == 1:
        return []  # a single key/value head is needed by every rank
    mixed = [
        call.product
        for call in run.calls
        if all(
            used == ((0, call.product.outputs),) for used in found.columns.get(call.product.name[len(prefix) :], [0])
        )
    ]
    if not mixed:
        return []
    width = mixed[0].outputs
    norms = sorted({n.rpartition(".")[0] for n in found.inside if flow.parameters[prefix + n].shape[-1:] == (width,)})
    what = f"{prefix}{norms[0]} works" if norms else "what runs after it works"
    return [
        f"{mixed[0].name} cannot be sharded by columns: {what} over its full width ({width}), of which each of {tp} "
        "ranks would have a part; use fsdp or pipeline parallel"
    ]


def _reason(flow: Flow, run: BlockRun, found: Regions, plan: Plan, why: str) -> str:
    """Return why a block cannot be sharded as found."""
    tp = plan.dims.tp
    names = ", ".join([*found.columns, *found.rows])
    if plan.sequence_parallel and BlockCheck(flow, run, tp, sequence=False).materialize_unit(found) is None:
        return (
            f"{run.name} cannot run with its sequence sharded over tp {tp} ranks: {why}; set "
            "parallel.sequence_parallel to false"
        )
    return (
        f"{run.name} cannot be sharded over tp {tp} ranks ({names}): {why}, and no change of its modules' integer "
        "attributes makes it correct; use fsdp, or leave layers out with tp_styles"
    )


def _head(
    flow: Flow, spec: ModelSpec, plan: Plan, output: Any, styles: dict[str, str] | None
) -> tuple[VocabHead | None, list[str]]:
    """Find the linear layer that computes the model's output over a vocabulary, if any."""
    missing = (
        f"{plan.strategy}: loss_parallel shards the logits over the vocabulary, and the model's output is not that "
        "of a linear layer over one that can be sharded; set parallel.loss_parallel to false"
    )
    refused = None, [missing] if plan.loss_parallel else []
    linear = [call for call in flow.calls if not call.product.is_lookup]
    place = _place_of(linear[-1], output) if linear else None
    if place is None:
        return refused
    product = linear[-1].product
    canonical = {alias: p.name for p in spec.parameters for alias in (p.name, *p.aliases)}
    lookups = {call.product.name: call for call in flow.calls if call.product.is_lookup}
    tied = {n for n, c in lookups.items() if canonical[c.product.weight] == canonical[product.weight]}
    external_params = {owner for _, owner in flow.external_params}
    same = {n for n, c in lookups.items() if c.product.inputs == product.outputs and not _is_position(c)}
    can = {n for n in tied | same if n not in external_params and _is_plain_lookup(flow.submodule(n))}
    wanted = bool(same | tied) or product.outputs >= LARGE
    if styles is not None:
        wanted = styles.get(product.name) == "colwise"
        can = {n for n in can if styles.get(n) == "embedding" or n in tied}
    once = sum(call.product is product for call in linear) == 1
    if not wanted or not once or not tied <= can or product.name in external_params:
        return refused
    return VocabHead(product, place if plan.loss_parallel else None, tuple(sorted(can))), []


def _place_of(call: Call, output: Any) -> str | int | None:
    """Return where the output has the results of ``call``: key, index, or ``""`` for all."""
    depends = Depends()
    if isinstance(output, Mapping):
        items: Any = output.items()
    else:
        items = enumerate(output) if isinstance(output, tuple | list) else [("", output)]
    for place, value in items:
        is_tensor = isinstance(value, torch.Tensor) and value.ndim > 1
        if is_tensor and value.shape[-1] == call.product.outputs and id(call.leaf) in depends(value):
            found: str | int = place
            return found
    return None


def _is_position(call: Call) -> bool:
    """Return whether a table is read by 0, 1, 2, ... (positions, not a vocabulary)."""
    value = call.value.flatten()
    return value.numel() > 1 and bool((value == torch.arange(value.numel())).all())


def _is_plain_lookup(module: nn.Module) -> bool:
    special = ("max_norm", "scale_grad_by_freq", "sparse")
    return isinstance(module, nn.Embedding) and not any(getattr(module, name) for name in special)


def _logits_problems(
    flow: Flow, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, head: VocabHead
) -> list[str]:
    """Check that the code after the head accepts logits that are sharded over ranks."""
    tp, vocab = plan.dims.tp, head.product.outputs
    fix = "set parallel.loss_parallel to false"
    for rank in (0, tp - 1):
        first, end = chunk(vocab, tp, rank)
        try:
            found = flow.run_again(args, kwargs, {head.product.name: (first, end)})
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            return [f"the model does not run on a part of the logits ({type(error).__name__}: {text}); {fix}"]
        for place, full, part in _pairs(output, found):
            expected = full[..., first:end] if place == head.place else full
            if part.shape != expected.shape or not torch.allclose(part, expected, rtol=1e-4, equal_nan=True):
                what = (
                    "the logits are mixed over the vocabulary after the head"
                    if place == head.place
                    else (f"the output '{place}' is worked out from all logits (leave labels out of the inputs)")
                )
                return [f"{what}, which loss_parallel leaves sharded over {tp} ranks; {fix}"]
    return []


def _pairs(full: Any, part: Any) -> list[tuple[str | int, torch.Tensor, torch.Tensor]]:
    if isinstance(full, torch.Tensor):
        return [("", full, part)]
    keys = list(full.keys()) if isinstance(full, Mapping) else list(range(len(full)))
    return [(key, full[key], part[key]) for key in keys if isinstance(full[key], torch.Tensor)]


def _notes(module: nn.Module, spec: ModelSpec, blocks: dict[str, Regions]) -> tuple[str, ...]:
    """Return notes for the user that are not errors."""
    notes = []
    dropout = _dropout(module)
    if dropout is not None:
        notes.append(
            f"dropout ({dropout[0]} {dropout[1]:g}): the ranks of a tensor-parallel group draw the same masks, so each "
            "repeats over their shares of the heads, of the columns and of the sequence"
        )
    full = sorted({starred(f"{block}.{name}", spec.blocks) for block, found in blocks.items() for name in found.full})
    if full:
        more = f" and {len(full) - 3} more" if len(full) > 3 else ""
        notes.append(f"not sharded by tensor parallel: {', '.join(full[:3])}{more}; every rank computes all of it")
    large = sorted({starred(p.name, spec.blocks) for p in spec.parameters if p.block is not None and len(p.shape) > 2})
    if large:
        notes.append(f"not sharded by tensor parallel: {', '.join(large[:3])}; every rank stores all of it")
    return tuple(notes)


def _dropout(module: nn.Module) -> tuple[str, float] | None:
    """Return the first active dropout: a module, or a number with that name."""
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            if part.p > 0:
                return clean_name(path), part.p
            continue
        for key, value in vars(part).items():
            if isinstance(value, float) and 0 < value < 1 and ("dropout" in key or key.endswith("pdrop")):
                return f"{clean_name(path)}.{key}", value
    return None
