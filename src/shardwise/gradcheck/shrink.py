"""Shrink the user's model: fewer blocks and smaller widths, with the same wiring.

A transformers model is rebuilt from its configuration with smaller sizes. Any other model only loses blocks, as sizes
of a factory cannot be guessed. A change is kept only if the model still runs and its structure is unchanged: the
modules and parameter names of each kind of block, those outside the blocks, and ties.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import ModelError
from shardwise.gradcheck.shrink_config import ShrinkLimits, smaller
from shardwise.model.expert_layers import compute_experts_one_by_one, dense_experts
from shardwise.model.read import read_model
from shardwise.parallel.materialize import build

Structure = tuple[Any, ...]


class Recipe(BaseModel):
    """Build recipe of the small model for any rank, as data.

    ``classes`` are ``package.module:Name`` of a transformers model and its configuration; empty for a factory's model,
    of which ``keep`` lists the remaining blocks of each container. ``frozen`` are parameters of the small model.
    """

    model_config = ConfigDict(frozen=True)

    classes: tuple[str, str] | None = None
    configuration: dict[str, Any] = {}
    attention: str | None = None
    keep: dict[str, tuple[str, ...]] = {}
    frozen: tuple[str, ...] = ()


class Shrunk(BaseModel):
    """Shrunk model, with ``changes`` and ``kept`` (what could not shrink, and why) for people.

    ``vocab_size`` is the number of token ids, ``None`` for all of the data. ``heads`` are the key-value heads and their
    size, 0 where unknown.
    """

    model_config = ConfigDict(frozen=True)

    recipe: Recipe
    num_parameters: int
    was_parameters: int
    changes: tuple[str, ...]
    kept: tuple[str, ...]
    vocab_size: int | None = None
    heads: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _Blocks:
    """Blocks of one container: its name, its children's names, and their kinds."""

    container: str
    names: tuple[str, ...]
    kinds: tuple[Structure, ...]


def shrink(factory: Callable[[], nn.Module], need: ShrinkLimits) -> Shrunk:
    """Shrink the model of ``factory`` as far as `ShrinkLimits` allows, without creating weights.

    Raises:
        ModelError: it does not run on token ids even unchanged.
    """
    full = build(factory, 0, real=False)
    was = sum(p.numel() for p in full.parameters())
    lists = _block_lists(full)
    if _rebuilds(full):
        return _shrink_configuration(full, lists, need, was)
    return _shrink_module(factory, full, lists, need, was)


def with_fewer_blocks(factory: Callable[[], nn.Module], blocks: int, seq_len: int) -> nn.Module:
    """Build the model with its own widths and about ``blocks`` blocks, on the meta device."""
    recipe = shrink(factory, ShrinkLimits(blocks=blocks, seq_len=seq_len, only_blocks=True)).recipe
    return build(lambda: _construct(factory, recipe), 0, real=False)


def build_small(factory: Callable[[], nn.Module], recipe: Recipe, seed: int) -> nn.Module:
    """Build the small model: float64, random weights of a seed, no constants, no dropout."""
    module = build(lambda: _construct(factory, recipe), 0, real=False)
    _empty_parameters(module)
    module = module.to(torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                value = value / math.sqrt(parameter.shape[-1])
            else:
                value = value * 0.3 + (1.0 if name.endswith("weight") else 0.0)
            parameter.copy_(value)
            parameter.requires_grad_(parameter.requires_grad and name not in recipe.frozen)
    no_dropout(module)
    return module


def no_dropout(module: nn.Module) -> list[str]:
    """Set every dropout to 0, in modules and in plain attributes; return those above 0."""
    found = []
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            if part.p:
                found.append(f"{name} {part.p}")
            part.p = 0.0
            continue
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and value and "drop" in key.lower():
                found.append(f"{name}.{key} {value}".lstrip("."))
                setattr(part, key, 0.0)
    return found


def structure(module: nn.Module) -> Structure:
    """Return the structure to preserve.

    The kinds of blocks in each list, parameters and modules outside, and ties (without numbers).
    """
    spec = read_model(module)
    lists = {item.container: frozenset(item.kinds) for item in _block_lists(module)}
    outside = frozenset(_plain(p.name) for p in spec.parameters if p.block is None)
    ties = frozenset(tuple(sorted({_plain(n) for n in names})) for names in spec.tied)
    return (tuple(sorted(lists.items())), outside, ties)


def _plain(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _kind(block: nn.Module) -> Structure:
    classes = tuple((name, type(part).__name__) for name, part in block.named_modules())
    return classes, tuple((name, p.ndim) for name, p in block.named_parameters(remove_duplicate=False))


def _block_lists(module: nn.Module) -> list[_Blocks]:
    groups: dict[str, list[str]] = {}
    for name in read_model(module).blocks:
        parent, _, child = name.rpartition(".")
        groups.setdefault(parent, []).append(child)
    return [
        _Blocks(parent, tuple(names), tuple(_kind(module.get_submodule(f"{parent}.{n}".lstrip("."))) for n in names))
        for parent, names in groups.items()
    ]


def chosen(kinds: list[Any], need: int) -> list[int]:
    """Choose the remaining blocks: first and last of each kind, and evenly spaced ones."""
    places: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    taken = {end for of_kind in places.values() for end in (of_kind[0], of_kind[-1])}
    spread = [round(i * (len(kinds) - 1) / max(1, need - 1)) for i in range(need)]
    for place in [*spread, *range(len(kinds))]:
        if len(taken) >= min(need, len(kinds)):
            break
        taken.add(place)
    return sorted(taken)


def _rebuilds(module: nn.Module) -> bool:
    """Return True for a transformers model, whose class builds it from its configuration."""
    if type(module).__module__.split(".")[0] != "transformers":
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _construct(factory: Callable[[], nn.Module], recipe: Recipe) -> nn.Module:
    if recipe.classes is None:
        module = factory()
        for container, names in recipe.keep.items():
            _keep_only(module, container, names)
        compute_experts_one_by_one(module)
        return module
    model_class, config_class = (_imported(path) for path in recipe.classes)
    configuration = config_class.from_dict(recipe.configuration)
    configuration.use_cache = False
    if recipe.attention is not None:
        configuration._attn_implementation = recipe.attention
    made: nn.Module = model_class._from_config(configuration, dtype=torch.float32)
    compute_experts_one_by_one(made)
    return made


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _keep_only(module: nn.Module, container: str, names: tuple[str, ...]) -> None:
    """Remove all but the named children from a list of blocks, and renumber them."""
    owner = module.get_submodule(container) if container else module
    numbered = isinstance(owner, nn.ModuleList | nn.Sequential)
    stays = [(str(i) if numbered else name, owner.get_submodule(name)) for i, name in enumerate(names)]
    owner._modules.clear()
    owner._modules.update(stays)


def _empty_parameters(module: nn.Module) -> None:
    """Allocate meta parameters with unique values; buffers are real already."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in made:
                data = torch.empty_like(parameter, device="cpu")
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            if parameter is not None:
                part._parameters[name] = made[id(parameter)]


def _shrink_configuration(full: nn.Module, lists: list[_Blocks], need: ShrinkLimits, was: int) -> Shrunk:
    configuration: Any = full.config
    kinds = list(lists[0].kinds) if lists else []
    wanted = structure(full)
    base = Recipe(
        classes=(_path(type(full)), _path(type(configuration))),
        configuration=json.loads(configuration.to_json_string(use_diff=False)),
        attention=getattr(configuration, "_attn_implementation", None),
    )
    frozen = {_plain(n) for n, p in full.named_parameters() if not p.requires_grad}
    partly = {_plain(n) for n, p in full.named_parameters() if p.requires_grad} & frozen
    document = base.configuration
    changes: list[str] = []
    kept: list[str] = []
    taken: list[int] = list(range(len(kinds)))
    for proposal in smaller(configuration, document, kinds, need, chosen):
        for attempt in proposal.attempts:
            recipe = base.model_copy(update={"configuration": {**attempt.apply(document)}})
            problem = _problem(recipe, wanted, need.seq_len)
            if not problem:
                document, taken = recipe.configuration, attempt.blocks or taken
                changes += attempt.message
                break
        else:
            kept.append(f"{proposal.what} stay as they are: {problem}")
    recipe = base.model_copy(update={"configuration": document})
    small = build(lambda: _construct(_nothing, recipe), 0, real=False)
    if frozen:
        original = dict(full.named_parameters())
        stays = _frozen(small, original, lists, taken)
        recipe = recipe.model_copy(update={"frozen": stays})
        changes.append(f"{len(stays)} parameters stay frozen, as in the model" + (", by block" if partly else ""))
    dropped = no_dropout(small)
    changes += [_dropout_text(dropped)] if dropped else []
    return Shrunk(
        recipe=recipe,
        num_parameters=sum(p.numel() for p in small.parameters()),
        was_parameters=was,
        changes=tuple(changes),
        kept=tuple(kept),
        vocab_size=_vocab(small),
        heads=_heads(small),
    )


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _nothing() -> nn.Module:
    raise ModelError("a transformers model is built from its configuration")


def _frozen(
    small: nn.Module, original: dict[str, nn.Parameter], lists: list[_Blocks], taken: list[int]
) -> tuple[str, ...]:
    """Return the small model's parameters that are frozen in the corresponding original block."""
    found = []
    for name, _ in small.named_parameters():
        source = name
        for item in lists[:1]:
            match = re.match(rf"{re.escape(item.container)}\.(\d+)\.(.*)", name)
            if match and int(match[1]) < len(taken):
                source = f"{item.container}.{item.names[taken[int(match[1])]]}.{match[2]}"
        if source in original and not original[source].requires_grad:
            found.append(name)
    return tuple(found)


def _dropout_text(dropped: list[str]) -> str:
    more = f" and {len(dropped) - 1} more" if len(dropped) > 1 else ""
    return f"dropout 0 instead of {dropped[0]}{more}: random masks make gradients incomparable"


def _vocab(module: nn.Module) -> int | None:
    found = getattr(getattr(module, "config", None), "vocab_size", None)
    if found is None:
        found = getattr(getattr(getattr(module, "config", None), "text_config", None), "vocab_size", None)
    return int(found) if found is not None else None


def _heads(module: nn.Module) -> tuple[int, int]:
    config: Any = getattr(module, "config", None)
    config = getattr(config, "text_config", None) or config
    heads = getattr(config, "num_attention_heads", 0) or 0
    size = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
    return int(getattr(config, "num_key_value_heads", None) or heads), int(size)


def _shrink_module(
    factory: Callable[[], nn.Module], full: nn.Module, lists: list[_Blocks], need: ShrinkLimits, was: int
) -> Shrunk:
    """Remove blocks from each list where the model still runs without them."""
    wanted = structure(full)
    keep: dict[str, tuple[str, ...]] = {}
    changes: list[str] = []
    kept: list[str] = []
    idle = _fake_run(build(lambda: _construct(factory, Recipe()), 0, real=False), need.seq_len)[1]
    for item in lists:
        taken = chosen(list(item.kinds), need.blocks)
        if len(taken) == len(item.names):
            continue
        attempt = {**keep, item.container: tuple(item.names[i] for i in taken)}
        problem = _problem(Recipe(keep=attempt), wanted, need.seq_len, factory, idle)
        if problem:
            kept.append(f"the {len(item.names)} blocks of '{item.container}' stay: {problem}")
        else:
            keep = attempt
            changes.append(f"{len(taken)} of {len(item.names)} blocks of '{item.container}'")
    kept.append("widths are unchanged: which arguments of a factory are sizes is not known; give smaller model.kwargs")
    small = build(lambda: _construct(factory, Recipe(keep=keep)), 0, real=False)
    dropped = no_dropout(small)
    changes += [_dropout_text(dropped)] if dropped else []
    return Shrunk(
        recipe=Recipe(keep=keep),
        num_parameters=sum(p.numel() for p in small.parameters()),
        was_parameters=was,
        changes=tuple(changes),
        kept=tuple(kept),
    )


def _problem(
    recipe: Recipe,
    wanted: Structure,
    seq_len: int,
    factory: Callable[[], nn.Module] = _nothing,
    idle: frozenset[str] | None = None,
) -> str:
    """Return why the result is not a smaller version of the model; empty where it is."""
    try:
        module = build(lambda: _construct(factory, recipe), 0, real=False)
    except Exception as error:  # configurations and classes validate themselves, each in its own way
        return f"without them it cannot be built ({_brief(error)})"
    if structure(module) != wanted:
        return "without them it has another structure"
    problem, found = _fake_run(module, seq_len)
    if problem:
        return f"without them it does not run ({problem})"
    if idle is not None and found != idle:
        return f"without them {', '.join(sorted(found ^ idle)[:2])} takes no part in the loss"
    return ""


def _fake_run(module: nn.Module, seq_len: int) -> tuple[str, frozenset[str]]:
    """Run forward and backward on fake tensors; return the error and the unused parameters.

    Unused ones got no gradient.
    """
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), dense_experts(module):
        warnings.simplefilter("ignore")
        try:
            weights = {
                name: torch.empty(p.shape, dtype=p.dtype, requires_grad=p.requires_grad)
                for name, p in module.named_parameters()
            }
            outputs = torch.func.functional_call(module, weights, (torch.zeros(2, seq_len, dtype=torch.int64),))
            logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
            trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
            found = torch.autograd.grad(logits.sum(), list(trained.values()), allow_unused=True)
            idle = [name for name, gradient in zip(trained, found, strict=True) if gradient is None]
            return "", frozenset(_plain(name) for name in idle)
        except Exception as error:  # any exception of the user's forward
            return _brief(error), frozenset()


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}{'...' if len(text) > 120 else ''}"
