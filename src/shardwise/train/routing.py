"""`Routing`: watch what the routers of a session's model choose, add their own losses, move their bias."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.expert_layers import ExpertLayer, expert_layers
from shardwise.model.read import clean_name
from shardwise.parallel.experts.router_loss import MicroRouting, RouterLoss
from shardwise.plan.plan import Plan
from shardwise.plan.router_terms import RouterTerms
from shardwise.train.session_interface import TrainingSession

BIAS = "e_score_correction_bias"
_STAGE = re.compile(r"^_stage_\d+\.")


def router_terms(model: nn.Module, given: RouterTerms) -> tuple[RouterTerms, tuple[str, ...]]:
    """Return the terms in force: the given ones, or transformers' own where its configuration turns them on.

    Its per-rank loss is turned off then, and a note says so.
    """
    config: Any = getattr(model, "config", None)
    if not getattr(config, "output_router_logits", False) or not expert_layers(model):
        return given, ()
    own = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
    terms = given if given.aux_loss else replace(given, aux_loss=own)
    config.output_router_logits = False
    return terms, (
        f"model.config.output_router_logits is now False: the routers' loss (weight {terms.aux_loss:g}) is computed "
        "over all ranks of a micro step and added to the gradient, not to the loss of one rank",
    )


def check_routers(model: nn.Module, plan: Plan, terms: RouterTerms) -> None:
    """Check that the model and the plan support the terms, before anything is changed.

    Raises:
        ModelError: all obstacles, by layer.
    """
    layers, problems = expert_layers(model), []
    if terms == RouterTerms():
        return
    if not layers:
        raise ModelError(
            "router terms are set (router_aux_loss, router_z_loss or router_bias_rate), and the model has no layer of "
            "stacked experts that a router's choice is called with; remove them"
        )
    parts = dict(model.named_modules())
    for layer in layers:
        router = None if layer.router is None else parts.get(layer.router)
        if router is None:
            problems.append(f"'{layer.name}' has no router beside it with a weight [experts, width]")
        elif terms.has_loss and hasattr(router, BIAS):
            problems.append(
                f"'{layer.router}' scores each expert by itself (it has {BIAS}), and the routers' losses are of a "
                "softmax; set router_bias_rate instead"
            )
        elif terms.bias_rate and not hasattr(router, BIAS):
            problems.append(f"'{layer.router}' has no {BIAS} for router_bias_rate; use router_aux_loss")
    if terms.has_loss and len({layer.num_experts for layer in layers}) > 1:
        problems.append("layers have different numbers of experts, and the balancing loss is over all layers")
    if terms.has_loss and plan.virtual_stages > 1:
        problems.append("several stages of a rank choose in another order than their peers; set virtual_stages to 1")
    if plan.parsed.engine != "torch":
        problems.append(f"{plan.strategy} runs the backward by itself; name the same stage on PyTorch")
    if problems:
        raise ModelError(*(f"router terms: {problem}" for problem in dict.fromkeys(problems)))


@dataclass
class _Watched:
    """Layer of this rank, with what its router returned last."""

    num_experts: int
    index: int  # in the whole model
    router: nn.Module | None
    logits: torch.Tensor | None = None


Seen = Callable[..., None]  # of a layer, a micro batch, the experts, their weights, logits, and rows that count


class Routing:
    """Observer of a session; it does nothing where the model has no layer of experts.

    ``counts`` [layers, experts] are the choices of the last step over all ranks, ``tokens`` those that chose in each
    layer, ``loss`` the routers' weighted losses, the mean over its micro steps. Set ``terms`` before `Session.prepare`.
    """

    def __init__(self) -> None:
        self.terms = RouterTerms()
        self.layers: tuple[ExpertLayer, ...] = ()
        self.names: tuple[str, ...] = ()
        self.experts = 0  # of the layer with the most
        self.counts = torch.zeros(0)
        self.tokens = torch.zeros(0)
        self.loss = 0.0
        self.done: list[MicroRouting] = []
        self.watcher: Seen | None = None
        self.top_k: dict[int, int] = {}
        self.modules: dict[int, nn.Module] = {}  # of this rank, by the layer's number
        self._step: Any = None
        self._active: MicroRouting | None = None
        self._watched: list[_Watched] = []
        self._local = torch.zeros(0)
        self._forwards: dict[int, int] = {}

    def adopt(self, model: nn.Module, plan: Plan) -> tuple[str, ...]:
        """Take the layers of an untouched model, and its own losses; return notes.

        Raises:
            ModelError: the model or the plan does not support the terms.
        """
        self.terms, notes = router_terms(model, self.terms)
        check_routers(model, plan, self.terms)
        self.layers = tuple(replace(layer, module=None) for layer in expert_layers(model))  # `prepare` may copy it
        self.names = tuple(layer.name for layer in self.layers)
        self.experts = max((layer.num_experts for layer in self.layers), default=0)
        if self.terms.aux_loss and plan.grad_accum > 1:
            notes += (
                f"the routers' balancing loss is over all ranks' tokens of a micro step, and the mean of the step's "
                f"{plan.grad_accum} micro steps: with another grad_accum it is another loss",
            )
        return notes

    def log_fields(self) -> dict[str, float | None]:
        """Return the last step's part of a line of metrics: weighted losses, and the busiest expert over the mean."""
        found: dict[str, float | None] = {}
        if self.terms.has_loss:
            found["router_loss"] = self.loss if math.isfinite(self.loss) else None
        if self.counts.numel():
            sizes = torch.tensor([layer.num_experts for layer in self.layers], dtype=torch.float64)
            each = self.counts.cpu()
            found["busiest_expert"] = float((each.amax(-1) * sizes / each.sum(-1).clamp_min(1.0)).max())
        return found

    def on_prepared(self, session: TrainingSession) -> None:
        """Hook this rank's routers and experts."""
        if not self.layers or session.applied.engine is not None:
            return
        module = session.module
        named = ((clean_name(f"{name}.").rstrip("."), part) for name, part in module.named_modules())
        parts = {_STAGE.sub("", name): part for name, part in named}
        for index, layer in enumerate(self.layers):
            if layer.name not in parts:  # on another pipeline stage
                continue
            router = None if layer.router is None else parts.get(layer.router)
            watched = _Watched(layer.num_experts, index, router)
            self.modules[index] = parts[layer.name]
            self._watched.append(watched)
            if router is not None and self.terms.has_loss:
                router.register_forward_hook(self._router_hook(watched))
            parts[layer.name].register_forward_pre_hook(self._experts_hook(session, watched), with_kwargs=True)
        pipeline = session.applied.pipeline
        for root in [module] if pipeline is None else [*module.children()]:
            root.register_forward_pre_hook(lambda part, _: self._begin(session, part), prepend=True)
            root.register_forward_hook(lambda part, *_: self._end(session), always_call=True)
        device = session.device
        self._local = torch.zeros(len(self.names), self.experts + 1, dtype=torch.float64, device=device)

    def on_step_start(self, session: TrainingSession, step: Any) -> None:
        """Begin to count."""
        if not self.modules and not self._local.numel():
            return
        self._step, self._active, self.done, self._forwards = step, None, [], {}
        self._local.zero_()

    def on_gradients(self, session: TrainingSession, step: Any) -> None:
        """Do nothing."""

    def on_step_abandoned(self, session: TrainingSession, step: Any) -> None:
        """Forget the step."""
        self._step, self._active, self.done = None, None, []

    def on_step_end(self, session: TrainingSession, step: Any) -> None:
        """Add the counts over all ranks, and move the bias."""
        if self._step is None:
            return
        total = self._local.clone()
        if session.ranks.world_size > 1:
            dist.all_reduce(total)
            total /= 1 if session.plan.sequence_parallel else session.plan.dims.tp
        self.counts, self.tokens = total[:, :-1], total[:, -1]
        if self.terms.has_loss and self.done:
            self.loss = float(torch.stack([micro.loss() for micro in self.done]).mean())
        if self.terms.bias_rate:
            for watched in self._watched:
                self._move_bias(watched)
        self._step, self._active = None, None

    @torch.no_grad()
    def _move_bias(self, watched: _Watched) -> None:
        bias = getattr(watched.router, BIAS)
        load = self.counts[watched.index][: watched.num_experts]
        bias.add_((load.mean() - load).sign().to(bias.dtype), alpha=self.terms.bias_rate)

    def _begin(self, session: TrainingSession, root: nn.Module) -> None:
        if self._step is None or not torch.is_grad_enabled() or session.phase != "forward":
            return
        step, number = self._step, self.experts
        at = self._forwards[id(root)] = self._forwards.get(id(root), -1) + 1
        at = at if session.applied.pipeline is not None else step.micro - 1
        if at >= len(step.micros):  # a schedule fills up with what is not the step's
            return
        micro = step.micros[at]
        dims = session.plan.dims
        splits = dims.tp > 1 and session.plan.sequence_parallel  # a rank's tokens are then its own
        mask = _mask(micro, session.place.tp if splits else 0, dims.tp if splits else 1)
        factor = session.reduced_ranks / len(step.micros)
        factor *= 1.0 if session.scaler is None else float(session.scaler.get_scale())
        device = session.device
        if micro.padding:  # it repeats a batch that has been counted, for the other ranks
            shape = (1,) if mask is None else mask.shape
            mask = torch.zeros(shape, dtype=torch.float64)
        sums = torch.zeros(2 * number + 2, dtype=torch.float64, device=device)
        mask = None if mask is None else mask.to(device)
        self._active = MicroRouting(self.terms, number, 1 if splits else dims.tp, factor, mask, sums)
        self.done.append(self._active)

    def _end(self, session: TrainingSession) -> None:
        active, self._active = self._active, None
        if active is not None and self.terms.has_loss:
            phase, session.phase = session.phase, "other"
            active.send()
            session.phase = phase

    def _router_hook(self, watched: _Watched) -> Any:
        def after(_: nn.Module, __: Any, found: Any) -> None:
            parts = found if isinstance(found, tuple) else (found,)
            fits = (p for p in parts if isinstance(p, torch.Tensor) and p.shape[-1] == watched.num_experts)
            watched.logits = next(fits)

        return after

    def _experts_hook(self, session: TrainingSession, watched: _Watched) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, index, weights = (*args, *kwargs.values())
            logits, watched.logits = watched.logits, None
            active = self._active
            if active is not None:
                if active.mask is not None and active.mask.shape != (len(index),):
                    active.mask = active.mask.expand(len(index)) if active.mask.numel() == 1 else active.mask
                rows = torch.ones(len(index), dtype=torch.float64) if active.mask is None else active.mask
                self._count(watched, index, rows.to(index.device))
                if self.watcher is not None:
                    self.watcher(watched.index, len(self.done) - 1, index, weights, logits, rows)
                if logits is not None:
                    active.add(logits.flatten(0, -2), index)
            used = active or (self.done[-1] if self.done else None)  # a recomputation has the graph of the first run
            if logits is None or used is None or not torch.is_grad_enabled():
                return None
            return (hidden, index, RouterLoss.apply(weights, logits.flatten(0, -2), used)), {}

        return before

    def _count(self, watched: _Watched, index: torch.Tensor, rows: torch.Tensor) -> None:
        self.top_k[watched.index] = index.shape[-1]
        local = self._local[watched.index]
        inside = index < watched.num_experts
        each = rows.unsqueeze(-1).expand(index.shape)[inside]
        local[:-1].index_add_(0, index[inside], each)
        local[-1] += rows.sum()


def _mask(micro: Any, part: int, parts: int) -> torch.Tensor | None:
    """Return which of a micro batch's tokens, or of a part of their sequences, are no padding, one number each."""
    inputs = micro.inputs
    found = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    if not isinstance(found, torch.Tensor) or found.ndim != 2:
        return None
    return found.detach().chunk(parts, 1)[part].reshape(-1).to(torch.float64)
