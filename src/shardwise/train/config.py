"""Config file of ``shardwise train``: eight tables, validated together.

Each table is one frozen class; ``Config`` only composes them. `read_config` is the only entry point: it reads the
file, applies ``key=value`` overrides and reports every problem in one `ConfigError`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from shardwise.document import read_toml
from shardwise.errors import ConfigError, PlanError
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.optimizers import OPTIMIZERS, refusals
from shardwise.plan.parallel_options import ParallelOptions, option_field, without_effect
from shardwise.plan.plan import LAYERS_IDLE, Plan, Recompute, chunk_problems, in_backward_problems, saved_problems
from shardwise.plan.strategy import Strategy, parse_strategy, runnable_strategy
from shardwise.plan.workload import OptimizerName
from shardwise.train.config_data import DataTable, Table
from shardwise.train.config_problems import explain
from shardwise.train.config_tasks import length_problems, task_problems
from shardwise.train.config_types import StoredTypes
from shardwise.train.config_values import (
    Batch,
    CheckpointFolder,
    Count,
    Few,
    Fraction,
    Named,
    Positive,
    Ranks,
    Rate,
    RunFolder,
    apply_override,
    profile_steps,
    unfit_values,
)
from shardwise.train.task_names import TaskName, task_of_file
from shardwise.train.training_options import TrainingOptions
from shardwise.units import listed

Tracker = Literal["tensorboard", "wandb", "trackio"]


class ModelTable(Table):
    """``[model]``: exactly one of ``config`` and ``factory``."""

    config: Named | None = Field(None, description="Hugging Face config.json, or a folder with one")
    factory: Named | None = Field(
        None, description="package.module:function or file.py:function that returns an nn.Module"
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of the factory")
    weights: Named | None = Field(None, description="folder or file of safetensors to start from; random if left out")
    freeze: list[str] = Field(default_factory=list, description="parameters not trained: shell patterns of names")
    task: Literal["auto"] | TaskName = Field(
        "auto", description="what is trained; auto: what 'architectures' of the config names, else causal-lm"
    )
    loss: Named | None = Field(
        None, description="package.module:function(outputs, labels) -> (sum, count); the task's own if left out"
    )

    @property
    def trained_task(self) -> TaskName:
        """The task, with ``auto`` resolved."""
        if self.task != "auto":
            return self.task
        return "causal-lm" if self.config is None else task_of_file(self.config)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.config is None) == (self.factory is None):
            given = "neither; add one" if self.config is None else "both; leave one out"
            raise ValueError(f"needs exactly one of 'config' and 'factory', got {given}")
        if self.kwargs and self.factory is None:
            raise ValueError("'kwargs' are the arguments of a factory, and there is none; remove them")
        return self


class OptimizerTable(Table):
    """``[optimizer]``: the optimizer, its schedule and clipping."""

    name: OptimizerName = Field("adamw", description="; ".join(f"{s.name}: {s.help}" for s in OPTIMIZERS.values()))
    factory: Named | None = Field(None, description="package.module:function(params, lr=..., **kwargs) -> Optimizer")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of the factory")
    lr: Rate = Field(1e-3, description="largest learning rate")
    betas: list[Fraction] = Field(
        default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2, description="decay of the two moments"
    )
    eps: float = Field(1e-8, ge=1e-38, le=1, description="of the update's denominator")  # smaller ones are 0 in fp32
    weight_decay: float = Field(0.0, ge=0, le=100, description="decoupled from the gradient")
    momentum: Fraction = Field(0.0, description="of sgd")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine",
        description="the learning rate after the warm-up, to the end of the run; wsd: stable, then down",
    )
    warmup_steps: Count = Field(0, description="steps in which the learning rate rises to lr")
    decay_fraction: float = Field(0.1, gt=0, le=1, description="of wsd: last part of the run, where the rate falls")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="the schedule ends at lr × this")
    clip_norm: float | None = Field(1.0, ge=1e-12, description="largest norm of the gradient; 'none' means no limit")
    in_backward: bool = option_field("optimizer_in_backward")

    @model_validator(mode="before")
    @classmethod
    def _with_its_defaults(cls, data: Any) -> Any:
        """Fill in where an optimizer's defaults are others than those of this table."""
        if not isinstance(data, dict) or data.get("factory") not in (None, "none"):
            return data
        if (spec := OPTIMIZERS.get(str(data.get("name", "adamw")))) is None:
            return data
        usual = {key: value.get_default(call_default_factory=True) for key, value in cls.model_fields.items()}
        own = {key: value for key, value in spec.hyperparameters.items() if key in usual and value != usual[key]}
        return own | data

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        takes = set() if self.factory is not None else {"name", *OPTIMIZERS[self.name].hyperparameters}
        own = takes - set(type(self).model_fields)
        if self.kwargs and self.factory is None and not own:
            raise ValueError("'kwargs' are the arguments of a factory, and there is none; remove them")
        if self.factory is None and (unknown := sorted(set(self.kwargs) - own)):
            raise ValueError(f"'kwargs' of {self.name} are {listed(sorted(own))}, not {listed(unknown)}")
        kind = "a factory" if self.factory is not None else self.name
        for key in ("name", "betas", "eps", "momentum", "weight_decay"):
            if key in self.model_fields_set and key not in takes:
                owners = [spec.name for spec in OPTIMIZERS.values() if key == "name" or key in spec.hyperparameters]
                raise ValueError(f"'{key}' does nothing for {kind}, only for {listed(owners)}; take it out")
        if self.in_backward and self.clip_norm is not None:
            raise ValueError(
                "'in_backward' steps before the norm of all gradients is known, and 'clip_norm' is "
                f'{self.clip_norm:g}; set optimizer.clip_norm="none", or take in_backward out'
            )
        if "min_lr_ratio" in self.model_fields_set and self.schedule == "constant":
            raise ValueError("'min_lr_ratio' has no effect with schedule 'constant'; remove it")
        if "decay_fraction" in self.model_fields_set and self.schedule != "wsd":
            raise ValueError(
                f"'decay_fraction' has no effect with schedule '{self.schedule}', only with wsd; remove it"
            )
        return self


class TrainTable(TrainingOptions, Table):
    """``[train]``: duration, batch size and output."""

    steps: Positive | None = Field(None, description="optimizer steps; exactly one of steps and epochs")
    epochs: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        None, description="passes over the data; exactly one of steps and epochs"
    )
    global_batch: Batch | None = Field(None, description="samples per optimizer step over all ranks")
    micro_batch: Batch | None = Field(None, description="samples per forward on one rank")
    grad_accum: Batch | None = Field(None, description="micro batches per optimizer step on one rank")
    loss_chunks: Few = option_field("loss_chunks")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="of weights, order of samples and dropout")
    output: RunFolder = Field("runs/default", description="run folder")
    log_every: Positive = Field(1, description="steps between logged lines")
    eval_every: Count = Field(0, description="steps between evaluations; 0 is only at the end")
    eval_samples: Count = Field(0, description="held-out samples to evaluate; 0 is all")
    metrics: list[str] = Field(
        default_factory=list,
        description="package.module:function(outputs, labels) -> sum, count; evaluated beside the loss",
    )
    generate: list[str] = Field(default_factory=list, description="prompts that the model continues at evaluations")
    generate_tokens: Few = Field(32, description="tokens of each continuation")
    best_metric: Named | None = Field(
        None, description="heldout_loss, heldout_loss/SOURCE or a metric: its best checkpoint is kept"
    )
    best_is: Literal["lowest", "highest"] = Field("lowest", description="which value of best_metric is best")
    early_stopping: Count = Field(0, description="evaluations without a better best_metric that end the run; 0: none")
    export: Literal["hf", "peft"] | None = Field(
        None, description="at the end, a folder 'model' in output for transformers (adapters merged), or peft's"
    )
    watch: bool = Field(True, description="name the rank that the others wait for, and end ranks that cannot go on")
    profile: str | None = Field(None, description="a torch.profiler trace of 'STEP' or 'STEP:COUNT', such as '20:3'")
    profile_ranks: list[Count] = Field(default_factory=lambda: [0], min_length=1, description="ranks that are traced")
    trackers: list[Tracker] = Field(
        default_factory=list, description="where metrics go beside metrics.jsonl: tensorboard, wandb, trackio"
    )

    @property
    def profiled(self) -> tuple[int, int] | None:
        """First step and number of steps of the trace; ``None`` without a trace."""
        return None if self.profile is None else profile_steps(self.profile)

    @model_validator(mode="after")
    def _that_can_be(self) -> Self:
        problems = []
        if (self.steps is None) == (self.epochs is None):
            both = "both; leave one out (on the command line: train.steps=none or train.epochs=none)"
            given = "neither; add one" if self.steps is None else both
            problems.append(f"needs exactly one of 'steps' and 'epochs', got {given}")
        problems += self._profile_problems()
        if "generate_tokens" in self.model_fields_set and not self.generate:
            problems.append("'generate_tokens' has an effect with 'generate' only; set that, or remove it")
        for key in ("best_is", "early_stopping"):
            if key in self.model_fields_set and self.best_metric is None:
                problems.append(f"'{key}' has an effect with 'best_metric' only; set that, or remove it")
        twice = [name for name in dict.fromkeys(self.trackers) if self.trackers.count(name) > 1]
        if twice:
            problems.append(f"'trackers' names {', '.join(twice)} more than once; name each once")
        if problems:
            raise ValueError(*problems)
        return self

    def _profile_problems(self) -> list[str]:
        if self.profile is None:
            idle = "profile_ranks" in self.model_fields_set
            return ["'profile_ranks' does nothing without 'profile'; remove it"] if idle else []
        try:
            first, count = profile_steps(self.profile)
        except ValueError as error:
            return [str(error)]
        last = first + count - 1
        if self.steps is not None and last > self.steps:
            asked = f"step {first}" if count == 1 else f"steps {first} to {last}"
            return [f"'profile' asks for {asked}, and 'steps' is {self.steps}; trace earlier steps, or train longer"]
        return []


class ParallelTable(ParallelOptions, StoredTypes, Table):
    """``[parallel]``: the strategy, its devices and its options (`ParallelOptions`)."""

    strategy: str = Field("auto", description="auto, or such as ddp, zero2, fsdp+tp2, ddp+lora, deepspeed-zero3")
    nproc: Ranks | None = Field(None, description="ranks on this machine; a GPU each, or two on CPU if left out")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is the GPUs, else the CPU")
    dp_replicate: Positive | None = Field(None, description="data-parallel replicas; chosen if left out")
    dp_shard: Positive | None = Field(None, description="ranks that shard one replica; chosen if left out")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="compute dtype; auto: bf16 where a GPU has it, else fp16; fp32 on a CPU"
    )
    recompute: Recompute = Field("none", description="activation checkpointing of the repeated blocks")
    loss_parallel: bool = option_field("loss_parallel")
    nvme_path: Named | None = option_field("nvme_path")
    threads: Ranks | None = Field(None, description="CPU threads of a rank; the cores divided by the ranks if left out")

    @field_validator("recompute_layers", mode="before")
    @classmethod
    def _all_layers(cls, value: object) -> object:
        return None if value == "all" else value

    @model_validator(mode="after")
    def _strategy_exists(self) -> Self:
        if self.strategy != "auto":
            try:
                strategy = runnable_strategy(self.strategy)
            except PlanError as error:
                raise ValueError(*error.problems) from None
            given = [name for name in ParallelOptions.model_fields if name in self.model_fields_set]
            if problems := without_effect(given, strategy):
                raise ValueError(*problems)
        problems = [LAYERS_IDLE] if self.recompute_layers is not None and self.recompute == "none" else []
        if self.offload_activations:
            named = {"strategy": "fsdp" if self.strategy == "auto" else self.strategy, "compile": self.compile}
            problems += saved_problems(Plan(**named, recompute=self.recompute, offload_activations=True))
        if problems:
            raise ValueError(*problems)
        return self


class LoraTable(Table):
    """``[lora]``: adapters of a strategy with ``+lora`` or ``+qlora``; the base is frozen."""

    rank: Few = Field(16, description="of the two matrices of an adapter")
    alpha: float = Field(32.0, ge=1e-6, le=1e6, description="adapters count alpha / rank")
    dropout: Fraction = Field(0.0, description="share of an adapter's inputs dropped in training")
    targets: list[str] = Field(
        default_factory=lambda: ["all-linear"],
        min_length=1,
        description="all-linear, attention, mlp, or ends of names of linear layers",
    )
    rslora: bool = Field(False, description="adapters count alpha / sqrt(rank)")
    dora: bool = Field(False, description="train the norm of each output's weights apart")
    quant_type: Literal["nf4", "fp4"] = Field("nf4", description="+qlora: the 16 values of 4 bits")
    double_quant: bool = Field(True, description="+qlora: pack the scales, too")
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="ends of names of modules that are trained in full beside adapters, such as embed_tokens, lm_head",
    )

    @property
    def options(self) -> AdapterOptions:
        """Return the options as a plan stores them."""
        names = {"targets": tuple(self.targets), "modules_to_save": tuple(self.modules_to_save)}
        return AdapterOptions(**{**self.model_dump(), **names})


class CheckpointTable(Table):
    """``[checkpoint]``: when, where and how to save, and how many to keep."""

    every: Count = Field(0, description="steps between checkpoints; 0 is only at the end")
    keep: Positive = Field(2, description="newest checkpoints kept")
    resume: bool = Field(True, description="resume from the newest checkpoint of this run")
    folder: CheckpointFolder | None = Field(
        None, description="path or URL (s3://...); else 'checkpoints' in train.output"
    )
    async_save: bool = Field(False, description="copy the state, and write it while training continues")
    verify: bool = Field(True, description="compare the hashes of what is read on resume and as model.weights")


class LaunchTable(Table):
    """``[launch]``: the numbers of nodes that ``shardwise launch`` may run on."""

    min_nodes: Ranks | None = Field(
        None, description="fewest nodes with which a run continues when others are lost; all, if left out"
    )
    max_nodes: Ranks | None = Field(None, description="most nodes that may join a run; --nodes, if left out")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_nodes is not None and self.max_nodes is not None and self.min_nodes > self.max_nodes:
            raise ValueError(f"'min_nodes' is {self.min_nodes} and 'max_nodes' {self.max_nodes}; exchange them")
        return self


def optimizer_problems(table: OptimizerTable, strategy: Strategy) -> list[str]:
    """Why the optimizer of a config cannot step what a strategy leaves on a rank."""
    if table.factory is not None:
        return []
    found = refusals(table.name, strategy, in_backward=table.in_backward)
    return [f"optimizer.name '{table.name}' {line}" for line in found]


class Config(Table):
    """Full config file."""

    @property
    def checkpoints(self) -> str:
        """Folder or URL of this run's checkpoints."""
        return self.checkpoint.folder or str(Path(self.train.output) / "checkpoints")

    model: ModelTable
    data: DataTable
    optimizer: OptimizerTable = OptimizerTable()
    train: TrainTable
    parallel: ParallelTable = ParallelTable()
    lora: LoraTable = LoraTable()
    checkpoint: CheckpointTable = CheckpointTable()
    launch: LaunchTable = LaunchTable()

    def packing(self, kind: str) -> Literal["isolated", "joined", "none"]:
        """Return how rows of a ``kind`` share a sample: ``data.pack``, or what suits the training.

        Documents that see each other do not matter in pretraining; fine-tuning keeps them apart. A model of a factory
        may have no positions to restart: its conversations are padded.
        """
        if self.model.trained_task != "causal-lm":
            return "joined" if self.model.trained_task == "masked-lm" and self.data.pack != "none" else "none"
        if self.data.pack != "auto":
            return self.data.pack
        if self.data.mask_borders or (kind == "text" and (self.model.weights is None or self.model.config is None)):
            return "joined"
        return "none" if self.model.config is None else "isolated"

    @model_validator(mode="after")
    def _task_is_possible(self) -> Self:
        if problems := task_problems(self):
            raise ValueError(*problems)
        return self

    @model_validator(mode="after")
    def _adapters_are_asked_for(self) -> Self:
        named, given = self.parallel.strategy, sorted(self.lora.model_fields_set)
        kind = "none" if named == "auto" else parse_strategy(named).adapter
        problems = []
        if kind == "none" and "lora" in self.model_fields_set:
            problems.append(
                f"'lora' does nothing under the strategy {named}; name one with +lora or +qlora, such as fsdp+qlora, "
                "or remove the table"
            )
        if self.train.export == "peft" and kind == "none":
            problems.append(f"'train.export' is peft, and {named} has no adapters to write; use hf, or +lora")
        if self.train.export is not None and self.model.config is None:
            problems.append("'train.export' needs model.config, which transformers builds the model from; remove it")
        if kind == "lora" and (moot := [key for key in ("quant_type", "double_quant") if key in given]):
            problems.append(f"'lora.{moot[0]}' does nothing without +qlora; remove it")
        if kind != "none" and self.model.freeze:
            problems.append(f"'model.freeze' does nothing under {named}, which freezes all of the model; remove it")
        if problems:
            raise ValueError(*problems)
        return self

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> Self:
        if self.train.eval_every and not self.data.heldout_fraction and self.data.heldout_path is None:
            raise ValueError("'train.eval_every' does nothing where data.heldout_fraction is 0; remove it")
        if self.train.best_metric is not None and not self.train.eval_every:
            raise ValueError("'train.best_metric' is compared at evaluations; set train.eval_every")
        return self

    @model_validator(mode="after")
    def _chunks_go_with_the_strategy(self) -> Self:
        chunks, strategy = self.train.loss_chunks, self.parallel.strategy
        if chunks > 1 and strategy != "auto":
            problems = chunk_problems(Plan(strategy=strategy, loss_chunks=chunks))
            if problems:
                raise ValueError(*(f"train.{problem}" for problem in problems))
        return self

    @model_validator(mode="after")
    def _optimizer_goes_with_the_strategy(self) -> Self:
        parallel, optimizer = self.parallel, self.optimizer
        named = None if parallel.strategy == "auto" else parse_strategy(parallel.strategy)
        named_optimizer = optimizer.name if optimizer.factory is None else None
        options = {"optimizer_in_backward": optimizer.in_backward, "offload_activations": parallel.offload_activations}
        problems = parallel.type_problems(parallel.strategy, parallel.precision, **options)
        problems += parallel.stored_problems(named_optimizer, self.train.ema_decay)
        if named is not None:
            problems += [*optimizer_problems(optimizer, named), *self.train.strategy_problems(named)]
        if optimizer.in_backward and named is None:
            problems.append(
                "'optimizer.in_backward' is not for every strategy, and 'parallel.strategy' is auto; "
                "name one: zero2, fsdp or hsdp (ddp on one rank)"
            )
        elif optimizer.in_backward:
            accum = self.train.grad_accum or 1
            precision = "fp32" if parallel.precision == "auto" else parallel.precision
            plan = Plan(strategy=parallel.strategy, grad_accum=accum, precision=precision)
            problems += in_backward_problems(plan)
        if problems:
            raise ValueError(*problems)
        return self


def json_schema() -> str:
    """Return the JSON schema of a config file, for editors."""
    return json.dumps(Config.model_json_schema(), indent=2)


def read_config(path: Path, overrides: Sequence[str] = (), *, planned: str | None = None) -> Config:
    """Read a TOML file and apply ``table.key=value`` overrides (TOML values or bare strings).

    Paths inside the file are relative to the working directory. ``planned`` is the strategy of a plan that
    is given beside the file, and replaces ``auto``.

    Raises:
        ConfigError: all problems together, each with the key, the value, the rule and the nearest known key.
    """
    try:
        data = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"config '{path}' does not exist; give the path of a TOML file") from None
    except OSError as error:
        raise ConfigError(f"config '{path}' cannot be read: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config '{path}' is not text in UTF-8; save it as that") from None
    except ValueError as error:
        hint = " (text needs quotes)" if str(error).startswith("Invalid value") else ""
        raise ConfigError(f"config '{path}' is not TOML: {error}; repair it there{hint}") from None
    if {"strategy", "dims"} <= data.keys():
        raise ConfigError(f"config '{path}' is a plan; give the config of train that has the model and the data")
    problems = [problem for item in overrides if (problem := apply_override(data, item))]
    problems += unfit_values(data)
    parallel = data.setdefault("parallel", {}) if planned is not None else None
    if isinstance(parallel, dict) and parallel.get("strategy", "auto") == "auto":
        parallel["strategy"] = planned
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems += [explain(item, Config) for item in error.errors()]
        problems += [length_problem for length_problem in length_problems(data) if length_problem not in problems]
    if problems:
        raise ConfigError(*problems)
    return config
