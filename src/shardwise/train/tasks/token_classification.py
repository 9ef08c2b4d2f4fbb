"""Token classification: a list of words, and the class of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.train.config import Config
from shardwise.train.data.documents import RowProblem
from shardwise.train.data.rows import Row, RowData, RowSide
from shardwise.train.task_names import TaskName
from shardwise.train.tasks.task import IGNORED, Batch, RowSamples, Task
from shardwise.train.tasks.text_rows import LabelledTextReader, padded_inputs, tokens


class _Reader(LabelledTextReader):
    label_part = "tags"
    names = {  # noqa: RUF012  # read only
        "tokens": ("tokens", "words"),
        "tags": ("tags", "ner_tags", "pos_tags", "labels"),
    }

    def row(self, parts: Mapping[str, Any]) -> Row:
        words, tags = parts["tokens"], parts["tags"]
        for value, what in ((words, "tokens"), (tags, "tags")):
            if not isinstance(value, list) or not value:
                found_type = "nothing" if not value else type(value).__name__
                raise RowProblem(f"holds {found_type} in '{what}'; give a list with a value for each word")
        if len(words) != len(tags):
            raise RowProblem(f"has {len(words)} words and {len(tags)} tags; give a tag for each word")
        if not all(isinstance(word, str) and word.strip() for word in words):
            raise RowProblem("has a word that is empty or no text; remove it with its tag")
        numbers = [IGNORED if tag == IGNORED else self.classes.number_of(tag, what="tag") for tag in tags]
        found = self.encoder.encode_words(words, self.table.seq_len)
        self.num_truncated += found.was_truncated
        first = np.append(True, found.words[1:] != found.words[:-1]) & (found.words >= 0)
        labels = np.where(first, np.array(numbers, np.int64)[found.words], IGNORED)
        return {"input_ids": tokens(found.ids), "label": labels}


class TokenClassification(Task):
    """Token classification: the first token of a word has its class, and the others have no loss."""

    name: TaskName = "token-classification"
    auto_class = "AutoModelForTokenClassification"
    mapping = "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"

    def reader(self, config: Config, facts: Any) -> _Reader:
        """Return how rows are read."""
        return _Reader(config, facts)

    def batches(self, data: RowData, rows: RowSide, config: Config) -> RowSamples:
        """Return the samples of one side."""
        width = config.data.seq_len

        def make(numbers: NDArray[np.int64]) -> Batch:
            inputs = padded_inputs(data, rows.columns["input_ids"], numbers, width)
            labels = torch.from_numpy(rows.columns["label"].padded(numbers, width, IGNORED))
            return {name: torch.from_numpy(value) for name, value in inputs.items()}, labels

        return RowSamples(rows, make)
