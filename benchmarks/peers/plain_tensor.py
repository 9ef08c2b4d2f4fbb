"""Tensor parallel for the Llama of transformers, by hand: PyTorch's own styles, as its tutorial applies them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise.plan.plan import Plan


def plain_tensor(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Cut ``model`` (or a stage of it, whose parts have the same names) over ``mesh``, in place.

    Sequence parallel and loss parallel as the plan has them. Tied weights are tied again: the styles make a new
    parameter for each name.
    """
    llama: Any = model.model
    tied = getattr(model, "lm_head", None) is not None and getattr(llama, "embed_tokens", None) is not None
    tied = tied and model.lm_head.weight is llama.embed_tokens.weight  # type: ignore[union-attr]
    between = Shard(1) if plan.sequence_parallel else Replicate()
    outside: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "model.norm": _norm(plan),
        "lm_head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if plan.loss_parallel else Replicate(),
            use_local_output=not plan.loss_parallel,
        ),
    }
    here = {name: style for name, style in outside.items() if _has(model, name)}
    parallelize_module(model, mesh, here)
    if tied:
        model.lm_head.weight = llama.embed_tokens.weight  # type: ignore[union-attr]
    for layer in llama.layers:
        parallelize_module(layer, mesh, _layer(plan, between))


def _layer(plan: Plan, between: Any) -> dict[str, ParallelStyle]:
    """The styles of one decoder layer."""
    styles: dict[str, ParallelStyle] = {
        "input_layernorm": _norm(plan),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "post_attention_layernorm": _norm(plan),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    return styles


def _norm(plan: Plan) -> ParallelStyle:
    """Sequence parallel, or whole tokens on every rank with weights that are DTensors, too."""
    return SequenceParallel() if plan.sequence_parallel else _Full()


class _Full(ParallelStyle):
    """Replicated weights as DTensors, computed on plain tensors: what `torch` has no style for."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from torch.distributed.tensor import DTensor, distribute_module

        def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, (Replicate(),), run_check=False) for x in inputs)

        def leave(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def _has(model: nn.Module, name: str) -> bool:
    part: Any = model
    for word in name.split("."):
        part = getattr(part, word, None)
    return part is not None
