"""Token stream to samples of one length: inputs, and labels with -100 where no loss is.

However samples are split, a sample is a row of at most ``seq_len`` label tokens and the tokens just before them.
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
        """Return the number of samples."""
        ...

    def batch(self, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of samples, two LongTensors [len(ids), seq_len].

        Id -1 is an empty sample: inputs are the separator and labels are -100, as after the end of a
        shorter sample.

        Raises:
            IndexError: an id is below -1 or not below the number of samples.
        """
        ...

    def label_bytes(self, num_samples: int | None) -> float:
        """Return the UTF-8 bytes of the text behind the labels of the first ``num_samples`` samples.

        ``None`` is all samples. A token counts for the mean bytes of a token of the corpus; a separator and a
        token that is not a label count for none. So the number is exact with the tokenizer ``bytes``; with another one
        it is exact over all tokens, and an estimate for a part of them.
        """
        ...


class _Cut:
    """Samples by offset: number ``i`` has ``lengths[i]`` labels from token ``begins[i] + 1`` on."""

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
        """Return the number of samples."""
        return len(self._begins) - 1

    def batch(self, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, two LongTensors [len(ids), seq_len].

        See `NumberedSamples.batch`.
        """
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
        """Return the UTF-8 bytes of the first samples' labels; see `NumberedSamples.label_bytes`."""
        count = len(self) if num_samples is None else min(num_samples, len(self))
        text_tokens = len(self._stream) - (len(self._starts) - 1)
        begins, lengths = self._begins[:count], self._lengths[:count]
        return self._text_labels(begins, lengths) * self.tokens.num_bytes / max(1, text_tokens)

    def _mask(self, begins: NDArray[np.int64], inputs: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """Mask labels without loss; none here."""

    def _text_labels(self, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        """Count the labels of these samples that are not document separators."""
        ends = self._starts[1:] - 1  # a separator is the last token of each document
        separators = np.searchsorted(ends, begins + lengths, "right") - np.searchsorted(ends, begins, "right")
        return int((lengths - separators).sum())


class PackedSamples(_Cut):
    """Samples of all documents joined and split every ``seq_len`` tokens.

    Each token is a label once.

    Only the very first token is never a label; the last sample may be shorter. With ``mask_borders`` the first
    token of a document is not a label either, as it would be predicted from another document.

    Raises:
        DataError: there are fewer than two tokens.
    """

    def __init__(self, tokens: Tokens, seq_len: int, separator: int, mask_borders: bool) -> None:
        num_labels = len(tokens.tokens) - 1
        begins = np.arange(0, _need_labels(num_labels), seq_len, dtype=np.int64)
        super().__init__(tokens, seq_len, separator, begins, np.minimum(seq_len, num_labels - begins))
        self.mask_borders = mask_borders

    def _mask(self, begins: NDArray[np.int64], inputs: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        if self.mask_borders:  # such a label follows a separator; text may contain that token too
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
    """Samples that each start with a document.

    Long ones continue in further samples, padded at the end.

    The labels of a document are its second token to its separator. A document without text has no sample.

    Raises:
        DataError: no document has two tokens.
    """

    def __init__(self, tokens: Tokens, seq_len: int, separator: int) -> None:
        num_labels = np.diff(tokens.starts) - 1
        pieces = -(-num_labels // seq_len)
        _need_labels(int(pieces.sum()))
        done = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # earlier pieces of the document
        done *= seq_len
        lengths = np.minimum(seq_len, np.repeat(num_labels, pieces) - done)
        super().__init__(tokens, seq_len, separator, np.repeat(tokens.starts[:-1], pieces) + done, lengths)


def _need_labels(number: int) -> int:
    if number < 1:
        raise DataError("the corpus has no token that follows another one; give documents with more text")
    return number


def samples_for(tokens: Tokens, table: DataTable, separator: int) -> NumberedSamples:
    """Split tokens into samples by ``seq_len``, ``pack`` and ``mask_borders`` of ``[data]``.

    Raises:
        DataError: the corpus is too short for a single label.
    """
    if table.pack:
        return PackedSamples(tokens, table.seq_len, separator, table.mask_borders)
    return DocumentSamples(tokens, table.seq_len, separator)


def step_batches(
    samples: NumberedSamples, order: Order, plan: Plan, rank: int, position: int = 0
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield the micro batches of ``rank`` per step from ``position`` on.

    Endless if ``order`` is.

    Ranks that work on the same samples together get the same ones.
    """
    dims, micro = plan.dims, plan.micro_batch or 1
    while True:
        ids = rank_ids(order, position, dims.dp, dims.place(rank).dp, micro, plan.grad_accum)
        yield [samples.batch(row) for row in ids]
        position += micro * plan.grad_accum * dims.dp
