"""Documents to tokens on disk: read, split by content, tokenise once, memory-map everywhere.

One process calls `prepare_corpus`; every other one calls `open_corpus` on the folder it returned. Documents are
tokenised while they are read, once; no library is imported when the cache already contains the same corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError, MachineError, UserError
from shardwise.train.config_data import DataTable
from shardwise.train.data.documents import Columns, Document, Kind
from shardwise.train.data.encode import Encoded, Encoder, encoded_batches
from shardwise.train.data.sources import DENIED, MOST_PROBLEMS, BadRows, Batch, DataSource, find_source
from shardwise.train.data.tokenizer import Tokenizer, template_file, tokenizer_files, utf8
from shardwise.units import bytes_text, count_text, counted, seconds_text

_LAYOUT = 3  # version of the corpus folder; a change of its content makes old folders unused
_REPORT_S = 2.0
_MOST_SKIPPED = 0.1  # share of rows that may be left out
# values that say nothing against plain text
_PLAIN = {"loss_on": ("auto", "all"), "chat_template": (None,), "date": (None,)}
_Log = Callable[[str], None]


@dataclass(frozen=True)
class Tokens:
    """Documents as one stream of tokens, each document followed by a separator.

    ``tokens`` is a memory map of the smallest unsigned type that fits the vocabulary, [num_tokens]; ``starts``
    is int64, [num_documents + 1]: the index of the first token of each document, then the number of tokens;
    ``num_bytes`` is the length of the documents in UTF-8, in bytes. ``content`` is a hash of all this,
    independent of file locations. ``marks`` is uint8 [num_tokens] where the loss leaves tokens out (conversations,
    prompts): twice the index of the token's role in `ROLES`, and one more if it has a loss; conversations end as their
    template says, without a separator. Documents of one source of a mixture stand together: ``sources`` are the indices
    of their first documents, then the number of documents.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    num_bytes: int
    content: str = ""
    marks: NDArray[np.uint8] | None = None
    sources: tuple[int, ...] = ()

    def source(self, number: int) -> Tokens | None:
        """Return the documents of one source; ``None`` if it has none on this side."""
        first, end = self.sources[number : number + 2]
        if first == end:
            return None
        starts = np.asarray(self.starts[first : end + 1])
        here = slice(int(starts[0]), int(starts[-1]))
        share = (here.stop - here.start) / max(1, len(self.tokens))
        return replace(
            self,
            tokens=self.tokens[here],
            starts=starts - starts[0],
            num_bytes=round(self.num_bytes * share),
            marks=None if self.marks is None else self.marks[here],
            sources=(0, end - first),
        )


@dataclass(frozen=True)
class Corpus:
    """Prepared corpus and its location.

    ``order0_bits`` and ``order1_bits`` are the entropy of a byte, and of a byte given the one before it, in bits
    per byte over all documents (training and held-out) joined: what a model without context, or with one byte of
    it, can reach at best; 0 for conversations. ``heldout`` is ``None`` without held-out documents. ``kind`` is what
    the rows hold, ``sources`` the names of a mixture's sources, ``left_out`` the number of rows that were skipped or
    have no label, with the first of them.
    """

    folder: Path
    train: Tokens
    heldout: Tokens | None
    vocab_size: int
    separator: int
    fingerprint: str
    order0_bits: float
    order1_bits: float
    kind: Kind = "text"
    left_out: int = 0
    left_out_first: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    date: str | None = None


def prepare_corpus(table: DataTable, cache: Path, log: Callable[[str], None]) -> Corpus:
    """Tokenise the documents of ``table`` into a folder of ``cache``, or reuse an unchanged one.

    Documents are in the order of their relative paths, then of the rows in a file; empty ones are left out, and
    conversations without a label, up to a tenth of them. The choice
    of held-out documents depends only on their content, so copies are always on the same side; if the fraction selects
    none (or all), the one with the smallest hash is held out (the largest trained on). The folder is created completely
    or not at all. ``log`` gets one line at the start, one at the end and, while tokenising, at most one every two
    seconds.

    Raises:
        DataError: the corpus or the tokenizer is missing, empty or unreadable.
        UserError: the cache folder cannot be written.
        MachineError: the disk of the cache folder is full.
    """
    sources = [
        _Reading(find_source(path, key, one, cache), one, None if table.heldout_path is None else 0, name)
        for name, path, key, one in table.each_source()
    ]
    if table.heldout_path is not None:
        found = find_source(table.heldout_path, "data.heldout_path", table, cache)
        sources.append(_Reading(found, table, 1, ""))
    names = [*tokenizer_files(table.tokenizer), *filter(None, [template_file(table.tokenizer, table.chat_template)])]
    tokenizer = [[file.name, _hash(file.read_bytes())] for file in names]
    sides = [one.source.listing() for one in sources] + ([] if table.heldout_path else [table.heldout_fraction])
    rows: list[list[Any]] = [
        # a text column that is named makes rows text, also where they have messages
        [one.name, one.table.text_field, "text_field" in one.table.model_fields_set, one.table.columns]
        for one in sources
    ]
    rows += [[table.loss_on, table.chat_template, table.bad_rows, *([] if table.date is None else [table.date])]]
    fingerprint = _hash(json.dumps([_LAYOUT, sides, rows, tokenizer]).encode())
    folder = cache / fingerprint[:16]
    if folder.is_dir():
        try:
            return open_corpus(folder)
        except DataError:
            log(f"the corpus in '{folder}' is damaged, preparing it again")
    with _writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            (work / "corpus").mkdir()
            facts = _build(table, sources, work, log)
            (work / "corpus" / "corpus.json").write_text(json.dumps(facts | {"fingerprint": fingerprint}, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(work / "corpus", folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return open_corpus(folder)


def open_corpus(cache_folder: Path) -> Corpus:
    """Memory-map a corpus from the ``folder`` of one that `prepare_corpus` returned.

    Raises:
        DataError: the folder is missing or damaged.
    """
    try:
        facts = json.loads((cache_folder / "corpus.json").read_text())
        parts = {name: _open_part(cache_folder, name, part) for name, part in facts.pop("parts").items()}
        facts |= {key: tuple(facts[key]) for key in ("left_out_first", "sources")}
        return Corpus(folder=cache_folder, train=parts["train"], heldout=parts.get("heldout"), **facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"corpus '{cache_folder}' cannot be opened: {reason}; delete it and run again") from None


def _open_part(folder: Path, name: str, facts: dict[str, Any]) -> Tokens:
    tokens, starts = (np.load(folder / f"{name}{e}.npy", mmap_mode="r", allow_pickle=False) for e in ("", "_starts"))
    if len(tokens) != facts["num_tokens"] or starts[-1] != len(tokens):
        raise ValueError(f"{name}.npy has {len(tokens)} tokens instead of {facts['num_tokens']}")
    marks = None
    if facts["marked"]:
        marks = np.load(folder / f"{name}_marks.npy", mmap_mode="r", allow_pickle=False)
        if len(marks) != len(tokens):
            raise ValueError(f"{name}_marks.npy has {len(marks)} marks instead of {len(tokens)}")
    return Tokens(tokens, starts, facts["num_bytes"], facts["content"], marks, tuple(facts["sources"]))


class _Column(ExitStack):
    """One array on disk that grows: ``name.npy``, whose header is written again at the end."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self.dtype = dtype
        self.file: BinaryIO = self.enter_context(path.open("wb"))
        self._header(0)

    def _header(self, length: int) -> None:
        facts = {"descr": self.dtype.str, "fortran_order": False, "shape": (length,)}
        self.file.write(np.lib.format.magic(1, 0) + (118).to_bytes(2, "little") + f"{facts!s:117}\n".encode())

    def end(self, length: int) -> None:
        """Write the number of elements."""
        self.file.seek(0)
        self._header(length)
        self.close()


class _Writer(ExitStack):
    """The documents of one side: ``name.npy``, ``name_starts.npy`` and, if marked, ``name_marks.npy``."""

    def __init__(self, folder: Path, name: str, encoder: Encoder) -> None:
        super().__init__()
        self.folder, self.name, self.marked = folder, name, encoder.marked
        self.dtype = np.min_scalar_type(encoder.tokenizer.vocab_size - 1)
        self.lengths, self.sizes, self.hashes, self.sources = list[int](), list[int](), list[int](), [0]
        self.tokens = self.enter_context(_Column(folder / f"{name}.npy", self.dtype))
        if self.marked:
            self.marks = self.enter_context(_Column(folder / f"{name}_marks.npy", np.dtype(np.uint8)))

    def add(self, one: Encoded, content: int) -> None:
        """Append a document with the hash of its content."""
        self.tokens.file.write(np.ascontiguousarray(one.ids, self.dtype).data)
        if self.marked:
            self.marks.file.write(one.marks)
        self.lengths.append(len(one.ids))
        self.sizes.append(one.num_bytes)
        self.hashes.append(content)

    def finish(self) -> dict[str, Any]:
        """Finish the files and return a description of their content."""
        starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]).astype(np.int64)
        total = int(starts[-1])
        self.tokens.end(total)
        content = hashlib.blake2b(digest_size=16)
        names = [self.name]
        if self.marked:
            self.marks.end(total)
            names.append(f"{self.name}_marks")
        for name in names:
            for part in _pieces(np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)):
                content.update(part.data)
        np.save(self.folder / f"{self.name}_starts.npy", starts)
        content.update(starts.data)
        facts = {"num_tokens": total, "num_bytes": sum(self.sizes), "content": content.hexdigest()}
        return facts | {"marked": self.marked, "sources": self.sources}

    def take(self, content: int, first: int) -> Iterator[tuple[Encoded, int]]:
        """Remove the documents with this hash from the ``first`` on, and yield them."""
        ends = np.cumsum(self.lengths)
        moved = [index for index in range(first, len(self.hashes)) if self.hashes[index] == content]
        columns = [self.tokens, *([self.marks] if self.marked else [])]
        data: list[list[NDArray[Any]]] = []
        for column in columns:
            column.file.flush()
            array = np.fromfile(column.file.name, column.dtype, offset=128)
            data.append([array[ends[i] - self.lengths[i] : ends[i]].copy() for i in moved])
            gone = np.concatenate([np.arange(ends[i] - self.lengths[i], ends[i]) for i in moved])
            column.file.seek(128)
            column.file.truncate()
            column.file.write(np.delete(array, gone).data)
        marks = [one.tobytes() for one in data[1]] if self.marked else [b""] * len(moved)
        sizes = [self.sizes[i] for i in moved]
        for index in reversed(moved):
            del self.lengths[index], self.sizes[index], self.hashes[index]
        for one, mark, size in zip(data[0], marks, sizes, strict=True):
            yield Encoded(one, mark, size), content


def _pieces(array: NDArray[Any], size: int = 1 << 22) -> Iterator[NDArray[Any]]:
    """Yield a memory-mapped array in parts."""
    for start in range(0, len(array), size):
        yield np.ascontiguousarray(array[start : start + size])


# ---------------------------------------------------------------------------------------------------- build


@dataclass(frozen=True)
class _Reading:
    """A source, the table for its rows, the ``side`` that it belongs to (``None``: both), and its name."""

    source: DataSource
    table: DataTable
    side: int | None
    name: str


@dataclass
class _Building:
    """A corpus being written: the two sides, and what is counted on the way."""

    fraction: float
    sides: list[_Writer]
    bad: BadRows
    scan: _Scan
    silent: list[str] = field(default_factory=list)  # rows without a label

    @property
    def left_out(self) -> int:
        """Rows left out so far."""
        return len(self.silent) + self.bad.number

    def side_of(self, content: int, own: int | None) -> int:
        """Return 1 for held-out documents; ``own`` is the side of a source of one's own."""
        return own if own is not None else int(content < int(self.fraction * 2**64))


def _build(table: DataTable, readings: Sequence[_Reading], work: Path, log: _Log) -> dict[str, Any]:
    """Write the sources (training documents, then held-out ones, if any) to ``work/corpus``."""
    num_files = sum(len(one.source.files) for one in readings)
    log(f"reading {counted(num_files, 'file')}")
    known = [one.source.columns(one.table) or Columns("text", {"text": one.table.text_field}) for one in readings]
    for one, columns in zip(readings, known, strict=True):
        if columns.kind != "text":
            log(f"rows {f'of {one.name} ' if one.name else ''}are {columns}")
    rendered = {one.source.is_rendered(columns) for one, columns in zip(readings, known, strict=True)}
    encoder = _encoder(table, {one.kind for one in known}, any(rendered), log)
    if False in rendered:
        _tell_begin(encoder.tokenizer, log)
    bad = BadRows(skip=table.bad_rows == "skip")
    with ExitStack() as stack:
        sides = [stack.enter_context(_Writer(work / "corpus", name, encoder)) for name in ("train", "heldout")]
        building = _Building(table.heldout_fraction, sides, bad, _Scan())
        progress = _Progress(sum(one.source.num_bytes for one in readings), log)
        before = 0
        for reading, columns in zip(readings, known, strict=True):
            firsts, left_out = [len(side.lengths) for side in sides], building.left_out
            _read(
                building,
                reading,
                columns,
                replace(encoder, kind=columns.kind, beside_marked=encoder.marked),
                progress,
                before,
            )
            before += reading.source.num_bytes
            _check_rows(building, reading.source, sum(firsts), left_out)
            if reading.side is None and table.heldout_fraction:
                _balance(building, firsts, log)
            for side in sides:
                side.sources.append(len(side.lengths))
        leaked = sum(map(set(sides[0].hashes).__contains__, sides[1].hashes)) if table.heldout_path else 0
        if leaked:
            log(f"{leaked} of {len(sides[1].hashes)} held-out documents are trained on too: they are in data.path")
        parts = {side.name: side.finish() for side in sides if side.lengths}
    scan, num_heldout = building.scan, len(sides[1].lengths)
    if scan.replaced:
        log(
            f"{scan.replaced} documents contain U+FFFD, the replacement of bytes that are not UTF-8: "
            f"the first is {scan.replaced_first}"
        )
    num_bytes = sum(part["num_bytes"] for part in parts.values())
    tokens = count_text(sum(part["num_tokens"] for part in parts.values()))
    documents = sum(len(side.lengths) for side in sides)
    log(f"{bytes_text(num_bytes)}, {tokens} tokens, {documents} documents, {num_heldout} held out")
    if left_out := building.left_out:
        log(f"{counted(left_out, 'row')} left out: {bad.number} malformed, {len(building.silent)} without a label")
    return scan.entropies() | {
        "parts": parts,
        "vocab_size": encoder.tokenizer.vocab_size,
        "separator": encoder.tokenizer.separator,
        "kind": encoder.kind,
        "date": encoder.date,
        "sources": [one.name for one in readings if one.name],
        "left_out": left_out,
        "left_out_first": [*bad.problems, *building.silent][:MOST_PROBLEMS],
    }


def _tell_begin(tokenizer: Tokenizer, log: _Log) -> None:
    """Say which token transformers would put before rows that no chat template renders."""
    if tokenizer.begin:
        log(
            f"data.tokenizer '{tokenizer.name}' puts {tokenizer.begin} before a text when transformers calls it, and "
            "rows that no chat template renders have none here; write it into the rows if the model was trained with it"
        )


def _encoder(table: DataTable, kinds: set[Kind], rendered: bool, log: _Log) -> Encoder:
    """Return what encodes rows of these kinds, some of them ``rendered`` by the chat template.

    Its own kind is that of all rows, or else the one that says most. A template whose turns end in no token of their
    own is reported.
    """
    if kinds == {"text"} and (moot := [key for key, plain in _PLAIN.items() if getattr(table, key) not in plain]):
        raise DataError(
            f"data.{moot[0]} '{getattr(table, moot[0])}' does nothing for plain text, of which every token has a loss; "
            "remove it, or name the columns of conversations in data.columns"
        )
    one: Kind = "messages" if rendered else "completion"
    kind = next(iter(kinds)) if len(kinds) == 1 and kinds != {"completion"} else one
    encoder = Encoder(table.tokenizer, kind, table.chat_template, table.loss_on)
    if rendered and encoder.template.computes_date:
        text = "the chat template writes today's date in a format that is no text of its own"
        if table.date is not None:
            raise DataError(
                f"data.date '{table.date}' does nothing: {text}; write the format where it calls strftime_now, as in "
                "strftime_now('%d %b %Y'), or remove data.date"
            )
        log(f"{text}, so each conversation has the date of its preparation")
    elif rendered and encoder.template.writes_date:
        encoder = replace(encoder, date=table.date or str(date.today()))
        fixed = "" if table.date else f'; data.date = "{encoder.date}" prepares the same on another day'
        log(f"the chat template writes today's date, which is {encoder.date} in all conversations{fixed}")
    elif table.date is not None:
        raise DataError(f"data.date '{table.date}' does nothing: the chat template writes no date; remove it")
    if rendered and (length := encoder.parts_of_end()) > 1:
        log(
            f"<|im_end|>, which ends a turn of this chat template, is {length} tokens of data.tokenizer "
            f"'{table.tokenizer}', and none that generation stops at; a template of the model's own may suit it better"
        )
    return encoder


def _read(
    building: _Building, reading: _Reading, columns: Columns, encoder: Encoder, progress: _Progress, before: int
) -> None:
    """Encode the documents of a source, and append each to its side."""
    source = reading.source
    where = f"{source.where}: "

    def scanned() -> Iterator[Batch]:
        for batch in source.batches(columns, building.bad):
            building.scan.read(batch.documents, pairs=not encoder.marked)
            yield batch

    for batch, found in encoded_batches(encoder, scanned(), source.num_bytes):
        for document, one in zip(batch.documents, found, strict=True):
            if isinstance(one, str):
                building.bad.add(f"{where}{document.at} {one}")
            elif encoder.marked and not any(mark & 1 for mark in one.marks[1:]):
                building.silent.append(f"{where}{document.at} has no label: nothing of it is in the loss")
            else:
                content = _content(document)
                building.sides[building.side_of(content, reading.side)].add(one, content)
        progress.at(before + batch.read)
    building.bad.refuse()


def _check_rows(building: _Building, source: DataSource, before: int, left_out_before: int) -> None:
    """Refuse a source of nothing, or of which too much is left out; ``before`` it there were documents."""
    found = sum(len(side.lengths) for side in building.sides) - before
    left_out = building.left_out - left_out_before
    if left_out > _MOST_SKIPPED * (left_out + found):
        raise DataError(
            f"{source.where}: {left_out} of {counted(left_out + found, 'row')}, over a tenth, cannot be trained on:",
            *[one for one in (*building.bad.problems, *building.silent) if one.startswith(source.where)][
                :MOST_PROBLEMS
            ],
        )
    if not found:
        raise DataError(f"{source.where} has only empty documents; give some with text")


def _balance(building: _Building, firsts: Sequence[int], log: _Log) -> None:
    """Move documents so that neither side of the last source is empty, where it has two contents."""
    sides = building.sides
    hashes = [side.hashes[first:] for side, first in zip(sides, firsts, strict=True)]
    everything = {*hashes[0], *hashes[1]}
    if len(everything) < 2:
        _move(sides[1], sides[0], hashes[1][:1], firsts[1])
        log("nothing is held out: there is only one document; give data.heldout_path")
    elif not hashes[1]:
        _move(sides[0], sides[1], [min(everything)], firsts[0])
    elif not hashes[0]:
        _move(sides[1], sides[0], [max(everything)], firsts[1])


def _move(origin: _Writer, to: _Writer, contents: Sequence[int], first: int) -> None:
    for content in contents:
        for one in list(origin.take(content, first)):
            to.add(*one)


class _Progress:
    """A line every two seconds: how much of the files is read."""

    def __init__(self, total: int, log: _Log) -> None:
        self.total, self.log = total, log
        self.began = self.last = time.monotonic()

    def at(self, done: int) -> None:
        """Report ``done`` bytes."""
        now = time.monotonic()
        if now - self.last >= _REPORT_S and done < self.total:
            self.last, rate = now, done / (now - self.began)
            left = seconds_text((self.total - done) / rate) if rate else "unknown"
            self.log(f"tokenised {bytes_text(done)} of {bytes_text(self.total)}, {bytes_text(rate)}/s, {left} left")


def _content(document: Document) -> int:
    """Return a 64-bit hash of what a document says."""
    if document.messages:
        data = json.dumps(document.messages, sort_keys=True, ensure_ascii=False)
    else:
        data = (document.text or "") + (document.completion or "")
    return int.from_bytes(hashlib.blake2b(utf8(data), digest_size=8).digest(), "big")


class _Scan:
    """Count pairs of bytes in plain documents, and note those with replaced bytes."""

    def __init__(self) -> None:
        self.pairs = np.zeros(1 << 16, np.int64)
        self.ends, self.replaced, self.replaced_first = b"", 0, ""  # ends: the first byte of all and the last so far

    def read(self, documents: Sequence[Document], *, pairs: bool) -> None:
        """Add documents."""
        for one in documents:
            texts = [one.text or "", one.completion or "", *(str(message["content"]) for message in one.messages)]
            if any("\ufffd" in text for text in texts):
                self.replaced += 1
                self.replaced_first = self.replaced_first or one.at
        if not pairs or not documents:
            return
        data = [utf8(one.text or "") for one in documents]
        joined = np.frombuffer(self.ends[1:] + b"".join(data), np.uint8)
        self.ends = (self.ends[:1] or data[0][:1]) + data[-1][-1:]
        for start in range(0, len(joined) - 1, 1 << 20):
            piece = joined[start : start + (1 << 20) + 1].astype(np.int64)
            self.pairs += np.bincount(piece[:-1] * 256 + piece[1:], minlength=1 << 16)

    def entropies(self) -> dict[str, Any]:
        """Return the entropy of a byte, and of a byte given the one before it; bits per byte."""
        if not self.ends:
            return {"order0_bits": 0.0, "order1_bits": 0.0}
        table = self.pairs.reshape(256, 256)
        counts = table.sum(0)
        counts[self.ends[0]] += 1
        return {"order0_bits": _entropy(counts), "order1_bits": max(0.0, _entropy(self.pairs) - _entropy(table.sum(1)))}


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"corpus cache '{cache}' cannot be written: {error.strerror or error}"
        if error.errno in DENIED:
            raise UserError(f"{what}; use a folder you may write") from None
        raise MachineError(f"{what}; free space or use another folder") from None
