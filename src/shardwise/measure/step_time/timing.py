"""Step time by component: the parts, their spread over ranks, and a run's means. No torch.

Every moment of a rank counts as exactly one part, so parts add up to the step by construction. A part that this run
cannot separate is ``None``, never 0: its time is inside the part around it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

PHASES = (
    "data",
    "transfer",
    "forward",
    "backward",
    "recompute",
    "exposed_dp",
    "exposed_tp",
    "exposed_cp",
    "exposed_ep",
    "pipeline",
    "clip",
    "optimizer",
    "slowest_rank",
    "control",
    "other",
)
"""Parts of a step, in order: waiting for the loader; host to device; forward; backward; recomputed forwards in
backward; waiting for a collective of each axis with nothing else to do; a stage without work (bubble, sends); clipping;
the optimizer; waiting for a late rank; the session's own control message; the caller's own code.
"""
BETWEEN = ("checkpoint", "evaluation")
"""Parts between two steps, not in ``step_s``."""
NAMES = {
    "data": "waiting for data",
    "transfer": "host to device",
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "exposed_dp": "exposed communication, dp",
    "exposed_tp": "exposed communication, tp",
    "exposed_cp": "exposed communication, cp",
    "exposed_ep": "exposed communication, ep",
    "pipeline": "pipeline: bubble, sends",
    "clip": "clipping",
    "optimizer": "optimizer",
    "slowest_rank": "waiting for slowest rank",
    "control": "agreeing on the step",
    "other": "the loop's own code",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
}
"""Title of each part for people."""
WAIT_PHASES = ("exposed_dp", "exposed_tp", "exposed_cp", "exposed_ep", "control")
"""Parts in which a rank waits for others; its wait beyond that of the last rank is ``slowest_rank``."""


class PhaseStats(BaseModel):
    """Seconds of one part per step: mean over steps and ranks, and the extreme ranks."""

    model_config = ConfigDict(frozen=True)

    mean_s: float
    low_s: float
    high_s: float
    highest_rank: int


class Timing(BaseModel):
    """Step time by part, over ``steps`` steps after the warm-up.

    ``step_s`` is the mean period of a step without the time between steps. ``parts`` has each of `PHASES` (``None``:
    not separated, or no such axis; ``unmeasured`` says why). ``between_s`` are seconds per step spent in `BETWEEN`,
    spread over all steps. ``ranks`` has each rank's own mean seconds of each part. ``late_rank`` was last most often,
    in ``late_share`` of the steps. ``stopwatch_s`` is the period by the host's clock, read once a step, including
    the time between steps: it checks the parts. ``cpu_wait_s`` is how long the main thread of a rank was ready to run
    without a core (in other parts already); ``early_reduce_s`` is the part of ``exposed_dp`` for reducing gradients
    before a step's last micro batch, in ``early_reduces`` micro batches a step.
    """

    model_config = ConfigDict(frozen=True)

    steps: int
    warm_up: int
    world_size: int
    step_s: float
    median_step_s: float
    tokens_per_s: float | None = None
    parts: dict[str, PhaseStats | None]
    between_s: dict[str, float]
    ranks: tuple[dict[str, float], ...]
    stopwatch_s: float | None = None
    late_rank: int | None = None
    late_share: float | None = None
    cpu_wait_s: PhaseStats | None = None
    early_reduce_s: float | None = None
    early_reduces: float | None = None
    unmeasured: dict[str, str] = {}

    @property
    def whole_s(self) -> float:
        """Mean seconds of a step with its share of the time between steps."""
        return self.step_s + sum(self.between_s.values())

    def seconds(self, part: str) -> float:
        """Return mean seconds of ``part`` per step; 0 if it is not separated."""
        spread = self.parts.get(part)
        return 0.0 if spread is None else spread.mean_s

    def share(self, part: str) -> float:
        """Return ``part`` as a share of the step."""
        return self.seconds(part) / self.step_s if self.step_s else 0.0
