"""Documents to pieces that fit a sample, and pieces to rows with little padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.train.data.chat import ROLES
from shardwise.train.data.corpus import Tokens

PLAIN = 2 * ROLES.index("text") + 1  # mark of all tokens of a plain document


@dataclass(frozen=True)
class Truncation:
    """What the length of a sample costs: documents cut, and those of them that lost every label."""

    documents: int
    truncated: int
    lost: int
    tokens_lost: int


@dataclass(frozen=True)
class DocumentPieces:
    """Stretches of the stream: ``lengths`` inputs from token ``begins`` on, each followed by a label."""

    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]
    truncation: Truncation


def pieces_of(tokens: Tokens, seq_len: int) -> DocumentPieces:
    """Split documents into pieces of at most ``seq_len`` inputs.

    A long plain document goes on in further pieces, also beside conversations. A conversation ends where its piece
    does: what follows would be answers without their questions; one that has no label before that is left out.
    """
    starts = np.asarray(tokens.starts)
    labels = np.maximum(np.diff(starts) - 1, 0)
    marks = None if tokens.marks is None else np.asarray(tokens.marks)
    pieces = -(-labels // seq_len)
    if marks is not None:
        plain = marks[starts[:-1]] == PLAIN
        pieces = np.where(plain, pieces, np.minimum(pieces, 1))
    done = (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_len  # earlier pieces
    begins, lengths = np.repeat(starts[:-1], pieces) + done, np.minimum(seq_len, np.repeat(labels, pieces) - done)
    if marks is None:
        return DocumentPieces(begins, lengths, Truncation(len(labels), int((pieces > 1).sum()), 0, 0))
    trained = np.concatenate([[0], np.cumsum(marks & 1, dtype=np.int64)])
    within = trained[begins + lengths + 1] - trained[begins + 1]
    full = trained[starts[:-1] + labels + (labels > 0)] - trained[starts[:-1] + (labels > 0)]
    kept, truncated = within > 0, ~plain & (labels > seq_len)
    lost = int((~kept).sum()) + int((pieces == 0).sum())
    truncation = Truncation(len(labels), int(truncated.sum()), lost, int(full.sum() - within.sum()))
    return DocumentPieces(begins[kept], lengths[kept], truncation)


def pack_rows(lengths: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack pieces into rows of ``seq_len``: the longest first, each into the fullest row that has room.

    Best-fit decreasing, which needs at most 11/9 of the fewest rows, and four more (Johnson et al. 1974). Return the
    pieces in the order of rows, and where each row begins in it, one more than there are rows. Equal lengths keep
    their order.
    """
    order = np.argsort(-lengths, kind="stable")
    open_rows: list[list[int]] = [[] for _ in range(seq_len + 1)]  # by the room that is left
    has_room = 0  # bit r: a row with room r exists; the lowest set bit from a length on is the fullest row that fits
    rows: list[list[int]] = []
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        above = has_room >> length
        if above:
            room = length + (above & -above).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                has_room &= ~(1 << room)
            rows[row].append(piece)
        else:
            room, row = seq_len, len(rows)
            rows.append([piece])
        left = room - length
        open_rows[left].append(row)
        has_room |= 1 << left
    sizes = np.array([0, *map(len, rows)], np.int64)
    return np.array([piece for row in rows for piece in row], np.int64), np.cumsum(sizes)
