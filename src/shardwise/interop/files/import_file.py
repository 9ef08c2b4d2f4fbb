"""Import a trainer's configuration file: find whose it is, read its keys, and make a plan and a config of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwise.document import read_json, read_toml
from shardwise.errors import PlanError
from shardwise.interop.deepspeed.import_config import Imported, read_document
from shardwise.interop.files.accelerate_file import ACCELERATE_RULES, finish_accelerate
from shardwise.interop.files.axolotl_yaml import AXOLOTL_RULES, finish_axolotl
from shardwise.interop.files.hf_arguments import HF_RULES, finish_arguments
from shardwise.interop.files.key_table import Reading, Rules, read_keys
from shardwise.interop.files.llama_factory_yaml import LLAMA_FACTORY_RULES, finish_llama_factory
from shardwise.interop.files.titan_toml import TITAN_RULES, finish_titan
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import DeviceType, Plan, axis_problems
from shardwise.plan.strategy import parse_strategy
from shardwise.train.config import Config, LoraTable
from shardwise.train.config_problems import explain


@dataclass(frozen=True)
class FileFormat:
    """Files of a tool: its keys, and what several determine together; ``known_by`` are keys that only it has."""

    tool: str
    rules: Rules
    finish: Callable[[Reading, Mapping[str, Any]], None]
    suffixes: tuple[str, ...]
    known_by: tuple[str, ...]


YAML, JSON = (".yaml", ".yml"), (".json",)
FORMATS = {
    "accelerate": FileFormat(
        "Accelerate", ACCELERATE_RULES, finish_accelerate, YAML + JSON, ("distributed_type", "compute_environment")
    ),
    "axolotl": FileFormat("axolotl", AXOLOTL_RULES, finish_axolotl, YAML, ("base_model", "sequence_len")),
    "llama-factory": FileFormat(
        "LLaMA-Factory",
        LLAMA_FACTORY_RULES,
        finish_llama_factory,
        YAML + JSON,
        ("model_name_or_path", "finetuning_type"),
    ),
    "trainer": FileFormat(
        "TrainingArguments", HF_RULES, finish_arguments, JSON + YAML, ("output_dir", "per_device_train_batch_size")
    ),
    "torchtitan": FileFormat("torchtitan", TITAN_RULES, finish_titan, (".toml",), ("job", "training", "parallelism")),
}
"""Tools by name; the first whose key is in a file is the file's. Else it is a DeepSpeed configuration."""


def format_of(path: Path, values: Mapping[str, Any]) -> str:
    """Return the name of the tool whose file it is; ``deepspeed`` for JSON of no other."""
    for name, one in FORMATS.items():
        if path.suffix in one.suffixes and any(key in values for key in one.known_by):
            return name
    if path.suffix in JSON:
        return "deepspeed"
    names = ", ".join(["deepspeed", *FORMATS])
    raise PlanError(f"'{path}' has no key that says whose it is; name the tool with --tool: {names}")


def read_file(path: Path) -> dict[str, Any]:
    """Read a table of YAML, TOML or JSON, in which no key may occur twice.

    Raises:
        PlanError: it is missing, of another kind, or not a table.
    """
    if path.suffix in JSON:
        return read_document(path)
    if path.is_dir():
        raise PlanError(f"'{path}' is a folder; give the path of a configuration file")
    if path.suffix not in (*YAML, ".toml"):
        raise PlanError(f"'{path}' is none of .json, .yaml and .toml; give a configuration file of a trainer")
    try:
        found = read_toml(path) if path.suffix == ".toml" else read_json(path, _parse_yaml)
    except OSError as error:
        raise PlanError(f"'{path}': {error.strerror or error}; give the path of a configuration file") from None
    except ValueError as error:
        raise PlanError(f"'{path}' is not readable: {error}; repair it there") from None
    if found is None or found == {}:
        raise PlanError(f"'{path}' is empty; give the configuration file of a trainer")
    if not isinstance(found, dict):
        raise PlanError(f"'{path}' is a {type(found).__name__}, not a table of keys")
    return found


def _parse_yaml(text: str) -> Any:
    """Parse YAML without tags of Python's, and without keys that occur twice."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        """Loader that refuses a key that occurs twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value]
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise ValueError(f"it says '{twice[0]}' twice in one table")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        shown = str(error).replace('in "<unicode string>", ', "at ")
        raise ValueError(" ".join(shown.split())) from None


def import_file(
    tool: str,
    values: Mapping[str, Any],
    *,
    ranks: int | None,
    device: DeviceType | None = None,
    here: DeviceType = "cpu",
    given: Mapping[str, Any] | None = None,
) -> Imported:
    """Convert the keys of a file of ``tool`` to a plan and keys of a config; the other arguments as `import_deepspeed`.

    Raises:
        PlanError: lists everything that is unknown, or not run.
    """
    form = FORMATS[tool]
    reading = Reading(form.tool)
    read_keys(reading, values, form.rules)
    try:
        form.finish(reading, values)
    except (ValueError, TypeError, AttributeError) as error:
        reading.problems.append(f"a value is not of the kind that {form.tool} has there: {error}")
    reading.plan |= given or {}
    reading.keys |= {"data.seq_len": given["seq_len"]} if given and "seq_len" in given else {}
    ranks_from = "as asked for"
    if ranks is None and reading.ranks is not None:
        ranks, ranks_from = reading.ranks, "from the file"
    elif reading.ranks not in (None, ranks):
        ranks_from += f"; {reading.ranks} in the file"
    if ranks is None:
        reading.problems.append("the file does not give the number of ranks; give --nproc or --cluster")
    if reading.problems:
        reading.problems += _other_tool(tool, values)
        raise PlanError(*dict.fromkeys(reading.problems))
    assert ranks is not None
    plan = _plan(reading, ranks, device or reading.plan.get("device") or here)
    _complete(reading, plan)
    if problems := config_problems(reading.keys):
        raise PlanError(*problems)
    return Imported(
        plan,
        ranks_from,
        reading.keys,
        reading.taken,
        [],
        reading.not_taken,
        reading.no_effect,
        reading.open,
        reading.means,
    )


def _other_tool(tool: str, values: Mapping[str, Any]) -> list[str]:
    """Return a hint for a file that another tool's keys mark, and none of ``tool``'s."""
    marked = [name for name, form in FORMATS.items() if any(key in values for key in form.known_by)]
    if not marked or tool in marked:
        return []
    return [f"the file has keys of {FORMATS[marked[0]].tool}, not of {FORMATS[tool].tool}; try --tool {marked[0]}"]


def _plan(reading: Reading, ranks: int, device: DeviceType) -> Plan:
    """Build the plan of what was read.

    Raises:
        PlanError: the strategy, the degrees or the batch are impossible.
    """
    read = dict(reading.plan)
    strategy = parse_strategy(read.pop("strategy", "ddp"))
    degrees = {name: read.pop(name, None) for name in ("dp_replicate", "dp_shard")}
    dims = dims_for(strategy, ranks, **degrees)
    total, micro = read.pop("global_batch", None), read.get("micro_batch")
    if total is not None and micro is not None:
        if total % (micro * dims.dp):
            raise PlanError(f"global batch {total} is not a multiple of micro batch {micro} × dp {dims.dp}")
        read["grad_accum"] = total // (micro * dims.dp)
    table = {key.partition(".")[2]: value for key, value in reading.keys.items() if key.startswith("lora.")}
    try:
        adapter = LoraTable.model_validate(table).options if strategy.adapter != "none" else None
    except ValidationError as error:
        raise PlanError(*(f"lora.{explain(item, LoraTable)}" for item in error.errors())) from None
    options = {key.partition(".")[2]: value for key, value in reading.keys.items() if key.startswith("parallel.")}
    read |= {"device": device, "seq_len": reading.keys.get("data.seq_len"), "adapter": adapter, **options}
    in_backward = reading.keys.get("optimizer.in_backward", False)
    try:
        plan = Plan.model_validate(
            {**read, "strategy": str(strategy), "dims": dims, "optimizer_in_backward": in_backward}
        )
    except ValidationError as error:
        raise PlanError(*(explain(item, Plan) for item in error.errors())) from None
    if problems := axis_problems(plan):
        raise PlanError(*problems)
    return plan


def _complete(reading: Reading, plan: Plan) -> None:
    """Add the plan's own keys to the config, so that it trains alone, too."""
    keys = reading.keys
    keys |= {"parallel.strategy": plan.strategy, "parallel.precision": plan.precision}
    keys |= {"parallel.recompute": plan.recompute} if plan.recompute != "none" else {}
    keys |= {"parallel.nproc": plan.dims.world_size, "parallel.device": plan.device}
    if plan.micro_batch is not None:
        keys |= {"train.micro_batch": plan.micro_batch, "train.grad_accum": plan.grad_accum}


def config_document(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a config."""
    document: dict[str, Any] = {}
    for key, value in keys.items():
        table, _, name = key.partition(".")
        document.setdefault(table, {})[name] = value
    return document


def config_problems(keys: Mapping[str, Any]) -> list[str]:
    """List what ``shardwise train`` would refuse of the keys; what is left to the user counts as set."""
    document = config_document(keys)
    model, data = document.setdefault("model", {}), document.setdefault("data", {})
    if "config" not in model:
        model["factory"] = "model:build"
    if "path" not in data and "sources" not in data:
        data["path"] = "data"
    data.setdefault("seq_len", 1)
    train = document.setdefault("train", {})
    if not train.keys() & {"steps", "epochs"}:
        train["steps"] = 1
    try:
        Config.model_validate(document)
    except ValidationError as error:
        return [explain(item, Config) for item in error.errors()]
    except PlanError as error:
        return list(error.problems)
    return []
