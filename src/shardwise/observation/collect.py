"""Collect one rank's facts from live objects: DTensors, DDP, FSDP, optimizers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.errors import UserError
from shardwise.measure import state
from shardwise.model.read import clean_name, dtype_name
from shardwise.observation.engine_steps import EngineSteps
from shardwise.observation.loop_facts import BufferFacts, LoopFacts, ParameterFacts, TrafficFacts
from shardwise.observation.loop_trace import LoopTrace, random_modules
from shardwise.receipts.drift import bit_sums
from shardwise.receipts.expected_part import group_of, holding_units

_WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_forward_module.")
_HAND_REDUCED = 0.1  # of the gradient's elements; less is a loss or a norm
Flat = dict[int, tuple[int, int, str]]  # by the id of an FSDP1 parameter: full elements, shards, this rank's part


def name_of(name: str) -> str:
    """Remove what wrappers add to a parameter's name."""
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return clean_name(name)


def tied_groups(root: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name_of(name))
    return tuple(tuple(sorted(group)) for group in names.values() if len(group) > 1)


def declared_ties(root: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return what a Hugging Face model says is tied: its input and output embeddings."""
    config = getattr(root, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(root, "get_output_embeddings"):
        return ()
    ends: list[Any] = [root.get_input_embeddings(), root.get_output_embeddings()]  # type: ignore[operator]
    if None in ends or ends[0] is ends[1]:
        return ()
    paths = {id(part): name for name, part in root.named_modules(remove_duplicate=False)}
    names = [f"{paths[id(end)]}.weight" for end in ends if id(end) in paths and hasattr(end, "weight")]
    return (tuple(sorted(name_of(name) for name in names)),) if len(names) == 2 else ()


def collect(trace: LoopTrace, earlier: Sequence[str], tied_before: tuple[tuple[str, ...], ...]) -> LoopFacts:
    """Return this rank's facts, after the observed step."""
    root, optimizers = trace.root, trace.optimizers
    world = dist.get_world_size() if dist.is_initialized() else 1
    parameters = tuple(_parameters(trace))
    trained = sum(p.elements for p in parameters if p.trainable)
    after = trace.after_elements()
    live = {id(p) for p in root.parameters()}
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    states = [t for optimizer in optimizers for t in state.optimizer_tensors(optimizer) if t.ndim]
    reducing = [
        item.dtype
        for item in trace.recorder.collectives
        if item.name in ("all_reduce", "reduce_scatter") and item.phase == "backward"
    ]
    units = holding_units(root)
    has_dtensors = any(isinstance(p, DTensor) for p in root.parameters())
    return LoopFacts(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        world_size=world,
        wrapper=_wrapper_of(trace),
        units=len(units) or sum(isinstance(part, FSDP1) for part in root.modules()),
        parameters=parameters,
        buffers=tuple(_buffers(trace)) if world > 1 else (),
        foreign=sum(id(p) not in live for p in held),
        state_elements=_engine_state(optimizers),
        state_dtypes=tuple(sorted({dtype_name(t.dtype) for t in states})),
        state_devices=tuple(sorted({state.local(t).device.type for t in states})),
        gradient_dtypes=tuple(sorted(trace.gradient_dtypes)),
        product_dtypes=tuple(sorted(trace.recorder.matmul_dtypes)),
        reduction_dtypes=tuple(sorted(set(reducing))),
        traffic=tuple(_traffic(trace)),
        forwards=trace.forwards,
        bypassed=trace.bypassed,
        backward_elements=tuple(trace.backward_elements()),
        after_elements=after if after >= _HAND_REDUCED * trained else 0,
        sync_refused=trace.sync_refused,
        products=trace.products,
        recomputed=trace.recomputed,
        offloads=_offloads(root, units),
        norm_backward=trace.norm_backward,
        norm_step=trace.norm_step,
        samples=tuple(trace.samples),
        earlier=tuple(earlier),
        training=trace.training,
        quiet=trace.quiet,
        dropouts=len(random_modules(root)),
        tied_before=tied_before,
        tied_declared=declared_ties(root),
        tied_now=tied_groups(root),
        unknown=("tensor parallel",) if has_dtensors and (not units or _has_more_axes(root, units)) else (),
    )


def _has_more_axes(root: nn.Module, units: Sequence[Any]) -> bool:
    """Return whether parameters are sharded over more axes than those of FSDP2."""
    axes = max(group_of(unit).mesh_info.mesh.ndim for unit in units)
    return any(isinstance(p, DTensor) and p.device_mesh.ndim > axes for p in root.parameters())


def _engine_state(optimizers: Sequence[Any]) -> int | None:
    """Return the elements whose state an engine keeps on this rank; ``None`` without an engine."""
    if not isinstance(optimizers[-1], EngineSteps):
        return None
    rows = optimizers[-1].state.values()
    return sum(max((t.numel() for t in row.values() if isinstance(t, torch.Tensor)), default=0) for row in rows)


def _wrapper_of(trace: LoopTrace) -> str:
    last: Any = trace.optimizers[-1]
    if isinstance(last, EngineSteps):
        return last.wrapper
    if isinstance(trace.wrapper, DistributedDataParallel):
        return "DDP"
    parts = list(trace.root.modules())
    sharded = [part for part in parts if isinstance(part, FSDPModule)]
    if sharded:  # `replicate` of newer versions is DDP, by the code of FSDP2
        names = {base.__name__ for part in sharded for base in type(part).__mro__}
        return "DDP" if "ReplicateModule" in names else "FSDP2"
    if any(isinstance(part, FSDP1) for part in parts):
        return "FSDP1"
    return "none"


def _parameters(trace: LoopTrace) -> Iterator[ParameterFacts]:
    root = trace.root
    world = dist.get_world_size() if dist.is_initialized() else 1
    flat = _flat_parameters(root)
    held = Counter(id(p) for one in trace.optimizers for group in one.param_groups for p in group["params"])
    stated = {
        id(p)
        for one in trace.optimizers
        for p, row in getattr(one, "optim", one).state.items()
        if any(isinstance(value, torch.Tensor) and value.ndim for value in row.values())
    }
    named = list(root.named_parameters())
    shared = [p for _, p in named if world > 1 and _part_of(p, flat)[0] < world and _is_summable(p)]
    sums = dict(zip(map(id, shared), bit_sums([state.local(p.detach()) for p in shared]), strict=True))
    for name, p in named:
        shards, part, placement = _part_of(p, flat)
        yield ParameterFacts(
            name=name_of(name),
            elements=flat[id(p)][0] if id(p) in flat else int(getattr(p, "ds_numel", p.numel())),
            local_elements=p.ds_tensor.numel() if hasattr(p, "ds_tensor") else state.local(p).numel(),
            dtype=dtype_name(p.dtype),
            trainable=p.requires_grad,
            placement=placement,
            shards=shards,
            part=part,
            held=held[id(p)],
            has_state=id(p) in stated,
            norm=trace.norms.get(id(p)),
            bits=sums.get(id(p)),
        )


def _part_of(p: torch.Tensor, flat: Flat) -> tuple[int, str, str]:
    """Return the number of shards, this rank's part, and the placement as text."""
    if id(p) in flat:
        _, shards, part = flat[id(p)]
        return shards, part, f"in flat shards over {shards} ranks" if shards > 1 else "replicated"
    if hasattr(p, "ds_tensor"):  # ZeRO-3
        world = dist.get_world_size()
        return world, str(dist.get_rank()), f"in flat shards over {world} ranks"
    if not isinstance(p, DTensor):
        return 1, "", "replicated"
    mesh, coordinate = p.device_mesh, p.device_mesh.get_coordinate() or ()
    axes = [axis for axis, placement in enumerate(p.placements) if not placement.is_replicate()]
    shards = 1
    for axis in axes:
        shards *= mesh.size(axis)
    part = ",".join(str(coordinate[axis]) for axis in axes if axis < len(coordinate))
    names = mesh.mesh_dim_names or ()
    over = " × ".join(f"{names[axis]} {mesh.size(axis)}" if names else f"{mesh.size(axis)} ranks" for axis in axes)
    kinds = ", ".join(_placement_text(p.placements[axis]) for axis in axes)
    return shards, part, f"{kinds} over {over}" if axes else "replicated"


def _placement_text(placement: Any) -> str:
    return f"Shard({placement.dim})" if placement.is_shard() else str(placement)


def _flat_parameters(root: nn.Module) -> Flat:
    """Read FSDP1's handles: the full size of each original or flat parameter, and the ranks that shard it."""
    found: Flat = {}
    for part in root.modules():
        handle = getattr(part, "_handle", None) if isinstance(part, FSDP1) else None
        if handle is None:
            continue
        flat, group = handle.flat_param, handle.process_group
        shards = handle.world_size if handle.uses_sharded_strategy else 1
        mine = str(dist.get_rank(group)) if shards > 1 else ""
        originals = getattr(flat, "_params", None)
        if originals is None:
            found[id(flat)] = int(flat._unpadded_unsharded_size.numel()), shards, mine
            continue
        sizes = [
            int(size)
            for size, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True)
            if not padding
        ]
        for original, size in zip(originals, sizes, strict=True):
            found[id(original)] = size, shards, mine
    return found


def _buffers(trace: LoopTrace) -> Iterator[BufferFacts]:
    wrapper, sent = trace.wrapper, set[int]()
    if isinstance(wrapper, DistributedDataParallel) and _sends_buffers(wrapper):
        sent = {id(buffer) for buffer in wrapper.modules_buffers}
    named = [(name, b) for name, b in trace.root.named_buffers() if _is_summable(b)]
    bits = bit_sums([state.local(b.detach()) for _, b in named])
    for (name, buffer), total in zip(named, bits, strict=True):
        yield BufferFacts(name=name_of(name), bits=total, sent=id(buffer) in sent)


def _sends_buffers(wrapper: Any) -> bool:
    """Return whether DDP sends rank 0's buffers at each forward; older versions have another name for it."""
    return bool(getattr(wrapper, "forward_sync_buffers", None) or getattr(wrapper, "broadcast_buffers", False))


def _is_summable(tensor: torch.Tensor) -> bool:
    full = state.local(tensor.detach())
    return full.layout == torch.strided and full.device.type != "meta" and not full.is_quantized and full.ndim > 0


def _traffic(trace: LoopTrace) -> Iterator[TrafficFacts]:
    rows: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for item in trace.recorder.collectives:
        rows[item.name, item.phase].append(item)
    for (name, phase), items in rows.items():
        size = sum(item.num_bytes for item in items)
        yield TrafficFacts(name=name, phase=phase, calls=len(items), num_bytes=size)


def _offloads(root: nn.Module, units: Sequence[Any]) -> bool | None:
    if units:
        return any(isinstance(group_of(unit).offload_policy, CPUOffloadPolicy) for unit in units)
    older = [part.cpu_offload for part in root.modules() if isinstance(part, FSDP1)]
    return any(one.offload_params for one in older) if older else None


def innermost(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the outermost module without wrappers, and the DDP around it; a compiled one is not entered.

    Raises:
        UserError: its ``__call__`` is compiled in place, with hooks and all.
    """
    wrapper = None
    while True:
        if isinstance(model, DistributedDataParallel):
            wrapper, model = model, model.module
        elif isinstance(inner := getattr(model, "_forward_module", None), nn.Module):
            model = inner
        else:
            break
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise UserError(
            "observe: model.compile() compiles the model's hooks with it; call torch.compile(model), or compile its "
            "blocks"
        )
    compiled = getattr(model, "_orig_mod", None)
    if wrapper is None and isinstance(compiled, DistributedDataParallel):
        wrapper = compiled
    return model, wrapper


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return PyTorch's optimizers inside of other tools' wrappers."""
    found = []
    for one in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        while (inner := getattr(one, "optimizer", None)) is not None and not is_deepspeed(one):
            one = inner
        found.append(one)
    return found


def is_deepspeed(part: Any) -> bool:
    """Return whether an engine or an optimizer is DeepSpeed's."""
    return any(base.__module__.startswith("deepspeed.") for base in type(part).__mro__)
