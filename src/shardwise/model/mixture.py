"""Mixtures of experts and latent attention as facts of an `Architecture`, read from Hugging Face configurations.

The tables follow the modules of transformers 5.23. Routing alone (groups of experts, scaling, bias corrections that are
buffers) changes no shape and is not read. Layers for multi-token prediction are not built by transformers, nor here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardwise.errors import ModelError

Get = Callable[[str], object]
Pattern = Literal["all", "step", "first", "listed"]


class Mixture(BaseModel):
    """Routed experts of the sparse layers.

    ``width`` is the hidden width of one expert, ``shared`` that of all shared experts together (0 without), which every
    token passes; ``shared_gate`` weighs their result by a number per token. ``sparse`` tells for each layer whether it
    is one of experts; the others have a plain MLP.
    """

    model_config = ConfigDict(frozen=True)

    experts: int
    per_token: int
    width: int
    shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    sparse: tuple[bool, ...]


class LatentAttention(BaseModel):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values come from narrow latents.

    ``q_rank`` is ``None`` where queries are projected directly. A head's query and key have ``nope`` + ``rope``
    columns, its value ``value``; the ``rope`` columns of the key are shared by all heads.
    """

    model_config = ConfigDict(frozen=True)

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    bias: bool = False  # of the projections to the latents

    @property
    def key(self) -> int:
        """Columns of a head's query and key."""
        return self.nope + self.rope


@dataclass(frozen=True)
class _Keys:
    """Where a family's configuration states its mixture.

    ``shared`` is a width, ``shared_count`` a number of experts of the routed ones' width. ``pattern`` selects the
    sparse layers: all; each ``decoder_sparse_step``-th but ``mlp_only_layers``; all after ``first_k_dense_replace``;
    those listed in ``moe_layers``, else each ``interleave_moe_layer_step``-th.
    """

    experts: tuple[str, ...]
    width: str = "moe_intermediate_size"
    shared: str = ""
    shared_count: str = ""
    shared_gate: bool = False
    biased: bool = False
    pattern: Pattern = "all"
    dense: str = "intermediate_size"


_LOCAL, _ROUTED = ("num_local_experts", "num_experts"), ("n_routed_experts", "num_local_experts", "num_experts")
_FIRST = _Keys(_ROUTED, shared_count="n_shared_experts", pattern="first")
_KEYS: dict[str, _Keys] = {
    "mixtral": _Keys(_LOCAL, width="intermediate_size"),
    "qwen2_moe": _Keys(_LOCAL, shared="shared_expert_intermediate_size", shared_gate=True, pattern="step"),
    "qwen3_moe": _Keys(_LOCAL, pattern="step"),
    "deepseek_v2": _FIRST,
    "deepseek_v3": _FIRST,
    "glm4_moe": _FIRST,
    "gpt_oss": _Keys(_LOCAL, width="intermediate_size", biased=True),
    "olmoe": _Keys(_LOCAL, width="intermediate_size"),
    "llama4_text": _Keys(
        _LOCAL,
        width="intermediate_size",
        shared="intermediate_size",
        pattern="listed",
        dense="intermediate_size_mlp",
    ),
    "phimoe": _Keys(_LOCAL, width="intermediate_size"),
    "granitemoe": _Keys(_LOCAL, width="intermediate_size"),
    "granitemoeshared": _Keys(_LOCAL, width="intermediate_size", shared="shared_intermediate_size"),
}
MIXTURES = frozenset(_KEYS)

# Defaults of transformers' configuration classes beside those of an architecture.
_DEFAULTS: dict[str, dict[str, object]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    "deepseek_v2": {
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    },
    "glm4_moe": {
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_local_experts": 128, "num_experts_per_tok": 4},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "llama4_text": {
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1,
    },
    "phimoe": {"num_local_experts": 16, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
}
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def mixture_facts(
    family: str, config: Mapping[str, object], layers: object, ffn: object, name: str
) -> dict[str, object]:
    """Return the `Architecture` fields ``mixture``, ``ffn`` (of the dense layers), and ``latent`` where there is one.

    Raises:
        ModelError: sizes that are not positive integers, or more experts per token than there are; lists all of them.
    """
    keys, found, problems = _KEYS[family], {**_DEFAULTS[family], "intermediate_size": ffn} | dict(config), list[str]()

    def number(*names: str, least: int = 1) -> int:
        value = next((of[key] for of in (config, found) for key in names if key in of), None)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        rule = "a positive integer" if least == 1 else f"an integer of {least} or more"
        problems.append(f"model '{name}': {' or '.join(names)} is {value!r}, it must be {rule}")
        return least

    experts = number(*keys.experts, least=0)
    per_token = number("num_experts_per_tok") if experts else 0
    if per_token > experts:
        problems.append(f"model '{name}': num_experts_per_tok is {per_token}, more than its {experts} experts")
    width = number(keys.width)
    shared = number(keys.shared, least=0) if keys.shared else 0
    shared = number(keys.shared_count, least=0) * width if keys.shared_count else shared
    count = layers if isinstance(layers, int) and not isinstance(layers, bool) and layers > 0 else 1
    sparse = _sparse(keys.pattern, count, found, number, problems, name) if experts else (False,) * count
    facts: dict[str, object] = {"ffn": number(keys.dense) if not all(sparse) else ffn}
    if family in ("deepseek_v2", "deepseek_v3"):
        facts["latent"] = _latent(_LATENT | dict(config), problems, name)
    if problems:
        raise ModelError(*problems)
    facts["mixture"] = Mixture(
        experts=experts,
        per_token=per_token,
        width=width,
        shared=shared,
        shared_gate=keys.shared_gate,
        router_bias=keys.biased,
        expert_bias=keys.biased,
        sparse=sparse,
    )
    return facts


def configuration_notes(config: Mapping[str, object]) -> Iterator[str]:
    """Say what a configuration states and transformers' module does not build, or training does not keep."""
    extra = next(
        (n for key in ("num_nextn_predict_layers", "num_mtp_layers") if isinstance(n := config.get(key), int)), 0
    )
    if extra:
        yield f"{extra} layers of multi-token prediction are left out, as transformers leaves them out"
    every = config.get("moe_layer_freq")
    if isinstance(every, int) and every != 1:
        yield f"moe_layer_freq {every} has no effect in transformers, and has none here"
    stored = config.get("quantization_config")
    kind = stored.get("quant_method") if isinstance(stored, Mapping) else None
    if kind is not None:
        yield f"the checkpoint is stored in {kind!s:.40}; its weights are counted in the plan's types, dequantized"


def _listed(key: str, found: Mapping[str, object], problems: list[str], name: str) -> set[int] | None:
    """Return the numbers of layers under ``key``; ``None`` where it is left out or null."""
    given = found.get(key)
    if given is None:
        return None
    if isinstance(given, list | tuple) and all(type(layer) is int for layer in given):
        return set(given)
    problems.append(f"model '{name}': {key} is {given!r:.40}, it must be a list of layer numbers")
    return set()


def _sparse(
    pattern: Pattern,
    layers: int,
    found: Mapping[str, object],
    number: Callable[..., int],
    problems: list[str],
    name: str,
) -> tuple[bool, ...]:
    """Tell for each layer whether it has experts, by the rule of its family's decoder layer."""
    if pattern == "first":
        first = number("first_k_dense_replace", least=0)
        return tuple(layer >= first for layer in range(layers))
    if pattern == "step":
        step, plain = number("decoder_sparse_step"), _listed("mlp_only_layers", found, problems, name) or ()
        return tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(layers))
    if pattern == "listed":
        given = _listed("moe_layers", found, problems, name)
        if given is not None:
            return tuple(layer in given for layer in range(layers))
        step = number("interleave_moe_layer_step")
        return tuple((layer + 1) % step == 0 for layer in range(layers))
    return (True,) * layers


def _latent(found: Mapping[str, object], problems: list[str], name: str) -> LatentAttention | None:
    sizes = {key: found[key] for key in _LATENT}
    wrong = [
        f"model '{name}': {key} is {value!r}, it must be a positive integer"
        for key, value in sizes.items()
        if not (isinstance(value, int) and not isinstance(value, bool) and value > 0)
        and not (key == "q_lora_rank" and value is None)
    ]
    problems += wrong
    if wrong:
        return None
    rank, kv_rank, nope, rope, value = sizes.values()
    return LatentAttention.model_validate(
        {
            "q_rank": rank,
            "kv_rank": kv_rank,
            "nope": nope,
            "rope": rope,
            "value": value,
            "bias": bool(found.get("attention_bias")),
        }
    )


def mixture_parameters(mixture: Mixture, hidden: int, gated: bool = True) -> int:
    """Count the elements of one sparse layer's router, experts and shared experts."""
    m, wide = mixture, 2 if gated else 1
    routed = m.experts * (m.width * hidden * (wide + 1) + (m.expert_bias * (wide * m.width + hidden)))
    shared = m.shared * hidden * (wide + 1) + (hidden if m.shared_gate else 0)
    return routed + shared + m.experts * (hidden + m.router_bias)


def latent_parameters(latent: LatentAttention, heads: int, hidden: int, output_bias: bool) -> int:
    """Count the elements of one latent attention, with the norms of its latents."""
    a = latent
    queries = hidden * heads * a.key
    if a.q_rank is not None:
        queries = a.q_rank * (hidden + 1 + heads * a.key) + (a.q_rank if a.bias else 0)
    down = (a.kv_rank + a.rope) * (hidden + (1 if a.bias else 0)) + a.kv_rank
    up = a.kv_rank * heads * (a.nope + a.value)
    return queries + down + up + heads * a.value * hidden + (hidden if output_bias else 0)
