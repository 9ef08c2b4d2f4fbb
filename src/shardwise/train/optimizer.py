"""Optimizers and their learning-rate schedule, from the config or from the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.import_object import check_kwargs, import_path, load_object
from shardwise.model.read import clean_name, read_model
from shardwise.plan.optimizers import OPTIMIZERS, OptimizerSpec, ParameterShard, declared
from shardwise.plan.workload import Workload
from shardwise.train.config import OptimizerTable

_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def build_optimizer(
    parameters: Iterable[nn.Parameter], table: OptimizerTable, module: nn.Module | None = None
) -> Optimizer:
    """The optimizer of a config; ``module`` has the parameters, for one with several groups.

    Raises:
        ConfigError: the factory cannot be imported or does not return an optimizer, or a package is not installed.
    """
    trained = [p for p in parameters if p.requires_grad]
    if table.factory is not None:
        function = load_object(table.factory, "optimizer.factory")
        where = f"optimizer.factory '{table.factory}'"
        check_kwargs(function, where, trained, lr=table.lr, **table.kwargs)
        made = function(trained, lr=table.lr, **table.kwargs)
        if not isinstance(made, Optimizer):
            raise ConfigError(f"{where} returned a {type(made).__name__}; it must return an Optimizer")
        return made
    spec = OPTIMIZERS[table.name]
    spec.require_package()
    chosen = {key: getattr(table, key, default) for key, default in spec.hyperparameters.items()} | table.kwargs
    if "betas" in chosen:
        chosen["betas"] = tuple(chosen["betas"])
    groups: list[Any] = trained if spec.group is None else _groups(trained, spec, module)
    optimizer: Optimizer = import_path(spec.factory)(groups, lr=table.lr, **chosen, **spec.arguments)
    return optimizer


def _groups(trained: list[nn.Parameter], spec: OptimizerSpec, module: nn.Module | None) -> list[dict[str, Any]]:
    """Deal parameters to the optimizer's groups; the first has the matrices of the blocks.

    Raises:
        ConfigError: it has none, or which module has the parameters is not known.
    """
    if module is None:
        raise ConfigError(
            f"optimizer.name '{spec.name}' goes by the module that has the parameters, and it is not known here; "
            "use adamw"
        )
    blocks = {p.name for p in read_model(module).parameters if p.block is not None}
    names = {id(p): clean_name(name) for name, p in module.named_parameters()}
    groups: list[dict[str, Any]] = [{"params": [], "matrices": True}, {"params": [], "matrices": False}]
    for parameter in trained:
        shape = tuple(parameter.shape)
        shard = ParameterShard(shape, shape, shape, names.get(id(parameter)) in blocks)
        groups[0 if spec.group is None else spec.group(shard)]["params"].append(parameter)
    if not groups[0]["params"]:
        raise ConfigError(
            f"optimizer.name '{spec.name}': the model has no trained matrix in a repeated block, so nothing would be "
            "stepped by it; use adamw"
        )
    return groups


def workload_of(optimizer: Optimizer, names: dict[int, str] | None = None, *, device: str | None = None) -> Workload:
    """How many states the optimizer will keep for each parameter; unknown for classes that are not declared.

    ``names`` maps the id of a parameter to its name; with it, the optimizer's groups are included. ``device`` is the
    device of the step, if its parameters are not there yet. If the state is sharded over ranks (zero1), the
    inner optimizer counts.
    """
    groups = None
    if names is not None:
        groups = tuple(tuple(names[id(p)] for p in g["params"] if id(p) in names) for g in optimizer.param_groups)
    inner = getattr(optimizer, "optim", optimizer)
    states: tuple[int | None, int] = (None, 0)
    name = "adamw"
    if isinstance(inner, _ADAMS):
        amsgrad = any(group.get("amsgrad") for group in inner.param_groups)
        states = (3 if amsgrad else 2, 2 if isinstance(inner, torch.optim.NAdam) else 1)
    elif isinstance(inner, torch.optim.SGD):
        kept = {bool(group["momentum"]) for group in inner.param_groups}
        states = (int(kept.pop()) if len(kept) == 1 else None, 0)  # unknown where groups differ
    elif (spec := declared(inner)) is not None:
        states, name = (spec.states, spec.scalars), spec.name
    together, each = _temporaries(inner, device)
    return Workload(
        optimizer=name,
        optimizer_states=states[0],
        scalar_states=states[1],
        optimizer_temporaries=together,
        loop_temporaries=each,
        parameter_groups=groups,
    )


def _temporaries(optimizer: Optimizer, device: str | None) -> tuple[float, float]:
    """Count temporary tensors of an optimizer step: of all parameters, and one at a time.

    Those of Adam and SGD as torch.optim 2.13 has it, others as declared. Fused kernels make none. ``foreach``, the
    default on CUDA but not on CPU, makes the root of the second moment for all parameters, and where weight decay is
    added to the gradients, those. The plain loop makes the root and its quotient, or the one gradient.
    """
    groups = optimizer.param_groups
    if not isinstance(optimizer, (*_ADAMS, torch.optim.SGD)):
        spec = declared(optimizer)
        if spec is None or not spec.builds(optimizer):
            return 1.0, 0.0
        return spec.temporaries if device == "cuda" or spec.cpu_temporaries is None else spec.cpu_temporaries
    if all(group.get("fused") for group in groups):
        return 0.0, 0.0
    if device is None:
        device = next((p.device.type for group in groups for p in group["params"]), "cuda")
    asked = {group.get("foreach") for group in groups}
    foreach = True in asked or (asked == {None} and device != "cpu")
    is_adam = isinstance(optimizer, _ADAMS)
    coupled = any(group["weight_decay"] and not group.get("decoupled_weight_decay") for group in groups)
    changed = float(coupled or any(group.get("maximize") for group in groups))
    if foreach:
        return changed + is_adam, 0.0
    return 0.0, changed + 2.0 * is_adam + any(group.get("nesterov") for group in groups)


def learning_rate(table: OptimizerTable, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate by step: linear warm-up, then what ``optimizer.schedule`` names.

    ``wsd`` (Hu 2024, arXiv 2404.06395; Hägele 2024, arXiv 2405.18392) stays at ``lr`` and falls in a line in the last
    ``decay_fraction`` of all steps, not before the warm-up ends. A pure function of the step, so that a resumed run
    needs no scheduler state.
    """
    lowest, begin = table.lr * table.min_lr_ratio, table.warmup_steps
    if table.schedule == "wsd":
        begin = max(begin, total_steps - round(table.decay_fraction * total_steps))

    def rate(step: int) -> float:
        if step <= table.warmup_steps:
            return table.lr * step / table.warmup_steps
        if table.schedule == "constant" or step <= begin:
            return table.lr
        done = min(1.0, (step - begin) / max(1, total_steps - begin))
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if table.schedule == "cosine" else 1.0 - done
        return lowest + (table.lr - lowest) * left

    return rate


def set_learning_rate(optimizer: Optimizer, rate: float, base: float) -> None:
    """Set every group's rate; groups with another initial rate than ``base`` keep the ratio."""
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", group["lr"])
        group["lr"] = rate * (initial / base)
