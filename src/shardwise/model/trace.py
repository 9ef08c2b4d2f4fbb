"""Trace the profile of any ``nn.Module`` by one forward on fake tensors.

The forward runs in bf16 as a module of bf16 weights does (FSDP2), so that upcasts appear as fp32; a module that fails
in bf16 is traced in fp32. It takes no memory, needs no weights, and does not change the module.

Not counted: allocations of backward (part of the cost model), buffers, and the loss, unless it is the module's own
output: cross-entropy over the outputs replaces it. ``heads`` are set only where the tensor-parallel sharding of the
blocks could be derived.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import ModelError
from shardwise.model.grouped_products import GroupedProducts
from shardwise.model.operations import cross_entropy, mark_selective
from shardwise.model.profile import ModelProfile, Op, Unit, UnitKind, Weight
from shardwise.model.read import clean_name, find_blocks
from shardwise.model.trace_experts import mark_experts
from shardwise.model.trace_operations import AsOnCuda, Bounded, OperationRecorder, Segment, operations, storage_key
from shardwise.model.trace_tensor_parallel import mark_tp_shardings, weight_dims

EXAMPLE = "example_inputs"


def trace_module(
    module: nn.Module | Callable[[], nn.Module],
    *,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    inputs: Any = None,
    name: str | None = None,
    precision: Literal["bf16", "fp32"] = "bf16",
    device: Literal["cpu", "cuda"] = "cuda",
    under_autocast: bool = False,
) -> ModelProfile:
    """Trace a module, or the result of a factory, over one sample.

    Args:
        precision: compute dtype: a module in fp32 has no upcasts and saves no such copies.
        device: device whose kernels are counted.
        under_autocast: trace it also in bf16 under autocast, as with replicated weights, into ``Unit.autocast_ops``.
        seq_len: tokens of a sample; the module is called with integer ids [1, seq_len].
        vocab_size: vocabulary size of the profile, where the outputs are not logits.
        inputs: inputs of the module instead: a tensor, a tuple of positional or a dict of named arguments.
            Sizes are divided by the first tensor's dim 0. A module may have a method ``example_inputs()`` that
            returns the same.

    Raises:
        ModelError: the factory fails, the module's inputs are not known, or it does not run on fake tensors.
    """
    label = name or getattr(module, "__name__", None) or type(module).__name__
    built = module if isinstance(module, nn.Module) else build_on_meta(module, label)
    was_training = {part: part.training for part in built.modules()}
    built.train()
    try:
        arguments = _arguments(built, seq_len, inputs, label)
        run = _Run(built, arguments, label, vocab_size, on_cuda=device == "cuda")
        if precision == "fp32":
            try:
                return _traced(run, torch.float32)
            except ModelError:
                raise
            except Exception as error:
                raise ModelError(_reason(error, label)) from error
        try:
            found = _traced(run, torch.bfloat16)
        except ModelError:
            raise
        except Exception as error:
            first = _one_line(error)
            if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
                raise ModelError(_reason(error, label)) from error
        else:
            return _with_autocast(found, run) if under_autocast else found
        note = (
            f"'{label}' does not run in bf16 ({first}); traced in fp32, so tensors saved in fp32 are not distinguished"
        )
        try:
            return _traced(run, torch.float32, (note,))
        except Exception as error:
            raise ModelError(_reason(error, label)) from error
    finally:
        for part, mode in was_training.items():
            part.training = mode


def build_on_meta(factory: Callable[[], Any], label: str) -> nn.Module:
    """Call ``factory`` with all parameters on the meta device; buffers are real.

    Raises:
        ModelError: it raises, or does not return a module.
    """
    made = WeakIdKeyDictionary()  # a parameter registered under two names must stay one

    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.device.type == "meta" or type(parameter) is not nn.Parameter:
            return None
        if parameter not in made:
            made[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        return made[parameter]

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = factory()
    except ModelError:
        raise
    except Exception as error:
        text = f"model '{label}': building it raised {_one_line(error)}"
        if "cuda" in str(error).lower() or "nvidia" in str(error).lower():
            fix = "a plan needs no GPU: build the module on the CPU and leave moving it to the training code"
        elif isinstance(error, OSError):
            fix = "build the module without reading data or weights; its shapes are all that a plan needs"
        else:
            fix = "give a function without required arguments that returns a torch.nn.Module and needs no data"
        raise ModelError(f"{text}; {fix}") from error
    finally:
        hook.remove()
    if not isinstance(module, nn.Module):
        raise ModelError(f"model '{label}' gave a {type(module).__name__}; it must give a torch.nn.Module")
    return module


def _arguments(
    module: nn.Module, seq_len: int | None, inputs: Any, label: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of the forward."""
    if inputs is None and hasattr(module, EXAMPLE):
        try:
            inputs = getattr(module, EXAMPLE)()
        except Exception as error:
            raise ModelError(f"model '{label}': {EXAMPLE}() raised {_one_line(error)}; repair it") from error
    if inputs is None:
        if not any(isinstance(part, nn.Embedding) for part in module.modules()):
            raise ModelError(
                f"model '{label}' has no embedding, so it does not read tokens, and what it reads is not known; give "
                f"it a method {EXAMPLE}() that returns the inputs of one sample, such as torch.zeros(1, 3, 224, 224)"
            )
        if seq_len is None:
            raise ModelError(f"model '{label}' reads tokens, and the length of a sample is not given; set --seq-len")
        inputs = _ids(seq_len)
    if seq_len is not None and isinstance(inputs, torch.Tensor) and _is_ids(inputs):
        inputs = _ids(seq_len)  # an example of another length
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _ids(seq_len: int) -> torch.Tensor:
    return torch.zeros(1, seq_len, dtype=torch.int64, device="meta")


def _is_ids(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32)


@dataclass(frozen=True)
class _Run:
    """Inputs of a trace: module, arguments and device."""

    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    label: str
    vocab_size: int | None
    on_cuda: bool


def _with_autocast(profile: ModelProfile, run: _Run) -> ModelProfile:
    """Add the autocast ops to every unit.

    Unchanged where that run fails or has another structure.
    """
    try:
        under = _traced(run, torch.bfloat16, autocasts=True)
    except Exception:  # the cost model's default rule replaces it
        return profile
    pairs = [[unit for unit in found.units for _ in range(unit.count)] for found in (profile, under)]
    plain, cast = ([(unit.kind, [w.name for w in unit.weights]) for unit in units] for units in pairs)
    if plain != cast:
        return profile
    units = [replace(one, count=1, autocast_ops=other.ops) for one, other in zip(*pairs, strict=True)]
    return replace(profile, units=tuple(_merged(units)))


def _merged(units: Iterable[Unit]) -> list[Unit]:
    """Merge consecutive equal blocks."""
    merged: list[Unit] = []
    for unit in units:
        if merged and unit.kind == "block" and replace(merged[-1], count=1) == unit:
            merged[-1] = replace(unit, count=merged[-1].count + 1)
        else:
            merged.append(unit)
    return merged


def _traced(run: _Run, compute: torch.dtype, notes: tuple[str, ...] = (), *, autocasts: bool = False) -> ModelProfile:
    """Trace the module; under autocast weights and inputs are fp32, as under DDP."""
    module, label, vocab_size, arguments = run.module, run.label, run.vocab_size, run.arguments
    stored = torch.float32 if autocasts else compute
    widths = {n: p.element_size() for n, p in module.named_parameters(remove_duplicate=False)}
    with (
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True),
        GroupedProducts(),
        _fake_state(module, stored) as (own, trainable, buffers),
    ):
        warnings.simplefilter("ignore")
        args, kwargs = _pytree.tree_map_only(torch.Tensor, lambda t: _fake_like(t, stored), arguments)
        given = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        samples = max(1, given[0].shape[0]) if given and given[0].ndim else 1
        recorder = OperationRecorder(
            own, trainable, buffers | {storage_key(t) for t in given}, compute, autocasts=autocasts
        )
        like = AsOnCuda(recorder) if run.on_cuda else contextlib.nullcontext()
        narrow = torch.autocast("cpu", dtype=compute, enabled=autocasts)
        saves = torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor)
        blocks = find_blocks(module)
        with _borders(module, blocks, recorder), _one_sequence(), saves, recorder, Bounded(recorder), like, narrow:
            outputs = module(*args, **kwargs)
        segments = recorder.finish()
        result = _output(outputs)
        kept = recorder.kept | recorder.crossed | ({storage_key(result)} if result is not None else set())
        loss, classes = _loss(result, samples, given, vocab_size)
    divisible = mark_tp_shardings(segments)
    dims = {own[key]: dim for key, dim in weight_dims(segments).items() if key in own}
    if loss is not None and divisible:
        loss = replace(loss, tp_sharding="vocab")
    units = _units(module, blocks, segments, kept, own, samples, compute, loss, widths, dims)
    config = getattr(module, "config", None)
    longest = getattr(config, "max_position_embeddings", None)
    heads, kv_heads = _heads(units, config) if divisible else (None, None)
    first = next((segment for segment in segments if segment.block is not None), None)
    return ModelProfile(
        name=label,
        units=tuple(units),
        seq_len=given[0].shape[1] if given and _is_ids(given[0]) else None,
        origin="traced",
        hidden_size=first.width if first is not None else None,
        vocab_size=vocab_size or classes,
        heads=heads,
        kv_heads=kv_heads,
        max_seq_len=longest if isinstance(longest, int) else None,
        tied=_tied(module),
        source=f"traced with torch {torch.__version__}",
        unknown=notes + (() if loss is not None else ("the loss is taken to be the module's own output",)),
    )


def _fake_like(tensor: torch.Tensor, compute: torch.dtype | None) -> torch.Tensor:
    """Create a fake tensor of the same shape and strides.

    Floating-point ones are in ``compute``, if given.
    """
    dtype = compute if compute is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")


@contextlib.contextmanager
def _fake_state(module: nn.Module, compute: torch.dtype) -> Iterator[tuple[dict[int, str], set[int], set[int]]]:
    """Replace parameters, buffers and tensor attributes by fake ones; restores them.

    Ties are kept. Parameters are in ``compute``; buffers keep their dtype, as FSDP2 leaves them. Yields the parameters'
    storages with their names, those of the trainable ones, and those of the rest.
    """
    made: dict[int, torch.Tensor] = {}
    own: dict[int, str] = {}
    trainable: set[int] = set()
    others: set[int] = set()
    undo: list[tuple[dict[str, Any], str, Any]] = []
    for path, part in module.named_modules():
        for place in (part._parameters, part._buffers, part.__dict__):
            for name, value in list(place.items()):
                if not isinstance(value, torch.Tensor):
                    continue
                undo.append((place, name, value))
                if id(value) not in made:
                    is_parameter = isinstance(value, nn.Parameter)
                    fake = _fake_like(value.detach(), compute if is_parameter else None)
                    made[id(value)] = nn.Parameter(fake, value.requires_grad) if is_parameter else fake
                    key = storage_key(made[id(value)])
                    if is_parameter:
                        own[key] = clean_name(f"{path}.{name}" if path else name)
                        trainable |= {key} if value.requires_grad else set()
                    else:
                        others.add(key)
                place[name] = made[id(value)]
    try:
        yield own, trainable, others
    finally:
        for place, name, value in undo:
            place[name] = value


@contextlib.contextmanager
def _borders(module: nn.Module, blocks: list[str], recorder: OperationRecorder) -> Iterator[None]:
    """Add hooks that report block boundaries to the recorder."""
    depth = 0

    def before(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal depth
            depth += 1
            if depth == 1:
                floats = _floats((args, kwargs))
                recorder.begin(name, [t for t in floats if t.requires_grad] or floats[:1])

        return hook

    def after(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            recorder.begin(None, _floats(output))

    handles = []
    for block in blocks:
        part = module.get_submodule(block)
        handles.append(part.register_forward_pre_hook(before(clean_name(block)), with_kwargs=True))
        handles.append(part.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _one_sequence() -> Iterator[None]:
    """Make transformers treat a row as one sequence, inside the context.

    It inspects the values of position indices for that; fake ones have none, so it would build a mask, which a real run
    with plain rows does not.
    """
    masks, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    before = getattr(masks, name, None)
    if masks is None or before is None:
        yield
        return
    setattr(masks, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masks, name, before)


def _floats(tree: Any) -> list[torch.Tensor]:
    return [t for t in _pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _output(outputs: Any) -> torch.Tensor | None:
    """Return the module's main output: itself, its ``logits``, or its first float tensor."""
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    leaves = _pytree.tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    return next((t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()), None)


def _loss(
    result: torch.Tensor | None, samples: int, given: list[torch.Tensor], vocab_size: int | None
) -> tuple[Op | None, int | None]:
    """Return the loss op and its number of classes; none where the output is a loss already."""
    if result is None or result.ndim == 0 or result.numel() <= samples:
        return None, None
    elements = result.numel() // samples
    tokens = bool(given) and not given[0].is_floating_point()
    if result.ndim == 2 or (tokens and result.ndim == 3):
        classes = result.shape[-1]
        return cross_entropy(elements // classes, classes), classes
    return Op("loss", "loss", moved=2 * elements, moved_fp32=3 * elements, launches=3, saved_fp32=elements), None


def _units(
    module: nn.Module,
    blocks: list[str],
    segments: list[Segment],
    kept: set[int],
    own: dict[int, str],
    samples: int,
    compute: torch.dtype,
    loss: Op | None,
    widths: dict[str, int],
    dims: dict[str, int],
) -> list[Unit]:
    """Build units in order of execution; consecutive equal ones are merged."""
    parameters = {clean_name(n): p for n, p in module.named_parameters()}
    members = {clean_name(block): _names_under(module, block, parameters) for block in blocks}
    inside = {name: block for block, names in members.items() for name in names}
    placed: set[str] = set()
    units: list[Unit] = []
    runs = [s for s in segments if s.block is not None or s.ops]
    ran = {segment.block for segment in runs if segment.block is not None}
    for index, segment in enumerate(runs):
        prefix = f"{segment.block}." if segment.block is not None else ""
        wanted = members[segment.block] if segment.block is not None else segment.parameters
        wanted = [n for n in wanted if n not in placed and (segment.block is not None or n not in inside)]
        if index == len(runs) - 1:  # read by no operation
            wanted += [n for n in parameters if n not in placed and n not in wanted and inside.get(n) not in ran]
        placed |= set(wanted)
        weights = tuple(_weight(n.removeprefix(prefix), parameters[n], widths[n], dims.get(n)) for n in wanted)
        ops = tuple(operations(segment, kept, own, prefix, samples, compute))
        kind: UnitKind = "block" if segment.block is not None else _kind(index, len(runs))
        if kind == "block":
            ops = mark_selective(ops)
        elif index == len(runs) - 1 and loss is not None:
            ops = (*ops, loss)
        label = "block" if kind == "block" else kind
        units.append(mark_experts(Unit(label, kind, weights, ops, round(segment.input_elements / samples))))
    units = _merged(units)
    if units and units[-1].kind == "block" and loss is not None:
        units.append(Unit("head", "head", (), (loss,), 0))
    return units


def _heads(units: list[Unit], config: Any) -> tuple[int | None, int | None]:
    """Return the heads of the first attention; of the config, if attention is not fused."""
    found = next((op for unit in units for op in unit.ops if op.kind == "attention"), None)
    if found is not None:
        return found.heads, found.kv_heads
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return (heads, kv_heads) if isinstance(heads, int) and isinstance(kv_heads, int) else (None, None)


def _kind(index: int, number: int) -> UnitKind:
    if number == 1:
        return "other"
    return "embedding" if index == 0 else "head" if index == number - 1 else "other"


def _names_under(module: nn.Module, block: str, known: Mapping[str, nn.Parameter]) -> list[str]:
    names = (clean_name(f"{block}.{name}") for name, _ in module.get_submodule(block).named_parameters())
    return [name for name in names if name in known]


def _weight(name: str, parameter: nn.Parameter, itemsize: int, tp_dim: int | None) -> Weight:
    shape = tuple(parameter.shape)
    return Weight(name, shape, itemsize=float(itemsize), trainable=parameter.requires_grad, tp_dim=tp_dim)


def _tied(module: nn.Module) -> tuple[tuple[str, str], ...]:
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), clean_name(name))
        pairs += [(kept, clean_name(name))] if kept != clean_name(name) else []
    return tuple(pairs)


def _one_line(error: Exception) -> str:
    """Format an exception on one line, with its location outside of libraries."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if len(text) > 240:
        text = f"{text[:237]}..."
    libraries = (str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
    if not frames:
        return text
    return f"{text} at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line or ''}".rstrip(": ")


def _reason(error: Exception, label: str) -> str:
    """Explain why a module cannot be traced, and the fix."""
    func = getattr(error, "func", None)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        where = _one_line(error).partition(" at ")[2]
        what = "a value" if isinstance(error, DataDependentOutputException) else "a shape that depends on values"
        return (
            f"model '{label}' cannot be traced: {func} needs {what}{f' at {where}' if where else ''}, and a plan is "
            "made without data; branch on shapes or use torch.where, or describe the model by a configuration"
        )
    if "Couldn't swap" in str(error):  # torch.nn.Module._apply of weights without memory
        return (
            f"model '{label}' cannot be traced: its forward moves or casts its own weights (Module.to), as the router "
            f"of Switch Transformers does, and a plan is made without them ({_one_line(error)}); move or cast them "
            "where the model is built, or plan another model of its size"
        )
    return (
        f"model '{label}' cannot be traced: its forward raised {_one_line(error)}; it must run on the CPU with the "
        f"inputs of one sample: set --seq-len, or give it a method {EXAMPLE}() that returns them"
    )
