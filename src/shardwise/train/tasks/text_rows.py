"""`TextReader`: rows of text columns, as the tasks on text read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError, did_you_mean
from shardwise.train.config import Config
from shardwise.train.data.documents import RowProblem
from shardwise.train.data.rows import Row, RowColumn, RowData
from shardwise.train.data.sources import BadRows, DataSource, find_source
from shardwise.train.data.tokenizer import tokenizer_files
from shardwise.train.tasks.labels import Labels
from shardwise.train.tasks.text_encoding import EncodedText, TextEncoder


class TextReader(ABC):
    """Reads columns of text; a subclass says which (``names``: each part's usual names) and what a row becomes.

    Parts in ``optional`` need not be there.

    Raises:
        DataError: the tokenizer cannot be used.
    """

    names: Mapping[str, Sequence[str]]
    optional: Sequence[str] = ()
    labels: Labels | None = None  # the classes of the column ``label``

    def __init__(self, config: Config, model_facts: Any) -> None:
        self.table, self.model_facts = config.data, model_facts
        self.encoder = TextEncoder(config.data.tokenizer, model_facts)
        self.vocab_size = self.encoder.vocab_size
        self.sources: list[DataSource] = []
        self.columns: list[dict[str, str]] = []
        self.num_truncated = 0

    def open(self, value: str, key: str, cache: Path) -> list[Any]:
        """Find the files of a path, and its columns; see `RowReader.open`.

        Raises:
            DataError: there are no files, or a column is missing.
        """
        source = find_source(value, key, self.table, cache)
        first = next(source.rows(), None)
        if first is None:
            raise DataError(f"{source.where} has no rows; give some")
        self.sources.append(source)
        self.columns.append(self._columns(source, [str(name) for name in first[1]], first[0]))
        return source.listing()

    def _columns(self, source: DataSource, known: Sequence[str], at: str) -> dict[str, str]:
        """Find the column of each part.

        Raises:
            DataError: a part has none.
        """
        given: dict[str, str] = {str(part): name for part, name in self.table.columns.items()}
        if "text" in self.names and "text_field" in self.table.model_fields_set:
            given.setdefault("text", self.table.text_field)
        problems = [
            f"data.columns.{part} '{name}' is not a column of {source.where}{did_you_mean(name, known)}; it has: "
            f"{', '.join(known)}"
            for part, name in given.items()
            if name not in known
        ]
        found = dict(given)
        for part, usual in self.names.items():
            name = next((one for one in usual if one in known and one not in found.values()), None)
            if part not in found and name is not None:
                found[part] = name
        missing = [part for part in self.names if part not in found and part not in self.optional]
        if missing:
            problems.append(
                f"{source.where} ({at}) has no column for {', '.join(missing)}; it has: {', '.join(known)}; name them "
                f"in data.columns, such as {missing[0]} = '{known[0] if known else 'column'}'"
            )
        if problems:
            raise DataError(*problems)
        return found

    def rows(self, place: int, bad: BadRows) -> Iterator[Row]:
        """Yield encoded rows; see `RowReader.rows`."""
        source, columns = self.sources[place], self.columns[place]
        for at, row, _ in source.rows():
            try:
                found = self.row({part: row.get(name) for part, name in columns.items()})
            except RowProblem as problem:
                bad.add(f"{source.where}: {at} {problem}")
                continue
            if found is not None:
                yield found
        bad.refuse()

    @abstractmethod
    def row(self, parts: Mapping[str, Any]) -> Row | None:
        """Return the arrays of a row; ``None`` for one to leave out without a word.

        Raises:
            RowProblem: it cannot be trained on.
        """

    def encode(self, text: Any, what: str, pair: Any = None, length: int | None = None) -> EncodedText:
        """Encode a text of a row.

        Raises:
            RowProblem: it is none, or is empty.
        """
        for one in (text, *([] if pair is None else [pair])):
            if not isinstance(one, str):
                found_type = "no text" if one is None else f"{type(one).__name__}, not text,"
                raise RowProblem(f"holds {found_type} in '{what}'; repair it, or remove the row")
            if not one.strip():
                raise RowProblem(f"'{what}' is empty; add text, or remove the row")
        found = self.encoder.encode(text, pair, length or self.table.seq_len)
        self.num_truncated += found.was_truncated
        return found

    def identity(self) -> list[Any]:
        """Return what the rows depend on; see `RowReader.identity`."""
        import hashlib

        files = [
            [file.name, hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()]
            for file in tokenizer_files(self.table.tokenizer)
        ]
        own = [] if self.labels is None else self.labels.identity()
        lengths = [self.table.seq_len, self.table.target_len]
        return [files, own, self.columns, lengths, self.encoder.pad, self.encoder.mask]

    def facts(self) -> dict[str, Any]:
        """Return the ids that batches need; see `RowReader.facts`."""
        notes = []
        if self.num_truncated:
            notes.append(f"{self.num_truncated} rows cut at data.seq_len {self.table.seq_len}")
        encoder = self.encoder
        return {"pad": encoder.pad, "separator": encoder.separator, "mask": encoder.mask, "told": notes} | {
            "special": encoder.special
        }


def tokens(values: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return ids in the type they are stored in."""
    return values.astype(np.int32)


def padded_inputs(data: RowData, column: RowColumn, rows: NDArray[np.int64], width: int) -> dict[str, NDArray[Any]]:
    """Return ``input_ids`` and ``attention_mask``; an empty sample attends to its first token, which is padding."""
    assert data.facts is not None
    ids = column.padded(rows, width, int(data.facts["pad"]))
    lengths = np.minimum(np.maximum(column.lengths(rows), 1), width)
    return {"input_ids": ids, "attention_mask": (np.arange(width) < lengths[:, None]).astype(np.int64)}


class LabelledTextReader(TextReader):
    """Reads text with classes: ``label_part`` is the part that holds them, one or one for each word."""

    label_part: str

    def __init__(self, config: Config, model_facts: Any) -> None:
        super().__init__(config, model_facts)
        self.classes = Labels(model_facts)
        self.labels = self.classes

    def open(self, value: str, key: str, cache: Path) -> list[Any]:
        """Find the files of a path, its columns, and the names that a saved data set gives its classes."""
        listing = super().open(value, key, cache)
        self.classes.names = class_names(self.sources[-1], self.columns[-1][self.label_part]) or self.classes.names
        return listing


def class_names(source: DataSource, column: str) -> tuple[str, ...]:
    """Return the names of a column of classes, or of lists of them, of a saved data set; none in other formats."""
    if source.format != "dataset":
        return ()
    feature = source.saved().features.get(column)
    feature = getattr(feature, "feature", feature)
    return tuple(getattr(feature, "names", None) or ())
