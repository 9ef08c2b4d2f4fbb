"""``shardwise train``: prepare the job once, start the ranks, and speak for them if they fail."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.checkpoint.format import saved_steps
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.environment import rendezvous
from shardwise.errors import ConfigError, MachineError, PlanError, UserError
from shardwise.launch import fork_server
from shardwise.model.configuration import read_configuration
from shardwise.plan.plan import Plan, read_plan, runnable
from shardwise.plan.strategy import parse_strategy
from shardwise.report.plan_table import print_plan
from shardwise.run.checks import adapter_of, check_output
from shardwise.run.job import Job, prepare_job
from shardwise.train.config import Config, read_config
from shardwise.train.data.corpus import prepare_corpus

SUMMARY = "summary.json"


def run_train(
    config_file: Path,
    overrides: list[str],
    *,
    plan_file: Path | None,
    master_port: int,
    as_json: bool,
    calibration: Path | None = None,
) -> None:
    """The verb. Under torchrun this process is a rank already; otherwise it starts the ranks itself."""
    named = [item for item in overrides if item.startswith("parallel.strategy=")]
    if plan_file is not None and named:
        raise PlanError(f"--plan '{plan_file}' holds a strategy, and {named[-1]} names one too; leave one of them out")
    plan = runnable(read_plan(plan_file)) if plan_file is not None else None
    config = read_config(config_file, overrides, planned=None if plan is None else plan.strategy)
    foresee(config)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    done = finished(config)
    if done is not None and rendezvous() is None:
        console.print(
            f"finished: all {done['steps']} steps of '{config.train.output}' are done under {done['strategy']} "
            f"({loss_text(done)}); raise train.steps to go on, or choose another train.output",
            markup=False,
        )
        if as_json:
            print(json.dumps(done))
        return
    if rendezvous() is not None:
        from shardwise.run.rank_main import run_under_launcher

        run_under_launcher(config, plan, as_json=as_json, calibration=calibration)
        return
    check_output(Path(config.train.output))
    with only_run_in(Path(config.train.output)):
        prepared = prepare_job(
            config,
            lambda text: console.print(f"data: {text}", markup=False),
            plan=plan,
            as_json=as_json,
            calibration=calibration,
        )
        print_plan(prepared.choice, prepared.spec, prepared.cluster, prepared.corpus, console, config.data)
        for note in prepared.notes:
            console.print(f"links: {note}", markup=False)
        launch(prepared.job, master_port)


def foresee(config: Config) -> None:
    """Have the code of a Hugging Face model imported for the ranks, too; whatever is wrong is said later."""
    server = fork_server.running()
    if server is None or config.model.config is None:
        return
    place = Path(config.model.config)
    with contextlib.suppress(UserError):
        kind = read_configuration(place / "config.json" if place.is_dir() else place, "model").get("model_type")
        server.preload([f"transformers.models.{kind}.modeling_{kind}"])


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the run folder for this run; the lock goes with the process, however it ends.

    Raises:
        ConfigError: another run has it.
    """
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"train.output '{folder}': another run is writing there now; wait for it, or choose another folder"
            ) from None
        yield


def launch(job: Job, master_port: int, module: str = "shardwise.run.rank_main") -> None:
    """Start one process for each rank of ``job`` and wait for them."""
    from shardwise.launch.local import run_local

    output = Path(job.config.train.output)
    if job.plan.device != "cpu":  # CUDA does not outlive a fork
        fork_server.stop()
    file = keep_job(job)
    sys.stdout.flush()
    run_local(
        [sys.executable, "-m", module, str(file)],
        job.plan.dims.world_size,
        threads=threads(job),
        logs=output / "logs",
        master_port=master_port,
    )


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


def threads(job: Job) -> int:
    """CPU threads of a rank: as configured, or the cores divided by the ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return job.config.parallel.threads or max(1, cores // job.plan.dims.world_size)


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
