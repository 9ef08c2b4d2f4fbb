"""Masked language modelling: tokens hidden from a text, to be predicted from both sides.

Which tokens are hidden in a sample is a function of the seed, the epoch and the sample's number, so a resumed run and
one on another number of ranks hide the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.train.config import Config
from shardwise.train.data.documents import RowProblem
from shardwise.train.data.order import Order
from shardwise.train.data.rows import Row, RowColumn, RowData, RowSide
from shardwise.train.task_names import TaskName
from shardwise.train.tasks.task import IGNORED, Batch, RowSamples, Task
from shardwise.train.tasks.text_encoding import BYTES_MASK
from shardwise.train.tasks.text_rows import TextReader, padded_inputs, tokens

_MASKED, _RANDOM = 0.8, 0.1  # of the hidden tokens; the others stay as they are
_WHOLE = 2**27  # a text is encoded whole where samples are joined


class _Reader(TextReader):
    names = {"text": ("text", "content", "sentence", "document")}  # noqa: RUF012  # read only

    def __init__(self, config: Config, model_facts: Any) -> None:
        super().__init__(config, model_facts)
        if self.encoder.mask is None:
            raise DataError(
                f"data.tokenizer '{config.data.tokenizer}' has no mask token ([MASK] or <mask>), which hides what a "
                "masked language model predicts; add one to it, or use another tokenizer"
            )
        self.vocab_size = max(self.vocab_size, self.encoder.mask + 1)
        self.joined = config.packing("text") == "joined"

    def row(self, parts: Mapping[str, Any]) -> Row | None:
        if parts["text"] is None or parts["text"] == "":
            return None
        if not isinstance(parts["text"], str):
            raise RowProblem(f"holds {type(parts['text']).__name__}, not text, in 'text'")
        if not parts["text"].strip():
            return None
        found = self.encode(parts["text"], "text", length=_WHOLE if self.joined else None)
        return {"input_ids": tokens(found.ids)}

    def facts(self) -> dict[str, Any]:
        found = super().facts()
        if self.joined:
            found["told"].append("texts joined: those of one sample attend to each other; data.pack = 'none' pads each")
        return found

    def identity(self) -> list[Any]:
        return [*super().identity(), self.joined]


class MaskedSamples(RowSamples):
    """Samples with hidden tokens; id ``epoch × number + sample`` is a sample as it is in an epoch.

    Joined samples are all texts in a row, cut every ``seq_len`` tokens.
    """

    def __init__(self, data: RowData, rows: RowSide, config: Config) -> None:
        super().__init__(rows, lambda _: ({}, torch.empty(0)))
        self.data, self.width = data, config.data.seq_len
        self.seed, self.share = config.train.seed, config.data.mask_share
        facts = data.facts or {}
        self.mask, self.special = int(facts["mask"]), np.array([*facts["special"], facts["pad"]], np.int64)
        self.texts = rows.columns["input_ids"]
        self.number = len(rows)
        if config.packing("text") == "joined":
            lengths = self.texts.lengths(rows.index)
            places = self.texts.starts
            assert places is not None
            stream = np.concatenate([self.texts.values[places[row] : places[row + 1]] for row in rows.index])
            starts = np.append(np.arange(0, int(lengths.sum()), self.width), len(stream)).astype(np.int64)
            self.texts, self.number = RowColumn(stream, starts), len(starts) - 1

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.number

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """Return inputs and labels."""
        if len(ids) and ids.min() < -1:
            raise IndexError(f"sample id {ids.min()} is below -1")
        epochs, samples = np.divmod(np.maximum(ids, 0), len(self))
        numbers = samples if self.texts is not self.rows.columns["input_ids"] else self.rows.index[samples]
        inputs = padded_inputs(self.data, self.texts, np.where(ids < 0, -1, numbers), self.width)
        labels = np.full_like(inputs["input_ids"], IGNORED)
        for row in np.flatnonzero(ids >= 0):
            self._hide(inputs["input_ids"][row], labels[row], int(epochs[row]), int(samples[row]))
        return {name: torch.from_numpy(value) for name, value in inputs.items()}, torch.from_numpy(labels)

    def _hide(self, ids: NDArray[np.int64], labels: NDArray[np.int64], epoch: int, sample: int) -> None:
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch, sample]))
        chance, kind = draw.random(len(ids)), draw.random(len(ids))
        other = draw.integers(0, self.data.vocab_size, len(ids))
        can = ~np.isin(ids, self.special)
        hidden = can & (chance < self.share)
        if can.any() and not hidden.any():  # a short text has a label, too
            hidden[np.flatnonzero(can)[np.argmin(chance[can])]] = True
        labels[hidden] = ids[hidden]
        ids[hidden & (kind < _MASKED)] = self.mask
        replaced = hidden & (kind >= _MASKED) & (kind < _MASKED + _RANDOM)
        ids[replaced] = other[replaced]


class _EpochOrder(Order):
    """Order whose ids go on counting over the epochs."""

    def ids(self, start: int, count: int) -> NDArray[np.int64]:
        """Return ``epoch × number + sample`` at global indices; -1 after the end."""
        found = super().ids(start, count)
        epochs = np.arange(start, start + count, dtype=np.int64) // self.num_samples
        return np.where(found < 0, found, found + epochs * self.num_samples)


class MaskedLM(Task):
    """Masked language modelling: of the hidden tokens 80 % become the mask, 10 % a random token, 10 % stay."""

    name: TaskName = "masked-lm"
    auto_class = "AutoModelForMaskedLM"
    mapping = "MODEL_FOR_MASKED_LM_MAPPING"

    def problems(self, facts: Any, config: Config) -> list[str]:
        """Refuse a vocabulary without the mask of the tokenizer ``bytes``."""
        if config.data.tokenizer == "bytes" and getattr(facts, "vocab_size", BYTES_MASK + 1) <= BYTES_MASK:
            return [f"vocab_size is {facts.vocab_size}, and bytes with a mask are {BYTES_MASK + 1} ids; set it to that"]
        return []

    def reader(self, config: Config, facts: Any) -> _Reader:
        """Return how rows are read."""
        return _Reader(config, facts)

    def batches(self, data: RowData, rows: RowSide, config: Config) -> MaskedSamples:
        """Return the samples of one side."""
        return MaskedSamples(data, rows, config)

    def order(self, num_samples: int, config: Config) -> Order:
        """Return the order of samples, whose ids say the epoch, too."""
        return _EpochOrder(num_samples, config.train.seed, config.data.shuffle, config.train.epochs)

    def order_facts(self, config: Config) -> dict[str, Any]:
        """Return what else determines the samples."""
        return super().order_facts(config) | {"data.mask_share": config.data.mask_share}
