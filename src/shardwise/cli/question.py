"""The question of ``shardwise plan``: read off the command line, checked at once, kept beside its plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.cost.link_calibration import CalibrationFile, covers
from shardwise.cost.price import Prices, price_of, read_prices
from shardwise.document import read_json, read_toml
from shardwise.errors import PlanError, UserError, did_you_mean
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.plan import Plan, Precision, Recompute
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import OptimizerName, Workload
from shardwise.run.calibration import read_links
from shardwise.search.candidate import Pins
from shardwise.search.problem import unknown_links

USUAL_LENGTH = 4096
SHORTER = (2048, 1024, 512, 128)
LOSSES = ("plain", "fused")
THIS_MACHINE = "this machine"
DEFAULT_RANK = 16


class Asked(BaseModel):
    """What was asked, with every default filled in: enough to ask again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    cluster: ClusterSpec
    cluster_text: str
    seq_len: int | None = None
    global_batch: int = Field(ge=1)
    tokens: float | None = None
    optimizer: OptimizerName = "adamw"
    optimizer_in_backward: bool = False
    lora_rank: int = Field(default=16, ge=1)
    lora_targets: tuple[str, ...] = ()
    compiled: bool = False
    fused_loss: bool = False
    loss_chunks: int = Field(default=1, ge=1)
    framework_overhead: bool = True
    strategy: str | None = None
    micro_batch: int | None = None
    recompute: Recompute | None = None
    precision: Precision | None = None
    calibration: CalibrationFile | None = None

    @property
    def workload(self) -> Workload:
        """For the costs."""
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
        )

    @property
    def pins(self) -> Pins:
        """What was fixed by hand."""
        return Pins(
            strategy=None if self.strategy is None else parse_strategy(self.strategy),
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            precision=self.precision,
            options=self._options,
        )

    @property
    def _options(self) -> dict[str, Any]:
        chunks = {"loss_chunks": self.loss_chunks} if self.loss_chunks > 1 else {}
        return chunks | ({"optimizer_in_backward": True} if self.optimizer_in_backward else {})

    def command(self, changes: Mapping[str, str | None]) -> str:
        """The command line that asks this with ``changes``: options and their values, ``None`` for a flag."""
        given: dict[str, str | None] = {
            "--cluster": None if self.cluster_text == THIS_MACHINE else self.cluster_text,
            "--seq-len": _text(self.seq_len),
            "--global-batch": str(self.global_batch),
            "--tokens": None if self.tokens is None else f"{self.tokens:g}",
            "--strategy": self.strategy,
            "--micro-batch": _text(self.micro_batch),
            "--recompute": self.recompute,
            "--precision": self.precision,
            "--optimizer": None if self.optimizer == "adamw" else self.optimizer,
            "--lora-rank": None if self.lora_rank == DEFAULT_RANK else str(self.lora_rank),
            "--lora-targets": ",".join(self.lora_targets) or None,
            "--loss": "fused" if self.fused_loss else None,
            "--loss-chunks": None if self.loss_chunks == 1 else str(self.loss_chunks),
            "--framework-overhead": None if self.framework_overhead else "off",
        }
        flags = {"--compile": self.compiled, "--optimizer-in-backward": self.optimizer_in_backward}
        values = {**given, **{name: value for name, value in changes.items() if value is not None}}
        words = [word for name, value in values.items() if value is not None for word in (name, value)]
        words += [name for name, there in flags.items() if there or name in changes]
        return shlex.join(["shardwise", "plan", self.model, *words])


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


class Words(BaseModel):
    """The command's own words, not yet checked; ``None`` is left out."""

    model_config = ConfigDict(frozen=True)

    model: str
    cluster: str | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    tokens: str | None = None
    strategy: str | None = None
    micro_batch: int | None = None
    recompute: str | None = None
    precision: str | None = None
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False
    lora_rank: int | None = None
    lora_targets: str | None = None
    compiled: bool = False
    loss: str = "plain"
    loss_chunks: int = 1
    framework_overhead: str = "on"
    price: Path | None = None
    calibration: Path | None = None
    output: Path | None = None


def read_words(words: Words) -> tuple[Asked, ModelProfile, Prices, list[str]]:
    """Check all words, look the model and the cluster up; also what was filled in, in words.

    Raises:
        UserError: every word that cannot be, at once.
    """
    problems = _bad_choices(words) + _unwritable(words.output)
    tokens, cluster, prices, profile, strategy = None, None, Prices(), None, None
    try:
        tokens = None if words.tokens is None else read_count(words.tokens)
    except UserError as error:
        problems += error.problems
    try:
        strategy = None if words.strategy in (None, "auto") else str(parse_strategy(str(words.strategy)))
    except PlanError as error:
        problems += error.problems
    try:
        cluster = find_cluster(words.cluster)
    except UserError as error:
        problems += error.problems
    try:
        prices = Prices() if words.price is None else _prices(words.price)
    except UserError as error:
        problems += error.problems
    told: list[str] = []
    try:
        profile, told = _profile(words)
    except UserError as error:
        problems += error.problems
    targets = tuple(part.strip() for part in (words.lora_targets or "").split(",") if part.strip())
    if profile is not None and strategy is not None:
        problems += _adapter_problems(profile, strategy, targets)
    links = None
    if words.calibration is not None and cluster is not None:
        try:
            links, about = read_links(words.calibration, cluster)
            told += about
        except UserError as error:
            problems += error.problems
    if problems or cluster is None or profile is None:
        raise UserError(*problems)
    told += _left_out(words, profile, cluster, links)
    if (hour := price_of(prices.hour, cluster.device_name)) is not None:
        cluster = cluster.model_copy(update={"price_per_device_hour": hour})
    batch = words.global_batch
    if batch is None:
        batch = cluster.world_size * (words.micro_batch or 1)
        told.append(f"--global-batch was not given: {batch}, {words.micro_batch or 1} for each device")
    asked = Asked.model_validate(
        {
            **words.model_dump(include=_KEPT),
            "lora_rank": words.lora_rank or DEFAULT_RANK,
            "lora_targets": targets,
            "cluster": cluster,
            "cluster_text": words.cluster or THIS_MACHINE,
            "seq_len": profile.seq_len,
            "global_batch": batch,
            "tokens": tokens,
            "fused_loss": words.loss == "fused",
            "framework_overhead": words.framework_overhead == "on",
            "strategy": strategy,
            "calibration": links,
        }
    )
    return asked, profile, prices, told


_KEPT = {"model", "micro_batch", "recompute", "precision", "optimizer", "optimizer_in_backward", "compiled"} | {
    "loss_chunks"
}


def _adapter_problems(profile: ModelProfile, strategy: str, targets: tuple[str, ...]) -> list[str]:
    """What is wrong with the adapters that were asked for."""
    from shardwise.model.lora import with_adapters

    try:
        with_adapters(profile, parse_strategy(strategy).adapter, targets=targets)
    except PlanError as error:
        return list(error.problems)
    return []


def _bad_choices(words: Words) -> list[str]:
    choices: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("--recompute", words.recompute, get_args(Recompute)),
        ("--precision", words.precision, get_args(Precision)),
        ("--optimizer", words.optimizer, tuple(OPTIMIZERS)),
        ("--loss", words.loss, LOSSES),
        ("--framework-overhead", words.framework_overhead, ("on", "off")),
    ]
    return choice_problems(choices)


def choice_problems(choices: list[tuple[str, str | None, tuple[str, ...]]]) -> list[str]:
    """A line for each option, value and known values where the value is given and not known."""
    return [
        f"{option} '{value}' must be one of {', '.join(known)}{did_you_mean(value, known)}"
        for option, value, known in choices
        if value is not None and value not in known
    ]


def _left_out(words: Words, profile: ModelProfile, cluster: ClusterSpec, links: CalibrationFile | None) -> list[str]:
    """What was given and has no effect, or whose effect is not known."""
    told = []
    adapters = {"--lora-rank": words.lora_rank, "--lora-targets": words.lora_targets}
    if words.strategy is None or "lora" not in words.strategy:
        given_to = [f"{option} {value}" for option, value in adapters.items() if value is not None]
        told += [f"{text} counts only where adapters are proposed; pin --strategy fsdp+lora" for text in given_to]
    if profile.seq_len is None:
        given = {"--seq-len": words.seq_len, "--tokens": words.tokens}
        unread = [f"{option} {value}" for option, value in given.items() if value is not None]
        told += [f"{words_given} has no effect: {profile.name} does not read tokens" for words_given in unread]
    name = "a CPU" if cluster.gpu is None else cluster.gpu.name
    has = set() if cluster.gpu is None else set(cluster.gpu.peak_flops)
    if words.precision == "fp8" and cluster.device == "cpu":
        told.append("--precision fp8: PyTorch has no fp8 matrix products on a CPU; memory is that of bf16")
    elif words.precision is not None and has and words.precision not in has:
        usual = ", ".join(one for one in get_args(Precision) if one in has)
        told.append(f"--precision {words.precision}: {name} has no units for it, so speed is unknown; it has {usual}")
    measured = links is not None and covers(links, cluster)
    if cluster.device == "cuda" and not measured and (unknown := unknown_links(cluster)):
        told.append(
            f"the speed of the {' and the '.join(unknown)} is unknown, and so is that of every plan; give it as in "
            f"--cluster {cluster.nodes}x{cluster.devices_per_node}x{cluster.device_name}@pcie4/eth25"
        )
    return told


def read_count(text: str) -> float:
    """``1e12``, ``300B`` or ``1.5T`` as a number.

    Raises:
        UserError: it is none, or not above 0.
    """
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    digits, unit = (text[:-1], units[text[-1].lower()]) if text[-1:].lower() in units else (text, 1.0)
    try:
        number = float(digits.replace("_", "")) * unit
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"--tokens '{text}' must be a positive number; write it as 1e12, 300B or 1.5T")
    return number


def find_cluster(text: str | None) -> ClusterSpec:
    """The cluster of a ``--cluster`` text or file; this machine without one."""
    if text is not None:
        from shardwise.hardware.parse_cluster import parse_cluster

        return parse_cluster(text)
    from shardwise.environment import visible_devices
    from shardwise.hardware.cluster import detect

    return detect(visible=visible_devices())


def _prices(path: Path) -> Prices:
    from shardwise.hardware.gpus import gpu_names

    return read_prices(path, gpu_names())


def _profile(words: Words) -> tuple[ModelProfile, list[str]]:
    """The model's profile; where no length is given, the usual one or the longest that it can take, and it is said."""
    from shardwise.model.load_model import load_profile

    lengths = [words.seq_len] if words.seq_len is not None else [USUAL_LENGTH, *SHORTER]
    before: list[str] = []
    for length in lengths:
        try:
            profile = load_profile(words.model, seq_len=length, compiled=words.compiled)
        except UserError as error:
            if length == lengths[-1] or list(error.problems) == before:
                raise  # a mistake that has nothing to do with the length is not made five times
            before = list(error.problems)
            continue
        break
    longest = profile.max_seq_len
    if words.seq_len is None and profile.seq_len is not None and longest is not None and profile.seq_len > longest:
        profile = load_profile(words.model, seq_len=longest, compiled=words.compiled)
    told = []
    if words.seq_len is None and profile.seq_len is not None:
        told.append(f"--seq-len was not given: {profile.seq_len} tokens")
    return profile, told


def _unwritable(path: Path | None) -> list[str]:
    """Why a file cannot be written; looked at before the search is made for it."""
    why = ""
    if path is None:
        return []
    try:
        if path.is_dir():
            why = "it is a folder"
        elif not path.parent.is_dir():
            why = f"there is no folder '{path.parent}'"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = "permission denied"
    except OSError as error:
        why = error.strerror or str(error)
    return [f"-o '{path}' cannot be written: {why}; choose another file"] if why else []


def write_plan_file(path: Path, plan_toml: str, asked: Asked) -> None:
    """The plan, and the question in a table ``[question]`` of the same file, which `read_plan` passes over.

    Raises:
        UserError: the file cannot be written.
    """
    import tomli_w

    question = asked.model_dump(mode="json", exclude_none=True, by_alias=True)
    try:
        path.write_text(plan_toml + "\n" + tomli_w.dumps({"question": question}))
    except OSError as error:
        raise UserError(f"-o '{path}' cannot be written: {error.strerror}; choose another file") from None


def read_question(path: Path, plan: Plan) -> Asked:
    """The question of a plan file, ``plan`` being the file's plan.

    Raises:
        UserError: the file has none, it is damaged, or the plan is no answer to it.
    """
    data: dict[str, Any] = read_json(path) if path.suffix == ".json" else read_toml(path)
    if "question" not in data:
        raise UserError(
            f"plan '{path}' has no [question] table, so it cannot be explained; "
            f"make it with: shardwise plan MODEL -o {path}"
        )
    try:
        asked = Asked.model_validate(data["question"])
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'it'}: {_rule(item)}" for item in error.errors()]
        raise UserError(*(f"plan '{path}', table [question]: {line}; {AGAIN}" for line in lines)) from None
    world, batch, length = plan.dims.world_size, plan.global_batch, plan.seq_len or asked.seq_len
    wrong = []
    if world != asked.cluster.world_size:
        wrong.append(f"dims ({plan.dims}) have {world} ranks, and the question's cluster {asked.cluster.world_size}")
    if batch is not None and batch != asked.global_batch:
        wrong.append(f"{plan.batch_equation()}, and the question's global batch is {asked.global_batch}")
    if length != asked.seq_len:
        wrong.append(f"seq_len is {plan.seq_len}, and the question's {asked.seq_len}")
    if wrong:
        raise UserError(*(f"plan '{path}': {line}; {AGAIN}" for line in wrong))
    return asked


AGAIN = "make the file again with shardwise plan MODEL -o FILE"


def _rule(item: Any) -> str:
    plain = {"missing": "is missing", "extra_forbidden": "no such key", "model_type": "must be a table"}
    return plain.get(item["type"]) or f"{item['msg'].replace('Input should', 'must')}, got {item['input']!r:.60}"
