"""Classify entries of a saved nested dict as weights or optimizer state, and name them.

Programs save ``{"model": sd, "optim": osd}``, ``{"app": {...}}``, the weights alone, or the weights flat beside an
``optimizer``. Each entry is known by its path, the keys that lead to it; where a tool joined them with dots, a part
of a path may hold several (``state.blocks.0.weight.exp_avg``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.format import OptimizerEntry, ParamGroup
from shardwise.checkpoint.layout import plain
from shardwise.checkpoint.readers.inert import InertRecord
from shardwise.checkpoint.readers.restricted import printable
from shardwise.errors import CheckpointError

Path = tuple[str | int, ...]
GROUPS, STATE = "param_groups", "state"
_WEIGHTS = ("model", "state_dict", "module", "model_state_dict", "model_state")
_COUNTERS = ("global_step", "step", "iteration")
_COUNTED_IN: tuple[Path, ...] = ((), ("train_state",), ("trainer_state",), ("trainer",), ("app",), ("progress",))
_NO_WEIGHTS = {"lr_scheduler", "scheduler", "dataloader", "sampler", "rng", "rng_state", "rng_states", "ema", "scaler"}
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_REPLICATED = "module."  # DistributedDataParallel's prefix
_EXTRA_STATE = "_extra_state"
_SHOWN = 10
_BY_OPTIONS = {  # the options that identify an optimizer
    "NAdam": {"betas", "momentum_decay"},
    "AdamW": {"betas", "amsgrad"},
    "SGD": {"momentum", "dampening", "nesterov"},
    "Adagrad": {"lr_decay", "initial_accumulator_value"},
    "RMSprop": {"alpha", "centered"},
}


@dataclass
class Found:
    """Classified entries: ``tensors`` is name to entry key, ``step_key`` counts the steps."""

    tensors: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    step_key: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class _Optimizer:
    """Entries of one optimizer: (parameter, state key) to entry, and the options of each group."""

    root: Path
    values: dict[tuple[str, str], str] = field(default_factory=dict)
    groups: dict[str | int, dict[str, str]] = field(default_factory=dict)
    whole_groups: str | None = None
    odd: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        return ".".join(map(str, self.root)) or "optimizer"

    @property
    def keys(self) -> list[str]:
        options = [key for keys in self.groups.values() for key in keys.values()]
        full = [] if self.whole_groups is None else [self.whole_groups]
        return [*self.values.values(), *options, *full, *self.odd]


def sort_out(paths: Mapping[str, Path], tensors: Iterable[str], value: Callable[[str], Any]) -> Found:
    """Name the entries.

    ``paths`` has every entry by its key, ``tensors`` the keys of those that are tensors. ``value`` reads a small
    entry: a non-tensor, or the number in a tensor of one element.

    Raises:
        CheckpointError: two entries would have one name, and what ``value`` raises.
    """
    stored_keys = set(tensors)
    optimizers = _optimizers(paths)
    taken = {key for optimizer in optimizers for key in optimizer.keys}
    rest = {key: path for key, path in paths.items() if key not in taken}
    found = Found()
    root, weights = _weights({key: path for key, path in rest.items() if key in stored_keys})
    raw = {key: ".".join(map(str, path[len(root) :])) for key, path in weights.items()}
    for key, name in zip(raw, clean_names(list(raw.values())), strict=True):
        _put(found, f"model/{name}", key)
    if not root and len({path[0] for path in weights.values() if len(path) > 1}) > 1:
        tops = sorted({str(path[0]) for path in weights.values()})
        found.notes.append(f"the weights are under {', '.join(tops)}; their names keep that in front")
    _Filing(found, stored_keys, value).file(optimizers)
    rest = {key: path for key, path in rest.items() if key not in weights}
    found.step_key = _step_key(rest)
    found.notes += _left_over({key: path for key, path in rest.items() if key != found.step_key}, root)
    return found


def clean_names(names: Sequence[str]) -> list[str]:
    """Remove wrapper prefixes from parameter names; ``module.`` only where every name has it."""
    cleaned = [_unwrapped(name) for name in names]
    while cleaned and all(name.startswith(_REPLICATED) for name in cleaned):
        cleaned = [name.removeprefix(_REPLICATED) for name in cleaned]
    return cleaned


def _unwrapped(name: str) -> str:
    for word in _WRAPPERS:
        name = name.replace(word, "")
    return name


def _optimizers(paths: Mapping[str, Path]) -> list[_Optimizer]:
    """Find the optimizers: dicts with parameter groups."""
    split = {key: _split(path) for key, path in _with_roots(paths).items()}
    roots: dict[Path, _Optimizer] = {}
    for path in split.values():
        depth = next((depth for depth, part in enumerate(path) if part in (GROUPS, f"{GROUPS}.")), None)
        if depth is not None:
            roots.setdefault(path[:depth], _Optimizer(path[:depth]))
    for root, optimizer in roots.items():
        depth = len(root)
        _take(optimizer, {key: path[depth:] for key, path in split.items() if path[:depth] == root})
    return list(roots.values())


def _with_roots(paths: Mapping[str, Path]) -> Mapping[str, Path]:
    """Split flat keys (``optimizer.state.x``) at the start of the optimizer's part."""
    full = {key: str(path[0]) for key, path in paths.items() if len(path) == 1}
    roots = {text.partition(f".{GROUPS}.")[0] for text in full.values() if f".{GROUPS}." in text}
    split = dict(paths)
    for root in roots:
        for key, text in full.items():
            if text.startswith((f"{root}.{GROUPS}.", f"{root}.{STATE}.")):
                split[key] = (root, text.removeprefix(f"{root}."))
    return split


def _split(path: Path) -> Path:
    """Split ``("optim", "state.x.exp_avg")`` as ``("optim", "state.", "x.exp_avg")``.

    The dot marks a joined key.
    """
    parts: list[str | int] = []
    for part in path:
        head, dot, tail = str(part).partition(".")
        parts += [f"{head}.", tail] if dot and head in (STATE, GROUPS) else [part]
    return tuple(parts)


def _take(optimizer: _Optimizer, paths: Mapping[str, Path]) -> None:
    """Register the entries below an optimizer's root."""
    joined: dict[str, str] = {}
    for key, (head, *inner) in ((key, path) for key, path in paths.items() if path):
        if head == GROUPS and len(inner) == 2 and isinstance(inner[0], int):
            optimizer.groups.setdefault(inner[0], {})[str(inner[1])] = key
        elif head == GROUPS and not inner:
            optimizer.whole_groups = key
        elif head == f"{GROUPS}.":
            parameter, _, option = ".".join(map(str, inner)).rpartition(".")
            optimizer.groups.setdefault(parameter, {})[option] = key
        elif head == STATE and len(inner) > 1:
            optimizer.values[str(inner[0]), ".".join(map(str, inner[1:]))] = key
        elif head == f"{STATE}.":
            joined[".".join(map(str, inner))] = key
        elif head in (GROUPS, STATE):
            optimizer.odd.append(key)
    known = {group for group in optimizer.groups if isinstance(group, str)}
    for text, key in joined.items():
        optimizer.values[_parameter_in(text, known)] = key


def _parameter_in(text: str, known: set[str]) -> tuple[str, str]:
    """Split ``blocks.0.weight.exp_avg`` into parameter and state key.

    At the longest known parameter, else at the last dot.
    """
    end = text.rfind(".")
    while end > 0 and text[:end] not in known:
        end = text.rfind(".", 0, end)
    end = end if end > 0 else text.rfind(".")
    return text[:end], text[end + 1 :]


def _weights(stored_keys: Mapping[str, Path]) -> tuple[Path, dict[str, Path]]:
    """Return the root of the weights, and the entries that are weights."""
    root: Path = ()
    known = False  # below a common key of weights
    while True:
        depth = len(root)
        below = {k: p for k, p in stored_keys.items() if p[:depth] == root and len(p) > depth and _may_be_weight(p)}
        nested = {path[depth] for path in below.values() if len(path) > depth + 1}
        leaves = {key: path for key, path in below.items() if len(path) == depth + 1}
        called = next((name for name in _WEIGHTS if name in nested), None)
        inside = {path[depth] for path in below.values() if len(path) > depth + 2 and path[depth + 1] in _WEIGHTS}
        if called is not None and not (known and leaves):
            root, known = (*root, called), True
        elif known:
            return root, below
        elif any("." in str(path[-1]) for path in leaves.values()):
            return root, leaves
        elif inside:
            root = (*root, min(inside, key=str))
        elif leaves:
            return root, leaves
        elif len(nested) == 1 and not root:
            root, known = tuple(nested), True
        else:
            return root, below


def _may_be_weight(path: Path) -> bool:
    return not (_is_counter(path) or str(path[-1]).endswith(_EXTRA_STATE) or str(path[0]) in _NO_WEIGHTS)


def _is_counter(path: Path) -> bool:
    return path[-1] in _COUNTERS and path[:-1] in _COUNTED_IN


def _step_key(paths: Mapping[str, Path]) -> str | None:
    counters = {path: key for key, path in paths.items() if _is_counter(path)}
    order = [(*where, name) for name in _COUNTERS for where in _COUNTED_IN]
    return next((counters[path] for path in order if path in counters), None)


def _left_over(paths: Mapping[str, Path], root: Path) -> list[str]:
    """Describe what is not converted, by top-level key."""
    extra = sorted(key for key, path in paths.items() if str(path[-1]).endswith(_EXTRA_STATE))
    counts: Counter[str] = Counter()
    for path in (path for path in paths.values() if not str(path[-1]).endswith(_EXTRA_STATE)):
        depth = next((d for d, part in enumerate(root) if path[d : d + 1] != (part,)), len(root))
        counts[".".join(map(str, path[: depth + 1]))] += 1
    notes = []
    if extra:
        others = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        notes.append(f"not carried over, for it means something to its module alone: '{extra[0]}'{others}")
    if counts:
        listed = [f"'{name}'" + (f" ({n} entries)" if n > 1 else "") for name, n in sorted(counts.items())]
        listed = [*listed[:_SHOWN], f"{len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else listed
        notes.append(f"not carried over, for it is neither weights nor optimizer state: {', '.join(listed)}")
    return notes


def _put(found: Found, name: str, key: str) -> None:
    if name in found.tensors:
        twice = printable(f"{name} is there twice, as '{found.tensors[name]}' and as '{key}'")
        raise CheckpointError(f"{twice}; keep one of them")
    found.tensors[name] = key


@dataclass
class _Filing:
    """Builder of optimizer state stored by name, and of its non-tensor state."""

    found: Found
    tensors: set[str]
    value: Callable[[str], Any]

    def file(self, optimizers: Sequence[_Optimizer]) -> None:
        groups: list[ParamGroup] = []
        scalars: dict[str, dict[str, Any]] = {}
        for optimizer in optimizers:
            saved = self._groups(optimizer)
            names = self._names(saved)
            if names is None:
                count = len({parameter for parameter, _ in optimizer.values})
                self.found.notes.append(
                    f"'{optimizer.where}' keeps the state of {count} parameters by number, not by name, and is not "
                    "carried over; torch.distributed.checkpoint.state_dict.get_optimizer_state_dict keeps names"
                )
                continue
            for group in saved:
                options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                kept = self._plain(options, f"{optimizer.where}, option ")
                groups.append(ParamGroup(params=tuple(names[str(p)] for p in group.get("params", ())), options=kept))
            for (parameter, state), key in optimizer.values.items():
                self._state(names.get(parameter) or _unwrapped(parameter), state, key, scalars)
            self.found.notes += [
                f"'{key}' is optimizer state of no known form and is not carried over" for key in optimizer.odd
            ]
        if groups or scalars or any(name.startswith("optimizer/") for name in self.found.tensors):
            kind, doubt = _kind_of([group.options for group in groups])
            self.found.notes += [doubt] * bool(doubt)
            self.found.optimizer = OptimizerEntry(name=kind, groups=tuple(groups), state=scalars).model_dump()

    def _state(self, parameter: str, state: str, key: str, scalars: dict[str, dict[str, Any]]) -> None:
        if "/" in state:
            self.found.notes.append(f"'{key}' has a slash in the name of the state and is not carried over")
        elif key in self.tensors:
            _put(self.found, f"optimizer/{parameter}/{state}", key)
        else:
            scalars.setdefault(parameter, {}).update(self._plain({state: self.value(key)}, f"optimizer/{parameter}/"))

    def _plain(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Convert the values to JSON, with a note about each that JSON cannot represent."""
        kept: dict[str, Any] = {}
        for name, value in values.items():
            try:
                kept[name] = plain(value, where + name)
            except CheckpointError:
                what = value.name if isinstance(value, InertRecord) else type(value).__name__
                self.found.notes.append(f"{where}{name} is a {what} and is not carried over")
        return kept

    def _groups(self, optimizer: _Optimizer) -> list[dict[str, Any]]:
        """Return each group's options and ``params``.

        Parameters with their own options are grouped by equal options.
        """
        if optimizer.whole_groups is not None:
            full = self.value(optimizer.whole_groups)
            if not isinstance(full, list) or not all(isinstance(group, dict) for group in full):
                what = printable(optimizer.whole_groups)
                raise CheckpointError(f"'{what}' is not a list of parameter groups; save it again")
            return full
        read = {group: {o: self.value(key) for o, key in keys.items()} for group, keys in optimizer.groups.items()}
        numbers = sorted(group for group in read if isinstance(group, int))
        alike: dict[str, dict[str, Any]] = {}
        for parameter, options in read.items():
            if isinstance(parameter, str):
                text = json.dumps(options, default=repr, sort_keys=True)
                alike.setdefault(text, {**options, "params": []})["params"].append(parameter)
        return [*(read[number] for number in numbers), *alike.values()]

    def _names(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
        """Return the names of the groups' members; ``None`` if they are numbers without names."""
        named: dict[str, str] = {}
        for group in groups:
            members, labels = group.get("params", []), group.get("param_names", [])
            if not isinstance(members, list | tuple) or not isinstance(labels, list | tuple):
                return None
            if all(isinstance(member, str) for member in members):
                labels = members
            if len(labels) != len(members) or not all(isinstance(label, str) for label in labels):
                return None
            named.update(zip(map(str, members), labels, strict=True))
        cleaned = clean_names(list(named.values()))
        return {member: self._known(named[member]) or name for member, name in zip(named, cleaned, strict=True)}

    def _known(self, label: str) -> str | None:
        """Return the name of a parameter's weights."""
        name = _unwrapped(label)
        while f"model/{name}" not in self.found.tensors and name.startswith(_REPLICATED):
            name = name.removeprefix(_REPLICATED)
        return name if f"model/{name}" in self.found.tensors else None


def _kind_of(groups: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the optimizer's class as its options suggest, and any doubt."""
    options = set().union(*groups) if groups else set()
    kind = next((kind for kind, signs in _BY_OPTIONS.items() if signs <= options), "")
    if not kind:
        return "", "the class of the optimizer is not saved, and its options do not identify it"
    if kind == "AdamW":
        decoupled = {group.get("decoupled_weight_decay") for group in groups}
        if decoupled == {False}:
            return "Adam", ""
        if decoupled != {True} and any(group.get("weight_decay") for group in groups):
            return kind, "the class of the optimizer is not saved: Adam or AdamW, and it is taken as AdamW"
    return kind, ""
