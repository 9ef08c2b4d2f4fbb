"""Count logits in memory: the largest vocabulary tensor from the head to its backward's end."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.model.read import clean_name
from shardwise.parallel.chunked_loss import chunk_rows
from shardwise.receipts.receipt import Line
from shardwise.train.session import Session
from shardwise.train.step import Step


class LogitsRecorder:
    """Inspect every tensor created from the head's forward to its backward.

    ``rows`` is the maximum.

    Tensors with as many columns as the vocabulary count, except in the shape of the head's weight.
    """

    def __init__(self, session: Session) -> None:
        self.rows = 0
        self._session = session
        self._on = False
        decision = session.applied.decision
        found = None if decision is None else decision.head
        self.vocab = 0 if found is None else found.vocab
        self._weight = torch.Size()
        self._hook = None
        if found is not None:
            head = next(part for name, part in session.module.named_modules() if clean_name(name) == found.name)
            self._hook = head.register_forward_pre_hook(self._enter)

    def stop(self) -> None:
        """Stop; the records stay."""
        if self._hook is not None:
            self._hook.remove()
        self._on = False

    def look(self, operator: Any, made: Any) -> None:
        """Inspect the result of an operator."""
        if not self._on:
            return
        if self._session.phase not in ("forward", "backward"):
            self._on = False
            return
        schema = getattr(operator, "_schema", None)
        if schema is None or any(result.alias_info is not None for result in schema.returns):
            return  # a view, or an older tensor
        for tensor in made if isinstance(made, tuple | list) else (made,):
            wide = isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self.vocab
            if wide and tensor.shape != self._weight:
                self.rows = max(self.rows, tensor.numel() // self.vocab)

    def _enter(self, head: nn.Module, args: Any) -> None:
        weight = getattr(head, "weight", None)
        if isinstance(weight, torch.Tensor) and torch.is_grad_enabled():
            self._weight, self._on = weight.shape, True
            if args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
                args[0].register_hook(self._leave)

    def _leave(self, gradient: torch.Tensor) -> None:
        self._on = False


def logits_line(session: Session, step: Step, recorder: LogitsRecorder) -> Line:
    """Compare rows of logits in memory with the plan's chunks of the largest micro batch."""
    chunks, name = session.plan.loss_chunks, "logits at once"
    sizes = [micro.labels.numel() for micro in step.micros if isinstance(micro.labels, torch.Tensor)]
    rows = max((chunk_rows(size, chunks) for size in sizes), default=0)
    planned = f"{rows} × {recorder.vocab} (of {max(sizes, default=0)} rows, in {chunks} chunks)"
    if not recorder.rows or not sizes:
        return Line(name=name, planned=planned, found="no logits were made by the head's loss", ok=None)
    return Line(name=name, planned=planned, found=f"{recorder.rows} × {recorder.vocab}", ok=recorder.rows <= rows)
