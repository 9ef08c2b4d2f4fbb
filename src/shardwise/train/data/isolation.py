"""Whether documents of one sample see each other: asked of the model itself, as it is about to be trained."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.parallel.pipeline_parallel.stage_runtime import call
from shardwise.train.data.samples import IGNORED, IsolatedSamples, JoinedSources
from shardwise.train.loss import token_loss_sum
from shardwise.train.session_interface import TrainingSession

_MOST_ASKED = 16  # documents whose loss is compared
_SHARE = 0.02  # of the change that an open border makes: what counts as none (order of sums in a router's experts)
_NOTHING = 1e-9  # relative change of a loss that no arithmetic distinguishes from none


@dataclass(frozen=True)
class Isolation:
    """Effect of one document on the loss of the others in its sample.

    ``change`` is the largest relative change of a document's loss when the first document of its sample becomes another
    one, ``open_change`` the same where positions do not begin anew; ``documents`` were compared on all ranks.
    ``wrong_rows`` are samples whose tokens, labels or positions are not those of whole documents.
    """

    change: float
    open_change: float
    documents: int
    wrong_rows: int = 0

    @property
    def ok(self) -> bool | None:
        """Whether documents are apart; ``None`` where no sample has two, or nothing moves this model's loss."""
        if self.wrong_rows:
            return False
        if not self.documents or max(self.change, self.open_change) <= _NOTHING:
            return None
        return self.change <= max(_NOTHING, _SHARE * self.open_change)


def measure_isolation(session: TrainingSession, samples: IsolatedSamples | JoinedSources, ids: np.ndarray) -> Isolation:
    """Compare losses with and without a change in another document, on the samples ``ids`` of this rank. Collective.

    Four forwards without gradients: two with the positions of the data, two with positions that go on over the borders,
    which show what an open border does to this model's loss.
    """
    inputs, labels = samples.batch(ids)
    wrong = sum(not samples.is_right(int(number), *_row(inputs, labels, row)) for row, number in enumerate(ids))
    positions = inputs["position_ids"]
    document = (positions == 0).cumsum(1)  # from 1; the padding at the end is the last
    first = document == 1
    asked = [document_labels(labels, document, number) for number in range(2, int(document.max()) + 1)]
    asked = [one for one in asked if (one != IGNORED).any()][:_MOST_ASKED]
    count = max(int(row[0]) for row in _gathered([len(asked)], session.ranks))
    asked += [torch.full_like(labels, IGNORED)] * (count - len(asked))
    largest = int(inputs["input_ids"].max()) + 1
    other = torch.where(first, inputs["input_ids"].roll(1, 1).roll(1, 0), inputs["input_ids"])
    unequal = torch.where(other == inputs["input_ids"], (other + 1) % largest, other)
    other = torch.where(first, unequal, inputs["input_ids"])
    length = torch.arange(positions.shape[1]).expand_as(positions)
    changes = []
    for places in (positions, length):
        found = [
            _losses(session, {"input_ids": tokens, "position_ids": places}, asked)
            for tokens in (inputs["input_ids"], other)
        ]
        change = ((found[0] - found[1]).abs() / found[0].abs().clamp_min(1e-30)).nan_to_num(0.0, posinf=1.0)
        changes.append(float(change.max()) if count else 0.0)
    mine = sum(bool((one != IGNORED).any()) for one in asked)
    rows = _gathered([*changes, mine if session.place.tp == session.place.pp == 0 else 0, wrong], session.ranks)
    return Isolation(
        change=max(row[0] for row in rows),
        open_change=max(row[1] for row in rows),
        documents=int(sum(row[2] for row in rows)),
        wrong_rows=int(max(row[3] for row in rows)),
    )


def _gathered(values: list[float], ranks: Ranks) -> list[list[float]]:
    """Return the values of every rank. Collective."""
    return [json.loads(text) for text in gather_text(json.dumps(values), ranks)]


def document_labels(labels: Tensor, document: Tensor, number: int) -> Tensor:
    """Return the labels of each row's ``number``-th document only."""
    return torch.where(document == number, labels, IGNORED)


def _row(inputs: dict[str, Tensor], labels: Tensor, row: int) -> tuple[Tensor, Tensor, Tensor]:
    return inputs["input_ids"][row], inputs["position_ids"][row], labels[row]


def _losses(session: TrainingSession, inputs: dict[str, Tensor], asked: list[Tensor]) -> Tensor:
    """Return the summed loss of each of ``asked``, float64 on the CPU; zeros on a stage without the loss."""
    device = session.device
    given = {name: value.to(device) for name, value in inputs.items()}
    found = torch.zeros(len(asked), dtype=torch.float64)

    def look(outputs: object, labels: Tensor) -> Tensor:
        for index, one in enumerate(asked):
            found[index] = float(token_loss_sum(outputs, one.to(device)))
        return torch.zeros((), device=device)

    module, pipeline = session.module, session.applied.pipeline
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if pipeline is not None:
                pipeline.evaluate([given], [asked[0].to(device) if asked else None], look)
            else:
                look(call(module, given), next(iter(asked), torch.empty(0)))
    finally:
        module.train(was_training)
        reshard(module)
    return found
