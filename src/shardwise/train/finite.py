"""Check before each save, on all ranks, that weights are finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.distributed.local_tensor import local_of
from shardwise.distributed.process_group import gather_ints, gather_text
from shardwise.model.read import clean_name
from shardwise.parallel.ownership import ownership_of
from shardwise.train.nonfinite.nonfinite_error import NonFiniteError
from shardwise.train.session_interface import TrainingSession


def check_weights(session: TrainingSession) -> None:
    """Refuse to save weights that are not finite. Collective; reads each trained weight once.

    Raises:
        NonFiniteError: on all ranks, with the first such parameter's name.
    """
    wrong = [name for name, spoilt in _spoilt(session) if spoilt]
    counts = [row[0] for row in gather_ints([len(wrong)], session.ranks)]
    if not any(counts):
        return
    first = next(text for text in gather_text(wrong[0] if wrong else "", session.ranks) if text)
    more = f" and {max(counts) - 1} more" if max(counts) > 1 else ""
    problem = f"the update has left weights that are not finite ({first}{more}); they are not saved"
    raise NonFiniteError(session.steps_done, problem)


def _spoilt(session: TrainingSession) -> list[tuple[str, bool]]:
    """Return each trained parameter, and whether this rank's part of it is not finite."""
    parts = [(name, part) for name, part in _local_parts(session) if part.numel()]
    if not parts:
        return []
    fine = torch.stack([_is_finite(part) for _, part in parts]).tolist()  # one wait for the device
    return [(name, not good) for (name, _), good in zip(parts, fine, strict=True)]


def _is_finite(part: torch.Tensor) -> torch.Tensor:
    """Return whether all elements are finite; 0-d, without a copy. A NaN is both min and max."""
    part = torch.view_as_real(part) if part.is_complex() else part
    least, largest = (part if part.element_size() > 1 else part.float()).aminmax()
    return least.isfinite() & largest.isfinite()


def _local_parts(session: TrainingSession) -> Iterator[tuple[str, torch.Tensor]]:
    engine, ownership = session.applied.engine, ownership_of(session.module)
    if engine is not None:
        yield from engine.own_weights()
        return
    for name, parameter in session.module.named_parameters():
        if parameter.requires_grad:
            name = clean_name(name)
            yield name if ownership is None else ownership.canonical(name), local_of(parameter)
