"""Sequence classification: a text, or two, and the class of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.train.config import Config
from shardwise.train.data.rows import Row, RowData, RowSide
from shardwise.train.data.sources import DataSource
from shardwise.train.task_names import TaskName
from shardwise.train.tasks.labels import Labels
from shardwise.train.tasks.task import IGNORED, Batch, RowSamples, Task
from shardwise.train.tasks.text_rows import TextReader, padded_inputs, tokens


class _Reader(TextReader):
    names = {  # noqa: RUF012  # read only
        "label": ("label", "labels", "class", "target"),
        "text": ("text", "sentence", "sentence1", "premise", "question1", "content"),
        "pair": ("pair", "sentence2", "hypothesis", "question2"),
    }
    optional = ("pair",)

    def __init__(self, config: Config, model_facts: Any) -> None:
        super().__init__(config, model_facts)
        self.classes = Labels(model_facts)
        self.labels: Labels | None = self.classes

    def open(self, value: str, key: str, cache: Path) -> list[Any]:
        listing = super().open(value, key, cache)
        self.classes.names = class_names(self.sources[-1], self.columns[-1]["label"]) or self.classes.names
        return listing

    def row(self, parts: Mapping[str, Any]) -> Row:
        label = self.classes.number_of(parts["label"])
        found = self.encode(parts["text"], "text", parts.get("pair"))
        row: dict[str, NDArray[Any]] = {"input_ids": tokens(found.ids), "label": np.asarray(label, np.int64)}
        return row | ({"types": found.types.astype(np.uint8)} if "pair" in parts else {})


def class_names(source: DataSource, column: str) -> tuple[str, ...]:
    """Return the names of a column of classes, or of lists of them, of a saved data set; none in other formats."""
    if source.format != "dataset":
        return ()
    feature = source.saved().features.get(column)
    feature = getattr(feature, "feature", feature)
    return tuple(getattr(feature, "names", None) or ())


class SequenceClassification(Task):
    """Sequence classification."""

    name: TaskName = "sequence-classification"
    auto_class = "AutoModelForSequenceClassification"
    mapping = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"

    def problems(self, facts: Any, config: Config) -> list[str]:
        """Refuse regressions, several labels for a text, and models that find a text's end by a token they lack."""
        problems = []
        kind = getattr(facts, "problem_type", None)
        if kind not in (None, "single_label_classification"):
            problems.append(
                f"problem_type is '{kind}', and a text has one class here; use model.factory and model.loss"
            )
        elif facts.num_labels < 2:
            problems.append("num_labels is 1, a regression; use 2 or more, or model.factory and model.loss")
        if getattr(facts, "pad_token_id", None) is None:
            problems.append("pad_token_id is not set, and texts of other lengths are padded with it; set it")
        return problems

    def reader(self, config: Config, facts: Any) -> _Reader:
        """Return how rows are read."""
        return _Reader(config, facts)

    def batches(self, data: RowData, rows: RowSide, config: Config) -> RowSamples:
        """Return the samples of one side."""
        ids, width = rows.columns["input_ids"], config.data.seq_len

        def make(numbers: NDArray[np.int64]) -> Batch:
            inputs = padded_inputs(data, ids, numbers, width)
            if "types" in rows.columns:
                inputs["token_type_ids"] = rows.columns["types"].padded(numbers, width, 0)
            labels = torch.from_numpy(rows.columns["label"].of(numbers, IGNORED))
            return {name: torch.from_numpy(value) for name, value in inputs.items()}, labels

        return RowSamples(rows, make)
