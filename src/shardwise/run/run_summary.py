"""What a run folder keeps of a run: its job and plan at the start, its summary at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.checkpoint.format import saved_steps
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.errors import ConfigError, MachineError
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.checks import adapter_of
from shardwise.run.job import Job
from shardwise.train.config import Config
from shardwise.train.data.corpus import prepare_corpus

SUMMARY = "summary.json"


def keep_job(job: Job) -> Path:
    """``job.json`` and ``plan.toml`` in the run folder; returns the path of the former.

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
    """The summary of this very run, if it has done all its steps on data that is still the same.

    Raises:
        ConfigError: the folder holds a run, finished or not, and the config says that none is to be resumed; or it
            holds this run, finished under another strategy or precision than is asked for now.
    """
    output = Path(config.train.output)
    if not config.checkpoint.resume and ((output / SUMMARY).exists() or saved_steps(folder_of(config.checkpoints))):
        raise ConfigError(
            f"train.output '{config.train.output}' holds a run already and checkpoint.resume is false; "
            "choose another train.output, or set checkpoint.resume=true to go on"
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
            f"train.output '{config.train.output}' holds this run, finished with {', '.join(other)}; "
            "raise train.steps to go on, or choose another train.output to run it again"
        )
    corpus = prepare_corpus(config.data, output / "data", lambda text: None)
    return summary if corpus.fingerprint == trained_on else None


def summary_of(config: Config) -> tuple[dict[str, Any], dict[str, str], str | None] | None:
    """What this very run came to, how it was spread, and the fingerprint of its data; ``None``: it never ended."""
    try:
        summary: dict[str, Any] = json.loads((Path(config.train.output) / SUMMARY).read_text())
    except (OSError, ValueError):
        return None
    spread, trained_on = summary.pop("spread", {}), summary.pop("corpus", None)
    return (summary, spread, trained_on) if summary.pop("config", None) == identity(config) else None


def spread_of(config: Config, plan: Plan | None = None) -> dict[str, str]:
    """How a run is spread and computed, as far as a user asks for it by name."""
    parallel = config.parallel
    strategy = parallel.strategy if plan is None else plan.strategy
    return {
        "strategy": strategy if strategy == "auto" else str(parse_strategy(strategy)),
        "precision": parallel.precision if plan is None else plan.precision,
        "recompute": parallel.recompute if plan is None else plan.recompute,
    }


def identity(config: Config) -> dict[str, Any]:
    """What makes two runs the same run: everything but how they are spread, saved and logged."""
    document = config.model_dump(mode="json")
    told = ("log_every", "output", "profile", "profile_ranks", "trackers")
    train = {key: value for key, value in document["train"].items() if key not in told}
    tables = ["model", "data", "optimizer", *(["lora"] if adapter_of(config) != "none" else [])]
    return {**{key: document[key] for key in tables}, "train": train}


def loss_text(summary: dict[str, Any]) -> str:
    """``loss 1.2345, 2.345 held-out bits per byte``, as far as a summary tells them."""
    loss, bits = summary.get("loss"), summary.get("heldout_bits_per_byte")
    text = "loss unknown" if loss is None else f"loss {loss:.4f}"
    return text if bits is None else f"{text}, {bits:.3f} held-out bits per byte"
