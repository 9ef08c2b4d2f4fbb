"""How a training script reads a config's documents: itself, or as rows that are written beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import PlanError
from shardwise.train.config import Config
from shardwise.train.data.corpus import Corpus
from shardwise.train.data.samples import NumberedSamples, samples_for
from shardwise.train.data.sources import DataSource, find_source

_FEW = 4  # files that the script names; more are listed by a pattern
_PYTHON_SKIP = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_PIECE = 1024  # samples written at a time


@dataclass(frozen=True)
class ScriptData:
    """Documents of a script.

    ``kind`` is ``files`` (each a document), ``lines`` (each a JSON object whose ``text_field`` is one) or ``samples``:
    rows of token ids, with ``positions`` where documents in a row do not see each other. ``files`` are names below
    ``path``; empty for those that end in ``suffix`` and are in no folder of ``skip``. ``tokens`` is the length of the
    training documents.
    """

    kind: str
    path: str
    separator: int
    tokens: int = 0
    tokenizer: str = ""
    files: tuple[str, ...] = ()
    suffix: str = ""
    skip: tuple[str, ...] = ()
    text_field: str = ""
    positions: bool = False
    sides: tuple[str, ...] = field(default=())


def script_data(config: Config, corpus: Corpus, rows: str) -> ScriptData:
    """Choose how the script reads the documents; ``rows`` is the folder for rows that it cannot make itself."""
    found = _own_reading(config, corpus)
    if found is not None:
        return found
    samples = samples_for(corpus, config)
    isolated = isinstance(samples.batch(np.zeros(1, np.int64))[0], dict)
    sides = ("train",) if corpus.heldout is None else ("train", "heldout")
    return ScriptData("samples", rows, corpus.separator, positions=isolated, sides=sides)


def write_rows(config: Config, corpus: Corpus, data: ScriptData, folder: Path) -> None:
    """Write the rows of ``samples`` to ``folder`` as the script loads them, int32 ``.npy`` files."""
    folder.mkdir(parents=True, exist_ok=True)
    for side in data.sides:
        samples = samples_for(corpus, config, heldout=side == "heldout")
        shape = (len(samples), config.data.seq_len)
        names = ("inputs", "labels", *(["positions"] if data.positions else []))
        arrays = {
            name: np.lib.format.open_memmap(folder / f"{side}_{name}.npy", mode="w+", dtype=np.int32, shape=shape)
            for name in names
        }
        for start in range(0, len(samples), _PIECE):
            ids = np.arange(start, min(start + _PIECE, len(samples)))
            for name, values in _parts(samples, ids).items():
                arrays[name][ids] = values
        for array in arrays.values():
            array.flush()


def _parts(samples: NumberedSamples, ids: Any) -> dict[str, Any]:
    inputs, labels = samples.batch(ids)
    if isinstance(inputs, dict):
        return {"inputs": inputs["input_ids"], "labels": labels, "positions": inputs["position_ids"]}
    return {"inputs": inputs, "labels": labels}


def _own_reading(config: Config, corpus: Corpus) -> ScriptData | None:
    """Return how the script reads the documents itself; ``None`` where it would not read the same ones."""
    table = config.data
    plain = corpus.kind == "text" and corpus.train.marks is None and config.packing("text") == "joined"
    if not plain or table.path is None or table.heldout_path is not None or table.mask_borders or corpus.left_out:
        return None
    tokenizer = "" if table.tokenizer == "bytes" else _tokenizer_file(table.tokenizer)
    if tokenizer is None or (corpus.heldout is None) != (table.heldout_fraction == 0):
        return None
    source = find_source(table.path, "data.path", table, Path(config.train.output) / "data")
    common: dict[str, Any] = {"separator": corpus.separator, "tokens": len(corpus.train.tokens), "tokenizer": tokenizer}
    path = str(Path(table.path).expanduser() if not table.path.startswith("python:") else source.root)
    if source.files == (Path(path).name,) and source.root != Path(path):  # data.path is one file
        path = str(source.root)
    if source.format == "jsonl" and len(source.files) <= _FEW and _is_lines(source):
        columns = source.columns(table)
        name = "" if columns is None else columns.names["text"]
        return ScriptData("lines", path, files=source.files, text_field=name, **common)
    if source.format != "text":
        return None
    if len(source.files) <= _FEW:
        return ScriptData("files", path, files=source.files, **common)
    skip = tuple(sorted(_PYTHON_SKIP)) if table.path.startswith("python:") else ()
    suffix = next(iter({Path(name).suffix for name in source.files})) if not table.path.startswith("python:") else ".py"
    same = list_documents(source.root, suffix, set(skip)) == list(source.files)
    return ScriptData("files", path, suffix=suffix, skip=skip, **common) if same else None


def list_documents(root: Path, suffix: str, skip: set[str]) -> list[str]:
    """List documents as the script does: whether these are the config's decides how it reads them."""
    found = []
    for path in root.rglob(f"*{suffix}"):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith(".") for part in parts) and not skip.intersection(parts[:-1]):
            found.append("/".join(parts))
    return sorted(found)


def _tokenizer_file(name: str) -> str | None:
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    return str(file) if file.is_file() else None


def _is_lines(source: DataSource) -> bool:
    """Return whether each file has an object a line, and is not one JSON list."""
    for name in source.files:
        with (source.root / name).open(encoding="utf-8-sig", errors="replace") as file:
            if file.read(4096).lstrip().startswith("["):
                return False
    return True


def no_rows(data: ScriptData, output: Path | None) -> None:
    """Refuse rows without a place for them.

    Raises:
        PlanError: the script goes to stdout, and its rows need a folder beside it.
    """
    if data.kind == "samples" and output is None:
        raise PlanError(
            "the script cannot make these samples from the documents by itself (a chat template, packing, or files "
            "other than text and JSON lines), and reads rows that are written beside it; name its file with -o train.py"
        )
