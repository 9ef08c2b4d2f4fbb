"""Export at the end of ``shardwise train``: a folder that transformers and servers load, with the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from rich.console import Console

from shardwise.checkpoint.format import newest, step_folder
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.cli.checkpoint import run_convert, run_merge
from shardwise.errors import DataError, MachineError
from shardwise.run.checks import adapter_of
from shardwise.run.run_summary import summary_of
from shardwise.train.config import Config
from shardwise.train.data.corpus import Corpus, open_corpus
from shardwise.train.data.encode import Encoder
from shardwise.train.data.tokenizer import TOKENIZER_NAMES, save_tokenizer, tokenizer_files
from shardwise.train.run_files import RunFile

FOLDER = "model"
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_model(config: Config, console: Console, *, as_json: bool) -> Path | None:
    """Write ``train.export`` below the run folder, from the best checkpoint if there is one; once.

    The weights that were written are compared with the checkpoint's, and the outputs of the model as transformers loads
    it with those of the run's model.

    Raises:
        UserError: the model cannot be exported.
        CheckpointError: a file is damaged, or the folder cannot be written.
    """
    kind, output = config.train.export, Path(config.train.output)
    if kind is None:
        return None
    found = summary_of(config)
    folder = folder_of(config.checkpoints)
    step = None if found is None else (found[0].get("best") or {}).get("step")
    source = newest(folder) if step is None else folder / step_folder(step)
    target = output / FOLDER
    if source is None or _is_of(target, str(source), kind):
        return None
    if target.exists():
        shutil.rmtree(target)
    which = "best" if step is not None else "last"
    console.print(f"export: {kind} folder '{target}' from the {which} checkpoint, '{source}'", markup=False)
    adapters = adapter_of(config) != "none"
    if kind == "hf" and adapters:
        run_merge(str(source), str(target), model=config.model.config, as_json=False)
    else:
        run_convert(str(source), str(target), to=kind, model=config.model.config, as_json=False)
    for file in [file for file in target.iterdir() if file.name.startswith(TOKENIZER_NAMES)]:
        file.unlink()  # that of the model's folder, which may be another
    save_tokenizer(config.data.tokenizer, config.data.chat_template, target)
    console.print(f"export: tokenizer of data.tokenizer '{config.data.tokenizer}' is beside it", markup=False)
    if kind == "hf":
        stop_where_answers_end(config, target, console)
    try:
        (target / "shardwise.json").write_text(
            json.dumps(
                {"schema": 1, "source": str(source), "kind": kind, "tokenizer": [f.name for f in _tokenizer(config)]}
            )
        )
    except OSError as error:
        raise MachineError(f"'{target}' cannot be written: {error.strerror}; make room, and run again") from None
    return target


def stop_where_answers_end(config: Config, target: Path, console: Console) -> None:
    """Let generation stop at the token that ended the answers in training, where the model's own end is another.

    A base model's is often that of a document, and would never come: its answers would go on and on.
    """
    corpus = _corpus(config)
    if corpus is None or corpus.kind == "text":
        return
    encoder = Encoder(config.data.tokenizer, corpus.kind, config.data.chat_template, "auto")
    end = encoder.end_of_answers()
    if end is None:
        return
    facts, file = json.loads((target / "config.json").read_text()), target / "generation_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    settings = {key: facts[key] for key in _SPECIAL if facts.get(key) is not None} | settings
    known = settings.get("eos_token_id")
    ids = known if isinstance(known, list) else [] if known is None else [known]
    if end in ids:
        return
    settings["eos_token_id"] = [*ids, end]
    settings.pop("_from_model_config", None)
    file.write_text(json.dumps(settings, indent=2) + "\n")
    console.print(
        f"export: generation stops at {encoder.tokenizer.decode(np.array([end]))!r} (token {end}), where answers end "
        f"in training; the model's own end is {', '.join(map(str, ids)) or 'unknown'}",
        markup=False,
    )


def _corpus(config: Config) -> Corpus | None:
    """Return the data of the run; ``None`` where it was deleted, or is of another task."""
    try:
        job = json.loads((Path(config.train.output) / RunFile.JOB).read_text())
        return open_corpus(Path(job["corpus"]))
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None


def _tokenizer(config: Config) -> list[Path]:
    return tokenizer_files(config.data.tokenizer)


def _is_of(target: Path, source: str, kind: str) -> bool:
    """Return whether the folder is a complete export of this checkpoint, of this kind."""
    try:
        receipt = json.loads((target / "shardwise.json").read_text())
        return bool((receipt["source"], receipt["kind"]) == (source, kind))
    except (OSError, ValueError, KeyError, TypeError):
        return False
