"""Evaluation on held-out samples: loss, perplexity, bits per byte and metrics of the user's own, by source."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.import_object import load_object
from shardwise.model.call_module import call
from shardwise.parallel.chunked_loss import LateLogits
from shardwise.parallel.context_parallel.attention import sequence_share
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.train.data.samples import JoinedSources, NumberedSamples, on_device
from shardwise.train.loss import IGNORED, count_labels, full_logits, token_loss_sum
from shardwise.train.session import Session

LossSum = Callable[[Any, Any], torch.Tensor]
Metric = Callable[[Any, torch.Tensor], tuple[Any, Any]]
"""Outputs and labels of a micro batch to a sum and the number of its terms."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    ``loss`` is the mean of a label in nats, ``bits_per_byte`` the total in bits over the bytes of the text behind the
    labels; ``metrics`` are means, by name; ``sources`` is the loss of each source of a mixture.
    """

    loss: float
    bits_per_byte: float
    metrics: dict[str, float] = field(default_factory=dict)
    sources: dict[str, float] = field(default_factory=dict)

    @property
    def is_of_text(self) -> bool:
        """Whether the loss is the cross-entropy of text; else it is that of labels, or one of the user's own."""
        return math.isfinite(self.bits_per_byte)

    def labels(self) -> dict[str, float]:
        """Return the loss and what else was measured of labels, by plain names."""
        line = self.line()
        return {name.removeprefix("heldout_"): line[name] for name in line}

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite where that is too large."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def value(self, name: str) -> float:
        """Return a number by the name that ``train.best_metric`` gives it.

        Raises:
            ConfigError: there is none.
        """
        known = {"heldout_loss": self.loss, "heldout_bits_per_byte": self.bits_per_byte, **self.metrics}
        known |= {f"heldout_loss/{source}": loss for source, loss in self.sources.items()}
        if name not in known:
            raise ConfigError(f"train.best_metric '{name}' is not measured; known are {', '.join(known)}")
        return known[name]

    def line(self) -> dict[str, Any]:
        """Return what is logged."""
        measured = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        if not self.is_of_text:
            return {"heldout_loss": self.loss, **measured}
        found: dict[str, Any] = {
            "heldout_bits_per_byte": self.bits_per_byte,
            "heldout_loss": self.loss,
            "heldout_perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
        }
        found |= {f"heldout_loss/{source}": loss for source, loss in self.sources.items()}
        return found | measured


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Import the functions of ``train.metrics``.

    Raises:
        ConfigError: one cannot be imported, or two have one name.
    """
    found: dict[str, Metric] = {}
    for text in names:
        name = text.rpartition(":")[2]
        if name in found:
            raise ConfigError(f"train.metrics names two functions '{name}'; rename one")
        found[name] = load_object(text, "train.metrics")
    return found


def evaluate(
    session: Session,
    samples: NumberedSamples,
    limit: int,
    batch: int,
    metrics: dict[str, Metric] | None = None,
    tick: Callable[[float], None] | None = None,
    *,
    loss_sum: LossSum = token_loss_sum,
) -> Evaluation | None:
    """Evaluate the first ``limit`` samples (0: all) of each source.

    Every rank evaluates its share with the same number of forwards; all return the same. ``tick`` gets the finished
    share. ``None`` if any rank was asked to stop meanwhile.
    """
    parts = (
        dict(zip(samples.names, samples.parts, strict=True)) if isinstance(samples, JoinedSources) else {"": samples}
    )
    counts = {name: min(limit, len(part)) if limit else len(part) for name, part in parts.items()}
    module = session.module
    was_training = module.training
    module.eval()
    sums, done = {}, 0
    for name, part in parts.items():

        def report_share(share: float, before: int = done, size: int = counts[name]) -> None:
            if tick is not None:
                tick((before + share * size) / sum(counts.values()))

        sums[name] = _sums(session, part, counts[name], batch, metrics or {}, report_share, loss_sum)
        done += counts[name]
        if session.stopped:
            break
    module.train(was_training)
    reshard(module)
    if session.stopped:
        return None
    total = sum(sums.values())
    assert isinstance(total, torch.Tensor)
    usual = loss_sum is token_loss_sum
    num_bytes = sum(part.label_bytes(counts[name]) for name, part in parts.items()) if usual else 0
    return Evaluation(
        loss=_mean(total, 0),
        bits_per_byte=float(total[0]) / math.log(2) / num_bytes if num_bytes else math.nan,
        metrics={name: _mean(total, number) for number, name in enumerate(metrics or {}, 1)},
        sources={name: _mean(sums[name], 0) for name in parts if name},
    )


def _mean(sums: torch.Tensor, number: int) -> float:
    """Return a sum over the number of its terms; not a number without any."""
    total, terms = sums[2 * number : 2 * number + 2].tolist()
    return float(total / terms) if terms else math.nan


def accuracy(outputs: Any, labels: torch.Tensor) -> tuple[Any, Any]:
    """Count labels with the largest output, and all that are compared: none if outputs are not logits of classes."""
    logits = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return 0, 0
    if logits.shape[:-1] != labels.shape:
        return 0, 0
    counts = labels != IGNORED
    return ((logits.argmax(-1) == labels) & counts).sum(), counts.sum()


def _with_full_logits(outputs: Any) -> Any:
    """Return outputs as one process has them."""
    if isinstance(outputs, torch.Tensor | LateLogits) or not hasattr(outputs, "logits"):
        return full_logits(outputs) if isinstance(outputs, torch.Tensor | LateLogits) else outputs
    logits = full_logits(outputs)
    if logits is outputs.logits:
        return outputs
    given = copy.copy(outputs)
    given.logits = logits
    return given


def _sums(
    session: Session,
    samples: NumberedSamples,
    number: int,
    batch: int,
    metrics: dict[str, Metric],
    tick: Callable[[float], None],
    loss_sum: LossSum,
) -> torch.Tensor:
    """Return sum and number of terms of the loss, then of each metric, over all ranks; float64 [2 + 2 × metrics]."""
    dims, place, pipeline = session.plan.dims, session.place, session.applied.pipeline
    rounds = math.ceil(number / (batch * dims.dp))
    ids = np.full(rounds * dims.dp * batch, -1, dtype=np.int64)
    ids[:number] = np.arange(number)
    share = ids.reshape(rounds, dims.dp, batch)[:, place.dp]
    total = torch.zeros(2 + 2 * len(metrics), dtype=torch.float64, device=session.device)

    def measured(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        given = _with_full_logits(outputs) if metrics else outputs
        found = [pair for metric in metrics.values() for pair in metric(given, labels)]
        if place.tp == 0:  # the others of its group have the same
            total[1:] += torch.tensor(
                [count_labels(labels), *map(float, found)], dtype=total.dtype, device=total.device
            )
        return loss_sum(outputs, labels)

    with torch.no_grad():
        for index, row in enumerate(share):
            inputs, labels = on_device(samples.batch(row), session.device)
            if dims.cp > 1:
                inputs, labels = sequence_share((inputs, labels), session.plan, place.cp)
            if pipeline is not None:
                loss = pipeline.evaluate([inputs], [labels], measured)
            else:
                loss = measured(call(session.module, inputs), labels)
            if place.tp == 0:  # the others of its group have the same
                total[0] += loss
            tick((index + 1) / rounds)
            if session.stop_agreed():
                break
    if session.ranks.world_size > 1:
        dist.all_reduce(total)
    return total
