"""The model of a config: from a Hugging Face configuration, or from the user's own factory."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import ModelError, did_you_mean
from shardwise.train.config import Config
from shardwise.train.optimizer import load_object


def model_factory(config: Config, vocab_size: int) -> Callable[[], nn.Module]:
    """A function that builds the model anew, with random weights; checks what can be checked before.

    Nothing is downloaded and no code of the model's folder is run.

    Raises:
        ModelError: there is no such configuration, or it does not go with the data.
        ConfigError: the factory cannot be imported.
    """
    table = config.model
    if table.factory is not None:
        made = load_object(table.factory, "model.factory")
        return lambda: _checked_module(made(**table.kwargs), f"model.factory '{table.factory}'", table.freeze)
    facts = _read_configuration(Path(str(table.config)))
    problems = []
    known = getattr(facts, "vocab_size", None)
    if known is not None and known < vocab_size:
        problems.append(
            f"model.config '{table.config}': vocab_size {known} is smaller than the tokenizer's {vocab_size}; "
            f"set it to {vocab_size} or more"
        )
    longest = getattr(facts, "max_position_embeddings", None)
    if longest is not None and longest < config.data.seq_len:
        problems.append(
            f"data.seq_len {config.data.seq_len} is longer than the model's max_position_embeddings {longest}; "
            f"set data.seq_len to {longest} or less"
        )
    if problems:
        raise ModelError(*problems)

    def build() -> nn.Module:
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_config(facts, dtype=torch.float32, trust_remote_code=False)
        return _checked_module(module, f"model.config '{table.config}'", table.freeze)

    return build


def _read_configuration(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"model.config '{path}': there is no file '{file}'; give a config.json or a folder with one")
    try:
        from transformers import AutoConfig
        from transformers.utils import logging
    except ImportError:
        raise ModelError("model.config needs transformers; install it with: pip install 'shardwise[hf]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        facts = AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"model.config '{path}' is no configuration that transformers knows: {reason}") from None
    if getattr(facts, "auto_map", None):
        raise ModelError(f"model.config '{path}' wants code from its own folder to be run (auto_map); it is refused")
    facts.use_cache = False
    return facts


def _checked_module(module: Any, where: str, freeze: list[str]) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ModelError(f"{where} returned a {type(module).__name__}; it must return a torch.nn.Module")
    names = dict(module.named_parameters())
    for pattern in freeze:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ModelError(f"model.freeze '{pattern}' matches no parameter{did_you_mean(pattern, names)}")
        for name in matched:
            names[name].requires_grad_(False)
    return module


def forward_bytes(
    factory: Callable[[], nn.Module],
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    *,
    seq_len: int,
    dtype: torch.dtype,
    prepare: Callable[[nn.Module], object],
) -> tuple[int, int] | None:
    """Bytes of one sample's forward under fake tensors: what is saved for backward, and the logits in fp32.

    Every saved storage counts once; parameters do not count. ``prepare`` may change the module first (recompute).
    Leaves out backward's own temporaries, and attention's where the device has another kernel than the CPU.
    ``None`` where the model does not run under fake tensors.
    """
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
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

            ids = torch.zeros(1, seq_len, dtype=torch.int64)
            narrow = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), narrow:
                outputs = module(ids)
                loss(outputs, ids)
            logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None
    return sum(storage.nbytes() for storage in storages.values()), logits.numel() * torch.float32.itemsize
