"""Convert optimizer, schedule and clipping of a DeepSpeed configuration to config keys.

DeepSpeed's "Adam" is AdamW unless ``adam_w_mode`` is false. Its schedulers step after the optimizer, from -1 on: the
rates of WarmupLR and WarmupDecayLR come two steps later than ours, a cosine's warm-up two and its decay one
(deepspeed/runtime/lr_schedules.py of 0.19.8). That is reported, not imitated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import did_you_mean
from shardwise.interop.deepspeed.keys import AUTO

ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}  # of DeepSpeed's FusedAdam and CPUAdam
TORCH_DECAY = 0.01  # of torch.optim.AdamW, which torch_adam asks for
HOW_ONLY = ("torch_adam", "fused", "foreach", "set_grad_none", "fp32_optimizer_states", "capturable")
FROM_TORCH = ("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD", "Adam", "AdamW")
DEEPSPEED_ONLY = ("Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "ZeroOneAdam", "OneBitLamb")
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_KNOWN = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"),
    "WarmupCosineLR": (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
        "last_batch_iteration",
    ),
}
_KNOWN["WarmupDecayLR"] = ("total_num_steps", *_KNOWN["WarmupLR"])


@dataclass(frozen=True)
class FileKey:
    """Key of the file, its value, and its use, in words."""

    key: str
    value: Any
    why: str


@dataclass
class ImportedTraining:
    """Config keys from a file: ``keys`` are ``table.key``.

    ``differs`` and ``open`` list the exceptions.

    ``problems`` are mistakes, ``taken`` and ``no_effect`` rows like those of the plan.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    taken: list[FileKey] = field(default_factory=list)
    no_effect: list[FileKey] = field(default_factory=list)
    differs: list[FileKey] = field(default_factory=list)
    open: list[FileKey] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, path: str, value: Any, key: str, new: Any = None) -> None:
        """Record that ``path`` becomes ``key``; an ``auto`` is left open, with advice."""
        if value == "auto":
            message = AUTO.get(path, "the value that is meant")
            self.open.append(FileKey(path, value, f"set {key} to what TrainingArguments has: {message}"))
            return
        self.keys[key] = value if new is None else new
        self.taken.append(FileKey(path, value, key))


def read_training(config: Mapping[str, Any]) -> ImportedTraining:
    """Convert optimizer, scheduler and clipping to keys of ``[optimizer]`` and ``[train]``."""
    found = ImportedTraining()
    _clipping(config, found)
    table = config.get("optimizer")
    if isinstance(table, dict):
        _optimizer(table, found)
    elif table is not None:
        found.problems.append(f"optimizer must be a table with type and params, got {table!r}")
    scheduler = config.get("scheduler")
    if isinstance(scheduler, dict):
        _scheduler(scheduler, found)
    elif scheduler is not None:
        found.problems.append(f"scheduler must be a table with type and params, got {scheduler!r}")
    elif isinstance(table, dict):
        found.keys["optimizer.schedule"] = "constant"
        found.taken.append(FileKey("scheduler", None, "optimizer.schedule: the rate is constant"))
    if table is None:
        found.open.append(
            FileKey("optimizer", None, "the script creates it, and the file does not contain it: set [optimizer]")
        )
    return found


def _clipping(config: Mapping[str, Any], found: ImportedTraining) -> None:
    value = config.get("gradient_clipping")
    if value is None:
        found.keys["optimizer.clip_norm"] = 1.0
        found.taken.append(FileKey("gradient_clipping", None, "optimizer.clip_norm: DeepSpeed 0.19 then clips to 1.0"))
    elif value != "auto" and not _is_number(value):
        found.problems.append(f"gradient_clipping must be a number, 0 for no limit, got {value!r}")
    else:
        new = "none" if value != "auto" and value <= 0 else value if value == "auto" else float(value)
        found.take("gradient_clipping", value, "optimizer.clip_norm", new)


def _optimizer(table: Mapping[str, Any], found: ImportedTraining) -> None:
    name, params = table.get("type"), table.get("params", {})
    if not isinstance(name, str) or not isinstance(params, dict):
        found.problems.append(f"optimizer must have a type in quotes and a table of params, got {dict(table)!r:.80}")
        return
    params = dict(params)
    if "max_grad_norm" in params:
        value = params.pop("max_grad_norm")
        found.problems.append(
            f"optimizer.params.max_grad_norm is {value!r}: DeepSpeed refuses it there; set gradient_clipping instead"
        )
    for key in [key for key in HOW_ONLY if key in params]:
        value = params[key] if key == "torch_adam" else params.pop(key)
        found.no_effect.append(FileKey(f"optimizer.params.{key}", value, "which kernel computes it, not what"))
    known = {word.lower(): word for word in (*FROM_TORCH, *DEEPSPEED_ONLY)}
    proper = known.get(name.lower())
    if proper is None:
        hint = did_you_mean(name, known.values())
        found.problems.append(f"optimizer.type '{name}' is not an optimizer of DeepSpeed's or PyTorch's{hint}")
    elif proper in DEEPSPEED_ONLY:
        why = "DeepSpeed's own optimizer, which Shardwise does not have; choose another, or give optimizer.factory"
        found.differs.append(FileKey("optimizer.type", name, why))
        rest = [key for key in params if key != "torch_adam"]
        found.differs += [FileKey(f"optimizer.params.{key}", params[key], f"belongs to {proper}") for key in rest]
    elif proper in ("Adam", "AdamW"):
        _adam(proper, params, name, found)
    else:
        params.pop("torch_adam", None)
        _from_torch(proper, params, name, found)


def _adam(proper: str, params: dict[str, Any], name: str, found: ImportedTraining) -> None:
    torch_adam = bool(params.pop("torch_adam", False))
    mode = params.pop("adam_w_mode", None)
    decoupled = mode is not False or proper == "AdamW"
    decay = params.get("weight_decay", TORCH_DECAY if torch_adam and decoupled else 0.0)
    if mode is not None:
        added = "where weight decay is added: to the weights" if decoupled else "weight decay is added to the gradient"
        found.taken.append(FileKey("optimizer.params.adam_w_mode", mode, added))
    for key, off in (("amsgrad", False), ("bias_correction", True)):
        if key in params and params[key] is not off:
            found.differs.append(
                FileKey(f"optimizer.params.{key}", params.pop(key), "Shardwise's AdamW has no such option")
            )
        elif key in params:
            found.no_effect.append(FileKey(f"optimizer.params.{key}", params.pop(key), "as Shardwise's AdamW has it"))
    if not decoupled and decay != 0:
        _from_torch("Adam", params, name, found)  # decay that is added to the gradient
        return
    found.take("optimizer.type", name, "optimizer.name", "adamw")
    for key, usual in {**ADAM, "weight_decay": decay}.items():
        if key in params:
            value = params.pop(key)
            found.take(f"optimizer.params.{key}", value, f"optimizer.{key}")
        else:
            found.keys[f"optimizer.{key}"] = usual
    _unknown(params, (*ADAM, "adam_w_mode", *HOW_ONLY, "amsgrad", "bias_correction"), found)


def _from_torch(proper: str, params: dict[str, Any], name: str, found: ImportedTraining) -> None:
    """Use SGD if it has all that is requested.

    Else PyTorch's class through ``optimizer.factory``.
    """
    plain = proper == "SGD" and not set(params) - {"lr", "momentum", "weight_decay"}
    found.take("optimizer.type", name, *(("optimizer.name", "sgd") if plain else ("optimizer.factory", _path(proper))))
    if "lr" not in params:
        found.open.append(FileKey("optimizer.params.lr", None, f"set optimizer.lr to what {proper} is to have"))
    for key, value in params.items():
        inner = key if key == "lr" or plain else f"kwargs.{key}"
        found.take(f"optimizer.params.{key}", value, f"optimizer.{inner}")


def _path(name: str) -> str:
    return f"torch.optim:{name}"


def _scheduler(table: Mapping[str, Any], found: ImportedTraining) -> None:
    name, params = table.get("type"), table.get("params", {})
    if not isinstance(params, dict):
        found.problems.append(f"scheduler.params must be a table, got {params!r}")
        return
    if name not in SCHEDULERS:
        hint = did_you_mean(str(name), SCHEDULERS)
        found.problems.append(f"scheduler.type '{name}' is none of {', '.join(SCHEDULERS)}{hint}")
        return
    if name not in _KNOWN:
        why = "Shardwise has constant, linear, cosine and wsd; set optimizer.schedule to the nearest"
        found.differs.append(FileKey("scheduler.type", name, why))
        found.differs += [
            FileKey(f"scheduler.params.{key}", value, f"belongs to {name}") for key, value in params.items()
        ]
        return
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    found.take("scheduler.type", name, "optimizer.schedule", shapes[name])
    late = "one step later, its warm-up two" if name == "WarmupCosineLR" else "two steps later"
    found.differs.append(
        FileKey("scheduler.type", name, f"DeepSpeed's rates come {late}: it begins with steps at the lowest")
    )
    _unknown(params, _KNOWN[name], found, "scheduler")
    _warm_up(name, params, found)
    if name == "WarmupCosineLR":
        _floor(params, found)
    if "total_num_steps" in params:
        found.take("scheduler.params.total_num_steps", params["total_num_steps"], "train.steps")
    elif name != "WarmupLR":
        found.problems.append(f"scheduler.params.total_num_steps is missing; {name} of DeepSpeed's needs it")


def _warm_up(name: str, params: Mapping[str, Any], found: ImportedTraining) -> None:
    where = "scheduler.params"
    if "warmup_num_steps" in params:
        found.take(f"{where}.warmup_num_steps", params["warmup_num_steps"], "optimizer.warmup_steps")
    else:
        found.keys["optimizer.warmup_steps"] = 1000
    kind = params.get("warmup_type", "log")
    if kind != "linear":
        message = "" if "warmup_type" in params else "DeepSpeed's default is log: "
        why = f"{message}the rate grows with the logarithm of the step; Shardwise's grows linearly"
        found.differs.append(FileKey(f"{where}.warmup_type", params.get("warmup_type"), why))
    else:
        found.no_effect.append(FileKey(f"{where}.warmup_type", kind, "as Shardwise warms up"))
    lowest = "warmup_min_ratio" if name == "WarmupCosineLR" else "warmup_min_lr"
    if params.get(lowest) == 0 or (params.get(lowest) == "auto"):
        found.no_effect.append(FileKey(f"{where}.{lowest}", params[lowest], "Shardwise's warm-up begins at 0, too"))
    elif lowest in params:
        found.differs.append(FileKey(f"{where}.{lowest}", params[lowest], "Shardwise's warm-up begins at 0"))
    if "last_batch_iteration" in params:
        found.no_effect.append(
            FileKey(f"{where}.last_batch_iteration", params["last_batch_iteration"], "runs begin at 0")
        )
    usual = 1e-3 if name == "WarmupDecayLR" else None
    peak = params.get("warmup_max_lr", usual)
    if name == "WarmupCosineLR" or peak is None:
        return
    before = found.keys.get("optimizer.lr")
    if "warmup_max_lr" in params:
        found.take(f"{where}.warmup_max_lr", peak, "optimizer.lr")
    else:
        found.keys["optimizer.lr"] = peak
    if before not in (None, peak) and peak != "auto":
        why = f"DeepSpeed's scheduler replaces it by warmup_max_lr, {peak}"
        found.differs.append(FileKey("optimizer.params.lr", before, why))


def _floor(params: Mapping[str, Any], found: ImportedTraining) -> None:
    if "cos_min_ratio" in params:
        found.take("scheduler.params.cos_min_ratio", params["cos_min_ratio"], "optimizer.min_lr_ratio")
    else:
        found.keys["optimizer.min_lr_ratio"] = 1e-4


def _unknown(
    params: Mapping[str, Any], known: tuple[str, ...], found: ImportedTraining, table: str = "optimizer"
) -> None:
    for key in [key for key in params if key not in known]:
        found.problems.append(
            f"{table}.params.{key}: no such parameter{did_you_mean(key, known)}; known are {', '.join(known)}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
