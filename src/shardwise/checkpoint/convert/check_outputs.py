"""Verify a conversion by the outputs of source and target model, and by all tensors.

Both models get the same fixed inputs. The source model is filled tensor by tensor through the safe readers, the target
model with the target format's usual loader. Also, every tensor is read back, since a forward pass does not use each row
of an embedding table.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.convert.conversion import Deviation, Progress, To, pace, read_back, row_boxes
from shardwise.checkpoint.convert.known_model import KnownModel
from shardwise.checkpoint.load import load_checkpoint
from shardwise.checkpoint.matching import MODEL, Selection
from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.shard_files import in_threads
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.checkpoint.weights import load_weights
from shardwise.errors import ReceiptError
from shardwise.units import MIB, bytes_text

ROWS, TOKENS = 2, 32  # of the fixed inputs
EXAMPLE = "example_inputs"
UNVERIFIED = "not verified by a forward pass"
_ALIGNED = 64
SPARE = 512 * MIB  # for activations and the largest block in transit
_NAMED = 3
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class OutputVerdict:
    """Comparison of source and target; ``None`` where it was not possible.

    ``max_difference`` is the largest difference of the outputs of the target from those of the source in its own
    dtype: 0.0 if no tensor was cast.
    """

    verified: bool | None
    max_difference: float | None
    text: str


class NotTheSame(ReceiptError):
    """The written tensors differ from the source; carries the verdict."""

    def __init__(self, verdict: OutputVerdict) -> None:
        self.verdict = verdict
        super().__init__(f"the conversion does not verify: {verdict.text}; nothing was left at the target")


class CannotRun(Exception):
    """The model cannot run on this machine, whatever its weights; the text gives the reason."""


@torch.no_grad()
def check_conversion(
    source: Source, selection: Selection, place: Folder, to: To, model: KnownModel | str, progress: Progress
) -> OutputVerdict:
    """Compare the converted checkpoint at ``place`` with ``source``: outputs, then every tensor.

    ``model`` is a text with the reason where the model is not known.

    Raises:
        NotTheSame: outputs or tensors differ by more than the requested rounding.
        CheckpointError: one of them cannot be read.
    """
    verdict = OutputVerdict(None, None, f"{UNVERIFIED}: {model}")
    if isinstance(model, KnownModel):
        try:
            verdict = _compare_outputs(source, selection, place, to, model, progress)
        except CannotRun as error:
            verdict = OutputVerdict(None, None, f"{UNVERIFIED}: {error}")
    with open_source(place) as written:
        wrong = read_back(source, selection, written, progress)
    if wrong or verdict.verified is False:
        raise NotTheSame(OutputVerdict(False, verdict.max_difference, _in_words(verdict, wrong)))
    return verdict


def _in_words(verdict: OutputVerdict, wrong: Sequence[Deviation]) -> str:
    outputs = f"{verdict.text}, and " if verdict.verified is False else ""
    if not wrong:
        return f"{outputs}yet every tensor is the same: the target is built in another way than the source"
    worst = wrong[0]
    others = [deviation.name for deviation in wrong[1:_NAMED]]
    more = f" (also {', '.join(others)}{' and others' if len(wrong) > _NAMED else ''})" if others else ""
    return f"{outputs}the worst tensor is {worst.name}, which is off by up to {worst.difference:.3g}{more}"


def _compare_outputs(
    source: Source, selection: Selection, place: Folder, to: To, known: KnownModel, progress: Progress
) -> OutputVerdict:
    dtypes = {item.name.removeprefix(MODEL): item.info.dtype for item in selection.items if item.name.startswith(MODEL)}
    _check_memory(source, selection)
    progress.begin("forward pass", 0)
    loaded = as_users_load_it(place, to, known, dtypes)
    inputs = fixed_inputs(loaded)
    there = outputs_of(loaded, inputs)
    state = tensors_of(loaded)
    exact = {name: state[name].dtype for name in dtypes}
    del loaded, state
    gc.collect()
    cast = any(source.tensors[item.origin].dtype != item.info.dtype for item in selection.items)
    own = {item.name.removeprefix(MODEL): source.tensors[item.origin].dtype for item in selection.items}
    if known.auto is not None:  # transformers' modules compute in one dtype
        own = dict.fromkeys(own, widest(own.values()))
    reference = known.build(widest(exact.values()))
    _fill(reference, source, selection, own if cast else exact)
    original = outputs_of(reference, inputs)
    rounded = original
    if cast:
        for name, tensor in tensors_of(reference).items():
            tensor.data = tensor.data.to(exact.get(name, tensor.dtype))
        rounded = outputs_of(reference, inputs)
    if not all(torch.isfinite(part).all() for part in rounded):
        raise CannotRun("the outputs of the source's own weights are not all numbers")
    difference = apart(there, original)
    what = f"{sum(part.numel() for part in there)} outputs on fixed inputs"
    if apart(there, rounded) > 0.0:
        return OutputVerdict(False, difference, f"{what} differ from the source's by up to {apart(there, rounded):.3g}")
    if not cast:
        return OutputVerdict(True, 0.0, f"verified by a forward pass: {what} are bit-equal to the source's")
    text = f"verified by a forward pass: {what} are bit-equal to those of the source's weights cast the same way; "
    return OutputVerdict(True, difference, f"{text}from the source's as they are they differ by up to {difference:.3g}")


def as_users_load_it(
    place: Folder, to: To, known: KnownModel, dtypes: Mapping[str, torch.dtype], compute: torch.dtype | None = None
) -> nn.Module:
    """Build the target model: with transformers, `load_checkpoint`, or `load_weights`.

    ``dtypes`` are those of its tensors, by name; transformers goes by ``config.json`` unless ``compute`` is given.
    """
    if to == "hf" and known.auto is not None and isinstance(place, Path):
        given = {} if compute is None else {"dtype": compute}
        try:
            module, message = known.auto.from_pretrained(
                str(place), local_files_only=True, trust_remote_code=False, output_loading_info=True, **given
            )
        except Exception as error:
            text = f"transformers cannot load it: {type(error).__name__}: {' '.join(str(error).split())}"
            raise NotTheSame(OutputVerdict(False, None, text)) from error
        wrong = [f"{what}: {', '.join(map(str, list(keys)[:_NAMED]))}" for what, keys in message.items() if keys]
        if wrong:
            raise NotTheSame(OutputVerdict(False, None, f"transformers loads it with {'; '.join(wrong)}"))
        module.eval()
    else:
        module = known.build(widest(dtypes.values()))
        _set_dtypes(module, dtypes)
        if to == "shardwise":
            load_checkpoint(place, model=module, optimizer=None)
        else:
            load_weights(module, place)
    for tensor in tensors_of(module).values():
        if tensor.data_ptr() % _ALIGNED:  # memory-mapped files have any alignment, and kernels round depending on it
            tensor.data = tensor.data.clone()
    return module


def widest(dtypes: Any) -> torch.dtype:
    """Return the dtype that represents all values of these floating-point dtypes; fp32 for none."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    found = floating[0] if floating else torch.float32
    for dtype in floating[1:]:
        found = torch.promote_types(found, dtype) if dtype != found else found
    return found


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by every name."""
    return {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}


def _set_dtypes(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    for name, tensor in tensors_of(module).items():
        if name in dtypes and tensor.dtype != dtypes[name]:
            tensor.data = torch.empty_like(tensor.data, dtype=dtypes[name])


def _fill(module: nn.Module, source: Source, selection: Selection, dtypes: Mapping[str, torch.dtype]) -> None:
    """Fill a model from the source, block by block, cast to ``dtypes``."""
    _set_dtypes(module, dtypes)
    state = tensors_of(module)
    block, threads = pace(source)

    def fill(name: str, origin: str) -> None:
        tensor = state[name].data
        for box in row_boxes(tuple(tensor.shape), tensor.element_size(), block):
            part = tuple(slice(start, start + count) for start, count in zip(box.offsets, box.lengths, strict=True))
            tensor[part].copy_(source.read(origin, box))

    items = [(i.name.removeprefix(MODEL), i.origin) for i in selection.items if i.name.startswith(MODEL)]
    in_threads(lambda item: fill(*item), items, threads)


def fixed_inputs(module: nn.Module) -> Any:
    """Return the model's inputs: its own example, or fixed tokens or pixels.

    Raises:
        CannotRun: the inputs are not known.
    """
    if callable(getattr(module, EXAMPLE, None)):
        try:
            return _real(getattr(module, EXAMPLE)())
        except Exception as error:
            raise CannotRun(f"{EXAMPLE}() of the model raised {type(error).__name__}: {error}") from error
    facts = getattr(module, "config", None)
    if getattr(module, "main_input_name", "") == "pixel_values":
        side, channels = getattr(facts, "image_size", 224), getattr(facts, "num_channels", 3)
        return {"pixel_values": _real(torch.empty(ROWS, channels, side, side, device="meta"))}
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    if not tables:
        raise CannotRun(f"the model has no embedding, so what it reads is not known; give it a method {EXAMPLE}()")
    longest = getattr(facts, "max_position_embeddings", None)
    length = min(TOKENS, longest) if isinstance(longest, int) and longest > 0 else TOKENS
    known = getattr(facts, "vocab_size", None)
    vocabulary = known if isinstance(known, int) else tables[0].num_embeddings
    ids = (torch.arange(ROWS * length) * 7919 % vocabulary).reshape(ROWS, length)  # a prime: spread over the table
    if getattr(facts, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids}
    return (ids,)


def _real(inputs: Any) -> Any:
    """Replace meta tensors by fixed values."""
    if isinstance(inputs, Mapping):
        return {name: _real(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_real(value) for value in inputs)
    if isinstance(inputs, torch.Tensor) and inputs.device.type == "meta":
        count = torch.arange(math.prod(inputs.shape)).reshape(inputs.shape)
        return torch.sin(count).to(inputs.dtype) if inputs.dtype.is_floating_point else (count % 2).to(inputs.dtype)
    return inputs


def outputs_of(module: nn.Module, inputs: Any) -> list[torch.Tensor]:
    """Return every floating-point output tensor of the model; only the logits, where marked.

    Raises:
        CannotRun: the forward pass raises, or returns none.
    """
    wide = next((tensor.dtype for tensor in module.parameters() if tensor.dtype.is_floating_point), torch.float32)
    try:
        if isinstance(inputs, Mapping):
            found = module(**{name: _in(value, wide) for name, value in inputs.items()})
        else:
            found = module(*(_in(value, wide) for value in (inputs if isinstance(inputs, tuple) else (inputs,))))
    except Exception as error:
        text = " ".join(str(error).split())
        raise CannotRun(f"the model's forward raised {type(error).__name__}: {text:.300}") from error
    logits = getattr(found, "logits", None)
    parts = [logits] if isinstance(logits, torch.Tensor) else _floats(found)
    if not parts:
        raise CannotRun(f"the model's forward returned a {type(found).__name__} without floating-point tensors")
    return parts


def _in(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else value


def _floats(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found] if found.dtype.is_floating_point else []
    values = found.values() if isinstance(found, Mapping) else found if isinstance(found, tuple | list) else ()
    return [tensor for value in values for tensor in _floats(value)]


def apart(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest difference; infinite for NaNs or different shapes."""
    worst = 0.0
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape:
            return math.inf
        far = (one.to(torch.float64) - other.to(torch.float64)).abs().max() if one.numel() else torch.zeros(())
        worst = max(worst, math.inf if far.isnan() else float(far))
    return worst


def _check_memory(source: Source, selection: Selection) -> None:
    weights = [item for item in selection.items if item.name.startswith(MODEL)]
    sizes = [max(item.info.num_bytes, source.tensors[item.origin].num_bytes) for item in weights]
    check_memory_for(sum(sizes))


def check_memory_for(num_bytes: int) -> None:
    """Check that there is memory for models of ``num_bytes``.

    Raises:
        CannotRun: there is not enough.
    """
    needed, free = num_bytes + SPARE, free_memory()
    if needed > free:
        raise CannotRun(f"the model needs {bytes_text(needed)} of memory, and {bytes_text(free)} are free")


def free_memory() -> int:
    """Return the host memory that this process may still use, limited by its control group."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        most = int((_CGROUP / "memory.max").read_text())
        usage = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return min(free, most - int(usage["anon"]))
    except (OSError, ValueError, KeyError):  # no control group, or one without a limit
        return free
