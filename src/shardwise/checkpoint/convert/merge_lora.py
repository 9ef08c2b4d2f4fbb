"""Merge LoRA adapters into their base, a block of rows at a time: W + s·B·A, as a `Source`.

LoRA's layer computes x·Wᵀ + s·(x·Aᵀ)·Bᵀ (arXiv:2106.09685), which is x·(W + s·B·A)ᵀ: without dropout the two are equal
up to rounding. DoRA's is m·(W + s·B·A)/‖W + s·B·A‖, the norm of each output's weights (arXiv:2402.09353).
Every value is computed in float64 and rounded once, to the dtype it is stored in.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import ValidationError

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.format import short_list
from shardwise.checkpoint.matching import MODEL, Selection
from shardwise.checkpoint.readers.reader import Source, TensorInfo
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.errors import ModelError, PlanError, UserError
from shardwise.parallel.lora.quantize import packed_and_unpacked
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.strategy import parse_strategy
from shardwise.units import MIB

BLOCK = 4 * MIB
"""Bytes per block of rows in float64. Block boundaries are the same for every reader, so that sums round the same."""
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight"


@dataclass(frozen=True)
class SavedAdapters:
    """Description of the adapters in a checkpoint.

    Attributes:
        kind: ``lora`` or ``qlora``.
        options: rank, scale and the like.
        targets: the layers that have an adapter.
        base: where the base was read from; ``None`` for a randomly initialized base.
        digest: of the base that was read (`weights.base_digest`); ``None`` for a randomly initialized base.
        seed: that initialized the base; ``None`` where it was read.
        precision: compute dtype of the run (``fp32``, ``bf16``, ``fp16``).
        in_full: names of the parameters that were trained in full beside the adapters, all names of tied ones.
    """

    kind: str
    options: AdapterOptions
    targets: tuple[str, ...]
    base: str | None
    digest: str | None
    seed: int | None
    precision: str
    in_full: tuple[str, ...] = ()

    def names(self, layer: str) -> list[str]:
        """Return the adapter tensors of ``layer``, as named in a manifest."""
        parts = [A, B, MAGNITUDE] if self.options.dora else [A, B]
        return [f"{MODEL}{layer}.{part}" for part in parts]


def holds_adapters(source: Source) -> bool:
    """Return whether this is a Shardwise checkpoint with adapters only."""
    if not isinstance(source, OwnSource):
        return False
    return "adapter" in (source.manifest.model or {}) or bool(source.manifest.plan.get("adapter"))


def saved_adapters(source: Source) -> SavedAdapters:
    """Read the adapters' description from ``source``.

    A custom loop records nothing about its base; plan and tensors give the rest.

    Raises:
        UserError: it is not a checkpoint of adapters, or one that this version does not know.
        ModelError: tensors of an adapter are missing, or there are others.
    """
    if not isinstance(source, OwnSource) or not holds_adapters(source):
        raise UserError(
            f"'{source.place}' ({source.kind}) contains no adapters of a run with +lora or +qlora; give the run, or a "
            "checkpoint of it; full weights are converted to other formats by: shardwise checkpoint convert"
        )
    plan, facts = source.manifest.plan, source.manifest.model or {}
    base: dict[str, Any] = facts.get("base") or {}
    try:
        adapter: dict[str, Any] = facts.get("adapter") or {
            "kind": parse_strategy(str(plan["strategy"])).adapter,
            "options": plan["adapter"],
            "targets": [n.removeprefix(MODEL).removesuffix(f".{A}") for n in source.tensors if n.endswith(f".{A}")],
            "in_full": [n.removeprefix(MODEL) for n in _model_names(source) if ".lora_" not in n],
        }
        found = SavedAdapters(
            kind=str(adapter["kind"]),
            options=AdapterOptions.model_validate(adapter["options"]),
            targets=tuple(map(str, adapter["targets"])),
            base=base.get("weights"),
            digest=base.get("digest"),
            seed=base.get("seed"),
            precision=str(plan.get("precision", "fp32")),
            in_full=tuple(map(str, adapter.get("in_full", ()))),
        )
    except (KeyError, TypeError, ValidationError, PlanError) as error:
        raise UserError(
            f"'{source.place}': its adapters are described in a way that this version does not support "
            f"({' '.join(str(error).split()):.120}); use the version that wrote it"
        ) from None
    wanted = {name for layer in found.targets for name in found.names(layer)}
    wanted |= {source.aliases.get(name, name) for name in (f"{MODEL}{one}" for one in found.in_full)}
    there = _model_names(source)
    problems = []
    if not wanted:
        problems.append("has no adapter at all")
    if wanted - there:
        problems.append(f"lacks {short_list(sorted(wanted - there))}")
    if there - wanted:
        problems.append(f"has {short_list(sorted(there - wanted))}, which no adapter of it has")
    if problems:
        raise ModelError(f"'{source.place}' {' and '.join(problems)}; take another checkpoint of the run")
    return found


def _model_names(source: Source) -> set[str]:
    return {name for name in source.tensors if name.startswith(MODEL)}


class MergedSource:
    """Base with adapters merged in, under the names of the model; a `Source`.

    Keeps one block of rows, A and B of one layer, and for a quantized base one layer's weight in memory.

    Attributes:
        threads: useful number of reading threads: one, so that only one layer is in memory.
        merged: names of the weights that have an adapter.
        dequantized: names of the weights that were dequantized.
        in_full: names of the weights that were trained in full, each with its name among the adapters' tensors.
    """

    threads = 1

    def __init__(
        self,
        base: Source,
        selection: Selection,
        adapters: OwnSource,
        saved: SavedAdapters,
        *,
        transposed: Collection[str],
        packed: Collection[str],
        dtype: torch.dtype | None,
    ) -> None:
        """Open the base and match it with the adapters.

        ``selection`` maps the model's names to tensors of ``base``. ``transposed`` are layers whose weight is stored
        [inputs, outputs]; ``packed`` are those whose dequantized 4-bit weights are used; ``dtype`` is the stored dtype
        of these and of the merged weights, else that of the base.

        Raises:
            ModelError: layers are not in the base, or shapes do not match; lists all of them.
        """
        self.kind = "base with adapters"
        self.place = f"{base.place} + {adapters.place}"
        self.aliases: Mapping[str, str] = selection.aliases
        self.optimizer: Mapping[str, Any] | None = None
        self.step: int | None = adapters.step
        self.notes: Sequence[str] = ()
        self._base, self._adapters, self._saved = base, adapters, saved
        self._origins = {item.name: item.origin for item in selection.items}
        self._transposed = frozenset(transposed)
        self.merged = tuple(f"{MODEL}{layer}.weight" for layer in saved.targets)
        self.dequantized = tuple(f"{MODEL}{layer}.weight" for layer in packed)
        own = {f"{MODEL}{name}" for name in saved.in_full}
        self.in_full = {i.name: adapters.aliases.get(i.name, i.name) for i in selection.items if i.name in own}
        changed = {*self.merged, *self.dequantized}
        self.tensors: Mapping[str, TensorInfo] = {
            item.name: TensorInfo(dtype, item.info.shape)
            if dtype is not None and item.name in changed | self.in_full.keys()
            else item.info
            for item in selection.items
        }
        self._changed = changed
        self._lock = threading.Lock()
        self._layer: _Layer | None = None
        self._check_shapes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._layer = None

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`.

        Raises:
            UserError: a merged value overflows its dtype.
            ModelError: a weight cannot be quantized on this machine.
        """
        if name in self.in_full:
            return self._adapters.read(self.in_full[name], box).to(self.tensors[name].dtype)
        if name not in self._changed:
            return self._base.read(self._origins[name], box)
        with self._lock:
            if self._layer is None or self._layer.name != name:
                self._layer = None  # free one before the next is created
                self._layer = self._layer_of(name)
            found = self._layer.rows(box)
            made = found.to(self.tensors[name].dtype)
        if made.isinf().any():
            raise UserError(
                f"{name.removeprefix(MODEL)} with its adapter holds {float(found.abs().max()):.3g}, and "
                f"{str(made.dtype).removeprefix('torch.')} ends at {torch.finfo(made.dtype).max:.3g}; use --dtype bf16 "
                "or fp32"
            )
        return made

    def _tied_to(self, name: str) -> list[str]:
        """Return the other names of a tied weight."""
        stored = self.aliases.get(name, name)
        return [other for other in (stored, *(a for a, n in self.aliases.items() if n == stored)) if other != name]

    def _layer_of(self, name: str) -> _Layer:
        info, origin = self.tensors[name], self._origins[name]
        layer = name.removeprefix(MODEL).removesuffix(".weight")
        weight = None
        if name in self.dequantized:
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._saved.precision, torch.float32)
            options = self._saved.options
            full = self._base.read(origin, info.full).to(dtype)
            try:
                weight = packed_and_unpacked(full, options.double_quant, options.quant_type)
            except ModelError as error:
                raise ModelError(f"{layer} cannot be quantized here ({error}); merge with --onto original") from None
            del full
        parts: list[torch.Tensor] = []
        if name in self.merged:
            names = self._saved.names(layer)
            parts = [self._adapters.read(n, self._adapters.tensors[n].full).to(torch.float64) for n in names]
        return _Layer(
            name, self._base, origin, info.shape, weight, parts, self._saved.options.scale, layer in self._transposed
        )

    def _check_shapes(self) -> None:
        problems = []
        rank, there = self._saved.options.rank, self._adapters.tensors
        for name, origin in self.in_full.items():
            if there[origin].shape != self.tensors[name].shape:
                short = name.removeprefix(MODEL)
                problems.append(f"{short}: {there[origin].shape}, and the base's is {self.tensors[name].shape}")
        for layer in self._saved.targets:
            if tied := self._tied_to(f"{MODEL}{layer}.weight"):
                shared = ", ".join(name.removeprefix(MODEL) for name in tied)
                problems.append(f"{layer} has an adapter, and its weight is also {shared}, which merging would change")
                continue
            weight = self.tensors.get(f"{MODEL}{layer}.weight")
            if weight is None:
                problems.append(f"{layer} has an adapter, and the base has no {layer}.weight")
                continue
            if len(weight.shape) != 2:
                problems.append(f"{layer}.weight is {weight.shape} in the base, and no matrix")
                continue
            outputs, inputs = reversed(weight.shape) if layer in self._transposed else weight.shape
            wanted = [(rank, inputs), (outputs, rank), (outputs,)]
            for name, shape in zip(self._saved.names(layer), wanted, strict=False):
                if there[name].shape != shape:
                    short = name.removeprefix(MODEL)
                    problems.append(
                        f"{short}: {there[name].shape}, and the base's weight {weight.shape} asks for {shape}"
                    )
        if problems:
            shown = short_list(problems)
            raise ModelError(f"'{self._adapters.place}' does not go with '{self._base.place}': {shown}; give its base")


class _Layer:
    """Merged weight, computed in blocks of rows; caches the last block.

    ``parts`` are A [rank, inputs], B [outputs, rank] and DoRA's magnitudes [outputs], in float64; empty where the layer
    has no adapter. A weight that is ``transposed`` is [inputs, outputs].
    """

    def __init__(
        self,
        name: str,
        base: Source,
        origin: str,
        shape: tuple[int, ...],
        weight: torch.Tensor | None,
        parts: Sequence[torch.Tensor],
        scale: float,
        transposed: bool,
    ) -> None:
        self.name = name
        self._base, self._origin, self._shape, self._weight = base, origin, shape, weight
        self._height = max(1, BLOCK // (shape[1] * 8))
        self._scale, self._transposed = scale, transposed
        self._left: torch.Tensor | None = None
        self._right: torch.Tensor | None = None
        if parts:
            self._left, self._right = (parts[0].T, parts[1].T) if transposed else (parts[1], parts[0])
        self._kept: tuple[int, torch.Tensor] | None = None
        self._factor = self._factors(parts[2]) if len(parts) > 2 else None

    def rows(self, box: Box) -> torch.Tensor:
        """Return the elements of ``box``, in float64."""
        found = torch.empty(box.lengths, dtype=torch.float64)
        start, stop = box.offsets[0], box.offsets[0] + box.lengths[0]
        columns = slice(box.offsets[1], box.offsets[1] + box.lengths[1])
        for index in range(start // self._height, -(-stop // self._height)):
            first = index * self._height
            block = self._block(index)
            low, high = max(start, first), min(stop, first + len(block))
            found[low - start : high - start] = block[low - first : high - first, columns]
        return found

    def _block(self, index: int) -> torch.Tensor:
        if self._kept is None or self._kept[0] != index:
            self._kept = None
            first, found = self._added(index)
            if self._factor is not None:
                found *= self._factor if self._transposed else self._factor[first : first + len(found), None]
            self._kept = (index, found)
        return self._kept[1]

    def _added(self, index: int) -> tuple[int, torch.Tensor]:
        """Compute W + s·B·A for a block of rows; returns the first row, too."""
        first = index * self._height
        count = min(self._height, self._shape[0] - first)
        if self._weight is None:
            weight = self._base.read(self._origin, Box((first, 0), (count, self._shape[1])))
        else:
            weight = self._weight[first : first + count]
        found = weight.to(torch.float64, copy=True)
        if self._left is not None and self._right is not None:
            found.addmm_(self._left[first : first + count], self._right, alpha=self._scale)
        return first, found

    def _factors(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Compute DoRA's factors: m over the norm of each output's weights."""
        squares = torch.zeros_like(magnitudes)
        for index in range(-(-self._shape[0] // self._height)):
            first, found = self._added(index)
            found.square_()
            if self._transposed:
                squares += found.sum(0)
            else:
                squares[first : first + len(found)] = found.sum(1)
        return magnitudes / squares.sqrt()
