"""Pipeline parallel for the Llama of transformers, by hand: two or more modules, PyTorch's stage and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.peers.plain import data_parallel, loss_context, sum_of_squares, total_norm
from benchmarks.peers.plain_tensor import plain_tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardwise.bench.step.step_bench import Batch, MakeOptimizer, TrainStep
from shardwise.distributed.process_group import Ranks
from shardwise.plan.plan import Plan


class LlamaStage(nn.Module):
    """Some consecutive layers of a Llama, with the embedding at the start and the norm and the head at the end.

    Parts have the names that they have in the whole model.
    """

    def __init__(self, full: Any, stage: int, stages: int) -> None:
        super().__init__()
        layers = list(full.model.layers)
        first, last = stage * len(layers) // stages, (stage + 1) * len(layers) // stages
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(layers[first:last])
        self.model.rotary_emb = full.model.rotary_emb
        if stage == 0:
            self.model.embed_tokens = full.model.embed_tokens
        if stage == stages - 1:
            self.model.norm = full.model.norm
            self.lm_head = full.lm_head
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.length = 0  # tokens of a sample, set by the loop: under sequence parallel a rank has a part of them

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [samples, length] at the first stage, hidden states at others; logits from the last."""
        model: Any = self.model
        places = torch.arange(self.length, device=x.device)[None]
        if self.is_first:
            x = model.embed_tokens(x)
        angles = model.rotary_emb(x, position_ids=places)
        for layer in model.layers:
            x = layer(x, attention_mask=None, position_ids=places, position_embeddings=angles)
        return self.lm_head(model.norm(x)) if self.is_last else x


def plain_pipeline(
    full: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    ranks: Ranks,
    make_optimizer: MakeOptimizer,
    clip_norm: float | None,
) -> TrainStep:
    """1F1B over the ``pp`` axis of ``mesh``; a tied embedding is on the first and the last stage, and its gradients are
    added up over the two.
    """
    pp = mesh["pp"]
    index, stages, group = pp.get_local_rank(), pp.size(), pp.get_group()
    tied = full.lm_head.weight is full.model.embed_tokens.weight  # type: ignore[union-attr]
    stage = LlamaStage(full, index, stages)
    if plan.dims.tp > 1:
        plain_tensor(stage, mesh["tp"], plan)
    data_parallel(stage, list(stage.model.layers), mesh, plan)  # type: ignore[arg-type]
    parameters = list(stage.parameters())
    optimizer = make_optimizer(parameters)
    schedule = Schedule1F1B(
        PipelineStage(stage, index, stages, ranks.device, group=group), plan.grad_accum, loss_fn=_mean_loss
    )
    ends = _ends(mesh) if tied else None

    def step(micros: Sequence[Batch]) -> float:
        stage.length = micros[0][0].shape[1]
        inputs, labels = (torch.cat(parts) for parts in zip(*micros, strict=True))
        losses: list[torch.Tensor] = []
        with loss_context(plan):
            schedule.step(*([inputs] if index == 0 else []), target=labels, losses=losses)
        shared = _tied_weight(stage, ends)
        if shared is not None:
            dist.all_reduce(_placed_gradient(shared), group=ends)
        if clip_norm is not None:
            counted = [p for p in parameters if not (shared is p and index)]  # a tied weight counts once
            norm = sum_of_squares(total_norm(counted), group)
            nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / plan.grad_accum if losses else 0.0

    return step


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _ends(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of the first and the last stage that this rank's embedding is shared in; collective."""
    grid = mesh.mesh.flatten(1) if mesh.ndim > 1 else mesh.mesh[:, None]
    mine = None
    for column in range(grid.shape[1]):
        pair = sorted({int(grid[0, column]), int(grid[-1, column])})
        group = dist.new_group(pair)
        if dist.get_rank() in pair:
            mine = group
    return mine


def _tied_weight(stage: LlamaStage, ends: dist.ProcessGroup | None) -> nn.Parameter | None:
    if ends is None or not (stage.is_first or stage.is_last):
        return None
    weight: Any = stage.lm_head.weight if stage.is_last else stage.model.embed_tokens.weight  # type: ignore[union-attr]
    return weight


def _placed_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's gradient, cut as the weight is: what autograd leaves of a DTensor may lie otherwise."""
    gradient: Any = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
