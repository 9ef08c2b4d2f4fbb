"""Sequence classification: a text, or two, and the class of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.train.config import Config
from shardwise.train.data.rows import Row, RowData, RowSide
from shardwise.train.task_names import TaskName
from shardwise.train.tasks.task import IGNORED, Batch, RowSamples, Task
from shardwise.train.tasks.text_rows import LabelledTextReader, padded_inputs, tokens


class _Reader(LabelledTextReader):
    label_part = "label"
    names = {  # noqa: RUF012  # read only
        "label": ("label", "labels", "class", "target"),
        "text": ("text", "sentence", "sentence1", "premise", "question1", "content"),
        "pair": ("pair", "sentence2", "hypothesis", "question2"),
    }
    optional = ("pair",)

    def row(self, parts: Mapping[str, Any]) -> Row:
        label = self.classes.number_of(parts["label"])
        found = self.encode(parts["text"], "text", parts.get("pair"))
        row: dict[str, NDArray[Any]] = {"input_ids": tokens(found.ids), "label": np.asarray(label, np.int64)}
        return row | ({"types": found.types.astype(np.uint8)} if "pair" in parts else {})


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
