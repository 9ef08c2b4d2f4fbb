"""AdamW for weights that rest in bf16: beside fp32 masters, rounded at random, or with Kahan's rest.

A step is `torch.optim.AdamW`'s fused kernel in fp32, on a slab of a parameter after the other; what differs is what is
kept. With ``masters`` the weight in fp32 and both moments are state. ``kahan`` keeps the bits that a weight loses when
it is rounded, in one more bf16 tensor (Zamirai 2020, arXiv 2010.06192). ``stochastic`` rounds up as often as the lost
bits say (same source), by a hash of the parameter's name, the step and the element: the same under any strategy, on any
number of ranks and after a resume. The plain case, bf16 with nearest rounding, is `torch.optim.AdamW` itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from shardwise.distributed.local_tensor import local_of
from shardwise.errors import ModelError, PlanError
from shardwise.optim.adamw8bit import first_element
from shardwise.optim.each_parameter import EachParameter
from shardwise.plan.plan import Plan
from shardwise.plan.stored_types import stores_low

Keeps = Literal["masters", "kahan", "stochastic"]
MASTER, REST = "master", "compensation"
_EXTRA: dict[str, str] = {"masters": MASTER, "kahan": REST}
_NAME = "_shardwise_rounding_name"
_SLAB = 1 << 22  # elements that are stepped at once: their fp32 copies take 64 MiB
_HIGH = -65536  # mask of the 16 bits of an fp32 number that bf16 has


class LowPrecisionAdamW(EachParameter, torch.optim.AdamW):
    """AdamW over bf16 parameters; ``keeps`` says what makes up for their few bits.

    Moments are bf16, rounded to nearest, or fp32 beside ``masters``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        keeps: Keeps = "masters",
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.defaults["keeps"] = keeps
        for group in self.param_groups:
            group.setdefault("keeps", keeps)

    def _step_one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        keeps, state = group["keeps"], self.state[parameter]
        if not state:
            self._begin(parameter, state, keeps)
        before, first, key = state["step"].clone(), 0, None
        state["step"] += 1
        if keeps == "stochastic":
            first, key = first_element(parameter), noise_key(parameter, state["step"])
        named = [state[name] for name in ("exp_avg", "exp_avg_sq", *([_EXTRA[keeps]] if keeps in _EXTRA else []))]
        tensors = [local_of(one) for one in (parameter, gradient, *named)]
        flat = [tensor.reshape(-1) for tensor in tensors]  # a copy where the memory has another order
        for start in range(0, flat[0].numel(), _SLAB):
            slab = [one[start : start + _SLAB] for one in flat]
            wide = _stepped(slab, before.clone(), group)
            if key is not None:
                round_stochastically(wide, first + start, key)
            slab[0].copy_(wide)
            if keeps == "kahan":
                slab[4].copy_(wide.sub_(slab[0]))
        for tensor, one in zip(tensors, flat, strict=True):
            if tensor is not tensors[1] and one.numel() and one.data_ptr() != tensor.data_ptr():
                tensor.copy_(one.view(tensor.shape))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state that keeps the same bits; PyTorch would cast fp32 state to its parameter's type.

        Raises:
            ModelError: the saved state keeps other bits.
        """
        groups = list(zip(state_dict["param_groups"], self.param_groups, strict=False))
        for theirs, mine in groups:
            if theirs.get("keeps") != mine["keeps"]:
                raise ModelError(
                    f"the saved optimizer state is of {theirs.get('keeps', 'plain AdamW')}, and this run keeps "
                    f"{mine['keeps']}; load it under the weights and rounding that it was saved with"
                )
        super().load_state_dict(state_dict)
        for theirs, mine in groups:
            for number, parameter in zip(theirs["params"], mine["params"], strict=True):
                for key, value in state_dict["state"].get(number, {}).items():
                    if value.dtype != self.state[parameter][key].dtype:
                        self.state[parameter][key] = value.detach().to(parameter.device, copy=True)

    def relayout(self, parameter: torch.Tensor, saved: Mapping[str, tuple[int, ...]], values: dict[str, Any]) -> None:
        """Refuse saved state that keeps other bits; the same state is laid out as its parameter everywhere.

        Raises:
            ValueError: the saved values are not such a state.
        """
        keeps: Keeps = next(g["keeps"] for g in self.param_groups if any(p is parameter for p in g["params"]))
        here = {"step", "exp_avg", "exp_avg_sq", *([_EXTRA[keeps]] if keeps in _EXTRA else [])}
        found = {*saved, *values}
        if found and found != here:
            kind = next((name for name, key in _EXTRA.items() if key in found), "stochastic")
            raise ValueError(f"state of {kind} in the checkpoint, of {keeps} here")

    @staticmethod
    def _begin(parameter: torch.Tensor, state: dict[str, Any], keeps: Keeps) -> None:
        dtype = torch.float32 if keeps == "masters" else parameter.dtype
        state["step"] = torch.zeros((), dtype=torch.float32, device=local_of(parameter).device)
        for key in ("exp_avg", "exp_avg_sq", *([_EXTRA[keeps]] if keeps in _EXTRA else [])):
            state[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
        if keeps == "masters":
            local_of(state[MASTER]).copy_(local_of(parameter))


def _stepped(slab: list[torch.Tensor], step: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Step a weight in fp32 and return it; ``slab`` has weight, gradient, both moments, and what is kept beside them.

    The moments are stored, and the master if there is one.
    """
    weight, gradient, *kept = slab
    wide = kept[2] if group["keeps"] == "masters" else weight.float()
    if group["keeps"] == "kahan":
        wide += kept[2]
    moments = [moment.float() for moment in kept[:2]]  # of fp32 the same tensor
    adamw(
        [wide],
        [gradient.float()],
        moments[:1],
        moments[1:],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for low, moment in zip(kept, moments, strict=False):
        if low is not moment:
            low.copy_(moment)
    return wide


def low_precision_notes(optimizer: Optimizer, plan: Plan) -> list[str]:
    """Return what a plan without a wider copy of its weights costs in quality."""
    if not stores_low(plan) or plan.weights != "compute":
        return []
    found = []
    if plan.rounding == "nearest":
        found.append(
            "weights = 'compute' rounds to nearest: bf16 has 8 significant bits, and an update below 1/512 of its "
            "weight changes nothing (the receipt counts some); rounding = 'kahan' or 'stochastic' keeps such updates"
        )
    slow = [group["betas"][1] for group in optimizer.param_groups if "betas" in group]
    if slow and max(slow) > 1 - 2**-9:
        found.append(
            f"weights = 'compute' keeps moments in bf16, and with betas[1] = {max(slow):g} a second moment never "
            "falls: it loses less than 1/512 of itself in a step; use 0.99, or weights = 'masters'"
        )
    return found


def noise_key(parameter: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return where a parameter's random numbers of a step begin, 0-d int32 on its device."""
    name = zlib.crc32(getattr(parameter, _NAME, "").encode())
    return _mixed(step.to(torch.int32) * _signed(0x9E3779B9) + _signed(name))


def round_stochastically(values: torch.Tensor, begin: int, key: torch.Tensor) -> None:
    """Round flat fp32 ``values`` to numbers that bf16 has, in place, up as often as the bits between say.

    ``begin`` is the index of the first of them in the whole parameter. The noise is a hash of ``key`` plus the index.
    """
    index = torch.arange(begin, begin + values.numel(), dtype=torch.int64, device=values.device).to(torch.int32)
    noise = _mixed(index.add_(key)).bitwise_and_(0xFFFF)
    values.view(torch.int32).add_(noise).bitwise_and_(_HIGH)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Mix the 32 bits of each number, in place (Wellons 2018, "Prospecting for hash functions": lowbias32)."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def low_precision(optimizer: Optimizer, plan: Plan, names: dict[int, str]) -> Optimizer:
    """Return what steps the weights that ``plan`` stores in bf16: the optimizer itself, or one that keeps more bits.

    ``names`` maps the id of each parameter to its name.

    Raises:
        PlanError: the optimizer is not one that is known to step them.
        ModelError: a scheduler was built from it, which would not see the new one.
    """
    if not stores_low(plan):
        return optimizer
    keeps: Keeps | None = "masters" if plan.weights == "masters" else None
    if plan.rounding != "nearest":
        keeps = plan.rounding
    asked = f"weights = '{plan.weights}'" + (f" with rounding = '{plan.rounding}'" if plan.weights == "compute" else "")
    kind = type(optimizer)
    if kind is not torch.optim.AdamW and (keeps is not None or kind is not torch.optim.SGD):
        able = "torch.optim.AdamW" if keeps is not None else "torch.optim.AdamW and SGD"
        raise PlanError(f"{asked} is run with {able}, not with {kind.__name__}; use AdamW, or set weights to fp32")
    if keeps is None:
        return optimizer
    groups = optimizer.param_groups
    odd = next((key for key in ("amsgrad", "maximize") for group in groups if group.get(key)), None)
    if odd is not None:
        raise PlanError(f"{asked} is run with AdamW without {odd}; take {odd} out, or set weights to fp32")
    if any("initial_lr" in group for group in groups):
        raise ModelError(
            f"a learning-rate scheduler was built before session.prepare, and {asked} replaces the optimizer; build "
            "the scheduler from the optimizer that prepare returns"
        )
    for group in groups:
        for parameter in group["params"]:
            setattr(parameter, _NAME, names[id(parameter)])
    own = ("params", "lr", "betas", "eps", "weight_decay")
    gone = set(optimizer.defaults) - set(own)
    kept = [{key: value for key, value in group.items() if key not in gone} for group in groups]
    defaults = {key: optimizer.defaults[key] for key in own[1:]}
    return LowPrecisionAdamW(kept, **defaults, keeps=keeps)
