"""`TimedSteps`: the times of the steps after the receipt, of which the report has the means and a diagnosis."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import TypeAdapter

from shardwise.diagnosis.observe import HostRecorder
from shardwise.diagnosis.weight import MIN_STEPS
from shardwise.distributed.process_group import Ranks, gather_ints, gather_text
from shardwise.errors import ShardwiseError
from shardwise.observation.loop_facts import LoopFacts
from shardwise.observation.loop_times import LoopTimes
from shardwise.observation.run_output import LaterSteps, write_observed
from shardwise.receipts.receipt import Receipt

TIMED_STEPS = MIN_STEPS
"""Steps after the one with the receipt: as many as a diagnosis needs."""
_LOG = logging.getLogger("shardwise")
_ROWS = TypeAdapter(tuple[LoopTimes, ...])
_ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), control=None, owns_group=False, owns_control=False)


class TimedSteps:
    """Times of this rank's later steps, and the run folder ``output`` on rank 0, which a run goes on without."""

    def __init__(self, output: Path, ranks: Ranks | None) -> None:
        self._output, self._ranks = output, ranks or _ALONE
        self._rows: list[LoopTimes] = []
        self._facts: Sequence[LoopFacts] = ()
        self._receipt: Receipt | None = None
        self._host: HostRecorder | None = None

    def begin(self, receipt: Receipt, facts: Sequence[LoopFacts]) -> None:
        """Write the folder with the second step, and begin with those after it."""
        self._receipt, self._facts = receipt, facts
        self._write()
        self._host = HostRecorder()

    def add(self, times: LoopTimes) -> bool:
        """Add a step, and return whether it was the last."""
        self._rows.append(times)
        return len(self._rows) == TIMED_STEPS

    def finish(self, limit_s: float) -> None:
        """Write the folder anew, with the means of all steps. Collective."""
        assert self._host is not None
        last = 2 + TIMED_STEPS
        try:
            gather_ints([1], self._ranks, "timed steps", patient=False, limit_s=limit_s)
            host = self._host.finish(self._ranks)
            texts = gather_text(_ROWS.dump_json(tuple(self._rows)).decode(), self._ranks)
        except (ShardwiseError, RuntimeError) as error:
            _LOG.warning(f"observe: the report has step 2 alone, as not all ranks came to step {last}: {error}")
            return
        self._write(LaterSteps([_ROWS.validate_json(text) for text in texts], host))

    def _write(self, later: LaterSteps | None = None) -> None:
        if not self._ranks.is_main or self._receipt is None:
            return
        try:
            write_observed(self._output, self._receipt, self._facts, later)
        except Exception as error:  # a defect of the report must not end the loop
            kind = "" if isinstance(error, ShardwiseError) else f"{type(error).__name__}: "
            _LOG.warning(f"observe: no report: {kind}{error}")
