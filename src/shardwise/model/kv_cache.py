"""`KvCache`: what generation keeps of a sequence, layer by layer, as transformers' own caches keep it.

Of a known family it follows from the configuration, without torch; another family's module is built on the meta device,
reads a few tokens there, and its cache tells the shapes.

A window of w keeps w - 1 tokens, as in `transformers.cache_utils` (5.23). Attention over latents keeps the latent and
the rotated columns of the key, once for all heads: vLLM and SGLang do the same. Falcon's grouped heads are counted
once, as engines keep them; transformers' module alone repeats them for each query head first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import ModelError
from shardwise.model.architecture import Architecture, architecture_from_config
from shardwise.model.catalogue import configuration_of, find_architecture, find_convnet, unknown_model_message
from shardwise.model.configuration import read_configuration

PROBE_TOKENS = 8
CHUNK = 8192  # tokens of Llama 4's chunked attention, where the configuration does not state them
FULL_LAST_WINDOWED = 28  # max_window_layers of Qwen's configurations
ALL_WINDOWED = frozenset({"mistral", "phi3", "starcoder2", "mixtral", "phimoe", "qwen3_moe"})
# Every n-th layer attends to all tokens, the others to a window (transformers' configuration classes).
FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "olmo3": 4, "cohere2": 4}


@dataclass(frozen=True, slots=True)
class CacheLayers:
    """Equal layers: heads of a key and a value of ``width`` elements together, for each token of the window.

    ``state_bytes`` do not grow with the sequence: those of a recurrence or a convolution, in types of their own.
    """

    count: int
    heads: int = 0
    width: int = 0
    window: int | None = None
    state_bytes: int = 0

    def tokens(self, context: int) -> int:
        """Return how many tokens of a sequence are kept."""
        return context if self.window is None else min(context, self.window - 1)


@dataclass(frozen=True, slots=True)
class KvCache:
    """Cache of one sequence; ``shared`` is the same on all tensor-parallel ranks (a latent has no heads to divide).

    ``max_positions`` is what the configuration of a family that is not known states.
    """

    layers: tuple[CacheLayers, ...]
    origin: Literal["configuration", "transformers"]
    shared: bool = False
    max_positions: int | None = None

    @property
    def heads(self) -> int:
        """Key-value heads of a layer, the most of any."""
        return max((layer.heads for layer in self.layers), default=0)

    def sequence_bytes(self, context: int, itemsize: float = 2.0, tp: int = 1) -> int:
        """Return the bytes of a sequence of ``context`` tokens on one of ``tp`` ranks.

        Where there are fewer heads than ranks, each rank has one: heads are repeated, as vLLM and SGLang do.
        """
        total = 0.0
        for layer in self.layers:
            heads = layer.heads if self.shared else -(-layer.heads // tp)
            total += layer.count * layer.tokens(context) * heads * layer.width * itemsize
            total += layer.count * layer.state_bytes / tp
        return int(total)


def load_kv_cache(model: str) -> KvCache:
    """Return the cache of a catalogue name, a ``config.json`` or a folder with one.

    Raises:
        ModelError: the model does not generate, or what it keeps cannot be told.
    """
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        keys = read_configuration(file, f"model '{model}'")
        found = kv_cache_from_config(keys, model)
        return found if found is not None else _from_transformers(file, model)
    known = find_architecture(model)
    if known is None:
        if ":" not in model and find_convnet(model) is None:
            raise ModelError(unknown_model_message(model))
        raise ModelError(
            f"model '{model}': --serve counts what generation keeps of each token, which is known of language models "
            "of the catalogue and of transformers' configurations; give one of their names, or a config.json"
        )
    found = kv_cache_from_config(configuration_of(known.name), known.name)
    assert found is not None
    return found


def kv_cache_from_config(config: Mapping[str, object], name: str) -> KvCache | None:
    """Read a Hugging Face ``config.json``; ``None`` for families that are not known.

    Raises:
        ModelError: the model reads, and does not generate.
    """
    a = architecture_from_config(config, name)
    if a is None:
        return None
    if not a.causal:
        raise ModelError(f"model '{name}' ({a.family}) does not generate, and --serve plans generation; name a decoder")
    text = config.get("text_config")
    keys = text if a.family.endswith("_text") and isinstance(text, Mapping) else config
    if a.latent is not None:
        layer = CacheLayers(a.layers, 1, a.latent.kv_rank + a.latent.rope)
        return KvCache((layer,), "configuration", shared=True)
    runs = [(window, len(list(same))) for window, same in groupby(layer_windows(keys, a))]
    layers = tuple(CacheLayers(count, a.kv_heads, 2 * a.head_dim, window) for window, count in runs)
    return KvCache(layers, "configuration")


def layer_windows(config: Mapping[str, object], a: Architecture) -> tuple[int | None, ...]:
    """Return the window of each layer, ``None`` where it attends to all tokens."""
    family, every = a.family, FULL_EVERY.get(a.family)
    window = a.sliding_window
    types = config.get("layer_types")
    if family == "llama4_text":
        window = _number(config, "attention_chunk_size", CHUNK)
    if family == "smollm3":
        window = _number(config, "sliding_window", 0) if config.get("use_sliding_window") else None
    if not window:
        return (None,) * a.layers
    if isinstance(types, list) and family not in ALL_WINDOWED and len(types) == a.layers:
        return tuple(None if kind == "full_attention" else window for kind in types)
    if every is not None:
        every = _number(config, "sliding_window_pattern", every)
        return tuple(None if (layer + 1) % every == 0 else window for layer in range(a.layers))
    if family in ("llama4_text", "smollm3"):
        every = _number(config, "no_rope_layer_interval", 4)
        stated = config.get("no_rope_layers")
        rotated = stated if isinstance(stated, list) else [(layer + 1) % every != 0 for layer in range(a.layers)]
        return tuple(window if bool(one) == (family == "llama4_text") else None for one in rotated)
    first = _number(config, "max_window_layers", FULL_LAST_WINDOWED)
    if family in ("qwen2", "qwen3"):
        return tuple(window if layer >= first else None for layer in range(a.layers))
    if family == "qwen2_moe":
        return tuple(window if layer % 2 == 0 and layer < first else None for layer in range(a.layers))
    return (window,) * a.layers


def _number(config: Mapping[str, object], key: str, usual: int) -> int:
    value = config.get(key, usual)
    return value if isinstance(value, int) and not isinstance(value, bool) else usual


def _from_transformers(file: Path, model: str) -> KvCache:
    """Build the module on the meta device, let it read a few tokens, and look at its cache."""
    import torch
    import transformers
    from transformers.utils import logging

    from shardwise.model.undrawn import undrawn

    logging.set_verbosity_error()
    try:
        facts = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"), undrawn():
            module = transformers.AutoModelForCausalLM.from_config(facts, dtype=torch.bfloat16, trust_remote_code=False)
        positions = getattr(facts.get_text_config(), "max_position_embeddings", None)
        return replace(traced_cache(module, model), max_positions=positions if isinstance(positions, int) else None)
    except ModelError:
        raise
    except Exception as error:  # its checks, and modules that branch on values, raise many classes
        reason = " ".join(str(error).split())
        raise ModelError(
            f"model '{model}': what generation keeps could not be read from transformers' module "
            f"({type(error).__name__}: {reason:.200}), so --serve cannot count it; give a model of a known family"
        ) from None


def traced_cache(module: Any, model: str) -> KvCache:
    """Return the cache that ``module`` fills, from one short forward on its own device.

    Raises:
        ModelError: it fills none, or one of a kind whose growth is not known.
    """
    import torch

    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=next(module.parameters()).device)
    with torch.no_grad():
        cache = getattr(module.eval()(input_ids=ids, use_cache=True), "past_key_values", None)
    found = [_traced_layer(layer, model) for layer in getattr(cache, "layers", ())]
    if not found:
        raise ModelError(f"model '{model}' fills no cache of transformers, so --serve cannot count it")
    return KvCache(tuple(found), "transformers")


def _traced_layer(layer: Any, model: str) -> CacheLayers:
    from transformers import cache_utils as kinds

    known = (kinds.DynamicLayer, kinds.LinearAttentionLayer, kinds.DummyLayer)
    if not isinstance(layer, known) or isinstance(layer, kinds.DynamicIndexedLayer):
        raise ModelError(
            f"model '{model}' keeps its tokens in a {type(layer).__name__}, whose growth is not known here; --serve "
            "counts full, sliding, chunked and recurrent layers"
        )
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    states = [*_tensors(getattr(layer, "conv_states", None)), *_tensors(getattr(layer, "recurrent_states", None))]
    state_bytes = sum(state.numel() * state.element_size() for state in states)
    if keys is None or values is None:
        return CacheLayers(1, state_bytes=state_bytes)
    window = layer.sliding_window if layer.is_sliding else None
    return CacheLayers(1, keys.shape[1], keys.shape[-1] + values.shape[-1], window, state_bytes)


def _tensors(found: Any) -> list[Any]:
    parts = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else [found]
    return [part for part in parts if hasattr(part, "numel")]
