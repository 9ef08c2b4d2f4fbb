"""Read the folder of an observed loop of another tool into a `RunRecord`."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.diagnosis.finding import Finding
from shardwise.errors import UserError
from shardwise.measure.step_time.timing import Timing
from shardwise.receipts.receipt import Receipt
from shardwise.report.html.run_folder import made_by, read_run
from shardwise.report.html.run_record import BenchSamples, CollectiveTime, Figures, RunRecord
from shardwise.train.run_files import RunFile

_NAMES = {"tokens_per_s": "tokens a second", "samples_per_s": "samples a second", "findings": "diagnosis"}
_UNSEEN = {
    "loss, learning rate and tokens of the whole run": "the loop logs them where it logs them",
    "memory": "an observation measures none",
    "plan, prediction, use of the devices and cost": "Shardwise did not plan this loop; the receipt has what was meant",
}


class ObservedLoop(BaseModel):
    """Document ``observed.json``. ``unknown`` says why a value is ``None``; of parts of the step ``timing`` does.

    ``not_judged`` says of each kind of finding that is not looked for why it is not.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    receipt: Receipt
    timing: Timing
    samples_per_s: float | None = None
    findings: tuple[Finding, ...] | None = None
    not_judged: dict[str, str] = {}
    collectives: tuple[CollectiveTime, ...] = ()
    environment: dict[str, str] = {}
    unknown: dict[str, str] = {}
    notes: tuple[str, ...] = ()


def read_folder(
    folder: Path, *, scaling: BenchSamples | None = None, links: BenchSamples | None = None, ended: bool = False
) -> RunRecord:
    """Read a run, or the observation of a loop: see `read_run` and `read_observed`."""
    if (folder / RunFile.OBSERVED).exists():
        return read_observed(folder, scaling=scaling, links=links)
    return read_run(folder, scaling=scaling, links=links, ended=ended)


def read_observed(folder: Path, *, scaling: BenchSamples | None = None, links: BenchSamples | None = None) -> RunRecord:
    """Read what was observed into ``folder``.

    Raises:
        UserError: its file is not what `shardwise.observe` writes.
    """
    path = folder / RunFile.OBSERVED
    try:
        found = ObservedLoop.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(
            f"'{path}' is not what shardwise.observe writes ({where}: {first['msg']}); observe again"
        ) from None
    timing, by_tokens = found.timing, found.timing.tokens_per_s is not None
    steps = timing.warm_up + timing.steps
    unknown = [f"{_NAMES.get(name, name)}: {why}" for name, why in found.unknown.items()]
    kinds: dict[str, list[str]] = defaultdict(list)
    for kind, why in found.not_judged.items():
        kinds[why].append(kind.replace("-", " "))
    unknown += [f"diagnosis of {', '.join(names)}: {why}" for why, names in kinds.items()]
    return RunRecord(
        name=folder.resolve().name,
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        made_by=made_by(),
        state="unknown",
        state_text=f"the first {steps} steps of a loop were observed; what became of it is not known here",
        missing=(*unknown, *(f"{name}: {why}" for name, why in _UNSEEN.items())),
        figures=Figures(
            steps=steps,
            step_s=timing.median_step_s,
            tokens_per_s=timing.tokens_per_s,
            samples_per_s=None if by_tokens else found.samples_per_s,
        ),
        timing=timing,
        findings=found.findings,
        not_judged=found.not_judged,
        receipts={found.receipt.title: found.receipt},
        environment=found.environment,
        collectives=found.collectives,
        notes=found.notes,
        scaling=scaling,
        links=links,
    )
