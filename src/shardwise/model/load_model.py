"""Load a model's profile: from a catalogue name, a configuration, or a factory function.

Names and known configurations need no torch. Nothing is downloaded, and only the user's own function is run.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ModelError, did_you_mean
from shardwise.import_object import load_module
from shardwise.model.architecture import Architecture, architecture_from_config
from shardwise.model.catalogue import find_architecture, find_convnet, unknown_model_message
from shardwise.model.configuration import read_configuration
from shardwise.model.convnet import CONVNETS, convnet_profile
from shardwise.model.mixture import configuration_notes
from shardwise.model.profile import ModelProfile
from shardwise.model.transformer import IMAGE_FAMILIES, PATCH, profile_of

MOST_PIXELS = 2**16  # of a side
LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def load_profile(
    model: str, *, seq_len: int | None = None, image: int | None = None, compiled: bool = False, traced: bool = False
) -> ModelProfile:
    """Return the profile of ``model``.

    Over samples of ``seq_len`` tokens, or images of ``image`` pixels a side.

    Args:
        model: a name of the catalogue; a ``config.json`` or a folder with one; ``package.module:factory`` or
            ``file.py:factory``, where the factory takes no arguments and returns a module.
        seq_len: tokens of a sample; needed wherever the model reads tokens.
        image: pixels of a side, where the model reads images; ``None`` is the model's own size.
        compiled: blocks run under ``torch.compile`` (changes what they save; ignored for a traced module).
        traced: count a configuration as transformers' own module runs it, which saves more than blocks with fused norms
            and rotations; tensor parallel cannot be costed then.

    Raises:
        ModelError: there is no such model, or it cannot be counted; names the alternatives.
    """
    if seq_len is not None and seq_len < 1:
        raise ModelError(f"sequence length {seq_len} must be 1 or more")
    if not model.strip():
        raise ModelError("the model's name is empty; give a name of the catalogue, a config.json or a factory")
    path = Path(model)
    try:
        path.exists()
    except OSError as error:
        raise ModelError(f"model '{model:.80}' cannot be looked up: {error.strerror}; give another") from None
    if path.suffix == ".py" and path.is_file():
        raise ModelError(f"model '{model}' is a file of code; name its function too, as in {model}:build")
    if path.is_dir() or path.suffix == ".json":
        return _from_config(path, seq_len, image, compiled, traced)
    if ":" in model:
        return _from_factory(model, seq_len)
    return _from_name(model, seq_len, image, compiled)


def _from_name(model: str, seq_len: int | None, image: int | None, compiled: bool) -> ModelProfile:
    architecture = find_architecture(model)
    if architecture is not None:
        return profile_of(_sized(architecture, image), seq_len, compiled=compiled)
    net = find_convnet(model)
    if net is not None:
        return convnet_profile(CONVNETS[net], image)
    raise ModelError(unknown_model_message(model))


def _sized(architecture: Architecture, image: int | None) -> Architecture:
    """Resize a vision transformer's table of positions to another image size."""
    if image is None or architecture.family not in IMAGE_FAMILIES:
        return architecture
    return architecture.model_copy(update={"max_seq_len": (image // PATCH) ** 2 + 1})


def _from_config(path: Path, seq_len: int | None, image: int | None, compiled: bool, traced: bool) -> ModelProfile:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"model '{path}': there is no file '{file}'; give a config.json or a folder with one")
    keys = read_configuration(file, f"model '{path}'")
    name = str(keys.get("_name_or_path") or (file.resolve().parent.name if file.name == "config.json" else file.stem))
    architecture = architecture_from_config(keys, name)
    if architecture is not None and not traced:
        return replace(profile_of(_sized(architecture, image), seq_len, compiled=compiled), origin="config")
    found = _from_transformers(path, file, keys, name, seq_len, image)
    return replace(found, origin="config", unknown=(*found.unknown, *configuration_notes(keys)))


def _from_transformers(
    path: Path, file: Path, keys: Mapping[str, Any], name: str, seq_len: int | None, image: int | None
) -> ModelProfile:
    """Build an unknown family with transformers on the meta device, and trace it."""
    kind = keys.get("model_type")
    if "auto_map" in keys:
        raise ModelError(
            f"model '{path}' names code of its own to be run (auto_map), and no code of a model's folder is; use a "
            "model that transformers has, or package.module:factory"
        )
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise ModelError(
            f"model '{path}': model_type '{kind}' is not known here and transformers is not installed; install it "
            "with: pip install 'shardwise[hf]'"
        ) from None
    if kind is None:
        raise ModelError(f"model '{path}': '{file}' has no model_type, so it is not known what it describes; repair it")
    if kind not in transformers.CONFIG_MAPPING:
        hint = did_you_mean(str(kind), transformers.CONFIG_MAPPING)
        raise ModelError(
            f"model '{path}': neither shardwise nor transformers has a model_type '{kind}'{hint}; repair '{file}', "
            "update transformers, or use package.module:factory"
        )
    logging.set_verbosity_error()
    try:
        facts = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its checks raise classes of several packages
        raise ModelError(
            f"model '{path}' cannot be used: {' '.join(str(error).split()):.600}; repair '{file}'"
        ) from None
    return _traced_transformers(facts, name, seq_len, image)


def _traced_transformers(facts: Any, name: str, seq_len: int | None, image: int | None) -> ModelProfile:
    import torch
    import transformers

    from shardwise.model.trace import trace_module
    from shardwise.model.undrawn import undrawn

    facts.use_cache = False
    dropped = [key for key in LAYER_DROP if getattr(facts, key, 0.0)]
    for key in dropped:  # each forward would draw which layers it leaves out
        setattr(facts, key, 0.0)
    ids = torch.zeros(1, seq_len, dtype=torch.int64) if seq_len is not None else None
    side, colours = image or getattr(facts, "image_size", None) or 224, getattr(facts, "num_channels", 3)
    sized = all(isinstance(number, int) and 1 <= number <= MOST_PIXELS for number in (side, colours))
    pixels = torch.zeros(1, colours, side, side, device="meta") if sized else None
    pairs = {"input_ids": ids, "decoder_input_ids": ids}
    choices: tuple[tuple[Any, Any, Any], ...] = (
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM, ids),
        (transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.AutoModelForSeq2SeqLM, pairs),
        (transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.AutoModelForMaskedLM, ids),
        (
            transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
            transformers.AutoModelForImageClassification,
            {"pixel_values": pixels},
        ),
    )
    found = next(((auto, inputs) for mapping, auto, inputs in choices if type(facts) in mapping), None)
    if found is None:
        raise ModelError(
            f"model '{name}': model_type '{facts.model_type}' reads neither tokens nor images according to "
            "transformers; give package.module:factory of a module with a method example_inputs()"
        )
    auto, inputs = found
    images = isinstance(inputs, dict) and "pixel_values" in inputs
    if images and pixels is None:
        raise ModelError(
            f"model '{name}': image_size {side!r:.40} and num_channels {colours!r:.40} must be integers from 1 to "
            f"{MOST_PIXELS}; repair the configuration"
        )
    if ids is None and not images:
        raise ModelError(f"model '{name}' reads tokens, and the length of a sample is not given; set --seq-len")
    try:
        with torch.device("meta"), undrawn():
            module = auto.from_config(facts, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"model '{name}': transformers cannot build it: {error}; repair the configuration") from error
    notes = _position_notes(module, facts, name, None if images else seq_len)
    if dropped:
        notes += (f"all layers are counted; training leaves some out of a step by chance ({', '.join(dropped)})",)
    profile = trace_module(module, inputs=inputs, vocab_size=getattr(facts, "vocab_size", None), name=name)
    return replace(profile, seq_len=None if images else seq_len, unknown=profile.unknown + notes)


def _position_notes(module: Any, facts: Any, name: str, seq_len: int | None) -> tuple[str, ...]:
    """Reject a length beyond a learned table: an embedding about as long as the positions."""
    longest = getattr(facts, "max_position_embeddings", None)
    if seq_len is None or not isinstance(longest, int) or seq_len <= longest:
        return ()
    sizes = {tuple(p.shape) for p in module.parameters() if p.ndim == 2}
    if any(longest <= rows <= longest + 2 for rows, _ in sizes):
        raise ModelError(
            f"sequence length {seq_len} is longer than the {longest} positions that '{name}' has learned; "
            f"use {longest} or less"
        )
    return (f"{seq_len} tokens are more than the {longest} that '{name}' was made for; costs are right",)


def _from_factory(model: str, seq_len: int | None) -> ModelProfile:
    from shardwise.model.trace import trace_module

    place, _, attribute = model.rpartition(":")
    if not attribute.isidentifier():
        raise ModelError(f"model '{model}' names no function after the colon; write {place}:build")
    if not place.endswith(".py") and not all(part.isidentifier() for part in place.split(".")):
        raise ModelError(f"model '{model}' is neither package.module:factory nor file.py:factory")
    with _own_code(model):
        module = load_module(place, f"model '{model}'", ModelError)
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, [name for name in vars(module) if not name.startswith("_")])
        raise ModelError(f"model '{model}': '{place}' has no '{attribute}'{hint}")
    found = getattr(module, attribute)
    if not callable(found):
        raise ModelError(f"model '{model}' is {found!r:.40}; name a function or a class that gives a module")
    if isinstance(found, type) or inspect.isfunction(found):
        needed = [
            p.name
            for p in inspect.signature(found).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise ModelError(
                f"model '{model}' needs {', '.join(needed)}; name a function without required arguments that gives "
                "the module, such as: def build(): return Model(...)"
            )
    with _own_code(model):
        return trace_module(found, seq_len=seq_len, name=model)


@contextlib.contextmanager
def _own_code(model: str) -> Iterator[None]:
    """Run the user's code: its output goes to stderr, and it cannot end the program.

    Stdout may be a document. Not redirected: what compiled code writes to the file descriptor.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as end:
        raise ModelError(
            f"model '{model}': its code ended the program (exit {end.code}); keep what runs as a script under "
            'if __name__ == "__main__"'
        ) from None
