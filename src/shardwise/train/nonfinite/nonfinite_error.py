"""What is known of a number that is not finite: the source, its message, and its document."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from shardwise.errors import TrainingError
from shardwise.train.run_files import replace_file

Reason = Literal[
    "data",
    "weight",
    "overflow",
    "forward",
    "loss",
    "backward",
    "reduction",
    "norm",
    "update",
    "not reproduced",
    "not replayed",
]
LOSS = "(loss)"
"""Name of the loss function where a module is named."""
_SHOWN = 8  # samples in a message
_RATE = "Try a lower optimizer.lr, more optimizer.warmup_steps or a smaller optimizer.clip_norm"
_FIX: dict[Reason, str] = {
    "data": "Repair these samples or leave them out",
    "weight": f"An earlier update has left it so. {_RATE}",
    "forward": "Look for a division by zero, a logarithm, a square root or an exponential in this forward",
    "loss": "Look for a division by zero or a logarithm of zero in the loss function",
    "backward": "The derivative does not exist there (a square root or a norm of zero): add a small number under it",
    "update": f"The gradient was finite: look at the optimizer (an eps of 0, a rate that is too high). {_RATE}",
}


class NonFiniteSource(BaseModel):
    """NonFiniteSource of a number that is not finite; what is not known is ``None`` or empty.

    ``module`` is the first in the order of the forward (of the backward, if all outputs are finite), ``operation`` its
    step of autograd, or the call before which its own code made the number. ``rank`` saw it first, ``ranks`` all that
    saw the same. ``rows`` are samples of that micro batch (from 0), ``samples`` their numbers in the data; in a loop of
    the user's own ``batch`` counts the loader's batches (from 0) in the pass. ``micro_batch`` counts from 1.
    """

    model_config = ConfigDict(frozen=True)

    reason: Reason
    step: int
    module: str | None = None
    operation: str | None = None
    parameters: tuple[str, ...] = ()
    column: str | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    stage: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    rows: tuple[int, ...] | None = None
    batch_rows: int | None = None
    samples: tuple[int, ...] | None = None
    batch: int | None = None
    passes: int | None = None
    value: str | None = None
    dtype: str | None = None
    largest: float | None = None
    largest_input: float | None = None
    note: str = ""

    def text(self) -> str:
        """Describe the source in one sentence, without its place."""
        named = ", ".join(f"'{name}'" for name in self.parameters[:3])
        named += f" and {len(self.parameters) - 3} more" if len(self.parameters) > 3 else ""
        where = _module_text(self.module)
        met = "" if self.module is None else f"; {where} meets it first"
        own = f"{where}{f', {self.operation}' if self.operation else ''}"
        texts: dict[Reason, str] = {
            "data": f"{self.value} in '{self.column}' of the data, which {where} meets first",
            "weight": f"{named} held {self.value or 'nan or inf'} before this step{met}",
            "overflow": f"{self.value} in the forward of {own}, an overflow of {self.dtype}{self._magnitudes()}",
            "forward": f"{self.value} made in the forward of {own}{self._magnitudes()}; what enters it is finite",
            "loss": f"{self.value} made by the loss function from finite outputs{self._magnitudes()}",
            "backward": f"{self.value} made in the backward of {own}; all of the forward is finite"
            if self.module is not None
            else f"the gradient of {named or 'some parameter'} is not finite, and all of the forward is",
            "reduction": f"the gradient of {named} is finite on each rank, and their sum is not",
            "norm": f"all gradients are finite, and their norm is not; the largest, {self.largest}, is that of {named}",
            "update": f"the update of step {self.step} has left {named} at {self.value or 'nan or inf'}",
            "not reproduced": "a replay of the step on the same samples had only finite numbers",
            "not replayed": "the step was not replayed",
        }
        return texts[self.reason]

    def place(self) -> str:
        """Describe rank, micro batch and samples; empty where nothing is known."""
        parts = [f"rank {self.rank}"] if self.rank is not None else []
        others = len(self.ranks) - 1
        parts += [f"and {others} more with the same"] if others > 0 else []
        parts += [f"stage {self.stage}"] if self.stage is not None else []
        if self.micro_batch is not None:
            parts.append(f"micro batch {self.micro_batch} of {self.micro_batches}")
        if self.rows is not None and len(self.rows) > 1 and len(self.rows) == self.batch_rows:
            parts.append(f"all {self.batch_rows} samples{'' if self.batch is None else f' of batch {self.batch}'}")
        elif self.samples is not None:
            parts.append(_listed("sample", self.samples))
        elif self.rows is not None and self.batch is not None:
            parts.append(f"{_listed('row', self.rows)} of batch {self.batch}")
        elif self.batch is not None:
            parts.append(f"batch {self.batch}")
        return ", ".join(parts)

    def _magnitudes(self) -> str:
        known = []
        if self.largest is not None:
            known.append(f"the largest finite value beside it is {self.largest:.3g}")
        if self.largest_input is not None:
            known.append(f"the largest that enters {self.largest_input:.3g}")
        if self.reason == "overflow" and self.dtype is not None:
            known.append(f"the largest possible {torch.finfo(getattr(torch, self.dtype)).max:.3g}")
        return f" ({', '.join(known)})" if known else ""


class NonFiniteError(TrainingError):
    """The loss or the gradient is not finite. ``source`` is where that began, once it has been looked for."""

    def __init__(self, step: int, problem: str, source: NonFiniteSource | None = None, kept: str | None = None) -> None:
        self.step, self.problem, self.source, self.kept = step, problem, source, kept
        head = f"step {step}: {problem}; the weights of the last good checkpoint are untouched."
        if source is None:
            super().__init__(f"{head} {_RATE}")
            return
        self.on_all_ranks = True
        place = ", ".join(filter(None, [f"step {source.step}" if source.step != step else "", source.place()]))
        lines = [head, f"  source: {f'{place}: ' if place else ''}{source.text()}"]
        lines += [f"  {source.note}"] if source.note else []
        if source.dtype == "float16" and source.reason == "overflow":
            lines.append("  bf16 has the range of fp32, and fp16 has not.")
        lines.append(f"  {_FIX.get(source.reason, _RATE)}.{f' All that is known is in {kept}.' if kept else ''}")
        super().__init__("\n".join(lines))

    def write(self, file: Path) -> None:
        """Write the run's file; the message has what matters, if that fails."""
        source = None if self.source is None else self.source.model_dump(mode="json")
        text = json.dumps({"schema": 1, "step": self.step, "problem": self.problem, "source": source}, indent=1)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, text + "\n")


def _module_text(module: str | None) -> str:
    return "the loss function" if module == LOSS else f"'{module}'" if module else "the model itself"


def _listed(noun: str, numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {shown}{more}"
