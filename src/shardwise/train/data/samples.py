"""Token stream to samples of one length: inputs, and labels with -100 where no loss is.

However samples are split, a sample is a row of at most ``seq_len`` label tokens and the tokens just before them.
A separator (the end of a document) is a label like any other token: the model must learn where documents end. It
counts in the loss and stands for 0 bytes, so bits per byte include the cost of the ends of documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree

from shardwise.errors import DataError
from shardwise.plan.plan import Plan
from shardwise.train.config import Config
from shardwise.train.config_data import DataTable
from shardwise.train.data.chat import ROLES
from shardwise.train.data.corpus import Corpus, Tokens
from shardwise.train.data.order import MixtureOrder, Order, SampleOrder, rank_ids
from shardwise.train.data.packing import Truncation, pack_rows, pieces_of

IGNORED = -100


class NumberedSamples(Protocol):
    """Numbered samples of one length.

    ``fill`` is the share of inputs that are not padding, ``truncation`` what the length cut off; ``None`` where
    documents are joined.
    """

    @property
    def fill(self) -> float | None:
        """Share of the inputs that are tokens of documents."""
        ...

    @property
    def truncation(self) -> Truncation | None:
        """What the length of a sample costs."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, ids: NDArray[np.int64]) -> tuple[Any, Tensor]:
        """Return inputs and labels of samples, two LongTensors [len(ids), seq_len].

        Inputs of isolated documents are a dict: ``input_ids``, and ``position_ids`` that begin at 0 with each document.
        Id -1 is an empty sample: inputs are the separator and labels are -100, as after the end of a
        shorter sample.

        Raises:
            IndexError: an id is below -1 or not below the number of samples.
        """
        ...

    def num_tokens(self, ids: NDArray[np.int64]) -> int:
        """Count the tokens of documents in samples, with or without a loss: all inputs but padding."""
        ...

    def roles(self) -> dict[str, tuple[int, int]]:
        """Count the tokens that follow an input by role, and those of them that are labels; empty where all are.

        The sums over roles are `num_tokens` and the labels of all samples.
        """
        ...

    def label_bytes(self, num_samples: int | None) -> float:
        """Return the UTF-8 bytes of the text behind the labels of the first ``num_samples`` samples.

        ``None`` is all samples. A token counts for the mean bytes of a token of the corpus; a separator and a
        token that is not a label count for none. So the number is exact with the tokenizer ``bytes``; with another one
        it is exact over all tokens, and an estimate for a part of them.
        """
        ...


class _Piece:
    """Samples by offset: number ``i`` has ``lengths[i]`` labels from token ``begins[i] + 1`` on."""

    truncation: Truncation | None = None
    fill: float | None = None

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
        if self.tokens.marks is not None:
            marks = np.asarray(self.tokens.marks).take(begins + self._columns[1:], mode="clip")
            labels[marks & 1 == 0] = IGNORED
        self._mask(begins, inputs, labels)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def num_tokens(self, ids: NDArray[np.int64]) -> int:
        """Count the tokens of documents in samples; see `NumberedSamples.num_tokens`."""
        return int(self._lengths[ids].sum())

    def roles(self) -> dict[str, tuple[int, int]]:
        """Count tokens by role; see `NumberedSamples.roles`."""
        return _roles(self.tokens.marks, self._begins[:-1] + 1, self._lengths[:-1])

    def label_count(self, num_samples: int | None) -> int:
        """Return the number of labels of the first samples."""
        count = len(self) if num_samples is None else min(num_samples, len(self))
        begins, lengths = self._begins[:count], self._lengths[:count]
        return int(lengths.sum()) if self.tokens.marks is None else _trained(self.tokens.marks, begins + 1, lengths)

    def label_bytes(self, num_samples: int | None) -> float:
        """Return the UTF-8 bytes of the first samples' labels; see `NumberedSamples.label_bytes`."""
        if self.tokens.marks is not None:
            return self.label_count(num_samples) * self.tokens.num_bytes / max(1, len(self._stream))
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


class PackedSamples(_Piece):
    """Samples of all documents joined and split every ``seq_len`` tokens.

    Each token is a label once.

    Only the very first token is never a label; the last sample may be shorter. With ``mask_borders`` the first
    token of a document is not a label either, as it would be predicted from another document.

    Raises:
        DataError: there are fewer than two tokens.
    """

    def __init__(self, tokens: Tokens, seq_len: int, separator: int, mask_borders: bool) -> None:
        num_labels = len(tokens.tokens) - 1
        begins = np.arange(0, _need_labels(num_labels, tokens, seq_len), seq_len, dtype=np.int64)
        super().__init__(tokens, seq_len, separator, begins, np.minimum(seq_len, num_labels - begins))
        self.mask_borders = mask_borders

    def _mask(self, begins: NDArray[np.int64], inputs: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        if self.mask_borders:
            rows, columns = np.nonzero(labels != IGNORED)
            places = begins[rows, 0] + columns + 1
            first = self._starts[np.searchsorted(self._starts, places)] == places
            labels[rows[first], columns[first]] = IGNORED

    def label_count(self, num_samples: int | None) -> int:
        """Return the number of labels of the first samples, without those that are masked at borders."""
        count = super().label_count(num_samples)
        if not self.mask_borders:
            return count
        last = self._begins[: len(self) if num_samples is None else min(num_samples, len(self))]
        end = int(last[-1] + self._lengths[len(last) - 1]) if len(last) else 0
        firsts = self._starts[(self._starts > 0) & (self._starts <= end) & (self._starts < len(self._stream))]
        marks = self.tokens.marks
        return count - (len(firsts) if marks is None else int((np.asarray(marks)[firsts] & 1).sum()))

    def roles(self) -> dict[str, tuple[int, int]]:
        """Count tokens by role; a first token that is masked at a border has no loss."""
        marks = self.tokens.marks
        if marks is not None and self.mask_borders:
            marks = np.array(marks)
            marks[self._starts[:-1]] &= 0xFE
        return _roles(marks, self._begins[:-1] + 1, self._lengths[:-1])

    def _text_labels(self, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        text = super()._text_labels(begins, lengths)
        if self.mask_borders:
            firsts = self._starts[1:-1][np.diff(self._starts[1:]) > 1]  # that of an empty document is its separator
            last = np.searchsorted(firsts, begins + lengths, "right")
            text -= int((last - np.searchsorted(firsts, begins, "right")).sum())
        return text


class DocumentSamples(_Piece):
    """Samples that each start with a document, padded at the end; see `pieces_of`.

    The labels of a document are its second token to its last.

    Raises:
        DataError: no document has two tokens.
    """

    def __init__(self, tokens: Tokens, seq_len: int, separator: int) -> None:
        pieces = pieces_of(tokens, seq_len)
        _need_labels(len(pieces.begins), tokens, seq_len)
        super().__init__(tokens, seq_len, separator, pieces.begins, pieces.lengths)
        self.truncation, self.fill = pieces.truncation, float(pieces.lengths.sum()) / (len(self) * seq_len)


class IsolatedSamples:
    """Samples of several documents in a row, none of which sees another.

    Positions begin at 0 with each document, from which a model makes its attention mask; also with the padding at the
    end. The last token of a document is no input, so that no label crosses a border. Rows are packed by `pack_rows`,
    with the longest documents first; ``in_order`` they are in the order of the data, each by its longest document, so
    that the first rows are like the others.

    Raises:
        DataError: no document has two tokens.
    """

    def __init__(self, tokens: Tokens, seq_len: int, separator: int, *, in_order: bool = False) -> None:
        pieces = pieces_of(tokens, seq_len)
        _need_labels(len(pieces.begins), tokens, seq_len)
        self.tokens, self.seq_len, self.separator = tokens, seq_len, separator
        self.truncation = pieces.truncation
        self._stream: NDArray[Any] = np.asarray(tokens.tokens)
        self._marks = None if tokens.marks is None else np.asarray(tokens.marks)
        self._begins, self._lengths = pieces.begins, pieces.lengths
        self._order, self._rows = pack_rows(pieces.lengths, seq_len)
        if in_order:
            rows = np.split(self._order, self._rows[1:-1])
            rows.sort(key=lambda row: int(row[0]))
            self._order, self._rows = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
        self.isolated = True
        self._tokens = np.append(np.diff(np.append(0, self._lengths[self._order].cumsum())[self._rows]), 0)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._rows) - 1

    @property
    def fill(self) -> float:
        """Share of the inputs that are tokens of documents, not padding."""
        return float(self._lengths.sum()) / (len(self) * self.seq_len)

    def roles(self) -> dict[str, tuple[int, int]]:
        """Count tokens by role; see `NumberedSamples.roles`."""
        return _roles(self._marks, self._begins + 1, self._lengths)

    def is_shared(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these samples hold several documents; the empty sample, -1, does not."""
        return (ids >= 0) & (self._rows[ids + 1] - self._rows[ids] > 1)

    def documents(self, ids: NDArray[np.int64]) -> int:
        """Count the documents (pieces of long ones) in these samples."""
        return int((self._rows[ids + 1] - self._rows[ids]).sum())

    def num_tokens(self, ids: NDArray[np.int64]) -> int:
        """Count the tokens of documents in samples; see `NumberedSamples.num_tokens`."""
        return int(self._tokens[ids].sum())

    def batch(self, ids: NDArray[np.int64]) -> tuple[dict[str, Tensor], Tensor]:
        """Return inputs with positions, and labels; see `NumberedSamples.batch`."""
        if len(ids) and not -1 <= ids.min() <= ids.max() < len(self):
            raise IndexError(f"sample ids {ids.min()} to {ids.max()} are not all in -1 to {len(self) - 1}")
        inputs = np.full((len(ids), self.seq_len), self.separator, np.int64)
        labels = np.full((len(ids), self.seq_len), IGNORED, np.int64)
        positions = np.empty((len(ids), self.seq_len), np.int64)
        for row, number in enumerate(ids):
            at = 0
            for piece in self._order[self._rows[number] : self._rows[number + 1]] if number >= 0 else ():
                begin, length = self._begins[piece], self._lengths[piece]
                here = slice(at, at + length)
                inputs[row, here] = self._stream[begin : begin + length]
                labels[row, here] = self._stream[begin + 1 : begin + 1 + length]
                if self._marks is not None:
                    labels[row, here][self._marks[begin + 1 : begin + 1 + length] & 1 == 0] = IGNORED
                positions[row, here] = np.arange(length)
                at += length
            positions[row, at:] = np.arange(self.seq_len - at)
        given = {"input_ids": torch.from_numpy(inputs), "position_ids": torch.from_numpy(positions)}
        return given, torch.from_numpy(labels)

    def is_right(self, number: int, inputs: Tensor, positions: Tensor, labels: Tensor) -> bool:
        """Compare a row with the corpus: whole pieces of documents, each with its own labels and positions from 0."""
        at, pieces = 0, self._order[self._rows[number] : self._rows[number + 1]] if number >= 0 else ()
        for begin, length in ((int(self._begins[piece]), int(self._lengths[piece])) for piece in pieces):
            here = slice(at, at + length)
            told = self._stream[begin : begin + length + 1].astype(np.int64)
            wanted = told[1:].copy()
            if self._marks is not None:
                wanted[self._marks[begin + 1 : begin + 1 + length] & 1 == 0] = IGNORED
            if not (
                np.array_equal(inputs[here], told[:-1])
                and np.array_equal(labels[here], wanted)
                and np.array_equal(positions[here], np.arange(length))
            ):
                return False
            at += length
        return bool((labels[at:] == IGNORED).all()) and np.array_equal(positions[at:], np.arange(self.seq_len - at))

    def label_count(self, num_samples: int | None) -> int:
        """Return the number of labels of the first samples."""
        pieces = self._first(num_samples)
        if self._marks is None:
            return int(self._lengths[pieces].sum())
        return _trained(self._marks, self._begins[pieces] + 1, self._lengths[pieces])

    def label_bytes(self, num_samples: int | None) -> float:
        """Return the UTF-8 bytes of the first samples' labels, an estimate from the mean of a token."""
        ends = 0 if self._marks is not None else len(self.tokens.starts) - 1
        labels = self.label_count(num_samples)
        if self._marks is None:  # a document's last label is its separator
            pieces = self._first(num_samples)
            after = self._begins[pieces] + self._lengths[pieces] + 1
            labels -= int(np.isin(after, np.asarray(self.tokens.starts)).sum())
        return labels * self.tokens.num_bytes / max(1, len(self._stream) - ends)

    def _first(self, num_samples: int | None) -> NDArray[np.int64]:
        return self._order[: self._rows[len(self) if num_samples is None else min(num_samples, len(self))]]


def _trained(marks: NDArray[np.uint8], begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """Count the tokens with a loss in stretches of the stream."""
    total = np.concatenate([[0], np.cumsum(np.asarray(marks) & 1, dtype=np.int64)])
    ends = np.minimum(begins + lengths, len(marks))
    return int((total[ends] - total[np.minimum(begins, len(marks))]).sum())


def _roles(
    marks: NDArray[np.uint8] | None, begins: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, tuple[int, int]]:
    """Count the tokens of each role, and those of them with a loss, in stretches of the stream that do not overlap."""
    if marks is None:
        return {}
    edges = np.zeros(len(marks) + 1, np.int8)
    np.add.at(edges, begins, 1)
    np.add.at(edges, begins + lengths, -1)
    pairs = np.bincount(marks[edges[:-1].cumsum(dtype=np.int8) > 0], minlength=2 * len(ROLES)).reshape(-1, 2)
    return {
        role: (int(out + trained), int(trained))
        for role, (out, trained) in zip(ROLES, pairs, strict=True)
        if out + trained
    }


def _need_labels(number: int, tokens: Tokens, seq_len: int) -> int:
    """Refuse samples without a label, by what took them all: the length of a sample, or the documents."""
    if number < 1 and tokens.marks is not None:
        labels = np.flatnonzero(np.asarray(tokens.marks) & 1)
        starts = np.asarray(tokens.starts)
        places = labels - starts[np.searchsorted(starts, labels, "right") - 1]
        if len(places := places[places > seq_len]):
            raise DataError(
                f"data.seq_len = {seq_len} cuts off every token with a loss, of which the earliest is token "
                f"{places.min() + 1} of its document; set data.seq_len to {places.min()} or more, with room for answers"
            )
    if number < 1:
        raise DataError("the corpus has no token that follows another one; give documents with more text")
    return number


class JoinedSources:
    """Samples of several sources, numbered one source after the other; a row is of one source."""

    def __init__(self, parts: Sequence[NumberedSamples], names: Sequence[str]) -> None:
        self.parts, self.names = list(parts), list(names)
        self.sizes = [len(part) for part in parts]
        self._firsts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self.isolated = all(isinstance(part, IsolatedSamples) for part in self.parts)

    @property
    def truncation(self) -> Truncation | None:
        """What the length of a sample costs, in all."""
        found = [part.truncation for part in self.parts if part.truncation is not None]
        return None if not found else Truncation(*map(sum, zip(*map(astuple, found), strict=True)))

    @property
    def fill(self) -> float | None:
        """Share of the inputs that are tokens of documents."""
        fills = [part.fill for part in self.parts]
        if None in fills:
            return None
        return sum(fill * size for fill, size in zip(fills, self.sizes, strict=True) if fill) / len(self)

    def is_right(self, number: int, inputs: Tensor, positions: Tensor, labels: Tensor) -> bool:
        """Compare a row with the corpus; see `IsolatedSamples.is_right`."""
        source = int(self.source_of(np.int64(max(number, 0))))
        part, within = self.parts[source], number - int(self._firsts[source]) if number >= 0 else -1
        return not isinstance(part, IsolatedSamples) or part.is_right(within, inputs, positions, labels)

    def is_shared(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these samples hold several documents that must not see each other."""
        shared, sources = np.zeros(len(ids), np.bool_), self.source_of(np.maximum(ids, 0))
        for number, part in enumerate(self.parts):
            here = (sources == number) & (ids >= 0)
            if isinstance(part, IsolatedSamples):
                shared[here] = part.is_shared(ids[here] - self._firsts[number])
        return shared

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._firsts[-1])

    def source_of(self, ids: NDArray[np.int64] | np.int64) -> NDArray[np.int64]:
        """Return the source of each sample."""
        return np.searchsorted(self._firsts, ids, "right") - 1

    def batch(self, ids: NDArray[np.int64]) -> tuple[Any, Tensor]:
        """Return inputs and labels; see `NumberedSamples.batch`."""
        if len(ids) and not -1 <= ids.min() <= ids.max() < len(self):
            raise IndexError(f"sample ids {ids.min()} to {ids.max()} are not all in -1 to {len(self) - 1}")
        rows: list[Any] = []
        for number in ids:
            source = int(self.source_of(number)) if number >= 0 else 0
            rows.append(self.parts[source].batch(np.array([number - self._firsts[source] if number >= 0 else -1])))
        return _pytree.tree_map(lambda *parts: torch.cat(parts), *rows)

    def num_tokens(self, ids: NDArray[np.int64]) -> int:
        """Count the tokens of documents in samples; see `NumberedSamples.num_tokens`."""
        real = ids[ids >= 0]
        sources = self.source_of(real)
        found = (part.num_tokens(real[sources == at] - self._firsts[at]) for at, part in enumerate(self.parts))
        return sum(found)

    def roles(self) -> dict[str, tuple[int, int]]:
        """Count tokens by role; see `NumberedSamples.roles`."""
        found: dict[str, tuple[int, int]] = {}
        for part in self.parts:
            for role, (total, trained) in part.roles().items():
                before = found.get(role, (0, 0))
                found[role] = (before[0] + total, before[1] + trained)
        return found

    def label_bytes(self, num_samples: int | None) -> float:
        """Return the UTF-8 bytes of the first samples' labels."""
        return sum(part.label_bytes(count) for part, count in self._each(num_samples))

    def _each(self, num_samples: int | None) -> Iterator[tuple[NumberedSamples, int]]:
        left = len(self) if num_samples is None else num_samples
        for part, size in zip(self.parts, self.sizes, strict=True):
            yield part, min(size, max(0, left))
            left -= size


def samples_for(corpus: Corpus, config: Config, *, heldout: bool = False) -> NumberedSamples:
    """Split a side of the corpus into samples, by ``[data]`` and what `Config.packing` says of ``data.pack``.

    A mixture's sources are split one by one.

    Raises:
        DataError: the corpus is too short for a single label.
    """
    tokens, table = corpus.train, config.data
    if heldout:
        if corpus.heldout is None:
            raise DataError("nothing is held out; set data.heldout_fraction, or data.heldout_path")
        tokens = corpus.heldout
    names = (*(corpus.sources or ("",)), "heldout")  # documents of data.heldout_path come last
    parts = {names[i]: part for i in range(len(tokens.sources) - 1) if (part := tokens.source(i)) is not None}
    packing, in_order = config.packing(corpus.kind), heldout or not table.shuffle  # not in an order of one's own
    found = [_samples(part, table, corpus.separator, packing, in_order) for part in parts.values()]
    return found[0] if len(found) == 1 else JoinedSources(found, list(parts))


def _samples(tokens: Tokens, table: DataTable, separator: int, packing: str, in_order: bool) -> NumberedSamples:
    if packing == "joined":
        return PackedSamples(tokens, table.seq_len, separator, table.mask_borders)
    if packing == "isolated":
        return IsolatedSamples(tokens, table.seq_len, separator, in_order=in_order)
    return DocumentSamples(tokens, table.seq_len, separator)


def order_for(samples: NumberedSamples, config: Config, *, endless: bool = False) -> SampleOrder:
    """Return the order of a run's training samples: all, or by the weights of a mixture's sources."""
    data, train = config.data, config.train
    epochs = None if endless else train.epochs
    weights = [one.weight for one in data.sources if one.weight is not None]
    if not weights or not isinstance(samples, JoinedSources):
        return Order(len(samples), train.seed, data.shuffle, epochs)
    return MixtureOrder(samples.sizes, weights, train.seed, data.shuffle, epochs, data.stop_when)


def check_borders(inputs: Any, labels: Tensor) -> None:
    """Check that each label is the token after its own, unless a document ends there.

    Raises:
        DataError: a label belongs elsewhere.
    """
    if not isinstance(inputs, dict) or "position_ids" not in inputs:
        return
    tokens, positions, wanted = (value.numpy() for value in (inputs["input_ids"], inputs["position_ids"], labels))
    same = positions[:, 1:] == positions[:, :-1] + 1
    if (same & (wanted[:, :-1] != IGNORED) & (wanted[:, :-1] != tokens[:, 1:])).any():
        raise DataError("a label of a packed sample is not the token that follows; this is an error of shardwise")
    if (~same & (positions[:, 1:] != 0)).any():
        raise DataError("positions of a packed sample skip; this is an error of shardwise")


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch, or a part of one, on ``device``."""
    return _pytree.tree_map_only(Tensor, lambda one: one.to(device), batch)


def step_batches(
    samples: NumberedSamples, order: SampleOrder, plan: Plan, rank: int, position: int = 0
) -> Iterator[list[tuple[Any, Tensor]]]:
    """Yield the micro batches of ``rank`` per step from ``position`` on.

    Endless if ``order`` is.

    Ranks that work on the same samples together get the same ones.
    """
    dims, micro = plan.dims, plan.micro_batch or 1
    while True:
        ids = rank_ids(order, position, dims.dp, dims.place(rank).dp, micro, plan.grad_accum)
        batches = [samples.batch(row) for row in ids]
        for inputs, labels in batches:
            check_borders(inputs, labels)
        yield batches
        position += micro * plan.grad_accum * dims.dp
