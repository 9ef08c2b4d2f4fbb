"""Model of a config: from a Hugging Face configuration, or from the user's own factory."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.checkpoint.added_tokens import AddedTokens
from shardwise.document import read_json
from shardwise.errors import ModelError, did_you_mean
from shardwise.import_object import check_kwargs, load_object
from shardwise.model.call_module import call
from shardwise.model.grouped_products import GroupedProducts
from shardwise.train.causal import configuration_file
from shardwise.train.config import Config
from shardwise.train.tasks.pretrained import pretrained
from shardwise.train.tasks.registry import configuration_of, row_task

MOST_ADDED = 4  # at most one new row to so many that were trained


def model_factory(config: Config, vocab_size: int) -> Callable[[], nn.Module]:
    """Return a function that builds the model with random weights, after checking the config.

    Nothing is downloaded and no code of the model's folder is run.

    Raises:
        ModelError: there is no such configuration, or it does not match the data.
        ConfigError: the factory cannot be imported, or does not accept the arguments.
    """
    table = config.model
    if table.factory is not None:
        made = load_object(table.factory, "model.factory")
        check_kwargs(made, f"model.factory '{table.factory}'", **table.kwargs)
        return lambda: _checked_module(made(**table.kwargs), f"model.factory '{table.factory}'", table.freeze)
    facts, task = configuration_of(config), row_task(config)
    problems = []
    added = added_tokens(config, vocab_size)
    if added is not None and (problem := _not_added(added, config)):
        problems.append(problem)
    longest = getattr(facts, "max_position_embeddings", None)
    if longest is not None and longest < config.data.seq_len:
        problems.append(
            f"data.seq_len {config.data.seq_len} is longer than the model's max_position_embeddings {longest}; "
            f"set data.seq_len to {longest} or less"
        )
    if problems:
        raise ModelError(*problems)
    if added is not None:
        facts.vocab_size = added.new

    def build() -> nn.Module:
        from transformers import AutoModelForCausalLM

        given = {"dtype": torch.float32, "trust_remote_code": False}
        module = AutoModelForCausalLM.from_config(facts, **given) if task is None else task.build(facts)
        return _checked_module(module, f"model.config '{table.config}'", table.freeze)

    return build


def added_tokens(config: Config, vocab_size: int) -> AddedTokens | None:
    """Return how many ids of the tokenizer have no row in the embedding of ``model.config``; ``None`` without any."""
    facts = configuration_of(config)
    known = getattr(facts, "vocab_size", None) or getattr(getattr(facts, "text_config", None), "vocab_size", None)
    return None if known is None or known >= vocab_size else AddedTokens(known, vocab_size)


def _not_added(added: AddedTokens, config: Config) -> str:
    """Return why the embedding is not resized: it is not read, or the tokenizer is another model's."""
    told = f"vocab_size {added.old} is smaller than the tokenizer's {added.new}"
    where = f"model.config '{config.model.config}': {told}"
    if getattr(configuration_of(config), "vocab_size", None) is None:
        return f"{where}, and an embedding whose size is in text_config is not resized; set it to {added.new} or more"
    if config.model.weights is None:
        return f"{where}; set it to {added.new} or more"
    if added.count * MOST_ADDED > added.old:
        return (
            f"{where}, so more than 1 in {MOST_ADDED} of its rows would be new, as if data.tokenizer "
            f"'{config.data.tokenizer}' were another model's; give that of the model, with tokens added to it"
        )
    return ""


def pretrained_factory(config: Config, vocab_size: int, log: Callable[[str], None]) -> Callable[[], nn.Module]:
    """Return a function that builds the model of a row task with the weights of ``model.weights``.

    ``log`` is told what is new in it.
    """
    task, table = row_task(config), config.model
    facts, added = configuration_of(config), added_tokens(config, vocab_size)
    assert task is not None and table.weights is not None
    weights = table.weights
    return lambda: _checked_module(
        pretrained(task, facts, weights, added, log), f"model.config '{table.config}'", table.freeze
    )


def model_facts(config: Config, vocab_size: int) -> dict[str, Any]:
    """Describe how the model is built, for readers of the checkpoint.

    See `checkpoint.format.Manifest`.
    """
    table = config.model
    if table.factory is not None:
        return {"kind": "factory", "factory": table.factory, "kwargs": table.kwargs}
    keys, added = read_json(configuration_file(Path(str(table.config)))), added_tokens(config, vocab_size)
    told = {} if added is None else added.entry
    return {"kind": "transformers", "config": keys if added is None else added.config(keys), **told}


def _checked_module(module: Any, where: str, freeze: list[str]) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ModelError(f"{where} returned a {type(module).__name__}; it must return a torch.nn.Module")
    names = dict(module.named_parameters())
    for pattern in freeze:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            hint = did_you_mean(pattern, names) or f"; names are such as {', '.join(list(names)[:3])}"
            raise ModelError(f"model.freeze '{pattern}' matches no parameter{hint}")
        for name in matched:
            names[name].requires_grad_(False)
    if freeze and not any(p.requires_grad for p in names.values()):
        raise ModelError(f"model.freeze {freeze} leaves no parameter to train; take patterns out of it")
    return module


def forward_bytes(
    factory: Callable[[], nn.Module],
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    sample: tuple[Any, torch.Tensor],
    *,
    num_outputs: int,
    dtype: torch.dtype,
    prepare: Callable[[nn.Module], object],
    any_outputs: bool = False,
) -> tuple[int, int] | None:
    """Estimate the bytes of one sample's fake forward: saved for backward, and the fp32 logits.

    ``sample`` are inputs and labels. Every saved storage counts once; parameters do not count. ``prepare`` may change
    the module first (recompute). With ``any_outputs`` the outputs need not be logits, which then count for nothing.
    Excludes backward's own temporaries, and attention's where the device has another kernel than the CPU.
    ``None`` if the model does not run under fake tensors.

    Raises:
        ModelError: the model's output is not logits of ``num_outputs`` tokens or classes.
    """
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), GroupedProducts():
        warnings.simplefilter("ignore")
        try:
            module = factory()
            prepare(module)
            own = {p.untyped_storage()._cdata for p in [*module.parameters(), *module.buffers()]}
            storages: dict[int, torch.UntypedStorage] = {}

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    storages[storage._cdata] = storage
                return tensor

            inputs, labels = sample
            narrow = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), narrow:
                outputs = call(module, inputs)
                logits = None if any_outputs else _checked_logits(outputs, labels, num_outputs)
                loss(outputs, labels)
        except ModelError:
            raise
        except Exception:  # it need not support fake tensors
            return None
    found = 0 if logits is None else logits.numel() * torch.float32.itemsize
    return sum(storage.nbytes() for storage in storages.values()), found


def _checked_logits(outputs: Any, labels: torch.Tensor, num_outputs: int) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", None)
    of_tokens = labels.ndim > 1
    form = "[batch, length, vocabulary]" if of_tokens else "[batch, classes]"
    fix = f"it must return logits {form}, or an object that has them as .logits"
    if not isinstance(logits, torch.Tensor):
        raise ModelError(f"the model's forward returned a {type(outputs).__name__}; {fix}")
    if logits.ndim < 2 or logits.shape[:-1].numel() != labels.numel():
        what = "ids" if of_tokens else "labels"
        raise ModelError(f"the model's forward returned {list(logits.shape)} for {what} {list(labels.shape)}; {fix}")
    if logits.shape[-1] < num_outputs:
        if not of_tokens:
            raise ModelError(
                f"the model's forward returned logits of {logits.shape[-1]} classes, but the data has {num_outputs}; "
                f"give the model {num_outputs} or more"
            )
        raise ModelError(
            f"the model's forward returned logits of {logits.shape[-1]} tokens, but the tokenizer has {num_outputs}; "
            f"give the model a vocabulary of {num_outputs} or more"
        )
    return logits
