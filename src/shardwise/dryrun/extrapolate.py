"""Extrapolate traces from a few blocks to all: each further block adds the same bytes.

The position of a phase's peak depends on the depth: backward peaks at its start if activations dominate, and at its end
if gradients do. So the peaks of its beginning, of its end and of the complete phase are extrapolated separately;
beginning and end cover complete blocks, and the middle changes linearly between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.dryrun.record import StorageEvent

if TYPE_CHECKING:
    from torch import nn

SMALLEST, LARGEST = 2, 7  # traced numbers of blocks
Key = tuple[str, ...]


@dataclass(frozen=True)
class Traced:
    """Trace at one depth: live bytes after each event of each phase, and other numbers."""

    blocks: int
    live: dict[Key, list[int]]
    others: dict[Key, int]


def live_by_phase(events: Sequence[StorageEvent]) -> dict[Key, list[int]]:
    """Return the live bytes at the start of each (step, phase, repetition) and after each event."""
    found: dict[Key, list[int]] = {}
    times: dict[tuple[int, str], int] = {}
    place: tuple[int, str] | None = None
    key: Key = ()
    live = 0
    for event in events:
        if (event.step, event.phase) != place:
            place = (event.step, event.phase)
            times[place] = times.get(place, 0) + 1
            key = (str(event.step), event.phase, str(times[place]))
            found[key] = [live]
        live += event.num_bytes
        if event.num_bytes:
            found[key].append(live)
    return found


def extended(traces: Sequence[Traced], blocks: int) -> dict[Key, int] | None:
    """Extrapolate each phase's peak and the other numbers to ``blocks``.

    ``None`` until the last three traces agree. Phases have the keys (step, phase), the others their own.
    """
    if len(traces) < 3:
        return None
    first, second, third = traces[-3:]
    if not (first.live.keys() == second.live.keys() == third.live.keys()):
        return None
    if not (first.others.keys() == second.others.keys() == third.others.keys()):
        return None
    rows = [dict(trace.others) for trace in (first, second, third)]
    for key in third.live:
        windows = _window(first, second, third, key)
        if windows is None:
            return None
        for row, trace in zip(rows, (first, second, third), strict=True):
            live = trace.live[key]
            row[(*key, "any")] = max(live)
            if key[1] in ("forward", "backward"):  # the others are several passes over all weights
                row[(*key, "begin")] = max(live[:windows])
                row[(*key, "end")] = max(live[-windows:])
    return _line(rows, third, blocks)


def _window(first: Traced, second: Traced, third: Traced, key: Key) -> int | None:
    """Find the events of a phase except its repeated middle; ``None`` if it grows unevenly."""
    lengths = [len(trace.live[key]) for trace in (first, second, third)]
    each = lengths[2] - lengths[1]
    if lengths[1] - lengths[0] != each or each < 0:
        return None
    return lengths[0] - each * (first.blocks - 2) if each else lengths[0]


def _line(rows: Sequence[Mapping[Key, int]], last: Traced, blocks: int) -> dict[Key, int] | None:
    found: dict[Key, int] = {}
    for key, value in rows[2].items():
        each = value - rows[1][key]
        if rows[1][key] - rows[0][key] != each:
            return None
        found[key] = value + (blocks - last.blocks) * each
    for key in last.live:
        parts = [(*key, part) for part in ("begin", "end", "any")]
        peak = max(found.pop(part) for part in parts if part in found)
        found[key[:2]] = max(peak, found.get(key[:2], 0))
    return found


def shorten(module: nn.Module, blocks: int) -> None:
    """Truncate ``module`` in place to its first ``blocks`` repeated blocks."""
    container, names = _container(module)
    for name in names[blocks:][::-1]:
        if hasattr(container, "__delitem__"):
            del container[name if not name.isdigit() else int(name)]  # type: ignore[operator]


def depth_of(module: nn.Module) -> int | None:
    """Return the number of equal blocks in one container that can be truncated; else ``None``."""
    from torch import nn

    try:
        container, names = _container(module)
    except ValueError:
        return None
    if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict) or len(names) != len(container):
        return None
    kinds = {tuple(_facts(container.get_submodule(name))) for name in names}
    return len(names) if len(kinds) == 1 else None


def _container(module: nn.Module) -> tuple[nn.Module, list[str]]:
    from shardwise.model.read import find_blocks

    parts = [name.rpartition(".") for name in find_blocks(module)]
    if len({parent for parent, _, _ in parts}) != 1:
        raise ValueError("the blocks are in several containers")
    return module.get_submodule(parts[0][0]), [child for _, _, child in parts]


def _facts(block: nn.Module) -> Iterator[tuple[object, ...]]:
    """Yield the facts that equal blocks share.

    Types, shapes, and numeric and text attributes except a block's index.
    """
    for name, part in block.named_modules():
        own = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, (int, float, str, bool)) and not key.startswith("_") and "idx" not in key
        }
        own.pop("layer_index", None)
        own.pop("index", None)
        yield name, type(part), tuple(sorted((k, str(v)) for k, v in own.items()))
    for name, parameter in block.named_parameters():
        yield name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad
