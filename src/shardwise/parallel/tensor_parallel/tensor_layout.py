"""`TensorLayout`: how a model is cut over the tensor-parallel ranks, as data. Nothing here computes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["colwise", "rowwise", "colwise_gather", "colwise_loss", "embedding", "reads"]
Place = tuple[str, int | str]  # ("args", position) or ("kwargs", name)
CONFIG = "config."
Slices = tuple[tuple[int, int], ...]  # from, to; ascending


@dataclass(frozen=True)
class ParameterView:
    """How a module reads one of its parameters.

    ``dim`` is the dim that it is cut along (``None``: whole on every rank). ``uses`` says for each rank which part of
    ``uses_dim`` it computes with; empty where that is simply what it holds. ``partial``: each rank's gradient is a part
    of the sum.
    """

    dim: int | None = None
    uses: tuple[Slices, ...] = ()
    uses_dim: int = 0
    partial: bool = False


@dataclass(frozen=True)
class ModuleCut:
    """The forward that a module is given. ``group`` names the entry that it shares with others."""

    kind: Kind
    held: dict[str, ParameterView] = field(default_factory=dict)
    group: str = ""


@dataclass(frozen=True)
class GatheredArgument:
    """An argument of a module that is gathered along the sequence before its forward."""

    place: Place
    group: str


@dataclass(frozen=True)
class TensorLayout:
    """How a model is cut over the tensor-parallel ranks; names are those of the whole model.

    ``shard_dim`` names only parameters that are cut. ``styles`` is the same in words: module pattern to style.
    ``first`` and ``last`` are the blocks where a whole sequence is cut and put together again (empty where it is not
    cut), with the places of the hidden states in their arguments. ``logits`` is where the model's output has the
    vocabulary cut over the ranks, as a key or an index (``None``: nowhere). ``attributes`` are whole numbers that
    modules go by, as they are for one rank's share. ``lent``: for a module, those whose parameters its forward computes
    with.
    """

    shard_dim: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    styles: dict[str, str] = field(default_factory=dict)
    modules: dict[str, ModuleCut] = field(default_factory=dict)
    entries: dict[str, tuple[GatheredArgument, ...]] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    lent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    first: str = ""
    last: str = ""
    hidden: Place = ("args", 0)
    logits: str | int | None = None
    vocab: int = 0


def set_numbers(place: dict[str, Any], changed: dict[str, int]) -> None:
    """Change whole numbers among a module's attributes, or in a configuration that it alone has a copy of then."""
    for key, value in changed.items():
        if key.startswith(CONFIG):
            place["config"] = copy.copy(place["config"])
            place["config"].__dict__[key.removeprefix(CONFIG)] = value
        else:
            place[key] = value


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """From and to of a rank's part of ``size``, as ``torch.chunk`` cuts: the last ones may have less, or nothing."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)
