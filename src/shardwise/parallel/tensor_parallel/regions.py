"""Regions of a block to shard: column-parallel layers, code between, row-parallel layers.

Autograd's graph of one run (see `spec.flow`) gives the dependencies. Which columns a rank needs is not assumed: it
follows from what the inputs of its rows depend on, so fused projections and fewer key/value heads than ranks need no
special case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.model.flow import BlockRun, Call, Flow, main_output
from shardwise.parallel.tensor_parallel.tensor_layout import Slices, chunk


@dataclass
class Regions:
    """Sharding of one block; names are relative to the block.

    ``uses`` has one entry for each rank.
    """

    columns: dict[str, tuple[Slices, ...]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    full: tuple[str, ...] = ()
    inside: dict[str, tuple[int, tuple[Slices, ...]] | None] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    entries: dict[str, tuple[tuple[str, int | str], int]] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Depends:
    """Map a tensor to the leaves of autograd's graph that it depends on.

    Each node is visited once.
    """

    def __init__(self) -> None:
        self._known: dict[Any, frozenset[int]] = {}

    def __call__(self, tensor: torch.Tensor) -> frozenset[int]:
        """Return the ids of the leaves."""
        if tensor.grad_fn is None:
            return frozenset({id(tensor)} if tensor.requires_grad else ())
        stack = [tensor.grad_fn]
        while stack:
            node = stack[-1]
            if node in self._known:
                stack.pop()
                continue
            variable = getattr(node, "variable", None)
            below = [child for child, _ in node.next_functions if child is not None]
            waiting = [child for child in below if child not in self._known]
            if variable is None and waiting:
                stack += waiting
                continue
            own = frozenset({id(variable)}) if variable is not None else frozenset()
            self._known[node] = own.union(*(self._known[child] for child in below))
            stack.pop()
        return self._known[tensor.grad_fn]


def find_regions(
    run: BlockRun, flow: Flow, tp: int, styles: dict[str, str] | None, *, sequence: bool = False
) -> Regions:
    """Decide for one block, by ``styles`` (full module name to style) or by structure.

    ``sequence``: the block receives a part of the sequence on each rank.
    """
    found = Regions()
    prefix = f"{run.name}."
    depends = Depends()
    calls = [call for call in run.calls if not call.product.is_lookup]
    below = {id(call): depends(call.value) for call in calls}
    names = {id(call): call.product.name.removeprefix(prefix) for call in calls}
    main = main_output(run.output, run.hidden)
    out = frozenset[int]() if main is None else depends(main)
    if styles is None:
        columns, rows = _structural(run, flow, calls, below, out)
    else:
        columns = [c for c in calls if styles.get(c.product.name) == "colwise"]
        rows = [c for c in calls if styles.get(c.product.name) == "rowwise"]
        found.problems += _style_problems(calls, columns, rows, below, out)
    inputs: dict[int, int] = {}
    for call in calls:
        index = inputs.setdefault(id(call.value), len(inputs))
        if call in columns:
            found.groups[names[id(call)]] = index
    found.rows = {names[id(c)]: c.product.inputs for c in rows}
    found.full = tuple(names[id(c)] for c in calls if c not in columns and c not in rows)
    sharded = [names[id(c)] for c in (*columns, *rows)]
    found.problems += [
        f"{prefix}{n} runs more than once in one forward" for n in sorted(set(sharded)) if sharded.count(n) > 1
    ]
    found.problems += _size_problems(run, rows, tp)
    found.problems += _strangers(run, flow, columns, rows, below)
    if sequence:
        found.problems += _outsiders(run, flow, depends, main)
    if not found.problems:
        _uses(run, flow, found, columns, rows, tp)
    return found


def _style_problems(
    calls: list[Call], columns: list[Call], rows: list[Call], below: dict[int, frozenset[int]], out: frozenset[int]
) -> list[str]:
    sharded = {id(c.leaf) for c in columns}
    problems = [
        f"{c.product.name} is rowwise, but nothing that it reads is colwise" for c in rows if not below[id(c)] & sharded
    ]
    for call in columns:
        if below[id(call)] & sharded:
            problems.append(f"{call.product.name} is colwise and reads a tensor that is sharded already")
        readers = [c.product.name for c in calls if id(call.leaf) in below[id(c)] and c not in rows]
        readers += ["the block's output"] if id(call.leaf) in out else []
        if readers:
            problems.append(f"{call.product.name} is colwise, and {readers[0]}, which reads it, is not rowwise")
    return problems


def _size_problems(run: BlockRun, rows: list[Call], tp: int) -> list[str]:
    """List heads and widths that ``tp`` does not divide, with the degrees that would."""
    if not rows:
        return []
    heads = sorted({(a.heads, a.kv_heads) for a in run.attentions})
    widths = {c.product.name: c.product.inputs for c in rows}

    def works(degree: int) -> bool:
        fit = all(h % degree == 0 and (kv % degree == 0 or degree % kv == 0) for h, kv in heads)
        return fit and all(width % degree == 0 for width in widths.values())

    largest = min([h for h, _ in heads] or [max(widths.values())])
    fine = [str(degree) for degree in range(2, min(largest, 128) + 1) if works(degree)]
    fix = f"use tp {', '.join(fine)}" if fine else "use fsdp or pipeline parallel"
    problems = []
    for h, kv in heads:
        if h % tp:
            problems.append(f"{run.name} has {h} attention heads, which tp {tp} does not divide; {fix}")
        elif kv % tp and tp % kv:
            problems.append(f"{run.name} has {kv} key/value heads: neither does tp {tp} divide them nor they tp; {fix}")
    if not problems:
        problems = [f"{n} takes {w} inputs, which tp {tp} does not divide; {fix}" for n, w in widths.items() if w % tp]
    return problems


def _strangers(
    run: BlockRun, flow: Flow, columns: list[Call], rows: list[Call], below: dict[int, frozenset[int]]
) -> list[str]:
    """List tensors with a gradient that enter between columns and rows past the columns."""
    prefix = f"{run.name}."
    fine = {id(c.leaf) for c in columns} | {id(p) for n, p in flow.parameters.items() if n.startswith(prefix)}
    known = {id(c.leaf): c.product.name for c in run.calls} | {id(run.hidden): "the block's input"}
    problems = []
    for call in rows:
        others = sorted({known.get(leaf, "a tensor from outside the block") for leaf in below[id(call)] - fine})
        if others:
            problems.append(
                f"{call.product.name} reads {others[0]} besides sharded tensors, and its gradient would be partial "
                "on each rank; tensor parallel cannot shard this block"
            )
    return problems


def _outsiders(run: BlockRun, flow: Flow, depends: Depends, main: torch.Tensor | None) -> list[str]:
    """List tensors with a gradient that a block uses besides its hidden states and parameters.

    With a sharded sequence each rank computes that gradient from its tokens alone, and the parts are not summed.
    """
    prefix = f"{run.name}."
    own = {id(run.hidden), *(id(c.leaf) for c in run.calls)}
    own |= {id(p) for name, p in flow.parameters.items() if name.startswith(prefix)}
    seen = [*(call.value for call in run.calls), *([main] if main is not None else [])]
    strange = set().union(*(depends(value) for value in seen)) - own
    if not strange:
        return []
    names = sorted(name for name, p in flow.parameters.items() if id(p) in strange)
    what = f"'{names[0]}', which is a parameter outside of it" if names else "a tensor from outside of it"
    return [
        f"{run.name} computes with {what}, and with a sharded sequence its gradient would be partial on each rank; set "
        "parallel.sequence_parallel to false"
    ]


def _structural(
    run: BlockRun, flow: Flow, calls: list[Call], below: dict[int, frozenset[int]], out: frozenset[int]
) -> tuple[list[Call], list[Call]]:
    """Select column- and row-parallel calls by structure: pairs that return the block's width.

    Pairs that another tensor enters in between stay unsharded.
    """
    columns: list[Call] = []
    rows: list[Call] = []
    width = run.hidden.shape[-1]
    sharded: set[int] = set()  # leaves of column-parallel layers
    back = {id(call.value) for call in calls if call.product.outputs == width}
    for call in calls:
        if call in rows or below[id(call)] & sharded:
            continue
        readers = [c for c in calls if id(call.leaf) in below[id(c)]]
        if readers and id(call.leaf) not in out and all(id(c.value) in back for c in readers):
            columns.append(call)
            sharded.add(id(call.leaf))
            rows += [c for c in readers if c not in rows]
    while mixed := [row for row in rows if _strangers(run, flow, columns, [row], below)]:
        feeding = [c for c in columns if any(id(c.leaf) in below[id(row)] for row in mixed)]
        columns = [c for c in columns if c not in feeding]
        rows = [row for row in rows if any(id(c.leaf) in below[id(row)] for c in columns) and row not in mixed]
    return columns, rows


def _uses(run: BlockRun, flow: Flow, found: Regions, columns: list[Call], rows: list[Call], tp: int) -> None:
    """Find the columns, and the elements of parameters between, that each rank's rows need."""
    prefix = f"{run.name}."
    own = {name: p for name, p in flow.parameters.items() if name.startswith(prefix) and p.requires_grad}
    leaves = [c.leaf for c in columns] + list(own.values())
    masks: list[list[torch.Tensor | None]] = []
    for rank in range(tp):
        total: Any = 0
        for call in rows:
            first, end = chunk(call.product.inputs, tp, rank)
            piece = call.value[..., first:end]
            if piece.requires_grad:
                total = total + (piece * torch.rand(piece.shape, dtype=piece.dtype)).sum()
        if not isinstance(total, torch.Tensor):
            return
        grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        masks.append([None if g is None else g != 0 for g in grads])
    for index, call in enumerate(columns):
        name = call.product.name.removeprefix(prefix)
        of_ranks = []
        for rank in range(tp):
            mask = masks[rank][index]
            if mask is None:
                found.problems.append(f"no row-parallel linear layer reads {call.product.name}")
                break
            of_ranks.append(_slices(mask.flatten(0, -2).any(0)))
        else:
            found.columns[name] = tuple(of_ranks)
    for index, (name, parameter) in enumerate(own.items(), start=len(columns)):
        seen = [masks[rank][index] for rank in range(tp)]
        if any(mask is not None and bool(mask.any()) for mask in seen):
            used = [torch.zeros(parameter.shape, dtype=torch.bool) if m is None else m for m in seen]
            found.inside[name.removeprefix(prefix)] = _sharded_by(used)


def _slices(mask: torch.Tensor) -> Slices:
    """Convert a mask to slices (start, end)."""
    edges = torch.diff(torch.nn.functional.pad(mask.int(), (1, 1)))
    return tuple(
        zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True)
    )


def _sharded_by(masks: Iterable[torch.Tensor]) -> tuple[int, tuple[Slices, ...]] | None:
    """Return the dim along which ranks use different elements, and the slices.

    ``None`` if all use all.
    """
    masks = list(masks)
    if all(bool(mask.all()) for mask in masks):
        return None
    for dim in range(masks[0].ndim):
        lines = [mask.movedim(dim, 0).flatten(1).any(1) if mask.ndim > 1 else mask for mask in masks]
        if any(not bool(line.all()) for line in lines):
            return dim, tuple(_slices(line) for line in lines)
    return None
