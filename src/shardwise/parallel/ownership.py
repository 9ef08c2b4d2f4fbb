"""Ownership of a rank's part of the full model, for checkpoints and receipts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

_MARK = "_shardwise_home"


@dataclass(frozen=True)
class StageOwnership:
    """Pipeline stage (or the full model) on this rank; names are those of the full model.

    ``ranks`` have the same plain tensors as this one, in ascending order; together with this one they are all ranks of
    its stage. ``names`` are all parameters and persistent buffers of the full model (tied ones under the first of
    their names), in its order. ``aliases`` maps every other name of a tied parameter to the first one.
    ``shared_from_stage`` are parameters that this stage uses too but another stage owns: the owner writes and counts
    them. ``transient`` are the full model's buffers that are not persistent.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    shared_from_stage: frozenset[str] = frozenset()
    transient: frozenset[str] = frozenset()

    def canonical(self, name: str) -> str:
        """Return the name under which a parameter is stored, given any of its names."""
        return self.aliases.get(name, name)


def set_ownership(module: nn.Module, ownership: StageOwnership) -> None:
    """Record the ownership on the module that is trained."""
    object.__setattr__(module, _MARK, ownership)


def ownership_of(module: nn.Module) -> StageOwnership | None:
    """Return the recorded ownership; ``None`` for a module that is complete on every rank."""
    found: StageOwnership | None = module.__dict__.get(_MARK)
    return found
