"""`Workload`: what a step must hold besides the model: the optimizer's state and what a sample saves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Workload(BaseModel):
    """Facts that do not depend on the plan.

    ``optimizer_states`` is the number of parameter-shaped tensors the optimizer keeps (2 for AdamW, 1 for SGD with
    momentum), ``scalar_states`` the number of 0-d ones; ``None`` where the optimizer is not known.
    ``activation_bytes`` maps a recompute mode to the bytes that one sample saves for backward, logits included;
    ``None`` where it was not measured. ``parameter_groups`` are the names that the optimizer steps, group by group;
    ``None`` means every trainable parameter in one group.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer_states: int | None = 2
    scalar_states: int = 1
    activation_bytes: dict[str, int | None] = {}
    logits_bytes: int | None = None
    parameter_groups: tuple[tuple[str, ...], ...] | None = None
