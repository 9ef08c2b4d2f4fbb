"""Resume from a checkpoint: choice of checkpoint, required equality, and reported changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch.optim import Optimizer

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.format import Manifest, saved_steps
from shardwise.checkpoint.load import has_average, newest_of_all
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.errors import CheckpointError, CheckpointMismatch, ConfigError, ShardwiseError
from shardwise.plan.plan import Plan
from shardwise.train.config import Config, OptimizerTable
from shardwise.train.metrics import read_metrics
from shardwise.train.run_files import RunFile

CONTENT = "the data (content)"
LISTING = "the data (fingerprint)"  # includes the files' paths and modification times
_OPTIONS = ("lr", "betas", "eps", "momentum", "weight_decay")  # of a parameter group, as the config names them


def find(folder: Folder) -> tuple[Folder | None, Folder | None]:
    """Find the checkpoint to resume from and its fallback, as rank 0 sees them. Collective.

    Raises:
        CheckpointError: the folder cannot be read, or a rank does not see what rank 0 does.
    """
    path = newest_of_all(folder)
    if path is None:
        return None, None
    others = exchange.together(lambda: [found.name for _, found in saved_steps(folder) if found.name != path.name])
    earlier = exchange.broadcast_json(others[:1])
    return path, folder / earlier[0] if earlier else None


@contextmanager
def advice(path: Folder, earlier: Folder | None) -> Iterator[None]:
    """Add the fallback's effect to the error of a checkpoint that turns out to be damaged."""
    try:
        yield
    except CheckpointMismatch:
        raise
    except CheckpointError as error:
        then = f"resumes from '{earlier.name}'" if earlier is not None else "restarts: there is no earlier one"
        raise CheckpointError(f"{error} (without '{path}' the same command {then})") from None


@contextmanager
def reading_state(path: Folder) -> Iterator[None]:
    """Report errors in the caller's part of a manifest, which has no schema, as damage.

    Raises:
        CheckpointError: a value is missing or has the wrong type.
    """
    try:
        yield
    except ShardwiseError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"'{path / 'manifest.json'}' is damaged: its state is not a run's ({what})") from None


def refuse_lost(output: Path, folder: Folder) -> None:
    """Refuse to restart a run whose checkpoints are not in this run's checkpoint folder.

    Collective.

    Raises:
        ConfigError: it would be restarted, and its metrics would be lost.
    """
    file = output / RunFile.METRICS
    steps = [0]
    if exchange.rank() == 0:
        lines = list(read_metrics(file))
        steps += [line["step"] for line in lines] if any("checkpoint_bytes" in line for line in lines) else []
    done = exchange.broadcast_json(max(steps))
    if done:
        raise ConfigError(
            f"train.output '{output}' has metrics of {done} steps, and '{folder}' has no checkpoint to resume from; "
            f"set checkpoint.folder to where they are, choose another train.output, or remove '{file}' to restart"
        )


def refuse_other_samples(manifest: Manifest, path: Folder, facts: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose sample order differs from this run's.

    ``facts`` determine the order, under the names of the config.

    Raises:
        ConfigError: the checkpoint is not of this loop, or some of them have changed.
    """
    then = manifest.state.get("order")
    if then is not None and isinstance(then.get("data.pack"), bool):  # an earlier version had two ways
        then = {**then, "data.pack": "joined" if then["data.pack"] else "none"}
    if then is None:
        raise ConfigError(
            f"'{path}' has no data position: it was converted, or saved by a custom loop; to start from "
            f"its weights choose another folder for this run's checkpoints and set model.weights = '{path}'"
        )
    moot = LISTING if then.get(CONTENT) and facts.get(CONTENT) else CONTENT
    keys = [key for key, now in facts.items() if key != moot and then.get(key) != now]
    changed = [f"{key} was {then.get(key)}, is {facts[key]}" for key in keys]
    if changed:
        raise ConfigError(
            f"'{path}' was trained on other samples, so some would repeat: {'; '.join(changed)}; "
            "undo the change or choose another train.output"
        )


def refuse_other_base(
    manifest: Manifest, path: Folder, facts: Mapping[str, Any], otherwise: str = "choose another train.output"
) -> None:
    """Refuse a checkpoint with other adapters or another base.

    ``facts`` are those of this run's adapters and their base, empty if there are none.

    A base without a known digest on either side is assumed to be the same.

    Raises:
        ConfigError: only one of checkpoint and run has adapters, or they differ.
    """
    saved = manifest.model or {}
    then, now = saved.get("adapter"), facts.get("adapter")
    if then is None and now is None:
        return
    problems = []
    if then is None or now is None:
        words = {True: "no adapters", False: "adapters only"}
        problems.append(f"it holds {words[then is None]}, and this run trains {words[now is None]}")
    else:
        old, new = ({"kind": one["kind"], "modules_to_save": [], **one["options"]} for one in (then, now))
        problems += [f"{key} was {old.get(key)}, is {value}" for key, value in new.items() if old.get(key) != value]
        base, here = saved.get("base", {}), facts.get("base", {})
        marks = [(one.get("digest"), one.get("seed")) for one in (base, here)]
        if marks[0] != marks[1] and (None, None) not in marks:
            problems.append(f"its base was {_base_text(base)}, is {_base_text(here)}")
    if problems:
        raise ConfigError(
            f"'{path}' does not go with this run's adapters: {'; '.join(problems)}; undo the change or {otherwise}"
        )


def _base_text(base: Mapping[str, Any]) -> str:
    if base.get("seed") is not None:
        return f"made under the seed {base['seed']}"
    where = "weights" if base.get("weights") is None else f"'{base['weights']}'"
    return f"{where} with the digest {base.get('digest')}"


def steps_in_all(config: Config, num_samples: int, global_batch: int, step: int = 0, position: int = 0) -> int:
    """Count the optimizer steps of the run.

    ``step`` are done and used the samples before ``position``.
    """
    if config.train.steps is not None:
        return config.train.steps
    left = (config.train.epochs or 1) * num_samples - position
    return step + math.ceil(max(0, left) / global_batch)


def refuse_fewer(manifest: Manifest, config: Config, num_samples: int) -> None:
    """Refuse a config whose run would end before the step that it has reached.

    Raises:
        ConfigError: it would.
    """
    step, position, epochs = manifest.step, int(manifest.state["position"]), config.train.epochs
    if config.train.steps is not None and step > config.train.steps:
        wrong, fix = f"this one has {config.train.steps}", f"set train.steps to {step} or more"
    elif epochs is not None and position > epochs * num_samples:
        wrong, fix = f"train.epochs={epochs} ({num_samples} samples each) ends before", "raise train.epochs"
    else:
        return
    raise ConfigError(
        f"train.output '{config.train.output}' holds a run of {step} steps, and {wrong}; {fix}, or choose another "
        "train.output"
    )


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def changed_keys(manifest: Manifest, table: OptimizerTable) -> dict[str, tuple[Any, Any]]:
    """Map changed keys of ``[optimizer]`` to their value in the checkpoint and now."""
    now: dict[str, Any] = table.model_dump(mode="json")
    then = manifest.state.get("optimizer") or now
    return {key: (then[key], value) for key, value in now.items() if key in then and then[key] != value}


def set_changed(
    optimizer: Optimizer, made: list[dict[str, Any]], manifest: Manifest, changed: Iterable[str], table: OptimizerTable
) -> None:
    """Apply the config's options in place of those from a loaded checkpoint.

    ``made`` are the groups' options as the config set them. Options that the config does not name keep their loaded
    value: some optimizers keep state there.
    """
    keys = set(changed) & set(_OPTIONS)
    if {"kwargs", "factory"} & set(changed) or "optimizer" not in manifest.state:
        keys = {*_OPTIONS, *table.kwargs}
    for group, options in zip(optimizer.param_groups, made, strict=True):
        group.update({key: options[key] for key in keys if key in options and key != "lr"})
        if "lr" in keys:
            group["initial_lr"] = options["lr"]  # the schedule is a factor of it


def news(manifest: Manifest, config: Config, plan: Plan, total: int) -> list[str]:
    """List what changed since the checkpoint, a phrase each.

    Empty if the run resumes bit for bit.
    """
    texts: list[str] = []
    with suppress(ValidationError):  # a later version's plan
        texts += _plan_news(Plan.model_validate(manifest.plan), plan)
    texts += [f"optimizer.{key} {old} → {new}" for key, (old, new) in changed_keys(manifest, config.optimizer).items()]
    then = manifest.state.get("options") or {}
    pairs = ((key, then.get(key, 0.0), value) for key, value in config.train.training_options.items())
    texts += [f"train.{key} {old:g} → {new:g}" for key, old, new in pairs if old != new]
    if config.train.ema_decay and not has_average(manifest):
        texts.append("the average of the weights begins here")
    old_total = manifest.state["scheduler"]["total"]
    schedule = config.optimizer.schedule
    if old_total != total:
        follows = "" if schedule == "constant" else f", which the {schedule} schedule follows from here on"
        texts.append(f"{old_total} steps total → {total}{follows}")
    return texts


def _plan_news(old: Plan, plan: Plan) -> list[str]:
    texts = []
    then, now = _spread(old), _spread(plan)
    if then != now:
        rng_state = old.dims.world_size != plan.dims.world_size
        texts.append(f"{then} → {now}{' (dropout draws other numbers)' if rng_state else ''}")
    pairs = {
        "global batch": (old.global_batch, plan.global_batch),
        "micro batch": (old.micro_batch, plan.micro_batch),
        "precision": (old.precision, plan.precision),
        "recompute": (old.recompute, plan.recompute),
        "recomputed blocks": (old.recompute_layers or "all", plan.recompute_layers or "all"),
        "activations offloaded": (_yes(old.offload_activations), _yes(plan.offload_activations)),
        "fp8": (old.fp8, plan.fp8),
    }
    return texts + [f"{name} {before} → {after}" for name, (before, after) in pairs.items() if before != after]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _spread(plan: Plan) -> str:
    world = plan.dims.world_size
    return f"{plan.parsed} on {world} rank{'s' if world > 1 else ''}"
