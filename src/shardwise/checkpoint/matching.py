"""Match the tensors of a source to those of a model: names, ties, dtypes.

Reads no weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardwise.checkpoint.dtypes import CODES
from shardwise.checkpoint.format import AVERAGE, short_list
from shardwise.checkpoint.readers.reader import Source, TensorInfo
from shardwise.errors import CheckpointError, ModelError, did_you_mean
from shardwise.units import bytes_text

MODEL, OPTIMIZER = "model/", "optimizer/"
_WRAPPED = 4  # prefixes removed or added: at most this many attributes deep


@dataclass(frozen=True)
class Expected:
    """Names and shapes that a model expects of a source.

    Attributes:
        label: the model, as the user wrote it.
        shapes: every parameter and persistent buffer by its first name, in the model's order.
        ties: every other name, to the first.
        transient: names of buffers that the model creates itself.
        ignored: regular expressions of names that old files have and the model does not want.
        base: prefix that is missing in the names of the model without its head (``transformer``); empty where nothing.
        translated: the model's files may have other names and shapes, which its library translates when it loads.
    """

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str] = field(default_factory=dict)
    transient: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    base: str = ""
    translated: bool = False

    @property
    def names(self) -> set[str]:
        """All names."""
        return {*self.shapes, *self.ties}


@dataclass(frozen=True)
class TargetTensor:
    """Tensor of the target: its manifest name, its source and its stored dtype."""

    name: str
    origin: str
    info: TensorInfo


@dataclass(frozen=True)
class Selection:
    """Selected tensors, aliases and notes of a conversion.

    Attributes:
        items: in the order of the model, then the optimizer's and the rest.
        aliases: other names of tied tensors, as in a manifest.
        renamed: a parameter's name in the source to its name here, where they differ.
        equal: names of the source that must have the same values, because the model ties them.
        notes: what is not converted, and what was changed, to be reported.
    """

    items: tuple[TargetTensor, ...]
    aliases: Mapping[str, str]
    renamed: Mapping[str, str]
    equal: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Total bytes of the tensors as stored."""
        return sum(item.info.num_bytes for item in self.items)


def select(
    source: Source, expected: Expected | None, *, dtype: torch.dtype | None, weights_only: bool, reason: str
) -> Selection:
    """Select the tensors of ``source`` to write.

    ``dtype`` is the target dtype of floating-point weights; ``None`` keeps theirs. ``weights_only`` leaves out
    everything but the weights, because of ``reason``.

    Raises:
        ModelError: names or shapes are not those of the model; all problems are listed.
        CheckpointError: there are no weights, or of a dtype that safetensors cannot store.
    """
    weights = [name.removeprefix(MODEL) for name in source.tensors if name.startswith(MODEL)]
    if not weights:
        raise CheckpointError(f"'{source.place}' ({source.kind}) contains no weights; give the path of the model's")
    aliases = {a.removeprefix(MODEL): n.removeprefix(MODEL) for a, n in source.aliases.items()}
    notes: list[str] = []
    equal: list[tuple[str, str]] = []
    renamed: dict[str, str] = {}
    if expected is None:
        chosen, ties = {name: name for name in weights}, aliases
        if aliases:
            notes.append(
                f"tied in the source and stored once: {short_list([f'{a} = {b}' for a, b in aliases.items()], 3)}"
            )
    else:
        renamed = _renamed([*weights, *aliases], expected, notes)
        chosen, equal = _matched(source, expected, renamed, aliases, notes)
        ties = dict(expected.ties)
    items = [_item(source, f"{MODEL}{name}", f"{MODEL}{origin}", dtype) for name, origin in chosen.items()]
    other = [name for name in source.tensors if not name.startswith(MODEL)]
    if weights_only:
        notes += _left_out(source, other, reason)
    else:
        items += [_item(source, _state_name(name, renamed), name, None) for name in other]
    _report_cast(source, items, notes)
    bad = sorted({str(item.info.dtype) for item in items if item.info.dtype not in CODES})
    if bad:
        raise CheckpointError(
            f"'{source.place}' holds tensors of {', '.join(bad)}, which safetensors cannot store; use --dtype"
        )
    tied = {f"{MODEL}{alias}": f"{MODEL}{name}" for alias, name in ties.items()}
    return Selection(tuple(items), tied, renamed, tuple(equal), tuple(notes))


def _item(source: Source, name: str, origin: str, dtype: torch.dtype | None) -> TargetTensor:
    info = source.tensors[origin]
    changes = dtype is not None and info.dtype.is_floating_point
    return TargetTensor(name, origin, TensorInfo(dtype, info.shape) if changes and dtype is not None else info)


def _state_name(name: str, renamed: Mapping[str, str]) -> str:
    """Rename an optimizer tensor, or an average, after its parameter."""
    if name.startswith(AVERAGE):
        parameter = name.removeprefix(AVERAGE)
        return f"{AVERAGE}{renamed.get(parameter, parameter)}"
    if not name.startswith(OPTIMIZER):
        return name
    parameter, key = name.removeprefix(OPTIMIZER).rsplit("/", 1)
    return f"{OPTIMIZER}{renamed.get(parameter, parameter)}/{key}"


def _renamed(names: list[str], expected: Expected, notes: list[str]) -> dict[str, str]:
    """Add or remove a prefix, as wrapping a model does, so that names match the model's."""
    known = expected.names
    if known & set(names):
        return {}
    tries: list[tuple[str, dict[str, str]]] = []
    heads = Counter(head for name in names for head in _heads(name))
    for head in heads:
        changed = {name: name.removeprefix(head) for name in names if name.startswith(head)}
        tries.append((f"'{head}' was taken off the names, as the model has none of it", changed))
    if expected.base:
        changed = {name: f"{expected.base}.{name}" for name in names}
        tries.append((f"'{expected.base}.' was put before the names, as the model has it", changed))
    best = max(tries, key=lambda item: len(known & set(item[1].values())), default=("", {}))
    if not known & set(best[1].values()):
        return {}
    notes.append(best[0])
    return best[1]


def _heads(name: str) -> list[str]:
    """List the prefixes ``a.``, ``a.b.``, … of ``a.b.weight``."""
    parts = name.split(".")[:-1][:_WRAPPED]
    return [f"{'.'.join(parts[: depth + 1])}." for depth in range(len(parts))]


def _matched(
    source: Source, expected: Expected, renamed: Mapping[str, str], aliases: Mapping[str, str], notes: list[str]
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Map each first name to its name in the source, and list pairs that must be equal."""
    there = {
        renamed.get(name, name): name for name in (n.removeprefix(MODEL) for n in source.tensors if n.startswith(MODEL))
    }
    stored = {
        renamed.get(alias, alias): name for alias, name in aliases.items()
    } | there  # name to tensor of the source
    groups: dict[str, list[str]] = {name: [name] for name in expected.shapes}
    for alias, name in expected.ties.items():
        groups[name].append(alias)
    chosen: dict[str, str] = {}
    equal: list[tuple[str, str]] = []
    problems: list[str] = []
    for name, shape in expected.shapes.items():
        origins = list(dict.fromkeys(stored[other] for other in groups[name] if other in stored))
        if not origins:
            tied = f" (nor its tied names {', '.join(groups[name][1:])})" if len(groups[name]) > 1 else ""
            hint = did_you_mean(name, there.keys() - expected.names - expected.transient)
            problems.append(f"{name}{tied}: in the model, not in the source{hint}")
            continue
        for origin in origins:
            found = source.tensors[f"{MODEL}{origin}"].shape
            if found != shape:
                problems.append(f"{origin}: {found} in the source, {shape} in the model")
        chosen[name] = origins[0]
        equal += [(origins[0], other) for other in origins[1:]]
    extra = [name for name in there if name not in expected.names]
    made = [name for name in extra if name in expected.transient or _is_ignored(name, expected)]
    problems += [f"{name}: in the source, not in the model" for name in extra if name not in made]
    if problems:
        raise ModelError(
            f"'{source.place}' ({source.kind}) is not of the model '{expected.label}', and nothing was written; give "
            f"the model that it was saved from with --model: {short_list(problems)}"
        )
    if made:
        notes.append(f"omitted, as the model creates them itself: {short_list(made, 3)}")
    if equal:
        notes.append(f"tied in the model and stored once: {short_list([f'{a} = {b}' for a, b in equal], 3)}")
    return chosen, equal


def _is_ignored(name: str, expected: Expected) -> bool:
    return any(re.search(pattern, name) for pattern in expected.ignored)


def _left_out(source: Source, other: list[str], reason: str) -> list[str]:
    state = [name for name in other if name.startswith(OPTIMIZER)]
    averages = sum(name.startswith(AVERAGE) for name in other)
    rest = len(other) - len(state) - averages
    notes = []
    if state:
        size = bytes_text(sum(source.tensors[name].num_bytes for name in state))
        notes.append(f"not carried over: {len(state)} tensors of optimizer state ({size}); {reason}")
    if averages:
        notes.append(f"not carried over: {averages} averages of weights; {reason}")
    if rest:
        notes.append(f"not carried over: {rest} states of random generators; {reason}")
    return notes


def _report_cast(source: Source, items: list[TargetTensor], notes: list[str]) -> None:
    """Note each pair of source and target dtypes."""
    pairs = Counter((source.tensors[item.origin].dtype, item.info.dtype) for item in items)
    for (old, new), number in pairs.items():
        if old != new:
            lost = ", rounded" if new.itemsize < old.itemsize or new.itemsize == 2 == old.itemsize else ""
            notes.append(f"{number} tensors cast from {_word(old)} to {_word(new)}{lost}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
