"""The packed base of ``+qlora``: 4-bit weights by bitsandbytes, made unit by unit, so that no whole model is unpacked.

bitsandbytes and not torchao: it has kernels for CPUs and for CUDA (only those for CPUs were run so far), its packed
weight is one plain ``uint8`` tensor that FSDP2 shards by rows, and peft knows its layer (docs/decisions).
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
from shardwise.optim.adamw8bit import silence_bitsandbytes
from shardwise.plan.lora_options import AdapterOptions

BLOCK = 64
"""Weights that share a scale: bitsandbytes' default, and that of arXiv:2305.14314."""
WIDEST = {"nf4": 0.18, "fp4": 0.2}
"""Half the widest step between two values (0.152 of nf4, 0.167 of fp4), and room for scales that are packed, too."""


_AT_ONCE = BLOCK << 14  # values that are packed at a time


def bitsandbytes() -> Any:
    """The package.

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
def packed_layer() -> Any:
    """bitsandbytes' ``Linear4bit``, which casts no parameter in place and leaves the weight that it is given alone.

    bitsandbytes' own forward gives ``bias.data`` the dtype of its input, which is a shard's under FSDP2 and would rest
    so, and its evaluation on CPUs lays the weight out anew. Packed weights are computed with in the plan's dtype; what
    comes out has the input's, under autocast autocast's.
    """
    package = bitsandbytes()
    kind: Any = package.nn.Linear4bit

    class PackedLinear(kind):  # type: ignore[misc]
        """A linear layer whose weight is packed; ``quant_state`` is ``None`` until it is."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x [..., inputs] to [..., outputs]; a layer that is looked at before it is packed is a plain one."""
            if self.quant_state is None:
                return nn.functional.linear(x, self.weight, self.bias)
            if self.known_by_kind:  # FSDP2 gathers plain parameters, and the compiler cannot make others of them
                package.nn.modules.fix_4bit_weight_quant_state_from_module(self)
            kind, device = x.dtype, x.device.type
            if torch.is_autocast_enabled(device):
                kind = torch.get_autocast_dtype(device)
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            outputs: torch.Tensor = package.matmul_4bit(
                x.to(self.compute_dtype), self.weight, bias=bias, quant_state=self.quant_state
            )
            return outputs.to(kind)

    return PackedLinear


def prepare_packing(
    module: nn.Module, layers: dict[str, nn.Module], options: AdapterOptions, compute: torch.dtype
) -> tuple[str, ...]:
    """Replace each of ``layers`` by a ``Linear4bit`` with its weight, which may be on the meta device; `pack` packs it.

    A layer with an adapter is replaced inside of it: peft's layer asks the one that it stands for, whatever that is.
    """
    kind = packed_layer()
    layer: Any
    for name, layer in layers.items():
        found = kind(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=compute,  # its kernels compute garbage in float64, and say nothing
            compress_statistics=options.double_quant,
            quant_type=options.quant_type,
            device="meta",
        )
        found.bias = layer.bias
        found.weight_options = (options.double_quant, options.quant_type)
        found.known_by_kind = options.dora  # peft's DoRA unpacks what it knows to be packed
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
    made = False
    for layer in packing_layers(unit):
        if layer.quant_state is None:
            found = packed(layer.weight.detach(), *layer.weight_options)
            layer.weight, layer.quant_state, made = found, found.quant_state, True
    if made:
        _give_memory_back()


def _give_memory_back() -> None:
    """Let glibc return what was unpacked: packed weights lie between freed ones, and the next unit would find no room.

    No other C library needs this.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def packed(weight: torch.Tensor, nested: bool, kind: str) -> Any:
    """bitsandbytes' parameter with ``weight`` [outputs, inputs] in 4 bits of ``kind``, its scales packed if ``nested``.

    The same bits as bitsandbytes makes of the whole weight at once, some rows at a time: its CPU code would hold
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
    whole = functional.QuantState(
        torch.cat(scales), source.shape, functional.get_4bit_type(kind, source.device), BLOCK, kind, source.dtype
    )
    used = whole.absmax
    if nested:
        whole.offset = used.mean()
        whole.absmax, whole.state2 = functional.quantize_blockwise(used - whole.offset, blocksize=256)
        whole.nested = True
        used = functional.dequantize_blockwise(whole.absmax, whole.state2) + whole.offset
    slack = 0.1 * float(max(scale.max() for scale in scales)) if nested and scales else 0.0
    for rows, place, blocks in chunks:
        state = functional.QuantState(used[blocks], rows.shape, whole.code, BLOCK, kind, source.dtype)
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
        quant_state=whole,
        blocksize=BLOCK,
        compress_statistics=nested,
        quant_type=kind,
        bnb_quantized=True,
    )


def _row_chunks(source: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """Some rows of a weight at a time, where their bytes lie in the packed one, and which blocks they are."""
    columns, done = source.shape[1], 0
    for rows in source.split(max(BLOCK, _AT_ONCE // max(1, columns) // BLOCK * BLOCK)):
        end = done + rows.numel()
        yield rows.contiguous(), slice(done // 2, -(-end // 2)), slice(done // BLOCK, -(-end // BLOCK))
        done = end


def packed_and_unpacked(weight: torch.Tensor, nested: bool, kind: str) -> torch.Tensor:
    """What ``weight`` [outputs, inputs] is where it rests in 4 bits, in fp32; kernels round it to what they compute in.

    Raises:
        ModelError: as `pack`.
    """
    found = packed(weight, nested, kind)
    found.quant_state.dtype = torch.float32
    values: torch.Tensor = bitsandbytes().functional.dequantize_4bit(found.data, found.quant_state)
    return values


def _worst_step(source: torch.Tensor, found: torch.Tensor, slack: float) -> float:
    """How far a value is off at most, over the largest one of its block and ``slack``.

    Scales that are packed themselves are off by a share of the largest of all: a tenth of that is allowed for.
    """
    rest = -source.numel() % BLOCK
    was, now = (nn.functional.pad(t.detach().float().flatten(), (0, rest)).view(-1, BLOCK) for t in (source, found))
    largest = (was.abs().amax(1) + slack).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((was - now).abs().amax(1) / largest).max()) if was.numel() else 0.0


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
