"""Read a `ModelSpec` from a module's structure; needs no class names and no weights.

The module may be on the meta device. It is not changed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.errors import ModelError
from shardwise.model.facts import ModelSpec, ParameterSpec

CHECKPOINT_WRAPPER_PART = "_checkpoint_wrapped_module."
COMPILED_PART = "_orig_mod."
STAGE = (
    "_stage_"  # a pipeline stage is a child of this name and its number, and contains the model under the user's names
)
_STAGE_PART = re.compile(rf"^{STAGE}\d+\.?")
_BASE_PART = "base_layer."  # peft's name of an adapted layer
_ADAPTER_PART = re.compile(r"(\.lora_(?:A|B|magnitude_vector))\.default\b")


def clean_name(name: str) -> str:
    """Remove the parts of a parameter's name that wrappers add.

    These are recompute, ``torch.compile``, adapters and pipeline stages.
    """
    name = name.replace(CHECKPOINT_WRAPPER_PART, "").replace(COMPILED_PART, "").replace(_BASE_PART, "")
    name = _ADAPTER_PART.sub(r"\1", name) if ".lora_" in name else name
    return _STAGE_PART.sub("", name) if name.startswith(STAGE) else name


def read_model(module: nn.Module) -> ModelSpec:
    """Read the facts of ``module``; see the module's docstring.

    Raises:
        ModelError: a lazy module has not seen its first input.
    """
    check_initialized(module)
    blocks = find_blocks(module)
    owner: dict[int, str] = {}
    for block in blocks:
        for parameter in module.get_submodule(block).parameters():
            owner.setdefault(id(parameter), clean_name(block))
    names: dict[int, list[str]] = defaultdict(list)
    first: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(clean_name(name))
        first[id(parameter)] = parameter
    parameters = tuple(
        ParameterSpec(
            name=names[key][0],
            aliases=tuple(names[key][1:]),
            shape=tuple(parameter.shape),
            itemsize=parameter.element_size(),
            dtype=dtype_name(parameter.dtype),
            trainable=parameter.requires_grad,
            block=owner.get(key),
        )
        for key, parameter in first.items()
    )
    norms = tuple(
        clean_name(name)
        for name, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, nn.SyncBatchNorm)
    )
    return ModelSpec(parameters=parameters, blocks=tuple(clean_name(b) for b in blocks), batch_norms=norms)


def check_initialized(module: nn.Module) -> None:
    """Reject lazy modules (``LazyLinear``) that have not seen an input.

    Their shapes are unknown.

    Raises:
        ModelError: there are some; names up to three of their parameters and buffers.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    late = [clean_name(name) for name, tensor in tensors if is_lazy(tensor)]
    if late:
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        raise ModelError(
            f"{', '.join(late[:3])}{more} have no shape yet, as lazy modules (LazyLinear) get it from their first "
            "input: call the model once on a sample before the optimizer is built and the model is prepared"
        )


def find_blocks(module: nn.Module) -> list[str]:
    """Return the names of the repeated blocks: the units of sharding and of recompute.

    A block is a child of a list-like container (``ModuleList``, ``ModuleDict``, ``Sequential``) that has at
    least one sibling of the same type, has parameters and children. Where a model has no such
    child (a plain stack of ``Linear``), repeated leaves with parameters count instead. The outermost container
    wins: blocks inside blocks are not searched. A block that shares a parameter with another module is excluded,
    because sharding it alone would untie the two.
    """
    found = list(_repeated(module, "", composite=True)) or list(_repeated(module, "", composite=False))
    uses: dict[int, int] = defaultdict(int)
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] += 1
    kept, seen = [], set()
    for name in found:
        block = module.get_submodule(name)
        if id(block) in seen:
            continue
        seen.add(id(block))
        inside: dict[int, int] = defaultdict(int)
        for _, parameter in block.named_parameters(remove_duplicate=False):
            inside[id(parameter)] += 1
        if all(uses[key] == count for key, count in inside.items()):
            kept.append(name)
    return kept


def _repeated(module: nn.Module, prefix: str, *, composite: bool) -> Iterator[str]:
    children = dict(module.named_children())
    chosen: set[str] = set()
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        kinds: dict[type, list[str]] = defaultdict(list)
        for name, child in children.items():
            is_composite = any(True for _ in child.children())
            runs = not isinstance(child, nn.ModuleList | nn.ModuleDict)  # a list of lists is not a list of blocks
            if runs and is_composite == composite and any(True for _ in child.parameters()):
                kinds[_inner_type(child)].append(name)
        chosen = {name for names in kinds.values() if len(names) > 1 for name in names}
    for name, child in children.items():
        path = f"{prefix}{name}"
        if name in chosen:
            yield path
        else:
            yield from _repeated(child, f"{path}.", composite=composite)


def _inner_type(module: nn.Module) -> type:
    """Return the type of a block inside a recompute wrapper."""
    inner = getattr(module, CHECKPOINT_WRAPPER_PART.rstrip("."), module)
    return type(inner)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def in_layer(error: BaseException, module: nn.Module) -> str:
    """Name the innermost part of ``module`` that raised.

    As ``, in 'model.layers.0.mlp'``; empty if there is none.
    """
    names = {id(part): clean_name(name) for name, part in module.named_modules() if name}
    found, frame = "", error.__traceback__
    while frame is not None:
        found = names.get(id(frame.tb_frame.f_locals.get("self")), found)
        frame = frame.tb_next
    return f", in '{found}'" if found else ""
