"""Quantize the base of ``+qlora`` to 4 bits with bitsandbytes, unit by unit.

The full model never exists unquantized. bitsandbytes and not torchao: it has kernels for CPUs and for CUDA (only those
for CPUs were run so far), its quantized weight is one plain ``uint8`` tensor that FSDP2 shards by rows, and peft
supports its layer (docs/decisions).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.import_object import silence_bitsandbytes
from shardwise.plan.lora_options import AdapterOptions

BLOCK = 64
"""Weights that share a scale: bitsandbytes' default, and that of arXiv:2305.14314."""
WIDEST = {"nf4": 0.18, "fp4": 0.2}
"""Half the largest step between two values (0.152 of nf4, 0.167 of fp4), with a margin for quantized scales."""


_AT_ONCE = BLOCK << 14  # values that are quantized at a time


def bitsandbytes() -> Any:
    """Import bitsandbytes.

    Raises:
        ConfigError: it is not installed.
    """
    silence_bitsandbytes()
    try:
        import bitsandbytes as found
    except ImportError:
        raise ConfigError("+qlora needs bitsandbytes; install it with: pip install 'shardwise[qlora]'") from None
    return found


@functools.cache
def quantized_layer() -> Any:
    """Return bitsandbytes' ``Linear4bit`` without in-place casts or changes of its weight.

    bitsandbytes' own forward casts ``bias.data`` to the dtype of its input, which is a shard under FSDP2 and would stay
    so, and its evaluation on CPUs changes the weight's layout. Quantized weights are used in the plan's dtype; the
    output has the input's dtype, under autocast autocast's.
    """
    package = bitsandbytes()
    kind: Any = package.nn.Linear4bit

    class QuantizedLinear(kind):  # type: ignore[misc]
        """Linear layer with a quantized weight; ``quant_state`` is ``None`` until it is quantized."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Map x [..., inputs] to [..., outputs]; before quantization it is a plain linear layer."""
            if self.quant_state is None:
                return nn.functional.linear(x, self.weight, self.bias)
            if self.known_by_kind:  # FSDP2 gathers plain parameters, and the compiler cannot convert them
                package.nn.modules.fix_4bit_weight_quant_state_from_module(self)
            kind, device = x.dtype, x.device.type
            if torch.is_autocast_enabled(device):
                kind = torch.get_autocast_dtype(device)
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            outputs: torch.Tensor = package.matmul_4bit(
                x.to(self.compute_dtype), self.weight, bias=bias, quant_state=self.quant_state
            )
            return outputs.to(kind)

    return QuantizedLinear


def prepare_packing(
    module: nn.Module, layers: dict[str, nn.Module], options: AdapterOptions, compute: torch.dtype
) -> tuple[str, ...]:
    """Replace each of ``layers`` by a ``Linear4bit`` with its weight (may be on meta).

    `pack` quantizes it.

    A layer with an adapter is replaced inside of it: peft's layer calls the one that it wraps, whatever that is.
    """
    kind = quantized_layer()
    layer: Any
    for name, layer in layers.items():
        found = kind(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=compute,  # its kernels silently compute garbage in float64
            compress_statistics=options.double_quant,
            quant_type=options.quant_type,
            device="meta",
        )
        found.bias = layer.bias
        found.weight_options = (options.double_quant, options.quant_type)
        found.known_by_kind = options.dora  # peft's DoRA dequantizes weights whose type it knows
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
    """Yield the ``Linear4bit`` layers of ``unit``."""
    package = bitsandbytes()
    for child in unit.modules():
        if isinstance(child, package.nn.Linear4bit):
            yield child


def pack(unit: nn.Module) -> None:
    """Quantize the weights of ``unit`` on their final device; quantized ones stay unchanged.

    Each is dequantized once and compared with the original: no value may be off by more than half the largest step
    of its block's scale.

    Raises:
        ModelError: bitsandbytes dequantizes a weight wrongly. Its CPU kernel (0.50) does so, silently, if a row is not
            a multiple of 64 values.
    """
    made = False
    for layer in packing_layers(unit):
        if layer.quant_state is None:
            found = packed(layer.weight.detach(), *layer.weight_options)
            layer.weight, layer.quant_state, made = found, found.quant_state, True
    if made:
        _give_memory_back()


def _give_memory_back() -> None:
    """Return dequantized memory to the system; quantized weights fragment glibc's heap.

    No other C library needs this.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def packed(weight: torch.Tensor, nested: bool, kind: str) -> Any:
    """Quantize ``weight`` [outputs, inputs] to 4 bits of ``kind``.

    ``nested`` quantizes its scales, too.

    The same bits as bitsandbytes computes from the full weight, some rows at a time: its CPU code would use
    several more copies of the weight.

    Raises:
        ModelError: as `pack`.
    """
    package = bitsandbytes()
    functional = package.functional
    source = weight.float() if weight.dtype == torch.float64 else weight
    values = torch.empty((source.numel() + 1) // 2, 1, dtype=torch.uint8, device=source.device)
    scales: list[torch.Tensor] = []
    chunks = list(_row_chunks(source))
    for rows, place, _ in chunks:
        values[place], state = functional.quantize_4bit(rows, None, None, BLOCK, False, kind)
        scales.append(state.absmax)
    full = functional.QuantState(
        torch.cat(scales), source.shape, functional.get_4bit_type(kind, source.device), BLOCK, kind, source.dtype
    )
    used = full.absmax
    if nested:
        full.offset = used.mean()
        full.absmax, full.state2 = functional.quantize_blockwise(used - full.offset, blocksize=256)
        full.nested = True
        used = functional.dequantize_blockwise(full.absmax, full.state2) + full.offset
    slack = 0.1 * float(max(scale.max() for scale in scales)) if nested and scales else 0.0
    for rows, place, blocks in chunks:
        state = functional.QuantState(used[blocks], rows.shape, full.code, BLOCK, kind, source.dtype)
        wrong = _worst_step(rows, functional.dequantize_4bit(values[place], state), slack)
        if not wrong <= WIDEST[kind]:
            raise ModelError(
                f"+qlora: bitsandbytes {package.__version__} unpacks a weight of {list(source.shape)} wrongly on "
                f"{source.device.type} (off by {wrong:.2f} of a block's largest value, where rounding gives "
                f"{WIDEST[kind]} at most); its rows must be multiples of {BLOCK}: use +lora"
            )
    return package.nn.Params4bit(
        values,
        requires_grad=False,
        quant_state=full,
        blocksize=BLOCK,
        compress_statistics=nested,
        quant_type=kind,
        bnb_quantized=True,
    )


def _row_chunks(source: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """Yield row chunks of a weight, with their byte and block ranges in the quantized one."""
    columns, done = source.shape[1], 0
    for rows in source.split(max(BLOCK, _AT_ONCE // max(1, columns) // BLOCK * BLOCK)):
        end = done + rows.numel()
        yield rows.contiguous(), slice(done // 2, -(-end // 2)), slice(done // BLOCK, -(-end // BLOCK))
        done = end


def packed_and_unpacked(weight: torch.Tensor, nested: bool, kind: str) -> torch.Tensor:
    """Return ``weight`` [outputs, inputs] after 4-bit quantization, in fp32.

    Kernels round it to their dtype.

    Raises:
        ModelError: as `pack`.
    """
    found = packed(weight, nested, kind)
    found.quant_state.dtype = torch.float32
    values: torch.Tensor = bitsandbytes().functional.dequantize_4bit(found.data, found.quant_state)
    return values


def _worst_step(source: torch.Tensor, found: torch.Tensor, slack: float) -> float:
    """Return the largest error of a value, over the largest value of its block and ``slack``.

    Quantized scales are off by a share of the largest of all: a tenth of that is allowed.
    """
    rest = -source.numel() % BLOCK
    was, now = (nn.functional.pad(t.detach().float().flatten(), (0, rest)).view(-1, BLOCK) for t in (source, found))
    largest = (was.abs().amax(1) + slack).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((was - now).abs().amax(1) / largest).max()) if was.numel() else 0.0


def dequantized(layer: Any) -> torch.Tensor:
    """Dequantize the weight of a quantized layer, [outputs, inputs], as it is used in compute."""
    found: torch.Tensor = bitsandbytes().functional.dequantize_4bit(layer.weight.data, layer.quant_state)
    return found


def quantized_bytes(module: nn.Module) -> int:
    """Count the bytes of the quantized weights stored here."""
    from torch.distributed.tensor import DTensor

    found = 0
    for layer in packing_layers(module):
        weight = layer.weight
        found += (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes
    return found


def scale_bytes(module: nn.Module) -> int:
    """Count the bytes of the quantized weights' scales, which every rank stores in full."""
    found = 0
    for layer in packing_layers(module):
        state = layer.quant_state
        tensors = [state.absmax] + ([state.state2.absmax] if state.nested else [])
        found += sum(t.nbytes for t in tensors)
    return found
