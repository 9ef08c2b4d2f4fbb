"""Write the run folder of an observed loop, which ``shardwise report`` renders."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwise.diagnosis.diagnose import why_nothing
from shardwise.errors import MachineError, UserError
from shardwise.measure.step_time.timing import PHASES, PhaseStats, Timing
from shardwise.observation.loop_facts import LoopFacts
from shardwise.observation.loop_times import LoopTimes
from shardwise.receipts.receipt import Receipt
from shardwise.report.html.observed_folder import ObservedLoop
from shardwise.train.run_files import RunFile, replace_file
from shardwise.units import counted, seconds_text

_LATE = 0.05  # share of a step that others must wait for a rank before it counts as late
_RUN = (RunFile.JOB, RunFile.METRICS, RunFile.SUMMARY)
_SHARED = "ranks of a group read the same samples, and which ones is not known here"


def checked_folder(output: Any) -> Path:
    """Return the folder for an observation, which may have an earlier one.

    Raises:
        UserError: it is no folder, or a run of Shardwise is in it.
    """
    if not isinstance(output, (str, Path)) or not str(output):
        raise UserError(f"observe: output = {output!r}: give the path of a folder")
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"observe: output = '{folder}' is not a folder; give another path")
    if any((folder / name).exists() for name in _RUN):
        raise UserError(f"observe: output = '{folder}' has a run of shardwise train in it; give another folder")
    return folder


def write_observed(folder: Path, receipt: Receipt, ranks: Sequence[LoopFacts]) -> None:
    """Write what was observed to ``folder``.

    Raises:
        MachineError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RunFile.OBSERVED, f"{observed_loop(receipt, ranks).model_dump_json(indent=1)}\n")
    except OSError as error:
        raise MachineError(f"'{folder}' cannot be written: {error.strerror}; choose another output") from None


def observed_loop(receipt: Receipt, ranks: Sequence[LoopFacts]) -> ObservedLoop:
    """Return the document of an observation; ``ranks`` are in rank order, and each has its times."""
    times = [facts.times for facts in ranks if facts.times is not None]
    shared = any("tensor parallel" in facts.unknown for facts in ranks)
    timing = _timing(times)
    rates, unknown = {}, {}
    for noun, sizes in (("tokens", [t.tokens for t in times]), ("samples", [t.samples for t in times])):
        known = [size for size in sizes if size is not None]
        if shared or len(known) < len(sizes):
            why = next((t.unknown[noun] for t in times if noun in t.unknown), _SHARED)
            unknown[f"{noun}_per_s"] = _SHARED if shared else why
        else:
            rates[noun] = sum(known) / timing.step_s
    unknown |= {"findings": why_nothing(timing).removeprefix("no diagnosis: ")}
    return ObservedLoop(
        receipt=receipt,
        timing=timing.model_copy(update={"tokens_per_s": rates.get("tokens")}),
        samples_per_s=rates.get("samples"),
        collectives=tuple(
            row.model_copy(update={"rank": rank}) for rank, t in enumerate(times) for row in t.collectives
        ),
        environment={
            "Python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "torch": version("torch"),
        },
        unknown=unknown,
        notes=_notes(times),
    )


def _notes(times: Sequence[LoopTimes]) -> tuple[str, ...]:
    own = max(t.own_s for t in times)
    calls = max(t.operators for t in times)
    return (
        "Times are those of step 2, from the end of step 1 to the end of the optimizer's step, by the clock of each "
        "rank's host.",
        f"Step 2 was recorded: each of its {counted(calls, 'operator')} passed through Python. The observer's own "
        f"work, up to {seconds_text(own)} on a rank, is left out; what PyTorch needs to call it is in the parts.",
        "Tokens and samples are those of the model's inputs on all ranks, without the tokens that an attention_mask "
        "leaves out; an input that a rank forwards twice counts once.",
    )


def _timing(times: Sequence[LoopTimes]) -> Timing:
    rows = [dict(t.parts) for t in times]
    unknown = {part: why for t in times for part, why in t.unknown.items() if part in PHASES}
    late = _split_waits(rows)
    known = [part for part in PHASES if all(part in row for row in rows)]
    mean = sum(t.step_s for t in times) / len(times)
    waited = max((row.get("slowest_rank", 0.0) for row in rows), default=0.0)
    is_late = late is not None and waited > _LATE * mean
    return Timing(
        steps=1,
        warm_up=1,
        world_size=len(times),
        step_s=mean,
        median_step_s=mean,
        parts={part: _spread([row[part] for row in rows]) if part in known else None for part in PHASES},
        between_s={},
        ranks=tuple({part: row.get(part, 0.0) for part in known} for row in rows),
        late_rank=late if is_late else None,
        late_share=1.0 if is_late else None,
        unmeasured={part: why for part, why in unknown.items() if part not in known},
    )


def _split_waits(rows: Sequence[dict[str, float]]) -> int | None:
    """Move each rank's wait beyond that of the one that waited least to ``slowest_rank``; return that rank."""
    waits = [row["exposed_dp"] for row in rows if "exposed_dp" in row]
    if len(rows) < 2 or len(waits) < len(rows):
        return None
    least = min(waits)
    for row in rows:
        row["slowest_rank"] = row["exposed_dp"] - least
        row["exposed_dp"] = least
    return waits.index(least)


def _spread(seconds: Sequence[float]) -> PhaseStats:
    most = max(seconds)
    return PhaseStats(
        mean_s=sum(seconds) / len(seconds), low_s=min(seconds), high_s=most, highest_rank=seconds.index(most)
    )
