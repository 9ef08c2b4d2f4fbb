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
from shardwise.parallel.chunked_loss import LateLogits
from shardwise.parallel.context_parallel.attention import sequence_share
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.parallel.pipeline_parallel.stage_runtime import call
from shardwise.train.data.samples import JoinedSources, NumberedSamples, on_device
from shardwise.train.loss import full_logits, token_loss_sum
from shardwise.train.session import Session

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

    @classmethod
    def of_labels(cls, found: dict[str, float]) -> Evaluation:
        """Return the evaluation of a task with labels: its loss, and its other measures by their logged names."""
        others = {f"heldout_{name}": value for name, value in found.items() if name != "loss"}
        return cls(found["loss"], math.nan, others)

    def line(self) -> dict[str, Any]:
        """Return what is logged."""
        if math.isnan(self.bits_per_byte):  # of labels, not of text
            return {"heldout_loss": self.loss, **self.metrics}
        found: dict[str, Any] = {
            "heldout_bits_per_byte": self.bits_per_byte,
            "heldout_loss": self.loss,
            "heldout_perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
        }
        found |= {f"heldout_loss/{source}": loss for source, loss in self.sources.items()}
        return found | self.metrics


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

        def told(share: float, before: int = done, size: int = counts[name]) -> None:
            if tick is not None:
                tick((before + share * size) / sum(counts.values()))

        sums[name] = _sums(session, part, counts[name], batch, metrics or {}, told)
        done += counts[name]
        if session.stopped:
            break
    module.train(was_training)
    reshard(module)
    if session.stopped:
        return None
    labels = {name: part.label_count(counts[name]) for name, part in parts.items()}
    total = sum(sums.values())
    assert isinstance(total, torch.Tensor)
    num_bytes = sum(part.label_bytes(counts[name]) for name, part in parts.items())
    means = {
        name: float(total[1 + 2 * i] / total[2 + 2 * i]) if total[2 + 2 * i] else math.nan
        for i, name in enumerate(metrics or {})
    }
    return Evaluation(
        loss=float(total[0]) / max(1, sum(labels.values())),
        bits_per_byte=float(total[0]) / math.log(2) / num_bytes if num_bytes else math.nan,
        metrics=means,
        sources={name: float(sums[name][0]) / max(1, labels[name]) for name in parts if name},
    )


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
) -> torch.Tensor:
    """Return the loss summed over all ranks, then sum and count of each metric; float64 [1 + 2 × metrics]."""
    dims, place, pipeline = session.plan.dims, session.place, session.applied.pipeline
    rounds = math.ceil(number / (batch * dims.dp))
    ids = np.full(rounds * dims.dp * batch, -1, dtype=np.int64)
    ids[:number] = np.arange(number)
    share = ids.reshape(rounds, dims.dp, batch)[:, place.dp]
    total = torch.zeros(1 + 2 * len(metrics), dtype=torch.float64, device=session.device)

    def measured(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        given = _with_full_logits(outputs) if metrics else outputs
        for index, metric in enumerate(metrics.values()):
            value, terms = metric(given, labels)
            if place.tp == 0:  # the others of its group have the same
                total[1 + 2 * index] += float(value)
                total[2 + 2 * index] += float(terms)
        return token_loss_sum(outputs, labels)

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
