"""Expected collectives over tp, cp, pp and dp of plans that split the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from shardwise.measure.collectives import Collective
from shardwise.model.facts import ModelSpec, ParameterSpec
from shardwise.model.read import clean_name
from shardwise.parallel.tensor_parallel.tensor_layout import ParameterView, TensorLayout, chunk
from shardwise.plan.plan import Plan
from shardwise.receipts.expected import Traffic, expected_traffic, units_of
from shardwise.receipts.expected_experts import dispatched, expert_data, expert_names
from shardwise.receipts.expected_part import (
    axis_of,
    is_gloo,
    keeps_gathered,
    planned_stages,
    root_units,
    shard_dim_of,
    shard_rank,
    tokens_of,
)
from shardwise.receipts.recorder import StepRecorder
from shardwise.train.session import Session
from shardwise.train.step import Micro

NARROW = 2
MESSAGE_BYTES = 8 * 11  # a stage's description of the hidden state, sent before the first one of a shape


class Tally:
    """Calls and bytes of each collective over each axis, from least to most."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}

    def add(self, name: str, axis: str, calls: tuple[int, int], num_bytes: tuple[int, int]) -> None:
        """Add calls and bytes of one collective."""
        row = self._rows.setdefault(f"{name} over {axis}", [0, 0, 0, 0])
        for index, value in enumerate((*calls, *num_bytes)):
            row[index] += value

    def traffic(self, *, bytes_known: bool) -> dict[str, Traffic]:
        """Return the traffic by name of the line."""
        return {
            name: Traffic((row[0], row[1]), (row[2], row[3]) if row[3] and bytes_known else None)
            for name, row in self._rows.items()
        }


def model_parallel_traffic(
    session: Session, spec: ModelSpec, micros: Sequence[Micro], recorder: StepRecorder
) -> dict[str, Traffic]:
    """Return every collective of a step on this rank, whose part of the model is ``spec``.

    The width of the hidden state is observed where it enters a block, as is whether the loss is this package's own.
    """
    tally, plan, decision = Tally(), session.plan, session.applied.decision
    facts = _Facts(session, spec, micros, recorder)
    if decision is not None and decision.layout is not None:
        _tensor(tally, facts, decision.layout)
        if recorder.logits and decision.layout.logits is not None:
            _loss(tally, facts, recorder.recorder.collectives)
    if decision is not None and decision.context is not None:
        _context(tally, facts, decision.context.sites, recorder)
    if plan.dims.pp > 1:
        _pipeline(tally, facts)
    if (axes := axis_of(session)) is not None:
        for name, axis, calls, num_bytes in dispatched(session, facts, recorder.received, axes):
            tally.add(name, axis, calls, num_bytes)
    return {**tally.traffic(bytes_known=facts.known), **_data(facts)}


class _Facts:
    """Facts of a step that all axes need."""

    def __init__(self, session: Session, spec: ModelSpec, micros: Sequence[Micro], recorder: StepRecorder) -> None:
        self.session, self.spec, self.plan, self.forwards = session, spec, session.plan, recorder.forwards
        self.width = max(recorder.widths, default=0)
        self.batches = number = len(micros)
        known = tokens_of(micros)
        if self.forwards.number not in (0, number):  # unusual number of model calls: each counts as one
            number = self.forwards.number
            known = self.forwards.shapes_known
        self.known = known is not None and self.width > 0
        self.micros = known or [(0, 0)] * number
        self.tokens = sum(samples * length for samples, length in self.micros)
        self.spread = expert_names(session)
        self.names = {clean_name(n) for n, _ in session.module.named_parameters(remove_duplicate=False)}
        own = max(p.itemsize for p in session.spec.parameters)
        self.sizes = (own if self.plan.precision == "fp32" else NARROW, own)
        self.trained = all(p.trainable for p in spec.parameters)
        self.again = self.plan.recompute != "none"
        whole = self.plan.recompute_layers is None  # else some blocks run again, and others do not
        self.again_least = self.again and self.trained and whole and not self.plan.compile  # a graph chooses itself

    def is_here(self, module: str, local: Sequence[str]) -> bool:
        """Return whether a module computes on this rank."""
        return any(f"{module}.{key}" in self.names for key in local)

    def block_of(self, module: str) -> str | None:
        """Return the block that contains a module."""
        return next((b for b in self.spec.blocks if module == b or module.startswith(f"{b}.")), None)

    def bytes(self, elements: int) -> tuple[int, int]:
        """Return the bytes in the smallest and in the largest dtype that may be sent."""
        return elements * self.sizes[0], elements * self.sizes[1]


def _tensor(tally: Tally, facts: _Facts, layout: TensorLayout) -> None:
    """Add regions of each block, the embedding, the head, split sequences and partial gradients."""
    counter = TpTrafficCounter(tally, facts, layout)
    ways: set[str] = set()
    for name, shard in layout.modules.items():
        if not facts.is_here(name, list(shard.local)):
            continue
        block = facts.block_of(name)
        if shard.kind == "rowwise":
            counter.sums(block)
        elif shard.kind == "embedding":
            counter.lookup()
        elif shard.kind == "colwise_gather":
            counter.add("all_gather", chunk(layout.vocab, counter.ranks, 0)[1] * counter.ranks)
        if shard.kind in ("colwise", "colwise_gather", "colwise_loss") and shard.group:
            ways.add(shard.group)
        for key, local in shard.local.items():
            if local.uses and local.dim is not None and f"{name}.{key}" in facts.names:
                counter.exchange(name, key, local, block)
    for module, entries in layout.entries.items():
        ways |= {entry.group for entry in entries if facts.block_of(module) is not None}
    for way in sorted(ways):
        counter.way(way)
    if layout.first in facts.spec.blocks:
        counter.add("all_gather", facts.width, backward=True)
    if layout.last in facts.spec.blocks:
        counter.add("all_gather", facts.width, again=(0, 1))
    _partial(tally, facts, layout)


class TpTrafficCounter:
    """Add collectives over tp to the tally, for all micro batches of a step."""

    def __init__(self, tally: Tally, facts: _Facts, layout: TensorLayout) -> None:
        self.tally, self.facts, self.layout = tally, facts, layout
        self.sequence = facts.plan.sequence_parallel
        meshes = facts.session.applied.meshes
        assert meshes is not None and meshes.tp is not None
        self.ranks, self.rank = meshes.tp.size(), meshes.tp.get_local_rank()
        # gloo's reduce-scatter sends as much as an all-reduce, so its pieces are exchanged and added
        self.scatter = "all_to_all" if is_gloo(meshes.tp.get_group()) else "reduce_scatter"
        self.ended: set[str] = set()

    def add(self, name: str, width: int, *, backward: bool = False, again: tuple[int, int] = (0, 0)) -> None:
        """Add a call per micro batch, ``width`` elements a token; ``again`` more with recompute."""
        facts = self.facts
        least = 0 if backward and not facts.trained else 1
        more = again if facts.again else (0, 0)
        low, high = facts.bytes(facts.tokens * width)
        times = (least + (more[0] if facts.again_least else 0), 1 + more[1])
        number = len(facts.micros)
        self.tally.add(name, "tp", (times[0] * number, times[1] * number), (times[0] * low, times[1] * high))

    def lookup(self) -> None:
        """Add an embedding: of every token, or of the positions of one sample."""
        facts, number = self.facts, len(self.facts.micros)
        low, high = facts.bytes(facts.width)
        positions = sum(length for _, length in facts.micros)
        self.tally.add("all_reduce", "tp", (number, number), (positions * low, facts.tokens * high))

    def sums(self, block: str | None) -> None:
        """Add a row-parallel layer.

        Recompute ends before a block's last one, whose result is unused.
        """
        ends = block is not None and block not in self.ended
        self.ended |= {block} if block is not None else set()
        again = (0 if ends else 1, 1) if block is not None else (0, 0)
        self.add(self.scatter if self.sequence else "all_reduce", self.facts.width, again=again)
        if self.sequence:
            self.add("all_gather", self.facts.width, backward=True)

    def way(self, name: str) -> None:
        """Add the entry of a tensor into sharded work, once for all its readers."""
        if self.sequence and name.startswith("block:"):
            self.add("all_gather", self.facts.width, again=(1, 1))
            self.add(self.scatter, self.facts.width, backward=True)
        else:
            self.add("all_reduce", self.facts.width, backward=True)

    def exchange(self, module: str, key: str, local: ParameterView, block: str | None) -> None:
        """Add the exchange of weight rows that are stored on other ranks than their users."""
        shape = _shape(self.facts.session.spec, f"{module}.{key}")
        size, inner = shape[local.uses_dim], _product(shape) // shape[local.uses_dim]
        first, end = chunk(size, self.ranks, self.rank)
        sent = sum(max(0, min(b, end) - max(a, first)) for slices in local.uses for a, b in slices)
        used = sum(b - a for a, b in local.uses[self.rank])
        number, facts = len(self.facts.micros), self.facts
        again = int(facts.again and block is not None)
        low, high = facts.bytes(sent * inner)
        self.tally.add("all_to_all", "tp", (number, number * (1 + again)), (number * low, number * (1 + again) * high))
        low, high = facts.bytes(used * inner)
        least = number if facts.trained else 0
        self.tally.add("all_to_all", "tp", (least, number), (least * low, number * high))


def _partial(tally: Tally, facts: _Facts, layout: TensorLayout) -> None:
    """Add partial gradients: FSDP2 sums each, else all are summed together."""
    partial: dict[str, ParameterSpec] = {}
    specs = {name: p for p in facts.spec.parameters for name in (p.name, *p.aliases)}
    for name, shard in layout.modules.items():
        for key, local in shard.local.items():
            full = f"{name}.{key}"
            here = full in facts.names and full not in facts.spread and full in specs
            if local.partial and here and specs[full].trainable:
                partial[specs[full].name] = specs[full]
    if not partial:
        return
    plan, elements = facts.plan, sum(p.num_elements for p in partial.values())
    low, high = facts.bytes(elements)
    if plan.parsed.shards_parameters or plan.dims.dp * plan.dims.cp > 1:
        times = facts.batches if plan.syncs_every_micro_batch else 1
        calls = len(partial) * times
        tally.add("all_reduce", "tp", (calls, calls), (low * times, high * times))
    else:
        dtypes = len({p.dtype for p in partial.values()})
        tally.add("all_reduce", "tp", (dtypes, dtypes), (low, high))


def _loss(tally: Tally, facts: _Facts, collectives: Sequence[Collective]) -> None:
    """Add the loss over vocabulary-sharded logits: a maximum, then two sums for each token.

    A custom loss may send other data instead.
    """
    size = max(4, facts.sizes[1])
    over = [item.num_bytes for item in collectives if item.axis == "tp" and item.name == "all_reduce"]
    pairs = {(samples * length * size, 2 * samples * length * size) for samples, length in facts.micros}
    own = any(pair in pairs for pair in pairwise(over))
    number, num_bytes = len(facts.micros), facts.tokens * size
    if own:
        tally.add("all_reduce", "tp", (2 * number, 2 * number), (3 * num_bytes, 3 * num_bytes))
    else:
        tally.add("all_reduce", "tp", (0, 8 * number), (0, 8 * num_bytes))


def _context(tally: Tally, facts: _Facts, sites: Sequence[str], recorder: StepRecorder) -> None:
    """Add two exchanges for each attention, forward and backward.

    Their bytes depend on its heads.

    Attention outside of repeated blocks, or in blocks with a varying number of calls, counts as observed.
    """
    here = sum(facts.block_of(site) is not None for site in sites)
    number = here * len(facts.micros)
    if (here < len(sites) and not facts.spec.blocks) or not facts.forwards.one_each(facts.spec.blocks):
        number = recorder.exchanged // (2 if facts.again and facts.plan.recompute_layers is None else 1)
    more = 2 * number if facts.again else 0
    least = (4 * number if facts.trained else 2 * number) + (more if facts.again_least else 0)
    tally.add("all_to_all", "cp", (least, 4 * number + more), (0, 0))


def _pipeline(tally: Tally, facts: _Facts) -> None:
    """Add hidden states and gradients between stages, per micro batch, for any schedule."""
    plan, stages = facts.plan, sorted(planned_stages(facts.session))
    last = plan.dims.pp * plan.virtual_stages - 1
    shard = plan.dims.tp if plan.sequence_parallel and plan.dims.tp > 1 else 1
    low, high = facts.bytes(facts.tokens // shard * facts.width)
    number = len(facts.micros)
    shapes = len(set(facts.micros)) if facts.known else number
    for stage in stages:
        for other in (stage - 1, stage + 1):
            if not 0 <= other <= last or other in stages:
                continue
            forward_sends, least = other > stage, number if facts.trained else 0
            for name, is_forward in (("send", forward_sends), ("recv", not forward_sends)):
                fewest = number if is_forward else least
                shape_messages = shapes if is_forward else 0  # the first message includes the shape
                share = fewest / number
                tally.add(
                    name,
                    "pp",
                    (fewest, number + shape_messages),
                    (int(low * share), high + shape_messages * MESSAGE_BYTES),
                )
    _shared(tally, facts, first=0 in stages, last=last in stages)


def _shared(tally: Tally, facts: _Facts, *, first: bool, last: bool) -> None:
    """Add the exchange of gradients of parameters that the first and the last stage share."""
    wiring = facts.session.applied.decision.wiring if facts.session.applied.decision is not None else None
    if wiring is None or first == last:
        return
    for parameter in local_parameters(facts.session, facts.spec, sharded=True):
        names = {parameter.name, *parameter.aliases}
        if parameter.trainable and names & wiring.before and names & wiring.after:
            size = parameter.num_elements * parameter.itemsize
            for name in ("send", "recv"):
                tally.add(name, "pp", (1, 1), (size, size))


def _data(facts: _Facts) -> dict[str, Traffic]:
    """Return data-parallel traffic of this rank's own part of the model."""
    plan, session = facts.plan, facts.session
    dense = tuple(p for p in local_parameters(session, facts.spec) if p.name not in facts.spread)
    local = facts.spec.model_copy(update={"parameters": dense})
    units = [unit for unit in units_of(local) if unit[0].block is not None] + root_units(session, local)
    calls = facts.forwards.of_units(facts.spec.blocks)
    found = expected_traffic(local, plan, facts.batches, units, once=keeps_gathered(plan), calls=calls)
    named = {f"{name} over {data_axis(plan, name)}": traffic for name, traffic in found.items()}
    axis = axis_of(session)
    if facts.spread and axis is not None:
        more = expert_data(session, facts.spec, facts.batches, calls, axis, once=keeps_gathered(plan))
        for name, traffic in more:
            named[name] = named[name] + traffic if name in named else traffic
    return named


def data_axis(plan: Plan, name: str) -> str:
    """Return the name of the axis of a data-parallel collective."""
    cp = " × cp" if plan.dims.cp > 1 else ""
    if plan.parsed.base != "hsdp" or plan.dims.dp_replicate == 1:
        return f"dp{cp}"
    return "dp_replicate" if name == "all_reduce" else f"dp_shard{cp}"


def local_parameters(session: Session, spec: ModelSpec, *, sharded: bool = False) -> Iterator[ParameterSpec]:
    """Yield parameters in their local tensor-parallel shape; with ``sharded``, FSDP2's, too."""
    dims, tp_rank = session.plan.dims, session.place.tp
    for parameter in spec.parameters:
        dim, shape = shard_dim_of(session, parameter.name), list(parameter.shape)
        if dim is not None:
            first, end = chunk(shape[dim], dims.tp, tp_rank)
            shape[dim] = end - first
        if sharded and session.plan.parsed.shards_parameters and shape:
            first, end = chunk(shape[0], dims.dp_shard * dims.cp, shard_rank(session))
            shape[0] = end - first
        yield parameter.model_copy(update={"shape": tuple(shape)})


def _shape(spec: ModelSpec, name: str) -> tuple[int, ...]:
    return next(p.shape for p in spec.parameters if name in (p.name, *p.aliases))


def _product(shape: Any) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
