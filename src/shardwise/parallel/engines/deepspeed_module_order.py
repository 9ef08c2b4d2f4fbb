"""Check under ZeRO-3 that all ranks run the same modules in the same order.

Does not import DeepSpeed.

A module's parameters are gathered by all ranks together when it runs. Ranks that run different modules would exchange
parts of different weights, or messages of different lengths, which kills the process. DeepSpeed records the
order in the first passes: following it costs nothing, and a departure is agreed on before anything is gathered.
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

PATIENCE_S = 60.0  # how long to wait for the others where one rank leaves the order: they were in step one module ago


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
