"""Files of a run in its folder: job and plan at the start, summary at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.checkpoint.format import saved_steps
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.errors import ConfigError, MachineError
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.report.progress import label_metrics
from shardwise.run.checks import adapter_of
from shardwise.run.job import Job
from shardwise.train.config import Config
from shardwise.train.tasks.registry import prepare_data

SUMMARY = "summary.json"


def keep_job(job: Job) -> Path:
    """Write ``job.json`` and ``plan.toml`` to the run folder; return the path of the former.

    Raises:
        MachineError: they cannot be written.
    """
    output = Path(job.config.train.output)
    file = output / "job.json"
    try:
        file.write_text(job.to_json())
        (output / "plan.toml").write_text(job.plan.to_toml())
    except OSError as error:
        raise MachineError(
            f"'{file}' cannot be written: {error.strerror}; make room, or choose another train.output"
        ) from None
    return file


def finished(config: Config) -> dict[str, Any] | None:
    """Return the summary of this run if it has finished all steps on unchanged data.

    Raises:
        ConfigError: the folder has a run, finished or not, and the config forbids resuming; or it
            has this run, finished under another strategy or precision than requested now.
    """
    output = Path(config.train.output)
    if not config.checkpoint.resume and ((output / SUMMARY).exists() or saved_steps(folder_of(config.checkpoints))):
        raise ConfigError(
            f"train.output '{config.train.output}' contains a run already and checkpoint.resume is false; "
            "choose another train.output, or set checkpoint.resume=true to resume"
        )
    found = summary_of(config)
    if found is None:
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


def summary_of(config: Config) -> tuple[dict[str, Any], dict[str, str], str | None] | None:
    """Return this run's summary, its spread, and its data fingerprint; ``None`` if unfinished."""
    try:
        summary: dict[str, Any] = json.loads((Path(config.train.output) / SUMMARY).read_text())
    except (OSError, ValueError):
        return None
    spread, trained_on = summary.pop("spread", {}), summary.pop("corpus", None)
    return (summary, spread, trained_on) if summary.pop("config", None) == identity(config) else None


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
    """Return the facts that identify a run: all but distribution, saving and logging."""
    document = config.model_dump(mode="json")
    ignored = ("export", "log_every", "output", "profile", "profile_ranks", "trackers")
    train = {key: value for key, value in document["train"].items() if key not in ignored}
    tables = ["model", "data", "optimizer", *(["lora"] if adapter_of(config) != "none" else [])]
    return {**{key: document[key] for key in tables}, "train": train}


def loss_text(summary: dict[str, Any]) -> str:
    """Format ``loss 1.2345, 2.345 held-out bits per byte``, as far as the summary has them."""
    loss, bits = summary.get("loss"), summary.get("heldout_bits_per_byte")
    text = "loss unknown" if loss is None else f"loss {loss:.4f}"
    if heldout := {name: value for name, value in summary.get("heldout", {}).items() if value is not None}:
        return f"{text}, held out: {label_metrics(heldout)}"
    return text if bits is None else f"{text}, {bits:.3f} held-out bits per byte"
