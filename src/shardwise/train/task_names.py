"""Names of the tasks that a model is trained for, and which one a model's configuration names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args

from shardwise.document import read_json

TaskName = Literal[
    "causal-lm", "sequence-classification", "token-classification", "seq2seq", "masked-lm", "image-classification"
]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
CLASSIFIES: tuple[TaskName, ...] = ("sequence-classification", "token-classification", "image-classification")
"""Tasks whose model ends in a new head, with an output for each class."""
_ARCHITECTURES: dict[str, TaskName] = {
    r"ForSequenceClassification$": "sequence-classification",
    r"ForTokenClassification$": "token-classification",
    r"For(Masked|PreTraining)LM$|ForMaskedLM$": "masked-lm",
    r"ForImageClassification(WithTeacher)?$": "image-classification",
    r"ForConditionalGeneration$": "seq2seq",
}


def task_of_architecture(keys: dict[str, Any]) -> TaskName:
    """Return the task that ``architectures`` of a configuration names; a causal language model if it names no other.

    ``ForConditionalGeneration`` is also the name of models that read images or sound; only an encoder and a decoder of
    text are a seq2seq model here.
    """
    named = keys.get("architectures") or []
    for name in [named] if isinstance(named, str) else named if isinstance(named, list) else []:
        for pattern, task in _ARCHITECTURES.items():
            if re.search(pattern, str(name)):
                text_only = not any(key in keys for key in ("vision_config", "audio_config", "num_mel_bins"))
                return task if task != "seq2seq" or text_only else "causal-lm"
    return "causal-lm"


def task_of_file(config: str) -> TaskName:
    """Return the task of ``model.config``; a file that cannot be read is refused later, with its reason."""
    path = Path(config)
    try:
        keys = read_json(path / "config.json" if path.is_dir() else path)
    except (OSError, ValueError):
        return "causal-lm"
    return task_of_architecture(keys) if isinstance(keys, dict) else "causal-lm"
