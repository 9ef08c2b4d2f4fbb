"""A checkpoint of adapters as the folder that peft writes and reads: one safetensors file and its configuration.

Its receipt: peft's own loader and the layers that were trained give the same outputs. What base they stand beside does
not matter for that: both get the same one, drawn from a seed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.convert.check_outputs import (
    UNVERIFIED,
    CannotRun,
    NotTheSame,
    OutputVerdict,
    apart,
    check_memory_for,
    fixed_inputs,
    outputs_of,
)
from shardwise.checkpoint.convert.conversion import Progress, read_back
from shardwise.checkpoint.convert.known_model import KnownModel
from shardwise.checkpoint.convert.merge_lora import MAGNITUDE, SavedAdapters
from shardwise.checkpoint.matching import MODEL, Selection, TargetTensor
from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.readers.reader import TensorInfo
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.model.read import clean_name
from shardwise.parallel.lora.adapters import add_adapters
from shardwise.parallel.materialize import build
from shardwise.plan.plan import Plan

_WRAPPED = "base_model.model."  # prefix that peft's wrapper adds to the model's names


def peft_selection(source: OwnSource, saved: SavedAdapters, dtype: torch.dtype | None) -> Selection:
    """Select the adapters under peft's names, in ``dtype`` or unchanged."""
    items = []
    for name in (name for layer in saved.targets for name in saved.names(layer)):
        info = source.tensors[name]
        inner = name.removeprefix(MODEL)
        if inner.endswith(MAGNITUDE):
            inner = inner.removesuffix(".weight")
        items.append(TargetTensor(f"{MODEL}{_WRAPPED}{inner}", name, TensorInfo(dtype or info.dtype, info.shape)))
    for name in saved.in_full:  # a tied one under each name: peft keeps a copy of each module
        origin = source.aliases.get(f"{MODEL}{name}", f"{MODEL}{name}")
        info = source.tensors[origin]
        items.append(TargetTensor(f"{MODEL}{_WRAPPED}{name}", origin, TensorInfo(dtype or info.dtype, info.shape)))
    return Selection(tuple(items), {}, {}, (), ())


def peft_config(saved: SavedAdapters, *, transposed: bool, causal: bool) -> dict[str, Any]:
    """Build ``adapter_config.json``.

    ``transposed`` where layers store [inputs, outputs], ``causal`` for a language model.
    """
    options = saved.options
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": saved.base,
        "inference_mode": True,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "use_rslora": options.rslora,
        "use_dora": options.dora,
        "target_modules": list(saved.targets),
        "modules_to_save": list(dict.fromkeys(name.rpartition(".")[0] for name in saved.in_full)) or None,
        "fan_in_fan_out": transposed,
        "bias": "none",
    }


@torch.no_grad()
def check_peft_folder(
    source: OwnSource, saved: SavedAdapters, selection: Selection, place: Folder, known: KnownModel, progress: Progress
) -> OutputVerdict:
    """Compare the adapter folder at ``place`` with ``source`` on one random base.

    First the outputs, then every tensor.

    Raises:
        NotTheSame: peft cannot load it, or gives other outputs, or tensors differ.
        CheckpointError: a file cannot be read.
    """
    try:
        verdict = _compare(source, saved, selection, place, known, progress)
    except CannotRun as error:
        verdict = OutputVerdict(None, None, f"{UNVERIFIED}: {error}")
    with open_source(place) as written:
        wrong = read_back(source, selection, written, progress)
    if wrong:
        raise NotTheSame(OutputVerdict(False, None, f"{wrong[0].name} is off by up to {wrong[0].difference:.3g}"))
    if verdict.verified is False:
        raise NotTheSame(verdict)
    return verdict


def _compare(
    source: OwnSource, saved: SavedAdapters, selection: Selection, place: Folder, known: KnownModel, progress: Progress
) -> OutputVerdict:
    if not isinstance(place, Path):
        raise CannotRun("peft loads folders, and this is a URL")
    check_memory_for(2 * 4 * sum(p.numel() for p in known.build(real=False).parameters()))
    progress.begin("forward passes", 0)
    live = _drawn(known)
    inputs = fixed_inputs(live)
    alone = outputs_of(live, inputs)
    add_adapters(live, Plan(strategy="ddp+lora", adapter=saved.options))
    stored = {item.origin: item.info.dtype for item in selection.items}
    for raw, parameter in live.named_parameters():
        name = f"{MODEL}{clean_name(raw)}"
        if name in stored:
            parameter.copy_(source.read(name, source.tensors[name].full).to(stored[name]))
    here = outputs_of(live.eval(), inputs)
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft about transformers
            loaded = PeftModel.from_pretrained(_drawn(known), str(place))
    except Exception as error:
        text = f"peft cannot load it: {type(error).__name__}: {' '.join(str(error).split())}"
        raise NotTheSame(OutputVerdict(False, None, text)) from error
    there = outputs_of(loaded.eval(), inputs)
    difference = apart(there, here)
    count = sum(part.numel() for part in there)
    if difference > 0.0 or not all(torch.isfinite(part).all() for part in here):
        text = f"{count} outputs on fixed inputs differ by up to {difference:.3g} where peft has loaded the adapters"
        return OutputVerdict(False, difference, text)
    return OutputVerdict(
        True,
        0.0,
        f"verified by a forward pass: with peft's loader {count} outputs on fixed inputs and a drawn base are "
        f"bit-equal to those of the layers that were trained, which change them by up to {apart(here, alone):.3g}",
    )


def _drawn(known: KnownModel) -> nn.Module:
    return build(lambda: known.make(torch.float32), 0, real=True).eval()
