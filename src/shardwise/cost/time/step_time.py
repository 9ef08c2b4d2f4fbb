"""`StepTime`: predicted seconds of one optimizer step, and their breakdown."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StepTime(BaseModel):
    """Predicted seconds of one step on the slowest rank.

    The parts add up to ``step_s``; ``exposed_*`` is communication that no computation hides. ``low_s`` and ``high_s``
    bound the middle 80 % of the likely range, according to the model's error on published measurements. ``mfu`` is None
    where the device's peak is unknown; it counts 6 FLOPs per token and parameter that it uses plus the full attention
    square (the PaLM convention), recompute not counted.
    """

    model_config = ConfigDict(frozen=True)

    step_s: float
    low_s: float
    high_s: float
    compute_s: float = 0.0
    recompute_s: float = 0.0
    exposed_dp_s: float = 0.0
    exposed_tp_s: float = 0.0
    exposed_cp_s: float = 0.0
    exposed_ep_s: float = 0.0
    pipeline_s: float = 0.0
    optimizer_s: float = 0.0
    offload_s: float = 0.0
    host_s: float = 0.0
    samples_per_s_per_device: float | None = None
    tokens_per_s_per_device: float | None = None
    mfu: float | None = None
    calibrated: str = ""
