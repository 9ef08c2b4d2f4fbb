"""Check before training that an optimizer steps a plan's shards like the unsharded model.

Most optimizers treat each element separately. LARS, LAMB, Muon, Adafactor, D-Adaptation and Prodigy do not: they reduce
over a parameter, or over all of them. On DTensors such a reduction covers the full tensor, unless the optimizer reads
it with ``.item()`` or uses the local tensor. DeepSpeed gives an optimizer the parameters of a group as one flat row,
split anywhere: there no such reduction is correct, and no shape. No type declares its behaviour, so a copy of the
optimizer steps a few tiny parameters, laid out as the model's are, and the same ones unsharded.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from shardwise.distributed.local_tensor import local_of
from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.errors import ModelError, ShardwiseError
from shardwise.model.read import clean_name
from shardwise.optim.low_precision import LowPrecisionAdamW
from shardwise.plan.optimizers import declared, loaded_class
from shardwise.plan.plan import Plan

_STEPS, _RATE, _NUDGE = 12, 0.01, 1e-3
_SCALES = (1.0, 1e3, 1e-3)
"""Gradients of a third of the steps each: a clip or a threshold may act on some sizes only."""
_LEAST = 1e-4
"""A difference below this share of the update is rounding."""
_SPLIT_PERCENT = 37
"""Percent of a flat row on one rank of a trial: within a parameter, and within a row of it."""
_NOISE = 10.0
"""Rounding limit, in changes by gradients nudged by 1e-3.

Muon computes in bfloat16, and some optimizers draw random numbers.
"""

_optim = torch.optim
_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(_optim.SGD, _optim.Adam, _optim.AdamW, _optim.NAdam, _optim.RAdam, _optim.Adamax, _optim.ASGD),
    *(_optim.RMSprop, _optim.Adagrad, _optim.Adadelta, _optim.SparseAdam, LowPrecisionAdamW),
)
_FUSED_ON_SHARDS = (_optim.Adam, _optim.AdamW, LowPrecisionAdamW)
_OF_DEEPSPEED = ("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLion")
"""DeepSpeed's elementwise optimizers; a copy of one would break its original."""


def check_optimizer(optimizer: Optimizer, module: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """Reject an optimizer that would step shards unlike the unsharded model. Collective.

    ``optimizer`` has the parameters as they will be trained. Neither it, nor the parameters, nor the random state
    changes.

    Raises:
        ModelError: on all ranks, with the optimizer's class and a valid alternative.
    """
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    name = type(inner).__name__
    _check_options(optimizer, module, plan)
    if _is_elementwise(inner) and not _special(inner):
        return
    apart = _apart(plan)
    shards = (plan.parsed.shards_parameters or plan.dims.tp > 1) and plan.dims.world_size > 1
    if not shards and not apart:
        return
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in vars(inner).items():
        if key not in ("param_groups", "state") and any(id(p) not in known for p in _parameters(value)):
            raise _keeps(f"{name}.{key}", plan)
    _refuse_any(tried(inner, optimizer.param_groups, plan, apart), ranks)


def check_flattened(optimizer: Optimizer, module: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """Run `check_optimizer` for DeepSpeed, before it partitions flat parameters. Collective.

    Raises:
        ModelError: on all ranks, with the optimizer's class and a valid alternative.
    """
    kind = type(optimizer)
    _check_options(optimizer, module, plan)
    spec = declared(optimizer)
    if spec is not None and spec.elementwise and "deepspeed" in spec.refuses:
        raise ModelError(
            f"{kind.__name__} is not for {plan.strategy}: {spec.refuses['deepspeed']}; use AdamW, or ddp, zero1 or fsdp"
        )
    if _is_elementwise(optimizer):
        return
    if kind.__module__.startswith("deepspeed."):
        if kind.__name__ not in _OF_DEEPSPEED:
            raise ModelError(
                f"{kind.__name__} of DeepSpeed is not known to treat each element alone, and {plan.strategy} gives it "
                f"all parameters of a group in one row; use one of {', '.join(_OF_DEEPSPEED)}, or AdamW"
            )
        return
    for key, value in vars(optimizer).items():
        if key not in ("param_groups", "state") and any(True for _ in _parameters(value)):
            raise _keeps(f"{kind.__name__}.{key}", plan)
    _refuse_any(_tried_flat(optimizer, plan), ranks)


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether it is known to be elementwise; a subclass may not be."""
    spec = declared(optimizer)
    named = spec is not None and spec.elementwise and type(optimizer) is loaded_class(spec.factory)
    return named or type(optimizer) in _ELEMENTWISE


def _check_options(optimizer: Optimizer, module: nn.Module, plan: Plan) -> None:
    """Reject options that a session's step does not support, in any layout."""
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    name = type(inner).__name__
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(
            f"{name}.step needs a closure that computes the loss again, and step.update(optimizer) has none to give; "
            "use an optimizer that steps by the gradients that are there"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ModelError(f"{name}(differentiable=True) cannot step a model's own parameters; leave it False")
    _check_sparse(optimizer, module, plan)


def _keeps(where: str, plan: Plan) -> ModelError:
    return ModelError(
        f"{where} keeps parameters from before session.prepare, and {plan.strategy} has put others in "
        "their place: those would not be trained; let the optimizer find them in self.param_groups in each step"
    )


def _refuse_any(found: str, ranks: Ranks) -> None:
    """Raise on all ranks the error of any rank."""
    message = next((text for text in gather_text(found, ranks) if text), "")
    if message:
        raise ModelError(message)


def _check_sparse(optimizer: Optimizer, module: nn.Module, plan: Plan) -> None:
    """Reject sparse gradients where they cannot be reduced, and their optimizer elsewhere."""
    tables = {name: part for name, part in module.named_modules() if getattr(part, "sparse", False) is True}
    learns = {clean_name(name): part.weight for name, part in tables.items() if part.weight.requires_grad}
    shards = plan.parsed.shards_parameters or plan.dims.splits_model or plan.parsed.engine == "deepspeed"
    if learns and shards:
        raise ModelError(
            f"'{next(iter(learns))}' is an embedding with sparse=True, and {plan.strategy} cannot reduce sparse "
            "gradients over its ranks; build it with sparse=False, or use ddp"
        )
    if type(getattr(optimizer, "optim", optimizer)) is _optim.SparseAdam:
        sparse = {id(weight) for weight in learns.values()}
        if any(id(p) not in sparse for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            raise ModelError(
                "SparseAdam steps sparse gradients alone, and it holds parameters other than embeddings with "
                "sparse=True; use AdamW, or set sparse=True"
            )


def _parameters(value: Any, depth: int = 3) -> Iterator[nn.Parameter]:
    """Yield the trained parameters in an optimizer's attribute, also in lists and dicts."""
    if isinstance(value, nn.Parameter) and value.requires_grad:
        yield value
    elif depth and isinstance(value, list | tuple | set | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parameters(part, depth - 1)


def _special(optimizer: Optimizer) -> bool:
    """Return whether it requests a kernel that does not support every layout."""
    fused = any(group.get("fused") for group in optimizer.param_groups) and type(optimizer) not in _FUSED_ON_SHARDS
    return fused or any(group.get("capturable") for group in optimizer.param_groups)


def _apart(plan: Plan) -> str:
    """Reason why parameters are not stepped together; empty where they are."""
    if plan.optimizer_in_backward:
        return "optimizer_in_backward steps each parameter alone"
    if plan.dims.pp > 1:
        return f"each stage of {plan.strategy} steps its own parameters alone"
    if plan.parsed.base == "zero1" and plan.parsed.engine == "torch" and plan.dims.world_size > 1:
        return "zero1 gives each rank some of the parameters to step"
    return ""


@dataclass(frozen=True)
class _Kind:
    """Parameters of one group with the same layout, and the tiny shape that represents them."""

    group: int
    shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]

    def place(self, full: torch.Tensor) -> torch.Tensor:
        """Shard ``full`` as the parameters are, without communication."""
        if self.mesh is None:
            return full.clone()
        return distribute_tensor(full.clone(), self.mesh, self.placements, src_data_rank=None)


def _kinds(groups: Sequence[dict[str, Any]]) -> dict[_Kind, list[int]]:
    """Kinds of trained parameters, with the ids of each kind."""
    found: dict[_Kind, list[int]] = {}
    for number, group in enumerate(groups):
        for p in group["params"]:
            if p.requires_grad:
                mesh, placements = (p.device_mesh, p.placements) if isinstance(p, DTensor) else (None, ())
                kind = _Kind(number, tuple(_tiny(p, dim) for dim in range(p.ndim)), mesh, tuple(placements))
                found.setdefault(kind, []).append(id(p))
    return found


def _tiny(parameter: torch.Tensor, dim: int) -> int:
    """Small size for a dimension: as even, uneven or too short over its ranks as the original."""
    shards = 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            shards *= parameter.device_mesh.size(axis) if getattr(placement, "dim", None) == dim else 1
    length = parameter.shape[dim]
    if shards == 1:
        return 4
    return 3 * shards if length % shards == 0 else 1 if length < shards else 3 * shards - 1


class _Trial:
    """Copies of one optimizer over stand-ins: two of each kind, to expose sums over parameters."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
        self.optimizer, self.groups = optimizer, groups
        self._places = range(len(groups))
        members = _kinds(groups)
        self.kinds = [kind for kind in members for _ in range(2)]
        self.ids = [members[kind][at::2] for kind in members for at in range(2)]
        draw = torch.Generator().manual_seed(0)
        self.starts, self.gradients, self.nudges = [], [], []
        for number, kind in enumerate(self.kinds):
            slope = torch.ones(kind.shape, dtype=torch.float64)  # shards differ from each other, and so do parameters
            for dim, size in enumerate(kind.shape):
                ramp = torch.arange(1.0, size + 1, dtype=torch.float64)
                slope *= ramp.view(-1, *[1] * (len(kind.shape) - dim - 1))
            drawn = torch.randn((2 * _STEPS + 1, *kind.shape), generator=draw, dtype=torch.float64)
            self.starts.append(drawn[0] * slope * (1 + 2 * (number % 2)))
            scales = torch.tensor(_SCALES, dtype=torch.float64).repeat_interleave(_STEPS // len(_SCALES))
            self.gradients.append(drawn[1 : _STEPS + 1] / slope * scales.view(-1, *[1] * len(kind.shape)))
            self.nudges.append(1 + _NUDGE * drawn[_STEPS + 1 :])

    def run(self, *, sharded: bool = False, nudged: bool = False, half: slice = slice(None)) -> list[torch.Tensor]:
        """Step the stand-ins and return them: local shards if ``sharded``; one ``half``, or all."""
        chosen = range(len(self.kinds))[half]
        made: dict[int, nn.Parameter] = {}
        for number in chosen:
            kind, start = self.kinds[number], self.starts[number]
            made[number] = nn.Parameter(kind.place(start) if sharded else start.clone())
        memo = {key: made[number] for number in made for key in self.ids[number]}
        copied = self._copy([[p for n, p in made.items() if self.kinds[n].group == at] for at in self._places], memo)
        with _quiet(int(nudged)):
            for at in range(_STEPS):
                for number, parameter in made.items():
                    gradient = self.gradients[number][at] * (self.nudges[number][at] if nudged else 1.0)
                    parameter.grad = self.kinds[number].place(gradient) if sharded else gradient
                copied.step()
        return [local_of(parameter) for parameter in made.values()]

    def run_flat(self, *, sharded: bool) -> list[torch.Tensor]:
        """Step the stand-ins as flat rows: one row per group, ``sharded`` somewhere, group by group."""
        found = [start.clone() for start in self.starts]
        for group in self._places:
            mine = [number for number, kind in enumerate(self.kinds) if kind.group == group]
            if not mine:
                continue
            row = torch.cat([self.starts[number].flatten() for number in mine])
            split = _SPLIT_PERCENT * len(row) // 100 if sharded else 0
            ends = [(0, split), (split, len(row))] if split else [(0, len(row))]
            row = torch.cat([self._stepped_row(group, mine, begin, end) for begin, end in ends])
            for number, part in zip(mine, row.split([self.starts[n].numel() for n in mine]), strict=True):
                found[number] = part.view(self.starts[number].shape)
        return found

    def _stepped_row(self, group: int, mine: list[int], begin: int, end: int) -> torch.Tensor:
        """Step the elements of a row from ``begin`` to ``end``, as on one rank."""
        row = nn.Parameter(torch.cat([self.starts[number].flatten() for number in mine])[begin:end].clone())
        copied = self._copy([[row] if at == group else [] for at in self._places], {})
        copied.param_groups = [copied.param_groups[group]]
        with _quiet(0):
            for at in range(_STEPS):
                row.grad = torch.cat([self.gradients[number][at].flatten() for number in mine])[begin:end].clone()
                copied.step()
        return row.detach()

    def _copy(self, members: Sequence[list[nn.Parameter]], memo: dict[int, Any]) -> Optimizer:
        """Copy the optimizer with stand-ins for ``members`` of its groups, also in its attributes."""
        copied: Optimizer = object.__new__(type(self.optimizer))
        for name, value in self.optimizer.__dict__.items():
            if name.endswith("_hooks"):
                copied.__dict__[name] = OrderedDict()
            elif name == "state":
                copied.__dict__[name] = defaultdict(dict)
            elif name not in ("param_groups", "step"):  # a scheduler wraps the step
                copied.__dict__[name] = copy.deepcopy(value, memo)
        copied.param_groups = []
        for at, group in enumerate(self.groups):
            options = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
            if isinstance(options.get("lr"), torch.Tensor):
                options["lr"].fill_(_RATE)
            elif "lr" in options:  # a warm-up may begin at 0
                options["lr"] = _RATE
            copied.param_groups.append({**options, "params": members[at]})
        return copied

    def error(self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, sharded: bool = False) -> float:
        """Largest difference, relative to the update of its parameter."""
        worst = 0.0
        for kind, start, one, other in zip(self.kinds, self.starts, found, expected, strict=True):
            update = float((other - start).abs().max())
            other = local_of(kind.place(other)) if sharded else other
            if update and other.numel():
                share = float((one - other).abs().max()) / update
                worst = max(worst, share if share == share else float("inf"))
        return worst


@contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """Fix the random state for a trial, restore the loop's state afterwards, suppress warnings."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would change, and queue seeds for, every device
        yield


def _tried_whole(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], plan: Plan
) -> tuple[_Trial, list[torch.Tensor], float, bool] | str:
    """Run a trial unsharded; return it, its results, the rounding error, and independence.

    Independence is whether one stand-in of each kind, stepped without the other, gives the same results. If the trial
    fails as it would in one process, a sentence is returned instead; it is empty if that is not known.
    """
    name = type(optimizer).__name__
    try:
        trial = _Trial(optimizer, groups)
        if not trial.kinds:
            return ""
        full = trial.run()
        limit = max(_LEAST, _NOISE * trial.error(trial.run(nudged=True), full))
    except Exception as error:  # whatever the user's class raises
        text = f"{name} cannot step tiny parameters on trial ({_brief(error)})"
        if type(optimizer).__module__.startswith("torch.optim"):
            return f"{text}; it would fail in the first step, too"
        logging.getLogger("shardwise").warning(
            "%s, so whether %s changes its steps is not known; compare a run with one of ddp", text, plan.strategy
        )
        return ""
    halves = [trial.run(half=slice(first, None, 2)) for first in (0, 1)]
    apart = trial.error([halves[number % 2][number // 2] for number in range(len(trial.kinds))], full)
    return trial, full, limit, apart <= limit


def tried(optimizer: Optimizer, groups: Sequence[dict[str, Any]], plan: Plan, apart: str) -> str:
    """Reason why the plan is wrong for the optimizer, as one sentence; empty if it is right."""
    name, begun = type(optimizer).__name__, _tried_whole(optimizer, groups, plan)
    if isinstance(begun, str):
        return begun
    trial, full, limit, together = begun
    if apart and not together:
        return (
            f"{name} takes a sum over several parameters, and {apart}: its steps would not be those of one process; "
            "use ddp, or an optimizer that treats each parameter alone"
        )
    use = "ddp or zero1" if together else "ddp"
    try:
        found = trial.error(trial.run(sharded=True), full, sharded=True)
    except ShardwiseError as error:
        return str(error)
    except Exception as error:
        why = f" ({_brief(error)})"
        if type(optimizer).__module__.startswith("torch.optim"):  # its message is about PyTorch's internals
            fused = "(fused=True)" if _special(optimizer) else ""
            why = f": PyTorch's {name}{fused} does not compute with a weight of which each rank holds a part"
        return f"{name} cannot step the sharded parameters of {plan.strategy}{why}; use {use}, or AdamW"
    if found <= limit:
        return ""
    return (
        f"{name} steps a part of a parameter otherwise than the whole (by {found:.0%} of the update, on trial): "
        f"it takes a norm or a sum of the part that is on its rank, so {plan.strategy} would train another way than "
        f"one process; use {use}, or let it keep norms as tensors, without .item(): those are of the whole parameter"
    )


def _tried_flat(optimizer: Optimizer, plan: Plan) -> str:
    """Reason why DeepSpeed's flat rows are wrong for the optimizer, as one sentence; else empty."""
    name, begun = type(optimizer).__name__, _tried_whole(optimizer, optimizer.param_groups, plan)
    if isinstance(begun, str):
        return begun
    trial, full, limit, together = begun
    use = "ddp or zero1" if together else "ddp"
    try:
        found = trial.error(trial.run_flat(sharded=plan.dims.world_size > 1), full)
    except Exception as error:
        why = f"({_brief(error)}): they are one flat row, which {plan.strategy} cuts anywhere"
        return f"{name} cannot step the parameters as DeepSpeed gives them {why}; use {use}, or AdamW"
    if found <= limit:
        return ""
    return (
        f"{name} steps flattened parameters otherwise than the model's own (by {found:.0%} of the update, on trial): "
        f"it goes by the shape, a norm or a sum of a parameter, and {plan.strategy} gives it all of a group in one "
        f"row, cut anywhere; use {use}, or an optimizer that treats each element alone"
    )


def _brief(error: Exception) -> str:
    """Shorten an error to one line."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line[:160]}" if line else type(error).__name__
