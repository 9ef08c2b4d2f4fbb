"""Convert 8-bit optimizer state between block layouts.

Codes are kept where the blocks are the same; other blocks are quantized again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.format import TensorEntry
from shardwise.checkpoint.layout import local_of
from shardwise.optim.adamw8bit import (
    BLOCK,
    MOMENTS,
    AdamW8bit,
    Blocks,
    blocks_of,
    dequantised,
    empty_scales,
    first_element,
    is_quantised,
    quantised,
)

_SCALES = ("absmax1", "absmax2")
_SLAB = 4096 * BLOCK  # elements processed at once


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
        """Return whether codes are unchanged.

        They are if shards begin at multiples of 256 elements in both layouts.
        """
        return self.old.same_as(self.new)

    def finish(self) -> None:
        """Store scales at their new positions; requantize codes and scales where blocks differ."""
        begin = first_element(self.parameter)
        for number, (moment, table) in enumerate(zip(MOMENTS, self.tables, strict=True), 1):
            codes = local_of(self.values[moment]).view(-1)
            scales = local_of(self.values[f"absmax{number}"]).zero_()
            saved = self.saved[f"absmax{number}"].to(codes.device)
            for start in range(0, codes.numel(), _SLAB):
                part = codes[start : start + _SLAB]
                elements = torch.arange(begin + start, begin + start + part.numel(), device=codes.device)
                place = start // BLOCK
                if self.is_exact:
                    own = saved[self.old.scale_of(elements[::BLOCK])]
                else:
                    meant = dequantised(part, saved[self.old.scale_of(elements)], table)
                    made, own = quantised(meant, table)
                    part.copy_(made)
                scales[place : place + own.numel()] = own


def room_for_scales(optimizer: Any, parameter: torch.Tensor, key: str) -> torch.Tensor | None:
    """Allocate the scales of 8-bit state; ``None`` for any other ``key``."""
    blocked = isinstance(optimizer, AdamW8bit) and key in _SCALES and is_quantised(parameter)
    return empty_scales(parameter) if blocked else None


def regrouping(
    optimizer: Any, parameter: torch.Tensor, saved: Mapping[str, TensorEntry], values: dict[str, Any]
) -> Regrouping | None:
    """Return the regrouping of a parameter whose saved block layout differs; else ``None``.

    ``values`` are the saved numbers; ``chunk`` among them becomes that of the parameter here.

    Raises:
        ValueError: the saved values are not 8-bit state.
    """
    if not isinstance(optimizer, AdamW8bit) or not is_quantised(parameter) or not saved:
        return None
    chunk, new = values.get("chunk"), blocks_of(parameter)
    if not isinstance(chunk, int) or chunk < 1 or not set(_SCALES) <= saved.keys():
        raise ValueError("no blocks of 8-bit state in the checkpoint")
    old = Blocks(parameter.numel(), chunk)
    values["chunk"] = new.chunk
    if any(len(saved[name].shape) != 1 or saved[name].shape[0] < old.parts * old.each for name in _SCALES):
        raise ValueError(f"fewer scales in the checkpoint than blocks of {BLOCK}")
    if old.chunk == new.chunk and saved["absmax1"].shape == tuple(empty_scales(parameter).shape):
        return None
    rooms = {name: torch.empty(saved[name].shape) for name in _SCALES}
    tables = optimizer.tables(local_of(parameter).device)
    return Regrouping(parameter, values, rooms, old, new, tables)
