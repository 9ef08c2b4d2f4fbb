"""Write a plan and a config as one file of plain PyTorch: same model, same order of samples, same losses."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import PlanError
from shardwise.interop.pytorch.script_data import ScriptData
from shardwise.model.read import read_model
from shardwise.parallel.materialize import build
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.plan import Plan
from shardwise.train.config import Config, OptimizerTable
from shardwise.train.data.corpus import Corpus
from shardwise.train.data.samples import samples_for
from shardwise.train.model import added_tokens, model_factory
from shardwise.train.resume import steps_in_all
from shardwise.units import counted

if TYPE_CHECKING:
    from jinja2 import Environment

_WIDTH = 120


def training_script(plan: Plan, config: Config, corpus: Corpus, data: ScriptData, name: str) -> str:
    """Return the text of the script; ``name`` is that of its file.

    Raises:
        PlanError: the model has no place for what the plan does to blocks, or another vocabulary than its weights.
    """
    factory = model_factory(config, corpus.vocab_size)
    if added_tokens(config, corpus.vocab_size) is not None:
        raise PlanError(
            f"data.tokenizer '{config.data.tokenizer}' has tokens without a row in the model's embedding, which the "
            "script would have to add; resize the model first"
        )
    module = build(factory, config.train.seed, real=False)
    parts = {
        **_model_parts(plan, config, module),
        **_batch_parts(plan, config, corpus, data),
        **_optimizer_parts(plan, config),
        **_parallel_parts(plan, config),
        "command": f"torchrun --nproc-per-node {plan.dims.world_size} {shlex.quote(name)}",
        "data": data,
        "skip": set(data.skip),
        "stdlib": config.data.path == "python:stdlib" and data.kind != "samples",
        "py": py,
        "quoted": quoted,
    }
    text = _environment().get_template("train.py.j2").render(**parts, imports=_imports(parts))
    return _tidy(text)


def py(value: Any) -> str:
    """Return a Python literal, with double quotes where they need no escape."""
    if isinstance(value, str):
        text = repr(value)
        return text if '"' in text or text[0] == '"' else f'"{text[1:-1]}"'
    if isinstance(value, list | tuple):
        inner = ", ".join(map(py, value))
        return f"({inner}{',' if len(value) == 1 else ''})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, set):
        return "{" + ", ".join(map(py, sorted(value))) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{py(key)}: {py(one)}" for key, one in value.items()) + "}"
    return f'float("{value}")' if isinstance(value, float) and not isfinite(value) else repr(value)


def quoted(text: str) -> str:
    """Return ``text`` as a docstring may have it: no quote or line break in it ends the docstring."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _imports(parts: dict[str, Any]) -> str:
    """Return the lines of imports: the standard library's, the packages', the user's."""
    data: ScriptData = parts["data"]
    reads = data.kind != "samples"
    standard = {
        "import json": True,
        "import math": parts["cosine"] or reads,
        "import os": True,
        "import sysconfig": parts["stdlib"],
        "import time": True,
        "from contextlib import nullcontext": parts["accumulates_ddp"],
        "from fnmatch import fnmatch": parts["freeze_lines"],
        "from functools import cache": parts["shuffle"],
        "from hashlib import blake2b": reads and parts["heldout_fraction"],
        "from pathlib import Path": True,
    }
    precision = "MixedPrecisionPolicy, " if parts["mixed"] else ""
    wrapper = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    packages = {
        "import numpy as np": True,
        "import torch": True,
        "import torch.distributed as dist": True,
        "import torch.distributed.checkpoint as dcp": parts["saves"],
        "from tokenizers import Tokenizer": data.tokenizer,
        f"from {wrapper} import apply_activation_checkpointing": parts["recompute"],
        "from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict": parts["saves"],
        "from torch.distributed.device_mesh import init_device_mesh": parts["sharded"],
        f"from torch.distributed.fsdp import {precision}fully_shard": parts["sharded"],
        "from torch.distributed.optim import ZeroRedundancyOptimizer": parts["zero1"],
        "from torch.nn.functional import cross_entropy": True,
        "from torch.nn.parallel import DistributedDataParallel": parts["ddp"],
        "from transformers import AutoConfig, AutoModelForCausalLM": not parts["factory"],
    }
    blocks = [[line for line, used in lines.items() if used] for lines in (standard, packages)]
    return "\n\n".join("\n".join(lines) for lines in [*blocks, parts["own_imports"]] if lines)


def _model_parts(plan: Plan, config: Config, module: Any) -> dict[str, Any]:
    table, blocks = config.model, read_model(module).blocks
    frozen = [name for name, _ in module.named_parameters() if any(fnmatch.fnmatch(name, p) for p in table.freeze)]
    needs_blocks = plan.parsed.shards_parameters or plan.recompute == "full" or plan.compile
    if needs_blocks and not blocks and not plan.parsed.shards_parameters:
        raise PlanError("the model has no repeated blocks, and the plan's recompute or compile is for them")
    imports, factory = ([], "") if table.factory is None else _import(table.factory)
    more, _ = ([], "") if config.optimizer.factory is None else _import(config.optimizer.factory)
    freeze = [f"for name, parameter in model.named_parameters():  # {counted(len(frozen), 'parameter')}"]
    patterns = " or ".join(f"fnmatch(name, {py(pattern)})" for pattern in table.freeze)
    freeze += [f"    if {patterns}:", "        parameter.requires_grad_(False)"]
    return {
        "model_name": table.config or table.factory,
        "data_name": config.data.path or "a mixture of sources",
        "model_config": table.config,
        "weights": table.weights,
        "factory": factory,
        "factory_arguments": ", ".join(f"{key}={py(value)}" for key, value in table.kwargs.items()),
        "has_logits": table.factory is None,
        "own_imports": [*imports, *more],
        "freeze_lines": freeze if frozen else [],
        "blocks": _blocks(blocks),
    }


def _batch_parts(plan: Plan, config: Config, corpus: Corpus, data: ScriptData) -> dict[str, Any]:
    train, samples = config.train, samples_for(corpus, config)
    steps = steps_in_all(config, len(samples), plan.global_batch or 1)
    return {
        "seed": train.seed,
        "output": f"{train.output.rstrip('/')}-pytorch",
        "seq_len": config.data.seq_len,
        "shuffle": config.data.shuffle,
        "heldout_fraction": config.data.heldout_fraction if corpus.heldout is not None else 0,
        "batch_text": plan.batch_equation().partition("  (")[0].replace("×", "*"),
        "micro_batch": plan.micro_batch,
        "grad_accum": plan.grad_accum,
        "world_size": plan.dims.world_size,
        "epochs": train.epochs,
        "steps": steps,
        "log_every": train.log_every,
        "evaluates": corpus.heldout is not None,
        "eval_every": train.eval_every,
        "eval_samples": train.eval_samples or None,
        "saves": plan.parsed.base != "zero1",
        "save_every": config.checkpoint.every,
        "resumes": config.checkpoint.resume,
        "label_smoothing": train.label_smoothing,
        "z_loss": train.z_loss,
    }


def _optimizer_parts(plan: Plan, config: Config) -> dict[str, Any]:
    table = config.optimizer
    steps = config.train.steps
    return {
        "lr": table.lr,
        "warmup_steps": table.warmup_steps,
        "schedule": table.schedule,
        "cosine": table.schedule == "cosine",
        "min_lr_ratio": None if table.schedule == "constant" else table.min_lr_ratio,
        "decay_fraction": table.decay_fraction,
        "decay_steps": None if table.schedule != "wsd" else f"round({table.decay_fraction} * STEPS)",
        "clip_norm": table.clip_norm,
        "optimizer": _optimizer(table, zero1=plan.parsed.base == "zero1" and plan.dims.world_size > 1),
        "has_steps": steps is not None,
    }


def _optimizer(table: OptimizerTable, *, zero1: bool) -> str:
    if table.factory is not None:
        _, made = _import(table.factory)
        options = {"lr": "LR", **{key: py(value) for key, value in table.kwargs.items()}}
    else:
        spec = OPTIMIZERS[table.name]
        made = spec.factory.replace(":", ".")
        chosen = {key: getattr(table, key, default) for key, default in spec.hyperparameters.items()} | table.kwargs
        chosen = {key: tuple(value) if key == "betas" else value for key, value in chosen.items()}
        options = {"lr": "LR", **{key: py(value) for key, value in {**chosen, **spec.arguments}.items()}}
    written = ", ".join(f"{key}={value}" for key, value in options.items())
    name, arguments = (
        ("ZeroRedundancyOptimizer", f"parameters, {made}, {written}") if zero1 else (made, f"parameters, {written}")
    )
    line = f"{name}({arguments})"
    return line if len(line) + len("    optimizer = ") <= _WIDTH else f"{name}(\n        {arguments}\n    )"


def _parallel_parts(plan: Plan, config: Config) -> dict[str, Any]:
    strategy, ranks = plan.parsed, plan.dims.world_size
    sharded, ddp = strategy.shards_parameters, not strategy.shards_parameters and ranks > 1
    hsdp = plan.dims.dp_replicate > 1 and sharded
    shape = (plan.dims.dp_replicate, plan.dims.dp_shard) if hsdp else (ranks,)
    options: dict[str, Any] = {"gradient_as_bucket_view": True}
    options |= {key: True for key in ("find_unused_parameters", "static_graph") if getattr(plan, key)}
    options |= {} if plan.bucket_cap_mb is None else {"bucket_cap_mb": plan.bucket_cap_mb}
    mixed = plan.precision == "bf16"
    texts = {"zero1": "DDP, and optimizer states on one rank each", "zero2": "FSDP2 without resharding after forward"}
    texts |= {"fsdp": "FSDP2", "hsdp": f"FSDP2 with {plan.dims.dp_replicate} replicas", "ddp": "DDP"}
    return {
        "strategy_text": "one process" if not sharded and not ddp else texts[strategy.base],
        "precision_text": ", computing in bf16" if mixed else "",
        "ranks_text": counted(ranks, "rank"),
        "parallel_text": "shard each block, then the rest" if sharded else "wrap it in DDP" if ddp else "move it",
        "device": plan.device,
        "sharded": sharded,
        "ddp": ddp,
        "hsdp": hsdp,
        "zero1": strategy.base == "zero1" and ranks > 1,
        "zero2": strategy.base == "zero2",
        "accumulates_ddp": ddp and plan.grad_accum > 1,
        "mixed": mixed and sharded,
        "autocast": mixed and not sharded,
        "recompute": plan.recompute == "full",
        "recompute_layers": plan.recompute_layers,
        "compile": plan.compile,
        "mesh_shape": py(shape),
        "mesh_names": py(("replicate", "shard") if hsdp else ("shard",)),
        "ddp_options": ", ".join(f"{key}={value}" for key, value in options.items()),
        "threads": config.parallel.threads,
    }


def _import(path: str) -> tuple[list[str], str]:
    place, _, name = path.rpartition(":")
    if place == "torch.optim":
        return [], f"torch.optim.{name}"
    if not place.endswith(".py"):
        return [f"from {place} import {name}"], name
    if not Path(place).stem.isidentifier():
        raise PlanError(f"'{path}': the script cannot import a file of this name; rename it to letters, digits and _")
    folder = str(Path(place).parent)
    lines = ["import sys", f"sys.path.insert(0, {py(folder)})", f"from {Path(place).stem} import {name}  # noqa: E402"]
    return lines, name


def _blocks(names: tuple[str, ...]) -> str:
    """Return an expression for the blocks: one list of the model, or each by its name."""
    found = {tuple(name.rpartition(".")[::2]) for name in names}
    parents = {parent for parent, _ in found}
    numbers = sorted(int(child) for _, child in found if child.isdigit())
    if len(parents) == 1 and numbers == list(range(len(names))):
        return f"model.{parents.pop()}"
    return f"[model.get_submodule(name) for name in {py(list(names))}]"


def _tidy(text: str) -> str:
    """Bring blank lines into the order that formatters give them."""
    lines = [line.rstrip() for line in text.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line.startswith("import "))
    found = lines[:begin]
    for line in lines[begin:]:
        blank = 0
        while found and not found[-1]:
            found.pop()
            blank += 1
        top = re.match(r"(def |class |@|if __name__)", line) is not None
        decorated = bool(found) and found[-1].startswith("@")
        after = bool(found) and found[-1][:1] in (" ", ")") and bool(line) and line[0] not in " )]}#" and not top
        if not line:
            found += [""] * (blank + 1)
            continue
        wanted = 0 if not found or decorated else 2 if top or after else min(blank, 1)
        if found and found[-1].endswith(":") and not top:
            wanted = 0
        found += [""] * wanted + [line]
    return "\n".join(found).rstrip("\n") + "\n"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("shardwise.interop.pytorch"),
        autoescape=False,  # no HTML: each value goes through `py`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
