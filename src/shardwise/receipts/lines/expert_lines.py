"""Receipt lines on mixtures of experts: where tokens went, the routers' losses, and the gradient of the experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from shardwise.parallel.experts.expert_parallel import experts_here
from shardwise.parallel.ownership import ownership_of
from shardwise.receipts.receipt import Line
from shardwise.train.routing import Routing
from shardwise.train.session import Session
from shardwise.train.step import Step

_TOLERANCE = {"fp32": 1e-4, "bf16": 0.03, "fp16": 0.01}


class ExpertLines:
    """Observer of one step of a model with layers of experts.

    What the routers chose is counted from the choices themselves, in float64, and what experts computed where they
    compute. A layer's output is linear in the weights of its last product, so the product of weights and gradients,
    summed over all experts, is that of outputs and their gradients, summed over all tokens.
    """

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._hooks: list[RemovableHandle] = []

    def start(self, session: Session, step: Step) -> None:
        """Begin to observe."""
        number, layers = self._routing.experts, len(self._routing.names)
        device = session.device

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self._chosen, self._computed, self._rows = zeros(layers, number), zeros(layers, number), zeros(layers)
        self._lost, self._outputs, self._weights = zeros(layers), zeros(layers, 2), zeros(layers)
        self._micros = zeros(len(step.micros), 2 * number + 2)
        self._trained = [False] * layers
        self._scale = 1.0 if session.scaler is None else float(session.scaler.get_scale())
        self._routing.watcher = self._see
        for index, module in self._routing.modules.items():
            self._hooks.append(module.register_forward_hook(functools.partial(self._leave, index)))
            here = experts_here(module)
            if here is not None:
                here.computed = functools.partial(self._compute, index, here.first)

    def gradients(self, session: Session) -> None:
        """Multiply the weights of each layer's last product with their gradients, before clipping."""
        home = ownership_of(session.module)
        first = dist.get_rank() == (0 if home is None else home.ranks[0]) if dist.is_initialized() else True
        with torch.no_grad():
            for index, module in self._routing.modules.items():
                found = [_product(p, first=first) for p in _last(module)]
                self._trained[index] = None not in found
                self._weights[index] = sum(value for value in found if value is not None)

    def stop(self) -> None:
        """Stop; the records stay."""
        self._routing.watcher = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for module in self._routing.modules.values():
            if (here := experts_here(module)) is not None:
                here.computed = None

    def lines(self, session: Session, step: Step) -> Iterator[Line]:
        """Yield the lines; collective."""
        copies = 1 if session.plan.sequence_parallel else session.plan.dims.tp
        parts = [self._chosen, self._rows, self._lost, self._outputs, self._micros]
        spread = session.plan.dims.ep > 1
        totals = _summed(parts, copies) + _summed([self._computed, self._weights], 1)
        chosen, rows, lost, outputs, micros, computed, weights = totals
        yield self._token_line(chosen, computed if spread else chosen, rows, lost, session)
        if spread:
            parameters = [p for module in self._routing.modules.values() for p in _own(module)]
            held = sorted({p.to_local().shape[0] * _ways(p, 0) for p in parameters})
            planned = sorted({layer.num_experts // session.plan.dims.ep for layer in self._routing.layers})
            texts = [", ".join(map(str, one)) for one in (planned, held)]
            name = f"experts of a layer on a rank (ep {session.plan.dims.ep})"
            yield Line(name=name, planned=texts[0], found=texts[1], ok=planned == held or not self._routing.modules)
        if self._routing.terms.has_loss:
            yield self._loss_line(micros)
        if session.in_backward is None and any(self._trained):
            yield self._gradient_line(session, outputs / self._scale / session.reduced_ranks, weights)

    def _see(self, layer: int, micro: int, index: torch.Tensor, weights: torch.Tensor, logits: Any, rows: Any) -> None:
        with _disable_current_modes(), torch.no_grad():
            number = self._routing.layers[layer].num_experts
            inside = (index >= 0) & (index < number) & (weights != 0)
            self._chosen[layer] += torch.bincount(index[inside].reshape(-1), minlength=self._chosen.shape[1])
            self._rows[layer] += len(index)
            self._lost[layer] += (~inside).sum()
            if logits is None or micro >= len(self._micros):
                return
            share, wide = logits.double().softmax(-1), logits.double()
            counts = torch.zeros(number, dtype=torch.float64, device=index.device)
            there = index < number
            counts.index_add_(0, index[there], rows.unsqueeze(-1).expand(index.shape)[there])
            z = (wide.logsumexp(-1).square() * rows).sum().reshape(1)
            p = (share * rows.unsqueeze(-1)).sum(0)
            self._micros[micro] += torch.cat([counts, p, rows.sum().reshape(1), z])

    def _compute(self, layer: int, first: int, rows: torch.Tensor, expert: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:  # a recomputation
            return
        with _disable_current_modes(), torch.no_grad():
            self._computed[layer] += torch.bincount(expert + first, minlength=self._computed.shape[1])

    def _leave(self, layer: int, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if not output.requires_grad or torch._C._current_graph_task_id() != -1:
            return
        kept = output.detach()

        def multiply(gradient: torch.Tensor) -> None:
            with _disable_current_modes(), torch.no_grad():
                each = kept.double() * gradient.double()
                self._outputs[layer] += torch.stack([each.sum(), each.abs().sum()])

        output.register_hook(multiply)

    def _token_line(
        self, chosen: torch.Tensor, computed: torch.Tensor, rows: torch.Tensor, lost: torch.Tensor, session: Session
    ) -> Line:
        """Compare the choices with what was computed, expert by expert."""
        dropped = int(lost.sum()) + int((chosen - computed).clamp_min(0).sum())
        total, each = int(chosen.sum() + lost.sum()), [layer.num_experts for layer in self._routing.layers]
        busiest = max(float(row.max() / row.sum().clamp_min(1) * n) for row, n in zip(computed, each, strict=True))
        idle = int(sum((row[:n] == 0).sum() for row, n in zip(computed, each, strict=True)))
        more = f", {idle} of {sum(each)} experts without any" if idle else ""
        if session.plan.dims.ep > 1:
            parts = computed.reshape(len(computed), session.plan.dims.ep, -1).sum(-1)
            most = float((parts / parts.mean(-1, keepdim=True).clamp_min(1)).max())
            more += f", the busiest rank {most:.2f} × the mean"
        return Line(
            name="tokens of experts",
            planned=f"{total} choices of {int(rows.sum())} tokens × layers, 0 dropped",
            found=f"{int(computed.sum())} computed, {dropped} dropped; the busiest expert has {busiest:.2f} × the "
            f"mean{more}",
            ok=dropped == 0 and torch.equal(chosen, computed),
        )

    def _loss_line(self, micros: torch.Tensor) -> Line:
        """Compare the losses that went into the gradient with those of all ranks' choices."""
        number, terms = self._routing.experts, self._routing.terms
        planned = [_loss(sums, number, terms.aux_loss, terms.z_loss) for sums in micros]
        used = [_loss(one.sums, number, terms.aux_loss, terms.z_loss) for one in self._routing.done]
        rows = [int(micros[:, 2 * number].sum()), int(sum(one.sums[2 * number] for one in self._routing.done))]
        means = [sum(values) / max(1, len(values)) for values in (planned, used)]
        texts = [f"{mean:.6g} over {row} tokens × layers" for mean, row in zip(means, rows, strict=True)]
        ok = rows[0] == rows[1] and abs(means[0] - means[1]) <= 1e-4 * abs(means[0])
        return Line(name="routers' losses", planned=texts[0], found=texts[1], ok=ok)

    def _gradient_line(self, session: Session, outputs: torch.Tensor, weights: torch.Tensor) -> Line:
        """Compare weights × gradients with outputs × their gradients, layer by layer."""
        wide = self._outputs.dtype == torch.float64 and next(session.module.parameters()).dtype == torch.float64
        tolerance = 1e-9 if wide else _TOLERANCE[session.plan.precision]
        errors = (outputs[:, 0] - weights).abs() / outputs[:, 1].clamp_min(1e-30)
        worst = int(errors.argmax())
        return Line(
            name="gradient of experts",
            planned=f"{float(outputs[worst, 0]):.6g} in {self._routing.names[worst]}",
            found=f"{float(weights[worst]):.6g} (weights × gradients; {float(errors[worst]):.1e} of its parts apart)",
            ok=bool((errors <= tolerance).all()),
        )


def _loss(sums: torch.Tensor, number: int, aux: float, z: float) -> float:
    rows = max(1.0, float(sums[2 * number]))
    balance = number * float((sums[:number] * sums[number : 2 * number]).sum()) / rows**2
    return aux * balance + z * float(sums[2 * number + 1]) / rows


def _own(module: nn.Module) -> list[Any]:
    return [p for p in module.parameters(recurse=False) if isinstance(p, DTensor)]


def _ways(parameter: Any, dim: int) -> int:
    """Return over how many ranks with the same experts FSDP2 shards ``dim``."""
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
    sizes = [parameter.device_mesh[name].size() for name, at in axes if name != "ep" and getattr(at, "dim", -1) == dim]
    return sizes[0] if sizes else 1


def _last(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of the last product, with its bias."""
    own = dict(module.named_parameters(recurse=False))
    last = [key for key, p in own.items() if p.ndim == 3][-1]
    return [own[key] for key in (last, f"{last}_bias") if key in own]


def _product(parameter: nn.Parameter, *, first: bool) -> float | None:
    """Return what this rank's part adds to weights × gradients; ``None`` without a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    value: Any = parameter
    if isinstance(gradient, DTensor):
        places = zip(gradient.placements, gradient.device_mesh.get_coordinate() or [], strict=False)
        if any(at for place, at in places if isinstance(place, Replicate)):
            return 0.0
        gradient, value = gradient.to_local(), value.to_local()
    elif not first:
        return 0.0
    return float((value.double() * gradient.double()).sum())


def _summed(parts: list[torch.Tensor], copies: int) -> list[torch.Tensor]:
    flat = torch.cat([part.reshape(-1) for part in parts])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flat)
        flat /= copies
    return [one.view_as(part) for one, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]
