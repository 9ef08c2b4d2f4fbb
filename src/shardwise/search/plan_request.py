"""Request of ``shardwise plan``: its options, checked at once, and stored beside its plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from shardwise.cost.link_calibration import CalibrationFile
from shardwise.cost.price import Prices, price_of, read_prices
from shardwise.errors import UserError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.objective import Objective
from shardwise.plan.optimizers import OPTIMIZERS, either
from shardwise.plan.plan import Precision, Recompute
from shardwise.plan.program import OWN, SHARDWISE, ProgramTraits, program_names
from shardwise.plan.strategy import complete_strategy, parse_strategy
from shardwise.plan.tensor_types import Fp8Recipe, GradientType, Rounding, WeightType
from shardwise.plan.workload import OptimizerName, Workload
from shardwise.search.advice import search_and_advise
from shardwise.search.candidate import Pins, SearchResult
from shardwise.search.option_values import (
    ALL_LAYERS,
    about_nodes,
    about_program,
    adapter_problems,
    bad_choices,
    layer_problems,
    offload_problems,
    program_of,
    read_count,
    read_layers,
    without_effect_notes,
)
from shardwise.search.problem import Costs, default_precision, precision_text

FoundT = TypeVar("FoundT")
ProfileOf = Callable[..., ModelProfile]  # of a MODEL argument, by ``seq_len`` and ``compiled``
LinksOf = Callable[[ClusterSpec], tuple[CalibrationFile, list[str]]]

USUAL_LENGTH = 4096
SHORTER = (2048, 1024, 512, 128)
THIS_MACHINE = "this machine"
DEFAULT_RANK = 16


@dataclass(frozen=True)
class Word:
    """Command-line form of a field of `PlanRequest`.

    ``kind`` is the type that Typer reads, ``usual`` its default. ``name`` is the parameter's where the field has
    another one; ``write`` converts a field's value to the option's.
    """

    kind: Any = str | None
    usual: Any = None
    name: str = ""
    write: Callable[[Any], str | None] = str


@dataclass(frozen=True)
class CommandOption:
    """Command-line option of a field: its flag where that is not the field's name, its help and its bounds."""

    flag: str | None = None
    help: str = ""
    min: int | None = None
    max: int | None = None
    is_argument: bool = False


class PlanRequest(BaseModel):
    """Request with every default filled in: options, and the table ``[question]`` of a plan.

    A field with a `Word` is an option; its value is None, False or the field's default where the option is left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[
        str,
        CommandOption(
            help="Catalogue name, config.json, its folder, package.module:factory, or a config file of train.",
            is_argument=True,
        ),
        Word(),
    ]
    cluster: ClusterSpec
    cluster_text: Annotated[
        str,
        CommandOption(
            "--cluster", help="8xA100-80GB, 2x8xH100-SXM, 4xRTX4090@pcie4, or a TOML file; default: this machine."
        ),
        Word(list[str] | None, name="cluster", write=lambda text: None if text == THIS_MACHINE else str(text)),
    ]
    seq_len: Annotated[int | None, CommandOption(help="Tokens per sample, such as 4096 or 4k."), Word()] = None
    global_batch: Annotated[
        int, CommandOption(help="Samples per step, all devices.", min=1, max=2**24), Word(int | None), Field(ge=1)
    ]
    tokens: Annotated[
        float | None,
        CommandOption(help="Total training tokens, such as 1e12 or 300B."),
        Word(write=lambda number: f"{number:g}"),
    ] = None
    strategy: Annotated[
        str | None, CommandOption(help="Only this strategy, such as fsdp+tp2, fitting or not."), Word()
    ] = None
    micro_batch: Annotated[
        int | None, CommandOption(help="Samples per forward on one rank.", min=1, max=2**24), Word(int | None)
    ] = None
    recompute: Annotated[Recompute | None, CommandOption(help="Recompute mode: none, selective or full."), Word()] = (
        None
    )
    recompute_layers: Annotated[
        int | None,
        CommandOption(help="Recompute only the first so many blocks, of each pipeline stage, or all."),
        Word(),
    ] = None
    offload_activations: Annotated[
        bool,
        CommandOption("--offload-activations", help="Keep what blocks save for the backward in host memory."),
        Word(bool, False),
    ] = False
    precision: Annotated[
        Precision | None, CommandOption(help="bf16, fp32, fp16 or fp8; default: bf16 if supported."), Word()
    ] = None
    optimizer: Annotated[OptimizerName, CommandOption(help=f"{either([*OPTIMIZERS])}."), Word(str, "adamw")] = "adamw"
    optimizer_in_backward: Annotated[
        bool,
        CommandOption("--optimizer-in-backward", help="Update each weight as its gradient is ready; no accumulation."),
        Word(bool, False),
    ] = False
    lora_rank: Annotated[
        int, CommandOption(help="Of +lora and +qlora; default: 16.", min=1, max=2**16), Word(int | None), Field(ge=1)
    ] = 16
    lora_targets: Annotated[
        tuple[str, ...],
        CommandOption(help="all-linear (default), attention, mlp, or names such as q_proj,v_proj."),
        Word(write=",".join),
    ] = ()
    compiled: Annotated[
        bool, CommandOption("--compile", help="Compile blocks with torch.compile."), Word(bool, False)
    ] = False
    fused_loss: Annotated[
        bool,
        CommandOption("--loss", help="plain or fused; a fused loss never converts logits to fp32."),
        Word(str, "plain", "loss", lambda fused: "fused"),
    ] = False
    loss_chunks: Annotated[
        int | None, CommandOption(help="Number of chunks of the logits.", min=1, max=2**16), Word(int | None)
    ] = None
    program_text: Annotated[
        str,
        CommandOption(
            "--program", help=f"Program that trains: {', '.join(program_names())}, or a TOML file of traits."
        ),
        Word(str, OWN, name="program"),
    ] = OWN
    program: ProgramTraits = SHARDWISE
    weights: Annotated[
        WeightType | None,
        CommandOption(help="Stored as fp32, compute (pure bf16), masters (beside fp32 ones); default: the program's."),
        Word(),
    ] = None
    accumulate: Annotated[
        GradientType | None, CommandOption(help="Type of gradients beside masters: fp32 or compute."), Word()
    ] = None
    reduce: Annotated[
        GradientType | None, CommandOption(help="Type in which gradients are reduced: fp32 or compute."), Word()
    ] = None
    rounding: Annotated[
        Rounding | None, CommandOption(help="Of updates with --weights compute: nearest, stochastic, kahan."), Word()
    ] = None
    fp8: Annotated[
        Fp8Recipe | None,
        CommandOption(help="Products of the blocks in fp8 by torchao: tensorwise or rowwise; default: none."),
        Word(),
    ] = None
    virtual_stages: Annotated[
        int, CommandOption(help="+pp: interleaved stages of a rank.", min=1, max=2**16), Word(int, 1), Field(ge=1)
    ] = 1
    document_len: Annotated[
        int | None,
        CommandOption(help="Mean tokens of documents packed into a sample; attention stays inside each.", min=1),
        Word(int | None),
    ] = None
    objective: Annotated[
        Objective,
        CommandOption(help="lm (next tokens), or dpo: pairs and a frozen reference; planned, not run."),
        Word(str, "lm"),
    ] = "lm"
    framework_overhead: Annotated[
        bool,
        CommandOption(help="Count CUDA context, NCCL, launches: on, off."),
        Word(str, "on", write=lambda on: "off"),
    ] = True
    grad_accum: int | None = None  # this and what follows, up to adapter: of a config file
    average: bool = False
    dp_replicate: int | None = None
    dp_shard: int | None = None
    options: dict[str, Any] = {}
    adapter: AdapterOptions | None = None
    any_plan: Annotated[
        bool,
        CommandOption("--any", help="Recommend plans that this version does not run, too."),
        Word(bool, False),
    ] = False
    calibration: CalibrationFile | None = None

    @property
    def fuses(self) -> bool:
        """Return whether memory-bound operations of blocks are fused, by the compiler or by the program's kernels."""
        return self.compiled or self.program.fused_kernels

    @property
    def workload(self) -> Workload:
        """Build the workload for the cost model."""
        return Workload(
            optimizer=self.optimizer,
            lora_rank=self.lora_rank,
            lora_targets=self.lora_targets,
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            tokens=self.tokens,
            compiled=self.compiled,
            fused_loss=self.fused_loss,
            framework_overhead=self.framework_overhead,
            average=self.average,
            objective=self.objective,
            program=self.program,
            document_len=self.document_len,
        )

    @property
    def pins(self) -> Pins:
        """Build the pins: choices that the user fixed."""
        return Pins(
            strategy=None if self.strategy is None else parse_strategy(self.strategy),
            micro_batch=self.micro_batch,
            grad_accum=self.grad_accum,
            recompute=self.recompute or ("full" if self.recompute_layers else None),
            precision=self.precision,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            options=self._options,
        )

    @property
    def _options(self) -> dict[str, Any]:
        given: dict[str, Any] = {} if self.loss_chunks is None else {"loss_chunks": self.loss_chunks}
        given |= {"optimizer_in_backward": True} if self.optimizer_in_backward else {}
        given |= {"compile": True} if self.compiled else {}
        given |= {"offload_activations": True} if self.offload_activations else {}
        given |= {} if self.recompute_layers is None else {"recompute_layers": self.recompute_layers}
        if self.virtual_stages > 1:
            given |= {"virtual_stages": self.virtual_stages, "pipeline_schedule": "interleaved-1f1b"}
        if self.adapter is not None:
            update = {"rank": self.lora_rank, "targets": self.lora_targets or self.adapter.targets}
            given["adapter"] = self.adapter.model_copy(update=update)
        return self.options | given

    def command(self, changes: Mapping[str, str | None]) -> str:
        """Build the command line of this request with ``changes``.

        These are options and their values, ``None`` for a flag.
        """
        words, flags = [], []
        for name, field in type(self).model_fields.items():
            word, info = word_of(field), option_of(field)
            if word is None or info is None or info.is_argument:
                continue
            option, value = info.flag or "--" + name.replace("_", "-"), getattr(self, name)
            given = field.is_required() or value != field.default
            if word.kind is bool:
                flags += [option] if given or option in changes else []
                continue
            text = changes.get(option) or (word.write(value) if given else None)
            words += [] if text is None else [option, text]
        return shlex.join(["shardwise", "plan", self.model, *words, *flags])


def word_of(field: FieldInfo) -> Word | None:
    """Return the field's command-line form; None if it has none."""
    return next((item for item in field.metadata if isinstance(item, Word)), None)


def option_of(field: FieldInfo) -> CommandOption | None:
    """Return the field's option; None if it has none."""
    return next((item for item in field.metadata if isinstance(item, CommandOption)), None)


def usual_words() -> dict[str, Any]:
    """Return what a command line without options gives: each word's default, by the parameter's name."""
    words = [(name, word_of(field)) for name, field in PlanRequest.model_fields.items()]
    return {word.name or name: word.usual for name, word in words if word is not None}


def build_request(
    words: dict[str, Any],
    *,
    problems: list[str],
    notes: list[str],
    profile_of: ProfileOf,
    price: Path | None = None,
    links_of: LinksOf | None = None,
) -> tuple[PlanRequest, ModelProfile, Prices, list[str]]:
    """Check all words, find model and cluster; also return notes on filled-in values.

    ``problems`` and ``notes`` are those found so far; ``seq_len`` and ``cluster`` are still texts.

    Raises:
        UserError: every invalid word, at once.
    """
    first_notes = list(notes)
    if words["strategy"] not in (None, "auto"):
        words["strategy"], taken = complete_strategy(words["strategy"])
        first_notes += [taken] if taken else []
    problems += bad_choices(words)
    words["recompute_layers"] = tried(problems, lambda: read_layers(words.get("recompute_layers")))
    tokens = tried(problems, lambda: None if words["tokens"] is None else read_count(words["tokens"]))
    strategy = tried(problems, lambda: _pinned(words["strategy"]))
    cluster = tried(problems, lambda: find_cluster(words["cluster"], words.get("device", "auto"), words.get("nproc")))
    program = tried(problems, lambda: program_of(words, cluster))
    prices = tried(problems, lambda: Prices() if price is None else _prices(price)) or Prices()
    profile, notes = tried(problems, lambda: _profile(words, program or SHARDWISE, profile_of)) or (None, [])
    targets = tuple(part.strip() for part in (words["lora_targets"] or "").split(",") if part.strip())
    if profile is not None and strategy is not None:
        problems += adapter_problems(profile, strategy, targets)
    problems += layer_problems(words, profile)
    if words["recompute_layers"] == ALL_LAYERS:
        words |= {"recompute": words["recompute"] or "full", "recompute_layers": None}
    problems += offload_problems(words, strategy)
    if profile is not None and words["objective"] != "lm" and profile.seq_len is None:
        asked_for = f"--objective {words['objective']}"
        problems.append(f"{asked_for} compares sequences, and '{profile.name}' has none; leave it out")
    links = None
    if links_of is not None and cluster is not None:
        links, about = tried(problems, partial(links_of, cluster)) or (None, [])
        notes += about
    if problems or cluster is None or profile is None or program is None:
        raise UserError(*dict.fromkeys(problems))  # a config's own are found again where its model is read
    notes = [
        *first_notes,
        *notes,
        *without_effect_notes(words, profile, cluster, links),
        *about_program(program, words["program"]),
        *about_nodes(cluster),
    ]
    if words["precision"] is None:
        notes.append(f"--precision was not given: {precision_text(default_precision(cluster), cluster, named=False)}")
    if (hour := price_of(prices.hour, cluster.device_name)) is not None:
        cluster = cluster.model_copy(update={"price_per_device_hour": hour})
    batch = words["global_batch"] or _config_batch(words, cluster)
    if batch is None:
        batch = cluster.world_size * (words["micro_batch"] or 1)
        notes.append(f"--global-batch was not given: {batch}, {words['micro_batch'] or 1} for each device")
    if tokens is None and words.get("steps") and profile.seq_len:
        tokens = words["steps"] * batch * profile.seq_len
    found = {"lora_targets": targets, "cluster": cluster, "seq_len": profile.seq_len, "global_batch": batch}
    found |= {"tokens": tokens, "strategy": strategy, "program": program, "calibration": links}
    return _requested(words, found), profile, prices, notes


def _requested(words: Mapping[str, Any], found: Mapping[str, Any]) -> PlanRequest:
    """Build the request from the options and from what was found for them."""
    given = {name: value for name, value in words.items() if name in PlanRequest.model_fields}
    read = {
        "lora_rank": words["lora_rank"] or DEFAULT_RANK,
        "cluster_text": words["cluster"] or THIS_MACHINE,
        "fused_loss": words["loss"] == "fused",
        "framework_overhead": words["framework_overhead"] == "on",
        "program_text": words["program"],
    }
    return PlanRequest.model_validate({**given, **read, **found})


def _pinned(text: str | None) -> str | None:
    return None if text in (None, "auto") else str(parse_strategy(text))


def search_request(request: PlanRequest, profile: ModelProfile, *, costs: Costs, profile_of: ProfileOf) -> SearchResult:
    """Search the plans of a request; where none fits, with what would."""

    def shorter(length: int) -> ModelProfile:
        return profile_of(request.model, seq_len=length, compiled=request.fuses)

    return search_and_advise(
        profile,
        request.workload,
        request.cluster,
        request.pins,
        costs=costs,
        shorter=shorter if profile.seq_len else None,
        any_plan=request.any_plan,
        saves_memory=not is_config(request.model),  # ``train`` takes a config's options as they are
        command=lambda options, _: request.command(options),
    )


def plan_file_text(plan_toml: str, request: PlanRequest) -> str:
    """Return a plan file: the plan, and its request as a table ``[question]``, which `read_plan` ignores."""
    import tomli_w

    question = request.model_dump(mode="json", exclude_none=True, by_alias=True)
    return plan_toml + "\n" + tomli_w.dumps({"question": question})


def is_config(model: str | None) -> bool:
    """Return whether a MODEL argument is a config file of ``train``."""
    return model is not None and model.lower().endswith(".toml")


def _config_batch(words: Mapping[str, Any], cluster: ClusterSpec) -> int | None:
    """Return the global batch of a config that names its parts; ``None`` where it names none."""
    if "grad_accum" not in words or not (words["grad_accum"] or words["micro_batch"]):
        return None
    strategy = None if words["strategy"] is None else parse_strategy(words["strategy"])
    ranks = cluster.world_size // (1 if strategy is None else strategy.tp * strategy.pp * strategy.cp)
    return max(1, ranks) * (words["micro_batch"] or 1) * (words["grad_accum"] or 1)


def tried(problems: list[str], read: Callable[[], FoundT]) -> FoundT | None:
    """Return the result of ``read``; ``None`` if it raises, with its problems appended."""
    try:
        return read()
    except UserError as error:
        problems += error.problems
    return None


def find_cluster(text: str | None, device: str = "auto", nproc: int | None = None) -> ClusterSpec:
    """The cluster of a ``--cluster`` text or file; without one this machine, of which a config may take a part."""
    if text is not None:
        from shardwise.hardware.parse_cluster import parse_cluster

        return parse_cluster(text)
    from shardwise.environment import visible_devices
    from shardwise.hardware.cluster import detect

    return detect(device, nproc, visible=visible_devices())


def _prices(path: Path) -> Prices:
    from shardwise.hardware.gpus import gpu_names

    return read_prices(path, gpu_names())


def _profile(words: Mapping[str, Any], program: ProgramTraits, profile_of: ProfileOf) -> tuple[ModelProfile, list[str]]:
    """Build the model's profile; also notes.

    Without a given length, the usual or the longest supported one is used, and noted.
    """
    lengths = [words["seq_len"]] if words["seq_len"] is not None else [USUAL_LENGTH, *SHORTER]
    before: list[str] = []
    fuses = words["compiled"] or program.fused_kernels
    for length in lengths:
        try:
            profile = profile_of(words["model"], seq_len=length, compiled=fuses)
        except UserError as error:
            if length == lengths[-1] or list(error.problems) == before:
                raise  # an error unrelated to the length is not repeated five times
            before = list(error.problems)
            continue
        break
    longest = profile.max_seq_len
    if words["seq_len"] is None and profile.seq_len is not None and longest is not None and profile.seq_len > longest:
        profile = profile_of(words["model"], seq_len=longest, compiled=fuses)
    notes = []
    if words["seq_len"] is None and profile.seq_len is not None:
        notes.append(f"--seq-len was not given: {profile.seq_len} tokens")
    return profile, notes
