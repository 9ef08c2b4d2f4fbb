"""AdamW with 8-bit moments: bitsandbytes' blockwise kernels on each rank's local shard.

Each run of 256 elements of a shard is a block: one fp32 scale (the largest magnitude) and a code of eight bits per
element, from a table of 256 values that are dense near zero (Dettmers et al. 2021, arXiv 2110.02861). A moment is then
accurate to about 1 % of its block's largest value, far better for small ones. Blocks follow the shard: where it does
not begin at a multiple of 256 elements, they differ from those of one process.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from shardwise.distributed.local_tensor import local_of
from shardwise.errors import ConfigError, ModelError
from shardwise.import_object import silence_bitsandbytes
from shardwise.optim.each_parameter import EachParameter
from shardwise.plan.optimizers import QUANTISED_BLOCK, QUANTISED_FROM

BLOCK = QUANTISED_BLOCK
MOMENTS = ("state1", "state2")  # bitsandbytes' names: the mean of gradients, and of their squares
_SCALES = ("absmax1", "absmax2")
_SLAB = 4096 * BLOCK  # elements that are processed at once
_KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Blocks:
    """Division of a parameter's elements into blocks.

    A shard has ``chunk`` elements, the last may have fewer; there are ``parts`` of them, each with space for ``each``
    scales, of which a shorter shard leaves some unused.
    """

    numel: int
    chunk: int

    @property
    def parts(self) -> int:
        """Number of shards that are not empty."""
        return math.ceil(self.numel / self.chunk)

    @property
    def each(self) -> int:
        """Number of scales of a full shard."""
        return math.ceil(self.chunk / BLOCK)

    def same_as(self, other: Blocks) -> bool:
        """Return whether both have the same blocks, so that codes and scales are interchangeable."""
        return self.chunk == other.chunk or (self._on_grid and other._on_grid)

    @property
    def _on_grid(self) -> bool:
        return self.chunk >= self.numel or self.chunk % BLOCK == 0

    def scale_of(self, elements: torch.Tensor) -> torch.Tensor:
        """Index of the scale of each element, given its index in the unsharded parameter."""
        part = elements // self.chunk
        return part * self.each + (elements - part * self.chunk) // BLOCK


def blocks_of(parameter: torch.Tensor) -> Blocks:
    """Blocks of a parameter in its current layout.

    Raises:
        ModelError: the parameter is sharded along another dim than its rows.
    """
    numel = parameter.numel()
    axis = _sharded_axis(parameter)
    if axis is None or not isinstance(parameter, DTensor):
        return Blocks(numel, numel)
    rows = math.ceil(parameter.shape[0] / parameter.device_mesh.shape[axis])
    return Blocks(numel, rows * (numel // parameter.shape[0]))


def first_element(parameter: torch.Tensor) -> int:
    """Index of the first local element in the unsharded parameter."""
    axis = _sharded_axis(parameter)
    if axis is None or not isinstance(parameter, DTensor):
        return 0
    coordinate = parameter.device_mesh.get_coordinate() or [0] * parameter.device_mesh.ndim
    return min(parameter.numel(), coordinate[axis] * blocks_of(parameter).chunk)


def _sharded_axis(parameter: torch.Tensor) -> int | None:
    """Mesh axis that shards the rows of a parameter, if any."""
    if not isinstance(parameter, DTensor):
        return None
    sharded_axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if not sharded_axes:
        return None
    if (
        len(sharded_axes) > 1
        or not isinstance(parameter.placements[sharded_axes[0]], Shard)
        or not parameter.placements[sharded_axes[0]].is_shard(0)
    ):
        raise ModelError(
            f"adamw8bit: a parameter laid out as {parameter.placements} is cut along something else than its rows, and "
            "blocks of 256 of such parts do not go together; use adamw, or a strategy without +tp"
        )
    return sharded_axes[0]


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether the state is in 8 bits: from 4096 elements of the unsharded parameter on.

    bitsandbytes uses the same threshold; counting the unsharded parameter makes all ranks, and all world sizes, agree.
    """
    return parameter.numel() >= QUANTISED_FROM


def require_bitsandbytes(what: str = "optimizer.name 'adamw8bit'") -> None:
    """Check that bitsandbytes is installed, before anything is read or built.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    silence_bitsandbytes()
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{what} needs bitsandbytes; install it with: pip install 'shardwise[qlora]'")


class AdamW8bit(EachParameter):
    """AdamW with moments in 8 bits, for unsharded parameters and FSDP2 shards.

    ``state1`` and ``state2`` are laid out as the parameter: codes (uint8) with the scales of their blocks in
    ``absmax1`` and ``absmax2`` (fp32), or plain fp32 where the unsharded parameter has less than 4096 elements.
    ``step`` is a number. Arithmetic is fp32 inside the kernel, whatever the parameter's dtype.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        require_bitsandbytes("AdamW8bit")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantization tables of the first and second moment: 256 values each, fp32, ascending."""
        if device not in self._tables:
            from bitsandbytes.functional import create_dynamic_map

            pair = create_dynamic_map(signed=True).to(device), create_dynamic_map(signed=False).to(device)
            self._tables[device] = pair
        return self._tables[device]

    def _start(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        quantized = is_quantized(parameter)
        state["step"] = 0
        if quantized:
            state["chunk"] = blocks_of(parameter).chunk
        for number, name in enumerate(MOMENTS, 1):
            kind = torch.uint8 if quantized else torch.float32
            state[name] = torch.zeros_like(parameter, dtype=kind, memory_format=torch.contiguous_format)
            if quantized:
                state[f"absmax{number}"] = empty_scales(parameter).zero_()

    def _step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self._start(parameter)
        state = self.state[parameter]
        state["step"] += 1
        weight, gradient = local_of(parameter), local_of(gradient).contiguous()
        if not weight.numel():
            return
        if weight.is_cuda and weight.dtype not in _KERNEL_TYPES:
            raise ModelError(f"adamw8bit has no kernel for weights of {weight.dtype} on a GPU; use adamw")
        target = weight.contiguous()
        with _default_stream(weight):
            self._update(target, gradient, state, group)
        if target is not weight:
            weight.copy_(target)

    def _update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        from bitsandbytes import functional

        first, second = (local_of(state[name]) for name in MOMENTS)
        one, other = group["betas"]
        step, rate, decay = state["step"], float(group["lr"]), group["weight_decay"]
        if first.dtype == torch.float32:
            functional.optimizer_update_32bit(
                "adam", gradient, weight, first, one, group["eps"], step, rate, second, other, 0.0, 0.0, decay
            )
            return
        used = math.ceil(weight.numel() / BLOCK)
        signed, unsigned = self.tables(weight.device)
        scale, other_scale = (local_of(state[f"absmax{number}"])[:used] for number in (1, 2))
        functional.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            weight,
            first,
            second,
            one,
            other,
            0.0,
            0.0,
            group["eps"],
            step,
            rate,
            signed,
            unsigned,
            scale,
            other_scale,
            decay,
        )

    def empty_state(self, parameter: torch.Tensor, key: str) -> torch.Tensor | None:
        """Allocate the scales of 8-bit state; ``None`` for any other ``key``."""
        return empty_scales(parameter) if key in _SCALES and is_quantized(parameter) else None

    def relayout(
        self, parameter: torch.Tensor, saved: Mapping[str, tuple[int, ...]], values: dict[str, Any]
    ) -> Regrouping | None:
        """Plan the conversion of saved state with other blocks than the local ones; else ``None``.

        ``saved`` are the shapes of saved tensors, ``values`` the saved numbers; ``chunk`` among them is set to the
        local parameter's.

        Raises:
            ValueError: the saved values are not such a state.
        """
        if not is_quantized(parameter) or not saved:
            return None
        chunk, new = values.get("chunk"), blocks_of(parameter)
        if not isinstance(chunk, int) or chunk < 1 or not set(_SCALES) <= saved.keys():
            raise ValueError("no blocks of 8-bit state in the checkpoint")
        old = Blocks(parameter.numel(), chunk)
        values["chunk"] = new.chunk
        if any(len(saved[name]) != 1 or saved[name][0] < old.parts * old.each for name in _SCALES):
            raise ValueError(f"fewer scales in the checkpoint than blocks of {BLOCK}")
        if old.chunk == new.chunk and saved["absmax1"] == tuple(empty_scales(parameter).shape):
            return None
        rooms = {name: torch.empty(saved[name]) for name in _SCALES}
        return Regrouping(parameter, values, rooms, old, new, self.tables(local_of(parameter).device))


@dataclass
class Regrouping:
    """State of one parameter whose blocks were saved under another layout.

    ``saved`` are the scales of all its blocks, by their name; they are filled before `finish` is called.
    """

    parameter: torch.Tensor
    values: dict[str, Any]
    saved: dict[str, torch.Tensor]
    old: Blocks
    new: Blocks
    tables: tuple[torch.Tensor, torch.Tensor]

    @property
    def is_exact(self) -> bool:
        """Return whether codes stay unchanged: in both layouts shards begin at multiples of 256."""
        return self.old.same_as(self.new)

    def finish(self) -> None:
        """Move scales to the new layout; if the blocks differ, dequantize and quantize once more."""
        begin = first_element(self.parameter)
        for number, (moment, table) in enumerate(zip(MOMENTS, self.tables, strict=True), 1):
            codes = local_of(self.values[moment]).view(-1)
            scales = local_of(self.values[f"absmax{number}"]).zero_()
            saved = self.saved[f"absmax{number}"].to(codes.device)
            for start in range(0, codes.numel(), _SLAB):
                part = codes[start : start + _SLAB]
                elements = torch.arange(begin + start, begin + start + part.numel(), device=codes.device)
                index = start // BLOCK
                if self.is_exact:
                    block_scales = saved[self.old.scale_of(elements[::BLOCK])]
                else:
                    meant = dequantised(part, saved[self.old.scale_of(elements)], table)
                    made, block_scales = quantised(meant, table)
                    part.copy_(made)
                scales[index : index + block_scales.numel()] = block_scales


@contextmanager
def _default_stream(tensor: torch.Tensor) -> Iterator[None]:
    """Use the default stream, on which bitsandbytes 0.50 always launches its optimizers."""
    if not tensor.is_cuda:
        yield
        return
    current, default = torch.cuda.current_stream(tensor.device), torch.cuda.default_stream(tensor.device)
    default.wait_stream(current)
    yield
    current.wait_stream(default)


def empty_scales(parameter: torch.Tensor) -> torch.Tensor:
    """Allocate the scales of one moment, fp32, sharded as the parameter, equally many per shard."""
    blocks = blocks_of(parameter)
    here = torch.empty(blocks.each, dtype=torch.float32, device=local_of(parameter).device)
    axis = _sharded_axis(parameter)
    if not isinstance(parameter, DTensor):
        return here
    ranks = 1 if axis is None else parameter.device_mesh.shape[axis]
    return DTensor.from_local(
        here,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size((blocks.each * ranks,)),
        stride=(1,),
    )


def dequantised(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Dequantize flat ``codes`` to fp32; ``scales`` has one value for each element."""
    return table[codes.long()] * scales


def quantised(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize flat fp32 ``values`` to codes (uint8) and block scales (fp32), to nearest.

    The error is at most half the gap between two values of the table, times the block's scale.
    """
    number = math.ceil(values.numel() / BLOCK)
    padded = torch.nn.functional.pad(values, (0, number * BLOCK - values.numel())).view(number, BLOCK)
    scales = padded.abs().amax(dim=1)
    shares = padded / torch.where(scales > 0, scales, 1.0)[:, None]
    middles = (table[:-1] + table[1:]) / 2
    codes = torch.bucketize(shares.flatten()[: values.numel()], middles)
    return codes.to(torch.uint8), scales
