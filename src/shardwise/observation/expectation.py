"""`Expectation`: what a training loop was meant to do."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardwise.errors import UserError
from shardwise.plan.strategy import Strategy, parse_strategy

Wrapper = Literal["DDP", "FSDP2", "FSDP1", "DeepSpeed"]
Precision = Literal["fp32", "bf16", "fp16"]


class Expectation(BaseModel):
    """Settings that a loop should have; ``None`` is not stated, so it is reported and not judged.

    ``source`` names where they come from. ``wrapper`` is left to the strategy unless a tool's settings name one.
    ``tied`` are groups of parameter names that are one parameter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = ""
    strategy: Strategy | None = None
    wrapper: Wrapper | None = None
    precision: Precision | None = None
    grad_accum: int | None = None
    clip_norm: float | None = None
    recompute: bool | None = None
    tied: tuple[tuple[str, ...], ...] = ()


def of_strategy(text: str, source: str = "") -> Expectation:
    """Return the expectation of a strategy string.

    Raises:
        PlanError: it is not in the grammar.
        UserError: it splits the model or swaps it, which is not judged in another tool's loop.
    """
    strategy = parse_strategy(text)
    if strategy.splits_model or "nvme" in text:
        raise UserError(
            f"observe: expect = '{text}'; tp, pp, cp and NVMe are not judged in a loop of another tool: train with "
            f"shardwise.start('{text}'), whose receipt judges them, or expect the rest, '{strategy.base}'"
        )
    wrapper: Wrapper | None = "DeepSpeed" if strategy.engine == "deepspeed" else None
    return Expectation(source=source or f"strategy {strategy}", strategy=strategy, wrapper=wrapper)
