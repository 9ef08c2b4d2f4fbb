"""From a stream of tokens to samples of one length: inputs, and labels with -100 where nothing is to be learnt.

Whichever way samples are cut, a sample is a row of at most ``seq_len`` label tokens and the tokens just before them.
A separator (the end of a document) is a label like any other token: the model must learn where documents end. It
counts in the loss and stands for 0 bytes, so bits per byte include the cost of the ends of documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import DataError
from shardwise.plan.plan import Plan
from shardwise.train.config import DataTable
from shardwise.train.data.corpus import Tokens
from shardwise.train.data.order import Order, rank_ids

IGNORED = -100


class NumberedSamples(Protocol):
    """Numbered samples of one length."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def batch(self, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs and labels of samples, two LongTensors [len(ids), seq_len].

        Id -1 is an empty sample: inputs are the separator and labels are -100, as they are after the end of a
        sample that is shorter.

        Raises:
            IndexError: an id is below -1 or not below the number of samples.
        """
        ...

    def label_bytes(self, num_samples: int | None) -> float:
        """The length in UTF-8 bytes of the text that the labels of the first ``num_samples`` samples stand for.

        ``None`` is all samples. A token counts for the mean bytes of a token of the corpus, a separator for none
        and a token that is no label for none. So the number is exact with the tokenizer ``bytes``; with another one
        it is exact over all tokens, and an estimate for a part of them.
        """
        ...


class _Cut:
    """Samples of which number ``i`` has ``lengths[i]`` labels, the first of them at token ``begins[i] + 1``."""

    def __init__(
        self, tokens: Tokens, seq_len: int, separator: int, begins: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.separator = separator
        self._stream: NDArray[Any] = np.asarray(tokens.tokens)  # the same memory, without the subclass
        self._starts: NDArray[np.int64] = np.asarray(tokens.starts)
        self._begins = np.append(begins, 0)  # the last row is the empty sample, which id -1 finds
        self._lengths = np.append(lengths, 0)
        self._columns = np.arange(seq_len + 1)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._begins) - 1

    def batch(self, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs and labels, two LongTensors [len(ids), seq_len]; see `NumberedSamples.batch`."""
        if len(ids) and not -1 <= ids.min() <= ids.max() < len(self):
            raise IndexError(f"sample ids {ids.min()} to {ids.max()} are not all in -1 to {len(self) - 1}")
        begins, lengths = self._begins[ids, None], self._lengths[ids, None]
        window = self._stream.take(begins + self._columns, mode="clip").astype(np.int64)
        after = self._columns[:-1] >= lengths
        inputs = np.where(after, self.separator, window[:, :-1])
        labels = np.where(after, IGNORED, window[:, 1:])
        self._mask(begins, inputs, labels)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def label_bytes(self, num_samples: int | None) -> float:
        """UTF-8 bytes of the labels of the first samples; see `NumberedSamples.label_bytes`."""
        count = len(self) if num_samples is None else min(num_samples, len(self))
        text_tokens = len(self._stream) - (len(self._starts) - 1)
        begins, lengths = self._begins[:count], self._lengths[:count]
        return self._text_labels(begins, lengths) * self.tokens.num_bytes / max(1, text_tokens)

    def _mask(self, begins: NDArray[np.int64], inputs: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """Take labels out that are not to be learnt; here none."""

    def _text_labels(self, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        """How many labels of these samples are not the separator at the end of a document."""
        ends = self._starts[1:] - 1  # a separator is the last token of each document
        separators = np.searchsorted(ends, begins + lengths, "right") - np.searchsorted(ends, begins, "right")
        return int((lengths - separators).sum())


class PackedSamples(_Cut):
    """All documents joined and cut every ``seq_len`` tokens, so that a token is a label once in an epoch.

    Only the very first token is never a label; the last sample may be shorter. With ``mask_borders`` the first
    token of a document is no label either, as it would be predicted from another document.

    Raises:
        DataError: there are fewer than two tokens.
    """

    def __init__(self, tokens: Tokens, seq_len: int, separator: int, mask_borders: bool) -> None:
        num_labels = len(tokens.tokens) - 1
        begins = np.arange(0, _need_labels(num_labels), seq_len, dtype=np.int64)
        super().__init__(tokens, seq_len, separator, begins, np.minimum(seq_len, num_labels - begins))
        self.mask_borders = mask_borders

    def _mask(self, begins: NDArray[np.int64], inputs: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        if self.mask_borders:  # such a label follows a separator; text may hold that token too
            rows, columns = np.nonzero((inputs == self.separator) & (labels != IGNORED))
            places = begins[rows, 0] + columns + 1
            first = self._starts[np.searchsorted(self._starts, places)] == places
            labels[rows[first], columns[first]] = IGNORED

    def _text_labels(self, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        text = super()._text_labels(begins, lengths)
        if self.mask_borders:
            firsts = self._starts[1:-1][np.diff(self._starts[1:]) > 1]  # that of an empty document is its separator
            last = np.searchsorted(firsts, begins + lengths, "right")
            text -= int((last - np.searchsorted(firsts, begins, "right")).sum())
        return text


class DocumentSamples(_Cut):
    """Each document starts a sample, and a long one goes on in further samples; the rest of its last is padding.

    The labels of a document are its second token to its separator. A document without text has no sample.

    Raises:
        DataError: no document has two tokens.
    """

    def __init__(self, tokens: Tokens, seq_len: int, separator: int) -> None:
        num_labels = np.diff(tokens.starts) - 1
        pieces = -(-num_labels // seq_len)
        _need_labels(int(pieces.sum()))
        done = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # pieces of it before this one
        done *= seq_len
        lengths = np.minimum(seq_len, np.repeat(num_labels, pieces) - done)
        super().__init__(tokens, seq_len, separator, np.repeat(tokens.starts[:-1], pieces) + done, lengths)


def _need_labels(number: int) -> int:
    if number < 1:
        raise DataError("the corpus has no token that follows another one; give documents with more text")
    return number


def samples_for(tokens: Tokens, table: DataTable, separator: int) -> NumberedSamples:
    """Cut tokens into samples as ``[data]`` says: ``seq_len``, ``pack`` and ``mask_borders``.

    Raises:
        DataError: the corpus is too short for a single label.
    """
    if table.pack:
        return PackedSamples(tokens, table.seq_len, separator, table.mask_borders)
    return DocumentSamples(tokens, table.seq_len, separator)


def step_batches(
    samples: NumberedSamples, order: Order, plan: Plan, rank: int, position: int = 0
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The micro batches of ``rank`` for each step from the data position on, without end where ``order`` has none.

    Ranks that work on the same samples together have them in common.
    """
    dims, micro = plan.dims, plan.micro_batch or 1
    while True:
        ids = rank_ids(order, position, dims.dp, dims.place(rank).dp, micro, plan.grad_accum)
        yield [samples.batch(row) for row in ids]
        position += micro * plan.grad_accum * dims.dp
