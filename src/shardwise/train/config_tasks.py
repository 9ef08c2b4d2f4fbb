"""Which keys of a config go with its task."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ConfigError, PlanError
from shardwise.plan.strategy import Strategy, parse_strategy
from shardwise.train.task_names import CLASSIFIES, TaskName, task_of_file
from shardwise.units import listed

_OF_TASKS: dict[str, tuple[TaskName, ...]] = {
    "target_len": ("seq2seq",),
    "mask_share": ("masked-lm",),
    "resize": ("image-classification",),
    "loss_on": ("causal-lm",),
    "chat_template": ("causal-lm",),
    "mask_borders": ("causal-lm",),
    "sources": ("causal-lm",),
    "pack": ("causal-lm", "masked-lm"),
}
_PARTS: dict[TaskName, tuple[str, ...]] = {
    "causal-lm": ("messages", "prompt", "completion", "instruction", "input", "output", "tools"),
    "sequence-classification": ("text", "pair", "label"),
    "token-classification": ("tokens", "tags"),
    "seq2seq": ("source", "target"),
    "masked-lm": ("text",),
    "image-classification": ("image", "label"),
}


_NO_LENGTH = "data.seq_len: is missing; add it to the config file"


def length_problems(document: dict[str, Any]) -> list[str]:
    """Why a config file that has other problems lacks the length of its samples, too."""
    model, data = document.get("model"), document.get("data")
    if not isinstance(data, dict) or "seq_len" in data:
        return []
    named, config = (model.get(key) for key in ("task", "config")) if isinstance(model, dict) else (None, None)
    task = named if named not in (None, "auto") else task_of_file(config) if isinstance(config, str) else "causal-lm"
    return [] if task == "image-classification" else [_NO_LENGTH]


def task_problems(config: Any) -> list[str]:
    """Why keys of a ``Config`` cannot be used with its task."""
    task: TaskName = config.model.trained_task
    data, given = config.data, config.data.model_fields_set
    problems = [_NO_LENGTH] if "seq_len" not in given and task != "image-classification" else []
    for key, tasks in _OF_TASKS.items():
        if key in given and task not in tasks and getattr(data, key) not in ("auto", None):
            problems.append(f"'data.{key}' does nothing for the task {task}, only for {listed(tasks)}; remove it")
    for key in ("seq_len", "tokenizer", "text_field"):
        if key in given and task == "image-classification":
            problems.append(f"'data.{key}' does nothing for the task {task}; remove it")
    if task == "masked-lm" and data.pack == "isolated":
        problems.append(
            "'data.pack' is isolated, and a masked language model's samples are joined or none; choose one of these"
        )
    parts = _PARTS[task]
    if wrong := [part for part in data.columns if part not in parts]:
        problems.append(
            f"'data.columns' names {listed(wrong)}, which the task {task} does not read; it reads {listed(parts)}"
        )
    problems += _plain_loss_problems(config, task)
    return problems + ([] if task == "causal-lm" else _other_problems(config, task))


def _plain_loss_problems(config: Any, task: TaskName) -> list[str]:
    """Why options of causal language models' usual loss and evaluation are set where another is used."""
    if task == "causal-lm" and config.model.loss is None:
        return []
    what = f"the task {task}" if task != "causal-lm" else f"model.loss '{config.model.loss}'"
    return [
        f"'train.{key}' is for the usual loss of causal-lm, and not for {what}; remove it"
        for key in ("label_smoothing", "z_loss", "neftune_alpha", "metrics", "generate")
        if getattr(config.train, key)
    ]


def refuse_other_tasks(config: Any, verb: str) -> None:
    """Refuse a ``Config`` whose task or loss a verb does not know.

    Raises:
        ConfigError: it is not causal language modelling with its usual loss.
    """
    model = config.model
    if model.trained_task == "causal-lm" and model.loss is None:
        return
    if model.trained_task == "causal-lm":
        what = f"and model.loss is '{model.loss}'"
    else:
        what = f"and the task of this config is {model.trained_task}"
    raise ConfigError(
        f"shardwise {verb} knows causal language models with their usual loss, {what}; shardwise train --dry-run plans "
        "it, and the receipts of each run check it"
    )


def _other_problems(config: Any, task: TaskName) -> list[str]:
    """Why the strategy or the loss chunks are for causal language models only."""
    problems = []
    if config.train.export is not None:
        problems.append(f"'train.export' is for causal-lm, and the task is {task}; use shardwise checkpoint convert")
    if config.train.loss_chunks > 1:
        problems.append(f"'train.loss_chunks' is for causal-lm, and the task is {task}; remove it")
    strategy = _strategy(config.parallel.strategy)
    if strategy is not None and strategy.cp > 1:
        problems.append(f"'parallel.strategy' {strategy} splits sequences of causal-lm, and the task is {task}")
    if strategy is not None and strategy.adapter != "none" and task in CLASSIFIES:
        problems.append(
            f"'parallel.strategy' {strategy} freezes all but the adapters, and the head of a {task} model is new and "
            f"must be trained; use {strategy.model_copy(update={'adapter': 'none'})}"
        )
    return problems


def _strategy(named: str) -> Strategy | None:
    try:
        return None if named == "auto" else parse_strategy(named)
    except PlanError:
        return None
