"""Files of a run in its folder: job, plan and environment at the start, summary at the end."""

from __future__ import annotations

import contextlib
import json
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise.checkpoint.format import saved_steps
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.errors import ConfigError, MachineError
from shardwise.hardware.cpu import cores_here, processor_name
from shardwise.measure.gpu.nvml import NvmlSource
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.report.progress import label_metrics
from shardwise.run.checks import adapter_of
from shardwise.run.job import Job
from shardwise.train.config import Config
from shardwise.train.run_files import RunFile, replace_file
from shardwise.train.tasks.registry import prepare_data

PACKAGES = ("shardwise", "torch", "triton", "transformers", "tokenizers", "datasets", "safetensors", "numpy")
_NODES = 16  # that a report names
_TRAIN_NOTHING = ("export", "log_every", "output", "profile", "profile_ranks", "trackers", "watch")
_SPLIT = ("micro_batch", "grad_accum")
"""Parts of a global batch: another split of the same one trains the same."""
_EVALUATE = ("eval_every", "eval_samples", "generate", "generate_tokens", "metrics")


def keep_job(job: Job) -> Path:
    """Write ``job.json`` and ``plan.toml`` to the run folder; return the path of the former.

    Raises:
        MachineError: they cannot be written.
    """
    output = Path(job.config.train.output)
    file = output / RunFile.JOB
    try:
        file.write_text(job.to_json())
        (output / RunFile.PLAN).write_text(job.plan.to_toml())
    except OSError as error:
        raise MachineError(
            f"'{file}' cannot be written: {error.strerror}; make room, or choose another train.output"
        ) from None
    return file


def environment_facts() -> dict[str, str]:
    """Return versions, system, processor and GPUs of this machine; missing ones are left out.

    They are stored with the run, because a report may be made later and elsewhere. They name no host, user or path.
    """
    facts = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    facts["CPU"] = f"{processor_name()}, {cores_here()} cores for this process"
    machine = NvmlSource().read()
    if machine.gpus:
        names = Counter(gpu.name for gpu in machine.gpus)
        facts["GPU"] = ", ".join(f"{count} × {name}" for name, count in names.items())
        facts["driver"] = machine.driver or "unknown"
    return facts


def write_environment(folder: Path, nodes: Sequence[str] = ()) -> None:
    """Write the current facts to ``folder``; a run that resumes elsewhere replaces them.

    The names of ``nodes`` are written where there are several: a slow one is looked for by its name.

    Raises:
        OSError: the folder cannot be written.
    """
    more = f" and {len(nodes) - _NODES} more" if len(nodes) > _NODES else ""
    shown = {"nodes": f"{len(nodes)}: {', '.join(nodes[:_NODES])}{more}"} if len(nodes) > 1 else {}
    facts = environment_facts() | shown
    replace_file(folder / RunFile.ENVIRONMENT, json.dumps(facts, indent=1))


def finished(config: Config) -> dict[str, Any] | None:
    """Return the summary of this run if it has finished all steps on unchanged data.

    Raises:
        ConfigError: the folder has a run, finished or not, and the config forbids resuming; or it has this run,
            finished under another strategy or precision than requested now; or a finished one of as many steps over
            the same data, trained otherwise.
    """
    output = Path(config.train.output)
    if not config.checkpoint.resume and (
        (output / RunFile.SUMMARY).exists() or saved_steps(folder_of(config.checkpoints))
    ):
        raise ConfigError(
            f"train.output '{config.train.output}' contains a run already and checkpoint.resume is false; "
            "choose another train.output, or set checkpoint.resume=true to resume"
        )
    found = summary_of(config)
    if found is None:
        _refuse_changed(config)
        return None
    summary, spread, trained_on = found
    wanted = spread_of(config)
    other = [
        f"{key} {value} (not {wanted[key]})" for key, value in spread.items() if wanted[key] not in (value, "auto")
    ]
    if other:
        raise ConfigError(
            f"train.output '{config.train.output}' contains this run, finished with {', '.join(other)}; "
            "raise train.steps to continue, or choose another train.output to run it again"
        )
    corpus = prepare_data(config, output / "data", lambda text: None)
    return summary if corpus.fingerprint == trained_on else None


def _refuse_changed(config: Config) -> None:
    """Refuse a finished run of as many steps over the same data: nothing would be trained with what was changed.

    One without checkpoints is trained anew.
    """
    if not saved_steps(folder_of(config.checkpoints)):
        return
    try:
        summary = json.loads((Path(config.train.output) / RunFile.SUMMARY).read_text())
        old = _trained(summary["config"])
        lengths = [(one["train"]["steps"], one["train"]["epochs"], one["data"]) for one in (old, identity(config))]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if lengths[0] != lengths[1]:
        return
    changed = [
        (table, key)
        for table, values in identity(config).items()
        for key, value in values.items()
        if isinstance(old.get(table), dict) and key in old[table] and old[table][key] != value
    ]
    changes = [f"{table}.{key} {old[table][key]!r} (not {identity(config)[table][key]!r})" for table, key in changed]
    if changes and all(table == "train" and key in _EVALUATE for table, key in changed):
        raise ConfigError(
            f"train.output '{config.train.output}' contains a finished run with {', '.join(changes)}: evaluations take "
            "place while a run trains, and nothing was trained or evaluated anew; raise train.steps to continue it "
            "with them, or choose another train.output to train anew"
        )
    if changes:
        raise ConfigError(
            f"train.output '{config.train.output}' contains a finished run with {', '.join(changes)}; raise "
            "train.steps to continue it with the change, or choose another train.output to train anew"
        )


def summary_of(config: Config) -> tuple[dict[str, Any], dict[str, str], str | None] | None:
    """Return this run's summary, its spread, and its data fingerprint; ``None`` if unfinished."""
    try:
        summary: dict[str, Any] = json.loads((Path(config.train.output) / RunFile.SUMMARY).read_text())
    except (OSError, ValueError):
        return None
    spread, trained_on = summary.pop("spread", {}), summary.pop("corpus", None)
    return (summary, spread, trained_on) if _trained(summary.pop("config", None)) == identity(config) else None


def spread_of(config: Config, plan: Plan | None = None) -> dict[str, str]:
    """Return how a run is distributed and computed, as far as it is named in a config."""
    parallel = config.parallel
    strategy = parallel.strategy if plan is None else plan.strategy
    return {
        "strategy": strategy if strategy == "auto" else str(parse_strategy(strategy)),
        "precision": parallel.precision if plan is None else plan.precision,
        "recompute": parallel.recompute if plan is None else plan.recompute,
    }


def identity(config: Config) -> dict[str, Any]:
    """Return the facts that identify a run: all but distribution, saving, logging and watching."""
    document = config.model_dump(mode="json")
    tables = ["model", "data", "optimizer", *(["lora"] if adapter_of(config) != "none" else [])]
    known: dict[str, Any] = _trained({key: document[key] for key in (*tables, "train")})
    return known


def _trained(known: Any) -> Any:
    """Return the facts of a run without those that train nothing else; summaries of earlier versions hold them."""
    train = known.get("train") if isinstance(known, dict) else None
    if not isinstance(train, dict):
        return known
    ignored = (*_TRAIN_NOTHING, *(() if train.get("global_batch") is None else _SPLIT))
    return {**known, "train": {key: value for key, value in train.items() if key not in ignored}}


def loss_text(summary: dict[str, Any]) -> str:
    """Format ``loss 1.2345, 2.345 held-out bits per byte``, as far as the summary has them."""
    loss, bits = summary.get("loss"), summary.get("heldout_bits_per_byte")
    text = "loss unknown" if loss is None else f"loss {loss:.4f}"
    if heldout := {name: value for name, value in summary.get("heldout", {}).items() if value is not None}:
        return f"{text}, held out: {label_metrics(heldout)}"
    return text if bits is None else f"{text}, {bits:.3f} held-out bits per byte"
