"""Pretrained weights under a new head: transformers loads what a folder has, and the rest begins at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.added_tokens import AddedTokens
from shardwise.errors import ModelError
from shardwise.model.read import find_blocks
from shardwise.train.config import Config
from shardwise.train.data.sources import first_line
from shardwise.train.tasks.task import Task

_SHOWN = 6


def is_pretrained(task: Task | None, config: Config) -> bool:
    """Return whether ``model.weights`` is a Hugging Face folder for a model with another head, perhaps."""
    folder = None if config.model.weights is None else Path(config.model.weights).expanduser()
    return (
        task is not None
        and config.model.config is not None
        and folder is not None
        and (folder / "config.json").is_file()
        and any(folder.glob("*.safetensors"))
    )


def pretrained(task: Task, facts: Any, folder: str, added: AddedTokens | None, log: Callable[[str], None]) -> nn.Module:
    """Build the model of ``task`` with the weights of ``folder``; say what is new and what was not used.

    Only safetensors are read, and no code of the folder runs. Rows of ``added`` tokens are the mean of the others.

    Raises:
        ModelError: the weights are not of this model: parameters of its blocks are missing, or have other shapes.
    """
    import transformers

    where = f"model.weights '{folder}'"
    try:
        model, info = getattr(transformers, task.auto_class).from_pretrained(
            folder,
            config=facts,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{where} cannot be loaded for the task {task.name}: {first_line(error)}") from None
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    blocks = tuple(f"{name}." for name in find_blocks(model))
    if lost := [name for name in missing if name.startswith(blocks)]:
        raise ModelError(
            f"{where} is not of this model: it lacks {_some(lost)} of its blocks; give other weights, or the "
            "configuration that these were saved with"
        )
    if missing:
        log(f"{where} lacks {_some(missing)}: trained from random values")
    if unused:
        log(f"{where} also has {_some(unused)}: not used")
    if added is not None:
        model.resize_token_embeddings(added.new, mean_resizing=False)
        with torch.no_grad():
            for part in (model.get_input_embeddings(), model.get_output_embeddings()):
                for rows in part.parameters() if part is not None else ():
                    rows[added.old :] = rows[: added.old].mean(0, dtype=torch.float64)
    trained: nn.Module = model.train()
    return trained


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
