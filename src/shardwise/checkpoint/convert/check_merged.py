"""Verify a LoRA merge: the merged folder gives the outputs of base plus adapters.

Both compute in fp32 on the same fixed inputs. The merged folder is loaded by transformers. The reference is built as in
training, with peft's layers and, for a quantized base, bitsandbytes' ones; it shares no code with the merge. The two
may differ by rounding only, by an amount that depends on the model: the bound is measured on the merged model by
perturbing every weight by its dtype's rounding. Also, every tensor is recomputed and read back.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.checkpoint.convert.check_outputs import (
    UNVERIFIED,
    CannotRun,
    apart,
    as_users_load_it,
    check_memory_for,
    fixed_inputs,
    outputs_of,
    tensors_of,
)
from shardwise.checkpoint.convert.conversion import Progress, pace, read_back, row_boxes
from shardwise.checkpoint.convert.known_model import KnownModel
from shardwise.checkpoint.convert.merge_lora import MergedSource, SavedAdapters
from shardwise.checkpoint.matching import MODEL, Selection
from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.errors import ReceiptError
from shardwise.model.read import clean_name
from shardwise.parallel.lora.adapters import adapted_layers, add_adapters
from shardwise.parallel.lora.quantize import pack, packing_layers
from shardwise.parallel.materialize import materialize
from shardwise.parallel.precision import DTYPES
from shardwise.plan.plan import Plan
from shardwise.units import MIB

ROOM = 8.0
"""Ratio of the bound to the change of the outputs under one random perturbation by rounding.

Each weight is changed by its dtype's epsilon with a random sign; rounding changes it by at most half of that. The rest
allows for another order of summation, which has a similar effect in fp32. Correct merges of the models in the tests
reach 0.02 to 0.15 of the bound.
"""
_PART = 8 * MIB
_NAMED = 3


@dataclass(frozen=True)
class MergeVerdict:
    """Comparison of merged model and base plus adapters; ``None`` where it was impossible.

    All values are maxima over all outputs (logits), ``None`` where not measured.

    Attributes:
        difference: of the merged model from base with adapters.
        bound: how much of it rounding can explain.
        effect: of base with adapters from the base alone.
        from_packed: of the merged model from the trained model with the quantized base, where it was merged onto
            the original.
    """

    verified: bool | None
    text: str
    difference: float | None = None
    bound: float | None = None
    effect: float | None = None
    from_quantized: float | None = None


class NotMerged(ReceiptError):
    """The written model differs from the base with its adapters; carries the verdict."""

    def __init__(self, verdict: MergeVerdict) -> None:
        self.verdict = verdict
        super().__init__(f"the merge does not verify: {verdict.text}; nothing was left at the target")


@dataclass(frozen=True)
class Pieces:
    """Inputs of a merge: model, selected base tensors, adapters, and ``original`` base or not."""

    known: KnownModel
    base: Source
    taken: Selection
    adapters: OwnSource
    saved: SavedAdapters
    onto_original: bool


@torch.no_grad()
def check_merge(
    pieces: Pieces, merged: MergedSource, selection: Selection, place: Folder, progress: Progress
) -> MergeVerdict:
    """Compare the output folder with base plus adapters: model outputs, then every tensor.

    Raises:
        NotMerged: outputs differ by more than rounding, or a tensor differs from the computed one.
        CheckpointError: a file cannot be read.
    """
    try:
        verdict = _compare(pieces, merged, selection, place, progress)
    except CannotRun as error:
        verdict = MergeVerdict(None, f"{UNVERIFIED}: {error}")
    with open_source(place) as written:
        wrong = read_back(merged, selection, written, progress)
    if wrong:
        names = ", ".join(deviation.name.removeprefix(MODEL) for deviation in wrong[:_NAMED])
        text = f"{len(wrong)} tensors in the folder are not what was written (off by up to {wrong[0].difference:.3g})"
        raise NotMerged(MergeVerdict(False, f"{text}: {names}"))
    if verdict.verified is False:
        raise NotMerged(verdict)
    return verdict


def _compare(
    pieces: Pieces, merged: MergedSource, selection: Selection, place: Folder, progress: Progress
) -> MergeVerdict:
    _check_memory(selection)
    progress.begin("forward passes", 0)
    there, inputs, moved = _of_folder(pieces, merged, selection, place)
    kind = "lora" if pieces.onto_original else pieces.saved.kind
    beside, alone = _of_live(pieces, kind, inputs)
    if not all(torch.isfinite(part).all() for part in beside):
        raise CannotRun("the outputs of base and adapters are not all numbers")
    difference, effect = apart(there, beside), apart(beside, alone)
    bound = ROOM * apart(moved, there)
    from_quantized = None
    if pieces.onto_original:
        from_quantized = apart(there, _of_live(pieces, pieces.saved.kind, inputs)[0])
    count = sum(part.numel() for part in there)
    text = (
        f"{count} outputs on fixed inputs differ from those of base and adapters by up to {difference:.3g}; rounding "
        f"explains {bound:.3g}, and the adapters change outputs by up to {effect:.3g}"
    )
    fine = difference <= bound
    if fine:
        text = f"verified by a forward pass: {text}"
        if effect <= bound:
            text += " (which is too little to be seen: that they are in it, only the weights read back show)"
    return MergeVerdict(fine, text, difference, bound, effect, from_quantized)


def _of_folder(
    pieces: Pieces, merged: MergedSource, selection: Selection, place: Folder
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Compute the outputs of the merged folder, and those with randomly perturbed weights.

    Returns outputs, inputs, perturbed outputs.
    """
    stored = {item.name.removeprefix(MODEL): item.info.dtype for item in selection.items}
    wide = {name: torch.float32 if dtype.is_floating_point else dtype for name, dtype in stored.items()}
    module = as_users_load_it(place, "hf", pieces.known, wide, torch.float32)
    inputs = fixed_inputs(module)
    there = outputs_of(module, inputs)
    kept = {item.name.removeprefix(MODEL) for item in selection.items if merged.tensors[item.origin] == item.info}
    kept -= {name.removeprefix(MODEL) for name in (*merged.merged, *merged.dequantized, *merged.in_full)}
    generator = torch.Generator().manual_seed(0)
    seen: set[int] = set()
    for name, tensor in tensors_of(module).items():
        if not tensor.dtype.is_floating_point or name not in stored or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        eps = torch.finfo(torch.float32 if name in kept else stored[name]).eps
        for part in tensor.data.split(max(1, _PART // max(1, tensor[:1].nbytes))) if tensor.dim() else [tensor]:
            signs = torch.randint(0, 2, part.shape, generator=generator, dtype=torch.int8)
            part.mul_(1 + eps * (2.0 * signs - 1))
    moved = outputs_of(module, inputs)
    del module
    gc.collect()
    return there, inputs, moved


def _of_live(
    pieces: Pieces, kind: str, inputs: tuple[torch.Tensor, ...]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Compute the outputs of base plus adapters in fp32, and of the base alone.

    Uses training's layers.
    """
    module = pieces.known.build(torch.float32, real=False)
    add_adapters(module, Plan(strategy=f"ddp+{kind}", adapter=pieces.saved.options))
    materialize(module, torch.device("cpu"), broadcast=False)
    if kind == "qlora":
        for layer in packing_layers(module):  # quantized from the dtype that the run computed in
            dtype = DTYPES[pieces.saved.precision]
            layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    _fill(module, pieces)
    if kind == "qlora":
        pack(module)
        for layer in packing_layers(module):
            layer.quant_state.dtype = torch.float32  # DoRA's norms are those of the unrounded values
    module.eval()
    beside = outputs_of(module, inputs)
    for layer in adapted_layers(module).values():
        layer.enable_adapters(False)
    alone = outputs_of(module, inputs)
    del module
    gc.collect()
    return beside, alone


def _fill(module: nn.Module, pieces: Pieces) -> None:
    """Fill the base's and the adapters' tensors, each in its dtype in ``module``."""
    origins = {item.name: item.origin for item in pieces.taken.items}
    transient = pieces.known.expected().transient
    seen: set[int] = set()
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for raw, tensor in tensors:
        name = clean_name(raw)
        if id(tensor) in seen or name in transient:
            continue
        full = f"{MODEL}{name}"
        full = pieces.taken.aliases.get(full, full)
        source, origin = (pieces.adapters, full) if full in pieces.adapters.tensors else (pieces.base, origins[full])
        seen.add(id(tensor))
        for box in row_boxes(tuple(tensor.shape), tensor.element_size(), pace(source)[0]):
            part = tuple(slice(start, start + count) for start, count in zip(box.offsets, box.lengths, strict=True))
            tensor.data[part].copy_(source.read(origin, box))


def _check_memory(selection: Selection) -> None:
    """Check the memory for two fp32 models in turn, plus a copy of one tensor."""
    sizes: Sequence[int] = [4 * item.info.full.numel for item in selection.items]
    check_memory_for(sum(sizes) + max(sizes))
