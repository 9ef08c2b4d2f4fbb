"""Pipeline parallel: stages of a model, and the schedule that runs micro batches through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.parallel.mesh import Meshes
from shardwise.plan.plan import Plan
from shardwise.spec.model import ModelSpec
from shardwise.spec.wiring import Wiring

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Stages:
    """The stages that this rank holds, as modules with the user's names; one without pipeline parallel.

    ``container`` is what the session trains: the model itself without pipeline parallel, else a module whose children
    ``_stage_K`` are the stages. ``borrowed`` are tied parameters that are here and owned by another stage.
    """

    container: nn.Module
    parts: tuple[nn.Module, ...]
    borrowed: frozenset[str] = frozenset()

    def blocks_of(self, stage: nn.Module) -> frozenset[str]:
        """Names of the blocks that ``stage`` computes."""
        raise NotImplementedError

    def enter(self, stage: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Let what comes from the stage before enter the first of ``blocks`` and what goes on leave the last.

        Called once the blocks stand as they will run (recompute and compile are around them).
        """

    def is_last(self, stage: nn.Module) -> bool:
        """True for the stage that computes the loss."""
        raise NotImplementedError


def cut_stages(module: nn.Module, spec: ModelSpec, wiring: Wiring | None, plan: Plan, pp_rank: int) -> Stages:
    """This rank's stages; ``wiring`` is ``None`` without pipeline parallel, and the model is then one stage."""
    raise NotImplementedError


@dataclass
class Pipeline:
    """Runs the micro batches of a step through the stages of all ranks."""

    def train(self, micros: Sequence[Any], loss_fn: LossFunction, weight: Callable[[Any], float]) -> torch.Tensor:
        """Forward and backward of every micro batch of a step; gradients are reduced over the data-parallel ranks.

        ``loss_fn(outputs, labels)`` is a summed loss, 0-d; it is multiplied by ``weight(micro)`` for backward. Returns
        the sum of the unweighted losses of micro batches that are no fillers: on the last stage, zero elsewhere.
        """
        raise NotImplementedError

    def evaluate(self, inputs: Sequence[Any], labels: Sequence[Any], loss_fn: LossFunction) -> torch.Tensor:
        """Forward only, without gradients: the summed loss on the last stage, zero elsewhere."""
        raise NotImplementedError

    def finish_gradients(self) -> None:
        """Add up the gradients of parameters that several stages use (a tied embedding). Collective over the stages."""
        raise NotImplementedError


def make_pipeline(stages: Stages, plan: Plan, meshes: Meshes, device: torch.device) -> Pipeline:
    """The schedule that ``plan`` names, over ``stages``. Collective."""
    raise NotImplementedError
