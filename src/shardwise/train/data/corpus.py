"""Documents to tokens on disk: read, split by content, tokenise once, memory-map everywhere.

One process calls `prepare_corpus`; every other one calls `open_corpus` on the folder it returned. Documents are read
with the ``datasets`` library, which is not imported when the cache already contains the same corpus.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError, MachineError, ShardwiseError, UserError, did_you_mean
from shardwise.train.config import DataTable
from shardwise.train.data.paths import documents_at, matches, place_of
from shardwise.units import bytes_text, count_text, seconds_text

_LAYOUT = 1  # version of the corpus folder; a change of its content makes old folders unused
_REPORT_S = 2.0
_FULL = {errno.ENOSPC, errno.EDQUOT}
_Say = Callable[[str], None]
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
_SOURCE_SKIP = ["site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"]
_FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # anything else is text
_END_OF_TEXT = ["</s>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]"]


@dataclass(frozen=True)
class Tokens:
    """Documents as one stream of tokens, each document followed by a separator.

    ``tokens`` is a memory map of the smallest unsigned type that fits the vocabulary, [num_tokens]; ``starts``
    is int64, [num_documents + 1]: the index of the first token of each document, then the number of tokens;
    ``num_bytes`` is the length of the documents in UTF-8, in bytes. ``content`` is a hash of the tokens and of the
    documents' starts, independent of file locations; empty in a corpus that an earlier version prepared.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    num_bytes: int
    content: str = ""


@dataclass(frozen=True)
class Corpus:
    """Prepared corpus and its location.

    ``order0_bits`` and ``order1_bits`` are the entropy of a byte, and of a byte given the one before it, in bits
    per byte over all documents (training and held-out) joined: what a model without context, or with one byte of
    it, can reach at best. ``heldout`` is ``None`` without held-out documents.
    """

    folder: Path
    train: Tokens
    heldout: Tokens | None
    vocab_size: int
    separator: int
    fingerprint: str
    order0_bits: float
    order1_bits: float


@dataclass(frozen=True)
class _Source:
    """Files of one config key: ``where`` is key and value, ``files`` are sorted, below ``root``."""

    where: str
    format: str
    root: Path
    files: tuple[str, ...]

    def listing(self) -> list[Any]:
        facts = [[name, s.st_size, s.st_mtime_ns] for name in self.files for s in [(self.root / name).stat()]]
        return [self.format, str(self.root.resolve()), facts]


def prepare_corpus(table: DataTable, cache: Path, log: Callable[[str], None]) -> Corpus:
    """Tokenise the documents of ``table`` into a folder of ``cache``, or reuse an unchanged one.

    Documents are in the order of their relative paths, then of the rows in a file; empty ones are left out. The choice
    of held-out documents depends only on their content, so copies are always on the same side; if the fraction selects
    none (or all), the one with the smallest hash is held out (the largest trained on). The folder is created completely
    or not at all. ``log`` gets one line at the start, one at the end and, while tokenising, at most one every two
    seconds.

    Raises:
        DataError: the corpus or the tokenizer is missing, empty or unreadable.
        UserError: the cache folder cannot be written.
        MachineError: the disk of the cache folder is full.
    """
    source = _find(table.path, "data.path", table, cache)
    heldout = _find(table.heldout_path, "data.heldout_path", table, cache) if table.heldout_path is not None else None
    tokenizer = [[file.name, _hash(file.read_bytes())] for file in _tokenizer_files(table.tokenizer)]
    sides = [source.listing(), heldout.listing() if heldout else table.heldout_fraction]
    fingerprint = _hash(json.dumps([_LAYOUT, sides, table.text_field, tokenizer]).encode())
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
            facts = _build(table, [source] + ([heldout] if heldout else []), work, log)
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
        return Corpus(folder=cache_folder, train=parts["train"], heldout=parts.get("heldout"), **facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"corpus '{cache_folder}' cannot be opened: {reason}; delete it and run again") from None


def _open_part(folder: Path, name: str, facts: dict[str, Any]) -> Tokens:
    tokens, starts = (np.load(folder / f"{name}{e}.npy", mmap_mode="r", allow_pickle=False) for e in ("", "_starts"))
    if len(tokens) != facts["num_tokens"] or starts[-1] != len(tokens):
        raise ValueError(f"{name}.npy has {len(tokens)} tokens instead of {facts['num_tokens']}")
    return Tokens(tokens, starts, facts["num_bytes"], facts.get("content", ""))


# ---------------------------------------------------------------------------------------------- which files


def _find(value: str, key: str, table: DataTable, cache: Path) -> _Source:
    """Find the files of a path, in order; hidden files and the cache itself are left out."""
    where, skip, suffix = f"{key} '{value}'", list[str](), ""
    form: str = table.format
    if value.startswith("python:"):
        root, skip, suffix = _python_source(value.removeprefix("python:"), where), _SOURCE_SKIP, ".py"
    else:
        root = documents_at(value, where)
    saved = (root / "state.json").is_file() or (root / "dataset_dict.json").is_file()
    if form == "dataset" and not saved:
        raise DataError(f"{where} is not a saved dataset; give a folder that datasets.save_to_disk wrote")
    if root.is_file():
        names, folder = [root.name], root.parent
    elif saved and form in ("auto", "dataset"):
        names, folder, form = _walk(root, [], cache), root, "dataset"
    else:
        names = [n for n in _walk(root, table.exclude, cache, skip) if n.endswith(suffix)]
        names, folder = [n for n in names if matches(Path(n), table.include)], root
    if not names:
        rule = f"no file matches data.include {table.include} and not data.exclude {table.exclude}"
        raise DataError(f"{where} has no documents: {rule}; patterns are relative to it, such as '**/*.txt'")
    kinds = [_FORMATS.get(Path(n).suffix, "text") for n in names]
    if form == "auto":
        form = "text" if len(set(kinds)) > 1 else kinds[0]
    if form in kinds and form != "text":
        names = [n for n, kind in zip(names, kinds, strict=True) if kind == form]
    for name in names:
        if not (folder / name).is_file() or not os.access(folder / name, os.R_OK):
            why = "cannot be read" if (folder / name).exists() else "is a link to nothing"
            raise DataError(f"{where}: file '{name}' {why}; repair it or add it to data.exclude")
    return _Source(where, form, folder, tuple(names))


def _walk(root: Path, exclude: Sequence[str], cache: Path, skip: Sequence[str] = ()) -> list[str]:
    """List relative paths of files and links below ``root``, sorted.

    Links to folders are not followed.
    """
    names, avoid = [], cache.resolve()
    for top, folders, files in os.walk(root):
        here = Path(top).relative_to(root)
        kept = {name for name in folders + files if not name.startswith(".") and not matches(here / name, exclude)}
        folders[:] = [f for f in folders if f in kept and f not in skip and Path(top, f).resolve() != avoid]
        plain = (Path(top, f) for f in files if f in kept)
        names += [p.relative_to(root).as_posix() for p in plain if p.is_file() or p.is_symlink()]
    return sorted(names)


def _python_source(package: str, where: str) -> Path:
    """Return the standard library's folder, or an installed package's path, without import."""
    if package == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    top, *rest = package.split(".")
    spec = None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
    inside = [Path(folder).joinpath(*rest) for folder in (spec and spec.submodule_search_locations) or []]
    found = [p for path in inside for p in (path, path.with_name(f"{path.name}.py")) if p.exists()]
    if spec and spec.origin and spec.origin.endswith(".py") and not inside and not rest:
        found = [Path(spec.origin)]
    if not found:
        raise DataError(
            f"{where}: '{package}' is not an installed package with Python source; install it or give a folder"
        )
    return found[0]


# ------------------------------------------------------------------------------------------------ documents


def _load(source: _Source, field: str, cache_dir: Path) -> Any:
    """Load the documents as a ``datasets.Dataset`` with one text column; return its name, too."""
    paths = [str(source.root / name) for name in source.files]
    with _loading(source) as datasets:
        if source.format == "dataset":
            data = datasets.load_from_disk(str(source.root))
            if isinstance(data, datasets.DatasetDict):
                if "train" not in data and len(data) != 1:
                    fix = f"give the folder of one split: {', '.join(data)}"
                    raise DataError(f"{source.where} has several splits and no 'train'; {fix}")
                data = data["train"] if "train" in data else next(iter(data.values()))
            _need_column(source, field, data.column_names, "")
        elif source.format == "parquet":
            parquet = _need("pyarrow.parquet")
            for path, name in zip(paths, source.files, strict=True):
                _need_column(source, field, parquet.read_schema(path).names, f" (file '{name}')")
            exact = [glob.escape(path) for path in paths if parquet.read_metadata(path).num_rows]  # literal names
            if not exact:
                raise DataError(f"{source.where} has only empty documents; give some with text")
            data = datasets.Dataset.from_parquet(exact, columns=[field], cache_dir=str(cache_dir))
        else:  # datasets' text reader changes line ends, and its JSON reader guesses the type of every column
            rows = _text_rows if source.format == "text" else _json_rows
            named = datasets.Features({field: datasets.Value("large_string")})
            given = {"paths": tuple(paths), "source": source, "field": field}
            data = datasets.Dataset.from_generator(rows, named, str(cache_dir), gen_kwargs=given)
        dtype = getattr(data.features[field], "dtype", type(data.features[field]).__name__)
        if "string" not in dtype:
            raise _not_text(field, dtype)
        return data.select_columns([field])


def _text_rows(paths: Sequence[str], source: _Source, field: str) -> Iterator[dict[str, str]]:
    for path in paths:
        yield {field: Path(path).read_bytes().decode("utf-8", errors="replace")}


def _json_rows(paths: Sequence[str], source: _Source, field: str) -> Iterator[dict[str, str | None]]:
    """Yield rows of JSON lines, or of a file that is one JSON list.

    Every row must have the field.
    """
    for path, name in zip(paths, source.files, strict=True):
        with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
            full = file.read(4096).lstrip().startswith("[")
            file.seek(0)
            for number, text in enumerate([file.read()] if full else file, 1):
                at = f"file '{name}'" if full else f"file '{name}', line {number}"
                try:
                    rows = json.loads(text) if text.strip() else []
                except json.JSONDecodeError as error:
                    raise DataError(f"{source.where}: {at} is not JSON: {error.msg}; repair it") from None
                for row in rows if isinstance(rows, list) else [rows]:
                    if not isinstance(row, dict):
                        raise DataError(f"{source.where}: {at} holds {row!r:.40}, not an object; repair it")
                    _need_column(source, field, row, f" ({at})")
                    if not isinstance(row[field], str | None):
                        raise _not_text(field, f"{type(row[field]).__name__} ({at})")
                    yield {field: row[field]}
    yield {field: None}  # no document: datasets cannot represent zero rows


def _need_column(source: _Source, field: str, names: Iterable[str], at: str) -> None:
    known = [str(name) for name in names]
    if field not in known:
        hint, has = did_you_mean(field, known), ", ".join(known)
        raise DataError(f"data.text_field '{field}' is not a column of {source.where}{at}{hint}; it has: {has}")


def _not_text(field: str, got: str) -> DataError:
    return DataError(f"data.text_field '{field}' holds {got}, not text; set it to a text column")


def _batches(data: Any, field: str) -> Iterator[list[str]]:
    """Yield the texts in order, without empty ones, at most 128 at a time."""
    for rows in data.iter(batch_size=128):
        if texts := [text for text in rows[field] if text]:
            yield texts


# --------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class _Tokenizer:
    vocab_size: int
    separator: int
    encode: Callable[[list[str]], Iterable[Any]]  # the tokens of each text


def _tokenizer_files(name: str) -> list[Path]:
    """List the files that determine a tokenizer's behaviour; none for ``bytes``."""
    if name == "bytes":
        return []
    path = place_of(name, f"data.tokenizer '{name}'")
    files = [path] if path.is_file() else sorted(f for e in ("json", "txt", "model") for f in path.glob(f"*.{e}"))
    if not files:
        what = "has no tokenizer file" if path.is_dir() else "does not exist here"
        raise DataError(f"data.tokenizer '{name}' {what}; give 'bytes', a tokenizer.json or a folder with one")
    return files


def _tokenizer(name: str) -> _Tokenizer:
    """Load ``bytes``, a ``tokenizer.json`` (without truncation and padding) or a folder."""
    if name == "bytes":
        return _Tokenizer(257, 256, lambda texts: (np.frombuffer(_utf8(text), np.uint8) for text in texts))
    path = Path(name).expanduser()
    file, settings = (path / "tokenizer.json" if path.is_dir() else path), path / "tokenizer_config.json"
    library = _need("tokenizers" if file.is_file() else "transformers")
    end: Any = None
    try:
        if file.is_file():
            fast = library.Tokenizer.from_file(str(file))
            fast.no_truncation()
            fast.no_padding()
            vocab = fast.get_vocab(with_added_tokens=True)
            if settings.is_file():
                end = json.loads(settings.read_text()).get("eos_token")
        else:
            slow = library.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            vocab, end = slow.get_vocab(), slow.eos_token
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"data.tokenizer '{name}' cannot be read: {_first_line(error)}; give another") from None
    end = end.get("content") if isinstance(end, dict) else end
    end = next((word for word in [end, *_END_OF_TEXT] if word in vocab), None)
    if end is None:
        known = ", ".join(_END_OF_TEXT)
        raise DataError(f"data.tokenizer '{name}' has no token that ends a document; add one of these: {known}")

    def encode(texts: list[str]) -> Iterable[Any]:
        if file.is_file():
            return (coded.ids for coded in fast.encode_batch(texts, add_special_tokens=False))
        return slow(texts, add_special_tokens=False, verbose=False)["input_ids"]

    return _Tokenizer(max(vocab.values()) + 1, vocab[end], encode)


class _Writer(ExitStack):
    """Writer that appends documents to ``name.npy`` and rewrites its header at the end."""

    def __init__(self, folder: Path, name: str, tokenizer: _Tokenizer) -> None:
        super().__init__()
        self.folder, self.name, self.tokenizer = folder, name, tokenizer
        self.dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        self.lengths, self.num_bytes, self.content = [0], 0, hashlib.blake2b(digest_size=16)
        self.file: BinaryIO = self.enter_context((folder / f"{name}.npy").open("wb"))
        self._header(0)

    def _header(self, num_tokens: int) -> None:
        facts = {"descr": self.dtype.str, "fortran_order": False, "shape": (num_tokens,)}
        self.file.write(np.lib.format.magic(1, 0) + (118).to_bytes(2, "little") + f"{facts!s:117}\n".encode())

    def add(self, texts: list[str]) -> None:
        """Append texts, each followed by the separator."""
        for text, ids in zip(texts, self.tokenizer.encode(texts) if texts else [], strict=True):
            tokens = np.empty(len(ids) + 1, self.dtype)
            tokens[:-1], tokens[-1] = ids, self.tokenizer.separator
            self.file.write(tokens.data)
            self.content.update(tokens.data)
            self.lengths.append(len(tokens))
            self.num_bytes += len(_utf8(text))

    def finish(self) -> dict[str, Any]:
        """Finish both files and return a description of their content."""
        starts = np.cumsum(self.lengths, dtype=np.int64)
        self.file.seek(0)
        self._header(int(starts[-1]))
        np.save(self.folder / f"{self.name}_starts.npy", starts)
        self.content.update(starts.data)
        return {"num_tokens": int(starts[-1]), "num_bytes": self.num_bytes, "content": self.content.hexdigest()}


# ---------------------------------------------------------------------------------------------------- build


def _build(table: DataTable, sources: Sequence[_Source], work: Path, log: _Say) -> dict[str, Any]:
    """Write the sources (training documents, then held-out ones, if any) to ``work/corpus``."""
    tokenizer = _tokenizer(table.tokenizer)
    num_files = sum(len(source.files) for source in sources)
    log(f"reading {num_files} file{'s' * (num_files != 1)}")
    loaded = [_load(source, table.text_field, work / "datasets") for source in sources]
    scan = _Scan()
    hashes = [scan.read(_batches(data, table.text_field)) for data in loaded]
    for source, found in zip(sources, hashes, strict=True):
        if not len(found):
            raise DataError(f"{source.where} has only empty documents; give some with text")
    if scan.replaced:
        log(f"{scan.replaced} documents contain U+FFFD, the replacement of bytes that are not UTF-8")
    held = [np.full(len(found), index == 1) for index, found in enumerate(hashes)]
    if len(sources) == 1:
        held = [_held_out(hashes[0], table.heldout_fraction)]
        if table.heldout_fraction and not held[0].any():
            log("nothing is held out: there is only one document; give data.heldout_path")
    elif leaked := int(np.isin(hashes[1], hashes[0]).sum()):
        log(f"{leaked} of {len(hashes[1])} held-out documents are trained on too: they are in data.path")
    pieces = (texts for data in loaded for texts in _batches(data, table.text_field))
    with ExitStack() as stack:
        files = [stack.enter_context(_Writer(work / "corpus", name, tokenizer)) for name in ("train", "heldout")]
        _tokenise(pieces, np.concatenate(held), scan.num_bytes, files, log)
        parts = {file.name: file.finish() for file in files if len(file.lengths) > 1}
    tokens, documents = count_text(sum(part["num_tokens"] for part in parts.values())), sum(map(len, held))
    log(f"{bytes_text(scan.num_bytes)}, {tokens} tokens, {documents} documents, {sum(map(sum, held))} held out")
    return scan.entropies() | {"parts": parts, "vocab_size": tokenizer.vocab_size, "separator": tokenizer.separator}


def _tokenise(batches: Iterable[list[str]], held: NDArray[Any], total: int, writers: list[_Writer], log: _Say) -> None:
    """Write every document to its side; ``total`` is the bytes of all, for progress reports."""
    began = last = time.monotonic()
    at = 0
    for texts in batches:
        sides = held[at : at + len(texts)]
        for side, writer in enumerate(writers):
            writer.add([text for text, mine in zip(texts, sides == side, strict=True) if mine])
        at, done, now = at + len(texts), sum(writer.num_bytes for writer in writers), time.monotonic()
        if now - last >= _REPORT_S and done < total:
            last, rate = now, done / (now - began)
            left = seconds_text((total - done) / rate)
            log(f"tokenised {bytes_text(done)} of {bytes_text(total)}, {bytes_text(rate)}/s, {left} left")


class _Scan:
    """Scan all documents once for their hashes and their byte-pair counts."""

    def __init__(self) -> None:
        self.pairs = np.zeros(1 << 16, np.int64)
        self.ends, self.num_bytes, self.replaced = b"", 0, 0  # ends: the first byte of all and the last so far

    def read(self, batches: Iterable[list[str]]) -> NDArray[np.uint64]:
        """Return the 64-bit content hash of each text."""
        hashes = []
        for texts in batches:
            data = [_utf8(text) for text in texts]
            hashes += [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") for text in data]
            self.replaced += sum("\ufffd" in text for text in texts)
            self.num_bytes += sum(map(len, data))
            joined = np.frombuffer(self.ends[1:] + b"".join(data), np.uint8)
            self.ends = (self.ends[:1] or data[0][:1]) + data[-1][-1:]
            for start in range(0, len(joined) - 1, 1 << 20):
                piece = joined[start : start + (1 << 20) + 1].astype(np.int64)
                self.pairs += np.bincount(piece[:-1] * 256 + piece[1:], minlength=1 << 16)
        return np.array(hashes, np.uint64)

    def entropies(self) -> dict[str, Any]:
        """Return the entropy of a byte, and of a byte given the one before it; bits per byte."""
        table = self.pairs.reshape(256, 256)
        counts = table.sum(0)
        counts[self.ends[0]] += 1
        return {"order0_bits": _entropy(counts), "order1_bits": max(0.0, _entropy(self.pairs) - _entropy(table.sum(1)))}


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def _held_out(hashes: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Select held-out documents; never all, and at least one content if there are two."""
    held = hashes < np.uint64(int(fraction * 2**64))
    if fraction and not held.any():
        held = hashes == hashes.min()
    return hashes < hashes.max() if held.all() and fraction else held


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# --------------------------------------------------------------------------------------------------- errors


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(f"the corpus needs the package '{package}' ({error}); pip install 'shardwise[hf]'") from None


@contextmanager
def _loading(source: _Source) -> Iterator[Any]:
    """Import ``datasets`` offline and silent, and convert its failures to our errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = _need("datasets")
        config, log, bars = datasets.config, datasets.utils.logging, not datasets.are_progress_bars_disabled()
        before = config.HF_HUB_OFFLINE, config.HF_DATASETS_OFFLINE, log.get_verbosity()
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = True
        log.set_verbosity(log.CRITICAL + 1)
        datasets.disable_progress_bars()
        try:
            yield datasets
        except Exception as error:
            chain: list[BaseException] = [error]
            while below := chain[-1].__cause__ or chain[-1].__context__:
                chain.append(below)
            for cause in chain:
                if isinstance(cause, ShardwiseError) or getattr(cause, "errno", None) in _FULL | _DENIED:
                    raise cause from None
            reason = f"{_first_line(chain[-1])}; repair it or set data.format"
            raise DataError(f"{source.where} cannot be read as {source.format}: {reason}") from None
        finally:
            config.HF_HUB_OFFLINE, config.HF_DATASETS_OFFLINE = before[:2]
            log.set_verbosity(before[2])
            if bars:
                datasets.enable_progress_bars()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"corpus cache '{cache}' cannot be written: {error.strerror or error}"
        if error.errno in _DENIED:
            raise UserError(f"{what}; use a folder you may write") from None
        raise MachineError(f"{what}; free space or use another folder") from None
