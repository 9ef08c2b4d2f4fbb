"""Held-out loss and accuracy of a task whose labels are classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.parallel.context_parallel.attention import sequence_share
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.parallel.pipeline_parallel.stage_runtime import call
from shardwise.train.data.samples import NumberedSamples, on_device
from shardwise.train.loss import IGNORED, count_labels
from shardwise.train.session import Session
from shardwise.train.tasks.own_loss import LossSum


def evaluate_labels(
    session: Session,
    samples: NumberedSamples,
    loss_sum: LossSum,
    limit: int,
    batch: int,
    tick: Callable[[float], None] | None = None,
) -> dict[str, float] | None:
    """Return the mean ``loss`` of a label over the first ``limit`` samples (0: all), and the ``accuracy``.

    Accuracy is the share of labels that have the largest output; left out where labels are no classes. Every rank
    evaluates its share with the same number of forwards; all return the same. ``tick`` gets the finished share.
    ``None`` if any rank was asked to stop meanwhile.
    """
    number = min(limit, len(samples)) if limit else len(samples)
    dims, place, pipeline = session.plan.dims, session.place, session.applied.pipeline
    rounds = math.ceil(number / (batch * dims.dp))
    ids = np.full(rounds * dims.dp * batch, -1, dtype=np.int64)
    ids[:number] = np.arange(number)
    share = ids.reshape(rounds, dims.dp, batch)[:, place.dp]
    totals = torch.zeros(4, dtype=torch.float64, device=session.device)  # loss, its labels, right ones, those compared

    def looked_at(outputs: Any, labels: Any) -> Tensor:
        loss = loss_sum(outputs, labels)
        right, compared = accuracy(outputs, labels)  # gathers logits that are sharded over the vocabulary
        if place.tp == 0:  # the others of its group have the same
            totals.add_(torch.tensor([0.0, count_labels(labels), right, compared], device=session.device))
        return loss

    module = session.module
    was_training = module.training
    module.eval()
    with torch.no_grad():
        for index, row in enumerate(share):
            inputs, labels = on_device(samples.batch(row), session.device)
            if dims.cp > 1:
                inputs, labels = sequence_share((inputs, labels), session.plan, place.cp)
            if pipeline is not None:
                loss = pipeline.evaluate([inputs], [labels], looked_at)
            else:
                loss = looked_at(call(module, inputs), labels)
            if place.tp == 0:
                totals[0] += loss
            if tick is not None:
                tick((index + 1) / rounds)
            if session.stop_agreed():
                break
    module.train(was_training)
    reshard(module)
    if session.stopped:
        return None
    if session.ranks.world_size > 1:
        dist.all_reduce(totals)
    loss_total, count, right, compared = totals.tolist()
    found = {"loss": loss_total / count if count else math.nan}
    return found | ({"accuracy": right / compared} if compared else {})


def accuracy(outputs: Any, labels: Any) -> tuple[int, int]:
    """Count labels with the largest output, and all that are compared: none if outputs are not logits of classes."""
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or labels.is_floating_point():
        return 0, 0
    if logits.shape[:-1] != labels.shape:
        return 0, 0
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    counts = labels != IGNORED
    return int(((whole.argmax(-1) == labels) & counts).sum()), int(counts.sum())
