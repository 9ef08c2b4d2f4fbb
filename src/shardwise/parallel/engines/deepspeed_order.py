"""Reduce gradients in one order on all ranks, whichever each rank has used.

DeepSpeed reduces gradients together in the order in which a rank's backward makes them, and leaves out what it has not
made. Where ranks use other branches of a model, gradients of different parameters would meet in one sum, or messages
of different lengths; and a buffer that gets nothing keeps what an earlier micro batch or step has left there.

Under ZeRO-3 a module's parameters are gathered when it is run, by all ranks together. Ranks that run different modules
would give each other parts of different weights, or messages of different lengths, at which the process dies. DeepSpeed
notes the order in the first passes: what follows it costs nothing, and what leaves it is agreed on before anything is
gathered.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.distributed.process_group import Ranks, gather_ints
from shardwise.errors import ModelError
from shardwise.model.read import clean_name

_BITS = 62  # of an integer of a message that are used
PATIENCE_S = 60.0  # how long to wait for the others where one rank leaves the order: they were in step one module ago


class GradientOrder:
    """Hooks before DeepSpeed's reduction that pass on each parameter after its predecessors.

    At the end of each reducing backward, missing parameters are passed on, too: with the sum of earlier micro
    batches where that is kept, else as zeros. The order is the reverse one of the model at first, and that of rank
    0's first backward from then on, so that gradients do not wait for each other.

    ``reached`` are the indices (in ``parameters``, named by ``names``) that a backward of this step has reached.
    """

    def __init__(self, zero: Any, names: list[str], parameters: list[Any], ranks: Ranks) -> None:
        self.names, self.reached = names, set[int]()
        self._zero, self._parameters, self._ranks = zero, parameters, ranks
        self._place = {id(p): place for place, p in enumerate(parameters)}
        self._order, self._learnt = list(reversed(range(len(parameters)))), False
        self._came: list[int] = []
        self._ready: dict[int, tuple[Any, ...]] = {}
        self._next = 0
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._note, place)) for place, p in enumerate(parameters)
        ]
        if hasattr(zero, "reduce_ready_partitions_and_remove_grads"):  # not ZeRO-1 in bf16, which reduces all together
            self._groups = {id(p): (i,) for i, group in enumerate(getattr(zero, "bit16_groups", ())) for p in group}
            self._reduce = zero.reduce_ready_partitions_and_remove_grads
            self._end = zero.independent_gradient_partition_epilogue
            zero.reduce_ready_partitions_and_remove_grads = self._arrived
            zero.independent_gradient_partition_epilogue = self._finish

    def agree(self, problem: bool) -> tuple[list[str], bool]:
        """Return the parameters that no rank reached this step, and whether any rank has a problem.

        Collective.

        One small message: a bit for each parameter.
        """
        bits = [0] * -(-len(self.names) // _BITS)
        for place in self.reached:
            bits[place // _BITS] |= 1 << place % _BITS
        with COMM_TIMER.part("control"):
            rows = gather_ints([int(problem), *bits], self._ranks)
        found = [reduce(or_, column) for column in zip(*rows, strict=True)]
        missing = [name for at, name in enumerate(self.names) if not found[1 + at // _BITS] >> at % _BITS & 1]
        return missing, bool(found[0])

    def begin(self) -> None:
        """Start a new step, also after one that was interrupted."""
        self.reached.clear()
        self._restart()

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, place: int, _: torch.Tensor) -> None:
        self.reached.add(place)

    def _arrived(self, parameter: Any, *group: int) -> None:
        """Handle a gradient that DeepSpeed is about to reduce.

        Raises:
            ModelError: it was already reduced in this backward.
        """
        place = self._place[id(parameter)]
        if place in self._came and place not in self._ready:
            raise ModelError(
                f"{self.names[place]} got two gradients in one backward (a checkpoint with use_reentrant=True does "
                "that), and DeepSpeed reduces one; use use_reentrant=False, or fsdp"
            )
        self._came.append(place)
        self._ready[place] = group
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._hand_on(self._order[self._next])

    def _hand_on(self, place: int) -> None:
        self._next += 1
        self._reduce(self._parameters[place], *self._ready.pop(place))

    def _finish(self) -> None:
        """Finish all backwards of this reduction."""
        zero = self._zero
        if hasattr(zero, "setup_buckets"):
            zero.setup_buckets()
        for place in self._order[self._next :]:
            if place not in self._ready:
                self._fill(self._parameters[place])
                self._ready[place] = self._groups.get(id(self._parameters[place]), ())
            self._hand_on(place)
        came = list(dict.fromkeys(self._came))
        self._restart()
        self._end()
        if not self._learnt:
            self._learnt = True
            rest = [place for place in self._order if place not in set(came)]
            self._order = gather_ints([*came, *rest], self._ranks)[0]

    def _restart(self) -> None:
        self._came, self._next = [], 0
        self._ready.clear()

    def _fill(self, parameter: Any) -> None:
        """Set a parameter's gradient to zeros if none is kept for it."""
        kept = "grad_accum" if getattr(self._zero, "use_grad_accum_attribute", False) else "grad"
        if getattr(parameter, kept, None) is not None:
            return
        shell = parameter.data
        zeros = torch.zeros(getattr(parameter, "ds_shape", shell.shape), dtype=shell.dtype, device=shell.device)
        if kept == "grad_accum":
            parameter.grad_accum = zeros.to(self._zero.gradient_accumulation_dtype)
            return
        parameter.data = zeros  # ZeRO-3 has partitioned it, and a gradient must have its parameter's shape
        parameter.grad = zeros.clone() if shell.shape == zeros.shape else zeros
        parameter.data = shell


class SameModules:
    """Module hooks that run before DeepSpeed reads its record, and so before each gathering."""

    def __init__(self, coordinator: Any, module: nn.Module, strategy: str, ranks: Ranks) -> None:
        self._coordinator, self._strategy, self._ranks = coordinator, strategy, ranks
        self._names = [clean_name(name) or type(module).__name__ for name, _ in module.named_modules()]
        self._place = {id(one): place for place, one in enumerate(module.modules())}
        self._look = coordinator.trace_prologue
        if ranks.control is not None:
            coordinator.trace_prologue = self._entered

    def _entered(self, module: nn.Module) -> None:
        """Check a module that is about to run, forward or backward.

        Raises:
            ModelError: other ranks run a different module.
        """
        noted = self._coordinator.is_complete_trace()
        self._look(module)
        if self._coordinator.is_complete_trace():
            return
        mine = torch.tensor([self._place.get(id(module), -1)])
        rows = [torch.empty_like(mine) for _ in range(self._ranks.world_size)]
        work = dist.all_gather(rows, mine, group=self._ranks.control, async_op=True)
        try:
            work.wait(timedelta(seconds=PATIENCE_S)) if noted else work.wait()
        except RuntimeError:
            if not noted:
                raise
            raise self._refusal(
                f"rank {self._ranks.rank} runs {self._name(int(mine))}, which the micro batches before did not run "
                "there, and other ranks do not"
            ) from None
        places = [int(row) for row in rows]
        other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
        if other is not None:
            raise self._refusal(
                f"rank 0 runs {self._name(places[0])} where rank {other} runs {self._name(places[other])}"
            )

    def _name(self, place: int) -> str:
        return "a module that was added later" if place < 0 else f"'{self._names[place]}'"

    def _refusal(self, what: str) -> ModelError:
        return ModelError(
            f"{what}: {self._strategy} gathers the weights of a module on all ranks together; let every rank run the "
            f"same modules in each micro batch, or use {self._strategy.replace('zero3', 'zero2').replace('+nvme', '')}"
        )
