"""Checkpoint contents and damage, for people and for programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.format import Manifest
from shardwise.checkpoint.inspect import Damage, Inspection, TensorLine
from shardwise.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from shardwise.checkpoint.integrity import Verification

SCHEMA = 1
ROWS = 40  # rows of a group; the rest is only counted
SHOWN = 20  # faults that are printed; all are in --json
_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")
_OPTIONS = ("lr", "weight_decay", "betas", "momentum")
_OTHER_SHAPES = ("absmax1", "absmax2", "row_var", "col_var")  # optimizer state that does not have its parameter's shape


@dataclass(frozen=True)
class _Row:
    """Tensors that differ only in the numbers in their names."""

    name: str
    lines: Sequence[TensorLine]

    @property
    def num_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    @property
    def shards(self) -> str:
        if any(line.shards is None for line in self.lines):
            return ""
        return str(sum(line.shards or 0 for line in self.lines))


def print_inspection(found: Inspection, console: Console, *, everything: bool = False) -> None:
    """Print head, tables, notes and damage; ``everything``: a row for each tensor."""
    for line in _head(found):
        console.print(line, markup=False)
    for title, lines in _groups(found.lines):
        if lines:
            console.print(_table(title, lines, everything=everything))
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    print_damage(found.damage, console)


def print_verification(found: Verification, console: Console) -> None:
    """Print the amount read, the rate, and the damage."""
    speed = f" in {seconds_text(found.seconds)}" if found.seconds else ""
    if found.seconds and found.num_bytes:
        speed += f", {bytes_text(found.num_bytes / found.seconds)}/s"
    files = f" in {_count(found.files, 'file')}" if found.files else ""
    step = "" if found.step is None else f", step {found.step}"
    console.print(f"checkpoint: {found.place} ({found.kind}{step})", markup=False)
    console.print(f"read: {_count(found.tensors, 'tensor')}{files}, {bytes_text(found.num_bytes)}{speed}", markup=False)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    print_damage(found.damage, console)
    if not found.damage and found.hashed:
        console.print("[green]✓[/] every byte is what was saved")


def print_damage(damage: Sequence[Damage], console: Console) -> None:
    """Print one line for each fault, in red; only the first ones of many."""
    for one in damage[:SHOWN]:
        console.print(Text("✗ ", "red").append(str(one), ""))
    if len(damage) > SHOWN:
        console.print(f"  and {len(damage) - SHOWN} more in --json", markup=False)


def inspection_json(found: Inspection) -> dict[str, Any]:
    """Build the document of ``inspect --json``; ``null`` is unknown."""
    manifest = found.manifest
    state = manifest.state if manifest else {}
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": found.kind,
        "place": found.place,
        "step": found.step,
        "loss": _number(state.get("loss")),
        "created": manifest.created if manifest else None,
        "strategy": _plan(manifest).get("strategy"),
        "precision": _plan(manifest).get("precision"),
        "plan": manifest.plan if manifest else None,
        "plan_fingerprint": manifest.plan_fingerprint if manifest else None,
        "ranks": manifest.ranks if manifest else None,
        "versions": manifest.versions if manifest else None,
        "model": manifest.model if manifest else None,
        "data_position": state.get("position"),
        "tokens": state.get("tokens"),
        "optimizer": {key: found.optimizer.get(key) for key in ("name", "groups")} if found.optimizer else None,
        "rng": {rank: sorted(names) for rank, names in found.rng.items()},
        "bytes": found.num_bytes,
        "files": dict(found.sizes) or None,
        "others": list(found.others),
    }
    tensors = [
        {
            "name": line.name,
            "dtype": line.dtype,
            "shape": list(line.shape),
            "bytes": line.num_bytes,
            "shards": line.shards,
        }
        for line in found.lines
    ]
    tail = {"aliases": dict(found.aliases), "damage": damage_json(found.damage), "notes": list(found.notes)}
    return {**head, "tensors": tensors, **tail}


def verification_json(found: Verification) -> dict[str, Any]:
    """Build the document of ``verify --json``."""
    return {
        "schema": SCHEMA,
        "kind": found.kind,
        "place": found.place,
        "ok": not found.damage,
        "hashed": found.hashed,
        "step": found.step,
        "tensors": found.tensors,
        "files": found.files,
        "bytes": found.num_bytes,
        "seconds": found.seconds,
        "damage": damage_json(found.damage),
        "notes": list(found.notes),
    }


def damage_json(damage: Sequence[Damage]) -> list[dict[str, Any]]:
    """List file, kind and tensors of each fault."""
    return [{"file": one.file, "what": one.what, "tensors": list(one.tensors)} for one in damage]


class ReadProgress:
    """Progress of reading, with rate and time left, on a terminal only. A context manager."""

    def __init__(self, console: Console) -> None:
        columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)
        self._task: TaskID | None = None
        self._quiet = not console.is_terminal

    def __enter__(self) -> ReadProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def begin(self, total: int) -> None:
        """Start with the total number of bytes."""
        if not self._quiet:
            self._task = self._bar.add_task("reading", total=total)
            self._bar.start()

    def tick(self, num_bytes: int) -> None:
        """Add bytes that were read; from any thread."""
        if self._task is not None:
            self._bar.advance(self._task, num_bytes)


def _head(found: Inspection) -> Iterable[str]:
    manifest = found.manifest
    yield f"checkpoint: {found.place} ({found.kind})"
    if manifest is not None:
        yield from _facts(manifest)
    elif found.step is not None:
        yield f"step: {found.step}"
    if found.optimizer:
        yield f"optimizer: {_optimizer(found.optimizer)}"
    if found.rng:
        names = sorted({name for names in found.rng.values() for name in names})
        yield f"random states: {', '.join(names)} of {_count(len(found.rng), 'rank')}"
    on_disk = f", {bytes_text(sum(found.sizes.values()))} in {_count(len(found.sizes), 'file')}" if found.sizes else ""
    yield f"size: {bytes_text(found.num_bytes)} of tensors{on_disk}"
    if found.aliases:
        tied = ", ".join(f"{alias} = {name}" for alias, name in list(found.aliases.items())[:3])
        yield f"tied: {tied}" + (f" and {len(found.aliases) - 3} more" if len(found.aliases) > 3 else "")
    if found.others:
        yield f"also there: {', '.join(found.others)}"


def _facts(manifest: Manifest) -> Iterable[str]:
    """Yield a manifest's facts beside the tensors."""
    state, plan = manifest.state, _plan(manifest)
    loss = _number(state.get("loss"))
    created = f", saved {manifest.created}" if manifest.created else ""
    yield f"step: {manifest.step}" + ("" if loss is None else f", loss {loss:.4f}") + created
    facts = [str(plan.get("strategy", "unknown strategy")), f"on {_count(manifest.ranks, 'rank')}"]
    facts += [str(plan["precision"])] if "precision" in plan else []
    facts += [f"recompute {plan['recompute']}"] if plan.get("recompute", "none") != "none" else []
    yield f"plan: {', '.join(facts)} ({manifest.plan_fingerprint})" if plan else "plan: none; it was converted"
    yield f"model: {_model(manifest.model)}"
    yield from _adapter(manifest.model)
    if "position" in state:
        tokens = _number(state.get("tokens"))
        yield f"data: position {state['position']}" + ("" if tokens is None else f", {count_text(tokens)} tokens")
    written = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield f"written by: {written or 'unknown'}; schema {manifest.schema_version}"


def _plan(manifest: Manifest | None) -> Mapping[str, Any]:
    return manifest.plan if manifest else {}


def _model(facts: Mapping[str, Any] | None) -> str:
    if not facts:
        return "not said"
    if facts.get("kind") == "factory":
        given = ", ".join(f"{key}={value}" for key, value in (facts.get("kwargs") or {}).items())
        return f"{facts.get('factory')}({given})"
    config = facts.get("config")
    if isinstance(config, Mapping):
        classes = ", ".join(map(str, config.get("architectures") or ()))
        return f"{config.get('model_type', 'unknown')}" + (f" ({classes})" if classes else "") + ", transformers"
    return str(facts.get("kind", "unknown"))


def _adapter(facts: Mapping[str, Any] | None) -> Iterable[str]:
    """Yield facts of a checkpoint of adapters, and of the base, which it does not contain."""
    adapter, base = (facts or {}).get("adapter"), (facts or {}).get("base")
    if not isinstance(adapter, Mapping):
        return
    options = adapter.get("options") or {}
    layers = adapter.get("targets") or ()
    ends = ", ".join(dict.fromkeys(str(name).rpartition(".")[2] for name in layers))
    words = [f"rank {options.get('rank', '?')}", f"alpha {_short_number(options.get('alpha', '?'))}"]
    words += [word for word, key in (("rslora", "rslora"), ("DoRA", "dora")) if options.get(key)]
    if adapter.get("kind") == "qlora":
        packed = f"base packed to {options.get('quant_type', '?')}"
        words.append(packed + (", scales too" if options.get("double_quant") else ""))
    yield f"adapters only: {adapter.get('kind', '?')}, {', '.join(words)}; {_count(len(layers), 'layer')} ({ends})"
    if in_full := adapter.get("in_full"):
        yield f"trained in full beside them: {', '.join(map(str, in_full))}"
    if isinstance(base, Mapping) and base.get("weights") is not None:
        yield f"base: '{base['weights']}', digest {base.get('digest', 'unknown')}; merge with: checkpoint merge-lora"
    elif isinstance(base, Mapping):
        yield f"base: drawn from seed {base.get('seed', 'unknown')}; merge with: checkpoint merge-lora"


def _short_number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _optimizer(facts: Mapping[str, Any]) -> str:
    groups = facts.get("groups") or ()
    text = f"{facts.get('name') or 'unknown'}, {_count(len(groups), 'group')}"
    options = groups[0].get("options", {}) if groups else {}
    shown = ", ".join(f"{key} {_short_number(options[key])}" for key in _OPTIONS if key in options)
    return f"{text} ({shown}{' in the first' if len(groups) > 1 else ''})" if shown else text


def _groups(lines: Sequence[TensorLine]) -> Sequence[tuple[str, list[TensorLine]]]:
    groups: dict[str, list[TensorLine]] = {"weights": [], "optimizer state": [], "averaged weights": [], "other": []}
    for line in lines:
        kinds = {"model": "weights", "optimizer": "optimizer state", "ema": "averaged weights"}
        kind = kinds.get(line.name.split("/", 1)[0], "other")
        groups[kind].append(line)
    return list(groups.items())


def _table(title: str, lines: Sequence[TensorLine], *, everything: bool) -> Table:
    """Build a row per tensor, or per kind of tensor, and their total in the last."""
    rows = [_Row(_short(line.name), [line]) for line in lines] if everything else _folded(lines)
    shown = rows if everything or len(rows) <= ROWS else rows[: ROWS - 10]
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_footer=True)
    left = len(rows) - len(shown)
    table.add_column("tensor", footer=f"and {left} more kinds (--all)" if left else "", overflow="fold")
    total = _Row("", lines)
    table.add_column("", footer=str(len(lines)), justify="right")
    for name, footer in (("dtype", ""), ("shape", "")):
        table.add_column(name, footer=footer)
    for name, footer in (("bytes", bytes_text(total.num_bytes)), ("shards", total.shards)):
        table.add_column(name, footer=footer, justify="right", no_wrap=True)
    for row in shown:
        one = row.lines[0]
        shapes = {line.shape for line in row.lines}
        several = "several" if row.name in _OTHER_SHAPES else "as the parameter"
        shape = " × ".join(map(str, one.shape)) or "0-d" if len(shapes) == 1 else several
        many = f"{len(row.lines)} ×" if len(row.lines) > 1 else ""
        table.add_row(Text(row.name), many, one.dtype, shape, bytes_text(row.num_bytes), row.shards)
    return table


def _folded(lines: Sequence[TensorLine]) -> list[_Row]:
    """Group weights of one shape whose names differ in numbers, and state by its last name."""
    found: dict[tuple[object, ...], list[TensorLine]] = {}
    for line in lines:
        if line.name.startswith("optimizer/"):
            found.setdefault((line.name.rsplit("/", 1)[-1], line.dtype, not line.shape), []).append(line)
        else:
            found.setdefault((_NUMBER.sub("*", line.name), line.dtype, line.shape), []).append(line)
    return [_Row(_together([_short(line.name) for line in same]), same) for same in found.values()]


def _short(name: str) -> str:
    """Drop the first part of a name, which the table's title has."""
    return name.split("/", 1)[1] if name.startswith(("model/", "optimizer/", "ema/")) else name


def _together(names: Sequence[str]) -> str:
    """Merge names: numbers as a range, and optimizer state by its common part."""
    if len(names) == 1:
        return names[0]
    if len({_NUMBER.sub("*", name) for name in names}) > 1:
        return names[0].rsplit("/", 1)[-1]
    columns = zip(*([int(number) for number in _NUMBER.findall(name)] for name in names), strict=True)
    ranges = [(min(column), max(column)) for column in columns]
    texts = iter(str(low) if low == high else f"{{{low}…{high}}}" for low, high in ranges)
    return _NUMBER.sub(lambda match: next(texts), names[0])


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
