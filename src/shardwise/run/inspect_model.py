"""Inspect a config's model for the planner: structure, saved activations, optimizer state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwise.errors import ConfigError, ModelError, ShardwiseError
from shardwise.model.facts import ModelSpec
from shardwise.model.load_model import load_profile
from shardwise.model.packed_mask import with_packed_mask
from shardwise.model.profile import ModelProfile
from shardwise.model.read import read_model
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import DeviceType, Plan, Precision, Recompute
from shardwise.plan.workload import Workload
from shardwise.train.config import Config, OptimizerTable
from shardwise.train.tasks.registry import TaskData, example_inputs_of, num_outputs, row_task, samples_of

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class ModelInspection:
    """Model on the meta device, with its plan's adapters if any, and its inspected facts.

    ``profile`` is of the model without adapters, which the planner adds itself.
    """

    module: nn.Module
    spec: ModelSpec
    profile: ModelProfile | None
    workload: Workload


def look(config: Config, draft: Plan, kind: str, data: TaskData) -> ModelInspection:
    """Build the model of ``config`` without weights, add adapters of ``kind``, and inspect it.

    Raises:
        UserError: the model cannot be built, or not with these adapters.
    """
    from shardwise.parallel.decide import check_model
    from shardwise.parallel.lora.adapters import check_adapters, linear_layers, quantized_spec
    from shardwise.parallel.materialize import build
    from shardwise.train.model import model_factory

    factory = model_factory(config, data.vocab_size)
    with users_code(_key("model", config.model.factory, config.model.config)):
        base = module = build(factory, config.train.seed, real=False)
        _check_added_rows(config, base, draft.adapter or AdapterOptions(), kind, data)
        if kind != "none":
            options = draft.adapter or AdapterOptions()
            check_adapters(base, options, kind, draft.device)
            factory = adapted_factory(factory, draft)
            module = build(factory, config.train.seed, real=False)
    spec = read_model(module)
    if kind == "qlora":
        spec = quantized_spec(spec, linear_layers(base))
    check_model(spec, draft)
    workload = workload_for(module, config.optimizer, draft.device)
    activations = _activations(config, draft, spec, factory, data)
    own = row_task(config) is not None
    profile = traced_profile(
        base,
        None if own else config.data.seq_len,
        num_outputs(data),
        precision=draft.precision,
        device=draft.device,
        inputs=example_inputs_of(data, config, 1) if own else None,
    )
    if profile is not None and config.packing(data.kind) == "isolated":
        profile = with_packed_mask(profile, attention_of(module))
    activations["average"] = config.train.ema_decay > 0
    if own and profile is not None:  # parts work on other lengths; no chunks of logits either
        profile = replace(profile, seq_len=None, vocab_size=None)
    return ModelInspection(module, spec, profile, workload.model_copy(update=activations))


def attention_of(module: nn.Module) -> str:
    """Return the attention that a transformers model runs; empty for other models, whose masks are not known."""
    return str(getattr(getattr(module, "config", None), "_attn_implementation", None) or "")


def _check_added_rows(config: Config, base: nn.Module, options: AdapterOptions, kind: str, data: TaskData) -> None:
    """Check that the rows of added tokens are trained; warn of those that padding of the embedding has a row for.

    Raises:
        ModelError: they would stay the mean of the others.
    """
    from shardwise.checkpoint.added_rows import embedding_names
    from shardwise.parallel.lora.adapters import parameters_in_full
    from shardwise.train.model import added_tokens

    added = added_tokens(config, data.vocab_size)
    trained = {name for name, p in base.named_parameters(remove_duplicate=False) if p.requires_grad}
    if kind != "none":
        trained = {*parameters_in_full(base, options.modules_to_save)}
    frozen = [name for name in embedding_names(base) if name not in trained]
    number = _in_padding(config, data) if added is None and frozen and kind != "none" else 0
    if not frozen or (added is None and not number):
        return
    if added is not None and kind == "none":
        raise ModelError(
            f"data.tokenizer '{config.data.tokenizer}' has {added.count} tokens that are new to model.config, and "
            f"model.freeze {config.model.freeze} freezes their rows in {', '.join(frozen)}; take that out of it"
        )
    first = {id(base.get_parameter(name)): name for name in reversed(embedding_names(base))}  # one name of tied ones
    modules = [name.rpartition(".")[0].rpartition(".")[2] for name in reversed(first.values())]
    given = ", ".join(f'"{name}"' for name in dict.fromkeys([*options.modules_to_save, *modules]))
    fix = f"set lora.modules_to_save = [{given}], which trains these modules in full"
    where = f"data.tokenizer '{config.data.tokenizer}' has"
    if added is None:
        logging.getLogger("shardwise").warning(
            f"{where} {number} ids more than the tokenizer of model.config: where they occur, +{kind} freezes rows of "
            f"{', '.join(frozen)} that were never trained; {fix}"
        )
        return
    raise ModelError(
        f"{where} {added.count} tokens that are new to model.config, and +{kind} freezes their rows in "
        f"{', '.join(frozen)}; {fix}, or name a strategy without +{kind}"
    )


def _in_padding(config: Config, data: TaskData) -> int:
    """Count the ids that the tokenizer in the model's folder has not, but a padded embedding has rows for."""
    from shardwise.train.data.tokenizer import load_tokenizer

    folder = Path(str(config.model.config))
    if config.model.weights is None or not (folder / "tokenizer.json").is_file():
        return 0
    try:
        return max(0, data.vocab_size - load_tokenizer(str(folder)).vocab_size)
    except ShardwiseError:  # one that is not used need not be readable
        return 0


def adapted_factory(factory: Callable[[], nn.Module], plan: Plan) -> Callable[[], nn.Module]:
    """Wrap ``factory`` to add the plan's adapters, on the meta device and unquantized.

    Under fake tensors the model becomes fake: peft cannot move fake layers, so adapters are added before.
    """
    import torch
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from shardwise.parallel.lora.adapters import add_adapters
    from shardwise.parallel.materialize import build, materialize

    dequantized = Plan(strategy="ddp+lora", adapter=plan.adapter, precision=plan.precision)

    def adapted() -> nn.Module:
        with unset_fake_temporarily():
            module = build(factory, 0, real=False)
            add_adapters(module, dequantized, real=False)
        if detect_fake_mode() is not None:
            materialize(module, torch.device("cpu"), broadcast=False)
        return module

    return adapted


@contextmanager
def users_code(where: str) -> Iterator[None]:
    """Convert errors of the user's function to messages with the place; pass on out of memory.

    Raises:
        ConfigError: anything else was raised inside.
    """
    from shardwise.import_object import raised_text

    try:
        yield
    except (ShardwiseError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{where} raised {raised_text(error)}; repair it, or change its arguments") from error


def _key(table: str, factory: str | None, other: str | None) -> str:
    if factory is not None:
        return f"{table}.factory '{factory}'"
    return f"model.config '{other}'" if table == "model" else f"optimizer.name '{other}'"


def _activations(
    config: Config, plan: Plan, spec: ModelSpec, factory: Callable[[], nn.Module], data: TaskData
) -> dict[str, dict[str, int | None] | int | None]:
    """Measure the saved bytes of a sample under the plan's recompute mode, and its logits.

    ``full`` contains the inputs of the blocks plus one block that is being recomputed. What ``selective`` saves is not
    visible to autograd's hooks, so it stays unknown.
    """
    import numpy as np
    import torch

    from shardwise.parallel.activation_checkpointing import apply_recompute
    from shardwise.parallel.precision import DTYPES
    from shardwise.train.model import forward_bytes
    from shardwise.train.tasks.own_loss import loss_of

    if row_task(config) is None:  # labels that count, for a loss that looks at them
        ids = torch.zeros(1, config.data.seq_len, dtype=torch.int64)
        sample: tuple[Any, torch.Tensor] = (ids, ids)
    else:
        sample = samples_of(data, config).batch(np.zeros(1, np.int64))
    loss = loss_of(config)

    def measure(mode: Recompute) -> tuple[int, int] | None:
        return forward_bytes(
            factory,
            loss,
            sample,
            num_outputs=num_outputs(data),
            any_outputs=config.model.loss is not None,
            dtype=DTYPES[plan.precision],
            prepare=lambda model: apply_recompute(model, mode, spec.blocks, layers=plan.recompute_layers),
        )

    full = measure("none")
    if full is None:
        return {}
    saved: int | None = full[0]
    if plan.recompute == "selective":
        saved = None
    elif plan.recompute == "full" and (kept := measure("full")) is not None:
        alone = plan.recomputed(len(spec.blocks)) == len(spec.blocks)  # else the others have freed more by then
        saved = kept[0] + ((full[0] - kept[0]) // len(spec.blocks) if alone else 0)
    return {"activation_bytes": {plan.recompute: saved}, "logits_bytes": full[1] or None}


def workload_for(module: nn.Module, table: OptimizerTable, device: DeviceType) -> Workload:
    """Describe the optimizer state of a config for ``module``; batch and length are left open.

    Raises:
        ConfigError: the optimizer's factory raised.
    """
    from shardwise.parallel.apply import parameter_names
    from shardwise.train.optimizer import build_optimizer, workload_of

    with users_code(_key("optimizer", table.factory, table.name)):
        optimizer = build_optimizer(module.parameters(), table, module)
        workload = workload_of(optimizer, parameter_names(module), device=device)
    known = workload.optimizer if workload.custom_state is not None else None
    return workload.model_copy(update={"optimizer": table.name if table.factory is None else known})


def described(config: Config, traced: ModelProfile, *, compiled: bool) -> ModelProfile:
    """Return the profile by which ``plan`` prices the config's model; ``traced`` where that is no other one.

    Of a known configuration that is a description without a module, and its times are those that were compared with
    measured ones (`benchmarks/choice`). A traced profile of the same model has other operations: for the example, its
    times on a CPU were 0.99 to 1.10 of these, as the measured rates were.
    """
    model = config.model
    if model.config is None or model.trained_task != "causal-lm" or model.loss is not None:
        return traced
    try:
        found = load_profile(model.config, seq_len=config.data.seq_len, compiled=compiled)
    except ShardwiseError:  # train can build what plan cannot describe
        return traced
    if (found.num_parameters, found.num_trainable) != (traced.num_parameters, traced.num_trainable):
        return traced  # added tokens, frozen weights
    return with_packed_mask(found) if config.data.pack == "isolated" else found


def traced_profile(
    module: nn.Module,
    seq_len: int | None,
    vocab_size: int,
    *,
    precision: Precision,
    device: DeviceType,
    inputs: Any = None,
) -> ModelProfile | None:
    """Return the traced profile; ``None`` for a module that does not run on fake tensors.

    ``inputs`` are those of one sample, where they are not ids of ``seq_len`` tokens.
    """
    from shardwise.model.trace import trace_module

    try:
        width: Literal["fp32", "bf16"] = "fp32" if precision == "fp32" else "bf16"
        return trace_module(
            module,
            seq_len=seq_len,
            inputs=inputs,
            vocab_size=vocab_size,
            precision=width,
            device=device,
            under_autocast=True,
        )
    except ModelError:
        return None
