"""What part of the whole model a rank's module is, for those who look at it from outside (checkpoints, receipts)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

_MARK = "_shardwise_home"


@dataclass(frozen=True)
class Home:
    """A pipeline stage (or the whole model) as it lies on this rank; names are those of the whole model.

    ``ranks`` hold the same plain tensors as this one, in ascending order; together with this one they are all ranks of
    its stage. ``names`` are all parameters and persistent buffers of the whole model (tied ones under the first of
    their names), in its order. ``aliases`` maps every other name of a tied parameter to the first one. ``borrowed`` are
    parameters that are here because this stage uses them too, and that another stage owns: it writes and counts them.
    ``transient`` are the whole model's buffers that are not persistent.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()
    transient: frozenset[str] = frozenset()

    def canonical(self, name: str) -> str:
        """The name under which a parameter is stored, whichever of its names this is."""
        return self.aliases.get(name, name)


def set_home(module: nn.Module, home: Home) -> None:
    """Note it on the module that is trained."""
    object.__setattr__(module, _MARK, home)


def home_of(module: nn.Module) -> Home | None:
    """What was noted; ``None`` for a module that is whole on every rank."""
    found: Home | None = module.__dict__.get(_MARK)
    return found
