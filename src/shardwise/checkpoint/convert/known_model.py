"""Find the model of a checkpoint: from a Hugging Face configuration or a custom factory.

Nothing is downloaded, no code of a model folder is run, and no function is called because a file names it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.added_tokens import added_of
from shardwise.checkpoint.matching import Expected
from shardwise.checkpoint.readers.huggingface import CONFIG, HuggingFaceSource
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.checkpoint.storage.local_storage import Folder, folder_of
from shardwise.document import read_json
from shardwise.errors import ModelError, UserError, did_you_mean
from shardwise.import_object import check_kwargs, load_object, raised_text
from shardwise.parallel.materialize import build, materialize

GIVE = "give --model"


@dataclass(frozen=True)
class KnownModel:
    """Model that can be built.

    Attributes:
        label: as the user wrote it, or where it was found.
        entry: how it is built, for `Manifest.model`.
        make: builds it with arbitrary weights; the argument is the compute dtype, where it can be chosen.
        auto: the class of transformers that loads it from a folder; ``None`` for a factory.
        folder: where ``config.json`` was found; ``None`` where there is no folder.
    """

    label: str
    entry: dict[str, Any]
    make: Callable[[torch.dtype], nn.Module] = field(repr=False)
    auto: Any = None
    folder: Folder | None = None

    @property
    def config(self) -> dict[str, Any] | None:
        """Contents of ``config.json``; ``None`` for a factory."""
        return self.entry.get("config")

    def build(self, dtype: torch.dtype = torch.float32, *, real: bool = True) -> nn.Module:
        """Build the model in evaluation mode, uninitialized or with parameters on the meta device.

        Raises:
            ModelError: building it fails.
        """

        def made() -> nn.Module:
            module = self.make(dtype)
            if not isinstance(module, nn.Module):
                raise ModelError(f"model '{self.label}' gave a {type(module).__name__}; it must give a torch.nn.Module")
            return module

        try:
            module = build(made, 0, real=False)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"model '{self.label}': building it raised {raised_text(error)}; repair it") from error
        if real:
            materialize(module, torch.device("cpu"), broadcast=False)
        return module.eval()

    def expected(self) -> Expected:
        """Return the tensor names of the model."""
        module = self.build(real=False)
        first: dict[int, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        ties: dict[str, str] = {}
        state = module.state_dict(keep_vars=True)
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if id(value) in first:
                ties[name] = first[id(value)]
            else:
                first[id(value)] = name
                shapes[name] = tuple(value.shape)
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        return Expected(
            label=self.label,
            shapes=shapes,
            ties=ties,
            transient=frozenset(buffers - state.keys()),
            ignored=tuple(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()),
            base=str(getattr(module, "base_model_prefix", "") or ""),
            translated=self.auto is not None and _is_translated(module),
        )


def _is_translated(module: Any) -> bool:
    """Return whether transformers renames or reshapes this model's tensors (mostly experts)."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return bool(get_model_conversion_mapping(module, add_legacy=False))
    except (ImportError, AttributeError, TypeError):  # another version, where it is elsewhere or missing
        return False


def find_model(text: str | None, source: Source) -> KnownModel | str:
    """Find the model that ``--model`` or ``source`` names; else return why it is not known.

    Raises:
        UserError: ``--model`` does not name a model that can be built.
    """
    if text is not None:
        return _named(text, source)
    try:
        if isinstance(source, HuggingFaceSource) and source.config is not None:
            return _transformers(source.config, f"{source.folder / CONFIG}", source.folder)
        if isinstance(source, OwnSource) and source.manifest.model is not None:
            return _of_manifest(source.manifest.model, source)
    except ModelError as error:
        return f"{error}; or {GIVE}"
    return f"no model known; {GIVE}"


def _of_manifest(entry: Mapping[str, Any], source: OwnSource) -> KnownModel | str:
    if entry.get("kind") == "transformers" and isinstance(entry.get("config"), dict):
        return _transformers(entry["config"], f"the configuration in '{source.path}'", None)
    if entry.get("kind") == "factory":
        factory = entry.get("factory")
        return f"the checkpoint names '{factory}', and nothing is run because a file names it; {GIVE} {factory}"
    return f"the checkpoint describes its model in a way that this version does not support; {GIVE}"


def _named(text: str, source: Source) -> KnownModel:
    if text.endswith(".json") or "://" in text or Path(text).is_dir():
        place = folder_of(text)
        file = place if text.endswith(".json") else place / CONFIG
        if not file.is_file():
            raise ModelError(f"model '{text}': there is no file '{file}'; give a config.json or a folder with one")
        try:
            keys = read_json(file) if isinstance(file, Path) else json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelError(f"model '{text}': '{file}' cannot be read as JSON: {error}; repair it") from None
        if not isinstance(keys, dict):
            raise ModelError(f"model '{text}': '{file}' holds {keys!r:.40}, not an object; repair it")
        return _transformers(_with_added(keys, source), text, file.parent)
    if ":" in text:
        return _factory(text, source)
    raise UserError(
        f"model '{text}' is none of: a folder with {CONFIG}, a config.json, package.module:factory, file.py:factory; "
        "give one of them"
    )


def _with_added(keys: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return a configuration with the tokens that training added, where it is the one that training began with."""
    added = added_of(source.manifest.model) if isinstance(source, OwnSource) else None
    if added is None or keys.get("vocab_size", added.old) != added.old:
        return keys
    return added.config(keys)


def _factory(text: str, source: Source) -> KnownModel:
    entry = source.manifest.model if isinstance(source, OwnSource) else None
    same = entry is not None and entry.get("kind") == "factory" and entry.get("factory") == text
    kwargs = dict(entry.get("kwargs") or {}) if entry is not None and same else {}
    made = load_object(text, "model")
    check_kwargs(made, f"model '{text}'", **kwargs)
    return KnownModel(text, {"kind": "factory", "factory": text, "kwargs": kwargs}, lambda _: made(**kwargs))


def _transformers(keys: dict[str, Any], label: str, folder: Folder | None) -> KnownModel:
    """Build a transformers model from its configuration, which also selects its head."""
    kind = keys.get("model_type")
    if "auto_map" in keys:
        raise ModelError(
            f"model '{label}' names code of its own to be run (auto_map), and no code of a model's folder is; use a "
            "model that transformers has, or package.module:factory"
        )
    if "quantization_config" in keys:
        raise ModelError(
            f"model '{label}' is quantized, and its quantized weights are not supported; use unquantized ones"
        )
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise ModelError(f"model '{label}' needs transformers; install it with: pip install 'shardwise[hf]'") from None
    if kind not in transformers.CONFIG_MAPPING:
        hint = did_you_mean(str(kind), transformers.CONFIG_MAPPING)
        raise ModelError(f"model '{label}': transformers has no model_type '{kind}'{hint}; update transformers")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        facts = transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(keys))
    except Exception as error:  # its checks raise classes of several packages
        raise ModelError(f"model '{label}' cannot be used: {' '.join(str(error).split())}; repair it") from None
    autos = [
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.AutoModelForSeq2SeqLM),
        (transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.AutoModelForMaskedLM),
        (transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, transformers.AutoModelForSequenceClassification),
        (transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, transformers.AutoModelForImageClassification),
        (transformers.MODEL_MAPPING, transformers.AutoModel),
    ]
    heads = {auto: mapping[type(facts)].__name__ for mapping, auto in autos if type(facts) in mapping}
    named = [auto for auto, head in heads.items() if head in (keys.get("architectures") or [])]
    if not heads:
        raise ModelError(
            f"model '{label}': transformers has no model for model_type '{kind}'; use package.module:factory"
        )
    auto = (named or list(heads))[0]

    def make(dtype: torch.dtype) -> nn.Module:
        module: nn.Module = auto.from_config(copy.deepcopy(facts), dtype=dtype, trust_remote_code=False)
        return module

    entry = {"kind": "transformers", "config": {**keys, "architectures": [heads[auto]]}}
    return KnownModel(label, entry, make, auto, folder)
