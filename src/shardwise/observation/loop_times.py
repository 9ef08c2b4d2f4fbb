"""Times of one rank's observed step, as JSON that ranks exchange. No torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from shardwise.report.html.run_record import CollectiveTime


class LoopTimes(BaseModel):
    """Seconds of one step of one rank by the host's clock, from the end of the one before.

    ``parts`` add up to ``step_s``; a part that this rank cannot separate is absent. ``own_s`` is the observer's own
    work, which is in none of them, except for what PyTorch needs to call it at each of ``operators``. ``samples`` and
    ``tokens`` are those of the model's inputs. ``unknown`` says of a part, or of ``samples`` and ``tokens``, why it is.
    ``early_reduce_s`` is the part of ``exposed_dp`` before the last backward, in ``early_reduces`` backwards.
    ``cpu_wait_s`` is how long the loop's thread was ready to run without a core. ``loader_workers`` is 0 where the
    loader makes batches in this process. ``restarted``: fp16's scaler skipped a step, and its beginning is not seen.
    """

    model_config = ConfigDict(frozen=True)

    step_s: float
    own_s: float
    operators: int
    parts: dict[str, float] = {}
    collectives: tuple[CollectiveTime, ...] = ()
    samples: int | None = None
    tokens: int | None = None
    early_reduce_s: float | None = None
    early_reduces: int = 0
    cpu_wait_s: float | None = None
    loader_workers: int | None = None
    restarted: bool = False
    unknown: dict[str, str] = {}
