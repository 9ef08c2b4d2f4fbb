"""The packed base of ``+qlora``: 4-bit weights by bitsandbytes, made unit by unit, so that no whole model is unpacked.

bitsandbytes and not torchao: it packs and computes on CPUs and on CUDA alike, its packed weight is one plain ``uint8``
tensor that FSDP2 shards by rows, and peft knows its layer (docs/decisions).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.plan.adapter import AdapterOptions

BLOCK = 64
"""Weights that share a scale: bitsandbytes' default, and that of arXiv:2305.14314."""
WIDEST = {"nf4": 0.18, "fp4": 0.2}
"""Half the widest step between two values (0.152 of nf4, 0.167 of fp4), and room for scales that are packed, too."""


def quiet() -> None:
    """Keep bitsandbytes from saying at each import, in each rank, that it has no faster kernel for CPUs."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def bitsandbytes() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    quiet()
    try:
        import bitsandbytes as found
    except ImportError:
        raise ConfigError("+qlora needs bitsandbytes; install it with: pip install 'shardwise[qlora]'") from None
    return found


def prepare_packing(
    module: nn.Module, layers: dict[str, nn.Module], options: AdapterOptions, compute: torch.dtype
) -> tuple[str, ...]:
    """Replace each of ``layers`` by a ``Linear4bit`` with its weight, which may be on the meta device; `pack` packs it.

    A layer with an adapter is replaced inside of it: peft's layer asks the one that it stands for, whatever that is.
    """
    package = bitsandbytes()
    layer: Any
    for name, layer in layers.items():
        found = package.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=compute,  # its kernels compute garbage in float64, and say nothing
            compress_statistics=options.double_quant,
            quant_type=options.quant_type,
            device="meta",
        )
        found.compute_type_is_set = True  # else the first input decides
        found.support_avx512bf16_for_cpu = False  # an evaluation would repack the weight, which is a shard's
        found.bias = layer.bias
        found.weight_options = (options.double_quant, options.quant_type)
        found._parameters["weight"] = nn.Parameter(layer.weight.detach(), requires_grad=False)
        parent, _, last = name.rpartition(".")
        owner = module.get_submodule(parent)
        outer = getattr(owner, last)
        if outer is layer:
            setattr(owner, last, found)
        else:
            outer.base_layer = found
    return tuple(layers)


def packing_layers(unit: nn.Module) -> Iterator[Any]:
    """The ``Linear4bit`` layers of ``unit``."""
    package = bitsandbytes()
    for child in unit.modules():
        if isinstance(child, package.nn.Linear4bit):
            yield child


def pack(unit: nn.Module) -> None:
    """Pack the weights of ``unit``, which are on the device they will be used on. What is packed already stays.

    Each is unpacked once and held against what it was: no value may be off by more than half the widest step of its
    block's scale.

    Raises:
        ModelError: bitsandbytes unpacks a weight wrongly. Its CPU kernel (0.50) does where a row is no multiple of 64
            values, and says nothing.
    """
    package = bitsandbytes()
    for layer in packing_layers(unit):
        weight = layer.weight
        if layer.quant_state is not None:
            continue
        source = weight.detach()
        source = source.float() if source.dtype == torch.float64 else source
        found = package.nn.Params4bit(
            source,
            requires_grad=False,
            blocksize=BLOCK,
            compress_statistics=layer.weight_options[0],
            quant_type=layer.weight_options[1],
        ).to(source.device)
        layer.weight, layer.quant_state = found, found.quant_state
        nested, kind = layer.weight_options
        wrong = _worst_step(source, unpacked(layer), nested=nested)
        if wrong > WIDEST[kind]:
            raise ModelError(
                f"+qlora: bitsandbytes {package.__version__} unpacks a weight of {list(source.shape)} wrongly on "
                f"{source.device.type} (off by {wrong:.2f} of a block's largest value, where rounding gives "
                f"{WIDEST[kind]} at most); its rows must be multiples of {BLOCK}: use +lora"
            )


def _worst_step(source: torch.Tensor, found: torch.Tensor, *, nested: bool) -> float:
    """How far a value is off at most, over the largest one of its block.

    Scales that are packed themselves are off by a share of the largest of all: a tenth of that is allowed for.
    """
    rest = -source.numel() % BLOCK
    blocks = [nn.functional.pad(t.detach().float().flatten(), (0, rest)).view(-1, BLOCK) for t in (source, found)]
    largest = blocks[0].abs().amax(1)
    largest = (largest + 0.1 * largest.max() if nested else largest).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((blocks[0] - blocks[1]).abs().amax(1) / largest).max())


def unpacked(layer: Any) -> torch.Tensor:
    """The weight of a packed layer as it is computed with, [outputs, inputs]."""
    found: torch.Tensor = bitsandbytes().functional.dequantize_4bit(layer.weight.data, layer.quant_state)
    return found


def packed_bytes(module: nn.Module) -> int:
    """Bytes of the packed weights that rest here."""
    from torch.distributed.tensor import DTensor

    found = 0
    for layer in packing_layers(module):
        weight = layer.weight
        found += (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes
    return found


def scale_bytes(module: nn.Module) -> int:
    """Bytes of the scales beside the packed weights, which every rank holds whole."""
    found = 0
    for layer in packing_layers(module):
        state = layer.quant_state
        tensors = [state.absmax] + ([state.state2.absmax] if state.nested else [])
        found += sum(t.nbytes for t in tensors)
    return found
