"""Times of one rank's observed step, as JSON that ranks exchange. No torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from shardwise.report.html.run_record import CollectiveTime


class LoopTimes(BaseModel):
    """Seconds of one rank's second step by the host's clock, from the end of the first.

    ``parts`` add up to ``step_s``; a part that this rank cannot separate is absent. ``own_s`` is the observer's own
    work, which is in none of them, except for what PyTorch needs to call it at each of ``operators``. ``samples`` and
    ``tokens`` are those of the model's inputs. ``unknown`` says of a part, or of ``samples`` and ``tokens``, why it is.
    """

    model_config = ConfigDict(frozen=True)

    step_s: float
    own_s: float
    operators: int
    parts: dict[str, float] = {}
    collectives: tuple[CollectiveTime, ...] = ()
    samples: int | None = None
    tokens: int | None = None
    unknown: dict[str, str] = {}
