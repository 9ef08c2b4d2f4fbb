"""Explain an out-of-memory error: where it was, what was allocated beside the prediction, and what would fit."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch
from torch.utils._pytree import tree_leaves

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import estimate_memory
from shardwise.errors import OutOfMemory, ShardwiseError
from shardwise.import_object import raised_text
from shardwise.measure.state import Measurement, measure_state
from shardwise.parallel.apply import is_unwrapped
from shardwise.run.resume_command import with_plan
from shardwise.search.alternatives import Alternative
from shardwise.train.optimizer import workload_of
from shardwise.train.session import Session
from shardwise.train.step import Step
from shardwise.units import bytes_text
from shardwise.watch.exit_status import memory_limit

if TYPE_CHECKING:
    from shardwise.run.job import Job
    from shardwise.train.config import Config

_SIGNS = (
    "out of memory",
    "t allocate memory",
    "unable to allocate",
    "cannot allocate memory",
    "bad_alloc",
    "alloc_failed",
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_AMOUNT = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_WHERE = {
    "forward": "the forward",
    "backward": "the backward",
    "clip": "gradient clipping",
    "optimizer": "the optimizer's step",
    "evaluation": "the evaluation",
    "checkpoint": "the checkpoint",
}
_REST = ("activations", "logits", "buffers", "temporaries")
MARGIN = 1.05
"""Times what is missing that another plan must save; the prediction was wrong once already."""
NO_WRAPPER = (
    "shardwise: model.module is a habit of DDP, and one rank has no wrapper; write session.module, which is your model "
    "under every strategy and on any number of ranks"
)
UNKNOWN_SHORTAGE = 0.1  # of the prediction, where the allocator does not say how much is missing


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host had no memory left: an error of CUDA, of torch's CPU allocator, of Python."""
    if isinstance(error, ShardwiseError):
        return False
    text = str(error).lower()
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS))


@dataclass(frozen=True)
class Shortage:
    """Bytes as the allocator's message has them; ``None`` is unknown."""

    requested: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    capacity: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Shortage:
        """Read the message of CUDA's caching allocator, of torch's CPU allocator, or of numpy."""
        text = str(error)
        allocated, cached = _amount(text, "", " is allocated by PyTorch"), _amount(text, "", " is reserved by PyTorch")
        return cls(
            requested=_amount(text, "[Tt]ried to allocate ", "") or _amount(text, "Unable to allocate ", ""),
            allocated=allocated,
            reserved=None if allocated is None or cached is None else allocated + cached,
            capacity=_amount(text, "total capacity of ", ""),
        )

    def missing(self, predicted: int) -> int:
        """Return how much less a plan must need than ``predicted``."""
        rest = 0 if self.allocated is None else predicted - self.allocated  # what was still to come
        unknown = int(UNKNOWN_SHORTAGE * predicted) if self.requested is None else 0
        return int(MARGIN * max(self.requested or 0, rest, unknown))


def _amount(text: str, before: str, after: str) -> int | None:
    found = re.search(before + _AMOUNT + after, text)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


class Foreseen(Protocol):
    """What is known of a run beside its session."""

    def estimate(self, session: Session) -> Estimate | None:
        """Return the prediction; ``None`` where there is none."""

    def remedies(self, session: Session, step: Step | None, shortage: Shortage) -> list[str]:
        """Return what would fit, a line each."""


class OutOfMemoryRecorder:
    """Observer that knows the current step, and explains an error of this rank."""

    def __init__(self, session: Session, foreseen: Foreseen) -> None:
        self._session, self._foreseen = session, foreseen
        self._step: Step | None = None
        self._prepared = False
        session.observers.append(self)

    def on_prepared(self, session: Session) -> None:
        """Remember that there is a model."""
        self._prepared = True

    def on_step_start(self, session: Session, step: Step) -> None:
        """Remember the step."""
        self._step = step

    def on_gradients(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def explained(self, error: BaseException) -> str:
        """Return the message for ``error``: where, how much, and what would fit."""
        session, shortage = self._session, Shortage.of(error)
        asked = "" if shortage.requested is None else f": {bytes_text(shortage.requested)} more were asked for"
        lines = [f"out of memory {self._where()}{asked}"]
        estimate = self._foreseen.estimate(session) if self._prepared else None
        lines.append(f"  {_used(session, shortage, estimate)}")
        if self._prepared:
            lines += _by_category(measure_state(session.module, session.optimizer), shortage, estimate)
            lines += [f"  {line}" for line in self._foreseen.remedies(session, self._step, shortage)]
        return "\n".join(lines)

    def _where(self) -> str:
        session, step = self._session, self._step
        if not self._prepared:
            return "while the model was built"
        phase = _WHERE.get(session.phase)
        if not session.in_step or step is None:
            done = f"after step {session.steps_done}" if session.steps_done else "before the first step"
            return f"in {phase} {done}" if phase else done
        if session.phase in ("forward", "backward") and step.micro:
            return f"in {phase} of micro batch {step.micro} of {len(step.micros)}, step {step.number}"
        return f"in {phase} of step {step.number}" if phase else f"in step {step.number}"


def _used(session: Session, shortage: Shortage, estimate: Estimate | None) -> str:
    """Compare allocated and reserved bytes with the prediction."""
    if shortage.allocated is None:
        memory, limit = psutil.Process().memory_info(), memory_limit()
        bound = f" of the {bytes_text(limit.num_bytes)} that {limit.name} allows" if limit is not None else ""
        text = (
            f"this process had {bytes_text(memory.rss)} in memory and {bytes_text(memory.vms)} of address space{bound}"
        )
    else:
        of = "" if shortage.capacity is None else f" of the device's {bytes_text(shortage.capacity)}"
        text = f"{bytes_text(shortage.allocated)} were allocated and {bytes_text(shortage.reserved)} reserved{of}"
    if estimate is None:
        return f"{text}; not predicted"
    peak = bytes_text(estimate.device_bytes if estimate.allocated is None else estimate.allocated)
    part = f" without {' and '.join(estimate.unknown)}, which are unknown," if estimate.unknown else ""
    reserved = f" and {bytes_text(estimate.reserved)} reserved" if shortage.reserved and estimate.reserved else ""
    return f"{text}; predicted were{part} {peak} allocated{reserved} at the peak"


def _by_category(found: Measurement, shortage: Shortage, estimate: Estimate | None) -> list[str]:
    """Format a line for each category: now, and predicted."""
    categories = {"parameters": found.parameters, "gradients": found.gradients, "optimizer": found.optimizer}
    rest = None if shortage.allocated is None else max(0, shortage.allocated - sum(categories.values()))
    rows = [("", "now", "predicted")]
    rows += [(name, bytes_text(value), _predicted(estimate, (name,))) for name, value in categories.items()]
    rows.append((", ".join(_REST), bytes_text(rest), _predicted(estimate, _REST)))
    return [f"    {name:<44}{now:>12}{planned:>14}" for name, now, planned in rows]


def _predicted(estimate: Estimate | None, names: Sequence[str]) -> str:
    values = [None if estimate is None else getattr(estimate, name) for name in names]
    return "unknown" if None in values else bytes_text(sum(value or 0 for value in values))


@dataclass(frozen=True)
class ForeseenRun:
    """Prediction of ``shardwise train``, and the command that would fit."""

    config: Config
    predicted: Estimate
    smaller: tuple[Alternative, ...]
    command: tuple[str, ...]

    @classmethod
    def of(cls, job: Job) -> ForeseenRun:
        """Take from the job."""
        return cls(job.config, job.estimate, job.smaller, job.command)

    def estimate(self, session: Session) -> Estimate | None:
        """Return the prediction."""
        return self.predicted

    def remedies(self, session: Session, step: Step | None, shortage: Shortage) -> list[str]:
        """Return the nearest plan that is predicted to fit, and its command."""
        return self.fitting(shortage)

    def fitting(self, shortage: Shortage) -> list[str]:
        """Return the fastest plan that is predicted to save what is missing, and its command."""
        need = self.predicted.device_bytes - shortage.missing(self.predicted.device_bytes)
        known = [one for one in self.smaller if one.memory_bytes is not None]
        fits = [one for one in known if (one.memory_bytes or 0) <= need and one.fits is not False]
        if not known:
            return [
                "no other plan is predicted to need less: take more devices, shorter samples (data.seq_len) or a "
                "smaller train.global_batch"
            ]
        best = fits[0] if fits else min(known, key=lambda one: one.memory_bytes or 0)
        plan, slower = best.plan, ""
        if best.step_s and best.now_s:
            slower = f", {best.step_s / best.now_s:.2f} × the time of a step"
        split = f"micro batch {plan.micro_batch} × accumulation {plan.grad_accum}"
        what = f"{plan.strategy}, {split}, recompute {plan.recompute_words}"
        head = "the nearest plan that fits" if fits else "no plan is predicted to save that much; the smallest"
        size = f"{bytes_text(best.memory_bytes)} predicted instead of {bytes_text(self.predicted.device_bytes)}{slower}"
        return [f"{head}: {what} ({size}):", f"  {with_plan(self.command, self.config, plan)}"]


class ForeseenLoop:
    """Prediction of a custom loop, and the changes to its code that would fit."""

    def estimate(self, session: Session) -> Estimate | None:
        """Return what is known of the model and the optimizer; activations are not."""
        workload = workload_of(session.optimizer, device=session.device.type)
        return estimate_memory(session.spec, session.plan, workload)

    def remedies(self, session: Session, step: Step | None, shortage: Shortage) -> list[str]:
        """Return the call of `shardwise.start` for half the batch, and those that shard or recompute more."""
        plan, rows = session.plan, None if step is None or not step.micros else _rows(step.micros[0].inputs)
        given = "" if plan.recompute == "none" else f', recompute="{plan.recompute}"'
        start, lines = f'shardwise.start("{plan.strategy}"', []
        if rows is not None and rows > 1:
            call = f"{start}, grad_accum={2 * plan.grad_accum}{given})"
            lines.append(
                f"the nearest plan that needs less: batches of {rows // 2} samples instead of {rows}, and {call}"
            )
        if plan.recompute == "none" and session.spec.blocks:
            lines.append(f'activations without recomputation: {start}, grad_accum={plan.grad_accum}, recompute="full")')
        if session.ranks.world_size > 1 and str(plan.parsed) in ("ddp", "zero1", "zero2"):
            lines.append(
                f'a share of the weights on each rank: shardwise.start("fsdp", grad_accum={plan.grad_accum}{given})'
            )
        lines.append("checkpoints of session.save are untouched; session.load resumes from the newest")
        return lines


def _rows(inputs: Any) -> int | None:
    """Return the samples of a micro batch: the first dimension of its first tensor."""
    tensors = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor) and one.ndim]
    return tensors[0].shape[0] if tensors else None


def explain_at_exit(recorder: OutOfMemoryRecorder) -> None:
    """Explain an out-of-memory error that ends the script in place of its traceback, and exit with 3.

    A traceback that ends in ``model.module`` of a model without a wrapper says what to write instead.
    """
    if not _WATCHED:
        sys.excepthook = _hook(sys.excepthook)
    _WATCHED.add(recorder)


_WATCHED: weakref.WeakSet[OutOfMemoryRecorder] = weakref.WeakSet()
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _hook(before: _Hook) -> _Hook:
    """Return the hook that explains, and leaves every other exception to ``before``."""

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> object:
        recorder = next(iter(_WATCHED), None)
        if isinstance(error, AttributeError) and error.name == "module" and is_unwrapped(error.obj):
            error.__notes__ = [NO_WRAPPER]  # not added: an earlier session's hook may come after this one
        if recorder is None or not is_out_of_memory(error):
            return before(kind, error, trace)
        where = f"\n  raised: {raised_text(error)}" if isinstance(error, Exception) else ""
        print(f"shardwise: {recorder.explained(error)}{where}", file=sys.stderr)
        raise SystemExit(OutOfMemory.exit_code)

    return explain
