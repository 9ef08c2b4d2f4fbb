"""`TensorLayout`: sharding of a model over the tensor-parallel ranks, as data.

No computation here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["colwise", "rowwise", "colwise_gather", "colwise_loss", "embedding", "reads"]
ArgRef = tuple[str, int | str]  # ("args", position) or ("kwargs", name)
CONFIG = "config."
Slices = tuple[tuple[int, int], ...]  # start, end; ascending


@dataclass(frozen=True)
class ParameterView:
    """How a module reads one of its parameters.

    ``dim`` is the dim that it is sharded along (``None``: replicated). ``uses`` gives for each rank the part of
    ``uses_dim`` that it computes with; empty if that is simply its shard. ``partial``: each rank's gradient is a part
    of the sum.
    """

    dim: int | None = None
    uses: tuple[Slices, ...] = ()
    uses_dim: int = 0
    partial: bool = False


@dataclass(frozen=True)
class ModuleShard:
    """Forward that a module is given.

    ``group`` names the input entry that it shares with others.
    """

    kind: Kind
    local: dict[str, ParameterView] = field(default_factory=dict)
    group: str = ""


@dataclass(frozen=True)
class GatheredArgument:
    """Argument of a module that is gathered along the sequence before its forward."""

    place: ArgRef
    group: str


@dataclass(frozen=True)
class TensorLayout:
    """Sharding of a model over the tensor-parallel ranks; names are those of the full model.

    ``shard_dim`` names only sharded parameters. ``styles`` is the same in words: module pattern to style. ``first`` and
    ``last`` are the blocks where a full sequence is sharded and gathered (empty where it is not sharded), with the
    places of the hidden states in their arguments. ``logits`` is where the model's output has the vocabulary sharded
    over the ranks, as a key or an index (``None``: nowhere). ``attributes`` are integers among the attributes of
    modules, with their values for one rank. ``external_params``: for a module, those whose parameters its forward
    computes with.
    """

    shard_dim: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    styles: dict[str, str] = field(default_factory=dict)
    modules: dict[str, ModuleShard] = field(default_factory=dict)
    entries: dict[str, tuple[GatheredArgument, ...]] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    external_params: dict[str, tuple[str, ...]] = field(default_factory=dict)
    first: str = ""
    last: str = ""
    hidden: ArgRef = ("args", 0)
    logits: str | int | None = None
    vocab: int = 0


def set_numbers(place: dict[str, Any], changed: dict[str, int]) -> None:
    """Change integer attributes of a module, or of a configuration that it then copies."""
    for key, value in changed.items():
        if key.startswith(CONFIG):
            place["config"] = copy.copy(place["config"])
            place["config"].__dict__[key.removeprefix(CONFIG)] = value
        else:
            place[key] = value


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return start and end of a rank's part of ``size``, as ``torch.chunk`` splits.

    The last parts may be smaller or empty.
    """
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)
