"""Where one block can be cut: linear layers cut by columns, what runs between, and the ones cut by rows after it.

Autograd's graph of one run (see `spec.flow`) says what depends on what. Which columns a rank needs is not assumed: it
is what the inputs of its rows depend on, so fused projections and key/value heads fewer than ranks come out by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.parallel.tensor_layout import Slices, chunk
from shardwise.spec.flow import BlockRun, Call, Flow


@dataclass
class Regions:
    """How one block is cut; names are relative to the block. ``uses`` has one entry for each rank."""

    columns: dict[str, tuple[Slices, ...]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    inside: dict[str, tuple[int, tuple[Slices, ...]] | None] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    entries: dict[str, tuple[tuple[str, int | str], int]] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Depends:
    """Which leaves of autograd's graph a tensor depends on; each node is looked at once."""

    def __init__(self) -> None:
        self._known: dict[Any, frozenset[int]] = {}

    def __call__(self, tensor: torch.Tensor) -> frozenset[int]:
        """Ids of the leaves."""
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


def find_regions(run: BlockRun, flow: Flow, tp: int, styles: dict[str, str] | None) -> Regions:
    """Decide for one block, from ``styles`` (relative module name to style) where there are any, else by structure."""
    found = Regions()
    prefix = f"{run.name}."
    depends = Depends()
    calls = [call for call in run.calls if not call.product.is_lookup]
    below = {id(call): depends(call.value) for call in calls}
    names = {id(call): call.product.name.removeprefix(prefix) for call in calls}
    out = depends_tree(run.output, depends)
    columns, rows = _structural(run, calls, below, out)
    if styles is not None:
        columns, rows = _styled(calls, names, styles)
    inputs: dict[int, int] = {}
    for call in calls:
        index = inputs.setdefault(id(call.value), len(inputs))
        if id(call) in columns:
            found.groups[names[id(call)]] = index
    found.rows = {names[id(c)]: c.product.inputs for c in calls if id(c) in rows}
    found.whole = tuple(names[id(c)] for c in calls if id(c) not in columns and id(c) not in rows)
    repeated = {n for n in names.values() if list(names.values()).count(n) > 1}
    found.problems += [f"{prefix}{n} runs more than once in one forward" for n in sorted(repeated)]
    odd = [(c.product.name, c.product.inputs) for c in calls if id(c) in rows and c.product.inputs % tp]
    found.problems += [f"{name} takes {size} inputs, which tp {tp} does not divide" for name, size in odd]
    if not found.problems:
        _uses(run, flow, found, [c for c in calls if id(c) in columns], [c for c in calls if id(c) in rows], tp)
    return found


def depends_tree(tree: Any, depends: Depends) -> frozenset[int]:
    """Leaves that any tensor of a tree depends on."""
    from torch.utils import _pytree

    found: frozenset[int] = frozenset()
    for leaf in _pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            found |= depends(leaf)
    return found


def _structural(
    run: BlockRun, calls: list[Call], below: dict[int, frozenset[int]], out: frozenset[int]
) -> tuple[set[int], set[int]]:
    """Ids of the calls that are cut by columns and by rows: pairs that give the block's width back."""
    columns: set[int] = set()
    rows: set[int] = set()
    width = run.hidden.shape[-1]
    cut: set[int] = set()  # leaves of what is cut by columns
    back = {id(call.value) for call in calls if call.product.outputs == width}
    for call in calls:
        if id(call) in rows or below[id(call)] & cut:
            continue
        readers = [c for c in calls if id(call.leaf) in below[id(c)]]
        if readers and id(call.leaf) not in out and all(id(c.value) in back for c in readers):
            columns.add(id(call))
            cut.add(id(call.leaf))
            rows |= {id(c) for c in readers}
    return columns, rows


def _styled(calls: list[Call], names: dict[int, str], styles: dict[str, str]) -> tuple[set[int], set[int]]:
    columns = {id(c) for c in calls if styles.get(names[id(c)], "").startswith("colwise")}
    rows = {id(c) for c in calls if styles.get(names[id(c)]) == "rowwise"}
    return columns, rows


def _uses(run: BlockRun, flow: Flow, found: Regions, columns: list[Call], rows: list[Call], tp: int) -> None:
    """Which columns, and which elements of parameters in between, each rank's rows depend on."""
    prefix = f"{run.name}."
    own = {name: p for name, p in flow.parameters.items() if name.startswith(prefix)}
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
                found.problems.append(f"no linear layer that is cut by rows reads {call.product.name}")
                break
            of_ranks.append(_slices(mask.flatten(0, -2).any(0)))
        else:
            found.columns[name] = tuple(of_ranks)
    for index, (name, parameter) in enumerate(own.items(), start=len(columns)):
        seen = [masks[rank][index] for rank in range(tp)]
        if any(mask is not None and bool(mask.any()) for mask in seen):
            used = [torch.zeros(parameter.shape, dtype=torch.bool) if m is None else m for m in seen]
            found.inside[name.removeprefix(prefix)] = _cut_of(used)


def _slices(mask: torch.Tensor) -> Slices:
    """A mask as pieces, from and to."""
    edges = torch.diff(torch.nn.functional.pad(mask.int(), (1, 1)))
    return tuple(zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True))


def _cut_of(masks: Iterable[torch.Tensor]) -> tuple[int, tuple[Slices, ...]] | None:
    """Along which dim the ranks use different elements, and which; ``None`` where each uses all of them."""
    masks = list(masks)
    if all(bool(mask.all()) for mask in masks):
        return None
    for dim in range(masks[0].ndim):
        lines = [mask.movedim(dim, 0).flatten(1).any(1) if mask.ndim > 1 else mask for mask in masks]
        if any(not bool(line.all()) for line in lines):
            return dim, tuple(_slices(line) for line in lines)
    return None
