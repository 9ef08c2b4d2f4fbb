"""Train each case under a strategy on real ranks, and say what came of it.

Verdicts: ``right``; ``warned: ...`` (differs from one process, and `prepare` said so); ``refused: ...`` (before the
first update, on all ranks); ``stopped: ...`` (in a later step, on all ranks, with that step's weights untouched, where
samples decide); ``asked: ...`` (that of one process which is told the size of the world: the model asks for it). All
else is a defect: ``WRONG``, ``ALARM`` (a receipt stops a right run), ``LATE`` (a sentence after an update), ``RAW`` (an
exception that is not Shardwise's), ``HANG`` (or a rank that died).
"""

from __future__ import annotations

import faulthandler
import functools
import json
import logging
import sys
import tempfile
import time
import traceback
import unittest.mock
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardwiseError
from shardwise.model.read import clean_name
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import count_labels
from tests.contract import both_here, here
from tests.world.zoo.case import Case
from tests.world.zoo.models import CASES, LATER
from tests.world.zoo.page import EXPECTED
from tests.worlds import WorldError, run_world

LOOSE: tuple[str, ...] = ()  # lines of a receipt that may be false
LIMIT_S = 20.0  # of one session; most take a tenth of a second
GOOD = ("right", "warned", "refused", "stopped", "asked")


@dataclass(frozen=True)
class Trial:
    """A case under a strategy on ``world`` ranks, ``accum`` micro batches for each step."""

    case: str
    strategy: str
    world: int
    accum: int

    def __str__(self) -> str:
        return f"{self.case} | {self.strategy}{' on 4' if self.world == 4 else ''} | x{self.accum}"


def reference(case: Case, window: int, world: int = 1) -> dict[str, torch.Tensor]:
    """Weights after all steps in one plain process, to whose models there is no group."""
    told = {"is_initialized": lambda: bool(case.asks), "get_world_size": lambda: world}
    with unittest.mock.patch.multiple(dist, **told):
        model = case.model()
        data, optimizer = case.batches(window), case.optimizer(model)
        for at in range(0, len(data), window):
            optimizer.zero_grad()
            terms = max(1, sum((case.count or count_labels)(labels) for _, labels in data[at : at + window]))
            for inputs, labels in case.forwards(data[at : at + window], world):
                (case.loss(model, inputs, labels) / terms).backward()
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def outcome(trial: Trial, expected: dict[str, torch.Tensor]) -> str:
    """Run one session; what came of it on this rank."""
    case = CASES[trial.case]
    strategy = parse_strategy(trial.strategy)
    plan = Plan(strategy=trial.strategy, dims=dims_for(strategy, trial.world), grad_accum=trial.accum)
    session, updates = start(plan, receipts=False), 0
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    before: list[torch.Tensor] = []
    try:
        plain = case.model()
        model, optimizer = session.prepare(plain, case.optimizer(plain))
        notes = session.applied.warnings
        batches = case.batches(trial.world * trial.accum)
        for step in session.steps(batches, count=case.count or count_labels):
            for micro in step:
                step.backward(case.loss(model, micro.inputs, micro.labels))
            step.update(optimizer)
            updates += 1
            before = local(session.module)
        found = verdict(session.module, expected, case.limit, probe, notes)
        return f"asked: {case.asks}" if case.asks and found == "right" else found
    except ShardwiseError as error:
        kept = all(map(torch.equal, before, local(session.module))) if before else True
        later = "stopped" if case.decides and kept else "LATE"
        return f"{later if updates else 'refused'}: {str(error).splitlines()[0]}"
    finally:
        session.close()


def local(module: torch.nn.Module) -> list[torch.Tensor]:
    """A copy of what this rank holds of the weights."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
    return [p.detach().clone() for p in local]


def verdict(
    module: torch.nn.Module, expected: dict[str, torch.Tensor], limit: float, probe: Any, notes: Sequence[str]
) -> str:
    """Of a session that went through: its weights, and its receipt."""
    names = [clean_name(name) for name, _ in module.named_parameters()]
    weights = [parameter.detach() for parameter in module.parameters()]
    errors = [_error(weight, expected[name]) for name, weight in zip(names, weights, strict=True)]
    if any(isinstance(weight, DTensor) for weight in weights):  # each rank has seen its own part
        everyone = torch.tensor(errors, dtype=torch.float64).nan_to_num(float("inf"))
        dist.all_reduce(everyone, dist.ReduceOp.MAX)
        errors = everyone.tolist()
    worst, where = 0.0, ""
    for error, name in zip(errors, names, strict=True):
        if not error <= worst:
            worst, where = error, name
    if not worst <= limit:
        return f"warned: {notes[0]}" if notes else f"WRONG: {worst:.1e} at {where}"
    false = [f"{line.name}: {line}" for line in probe.receipt.lines if line.ok is False and line.name not in LOOSE]
    return f"ALARM: {'; '.join(false)}" if false else "right"


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest error in this rank's part of a weight, over the largest element of the whole."""
    mine, theirs = both_here(here(found), right)
    assert mine.shape == theirs.shape
    return float((mine - theirs).abs().max() / right.abs().max().clamp_min(1e-3)) if mine.numel() else 0.0


def attempt(trial: Trial, expected: dict[str, torch.Tensor]) -> str:
    """`outcome`, with any exception as a verdict; a rank that hangs ends, with its stack on paper."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return outcome(trial, expected)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = str(error).strip().splitlines() or [""]
        return f"RAW: {type(error).__name__}: {lines[0]} ({Path(frame.filename).name}:{frame.lineno})"
    finally:
        faulthandler.cancel_dump_traceback_later()


def work(folder: str, trials: list[tuple[str, str, int, int]]) -> None:
    """One rank's way through ``trials``; verdicts go to files, so that they outlive the rank."""
    logging.getLogger("shardwise").setLevel(logging.ERROR)
    rank, world = dist.get_rank(), dist.get_world_size()
    todo = [Trial(*trial) for trial in trials]
    names = list(dict.fromkeys((trial.case, trial.world * trial.accum) for trial in todo))
    for index, (name, window) in enumerate(names):
        path = Path(folder) / f"{list(CASES).index(name)}-{window}.pt"
        if index % world == rank and not path.exists():
            torch.save(reference(CASES[name], window, world), path)
    dist.barrier()
    for number, trial in enumerate(todo):
        path = Path(folder) / f"{list(CASES).index(trial.case)}-{trial.world * trial.accum}.pt"
        before = time.process_time()
        found = attempt(trial, torch.load(path, weights_only=False))
        (Path(folder) / f"{number}.{rank}.tmp").write_text(json.dumps([found, time.process_time() - before]))
        (Path(folder) / f"{number}.{rank}.tmp").rename(Path(folder) / f"{number}.{rank}")
        everyone = _meet(Path(folder), number, world)
        if len({one.split(":")[0] for one in everyone}) != 1 or not everyone[0].startswith(GOOD):
            return  # what is left of this one in the group is none of the next one's business


def _meet(folder: Path, number: int, world: int) -> list[str]:
    """The verdicts of all ranks on one trial; short where a rank does not come."""
    deadline = time.monotonic() + LIMIT_S
    paths = [folder / f"{number}.{rank}" for rank in range(world)]
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.002)
    found = [json.loads(path.read_text())[0] if path.exists() else "HANG" for path in paths]
    return found


def run(trials: Sequence[Trial], timeout_s: float = 600.0, spent: list[float] | None = None) -> dict[Trial, str]:
    """The verdicts on all trials; a world that comes to harm is followed by another one for what is left.

    ``spent`` is given the processor seconds of each rank in each trial.
    """
    found: dict[Trial, str] = {}
    for world in sorted({trial.world for trial in trials}):
        left = [trial for trial in trials if trial.world == world]
        with tempfile.TemporaryDirectory() as references:
            while left:
                died = ""
                try:
                    run_world(work, world, references, [astuple(trial) for trial in left], timeout_s=timeout_s)
                except WorldError as error:
                    died = str(error)
                now = _collect(Path(references), left, world, died, [] if spent is None else spent)
                found |= now
                left = left[len(now) :]
    return found


def _collect(folder: Path, trials: list[Trial], world: int, died: str, spent: list[float]) -> dict[Trial, str]:
    found: dict[Trial, str] = {}
    for number, trial in enumerate(trials):
        paths = [folder / f"{number}.{rank}" for rank in range(world)]
        both = [json.loads(path.read_text()) if path.exists() else ["HANG", 0.0] for path in paths]
        rows = [row for row, _ in both]
        spent += [seconds for _, seconds in both]
        if found and all(row == "HANG" for row in rows):
            break  # not begun
        bad = [row for row in rows if not row.startswith(GOOD)] or [row for row in rows if row != rows[0]]
        raw = [row for row in bad if row != "HANG"]
        apart = bool(bad) and any(row.startswith(GOOD) for row in rows)
        found[trial] = (raw or bad or rows)[0] + (" (on some ranks only)" if apart else "")
        if "HANG" in rows:
            found[trial] += f" | {_first_line(died)}"
        for path in paths:
            path.unlink(missing_ok=True)
        if bad:
            break
    assert found, died
    return found


def _first_line(text: str) -> str:
    return " / ".join(line for line in text.splitlines() if line.startswith("[rank"))[:300]


def trials_of(names: Sequence[str]) -> list[Trial]:
    """Each model under each strategy; accumulation and the second world take turns."""
    found = []
    for at, name in enumerate(names):
        for index, strategy in enumerate(("ddp", "zero1", "zero2", "fsdp")):
            found.append(Trial(name, strategy, 2, 1 + (at + index) % 2))
        found.append(Trial(name, "fsdp" if at % 4 == 3 else "hsdp", 4, 1))
    return found


def column(trial: Trial) -> str:
    """The column of the table that a trial stands in."""
    return "fsdp on 4" if (trial.strategy, trial.world) == ("fsdp", 4) else trial.strategy


@functools.cache
def known() -> dict[str, dict[str, str]]:
    """The verdicts that are expected: of a case under a column."""
    return json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}


def write(found: dict[Trial, str]) -> None:
    """Put verdicts into the table, in the order of the cases; those that are defects stay out."""
    table = {name: dict(known().get(name, {})) for name in CASES if name not in LATER}
    for trial, verdict in found.items():
        if trial.case in table and verdict.startswith(GOOD):
            table[trial.case][column(trial)] = verdict
    EXPECTED.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    known.cache_clear()


def main() -> None:
    """``python -m tests.world.zoo.harness [--write] [words]``: run the cases whose names hold one of the words."""
    words = [word for word in sys.argv[1:] if word != "--write"]
    names = [name for name in CASES if (any(word in name for word in words) if words else name not in LATER)]
    begun, spent = time.monotonic(), []
    trials = [trial for trial in trials_of(list(CASES)) if trial.case in names]
    for at in range(0, len(trials), 200):
        found = run(trials[at : at + 200], spent=spent)
        for trial, one in found.items():
            print(trial, "→", one, flush=True)
        if "--write" in sys.argv:
            write(found)
    print(f"{len(names)} models, {time.monotonic() - begun:.0f} s, {sum(spent):.0f} processor seconds")


if __name__ == "__main__":
    main()
