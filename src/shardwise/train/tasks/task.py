"""`Task`: what a task declares, and what all tasks on labelled rows have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ModelError
from shardwise.train.causal import transformers_configuration
from shardwise.train.config import Config
from shardwise.train.data.order import Order
from shardwise.train.data.packing import Truncation
from shardwise.train.data.rows import Row, RowData, RowSide
from shardwise.train.data.sources import BadRows
from shardwise.train.task_names import TaskName
from shardwise.train.tasks.labels import Labels

IGNORED = -100
Batch = tuple[Any, Tensor]


class RowReader(Protocol):
    """Reads files of one config key after the other, and makes rows of them.

    ``vocab_size`` is the number of different input ids, 0 without ids; ``labels`` are those in the column ``label`` of
    a row, if they are classes.
    """

    vocab_size: int
    labels: Labels | None

    def open(self, value: str, key: str, cache: Path) -> list[Any]:
        """Find the files of a path, to be read with the next `rows`; return what changes when they do."""
        ...

    def rows(self, place: int, bad: BadRows) -> Iterator[Row]:
        """Yield the rows of the files that the call number ``place`` of `open` found; bad ones go to ``bad``."""
        ...

    def identity(self) -> list[Any]:
        """Return what rows depend on, beside the files."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what batches need, and what is told about the rows: text by name under ``told``."""
        ...


class Task(ABC):
    """A task on labelled rows.

    ``auto_class`` of transformers builds its model, from the configurations in ``mapping``; ``noun`` is what a rate
    counts. All have a label for each term of the loss, and -100 where there is none.
    """

    name: TaskName
    auto_class: str
    mapping: str
    noun = "samples"

    def configuration(self, config: Config, notes: list[str] | None = None) -> Any:
        """Load the transformers configuration; ``None`` for a factory.

        Raises:
            ModelError: it cannot be used for this task.
        """
        if config.model.config is None:
            return None
        facts = transformers_configuration(Path(config.model.config), self._check_kind, notes)
        if problems := [f"model.config '{config.model.config}': {problem}" for problem in self.problems(facts, config)]:
            raise ModelError(*problems)
        return facts

    def _check_kind(self, facts: Any, keys: dict[str, Any], where: str, file: Path) -> list[str]:
        import transformers

        if type(facts) in getattr(transformers, self.mapping):
            return []
        return [
            f"{where}: transformers has no model of model_type '{facts.model_type}' for the task {self.name} "
            f"({self.auto_class}); give another configuration, or set model.task"
        ]

    def problems(self, facts: Any, config: Config) -> list[str]:
        """Why a configuration cannot be trained for this task."""
        return []

    def build(self, facts: Any) -> Any:
        """Build the model with random weights."""
        import transformers

        return getattr(transformers, self.auto_class).from_config(facts, dtype=torch.float32, trust_remote_code=False)

    @abstractmethod
    def reader(self, config: Config, facts: Any) -> RowReader:
        """Return how rows are read; ``facts`` are the model's configuration, if it has one.

        Raises:
            DataError: a tokenizer cannot be used.
        """

    @abstractmethod
    def batches(self, data: RowData, rows: RowSide, config: Config) -> RowSamples:
        """Return the samples of one side."""

    def order(self, num_samples: int, config: Config) -> Order:
        """Return the order of samples."""
        return Order(num_samples, config.train.seed, config.data.shuffle, config.train.epochs)

    def order_facts(self, config: Config) -> dict[str, Any]:
        """Return what else determines the samples of a run, under the config's keys."""
        return {"model.task": self.name}


class RowSamples:
    """Samples that are rows: ``make`` turns row numbers, -1 for an empty one, into inputs and labels."""

    fill: float | None = None
    truncation: Truncation | None = None

    def __init__(self, rows: RowSide, make: Callable[[NDArray[np.int64]], Batch]) -> None:
        self.rows, self.make = rows, make

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def num_tokens(self, ids: NDArray[np.int64]) -> int:
        """Return 0: rates count samples here."""
        return 0

    def roles(self) -> dict[str, tuple[int, int]]:
        """Return nothing: a row's label has no role."""
        return {}

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return inputs and labels; id -1 is an empty sample, without labels."""
        return self.make(self.rows.rows(ids))

    def label_bytes(self, num_samples: int | None) -> float:
        """Return 0: labels that are no text have no bytes."""
        return 0.0
