"""Files of a data set, and their rows one after the other: text, JSON lines, CSV, Parquet, a saved ``datasets`` folder.

Rows are read as they are asked for: nothing is converted first, and no file is read twice.
"""

from __future__ import annotations

import csv
import errno
import importlib
import importlib.util
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from shardwise.errors import DataError, ShardwiseError
from shardwise.train.config_data import DataTable
from shardwise.train.data.documents import Columns, Document, RowProblem, columns_of, document
from shardwise.train.data.paths import documents_at, matches

FULL = {errno.ENOSPC, errno.EDQUOT}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
MOST_PROBLEMS = 20
_ROWS = 128  # rows of a batch
_SOURCE_SKIP = ["site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"]
_FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}  # else text


@dataclass
class BadRows:
    """Rows that cannot be trained on, with their places: the first are kept, all are counted."""

    skip: bool
    problems: list[str] = field(default_factory=list)
    number: int = 0

    def add(self, problem: str) -> None:
        """Count a row.

        Raises:
            DataError: rows are not skipped, and there are enough to show.
        """
        self.number += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)
        if not self.skip and self.number == MOST_PROBLEMS:
            self.refuse()

    def refuse(self) -> None:
        """Raise all of them, if rows are not skipped.

        Raises:
            DataError: there are some.
        """
        if self.problems and not self.skip:
            more = " (and perhaps more)" if self.number == MOST_PROBLEMS else ""
            last = f'repair these rows{more}, or leave them out with data.bad_rows = "skip"'
            raise (
                DataError(*self.problems, last) if len(self.problems) > 1 else DataError(f"{self.problems[0]}; {last}")
            )


@dataclass(frozen=True)
class Batch:
    """Documents, and how many bytes of the files (rows of a saved data set) were read so far."""

    documents: list[Document]
    read: int


@dataclass(frozen=True)
class DataSource:
    """Files of one config key: ``where`` is key and value, ``files`` are sorted, below ``root``."""

    where: str
    format: str
    root: Path
    files: tuple[str, ...]
    split: str | None = None

    def listing(self) -> list[Any]:
        """Return what changes when the files do."""
        facts = [[name, s.st_size, s.st_mtime_ns] for name in self.files for s in [(self.root / name).stat()]]
        return [self.format, str(self.root.resolve()), facts, *([self.split] if self.split else [])]

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum((self.root / name).stat().st_size for name in self.files)

    def columns(self, table: DataTable) -> Columns | None:
        """Find what the rows hold, from the first one; ``None`` without rows.

        Raises:
            DataError: no column fits.
        """
        asked = table.text_field if "text_field" in table.model_fields_set else None
        if self.format == "text":
            return Columns("text", {"text": "text"})
        with _reading(self):
            for known, at in _first_columns(self):
                where = f"{self.where}{at}"
                return columns_of(known, asked, {str(part): name for part, name in table.columns.items()}, where)
        return None

    def is_rendered(self, columns: Columns) -> bool:
        """Return whether rows pass through a chat template; of prompts and completions, the first row tells.

        Raises:
            DataError: a file cannot be read.
        """
        if columns.kind != "completion":
            return columns.kind != "text"
        with _reading(self):
            first = next((row for _, row, _ in _rows(self, columns)), {})
        return any(isinstance(first.get(name), list) for name in columns.names.values())

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any], int]]:
        """Yield the place of each row, all its columns, and the bytes of the files read so far.

        Raises:
            DataError: a file cannot be read.
        """
        with _reading(self):
            yield from _rows(self, None)

    def saved(self) -> Any:
        """Open a folder of ``datasets``.

        Raises:
            DataError: it cannot be read.
        """
        with _reading(self):
            return _saved(self)

    def batches(self, columns: Columns, bad: BadRows) -> Iterator[Batch]:
        """Yield the documents in order, without empty ones.

        Raises:
            DataError: a file cannot be read, or has rows that cannot be trained on.
        """
        with _reading(self):
            found: list[Document] = []
            read = 0
            for at, row, read in _rows(self, columns):
                try:
                    one = document(row, columns, at)
                except RowProblem as problem:
                    bad.add(f"{self.where}: {at} {problem}")
                    continue
                if one is not None:
                    found.append(one)
                if len(found) == _ROWS:
                    yield Batch(found, read)
                    found = []
            if found:
                yield Batch(found, read)


# ---------------------------------------------------------------------------------------------- which files


def find_source(value: str, key: str, table: DataTable, cache: Path) -> DataSource:
    """Find the files of a path, in order; hidden files and the cache itself are left out.

    Raises:
        DataError: there are none, or one cannot be read.
    """
    where, skip, suffix = f"{key} '{value}'", list[str](), ""
    form: str = table.format
    if value.startswith("python:"):
        root, skip, suffix = _python_source(value.removeprefix("python:"), where), _SOURCE_SKIP, ".py"
    else:
        root = documents_at(value, where)
    saved = (root / "state.json").is_file() or (root / "dataset_dict.json").is_file()
    if form == "dataset" and not saved:
        raise DataError(f"{where} is not a saved dataset; give a folder that datasets.save_to_disk wrote")
    if table.split is not None and not (root / "dataset_dict.json").is_file():
        raise DataError(f"data.split '{table.split}': {where} has no splits, which a folder of datasets may; remove it")
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
    return DataSource(where, form, folder, tuple(names), table.split)


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


# ------------------------------------------------------------------------------------------------------ rows


def _rows(source: DataSource, columns: Columns | None) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield the place, the columns and the bytes read so far of each row; all columns if none are chosen."""
    if source.format == "dataset":
        yield from _saved_rows(source, columns)
        return
    before = 0
    for name in source.files:
        path = source.root / name
        reader = {"text": _text_rows, "jsonl": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}[source.format]
        for at, row, read in reader(source, path, name, columns):
            yield at, row, before + read
        before += path.stat().st_size


_RowsOfFile = Iterator[tuple[str, Mapping[str, Any], int]]


def _text_rows(source: DataSource, path: Path, name: str, columns: Columns | None) -> _RowsOfFile:
    data = path.read_bytes()
    yield f"file '{name}'", {"text": data.decode("utf-8", errors="replace")}, len(data)


def _json_rows(source: DataSource, path: Path, name: str, columns: Columns | None) -> _RowsOfFile:
    """Yield rows of JSON lines, or of a file that is one JSON list."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        full = file.read(4096).lstrip().startswith("[")
        file.seek(0)
        read = 0
        for number, text in enumerate([file.read()] if full else file, 1):
            at = f"file '{name}'" if full else f"file '{name}', line {number}"
            read += len(text)
            try:
                rows = json.loads(text) if text.strip() else []
            except json.JSONDecodeError as error:
                raise DataError(f"{source.where}: {at} is not JSON: {error.msg}; repair it") from None
            except RecursionError:
                raise DataError(f"{source.where}: {at} is not usable JSON: it is nested too deep; repair it") from None
            for index, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
                place = f"{at}, row {index}" if isinstance(rows, list) else at
                if not isinstance(row, dict):
                    raise DataError(f"{source.where}: {at} holds {row!r:.40}, not an object; repair it")
                yield place, _checked(source, row, columns, place), read


def _csv_rows(source: DataSource, path: Path, name: str, columns: Columns | None) -> _RowsOfFile:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    read = 0
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:

        def lines() -> Iterator[str]:
            nonlocal read
            for line in file:
                read += len(line)
                yield line

        reader = csv.DictReader(lines(), delimiter=delimiter, strict=True)
        try:
            for row in reader:
                at = f"file '{name}', line {reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"{source.where}: {at} has another number of columns than the first line names "
                        f"({', '.join(map(str, reader.fieldnames or ()))}); repair it"
                    )
                yield at, _checked(source, row, columns, at), read
        except csv.Error as error:
            raise DataError(
                f"{source.where}: file '{name}', line {reader.line_num} is not CSV: {error}; repair it"
            ) from None


def _parquet_rows(source: DataSource, path: Path, name: str, columns: Columns | None) -> _RowsOfFile:
    parquet = need("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        wanted = [] if columns is None else [*columns.names.values(), *chain.from_iterable(columns.optional.values())]
        chosen = (
            None if columns is None else [name for name in dict.fromkeys(wanted) if name in file.schema_arrow.names]
        )
        if columns is not None and columns.kind == "text":
            _check_text(source, columns, {field.name: field.type for field in file.schema_arrow}, f" (file '{name}')")
        number, size = 0, path.stat().st_size
        for rows in file.iter_batches(batch_size=_ROWS, columns=chosen):
            read = size * (number + rows.num_rows) // max(1, file.metadata.num_rows)
            for row in rows.to_pylist():
                number += 1
                yield f"file '{name}', row {number}", _without_none(row), read


def _saved_rows(source: DataSource, columns: Columns | None) -> _RowsOfFile:
    data = _saved(source)
    size, number = source.num_bytes, 0
    if columns is not None:
        if columns.kind == "text":
            _check_text(source, columns, {name: getattr(f, "dtype", f) for name, f in data.features.items()}, "")
        data = data.select_columns(list(columns.names.values()))
    for rows in data.iter(batch_size=_ROWS):
        names = list(rows)
        for values in zip(*rows.values(), strict=True):
            number += 1
            yield f"row {number}", _without_none(dict(zip(names, values, strict=True))), size * number // len(data)


def _without_none(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without the keys that nested objects have only because those of other rows do."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(one) for key, one in value.items() if one is not None}
        return [kept(one) for one in value] if isinstance(value, list) else value

    return {name: kept(value) for name, value in row.items()}


def _saved(source: DataSource) -> Any:
    datasets = need("datasets")
    data = datasets.load_from_disk(str(source.root))
    if isinstance(data, datasets.DatasetDict):
        split = source.split or ("train" if "train" in data or len(data) > 1 else next(iter(data)))
        if split not in data:
            splits = ", ".join(data)
            if source.split is None:
                fix = f"set data.split, or give the folder of one split: {splits}"
                raise DataError(f"{source.where} has several splits and no 'train'; {fix}")
            raise DataError(f"data.split '{split}' is none of {source.where}, which has {splits}")
        data = data[split]
    return data


def _first_columns(source: DataSource) -> Iterator[tuple[list[str], str]]:
    """Yield the columns of the first row or table, and its place for messages; nothing without rows."""
    if source.format == "dataset":
        yield list(_saved(source).column_names), ""
    elif source.format == "parquet":
        for name in source.files:
            yield list(need("pyarrow.parquet").read_schema(source.root / name).names), f" (file '{name}')"
    else:
        for at, row, _ in _rows(source, None):
            yield [str(key) for key in row], f" ({at})"


def _checked(source: DataSource, row: Mapping[str, Any], columns: Columns | None, at: str) -> Mapping[str, Any]:
    """Refuse a row of text without the text column, or where it holds something else."""
    if columns is not None and columns.kind == "text":
        name = columns.names["text"]
        columns_of(list(row), name, {}, f"{source.where} ({at})")
        if not isinstance(row[name], str | None):
            raise _not_text(name, f"{type(row[name]).__name__} ({at})")
    return row


def _check_text(source: DataSource, columns: Columns, types: Mapping[str, Any], at: str) -> None:
    """Refuse a table whose text column is missing or holds something else."""
    name = columns.names["text"]
    columns_of(list(types), name, {}, f"{source.where}{at}")
    if "string" not in str(types[name]):
        raise _not_text(name, str(types[name]))


def _not_text(name: str, got: str) -> DataError:
    return DataError(f"data.text_field '{name}' holds {got}, not text; set it to a text column")


# ---------------------------------------------------------------------------------------------------- errors


def need(package: str) -> Any:
    """Import a package of the extra ``hf``.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(f"the corpus needs the package '{package}' ({error}); pip install 'shardwise[hf]'") from None


@contextmanager
def _reading(source: DataSource) -> Iterator[None]:
    """Convert failures of the libraries to our errors; ``datasets`` is offline and silent meanwhile."""
    with _quiet() if source.format == "dataset" else nullcontext():
        try:
            yield
        except Exception as error:
            causes: list[BaseException] = [error]
            while below := causes[-1].__cause__ or causes[-1].__context__:
                causes.append(below)
            for cause in causes:
                if isinstance(cause, ShardwiseError) or getattr(cause, "errno", None) in FULL | DENIED:
                    raise cause from None
            reason = f"{first_line(causes[-1])}; repair it or set data.format"
            raise DataError(f"{source.where} cannot be read as {source.format}: {reason}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Import ``datasets`` offline, without its log and progress bars."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = need("datasets")
        config, log, bars = datasets.config, datasets.utils.logging, not datasets.are_progress_bars_disabled()
        before = config.HF_HUB_OFFLINE, config.HF_DATASETS_OFFLINE, log.get_verbosity()
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = True
        log.set_verbosity(log.CRITICAL + 1)
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            config.HF_HUB_OFFLINE, config.HF_DATASETS_OFFLINE = before[:2]
            log.set_verbosity(before[2])
            if bars:
                datasets.enable_progress_bars()


def first_line(error: BaseException) -> str:
    """Return the first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
