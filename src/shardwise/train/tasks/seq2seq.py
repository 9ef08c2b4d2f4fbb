"""Sequence to sequence: a source that an encoder reads, and the target that a decoder writes."""

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
from shardwise.train.tasks.text_rows import TextReader, padded_inputs, tokens


class _Reader(TextReader):
    names = {  # noqa: RUF012  # read only
        "source": ("source", "input", "prompt", "question", "document", "article", "text"),
        "target": ("target", "output", "completion", "answer", "summary", "highlights", "response"),
    }

    def row(self, parts: Mapping[str, Any]) -> Row:
        source = self.encode(parts["source"], "source")
        target = self.encode(parts["target"], "target", length=self.table.target_len or self.table.seq_len)
        return {"input_ids": tokens(source.ids), "target": tokens(target.ids)}

    def facts(self) -> dict[str, Any]:
        facts = self.model_facts
        known = (getattr(facts, "decoder_start_token_id", None), getattr(facts, "pad_token_id", None))
        begin = next((one for one in known if isinstance(one, int)), self.encoder.separator)
        return super().facts() | {"begin": begin}


class Seq2Seq(Task):
    """Sequence to sequence; the decoder reads the target one token late, as transformers shifts it."""

    name: TaskName = "seq2seq"
    auto_class = "AutoModelForSeq2SeqLM"
    mapping = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"

    def reader(self, config: Config, facts: Any) -> _Reader:
        """Return how rows are read."""
        return _Reader(config, facts)

    def batches(self, data: RowData, rows: RowSide, config: Config) -> RowSamples:
        """Return the samples of one side."""
        facts = data.facts or {}
        width, length = config.data.seq_len, config.data.target_len or config.data.seq_len

        def make(numbers: NDArray[np.int64]) -> Batch:
            inputs = padded_inputs(data, rows.columns["input_ids"], numbers, width)
            labels = rows.columns["target"].padded(numbers, length, IGNORED)
            late = np.full_like(labels, int(facts["begin"]))
            late[:, 1:] = np.where(labels[:, :-1] == IGNORED, int(facts["pad"]), labels[:, :-1])
            inputs["decoder_input_ids"] = late
            return {name: torch.from_numpy(value) for name, value in inputs.items()}, torch.from_numpy(labels)

        return RowSamples(rows, make)
