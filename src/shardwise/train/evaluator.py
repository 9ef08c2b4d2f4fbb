"""Evaluations of one run: what is measured, what the model writes, and which was best."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.errors import ConfigError, did_you_mean
from shardwise.train.best import Best
from shardwise.train.config import Config
from shardwise.train.data.corpus import Corpus
from shardwise.train.data.samples import JoinedSources, NumberedSamples
from shardwise.train.evaluate import Evaluation, Metric, accuracy, evaluate, load_metrics
from shardwise.train.generate import Generator
from shardwise.train.metrics import MetricsFile
from shardwise.train.run_interface import Reporter
from shardwise.train.session import Session
from shardwise.train.tasks.own_loss import loss_of
from shardwise.train.tasks.registry import TaskData, samples_of


def check_best_metric(config: Config, data: TaskData) -> None:
    """Check that ``train.best_metric`` will be measured, before a run has spent the steps to its first evaluation.

    Raises:
        ConfigError: it will not.
    """
    asked = config.train.best_metric
    if asked is None:
        return
    if data.heldout is None:
        raise ConfigError(
            f"train.best_metric '{asked}' is compared on held-out samples, and nothing is held out; give "
            "data.heldout_path, or remove train.best_metric"
        )
    known = ["heldout_loss"]
    if by_labels(config, data):
        known.append("heldout_accuracy")
    else:
        known += ["heldout_bits_per_byte", *(text.rpartition(":")[2] for text in config.train.metrics)]
    samples = samples_of(data, config, heldout=True)
    if isinstance(samples, JoinedSources):
        known += [f"heldout_loss/{source}" for source in samples.names]
    if asked not in known:
        raise ConfigError(
            f"train.best_metric '{asked}' is not measured{did_you_mean(asked, known)}; known here: {', '.join(known)}"
        )
    if not asked.startswith(("heldout_loss", "heldout_bits")) and "best_is" not in config.train.model_fields_set:
        raise ConfigError(
            f"train.best_metric '{asked}' is no loss, so which of its values is best must be named; set "
            "train.best_is='highest', or 'lowest'"
        )


def by_labels(config: Config, data: TaskData) -> bool:
    """Return whether the loss is that of labels, or of the user's own, and not the cross-entropy of text."""
    return config.model.loss is not None or not isinstance(data, Corpus)


class Evaluator:
    """Evaluates a run on its held-out samples.

    ``evaluation`` is the last result, ``best`` the best one by ``train.best_metric``; ``by_labels`` tells a task whose
    labels are classes, or a loss of the user's own.
    """

    def __init__(self, config: Config, data: TaskData, session: Session, reporter: Reporter) -> None:
        self.config, self.session, self.reporter = config, session, reporter
        self.by_labels = by_labels(config, data)
        self.loss_sum = loss_of(config)
        self.heldout: NumberedSamples | None = None
        if data.heldout is not None:
            self.heldout = samples_of(data, config, heldout=True)
        self.metrics: dict[str, Metric] = (
            {"heldout_accuracy": accuracy} if self.by_labels else load_metrics(config.train.metrics)
        )
        train = config.train
        self.generator: Generator | None = None
        if train.generate and isinstance(data, Corpus):
            self.generator = Generator(config, data.kind, data.date)
        self.best = None if train.best_metric is None else Best(train.best_metric, train.best_is)
        self.evaluation: Evaluation | None = None

    def run(self, metrics: MetricsFile | None, batch: int, *, averaged: bool = False) -> bool:
        """Evaluate, and return whether that is the best so far. Collective.

        What ``averaged`` weights reach is compared with nothing: checkpoints are exported with the trained ones.
        """
        if self.heldout is None:
            return False
        step, tick = self.session.steps_done, self.reporter.evaluating if self.session.ranks.is_main else None
        self.session.phase = "evaluation"
        limit = self.config.train.eval_samples
        found = evaluate(self.session, self.heldout, limit, batch, self.metrics, tick, loss_sum=self.loss_sum)
        self.session.phase = "other"
        if found is None:
            return False
        self.evaluation = found
        if metrics is not None:
            metrics.write(step=step, **found.line())
            self.reporter.evaluated(step, found)
        self._generate()
        return self.best is not None and not averaged and self.best.is_better(found, step)

    def enough(self) -> bool:
        """Return whether the last evaluations were no better, and say so."""
        patience = self.config.train.early_stopping
        if not patience or self.best is None or self.best.worse < patience:
            return False
        if self.session.ranks.is_main:
            self.reporter.log(f"early stopping: {self.best} was not bettered in {patience} evaluations")
        return True

    def _generate(self) -> None:
        """Let the model continue the prompts of ``train.generate``, and keep what it writes."""
        if self.generator is None:
            return
        self.session.phase = "evaluation"
        texts = self.generator.texts(self.session)
        self.session.phase = "other"
        if not self.session.ranks.is_main:
            return
        with (Path(self.config.train.output) / "samples.jsonl").open("a", encoding="utf-8") as file:
            for prompt, text in zip(self.generator.prompts, texts, strict=True):
                file.write(json.dumps({"step": self.session.steps_done, "prompt": prompt, "text": text}) + "\n")
                self.reporter.log(f"{prompt!r} → {text!r}")
