"""Import a DeepSpeed configuration as a plan and config keys; explain what is not supported.

No key is dropped: every key of the file is in one row of `Imported`, or in the message of a `PlanError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwise.document import read_json
from shardwise.errors import ConfigError, PlanError, did_you_mean
from shardwise.interop.deepspeed.batch_sizes import BATCH, solve_batch
from shardwise.interop.deepspeed.keys import AUTO, TABLES, Key
from shardwise.interop.deepspeed.optimizer_section import FileKey, ImportedTraining, read_training
from shardwise.plan.deepspeed_stages import deepspeed_config
from shardwise.plan.dims import dims_for
from shardwise.plan.parallel_options import FULL_PARAMETERS, OPTION_SPECS
from shardwise.plan.plan import DeviceType, Plan, axis_problems, plan_problems
from shardwise.plan.strategy import Engine, Strategy, parse_strategy

BESIDE = "shardwise"
"""Table of a configuration in which `shardwise export` stores what DeepSpeed has no keys for; DeepSpeed ignores
it."""
BESIDE_KEYS = frozenset(Plan.model_fields) - {
    "schema_version",
    "dims",
    "micro_batch",
    "grad_accum",
    "nvme_path",
    "optimizer_in_backward",
    "precision",
    "reason",
    "stage_blocks",
    *(name for name, spec in OPTION_SPECS.items() if spec.requires in ("+tp", "+pp", FULL_PARAMETERS)),
}


@dataclass(frozen=True)
class Imported:
    """Imported plan, and a row for each key of the file.

    ``taken`` names the part of the plan or the config key that a key became; ``same`` has keys of DeepSpeed's
    internals for which Shardwise gives DeepSpeed the same value; ``not_taken`` those for which it does not;
    ``no_effect`` keys that only print or record; ``open`` keys to be set by hand. ``keys`` go into a config file,
    ``table.key`` → value. ``means`` are lines where the file does something else than it seems to say.
    """

    plan: Plan
    ranks_from: str
    keys: dict[str, Any]
    taken: list[FileKey]
    same: list[FileKey]
    not_taken: list[FileKey]
    no_effect: list[FileKey]
    open: list[FileKey]
    means: list[str] = field(default_factory=list)


def read_document(path: Path) -> dict[str, Any]:
    """Read the JSON of a file, in which no key may occur twice.

    Raises:
        PlanError: it is missing, not JSON, not a table, or has a duplicate key.
    """
    twice: list[str] = []

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    try:
        found = read_json(path, partial(json.loads, object_pairs_hook=table))
    except OSError as error:
        raise PlanError(f"'{path}': {error.strerror or error}; give the path of a DeepSpeed configuration") from None
    except ValueError as error:
        raise PlanError(
            f"'{path}' is not JSON: {error}; repair it there (comments, which DeepSpeed reads, must go)"
        ) from None
    if not isinstance(found, dict):
        raise PlanError(f"'{path}' is a {type(found).__name__}; a DeepSpeed configuration is a table {{...}}")
    if twice:
        raise PlanError(*(f"'{path}' says '{name}' twice in one table; remove one" for name in twice))
    return found


def import_deepspeed(
    config: Mapping[str, Any],
    *,
    ranks: int | None,
    device: DeviceType | None = None,
    here: DeviceType = "cpu",
    engine: Engine | None = None,
    given: Mapping[str, Any] | None = None,
) -> Imported:
    """Convert a DeepSpeed configuration to a plan.

    Args:
        config: the file's table.
        ranks: number of ranks; ``None`` if the file's three batch keys determine it.
        device: their device type; if ``None``, the file's own (see ``BESIDE``), else ``here``.
        here: this machine's device type.
        engine: ``torch`` for the same plan on PyTorch; if ``None``, the file's own, else DeepSpeed.
        given: ``seq_len`` and ``recompute``, which DeepSpeed has no keys for.

    Raises:
        PlanError: lists everything that is wrong, contradictory, unknown or not supported.
    """
    reader = _Reader(config)
    reader.walk("", config)
    training = read_training(config)
    reader.problems += training.problems
    beside = reader.beside(device, given or {})
    strategy = reader.strategy(engine, beside)
    precision = reader.precision()
    batch, ranks_from = reader.batch(ranks)
    fields: dict[str, Any] = {"device": device or here, "precision": precision, **beside, **(given or {})}
    plan = None
    if strategy is not None and batch is not None:
        micro, accumulation, world = batch
        fields |= {"strategy": str(strategy), "dims": dims_for(strategy, world)}
        fields |= {"micro_batch": micro, "grad_accum": accumulation, "nvme_path": reader.nvme_path}
        try:
            plan = Plan.model_validate(fields)
            reader.problems += _plan_problems(plan)
        except ValidationError as error:
            reader.problems += [f"{BESIDE}.{line}" for line in plan_problems(error)]
    reader.problems += _config_problems(training)
    if reader.problems or plan is None:
        raise PlanError(*dict.fromkeys(reader.problems))
    same, not_taken = _compared(reader.tuning, plan, training)
    return Imported(
        plan=plan,
        ranks_from=ranks_from,
        keys=training.keys,
        taken=reader.taken + training.taken,
        same=same,
        not_taken=not_taken + training.differs,
        no_effect=reader.no_effect + training.no_effect,
        open=reader.open + training.open,
    )


def _plan_problems(plan: Plan) -> list[str]:
    """List the plan's problems, with the fix if its equivalent on PyTorch has none."""
    problems, strategy = axis_problems(plan), plan.parsed
    if problems and strategy.engine == "deepspeed" and (strategy.base != "zero1" or not strategy.offload):
        twin = plan.model_copy(update={"strategy": str(strategy.model_copy(update={"engine": "torch"}))})
        if not strategy.nvme and not axis_problems(twin):
            return [f"{problem}; or import it with --engine torch" for problem in problems]
    return problems


@dataclass
class _Reader:
    """Reader of a file, table by table, that records problems and the use of each key."""

    config: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    taken: list[FileKey] = field(default_factory=list)
    tuning: list[tuple[FileKey, Key]] = field(default_factory=list)
    no_effect: list[FileKey] = field(default_factory=list)
    open: list[FileKey] = field(default_factory=list)
    nvme_path: str | None = None

    def walk(self, path: str, table: Mapping[str, Any]) -> None:
        """Sort every key of a table; ``taken`` ones are read by the other methods."""
        known = TABLES[path]
        for name, value in table.items():
            where = f"{path}.{name}" if path else name
            key = known.get(name)
            if key is None:
                of = f"DeepSpeed's '{path}'" if path else "DeepSpeed's"
                self.problems.append(
                    f"{where}: no such key of {of}{did_you_mean(name, known)}; correct it or remove it"
                )
            elif isinstance(value, dict) and where in TABLES and where != BESIDE:
                self.walk(where, value)
            elif key.fate == "taken":
                self._auto_or_table(where, value)
            elif key.fate in ("not run", "removed") and not key.is_off(value):
                gone = "DeepSpeed 0.19 has removed it: " if key.fate == "removed" else ""
                self.problems.append(f"{where} is {_short(value)}, which Shardwise does not run: {gone}{key.why}")
            elif key.fate == "tuning":
                self.tuning.append((FileKey(where, value, key.why), key))
            else:
                gone = "off; DeepSpeed 0.19 refuses a file that has this key at all"
                why = gone if key.fate == "removed" else "off" if key.fate == "not run" else key.why
                self.no_effect.append(FileKey(where, value, why))

    def _auto_or_table(self, where: str, value: Any) -> None:
        table = where in TABLES and where not in (BESIDE, "optimizer", "scheduler")
        if table and value is not None and not (where == "zero_optimization" and isinstance(value, bool)):
            self.problems.append(f"{where} must be a table, got {_short(value)}")
        if value == "auto" and where in AUTO and where != "gradient_clipping":
            self.problems.append(
                f'{where} is "auto", which only Hugging Face\'s Trainer fills in; put what its TrainingArguments has: '
                f"{AUTO[where]}"
            )

    def _table(self, *path: str) -> Mapping[str, Any]:
        found: Any = self.config
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def beside(self, device: DeviceType | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Read the file's table for Shardwise, which must not contradict arguments or other keys."""
        table = self.config.get(BESIDE, {})
        if not isinstance(table, Mapping):
            self.problems.append(f"{BESIDE} must be a table of a plan's keys, got {_short(table)}")
            return {}
        for name in [name for name in table if name not in BESIDE_KEYS]:
            why = "DeepSpeed's own keys set it" if name in Plan.model_fields else "no such key of a plan"
            self.problems.append(f"{BESIDE}.{name}: {why}{did_you_mean(name, BESIDE_KEYS)}; remove it")
        words = {**given, **({} if device is None else {"device": device})}
        for name, value in words.items():
            if name in table and table[name] != value:
                self.problems.append(f"{BESIDE}.{name} is {table[name]!r}, but {value!r} is asked for; take one out")
        self.taken += [FileKey(f"{BESIDE}.{name}", value, name) for name, value in table.items()]
        return {name: value for name, value in table.items() if name in BESIDE_KEYS}

    def strategy(self, engine: Engine | None, beside: dict[str, Any]) -> Strategy | None:
        """Derive the strategy from stage and offload.

        A strategy that the file names must be the same.
        """
        problems_before = len(self.problems)
        stage = self._stage()
        state, weights = self._place("offload_optimizer"), self._place("offload_param")
        flags = None if stage is None else self._flags(stage, state, weights)
        if stage is None or flags is None or len(self.problems) > problems_before:
            return None
        named = self._named(beside.pop("strategy", None))
        torch = engine == "torch" if engine is not None else named is not None and named.engine == "torch"
        base = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp" if torch else "zero3"}[stage]
        head = base if torch or stage == 0 else f"deepspeed-{base}"
        adapter = [named.adapter] if named is not None and named.adapter != "none" else []
        try:
            strategy = parse_strategy("+".join([head, *flags, *adapter]))
        except PlanError as error:
            self.problems += error.problems
            return None
        if named is not None and named.model_copy(update={"engine": strategy.engine}) != strategy:
            self.problems.append(
                f"{BESIDE}.strategy is '{named}', but zero_optimization says {strategy}; correct one of them"
            )
        return strategy

    def _named(self, text: Any) -> Strategy | None:
        if text is None:
            return None
        try:
            return parse_strategy(str(text))
        except PlanError as error:
            self.problems += [f"{BESIDE}.{problem}" for problem in error.problems]
            return None

    def _stage(self) -> int | None:
        found = self.config.get("zero_optimization", {})
        if isinstance(found, bool):
            self.taken.append(
                FileKey("zero_optimization", found, f"stage {int(found)}: true is DeepSpeed's old form of 1")
            )
            return int(found)
        stage = self._table("zero_optimization").get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            self.problems.append(f"zero_optimization.stage is {_short(stage)}; it must be 0, 1, 2 or 3")
            return None
        if "stage" in self._table("zero_optimization"):
            words = ("ddp on PyTorch: stage 0 is plain data parallel", "zero1", "zero2", "zero3")
            self.taken.append(FileKey("zero_optimization.stage", stage, f"strategy {words[stage]}"))
        return int(stage)

    def _place(self, name: str) -> str:
        """Return ``none``, ``cpu`` or ``nvme``; understands the deprecated switches."""
        zero, where = self._table("zero_optimization"), f"zero_optimization.{name}"
        old = "cpu_offload" if name == "offload_optimizer" else "cpu_offload_param"
        if old in zero:
            self.taken.append(FileKey(f"zero_optimization.{old}", zero[old], f"the old form of {name}.device"))
            if not isinstance(zero[old], bool | None):
                self.problems.append(f"zero_optimization.{old} is {_short(zero[old])}; it must be true or false")
            if name in zero:
                self.problems.append(f"zero_optimization has both '{old}' and '{name}'; keep '{name}'")
        table = self._table("zero_optimization", name)
        device = table.get("device", "cpu" if zero.get(old) is True else "none")
        if device is None or device not in ("none", "cpu", "nvme"):
            self.problems.append(f"{where}.device is {_short(device)}; it must be none, cpu or nvme")
            return "none"
        if "device" in table:
            self.taken.append(
                FileKey(f"{where}.device", device, {"none": "the device", "cpu": "+offload"}.get(device, "+nvme"))
            )
        path = table.get("nvme_path")
        if device == "nvme":
            if not isinstance(path, str):
                self.problems.append(f"{where}.nvme_path is {_short(path)}; name a folder on the drive, in quotes")
            elif self.nvme_path not in (None, path):
                self.problems.append(
                    f"{where}.nvme_path is '{path}', and the optimizer's is '{self.nvme_path}'; a plan has one folder"
                )
            else:
                self.nvme_path = path
                self.taken.append(FileKey(f"{where}.nvme_path", path, "nvme_path"))
        elif path is not None:
            self.no_effect.append(FileKey(f"{where}.nvme_path", path, f"nothing is on the drive: device is {device}"))
        return str(device)

    def _flags(self, stage: int, state: str, weights: str) -> list[str] | None:
        """Return the strategy words for supported places of optimizer state and weights."""
        where = f"zero_optimization: stage {stage} with the optimizer on '{state}' and parameters on '{weights}'"
        can: dict[tuple[str, str], list[str]] = {("none", "none"): []}
        if stage in (1, 2):
            can["cpu", "none"] = ["offload"]
        elif stage == 3:
            can |= {("cpu", "cpu"): ["offload"], ("nvme", "nvme"): ["nvme"], ("nvme", "cpu"): ["offload", "nvme"]}
        if (state, weights) in can:
            return can[state, weights]
        fix = "take both offload tables out"
        if stage == 0:
            fix = "DeepSpeed offloads only from stage 1 on; set the stage, or " + fix
        elif stage < 3:
            fix = (
                "DeepSpeed offloads parameters and swaps to NVMe only in stage 3; set it, or move the optimizer to cpu"
            )
        elif (state, weights) == ("cpu", "none"):
            fix = (
                "add offload_param with device cpu (deepspeed-zero3+offload), set stage 2, which leaves parameters on "
                "the device, unsharded (deepspeed-zero2+offload), or take offload_optimizer out (deepspeed-zero3)"
            )
        else:
            fix = "Shardwise has cpu and cpu, nvme and nvme, or nvme and cpu; choose one of these"
        self.problems.append(f"{where} is not a plan that Shardwise runs: {fix}")
        return None

    def precision(self) -> str:
        """Return ``bf16``, ``fp16`` or ``fp32``."""
        on = []
        for name in ("bf16", "bfloat16", "fp16"):
            value = self._table(name).get("enabled")
            if isinstance(value, bool):
                proper = "fp16" if name == "fp16" else "bf16"
                self.taken.append(
                    FileKey(f"{name}.enabled", value, f"precision {proper}" if value else f"not {proper}")
                )
                on += [proper] if value else []
            elif value not in (None, "auto"):
                self.problems.append(f"{name}.enabled is {_short(value)}; it must be true or false")
        if len(set(on)) > 1:
            self.problems.append("bf16.enabled and fp16.enabled are both true; switch one off")
        if not on:
            self.taken.append(FileKey("bf16.enabled, fp16.enabled", None, "neither is on: precision fp32"))
        return on[0] if on else "fp32"

    def batch(self, ranks: int | None) -> tuple[tuple[int, int, int] | None, str]:
        """Return micro batch, accumulation and ranks, and the ranks' source; ``None`` on an error."""
        numbers: dict[str, int] = {}
        wrong = False
        for name in BATCH:
            value = self.config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
                numbers[name] = value
            elif value is not None:
                wrong = True
                if value != "auto":
                    self.problems.append(f"{name} is {_short(value)}; it must be an integer of 1 or more")
        if wrong:
            return None, ""
        total, micro, steps = (numbers.get(name) for name in BATCH)
        try:
            solved, why = solve_batch(total, micro, steps, ranks)
        except PlanError as error:
            self.problems += error.problems
            return None, ""
        became = dict(
            zip(BATCH, (f"global batch {solved[0] * solved[1] * solved[2]}", "micro_batch", "grad_accum"), strict=True)
        )
        self.taken += [FileKey(name, value, became[name]) for name, value in numbers.items()]
        return solved, why


def _compared(
    tuning: list[tuple[FileKey, Key]], plan: Plan, training: ImportedTraining
) -> tuple[list[FileKey], list[FileKey]]:
    """Split keys of DeepSpeed's internals into those equal to Shardwise's values, and others."""
    same, other = [], []
    if plan.parsed.engine == "torch":
        return [], [
            FileKey(row.key, row.value, _with("PyTorch runs this plan and has no such key", row.why))
            for row, _ in tuning
        ]
    clip = training.keys.get("optimizer.clip_norm")
    mine = deepspeed_config(plan, clip_norm=clip if isinstance(clip, float) else None)
    for row, key in tuning:
        found: Any = mine
        for name in row.key.replace("bfloat16", "bf16").split("."):
            found = found.get(name, found.get(f"stage3_{name}")) if isinstance(found, dict) else None
        if found is not None and found == row.value:
            same.append(FileKey(row.key, row.value, "the same as Shardwise gives DeepSpeed"))
        elif found is not None:
            other.append(FileKey(row.key, row.value, _with(f"Shardwise gives DeepSpeed {_short(found)}", row.why)))
        elif row.value == key.default and row.value is not None:
            same.append(FileKey(row.key, row.value, "DeepSpeed's default, which Shardwise leaves"))
        else:
            usual = "" if key.default is None else f", {_short(key.default)}"
            other.append(FileKey(row.key, row.value, row.why or f"Shardwise leaves DeepSpeed's default{usual}"))
    return same, other


def _with(first: str, second: str) -> str:
    return f"{first}; {second}" if second else first


def _config_problems(training: ImportedTraining) -> list[str]:
    """List the config file's problems with the keys that are printed for it."""
    from shardwise.train.config import OptimizerTable

    table: dict[str, Any] = {}
    for key, value in training.keys.items():
        head, *rest = key.split(".")
        if head == "optimizer":
            inner = table.setdefault("kwargs", {}) if rest[0] == "kwargs" else table
            inner[rest[-1]] = value
    try:
        OptimizerTable.model_validate(table)
    except ValidationError as error:
        return [
            f"optimizer.{'.'.join(map(str, item['loc']))}: {item['msg']}, got {item['input']!r}"
            for item in error.errors()
        ]
    except ConfigError as error:
        return list(error.problems)
    return []


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
