"""The strategy grammar: one string for every way to spread a model, the same for every engine.

``ddp``, ``zero1``, ``zero2``, ``fsdp`` and ``hsdp``, each optionally with ``+offload`` where PyTorch can;
``auto`` lets the search choose. ``zero3`` and the FSDP1 names are understood and written as ``fsdp``.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from shardwise.errors import PlanError, did_you_mean

Base = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]

BASES: tuple[Base, ...] = get_args(Base)
ALIASES: dict[str, Base] = {
    "zero3": "fsdp",
    "full_shard": "fsdp",
    "shard_grad_op": "zero2",
    "hybrid_shard": "hsdp",
    "no_shard": "ddp",
}
SHARDED: frozenset[Base] = frozenset({"zero2", "fsdp", "hsdp"})
LATER = ("nvme", "tp", "pp", "cp", "lora", "qlora")


class Strategy(BaseModel):
    """A parsed strategy string; ``str()`` gives the normal form back."""

    model_config = ConfigDict(frozen=True)

    base: Base
    offload: bool = False

    def __str__(self) -> str:
        return f"{self.base}+offload" if self.offload else self.base

    @property
    def shards_parameters(self) -> bool:
        """True where parameters are DTensors (FSDP2 underneath)."""
        return self.base in SHARDED

    @property
    def reshards_after_forward(self) -> bool:
        """True where a block's parameters are freed between its forward and its backward."""
        return self.base in ("fsdp", "hsdp")


def parse_strategy(text: str) -> Strategy:
    """Read ``fsdp+offload`` and the like.

    Raises:
        PlanError: every word that is not in the grammar, each with the nearest one that is.
    """
    words = [word.strip().lower() for word in text.split("+")]
    problems: list[str] = []
    base = ALIASES.get(words[0], words[0])
    if base not in BASES:
        known = [*BASES, *ALIASES, "auto"]
        hint = did_you_mean(words[0], known)
        problems.append(f"strategy '{text}': '{words[0]}' is none of {', '.join(BASES)}, auto{hint}")
    for word in words[1:]:
        if word == "offload":
            continue
        if word.rstrip("0123456789") in LATER:
            problems.append(f"strategy '{text}': '+{word}' is not supported by this version; leave it out")
        else:
            problems.append(f"strategy '{text}': '+{word}' is no option{did_you_mean(word, ['offload'])}; use +offload")
    offload = "offload" in words[1:]
    if not problems and offload and base not in SHARDED:
        problems.append(
            f"strategy '{text}': PyTorch can offload only sharded parameters (FSDP2's CPUOffloadPolicy), "
            f"and {base} keeps whole ones; use zero2+offload or fsdp+offload"
        )
    if problems:
        raise PlanError(*problems)
    return Strategy(base=base, offload=offload)
