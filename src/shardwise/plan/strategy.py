"""Strategy grammar: one string for every parallelization, the same for every engine.

``ddp``, ``zero1``, ``zero2``, ``fsdp`` and ``hsdp``, each with any of ``+tp2``, ``+pp4``, ``+cp2``, ``+ep8``,
``+offload``, ``+nvme``, ``+lora`` and ``+qlora``; ``deepspeed-zero1``, ``-zero2`` and ``-zero3`` are the same plans on
DeepSpeed; ``auto`` lets the search choose. ``zero3`` and the FSDP1 names are understood and written as ``fsdp``.

Every string of the grammar can be planned. `not_runnable` lists the words that this version cannot run.
"""

from __future__ import annotations

import functools
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from shardwise.errors import PlanError, did_you_mean

Base = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
Engine = Literal["torch", "deepspeed"]
Adapter = Literal["none", "lora", "qlora"]

BASES: tuple[Base, ...] = get_args(Base)
ALIASES: dict[str, Base] = {
    "zero3": "fsdp",
    "full_shard": "fsdp",
    "shard_grad_op": "zero2",
    "hybrid_shard": "hsdp",
    "no_shard": "ddp",
}
DEEPSPEED: dict[str, Base] = {"deepspeed-zero1": "zero1", "deepspeed-zero2": "zero2", "deepspeed-zero3": "fsdp"}
SHARDED: frozenset[Base] = frozenset({"zero2", "fsdp", "hsdp"})
FLAGS = ("offload", "nvme", "lora", "qlora")
MOST_DIGITS = 6  # of a degree
LONGEST = 60  # characters of a strategy that a message repeats
DEGREES = ("tp", "pp", "cp")  # their product is the ranks that work on one sample
DEGREE_WORDS = (*DEGREES, "ep")  # `ep` spreads experts over ranks that the other axes already have


class Strategy(BaseModel):
    """Parsed strategy string with degrees ``tp``, ``pp``, ``cp``, ``ep``; ``str()`` normalizes it."""

    model_config = ConfigDict(frozen=True)

    base: Base
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    offload: bool = False
    nvme: bool = False
    adapter: Adapter = "none"
    engine: Engine = "torch"

    def __str__(self) -> str:
        return _text(self)

    @property
    def shards_parameters(self) -> bool:
        """Return True where the data-parallel ranks shard parameters (FSDP2)."""
        return self.base in SHARDED

    @property
    def reshards_after_forward(self) -> bool:
        """Return True where parameters of blocks are freed between forward and backward; see `keeps_last_block`."""
        return self.base in ("fsdp", "hsdp")

    @property
    def not_runnable(self) -> tuple[str, ...]:
        """Words of this strategy that this version plans but does not run; empty if it runs."""
        words = [f"+{self.adapter} with {other}" for other in self._beside_adapters] if self.adapter != "none" else []
        if self.ep > 1 and not self.shards_parameters:  # FSDP2 averages what the ranks with the same experts share
            words.append(f"{self.base} with +ep{self.ep}")
        if self.engine == "deepspeed":
            words += [f"deepspeed with +{axis}{getattr(self, axis)}" for axis in DEGREES if getattr(self, axis) > 1]
        if self.base == "zero1":  # PyTorch's ZeroRedundancyOptimizer needs plain tensors that all its ranks have
            words += [f"zero1 with +{name}{getattr(self, name)}" for name in ("tp", "pp") if getattr(self, name) > 1]
        return tuple(words)

    @property
    def _beside_adapters(self) -> list[str]:
        """Return the words that this version does not run with adapters."""
        words = [f"+{name}{getattr(self, name)}" for name in ("tp", "pp", "ep") if getattr(self, name) > 1]
        return [*words, "deepspeed"] if self.engine == "deepspeed" else words

    @property
    def splits_model(self) -> bool:
        """Return True where ranks share the work on one sample: any of ``+tp``, ``+pp``, ``+cp``."""
        return self.tp * self.pp * self.cp > 1


@functools.lru_cache(maxsize=4096)
def _text(strategy: Strategy) -> str:
    stage = "zero3" if strategy.base == "fsdp" else strategy.base
    words = [f"deepspeed-{stage}" if strategy.engine == "deepspeed" else strategy.base]
    words += [f"{name}{getattr(strategy, name)}" for name in DEGREE_WORDS if getattr(strategy, name) > 1]
    words += [name for name in FLAGS if getattr(strategy, name, False)]
    words += [strategy.adapter] if strategy.adapter != "none" else []
    return "+".join(words)


def complete_strategy(text: str) -> tuple[str, str]:
    """Return ``text`` with the strategy that it leaves out, and what to say about that; empty where nothing is.

    Degrees alone stand beside ``ddp``, experts, adapters and offload beside ``fsdp``; ``auto`` chooses none of them.
    """
    first, *rest = (word.strip().lower() for word in text.split("+"))
    words = rest if first == "auto" else [first, *rest]
    if first in ALIASES:
        return "+".join([ALIASES[first], *rest]), alias_note(first) or ""
    if not words or not all(word in FLAGS or word.rstrip("0123456789") in DEGREE_WORDS for word in words):
        return text, ""
    sharded = set(words) & set(FLAGS) or any(word.rstrip("0123456789") == "ep" for word in words)
    base = "deepspeed-zero3" if "nvme" in words else "fsdp" if sharded else "ddp"
    full = "+".join([base, *words])
    return full, f"strategy '{text}' is taken as {full}"


def runnable_strategy(text: str) -> Strategy:
    """Parse a strategy that is to be run.

    Raises:
        PlanError: it is not in the grammar, or this version only plans it.
    """
    strategy = parse_strategy(text)
    if strategy.not_runnable:
        words = ", ".join(strategy.not_runnable)
        raise PlanError(
            f"strategy '{text}': {words} can be planned but is not run by this version; "
            f"use one of {', '.join(BASES)} with any of +tp2, +pp2, +cp2 (zero1 only +cp2), where sharded with "
            "+ep2 and +offload, and +lora or +qlora without +tp, +pp and +ep; or deepspeed-zero1, 2 or 3 with "
            "+offload, 3 with +nvme"
        )
    return strategy


def alias_note(text: str) -> str | None:
    """Return a line about another tool's name in a strategy; ``None`` where the words are this grammar's."""
    first = text.partition("+")[0].strip().lower()
    if first not in ALIASES:
        return None
    also = "; deepspeed-zero3 runs DeepSpeed's" if first == "zero3" else ""
    return f"strategy: {first} is {ALIASES[first]} here, PyTorch's implementation of the same sharding{also}"


@functools.cache  # a plan requests its own in every step
def parse_strategy(text: str) -> Strategy:
    """Parse a strategy such as ``fsdp+tp2+offload``.

    Raises:
        PlanError: there are unknown words; names each of them with the nearest known one.
    """
    words = [word.strip().lower() for word in text.split("+")]
    given = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    problems: list[str] = []
    engine: Engine = "deepspeed" if words[0] in DEEPSPEED else "torch"
    base: str = {**ALIASES, **DEEPSPEED}.get(words[0], words[0])
    full, completed = complete_strategy(text)
    if given.strip().lower() == "auto":
        problems.append(
            f"strategy 'auto' is chosen by `shardwise plan` or `shardwise.start`; name one of {', '.join(BASES)}"
        )
    elif base not in BASES and completed:
        rule = "auto stands alone" if words[0] == "auto" else f"'{words[0]}' stands beside a strategy"
        problems.append(f"strategy '{given}': {rule}; write {full}")
    elif base not in BASES:
        known = [*BASES, *ALIASES, *DEEPSPEED, "auto"]
        hint = did_you_mean(words[0], known)
        problems.append(f"strategy '{given}': '{words[0]:.40}' is none of {', '.join(BASES)}, auto{hint}")
    degrees: dict[str, int] = {}
    flags: set[str] = set()
    for word in dict.fromkeys(words[1:]):
        problem = _read_word(word, degrees, flags)
        problems += [f"strategy '{given}': {problem}"] if problem else []
    if {"lora", "qlora"} <= flags:
        problems.append(f"strategy '{given}': +lora and +qlora exclude each other; keep one")
    torch_offload = flags & {"offload", "nvme"} and engine == "torch"
    if not problems and "nvme" in flags and (engine == "torch" or base != "fsdp"):
        problems.append(
            f"strategy '{given}': only DeepSpeed's ZeRO-3 swaps to NVMe; use deepspeed-zero3+nvme, or fsdp+offload for "
            "host RAM"
        )
    elif not problems and torch_offload and base not in SHARDED:
        problems.append(
            f"strategy '{given}': PyTorch can offload only sharded parameters (FSDP2's CPUOffloadPolicy), "
            f"and {base} keeps unsharded ones; use zero2+offload or fsdp+offload"
        )
    if problems:
        raise PlanError(*problems)
    adapter: Adapter = "qlora" if "qlora" in flags else "lora" if "lora" in flags else "none"
    return Strategy.model_validate(
        {"base": base, "engine": engine, "adapter": adapter}
        | {name: True for name in flags if name in Strategy.model_fields}
        | degrees
    )


def _read_word(word: str, degrees: dict[str, int], flags: set[str]) -> str:
    """Parse one ``+word``; return its problem, empty if there is none."""
    name = word.rstrip("0123456789")
    number = word.removeprefix(name)
    if word in FLAGS:
        flags.add(word)
        return ""
    if name in DEGREE_WORDS and len(number) > MOST_DIGITS:
        return f"'+{word:.12}...' is a degree that no cluster has; write +{name}2"
    if name in DEGREE_WORDS and number and int(number) >= 1:
        if degrees.setdefault(name, int(number)) != int(number):
            return f"+{name}{degrees[name]} and +{word} contradict each other; keep one"
        return ""
    if name in DEGREE_WORDS:
        return f"'+{word}' needs a degree of 1 or more; write +{name}2"
    known = [*FLAGS, *(f"{degree}2" for degree in DEGREE_WORDS)]
    return f"'+{word:.40}' is not an option{did_you_mean(word, known)}; known are {', '.join('+' + k for k in known)}"
