"""fp8 products: torchao's ``Float8Linear`` in the place of the blocks' linear layers.

Weights, gradients and state stay as without fp8. Each product casts its two operands to fp8 and multiplies them in fp8;
for the backward ``Float8Linear`` keeps its input and its weight as they came in, and casts them again
(``ctx.save_for_backward(input_hp, weight_hp_t)``, torchao 0.18, float8_linear.py:45). Sharded weights of the recipe
``tensorwise`` are gathered in fp8: each rank casts its shard with the scale of the whole weight, which one all-reduce
after each optimizer step agrees on.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ModelError, PlanError
from shardwise.model.expert_layers import expert_layers
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name
from shardwise.plan.fp8_recipes import CAPABILITY, MULTIPLE, kept_wide, no_products
from shardwise.plan.plan import Plan, gathers_fp8

_MARK = "_shardwise_fp8"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Converted:
    """What is to be converted: names of layers, and of those that are not the reason."""

    layers: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def reasons(self) -> str:
        """Count the kept layers by their reason."""
        return ", ".join(f"{number} {reason}" for reason, number in Counter(self.kept.values()).items())


def check_fp8(module: nn.Module, spec: ModelSpec, plan: Plan, device: torch.device) -> Converted | None:
    """Decide which layers of ``module`` are converted, and mark them for `convert_unit`; ``None`` without fp8.

    Raises:
        PlanError: this device has no fp8 products, or torchao is missing.
        ModelError: the model has no layer to convert, or experts.
    """
    if plan.fp8 == "none":
        return None
    if problem := device_problem(plan, device):
        raise PlanError(problem)
    if expert_layers(module):
        raise ModelError(
            f"fp8 = '{plan.fp8}': the model has experts, whose grouped products torchao's Float8Linear does not have; "
            "leave fp8 out"
        )
    found = decided(module, spec)
    if not found.layers:
        kept = found.reasons()
        raise ModelError(
            f"fp8 = '{plan.fp8}' converts no layer: the model has no torch.nn.Linear in repeated blocks that it can "
            f"convert{f' ({kept})' if kept else ''}; leave fp8 out"
        )
    if importlib.util.find_spec("torchao") is None:
        raise PlanError(f"fp8 = '{plan.fp8}' needs torchao; install it with: pip install 'shardwise[fp8]'")
    for name, part in module.named_modules():
        if clean_name(name) in found.layers:
            setattr(part, _MARK, True)
    return found


def device_problem(plan: Plan, device: torch.device) -> str:
    """Return why ``device`` does not run the plan's fp8 products; empty if it does."""
    if plan.fp8_emulate:
        return ""
    if device.type != "cuda":
        return no_products(plan.fp8, "this is a CPU")
    if torch.version.hip is None and (has := torch.cuda.get_device_capability(device)) < CAPABILITY:
        return no_products(plan.fp8, f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}")
    return ""


def decided(module: nn.Module, spec: ModelSpec) -> Converted:
    """Return the linear layers of a model by whether they are converted."""
    found, uses = Converted(), Counter(id(p) for p in _each_parameter(module))
    for name, part in module.named_modules():
        if not isinstance(part, nn.Linear):
            continue
        name = clean_name(name)
        reason = kept_wide(part.weight.shape)
        if not any(name.startswith(f"{block}.") for block in spec.blocks):
            reason = "as a block itself" if name in spec.blocks else "outside of the blocks"
        elif type(part) is not nn.Linear:
            reason = f"of type {type(part).__name__}"
        elif uses[id(part.weight)] > 1:
            reason = "tied to another"
        elif any(getattr(part, hooks) for hooks in _HOOKS):
            reason = "with hooks"
        if reason:
            found.kept[name] = reason
        else:
            found.layers.append(name)
    return found


def _each_parameter(module: nn.Module) -> Iterator[nn.Parameter]:
    for _, part in module.named_modules(remove_duplicate=False):  # a layer in two places counts twice
        yield from (p for p in part._parameters.values() if p is not None)


def convert_unit(unit: nn.Module, plan: Plan) -> None:
    """Replace the marked layers of one unit, whose weights have memory and are not sharded yet."""
    if plan.fp8 == "none":
        return
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(unit, config=config_of(plan), module_filter_fn=lambda part, _: hasattr(part, _MARK))
    for layer in float8_layers(unit).values():
        layer.__class__ = _of_any_rows()
    if plan.device == "cpu" and not plan.parsed.shards_parameters:
        for layer in float8_layers(unit).values():
            layer.register_forward_pre_hook(_as_under_autocast)


@cache
def _of_any_rows() -> Any:
    """Return torchao's ``Float8Linear`` for any number of rows, such as those of an expert in a list of experts.

    It has no scale for an empty tensor, and ``torch._scaled_mm`` takes a multiple of 16 rows where it sums over them.
    Rows of zeros are added, and taken off the result: they add nothing to a scale or a gradient.
    """
    from torchao.float8.float8_linear import Float8Linear as Torchaos

    class Float8Linear(Torchaos):  # type: ignore[misc]
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            rows = input.numel() // input.shape[-1]
            missing = MULTIPLE if not rows else 0 if self.config.pad_inner_dim else -rows % MULTIPLE
            if not missing:
                return super().forward(input)
            flat = nn.functional.pad(input.reshape(rows, input.shape[-1]), (0, 0, 0, missing))
            return super().forward(flat)[:rows].reshape(*input.shape[:-1], self.out_features)

    return Float8Linear


def config_of(plan: Plan) -> Any:
    """Return torchao's configuration of a plan's recipe.

    The weight gradient contracts over tokens, of which ``torch._scaled_mm`` takes a multiple of 16: others are padded,
    which copies operands.
    """
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    return replace(
        Float8LinearConfig.from_recipe_name(plan.fp8),
        enable_fsdp_float8_all_gather=gathers_fp8(plan),
        emulate=plan.fp8_emulate,
        pad_inner_dim=plan.seq_len is None or plan.seq_len % MULTIPLE != 0,
    )


def _as_under_autocast(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast a layer's input as ``Float8Linear`` does under a GPU's autocast; it does not ask for a CPU's."""
    if not torch.is_autocast_enabled("cpu"):
        return inputs
    return (inputs[0].to(torch.get_autocast_dtype("cpu")), *inputs[1:])


def float8_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the converted layers by name."""
    return {clean_name(name): m for name, m in module.named_modules() if type(m).__name__ == "Float8Linear"}


def agree_on_scales(module: nn.Module) -> None:
    """Compute the scales in which sharded weights are gathered, where they are gathered in fp8.

    For whenever weights have changed: a scale of earlier weights would clip larger ones. Collective.
    """
    if gathered_scales(module):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(module)


def keep_scales(optimizer: Optimizer, module: nn.Module, plan: Plan) -> None:
    """Let each step of the optimizer end with the scales of the new weights."""
    if gathers_fp8(plan):
        optimizer.register_step_post_hook(lambda *_: agree_on_scales(module))


def forget_scales(module: nn.Module) -> None:
    """Let the next gather of each weight compute its scale, for weights that changed without all ranks being here."""
    for layer in float8_layers(module).values():
        weight: Any = layer.weight
        if isinstance(weight, DTensor) and hasattr(weight._local_tensor, "_precomputed_scale"):
            weight._local_tensor._precomputed_scale = None


def gathered_scales(module: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return this rank's part of each weight that is gathered in fp8, and its scale, by layer."""
    found = {}
    for name, layer in float8_layers(module).items():
        weight: Any = layer.weight
        shard: Any = weight._local_tensor if isinstance(weight, DTensor) else weight
        if hasattr(shard, "_precomputed_scale"):
            found[name] = (shard._tensor.detach(), shard._precomputed_scale)
    return found
