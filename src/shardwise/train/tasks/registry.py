"""The tasks by name, and the data, the samples and the loss of a config whatever its task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.train.causal import causal_configuration
from shardwise.train.config import Config
from shardwise.train.data.corpus import Corpus, open_corpus, prepare_corpus
from shardwise.train.data.order import SampleOrder
from shardwise.train.data.rows import FACTS, RowData, open_rows
from shardwise.train.data.samples import NumberedSamples, order_for, samples_for
from shardwise.train.task_names import TaskName
from shardwise.train.tasks.image_classification import ImageClassification
from shardwise.train.tasks.masked_lm import MaskedLM
from shardwise.train.tasks.prepare_rows import prepare_rows
from shardwise.train.tasks.seq2seq import Seq2Seq
from shardwise.train.tasks.sequence_classification import SequenceClassification
from shardwise.train.tasks.task import Task
from shardwise.train.tasks.token_classification import TokenClassification

ROW_TASKS: dict[TaskName, Task] = {
    task.name: task
    for task in (SequenceClassification(), TokenClassification(), Seq2Seq(), MaskedLM(), ImageClassification())
}
"""All tasks but causal language modelling, whose data are documents rather than rows."""
TaskData = Corpus | RowData


def row_task(config: Config) -> Task | None:
    """Return the task of a config; ``None`` for causal language modelling."""
    return ROW_TASKS.get(config.model.trained_task)


def noun_of(config: Config) -> str:
    """Return what a rate counts."""
    task = row_task(config)
    return "tokens" if task is None else task.noun


def length_of(config: Config) -> int | None:
    """Return the tokens of a sample, if a sample is one sequence of tokens that all parts of the model work on."""
    return config.data.seq_len if row_task(config) is None else None


def configuration_of(config: Config, notes: list[str] | None = None) -> Any:
    """Load the transformers configuration of ``model.config``; ``None`` for a factory.

    Raises:
        ModelError: it cannot be used for the task.
    """
    if config.model.config is None:
        return None
    task = row_task(config)
    return causal_configuration(Path(config.model.config), notes) if task is None else task.configuration(config, notes)


def prepare_data(config: Config, cache: Path, log: Callable[[str], None]) -> TaskData:
    """Prepare the data of a config in a folder of ``cache``; see `prepare_corpus` and `prepare_rows`."""
    task = row_task(config)
    return prepare_corpus(config.data, cache, log) if task is None else prepare_rows(task, config, cache, log)


def open_data(folder: Path) -> TaskData:
    """Open data that `prepare_data` returned, from its ``folder``.

    Raises:
        DataError: the folder is missing or damaged.
    """
    return open_rows(folder) if (folder / FACTS).is_file() else open_corpus(folder)


def samples_of(data: TaskData, config: Config, *, heldout: bool = False) -> NumberedSamples:
    """Return the samples of a side of the data.

    Raises:
        DataError: the corpus is too short for a single label.
    """
    if isinstance(data, Corpus):
        return samples_for(data, config, heldout=heldout)
    side = data.heldout if heldout else data.train
    assert side is not None
    return ROW_TASKS[data.task].batches(data, side, config)


def order_of(data: TaskData, samples: NumberedSamples, config: Config) -> SampleOrder:
    """Return the order of samples."""
    if isinstance(data, Corpus):
        return order_for(samples, config)
    return ROW_TASKS[data.task].order(len(samples), config)


def order_facts(data: TaskData, config: Config) -> dict[str, Any]:
    """Return what else determines the samples of a run; of a corpus, the date that its chat template wrote."""
    if isinstance(data, Corpus):
        return {} if data.date is None else {"data.date": data.date}
    return ROW_TASKS[data.task].order_facts(config)


def example_inputs_of(data: TaskData, config: Config, number: int) -> Any:
    """Return the inputs of ``number`` samples as a model gets them, without content."""
    if isinstance(data, Corpus):
        return torch.zeros(number, config.data.seq_len, dtype=torch.int64)
    return samples_of(data, config).batch(np.full(number, -1, np.int64))[0]


def num_outputs(data: TaskData) -> int:
    """Return the number of classes that a label may have: those of the head, or the tokens."""
    return data.vocab_size if isinstance(data, Corpus) else data.num_classes
