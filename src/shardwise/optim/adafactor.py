"""Adafactor on sharded parameters, with sums over rows reduced over a parameter's ranks.

`torch.optim.Adafactor` is correct where a parameter is unsharded, and is used there unchanged. On a shard it would take
norms and column means of the shard alone. Here each rank sums its local rows, two all-reduces serve all parameters
together (one of column sums and norms, one of the updates' norms), and then each rank steps its local rows. A row's
mean is local already. The update is computed twice, once for its norm, so that no second copy is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.optim._adafactor import adafactor as step_whole

from shardwise.distributed.local_tensor import empty_beside, local_of
from shardwise.errors import ModelError


@dataclass
class _Part:
    """Local rows of one parameter during a step; ``group`` are the ranks with the other rows."""

    weight: torch.Tensor
    gradient: torch.Tensor
    full: torch.Size
    state: dict[str, Any]
    options: dict[str, Any]
    number: int
    rate: float = 0.0
    row_mean: float = 0.0

    @property
    def is_matrix(self) -> bool:
        return len(self.full) == 2

    @property
    def eps(self) -> float:
        given = self.options["eps"][0]
        return torch.finfo(self.weight.dtype).eps if given is None else float(given)

    def begin(self) -> list[torch.Tensor]:
        """Compute local row means; return the values to all-reduce: scalars, then columns."""
        self.state["step"] += 1
        self.number = int(self.state["step"].item())
        share = self.number ** self.options["beta2_decay"]
        sums = [self.weight.square().sum()]
        if len(self.full) < 2:
            local_of(self.state["variance"]).lerp_(self.gradient.square(), share)
            return sums
        row = local_of(self.state["row_var"])
        row.lerp_(self.gradient.square().mean(dim=-1, keepdim=True), share)
        if not self.is_matrix:
            column = local_of(self.state["col_var"])
            column.lerp_(self.gradient.square().mean(dim=-2, keepdim=True), share)
            return sums
        return [*sums, row.sum(), self.gradient.square().sum(dim=-2)]

    def take(self, sums: list[float], columns: torch.Tensor | None) -> None:
        """Store the all-reduced values."""
        elements = math.prod(self.full)
        options = self.options
        slowed = min(float(options["lr"]), 1 / math.sqrt(self.number))
        self.rate = max(options["eps"][1], math.sqrt(sums[0]) / math.sqrt(elements)) * slowed
        if columns is not None:
            self.row_mean = max(sums[1] / self.full[0], self.eps)
            column = local_of(self.state["col_var"])
            if column.numel():
                mean = (columns / self.full[0]).to(column.dtype).view(1, -1)
                column.lerp_(mean, self.number ** options["beta2_decay"])

    def update(self) -> torch.Tensor:
        """Compute the update of the rows without the learning rate, as `torch.optim.Adafactor` does."""
        if len(self.full) < 2:
            variance = local_of(self.state["variance"]).clone()
        elif not self.weight.numel():
            return torch.zeros_like(self.weight)
        else:
            row, column = local_of(self.state["row_var"]), local_of(self.state["col_var"])
            variance = row @ column
            if self.is_matrix:
                variance.div_(self.row_mean)
            else:
                variance.div_(row.mean(dim=-2, keepdim=True).clamp_(min=self.eps))
        return variance.clamp_(min=self.eps**2).rsqrt_().mul_(self.gradient)

    def apply(self, squares: float) -> None:
        """Apply the update, limited to a root mean square of ``d``."""
        decay = self.options["weight_decay"]
        if decay:
            self.weight.mul_(1 - float(self.options["lr"]) * decay)
        size = math.sqrt(squares) / (math.sqrt(math.prod(self.full)) * self.options["d"])
        self.weight.add_(self.update(), alpha=-self.rate / max(1.0, size))


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` that also steps FSDP2 shards, with the results of one process.

    A matrix keeps one number for each row and one for each column (``row_var``, ``col_var``), a vector one for each
    element (``variance``). Rows are sharded as the parameter's are; columns are replicated.

    Raises:
        ModelError: in the first step, if a parameter is sharded along another dim than its rows.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient. Collective over the ranks that shard parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts: dict[tuple[dist.ProcessGroup, torch.dtype], list[_Part]] = {}
        for options in self.param_groups:
            for parameter in options["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    start_state(parameter, self.state[parameter])
                group = self.sharing(parameter)
                if group is None:
                    self._step_whole(parameter, parameter.grad, options)
                    continue
                weight, gradient = local_of(parameter), local_of(parameter.grad)
                gradient = -gradient if options["maximize"] else gradient
                part = _Part(weight, gradient, parameter.shape, self.state[parameter], options, 0)
                parts.setdefault((group, weight.dtype), []).append(part)
        for (group, dtype), members in parts.items():
            _step_parts(members, group, torch.promote_types(dtype, torch.float32))
        return loss

    def _step_whole(self, parameter: torch.Tensor, gradient: torch.Tensor, options: dict[str, Any]) -> None:
        if not parameter.numel():
            return
        state = self.state[parameter]
        pick: dict[str, list[Any]] = {}
        for name in ("row_var", "col_var", "variance"):
            pick[name] = [local_of(state[name]) if name in state else None]
        step_whole(
            [local_of(parameter)],
            [local_of(gradient)],
            pick["row_var"],
            pick["col_var"],
            pick["variance"],
            [state["step"]],
            d=options["d"],
            lr=options["lr"],
            beta2_decay=options["beta2_decay"],
            weight_decay=options["weight_decay"],
            eps1=options["eps"][0],
            eps2=options["eps"][1],
            maximize=options["maximize"],
        )

    @staticmethod
    def summed_elements(shape: tuple[int, ...]) -> tuple[int, int]:
        """Elements of a sharded parameter of ``shape`` in a step's first and second all-reduce."""
        return (2 + shape[1] if len(shape) == 2 else 1), 1

    @staticmethod
    def sharing(parameter: torch.Tensor) -> dist.ProcessGroup | None:
        """Process group that shares a parameter's rows; ``None`` where this rank has all rows.

        Raises:
            ModelError: the parameter is sharded along another dim than its rows.
        """
        if not isinstance(parameter, DTensor):
            return None
        sharded_axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        if any(parameter.placements[axis] != Shard(0) for axis in sharded_axes) or len(sharded_axes) > 1:
            raise ModelError(
                f"adafactor: a parameter laid out as {parameter.placements} is cut along something else than its rows, "
                "and its sums would be those of the part; use adamw, or a strategy without +tp"
            )
        if not sharded_axes or parameter.device_mesh.shape[sharded_axes[0]] == 1:
            return None
        return parameter.device_mesh.get_group(sharded_axes[0])


def start_state(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Fill ``state`` with a parameter's initial zeros."""
    state["step"] = torch.tensor(0.0)
    for name, shape in state_shapes(tuple(parameter.shape)).items():
        room = empty_beside(parameter, shape, parameter.dtype)
        local_of(room).zero_()
        state[name] = room


def state_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of a parameter's state: row and column of its last two dims, or its shape."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def _step_parts(parts: list[_Part], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    mine = [part.begin() for part in parts]
    counts = [[tensor.numel() for tensor in tensors] for tensors in mine]
    scalars = [t.reshape(1).to(dtype) for tensors in mine for t in tensors[:2]]
    columns = [t.reshape(-1).to(dtype) for tensors in mine for t in tensors[2:]]
    flat = torch.cat([*scalars, *columns])
    dist.all_reduce(flat, group=group)
    sums = iter(flat[: len(scalars)].tolist())
    rest = flat[len(scalars) :]
    begin = 0
    for part, sizes in zip(parts, counts, strict=True):
        full = None
        if part.is_matrix:
            full = rest[begin : begin + sizes[2]]
            begin += sizes[2]
        part.take([next(sums) for _ in sizes[:2]], full)
    squares = torch.stack([part.update().square().sum().to(dtype) for part in parts])
    dist.all_reduce(squares, group=group)
    for part, size in zip(parts, squares.tolist(), strict=True):
        part.apply(size)
