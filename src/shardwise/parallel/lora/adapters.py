"""Add low-rank adapters to a model's linear layers with peft: frozen base, trained adapters.

Parameter names of the base do not change (`clean_name` hides what peft inserts); an adapter's two parameters
are ``X.lora_A.weight`` and ``X.lora_B.weight``, DoRA's is ``X.lora_magnitude_vector.weight``. The base is stored in the
dtype that the plan computes in, the adapters in the dtype that the base was built in, or in fp32 if that has 16 bits:
small updates would be rounded away.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError, ModelError, did_you_mean
from shardwise.import_object import silence_bitsandbytes
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name, dtype_name, find_blocks
from shardwise.parallel.lora.quantize import BLOCK, prepare_packing
from shardwise.parallel.meta_parameters import parameters_on_meta
from shardwise.parallel.precision import DTYPES
from shardwise.plan.lora_options import ROLES, AdapterOptions
from shardwise.plan.plan import Plan

_SAMPLED = 256  # values of a parameter that its digest samples
NAME = "default"  # peft's name of the adapter
_MARK = "_shardwise_adapters"
_INSIDE = "module"
_PARTS = {"attention": re.compile(r"attn|attention", re.I), "mlp": re.compile(r"mlp|ffn|feed_?forward|expert", re.I)}


@dataclass(frozen=True)
class Adapters:
    """Adapters added to a module: kind, options, adapted layers and quantized layers.

    ``base`` is a digest of the module's original weights, ``None`` if they are on the meta device. ``in_full`` are the
    parameters of ``modules_to_save`` by all their names, which are trained without an adapter.
    """

    kind: str
    options: AdapterOptions
    targets: tuple[str, ...]
    packed: tuple[str, ...]
    base: str | None = None
    in_full: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """Return the entries for a checkpoint's manifest."""
        more = {"in_full": list(self.in_full)} if self.in_full else {}
        options = self.options.model_dump(mode="json")
        return {"kind": self.kind, "options": options, "targets": list(self.targets), **more}

    def dequantized(self, spec: ModelSpec) -> int:
        """Count the weights of the model of ``spec``; two quantized ones share one element."""
        names = {f"{name}.weight" for name in self.packed}
        return spec.num_parameters + sum(p.num_elements for p in spec.parameters if p.name in names)


def adapters_of(module: nn.Module) -> Adapters | None:
    """Return the adapters that `add_adapters` added to ``module`` (or inside DDP).

    ``None`` without any.
    """
    found: Adapters | None = getattr(module, _MARK, None)
    return found


def add_adapters(module: nn.Module, plan: Plan, *, real: bool = True) -> Adapters:
    """Freeze ``module`` and add the plan's adapters to its linear layers, in place.

    Without ``real`` the adapters' weights go to the meta device; else they are drawn from torch's generator, A as peft
    does and B zero. The base may be on the meta device either way. With ``+qlora`` the linear layers of the blocks
    become bitsandbytes' ``Linear4bit`` whose weights are quantized later, by `quantise.pack`.

    Raises:
        ModelError: missing targets, or layers that cannot be adapted or quantized; lists all of them.
        ConfigError: peft or bitsandbytes is missing.
    """
    options, kind = plan.adapter or AdapterOptions(), plan.parsed.adapter
    if adapters_of(module) is not None:
        raise ModelError("the model has adapters already; rebuild it")
    if any(clean_name(name) != name or ".lora_" in name for name, _ in module.named_parameters()):
        raise ModelError(
            f"the model has peft's adapters already, and {plan.strategy} would add more; take +{kind} out of the "
            "strategy, which trains what is not frozen"
        )
    layers, targets = check_adapters(module, options, kind, plan.device)
    in_full = parameters_in_full(module, options.modules_to_save)
    wide: set[torch.dtype] = {layers[name].weight.dtype for name in targets}
    _run_every_layer(module)
    base = _digest(module)
    module.requires_grad_(False)
    with nullcontext() if real else parameters_on_meta():
        _inject(module, options, targets)
    _draw(module, real=real, dtypes=wide)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or clean_name(name) in in_full)
    packed: tuple[str, ...] = ()
    if kind == "qlora":
        packed = prepare_packing(module, layers, options, DTYPES[plan.precision])
    _narrow(module, plan)
    found = Adapters(kind, options, tuple(targets), packed, base, in_full)
    object.__setattr__(module, _MARK, found)
    return found


def check_adapters(
    module: nn.Module, options: AdapterOptions, kind: str, device: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the linear layers of the blocks, and the names to adapt. Nothing is changed.

    Raises:
        ModelError: missing targets, or layers that cannot be adapted or quantized; lists all of them.
    """
    layers = linear_layers(module)
    targets = chosen(layers, options.targets, module)
    problems = _too_narrow(layers, targets, options.rank)
    problems += _not_packable(layers, device) if kind == "qlora" else []
    problems += _not_in_full(module, options, layers if kind == "qlora" else (), targets)
    if problems:
        raise ModelError(*problems)
    return layers, targets


def parameters_in_full(module: nn.Module, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return all names of the parameters of the modules that ``wanted`` names, tied ones too."""
    owners = {name for name, _ in module.named_modules() if any(_is_named(clean_name(name), want) for want in wanted)}
    ids = {id(p) for name in owners for p in module.get_submodule(name).parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return tuple(clean_name(name) for name, parameter in named if id(parameter) in ids)


def _is_named(name: str, want: str) -> bool:
    return name == want or _ends(name, want)


def _not_in_full(
    module: nn.Module, options: AdapterOptions, packed: Collection[str], targets: Collection[str]
) -> list[str]:
    """List ``modules_to_save`` that do not exist, have no parameter, or are frozen under an adapter."""
    problems = []
    names = [name for name, _ in module.named_modules() if name]
    for want in options.modules_to_save:
        found = [name for name in names if _is_named(name, want)]
        inside = [n for n in targets if any(n == name or n.startswith(f"{name}.") for name in found)]
        quantized = [n for n in packed if any(n == name or n.startswith(f"{name}.") for name in found)]
        where = f"lora.modules_to_save: '{want}'"
        if not found:
            problems.append(f"{where} is no module of the model{did_you_mean(want, {*names, *map(_last, names)})}")
        elif not parameters_in_full(module, [want]):
            problems.append(f"{where} has no parameters to train; take it out")
        elif inside:
            problems.append(
                f"{where} is trained in full, and '{inside[0]}' has an adapter; take one out (lora.targets)"
            )
        elif quantized:
            problems.append(f"{where}: '{quantized[0]}' is packed in 4 bits and cannot be trained; take it out")
    return problems


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def linear_layers(module: nn.Module) -> dict[str, Any]:
    """Return the block layers with a weight matrix of their own, by name.

    Tied ones are left out.
    """
    found: dict[str, Any] = {}
    for block in find_blocks(module):
        for name, child in module.get_submodule(block).named_modules():
            if type(child) is nn.Linear or _is_conv1d(child):
                found[f"{block}.{name}" if name else block] = child
    return found


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether ``module`` is transformers' transposed linear layer, as in GPT-2."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def chosen(layers: Collection[str], wanted: Sequence[str], module: nn.Module) -> list[str]:
    """Select the layers that ``wanted`` names, by role or by the end of their name.

    Raises:
        ModelError: names that match nothing, each with the nearest one.
    """
    if not layers:
        raise ModelError(
            "the model has no torch.nn.Linear in repeated blocks, so there is nothing to adapt; train the full "
            "model, with a strategy without +lora and +qlora"
        )
    found: dict[str, None] = {}
    problems = []
    ends = sorted({name.rpartition(".")[2] for name in layers})
    others = {name for name, _ in module.named_modules()}
    for want in wanted:
        part = _PARTS.get(want)
        matches = [n for n in layers if part.search(n)] if part else [n for n in layers if n == want or _ends(n, want)]
        matches = list(layers) if want == "all-linear" else matches
        if matches:
            found.update(dict.fromkeys(matches))
            continue
        if part:
            problems.append(
                f"lora.targets: no linear layer is known as {want} by its name; name some of {', '.join(ends)}"
            )
            continue
        odd = next((name for name in sorted(others) if name == want or _ends(name, want)), None)
        if odd is not None:
            found_kind = type(module.get_submodule(odd))
            outside = " outside of the blocks" if found_kind is nn.Linear else ""
            problems.append(
                f"lora.targets: '{want}' is '{odd}', a {found_kind.__name__}{outside}; adapters are added to the "
                f"linear layers of the blocks: {', '.join(ends)}"
            )
            continue
        full = next(((n, p) for n, p in module.named_parameters() if n == want or _ends(n, want)), None)
        if full is not None:
            shape = " × ".join(map(str, full[1].shape))
            problems.append(
                f"lora.targets: '{want}' is the parameter '{full[0]}' of shape {shape}, and adapters are added to "
                f"linear layers: {', '.join(ends)}"
            )
            continue
        hint = did_you_mean(want, [*ends, *ROLES])
        problems.append(
            f"lora.targets: '{want}' is not a linear layer of the blocks{hint}; there are {', '.join(ends)}"
        )
    if problems:
        raise ModelError(*problems)
    return list(found)


def _ends(name: str, want: str) -> bool:
    return name.endswith(f".{want}")


def _digest(module: nn.Module) -> str | None:
    """Hash names, shapes, dtypes and a kilobyte of each parameter to sixteen hex digits.

    ``None`` for a base without values, on the meta device or of fake tensors.
    """
    digest = xxhash.xxh3_64()
    for name, parameter in module.named_parameters():
        if parameter.device.type == "meta" or isinstance(parameter, FakeTensor):
            return None
        flat = parameter.detach().reshape(-1)
        begin = max(0, flat.numel() - _SAMPLED) // 2
        digest.update(f"{clean_name(name)} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(flat[begin : begin + _SAMPLED].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _too_narrow(layers: dict[str, Any], targets: Iterable[str], rank: int) -> list[str]:
    """List layers that are too small for the adapter's rank."""
    narrow = {name: min(layers[name].weight.shape) for name in targets if min(layers[name].weight.shape) < rank}
    if not narrow:
        return []
    least = min(narrow, key=lambda name: narrow[name])
    return [
        f"lora.rank {rank} is more than '{least}' can use, whose weight is "
        f"{' × '.join(map(str, layers[least].weight.shape))} ({len(narrow)} such layers); set it to {narrow[least]} "
        "or less, or name other lora.targets"
    ]


def _not_packable(layers: dict[str, Any], device: str) -> list[str]:
    odd = [name for name, layer in layers.items() if type(layer) is not nn.Linear]
    if odd:
        return [
            f"+qlora packs torch.nn.Linear, and '{odd[0]}' is a {type(layers[odd[0]]).__name__} "
            f"({len(odd)} such layers); use +lora"
        ]
    ragged = [name for name, layer in layers.items() if layer.weight.shape[1] % BLOCK]
    if device == "cpu" and ragged:
        return [
            f"+qlora packs {BLOCK} values of a row together, and '{ragged[0]}' has rows of "
            f"{layers[ragged[0]].weight.shape[1]} ({len(ragged)} such layers), which bitsandbytes unpacks wrongly on "
            "CPUs; use +lora"
        ]
    return []


def _run_every_layer(module: nn.Module) -> None:
    """Disable PyTorch's encoder fast path, which bypasses its linear layers in evaluation."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # a condition of its fast path
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def _inject(module: nn.Module, options: AdapterOptions, targets: Sequence[str]) -> None:
    silence_bitsandbytes()  # peft imports bitsandbytes if it is installed
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("adapters need peft; install it with: pip install 'shardwise[hf]'") from None
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        use_rslora=options.rslora,
        use_dora=options.dora,
        target_modules=[f"{_INSIDE}.{name}" for name in targets],
        fan_in_fan_out=any(_is_conv1d(module.get_submodule(name)) for name in targets),
        init_lora_weights=True,
    )
    holder = nn.Module()  # without a config: by its model_type peft would turn names of MLPs into stacks of experts
    holder.add_module(_INSIDE, module)
    inject_adapter_in_model(config, holder, NAME, low_cpu_mem_usage=True)


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return peft's layers in ``module``, by the name of the layer that each one wraps."""
    from peft.tuners.lora import LoraLayer

    return {clean_name(name): child for name, child in module.named_modules() if isinstance(child, LoraLayer)}


def _draw(module: nn.Module, *, real: bool, dtypes: set[torch.dtype]) -> None:
    """Initialize the adapters from the meta device in the base's first dtype, at least fp32."""
    dtype = torch.float64 if dtypes == {torch.float64} else torch.float32
    for layer in adapted_layers(module).values():
        parts = [layer.lora_A, layer.lora_B, layer.lora_magnitude_vector]
        for part in parts:
            part.to(dtype)
            part.requires_grad_(True)
            if real:
                part.to_empty(device="cpu")
        if real:
            layer.reset_lora_parameters(NAME, True)


def _narrow(module: nn.Module, plan: Plan) -> None:
    """Cast the frozen base to the compute dtype; adapters and buffers stay unchanged."""
    dtype = DTYPES[plan.precision]
    if plan.precision == "fp32":
        return
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def set_magnitudes(unit: nn.Module) -> None:
    """Set DoRA's magnitudes of ``unit`` from its base: the norm of each output's weights.

    For quantized weights the dequantized values count. Layers that are sharded already are left unchanged.
    """
    for layer in adapted_layers(unit).values():
        if NAME not in layer.lora_magnitude_vector:
            continue
        base, vector = layer.get_base_layer(), layer.lora_magnitude_vector[NAME].weight
        if isinstance(vector, DTensor):
            continue
        weight = base.weight.detach()
        if getattr(base, "quant_state", None) is not None:
            from shardwise.parallel.lora.quantize import dequantized

            weight = dequantized(base)
        with torch.no_grad():
            vector.copy_(torch.linalg.norm(weight.to(vector.dtype), dim=0 if layer.fan_in_fan_out else 1))


def quantized_spec(spec: ModelSpec, packed: Collection[str]) -> ModelSpec:
    """Return ``spec`` with ``packed`` layers in stored form: two values per byte, one column."""
    names = {f"{name}.weight" for name in packed}
    return spec.model_copy(
        update={
            "parameters": tuple(
                p.model_copy(
                    update={"shape": ((p.num_elements + 1) // 2, 1), "itemsize": 1, "dtype": dtype_name(torch.uint8)}
                )
                if p.name in names
                else p
                for p in spec.parameters
            )
        }
    )
