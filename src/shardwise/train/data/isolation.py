"""Whether documents of one sample see each other: asked of the model itself, as it is about to be trained."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.model.call_module import call
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.train.data.samples import IGNORED, IsolatedSamples, JoinedSources
from shardwise.train.loss import token_loss_sum
from shardwise.train.session_interface import TrainingSession

_MOST_ASKED = 16  # documents whose loss is compared
_TIMES = 10.0  # the noise of a router's experts, whose sums have another order when other tokens stand in the row
_NOTHING = 1e-9  # relative change of a loss that no arithmetic distinguishes from none


@dataclass(frozen=True)
class Isolation:
    """Effect of one document on the loss of the others in its sample.

    ``change`` is the largest relative change of a document's loss when the first document of its sample becomes another
    one, ``open_change`` the same where positions do not begin anew; ``documents`` were compared on all ranks.
    ``noise`` is how far a change in the last document, which no earlier one can see, moves the loss of the first:
    arithmetic alone. ``wrong_rows`` are samples whose tokens, labels or positions are not those of whole documents.
    """

    change: float
    open_change: float
    documents: int
    wrong_rows: int = 0
    noise: float = 0.0

    @property
    def ok(self) -> bool | None:
        """Whether documents are apart; ``None`` where no sample has two, or nothing moves this model's loss."""
        if self.wrong_rows:
            return False
        if not self.documents or max(self.change, self.open_change) <= _NOTHING:
            return None
        return self.change <= max(_NOTHING, _TIMES * self.noise)


def measure_isolation(session: TrainingSession, samples: IsolatedSamples | JoinedSources, ids: np.ndarray) -> Isolation:
    """Compare losses with and without a change in another document, on the samples ``ids`` of this rank. Collective.

    Five forwards without gradients: as it is, with another first document, with another last one; and the first two
    with positions that go on over the borders, which show what an open border does to this model's loss.
    """
    inputs, labels = samples.batch(ids)
    wrong = sum(not samples.is_right(int(number), *_row(inputs, labels, row)) for row, number in enumerate(ids))
    positions = inputs["position_ids"]
    document = (positions == 0).cumsum(1)  # from 1; the padding at the end is the last
    first = document == 1
    probed = [document_labels(labels, document, number) for number in range(2, int(document.max()) + 1)]
    probed = [one for one in probed if (one != IGNORED).any()][:_MOST_ASKED]
    count = max(int(row[0]) for row in _gathered([len(probed)], session.ranks))
    probed += [torch.full_like(labels, IGNORED)] * (count - len(probed))
    probed.append(document_labels(labels, document, 1))
    last = (document == document.max(1, keepdim=True).values) & ~first
    length = torch.arange(positions.shape[1]).expand_as(positions)
    ids_here = inputs["input_ids"]
    found = {
        (which, is_open): _losses(
            session, {"input_ids": _changed(ids_here, where), "position_ids": length if is_open else positions}, probed
        )
        for which, where, is_open in (
            ("none", None, False),
            ("first", first, False),
            ("last", last, False),
            ("none", None, True),
            ("first", first, True),
        )
    }
    changes = [
        _change(found["none", False][:-1], found["first", False][:-1]),
        _change(found["none", True][:-1], found["first", True][:-1]),
        _change(found["none", False][-1:], found["last", False][-1:]),
    ]
    mine = sum(bool((one != IGNORED).any()) for one in probed[:-1])
    rows = _gathered([*changes, mine if session.place.tp == session.place.pp == 0 else 0, wrong], session.ranks)
    return Isolation(
        change=max(row[0] for row in rows),
        open_change=max(row[1] for row in rows),
        noise=max(row[2] for row in rows),
        documents=int(sum(row[3] for row in rows)),
        wrong_rows=int(max(row[4] for row in rows)),
    )


def shared_rows(
    samples: IsolatedSamples | JoinedSources, first: NDArray[np.int64], later: NDArray[np.int64], dp: int, place: int
) -> NDArray[np.int64]:
    """Return as many rows of several documents as ``first`` has, its own or, where it has none, from ``later``.

    Each of ``dp`` places gets others of them where there are enough. Without any, ``first`` stays.
    """
    if samples.is_shared(first).any():
        return first
    found = later[samples.is_shared(later)]
    return np.resize(found[place % len(found) :: dp], len(first)) if len(found) else first


def _changed(ids: Tensor, where: Tensor | None) -> Tensor:
    """Return token ids with others in the places ``where``."""
    if where is None:
        return ids
    other = ids.roll(1, 1).roll(1, 0)
    return torch.where(where, torch.where(other == ids, (other + 1) % (int(ids.max()) + 1), other), ids)


def _change(one: Tensor, other: Tensor) -> float:
    """Return the largest relative change of a loss."""
    change = ((one - other).abs() / one.abs().clamp_min(1e-30)).nan_to_num(0.0, posinf=1.0)
    return float(change.max()) if len(change) else 0.0


def _gathered(values: list[float], ranks: Ranks) -> list[list[float]]:
    """Return the values of every rank. Collective."""
    return [json.loads(text) for text in gather_text(json.dumps(values), ranks)]


def document_labels(labels: Tensor, document: Tensor, number: int) -> Tensor:
    """Return the labels of each row's ``number``-th document only."""
    return torch.where(document == number, labels, IGNORED)


def _row(inputs: dict[str, Tensor], labels: Tensor, row: int) -> tuple[Tensor, Tensor, Tensor]:
    return inputs["input_ids"][row], inputs["position_ids"][row], labels[row]


def _losses(session: TrainingSession, inputs: dict[str, Tensor], probed: list[Tensor]) -> Tensor:
    """Return the summed loss of each of ``probed``, float64 on the CPU; zeros on a stage without the loss."""
    device = session.device
    given = {name: value.to(device) for name, value in inputs.items()}
    found = torch.zeros(len(probed), dtype=torch.float64)

    def look(outputs: object, labels: Tensor) -> Tensor:
        for index, one in enumerate(probed):
            found[index] = float(token_loss_sum(outputs, one.to(device)))
        return torch.zeros((), device=device)

    module, pipeline = session.module, session.applied.pipeline
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if pipeline is not None:
                pipeline.evaluate([given], [probed[0].to(device) if probed else None], look)
            else:
                look(call(module, given), next(iter(probed), torch.empty(0)))
    finally:
        module.train(was_training)
        reshard(module)
    return found
