"""Export at the end of ``shardwise train``: a folder that transformers and servers load, with the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rich.console import Console

from shardwise.checkpoint.format import newest, step_folder
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.cli.checkpoint import run_convert, run_merge
from shardwise.errors import MachineError
from shardwise.run.checks import adapter_of
from shardwise.run.run_summary import summary_of
from shardwise.train.config import Config
from shardwise.train.data.tokenizer import TOKENIZER_NAMES, save_tokenizer, tokenizer_files

FOLDER = "model"


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
    try:
        (target / "shardwise.json").write_text(
            json.dumps(
                {"schema": 1, "source": str(source), "kind": kind, "tokenizer": [f.name for f in _tokenizer(config)]}
            )
        )
    except OSError as error:
        raise MachineError(f"'{target}' cannot be written: {error.strerror}; make room, and run again") from None
    return target


def _tokenizer(config: Config) -> list[Path]:
    return tokenizer_files(config.data.tokenizer)


def _is_of(target: Path, source: str, kind: str) -> bool:
    """Return whether the folder is a complete export of this checkpoint, of this kind."""
    try:
        receipt = json.loads((target / "shardwise.json").read_text())
        return bool((receipt["source"], receipt["kind"]) == (source, kind))
    except (OSError, ValueError, KeyError, TypeError):
        return False
