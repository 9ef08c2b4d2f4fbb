"""Eject a run: its training script without Shardwise, what the script lacks, and rows that it cannot make itself."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import PlanError
from shardwise.interop.exported import Exported
from shardwise.interop.pytorch.script_data import no_rows, script_data, write_rows
from shardwise.interop.pytorch.script_problems import script_losses, script_problems
from shardwise.interop.pytorch.training_script import training_script
from shardwise.plan.plan import Plan
from shardwise.train.config import Config
from shardwise.train.data.corpus import Corpus


def eject(plan: Plan, config: Config, corpus: Corpus, output: Path | None) -> Exported:
    """Write ``plan`` and ``config`` as a script; ``output`` is its file, and ``None`` for stdout.

    Raises:
        PlanError: there is no such script; lists all reasons.
    """
    if problems := script_problems(plan, config):
        raise PlanError(*problems)
    name = "train.py" if output is None else output.name
    folder = Path(name).with_suffix("").name + "_data"
    where = Path(folder) if output is None else output.with_name(folder)
    data = script_data(config, corpus, str(where))
    no_rows(data, output)
    text = training_script(plan, config, corpus, data, name if output is None else str(output))
    notes = [f"run it from this folder: torchrun --nproc-per-node {plan.dims.world_size} {output or name}"]
    if data.kind == "samples":
        notes.append(f"'{where}' holds the rows, as .npy files: chat templates and packing are not in the script")
    beside = (lambda here: write_rows(config, corpus, data, where)) if data.kind == "samples" else None
    return Exported(text, script_losses(plan, config), notes, beside=beside)
