"""Check config, plan and machine before any computation; each check reports all problems."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError, DataError, PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.plan.fp8_recipes import no_products
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.parallel_options import CONFIG_KEYS
from shardwise.plan.plan import Plan, axis_problems
from shardwise.plan.strategy import parse_strategy
from shardwise.search.choose import check_degrees
from shardwise.train.config import Config, optimizer_problems
from shardwise.train.config_types import StoredTypes
from shardwise.train.data.corpus import Corpus
from shardwise.train.tasks.registry import TaskData
from shardwise.units import counted, listed

if TYPE_CHECKING:
    from torch import nn

BATCH_KEYS = ("train.global_batch", "train.micro_batch", "train.grad_accum")


def check_plan(config: Config, cluster: ClusterSpec, plan: Plan | None) -> None:
    """Check the strategy and a given plan before the data is read, which may take long.

    Raises:
        PlanError: the degrees are impossible, or the plan is for something else; lists all differences.
    """
    parallel = config.parallel
    if problem := _fp8_problem(parallel if plan is None else plan, cluster):
        raise PlanError(problem)
    if plan is None:
        check_degrees(parallel.strategy, cluster, dp_replicate=parallel.dp_replicate, dp_shard=parallel.dp_shard)
        return
    problems = []
    if plan.dims.world_size != cluster.world_size:
        problems.append(
            f"the plan is for {counted(plan.dims.world_size, 'rank')} ({plan.dims}), but there are "
            f"{cluster.world_size}; use --nproc {max(1, plan.dims.world_size // cluster.nodes)} or make a new plan"
        )
    if plan.device != cluster.device:
        problems.append(
            f"the plan is for {plan.device}, but the ranks are on {cluster.device}; "
            f"set parallel.device={plan.device} where there is one, or make a new plan"
        )
    named = config.parallel.strategy
    given = {
        **{key: (attrgetter(key)(config), getattr(plan, name)) for name, key in CONFIG_KEYS.items()},
        **{f"parallel.{name}": (value, getattr(plan, name)) for name, value in config.parallel.types.items()},
        "parallel.strategy": (named if named == "auto" else str(parse_strategy(named)), str(plan.parsed)),
        "parallel.precision": (config.parallel.precision, plan.precision),
        "parallel.recompute": (config.parallel.recompute, plan.recompute),
        "parallel.dp_replicate": (config.parallel.dp_replicate, plan.dims.dp_replicate),
        "parallel.dp_shard": (config.parallel.dp_shard, plan.dims.dp_shard),
        "train.global_batch": (config.train.global_batch, plan.global_batch),
        "train.micro_batch": (config.train.micro_batch, plan.micro_batch),
        "train.grad_accum": (config.train.grad_accum, plan.grad_accum),
    }
    if plan.micro_batch is None:  # made for a custom loop; the config completes it
        given = {key: pair for key, pair in given.items() if key not in BATCH_KEYS or pair[1] not in (None, 1)}
    if plan.parsed.adapter != "none":
        adapter = plan.adapter or AdapterOptions()
        given |= {f"lora.{key}": (getattr(config.lora.options, key), value) for key, value in adapter}
    for key, (asked, planned) in given.items():
        table, _, name = key.partition(".")
        if name in getattr(config, table).model_fields_set and asked not in (planned, None, "auto"):
            has = "does not set it" if planned is None else f"has {planned}"
            problems.append(f"{key} is {asked}, but the plan {has}; remove the key or make a new plan")
    if plan.optimizer_in_backward and config.optimizer.clip_norm is not None:
        problems.append(
            "the plan steps the optimizer in the backward, before the norm of all gradients is known, and "
            f'optimizer.clip_norm is {config.optimizer.clip_norm:g}; set optimizer.clip_norm="none" or make a new plan'
        )
    stored = config.parallel.model_copy(update={name: getattr(plan, name) for name in config.parallel.types})
    optimizer = config.optimizer.name if config.optimizer.factory is None else None
    problems += stored.stored_problems(optimizer, config.train.ema_decay)
    if plan.seq_len not in (None, config.data.seq_len):
        problems.append(
            f"the plan is for samples of {plan.seq_len} tokens, but data.seq_len is {config.data.seq_len}; "
            f"set data.seq_len={plan.seq_len} or make a new plan"
        )
    if problems:
        raise PlanError(*problems)


def _fp8_problem(types: StoredTypes | Plan, cluster: ClusterSpec) -> str:
    """Return why fp8 products cannot run here; a rank asks its GPU, too (`parallel.fp8`)."""
    if types.fp8 == "none":
        return ""
    if cluster.device == "cpu" and not types.fp8_emulate:
        return no_products(types.fp8, "the ranks are on a CPU")
    if find_spec("torchao") is None:
        return f"fp8 = '{types.fp8}' needs torchao; install it with: pip install 'shardwise[fp8]'"
    return ""


def check_packages(adapter: str) -> None:
    """Check that the adapters' packages are installed, before the data is read.

    Raises:
        ConfigError: they are not.
    """
    if adapter == "none":
        return
    if find_spec("peft") is None:
        raise ConfigError("adapters need peft; install it with: pip install 'shardwise[hf]'")
    if adapter == "qlora" and find_spec("bitsandbytes") is None:
        raise ConfigError("+qlora needs bitsandbytes; install it with: pip install 'shardwise[qlora]'")


def check_engine(config: Config, plan: Plan | None, log: Callable[[str], None]) -> None:
    """Check that a strategy's engine is installed and supports it, before the data is read.

    Raises:
        UserError: lists all obstacles.
    """
    named = config.parallel.strategy if plan is None else plan.strategy
    strategy = None if named == "auto" else parse_strategy(named)
    if strategy is not None and strategy.engine == "deepspeed":
        from shardwise.parallel.engines.deepspeed_available import check_ready

        path = config.parallel.nvme_path if plan is None else config.parallel.nvme_path or plan.nvme_path
        check_ready(nvme=strategy.nvme, nvme_path=path, log=log)


def check_model_path(config: Config) -> None:
    """Check the model's configuration before the data is read; report keys that it ignores.

    Raises:
        ModelError: it is missing or cannot be used.
    """
    from shardwise.train.tasks.registry import configuration_of

    notes: list[str] = []
    configuration_of(config, notes)
    for note in notes:
        logging.getLogger("shardwise").warning(note)


def check_samples(config: Config, corpus: TaskData) -> None:
    """Check that the corpus has training labels, held-out bytes, and what ``train.best_metric`` names.

    Raises:
        DataError: it has not.
        ConfigError: no evaluation will measure the best metric.
    """
    from shardwise.train.data.samples import samples_for
    from shardwise.train.evaluator import check_best_metric

    check_best_metric(config, corpus)
    if not isinstance(corpus, Corpus):  # of rows, each of which has a label
        return
    samples_for(corpus, config)
    if corpus.heldout is not None:
        heldout = samples_for(corpus, config, heldout=True)
        if not heldout.label_bytes(config.train.eval_samples or None):
            raise DataError(
                "the held-out documents have no byte with a predecessor to predict it from; "
                "give data.heldout_path longer documents, or set data.heldout_fraction=0"
            )


def check_isolated(config: Config, kind: str, module: nn.Module, plan: Plan) -> None:
    """Check that the model and the plan can keep documents of one sample apart, where they must.

    Raises:
        PlanError: they cannot.
    """
    if config.packing(kind) != "isolated":
        return
    fix = 'set data.pack = "none" (a document in each sample, padded), or "joined" (documents see each other)'
    takes = inspect.signature(module.forward).parameters
    problems = []
    if missing := [name for name in ("input_ids", "position_ids") if name not in takes]:
        problems.append(
            f"data.pack 'isolated' restarts positions with each document, and {type(module).__name__}.forward takes no "
            f"{listed(missing)}; {fix}"
        )
    if plan.dims.cp > 1:
        problems.append(
            f"data.pack 'isolated' is not for {plan.strategy}: context parallel exchanges attention heads of full "
            f"sequences without a mask; name a strategy without +cp, or {fix}"
        )
    if problems:
        raise PlanError(*problems)


def check_generated(config: Config, kind: str, plan: Plan) -> None:
    """Check the prompts of ``train.generate`` before ranks start.

    Raises:
        UserError: one does not fit, or the plan splits sequences.
    """
    if not config.train.generate:
        return
    from shardwise.train.generate import Generator

    if plan.dims.cp > 1:
        raise PlanError(
            f"train.generate is not for {plan.strategy}, which splits sequences over ranks; remove it, or name a "
            "strategy without +cp"
        )
    Generator(config, kind)


def check_options(config: Config, module: nn.Module, plan: Plan) -> None:
    """Check that a chosen plan goes with the optimizer and the options of the training.

    Raises:
        PlanError: it does not.
        ModelError: the model does not say which embedding gets noise.
    """
    from shardwise.train.noise import embedding_name

    problems = [*axis_problems(plan), *optimizer_problems(config.optimizer, plan.parsed)]
    if problems := [*problems, *config.train.strategy_problems(plan.parsed)]:
        raise PlanError(*problems)
    if config.train.neftune_alpha:
        embedding_name(module)


def check_output(folder: Path) -> None:
    """Check that the run folder exists or can be created, and is writable.

    Raises:
        ConfigError: it is not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        why = "a file is in the way" if is_file else error.strerror
        raise ConfigError(f"train.output '{folder}' cannot be written to: {why}; choose another folder") from None


def adapter_of(config: Config) -> str:
    """Return the adapter kind of the named strategy: ``lora``, ``qlora`` or ``none``."""
    named = config.parallel.strategy
    return "none" if named == "auto" else parse_strategy(named).adapter
