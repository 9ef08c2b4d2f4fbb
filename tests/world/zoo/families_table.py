"""The table family × axis → right, or refused with a sentence; run on real ranks.

``table()`` returns ``{family: {axis: Cell}}``; a cell's verdict is one of ``VERDICTS``, and only ``right`` and
``refused`` are good.
"""

from __future__ import annotations

import json
import logging
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from shardwise.errors import ShardwiseError
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.contract import Gradients, Watch, decided_once, worst
from tests.kept import kept
from tests.world.zoo.exact import Float64
from tests.world.zoo.families import FAMILIES, LENGTH, VOCAB, family
from tests.worlds import WorldError, run_world

Verdict = Literal["right", "refused", "wrong", "stopped", "raw"]
AXES = {"fsdp": ("fsdp", 1), "+tp2": ("ddp+tp2", 2), "+pp2": ("ddp+pp2", 2), "+cp2": ("ddp+cp2", 2)}
"""The axis → its strategy on two ranks, and the micro batches of a step on one rank."""
LIMIT = 1e-9
WITHOUT_SEQUENCE = "parallel.sequence_parallel to false"
GOOD = ("right", "refused")


class Cell(NamedTuple):
    """What became of one family under one axis; ``sentence`` says why it is refused, or what went wrong."""

    verdict: Verdict
    sentence: str = ""


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro batches of two samples with ragged labels."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index in range(number):
        ids = torch.randint(3, VOCAB, (2, LENGTH + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, LENGTH - 3 - index % 4 :] = -100
        found.append((ids[:, :-1].contiguous(), labels))
    return found


def reference(name: str) -> Gradients:
    """The gradient of the first step's two micro batches in one process, without Shardwise."""
    model, given = family(name), batches(2)
    count = sum(int((labels != -100).sum()) for _, labels in given)
    with Float64():
        for inputs, labels in given:
            logits = model(inputs).logits.flatten(0, -2)
            (functional.cross_entropy(logits, labels.flatten(), reduction="sum") / count).backward()
    return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}


def one(name: str, axis: str, expected: Gradients) -> Cell:
    """The cell of a plan; where only sequence parallel is in the way, of one without it."""
    strategy, accum = AXES[axis]
    plan = Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), 2), grad_accum=accum)
    cell = run_plan(name, plan, expected)
    if cell.verdict == "refused" and WITHOUT_SEQUENCE in cell.sentence:
        again = run_plan(name, plan.model_copy(update={"sequence_parallel": False}), expected)
        return Cell("right", "with parallel.sequence_parallel = false") if again.verdict == "right" else again
    return cell


def run_plan(name: str, plan: Plan, expected: Gradients) -> Cell:
    """Two steps: the first against one process, the second under the receipt, in the model's own dtypes."""
    session, given, watch = start(plan, receipts=False), batches(4), Watch()
    probe = EffectsRecorder(strict=False)
    session.observers += [watch, probe]
    model = family(name, seed=dist.get_rank())
    try:
        with Float64(), decided_once(f"of the zoo: {name}"):
            model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.0), given[0][0])
    except ShardwiseError as error:
        return Cell("refused", str(error).replace(f"{Path.cwd()}/", ""))  # no place of the machine it ran on
    found: tuple[float, str] = (0.0, "")
    for step in session.steps(given):
        if step.number == 1:
            with Float64():
                step.run(model, token_loss_sum)
                step.update(optimizer)
            found = worst(watch.raw, {key: expected.get(key, value) for key, value in watch.raw.items()} | expected)
            missing = [k for k in expected if k not in watch.raw and bool(expected[k].any())]
            if missing and plan.dims.pp == 1:
                found = (float("inf"), missing[0])
        else:
            step.run(model, token_loss_sum)
            step.update(optimizer)
    session.close()
    if not found[0] <= LIMIT:
        return Cell("wrong", f"the gradient of {found[1]} is off by {found[0]:.1e}")
    assert probe.receipt is not None
    alarms = [
        f"{line.name}: planned {line.planned}, found {line.found}" for line in probe.receipt.lines if line.ok is False
    ]
    return Cell("stopped", "; ".join(alarms)) if alarms else Cell("right")


def rows(names: Sequence[str], axes: Sequence[str]) -> dict[str, dict[str, Cell]]:
    """The cells of some families on this rank."""
    quiet()
    found: dict[str, dict[str, Cell]] = {}
    for name in names:
        try:
            expected = kept(("family of the zoo", name), lambda name=name: reference(name))
        except Exception as error:  # a family that one process cannot train either
            found[name] = {axis: Cell("raw", f"in one process: {_line(error)}") for axis in axes}
            continue
        for axis in axes:
            try:
                cell = one(name, axis, expected)
            except ShardwiseError as error:
                cell = Cell("stopped", f"after the first forward: {error}")
            except Exception as error:
                cell = Cell("raw", _line(error))
            found.setdefault(name, {})[axis] = cell
            _meet(name, axis, cell)
    return found


def _meet(name: str, axis: str, cell: Cell) -> None:
    """Both ranks went the same way, or the next case would find them apart."""
    kinds = torch.tensor([GOOD.index(cell.verdict) if cell.verdict in GOOD else 2])
    most = kinds.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(kinds, op=dist.ReduceOp.MIN)


def _line(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} ({frame.filename}:{frame.lineno})"


def quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("shardwise").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def table(
    names: Iterable[str] = FAMILIES, axes: Sequence[str] = tuple(AXES), timeout_s: float = 240.0
) -> dict[str, dict[str, Cell]]:
    """Every cell, with the worse of the two ranks' findings."""
    names = list(names)
    try:
        ranks = run_world(rows, 2, names, list(axes), timeout_s=timeout_s)
    except WorldError as error:
        if len(names) * len(axes) == 1:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return {names[0]: {axes[0]: Cell("raw", " / ".join([lines[0], *lines[-3:]])[-600:])}}
        if len(names) > 1:  # a lost world says nothing of the others: each family alone, then each axis
            half = len(names) // 2
            return table(names[:half], axes, 60.0) | table(names[half:], axes, 60.0)
        return {names[0]: {axis: table(names, [axis], 30.0)[names[0]][axis] for axis in axes}}
    order = ["right", "refused", "stopped", "wrong", "raw"]
    return {
        name: {
            axis: max((found[name][axis] for found in ranks), key=lambda cell: order.index(cell.verdict))
            for axis in axes
        }
        for name in names
    }


def main() -> None:
    """Write the table that `tests.world.zoo.page` shows."""
    found: dict[str, dict[str, Cell]] = {}
    names = list(FAMILIES)
    for at in range(0, len(names), 5):
        found |= table(names[at : at + 5])
        print(f"{len(found)} of {len(names)} families", flush=True)
    rows = {name: {axis: cell._asdict() for axis, cell in row.items()} for name, row in sorted(found.items())}
    Path(__file__).with_name("families.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
