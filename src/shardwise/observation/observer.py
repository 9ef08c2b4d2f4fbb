"""`observe`: a receipt for anybody's training loop, after its second optimizer step."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.distributed.process_group import Ranks, drain_at_exit, gather_ints, gather_text, join, leave
from shardwise.errors import ShardwiseError, UserError, did_you_mean
from shardwise.observation.collect import collect, innermost, is_deepspeed, name_of, tied_groups, torch_optimizers
from shardwise.observation.engine_steps import EngineSteps
from shardwise.observation.expectation import Expectation, Precision
from shardwise.observation.expected_settings import expectation_of
from shardwise.observation.loop_facts import LoopFacts
from shardwise.observation.loop_receipt import loop_receipt
from shardwise.observation.loop_trace import LoopTrace, is_skipped, remove_hooks
from shardwise.observation.run_output import checked_folder
from shardwise.observation.step_clock import StepClock
from shardwise.observation.timed_steps import TimedSteps
from shardwise.receipts.receipt import Receipt
from shardwise.report.terminal import print_receipt

_LOG = logging.getLogger("shardwise")
OnDifference = Literal["report", "error"]
_OBSERVED_STEP = 2  # the first one still allocates, and DDP orders its buckets in it
_MOST_FORWARDS = 1000  # without the step that is awaited: each has its inputs hashed
_PATIENCE_S = 300.0  # for a rank that does not come to the second step


class LoopObserver:
    """Observer of a loop; ``receipt`` is there after the second optimizer step, ``None`` before.

    As a context manager, or until `detach`, which it calls itself with the receipt, or five steps later with a run
    folder, or after 1,000 forwards without the step that is awaited.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        expected: Expectation,
        on_receipt: Callable[[Receipt], None],
        on_difference: OnDifference,
        output: Path | None = None,
    ) -> None:
        self.receipt: Receipt | None = None
        self.expected = expected
        root, wrapper = innermost(model)
        self._ranks = control_group()
        self._is_main = not dist.is_initialized() or dist.get_rank() == 0  # at exit the group may be gone
        self._tied = tied_groups(root)
        self._trace: LoopTrace | None = LoopTrace(
            root, wrapper, optimizers, None if output is None else StepClock(root)
        )
        self._timed = None if output is None else TimedSteps(output, self._ranks)
        self._on_receipt, self._on_difference = on_receipt, on_difference
        self._steps = self._forwards = 0
        self._earlier: list[str] = []
        self._trace.attach()
        self._hooks: list[Any] = [
            root.register_forward_pre_hook(self._before_forward),
            optimizers[-1].register_step_post_hook(self._after_step),
        ]
        # of the text alone: an observer that the program has dropped must not keep its model until the exit
        self._warn = functools.partial(
            _LOG.warning, f"observe: no receipt, as the loop ended before its optimizer step {_OBSERVED_STEP}"
        )
        if self._is_main:
            atexit.register(self._warn)

    def __enter__(self) -> LoopObserver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end() if kind is None else self.detach()

    def detach(self) -> None:
        """Remove every hook; a loop that had no second step gets no receipt."""
        self._end(None)

    def end(self) -> None:
        """Detach where the loop has ended, and log on rank 0 if it was too short for a receipt."""
        if self._trace is not None and self.receipt is None and self._is_main:
            self._warn()
        self.detach()

    def _end(self, running: Any) -> None:
        if self._trace is None:
            return
        atexit.unregister(self._warn)
        self._trace.stop(running)
        remove_hooks(self._hooks, self._trace.root, running)
        self._trace = None
        if self._ranks is not None:
            leave(self._ranks)

    def _before_forward(self, *_: Any) -> None:
        """Give up where the step that is awaited does not come: of an optimizer never stepped, or after an error."""
        recomputes = torch._C._current_graph_task_id() != -1
        if self._trace is None or recomputes or not (self._steps or torch.is_grad_enabled()):
            return  # evaluation before the first step costs nothing
        self._forwards += 1
        if self._forwards <= _MOST_FORWARDS:
            return
        if self._is_main and self.receipt is not None:
            _LOG.warning(
                f"observe: the report has step {_OBSERVED_STEP} alone, as step {self._steps + 1} did not come in "
                f"{_MOST_FORWARDS} forwards of the model"
            )
        elif self._is_main:
            _LOG.warning(
                f"observe: no receipt, as step {self._steps + 1} of {type(self._trace.optimizers[-1]).__name__} did "
                f"not come in {_MOST_FORWARDS} forwards of the model, and step {_OBSERVED_STEP} has the receipt; give "
                "observe the optimizer that the loop steps"
            )
        self.detach()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        trace = self._trace
        if trace is None or is_skipped(optimizer):
            return
        self._steps, self._forwards = self._steps + 1, 0
        if self._steps < _OBSERVED_STEP:
            self._earlier = trace.samples
            trace.forwards = trace.bypassed = 0
            trace.training = None
            trace.start()
            return
        running = self._hooks[-1]
        trace.pause()
        if self.receipt is not None:
            self._add_step(trace, running)
            return
        try:
            with _disable_current_modes(), torch.no_grad():
                self.receipt = self._judge(trace)
        finally:
            atexit.unregister(self._warn)
            if self.receipt is None or self._timed is None:
                self._end(running)
        if self.receipt is not None:
            self._tell(self.receipt, running)
        if self._trace is not None:
            trace.start(times_only=True)

    def _tell(self, receipt: Receipt, running: Any) -> None:
        try:
            if self._is_main:
                self._on_receipt(receipt)
            if self._on_difference == "error":
                receipt.require()
        except BaseException:
            self._end(running)
            raise

    def _add_step(self, trace: LoopTrace, running: Any) -> None:
        """Keep the times of a step after the receipt; the last of them writes the report."""
        timed, clock = self._timed, trace.clock
        assert timed is not None and clock is not None
        if not timed.add(clock.times(trace.samples, trace.wrapper)):
            trace.start(times_only=True)
            return
        try:
            with _disable_current_modes(), torch.no_grad():
                timed.finish(_PATIENCE_S)
        finally:
            self._end(running)

    def _judge(self, trace: LoopTrace) -> Receipt | None:
        """Return the receipt of all ranks; ``None`` where a rank's facts cannot be read, which does not stop a run."""
        try:
            facts = collect(trace, self._earlier, self._tied)
            if trace.clock is not None:
                facts = facts.model_copy(update={"times": trace.clock.times(trace.samples, trace.wrapper)})
            text = facts.model_dump_json()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        texts = [text]
        if self._ranks is not None:
            try:
                gather_ints([1], self._ranks, "observed step", patient=False, limit_s=_PATIENCE_S)
                texts = gather_text(text, self._ranks)
            except (ShardwiseError, RuntimeError) as error:
                _LOG.warning(f"observe: no receipt, as not all ranks came to the second step: {error}")
                return None
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if not text.startswith("{")]
        if failed:
            if self._is_main:
                _LOG.warning(f"observe: no receipt, as facts of the loop cannot be read: {failed[0]}")
            return None
        ranks = [LoopFacts.model_validate_json(text) for text in texts]
        receipt = loop_receipt(self.expected, ranks)
        if self._timed is not None:
            self._timed.begin(receipt, ranks)
        return receipt


def observe(
    model: nn.Module,
    optimizer: Any,
    expect: Any = None,
    *,
    precision: Precision | None = None,
    grad_accum: int | None = None,
    clip_norm: float | None = None,
    recompute: bool | None = None,
    tied: Sequence[Sequence[str]] = (),
    on_difference: OnDifference = "report",
    on_receipt: Callable[[Receipt], None] | None = None,
    output: str | Path | None = None,
) -> LoopObserver:
    """Observe two optimizer steps of any training loop, print a receipt on rank 0, and detach.

    With ``output`` it times five more steps first.

    Call it on every rank, after the model is wrapped and before the first step. Hooks read; they change nothing.
    Use it in a ``with`` where the loop may end or fail before its second step: what records operators stays on the
    thread otherwise, for up to 1,000 forwards of the model.

    Args:
        model: as the loop calls it: plain, inside DDP or FSDP, compiled, or from ``Accelerator.prepare``.
        optimizer: the optimizer, or a sequence of them; the last one's step ends a step.
        expect: what was meant: a strategy (``"fsdp"``), a `Plan`, an `Expectation`, an ``Accelerator``, or
            ``TrainingArguments``. Lines that it does not state are reported and not judged.
        precision: compute dtype: ``fp32``, ``bf16`` or ``fp16``. This and the next four are those of ``expect`` if
            they are left out.
        grad_accum: micro batches per optimizer step on one rank.
        clip_norm: largest global norm of the gradient at the step.
        recompute: whether the backward recomputes activations.
        tied: groups of names that are one parameter.
        on_difference: ``report``, or ``error`` to raise on every rank if a line is false.
        on_receipt: called on rank 0 with the receipt, in place of printing it.
        output: folder for the receipt and the times of the second step, then of the five steps after it, which
            ``shardwise report`` renders.

    Raises:
        UserError: a setting is impossible.
        PlanError: ``expect`` is not a strategy.
    """
    if on_difference not in get_args(OnDifference):
        raise UserError(f"observe: on_difference = {on_difference!r}: use report or error")
    stated = {
        "precision": precision,
        "grad_accum": grad_accum,
        "clip_norm": clip_norm,
        "recompute": recompute,
        "tied": tuple(group if isinstance(group, str) else tuple(group) for group in tied) or None,
    }
    expected = expectation_of(expect, stated)
    if not isinstance(model, nn.Module):
        raise UserError(f"observe: model = {model!r:.60}: give the model that the loop calls, an nn.Module")
    optimizers: list[Any] = torch_optimizers(optimizer)
    if is_deepspeed(model) and hasattr(model, "zero_optimization_stage"):
        optimizers, model = [EngineSteps(model)], model.module  # type: ignore[assignment]
    elif any(is_deepspeed(part) for part in (model, *optimizers)):
        raise UserError(
            "observe: the optimizer is DeepSpeed's; give the engine that deepspeed.initialize returned as model"
        )
    if not optimizers or not all(hasattr(one, "register_step_post_hook") for one in optimizers):
        raise UserError("observe: optimizer has no step hooks; give torch.optim optimizers, or wrappers around them")
    _require_names(innermost(model)[0], expected.tied)
    folder = None if output is None else checked_folder(output)
    return LoopObserver(model, optimizers, expected, on_receipt or print_after_output, on_difference, folder)


def _require_names(root: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Raise a `UserError` if a name of ``tied`` is no parameter's; FSDP1's flat parameters hide theirs."""
    known = {name_of(name) for name, _ in root.named_parameters(remove_duplicate=False)}
    if any(name.endswith("_flat_param") for name in known):
        return
    unknown = [name for group in tied for name in group if name not in known]
    if unknown:
        found = "; ".join(f"'{name}'{did_you_mean(name, known)}" for name in unknown)
        raise UserError(f"observe: tied: the model has no parameter {found}")


def print_after_output(receipt: Receipt) -> None:
    """Print a receipt after what the loop printed."""
    sys.stdout.flush()
    print_receipt(receipt)


def control_group() -> Ranks | None:
    """Create a group for messages about the loop; ``None`` on one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    drain_at_exit()  # the loop may end with the step after, and destroys its groups itself
    return join("cpu")
