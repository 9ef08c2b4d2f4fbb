"""Held-out bits per byte of a model: its cross-entropy on unseen text."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from shardwise.parallel.context_parallel.attention import sequence_share
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.train.data.samples import NumberedSamples
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session


def held_out_bits_per_byte(
    session: Session, samples: NumberedSamples, limit: int, batch: int, tick: Callable[[float], None] | None = None
) -> float | None:
    """Total cross-entropy of the first ``limit`` samples (0: all), in bits per byte of label.

    Every rank evaluates its share with the same number of forwards; all return the same value. ``tick`` gets the
    finished share. ``None`` if any rank was asked to stop meanwhile.
    """
    number = min(limit, len(samples)) if limit else len(samples)
    dims, place, pipeline = session.plan.dims, session.place, session.applied.pipeline
    rounds = math.ceil(number / (batch * dims.dp))
    ids = np.full(rounds * dims.dp * batch, -1, dtype=np.int64)
    ids[:number] = np.arange(number)
    share = ids.reshape(rounds, dims.dp, batch)[:, place.dp]
    total = torch.zeros((), dtype=torch.float64, device=session.device)
    module = session.module
    was_training = module.training
    module.eval()
    with torch.no_grad():
        for index, row in enumerate(share):
            inputs, labels = (part.to(session.device) for part in samples.batch(row))
            if dims.cp > 1:
                inputs, labels = sequence_share((inputs, labels), session.plan, place.cp)
            if pipeline is not None:
                loss = pipeline.evaluate([inputs], [labels], token_loss_sum)
            else:
                loss = token_loss_sum(module(inputs), labels)
            if place.tp == 0:  # the others of its group have the same
                total += loss
            if tick is not None:
                tick((index + 1) / rounds)
            if session.stop_agreed():
                break
    module.train(was_training)
    reshard(module)
    if session.stopped:
        return None
    if session.ranks.world_size > 1:
        dist.all_reduce(total)
    return total.item() / math.log(2) / samples.label_bytes(number)
