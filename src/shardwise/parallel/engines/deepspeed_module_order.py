"""Under ZeRO-3 all ranks run the same modules in the same order. No DeepSpeed is imported here.

A module's parameters are gathered when it is run, by all ranks together. Ranks that run different modules would give
each other parts of different weights, or messages of different lengths, at which the process dies. DeepSpeed notes the
order in the first passes: what follows it costs nothing, and what leaves it is agreed on before anything is gathered.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.distributed.process_group import Ranks
from shardwise.errors import ModelError
from shardwise.model.read import clean_name

PATIENCE_S = 60.0  # that others are waited for where one leaves the order: they were there a module ago


class SameModules:
    """Stands before DeepSpeed's look at its notes, which comes before each gathering."""

    def __init__(self, coordinator: Any, module: nn.Module, strategy: str, ranks: Ranks) -> None:
        self._coordinator, self._strategy, self._ranks = coordinator, strategy, ranks
        self._names = [clean_name(name) or type(module).__name__ for name, _ in module.named_modules()]
        self._place = {id(one): place for place, one in enumerate(module.modules())}
        self._look = coordinator.trace_prologue
        if ranks.control is not None:
            coordinator.trace_prologue = self._entered

    def _entered(self, module: nn.Module) -> None:
        """A module is about to run, forward or backward.

        Raises:
            ModelError: other ranks run another one.
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
