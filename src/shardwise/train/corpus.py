"""From documents to tokens on disk: read, split by content, tokenise once, then memory-map everywhere.

One process calls `prepare_corpus`; every other one calls `open_corpus` on the folder it returned. Documents come
through the ``datasets`` library, which is not imported when the cache already holds the same corpus.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import stat
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError, MachineError, ShardwiseError, UserError, did_you_mean
from shardwise.train.config import DataTable
from shardwise.units import bytes_text, count_text, seconds_text

_LAYOUT = 1  # of a corpus folder; a change of what is written there makes old folders unused
_REPORT_S = 2.0
_SOURCE_SKIP = ["site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"]
_SUFFIXES = {"jsonl": (".jsonl", ".json"), "parquet": (".parquet",)}
_END_OF_TEXT = ["</s>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]"]


@dataclass(frozen=True)
class Tokens:
    """Documents as one stream of tokens, each document followed by a separator.

    ``tokens`` is a memory map of the smallest unsigned type that holds the vocabulary, [num_tokens]; ``starts``
    is int64, [num_documents + 1]: the index of the first token of each document, then the number of tokens;
    ``num_bytes`` is the length of the documents in UTF-8, in bytes.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    num_bytes: int


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus and where it lies.

    ``order0_bits`` and ``order1_bits`` are the entropy of a byte, and of a byte given the one before it, in bits
    per byte over all documents (training and held-out) joined: what a model without context, or with one byte of
    it, can reach at best. ``heldout`` is ``None`` if nothing is held out.
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
    """Files that were found for a key of the config: ``files`` are relative to ``root`` and sorted."""

    key: str
    value: str
    format: str
    root: Path
    files: tuple[str, ...]

    def listing(self) -> list[Any]:
        stats = [(name, (self.root / name).stat()) for name in self.files]
        return [self.format, str(self.root.resolve()), [[n, s.st_size, s.st_mtime_ns] for n, s in stats]]


def prepare_corpus(table: DataTable, cache: Path, say: Callable[[str], None]) -> Corpus:
    """Tokenise the documents of ``table`` into a folder of ``cache``, or reuse it if nothing changed.

    Documents are in the order of their relative paths, then of the rows in a file; empty ones are left out. Which
    ones are held out depends on their content only, so copies of a document are always on the same side; if the
    fraction selects none (or all), the one with the smallest hash is held out (the largest trained on). The folder
    appears whole or not at all. ``say`` gets one line at the start, one at the end and, while tokenising, at most
    one every two seconds.

    Raises:
        DataError: the corpus or the tokenizer is missing, empty or unreadable.
        UserError: the cache folder cannot be written.
        MachineError: the disk of the cache folder is full.
    """
    source = _find(table.path, "data.path", table, cache)
    heldout = _find(table.heldout_path, "data.heldout_path", table, cache) if table.heldout_path is not None else None
    identity = {
        "layout": _LAYOUT,
        "train": source.listing(),
        "heldout": heldout.listing() if heldout else table.heldout_fraction,
        "text_field": table.text_field,
        "tokenizer": [[file.name, _hash(file.read_bytes())] for file in _tokenizer_files(table.tokenizer)],
    }
    fingerprint = _hash(json.dumps(identity).encode())
    folder = cache / fingerprint[:16]
    if folder.is_dir():
        try:
            return open_corpus(folder)
        except DataError:
            say(f"the corpus in '{folder}' is damaged, preparing it again")
    with _writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            (work / "corpus").mkdir()
            _build(table, source, heldout, work, fingerprint, say)
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
        raise DataError(f"corpus '{cache_folder}' cannot be opened: {reason}; delete the folder and run again") from None


def _open_part(folder: Path, name: str, facts: dict[str, int]) -> Tokens:
    tokens = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    starts = np.load(folder / f"{name}_starts.npy", mmap_mode="r", allow_pickle=False)
    if len(tokens) != facts["num_tokens"] or starts[-1] != len(tokens):
        raise ValueError(f"{name}.npy has {len(tokens)} tokens instead of {facts['num_tokens']}")
    return Tokens(tokens, starts, facts["num_bytes"])


# ---------------------------------------------------------------------------------------------- which files


def _find(value: str, key: str, table: DataTable, cache: Path) -> _Source:
    """The files of a path, in order; hidden files and the cache itself are left out of a folder."""
    if value.startswith("python:"):
        roots = _python_source(value.removeprefix("python:"), key)
        skip, suffix = _SOURCE_SKIP, ".py"
    else:
        roots, skip, suffix = [Path(value).expanduser()], [], ""
    root = roots[0]
    if not root.exists():
        raise DataError(f"{key} '{value}' does not exist; give a file or a folder")
    if root.is_file():
        by_suffix = {ending: name for name, endings in _SUFFIXES.items() for ending in endings}
        form = by_suffix.get(root.suffix, "text") if table.format == "auto" else table.format
        if form == "dataset":
            raise DataError(f"{key} '{value}' is a file, but data.format 'dataset' is a folder; give the folder")
        return _readable(_Source(key, value, form, root.parent, (root.name,)))
    saved = (root / "state.json").is_file() or (root / "dataset_dict.json").is_file()
    if table.format == "dataset" or (table.format == "auto" and saved):
        if not saved:
            raise DataError(f"{key} '{value}' is no saved dataset; write it with datasets.save_to_disk, or set data.format")
        return _readable(_Source(key, value, "dataset", root, tuple(_walk(root, [], cache))))
    include, exclude = [_glob(p) for p in table.include], [_glob(p) for p in table.exclude]
    names = [n for n in _walk(root, exclude, cache, skip) if n.endswith(suffix) and any(p.fullmatch(n) for p in include)]
    if not names:
        rule = f"no file matches data.include {table.include} and not data.exclude {table.exclude}"
        raise DataError(f"{key} '{value}' has no documents: {rule}; patterns are relative to it, such as '**/*.txt'")
    form = table.format
    if form == "auto":
        form = next((f for f, ends in _SUFFIXES.items() if all(n.endswith(ends[0]) for n in names)), "text")
    names = [n for n in names if n.endswith(_SUFFIXES.get(form, ""))] or names
    return _readable(_Source(key, value, form, root, tuple(names)))


def _readable(source: _Source) -> _Source:
    for name in source.files:
        if not os.access(source.root / name, os.R_OK):
            why = "cannot be read" if (source.root / name).exists() else "is a link to nothing"
            raise DataError(f"{source.key} '{source.value}': file '{name}' {why}; repair it or add it to data.exclude")
    return source


def _walk(root: Path, exclude: Sequence[re.Pattern[str]], cache: Path, skip: Sequence[str] = ()) -> list[str]:
    """Relative paths of the plain files below ``root``, sorted; links to folders are not followed."""
    names, avoid = [], cache.resolve()
    for top, folders, files in os.walk(root):
        here = Path(top).relative_to(root).as_posix()
        start = "" if here == "." else f"{here}/"

        def keep(name: str, start: str = start) -> bool:
            return not (name.startswith(".") or any(p.fullmatch(start + name) for p in exclude))

        folders[:] = [f for f in folders if keep(f) and f not in skip and Path(top, f).resolve() != avoid]
        special = (f for f in files if os.path.exists(os.path.join(top, f)))
        unfit = {f for f in special if not stat.S_ISREG(os.stat(os.path.join(top, f)).st_mode)}
        names += [start + f for f in files if keep(f) and f not in unfit]
    return sorted(names)


def _glob(pattern: str) -> re.Pattern[str]:
    """A pattern of relative paths: ``*`` and ``?`` stay in a folder, ``**`` is any number of folders."""
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", pattern, re.DOTALL)
    texts = [p.replace("[!", "[^", 1).replace("\\", r"\\") if len(p) > 2 and p[0] == "[" else re.escape(p) for p in parts]
    return re.compile("".join(known.get(p, t) for p, t in zip(parts, texts, strict=True)), re.DOTALL)


def _python_source(package: str, key: str) -> list[Path]:
    """The standard library's folder, or the folder or file of an installed package, which is not imported."""
    if package == "stdlib":
        return [Path(sysconfig.get_paths()["stdlib"])]
    top, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    fix = "give an installed package with Python source, or 'python:stdlib'"
    if spec is None:
        raise DataError(f"{key} 'python:{package}': package '{top}' is not installed; {fix}")
    inside = [Path(folder).joinpath(*rest) for folder in spec.submodule_search_locations or []]
    found = [p for path in inside for p in (path, path.with_suffix(".py")) if p.exists()]
    if not found and not rest and spec.origin and spec.origin.endswith(".py"):
        found = [Path(spec.origin)]
    if not found:
        raise DataError(f"{key} 'python:{package}': package '{package}' has no source; {fix}")
    return found


# ------------------------------------------------------------------------------------------------ documents


def _load(source: _Source, field: str, cache_dir: Path) -> Any:
    """The documents as a ``datasets.Dataset`` with one column of text, and that column's name."""
    paths = [str(source.root / name) for name in source.files]
    with _loading(source) as datasets:
        if source.format == "dataset":
            data = datasets.load_from_disk(str(source.root))
            if isinstance(data, datasets.DatasetDict):
                if "train" not in data and len(data) != 1:
                    fix = f"give the folder of one split: {', '.join(data)}"
                    raise DataError(f"{source.key} '{source.value}' has several splits and no 'train'; {fix}")
                data = data["train"] if "train" in data else next(iter(data.values()))
            _need_column(source, field, data.column_names, "")
        elif source.format == "parquet":
            for path, name in zip(paths, source.files, strict=True):
                _need_column(source, field, importlib.import_module("pyarrow.parquet").read_schema(path).names, name)
            exact = [re.sub(r"([*?\[])", r"[\1]", path) for path in paths]  # datasets takes a path for a pattern
            data = datasets.Dataset.from_parquet(exact, columns=[field], cache_dir=str(cache_dir))
        else:  # its own reader of text changes line ends, and that of JSON guesses the type of every column
            rows = _text_rows if source.format == "text" else _json_rows
            named = datasets.Features({field: datasets.Value("large_string")})
            given = {"paths": tuple(paths), "source": source, "field": field}
            data = datasets.Dataset.from_generator(rows, named, str(cache_dir), gen_kwargs=given)
        dtype = getattr(data.features[field], "dtype", type(data.features[field]).__name__)
        if "string" not in dtype:
            raise DataError(f"data.text_field '{field}' holds {dtype}, not text; name a column of text")
        return data.select_columns([field])


def _text_rows(paths: Sequence[str], source: _Source, field: str) -> Iterator[dict[str, str]]:
    for path in paths:
        yield {field: Path(path).read_bytes().decode("utf-8", errors="replace")}


def _json_rows(paths: Sequence[str], source: _Source, field: str) -> Iterator[dict[str, str | None]]:
    """Rows of JSON lines, or of a file that is one JSON list; every row must have the field."""
    for path, name in zip(paths, source.files, strict=True):
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            is_list = file.read(4096).lstrip().startswith("[")
            file.seek(0)
            texts = enumerate([file.read()] if is_list else file, 1)
            for number, text in texts:
                where = f"file '{name}'" + ("" if is_list else f", line {number},")
                if not text.strip():
                    continue
                try:
                    rows = json.loads(text)
                except json.JSONDecodeError as error:
                    raise DataError(f"{source.key} '{source.value}': {where} is not JSON: {error.msg}; repair it") from None
                for row in rows if is_list else [rows]:
                    if not isinstance(row, dict):
                        raise DataError(f"{source.key} '{source.value}': {where} has a row that is no object; repair it")
                    _need_column(source, field, row, where)
                    if not isinstance(row[field], str | None):
                        got = type(row[field]).__name__
                        raise DataError(f"data.text_field '{field}' holds {got}, not text, in {where} name a column of text")
                    yield {field: row[field]}


def _need_column(source: _Source, field: str, names: Iterable[str], where: str) -> None:
    known = [str(name) for name in names]
    if field not in known:
        hint = did_you_mean(field, known)
        at = f" ({where.rstrip(',')})" if where else ""
        raise DataError(f"data.text_field '{field}' is not a column of '{source.value}'{at}{hint}; it has: {', '.join(known)}")
