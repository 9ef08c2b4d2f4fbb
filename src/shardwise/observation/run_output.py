"""Write the run folder of an observed loop, which ``shardwise report`` renders."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.diagnosis.observed import HostUse
from shardwise.errors import MachineError, UserError
from shardwise.measure.step_time.timing import PHASES, PhaseStats, Timing
from shardwise.observation.loop_diagnosis import diagnosed
from shardwise.observation.loop_facts import LoopFacts
from shardwise.observation.loop_times import LoopTimes
from shardwise.receipts.receipt import Receipt
from shardwise.report.html.observed_folder import ObservedLoop
from shardwise.report.html.run_record import CollectiveTime
from shardwise.train.run_files import RunFile, replace_file
from shardwise.units import counted, seconds_text

_LATE = 0.05  # share of a step that others must wait for a rank before it counts as late
_RUN = (RunFile.JOB, RunFile.METRICS, RunFile.SUMMARY)
_SHARED = "ranks of a group read the same samples, and which ones is not known here"
Steps = Sequence[Sequence[LoopTimes]]  # by step, then by rank


class LaterSteps(NamedTuple):
    """Steps after the one with the receipt, by rank, and what the ranks used of rank 0's node meanwhile."""

    ranks: Sequence[Sequence[LoopTimes]]
    host: HostUse | None


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


def write_observed(folder: Path, receipt: Receipt, ranks: Sequence[LoopFacts], later: LaterSteps | None = None) -> None:
    """Write what was observed to ``folder``.

    Raises:
        MachineError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RunFile.OBSERVED, f"{observed_loop(receipt, ranks, later).model_dump_json(indent=1)}\n")
    except OSError as error:
        raise MachineError(f"'{folder}' cannot be written: {error.strerror}; choose another output") from None


def observed_loop(receipt: Receipt, ranks: Sequence[LoopFacts], later: LaterSteps | None = None) -> ObservedLoop:
    """Return the document of an observation; ``ranks`` are in rank order, and each has its times.

    The times are those of the ``later`` steps that were seen whole, or else of the second step.
    """
    second = [facts.times for facts in ranks if facts.times is not None]
    steps: Steps = (
        [step for step in zip(*later.ranks, strict=True) if not any(t.restarted for t in step)] if later else []
    )
    timing = _timing(steps or [second], warm_up=2 if steps else 1)
    rates, unknown = _rates(ranks, steps or [second], timing.step_s)
    findings, not_judged = diagnosed(timing, ranks, (steps or [second])[0], later.host if later else None)
    if findings is None:
        unknown["findings"] = not_judged.pop("")
    return ObservedLoop(
        receipt=receipt,
        timing=timing.model_copy(update={"tokens_per_s": rates.get("tokens")}),
        samples_per_s=rates.get("samples"),
        findings=findings,
        not_judged=not_judged,
        collectives=tuple(_collectives(steps or [second])),
        environment={
            "Python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "torch": version("torch"),
        },
        unknown=unknown,
        notes=_notes(steps or [second], timing.warm_up),
    )


def _rates(ranks: Sequence[LoopFacts], steps: Steps, step_s: float) -> tuple[dict[str, float], dict[str, str]]:
    """Return tokens and samples a second, and why one is unknown."""
    shared = any("tensor parallel" in facts.unknown for facts in ranks)
    rates, unknown = {}, {}
    for noun in ("tokens", "samples"):
        sizes = [getattr(times, noun) for step in steps for times in step]
        known = [size for size in sizes if size is not None]
        if shared or len(known) < len(sizes):
            why = next((t.unknown[noun] for step in steps for t in step if noun in t.unknown), _SHARED)
            unknown[f"{noun}_per_s"] = _SHARED if shared else why
        else:
            rates[noun] = sum(known) / len(steps) / step_s
    return rates, unknown


def _collectives(steps: Steps) -> list[CollectiveTime]:
    """Return those of the last step, on each rank."""
    return [row.model_copy(update={"rank": rank}) for rank, times in enumerate(steps[-1]) for row in times.collectives]


def _notes(steps: Steps, warm_up: int) -> tuple[str, ...]:
    every = [times for step in steps for times in step]
    own, calls = max(t.own_s for t in every), max(t.operators for t in every)
    first, last = warm_up + 1, warm_up + len(steps)
    which = f"step {first}" if first == last else f"steps {first} to {last}, without those after a skipped one"
    return (
        f"Times are those of {which}, each from the end of the step before it to the end of the optimizer's step, by "
        "the clock of each rank's host; collectives are those of the last of them.",
        f"These steps were recorded: up to {counted(calls, 'operator')} in one passed through Python. The observer's "
        f"own work, up to {seconds_text(own)} in a step of a rank, is left out; what PyTorch needs to call it is in "
        "the parts.",
        "Tokens and samples are those of the model's inputs on all ranks, without the tokens that an attention_mask "
        "leaves out; an input that a rank forwards twice counts once.",
    )


def _timing(steps: Steps, warm_up: int) -> Timing:
    """Return the means over ``steps``, of each rank."""
    every = [times for step in steps for times in step]
    rows = [[dict(times.parts) for times in step] for step in steps]
    late = [_split_waits(row, sum(t.step_s for t in step) / len(step)) for row, step in zip(rows, steps, strict=True)]
    known = [part for part in PHASES if all(part in row for step in rows for row in step)]
    for row in (row for step in rows for row in step):
        row["other"] = row.get("other", 0.0) + sum(row.pop(part) for part in [*row] if part not in known)
    world = range(len(steps[0]))
    means = [{part: statistics.fmean(step[rank].get(part, 0.0) for step in rows) for part in known} for rank in world]
    periods = [statistics.fmean(times.step_s for times in step) for step in steps]
    unknown = {part: why for times in every for part, why in times.unknown.items() if part in PHASES}
    times_late = Counter(rank for rank in late if rank is not None).most_common(1)
    early = [[times.early_reduce_s for times in step if times.early_reduce_s is not None] for step in steps]
    waits = [[times.cpu_wait_s for step in steps if (times := step[rank]).cpu_wait_s is not None] for rank in world]
    return Timing(
        steps=len(steps),
        warm_up=warm_up,
        world_size=len(steps[0]),
        step_s=statistics.fmean(periods),
        median_step_s=statistics.median(periods),
        parts={part: _spread([row[part] for row in means]) if part in known else None for part in PHASES},
        between_s={},
        ranks=tuple(means),
        late_rank=times_late[0][0] if times_late else None,
        late_share=times_late[0][1] / len(steps) if times_late else None,
        cpu_wait_s=_spread([statistics.fmean(row) for row in waits]) if all(waits) else None,
        # what a rank waits longer than the one that waits least is waiting for that one
        early_reduce_s=statistics.fmean(map(min, early)) if all(map(len, early)) else None,
        early_reduces=statistics.fmean(max(times.early_reduces for times in step) for step in steps),
        unmeasured={part: why for part, why in unknown.items() if part not in known},
    )


def _split_waits(rows: Sequence[dict[str, float]], step_s: float) -> int | None:
    """Move each rank's wait beyond that of the one that waited least to ``slowest_rank``; return that rank if late."""
    waits = [row["exposed_dp"] for row in rows if "exposed_dp" in row]
    if len(rows) < 2 or len(waits) < len(rows):
        return None
    least = min(waits)
    for row in rows:
        row["slowest_rank"] = row["exposed_dp"] - least
        row["exposed_dp"] = least
    return waits.index(least) if max(waits) - least > _LATE * step_s else None


def _spread(seconds: Sequence[float]) -> PhaseStats:
    most = max(seconds)
    return PhaseStats(
        mean_s=sum(seconds) / len(seconds), low_s=min(seconds), high_s=most, highest_rank=seconds.index(most)
    )
