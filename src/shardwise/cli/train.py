"""Verb ``shardwise train``: prepare the job once, start the ranks, report their failures."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardwise.cli.arguments import Calibration, Json, Nproc, Overrides
from shardwise.collector import no_collector
from shardwise.environment import rendezvous
from shardwise.errors import (
    ConfigError,
    Interrupted,
    KilledForMemory,
    OutOfMemory,
    PlanError,
    Preempted,
    RankError,
    UserError,
)
from shardwise.launch import fork_server
from shardwise.launch.preemption import Terminated, terminated
from shardwise.launch.rank import BEFORE_WORK
from shardwise.train.run_files import RunFile

if TYPE_CHECKING:
    from shardwise.plan.plan import Plan
    from shardwise.run.job import Job, PreparedJob
    from shardwise.train.config import Config
    from shardwise.watch.monitor import Monitor

BEFORE_FIRST_STEP = "interrupted before the first step: nothing was trained or saved; the same command starts again"


def run_train(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="config", help="TOML config file.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Use this plan file instead of a search.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="auto, ddp, zero1, zero2, fsdp or hsdp; +tpN, +ppN, +cpN, +offload, +lora, +qlora."),
    ] = None,
    nproc: Nproc = None,
    master_port: Annotated[int, typer.Option(help="Rendezvous port of the ranks; 0 picks a free port.", min=0)] = 0,
    calibration: Calibration = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan, batch, predicted memory and time, and start nothing.")
    ] = False,
    as_json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a config file and exit.")] = False,
) -> None:
    """Run ``shardwise train``. Under torchrun this process is a rank; else it starts the ranks."""
    if schema:
        from shardwise.train.config import json_schema

        print(json_schema())
        return
    if config_file is None:
        raise UserError("shardwise train needs a config file, such as: shardwise train examples/stdlib.toml")
    from shardwise.plan.strategy import complete_strategy
    from shardwise.train.config import read_config

    strategy, taken = complete_strategy(strategy) if strategy is not None else (None, "")
    overrides = chosen(overrides, strategy=strategy, nproc=nproc)
    plan = None if plan_file is None else given_plan(plan_file, overrides)
    config = read_config(config_file, overrides, planned=None if plan is None else plan.strategy)
    adapters = "" if plan is None or plan_file is None else _check_given(plan_file, plan, config_file, config)
    if not dry_run:
        fork_server.start()  # it imports torch for the ranks, while this process plans
    foresee(config)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    for line in filter(None, (taken, adapters)):
        console.print(line, markup=False)
    if dry_run and rendezvous() is not None:
        raise UserError("--dry-run starts no ranks, and a launcher has started this one; run it without the launcher")
    if not dry_run and _is_finished(config, console, as_json=as_json):
        return
    if rendezvous() is not None:
        from shardwise.run.rank_main import run_under_launcher

        export = partial(_export, config, console, as_json=as_json)
        run_under_launcher(config, plan, as_json=as_json, calibration=calibration, after=export)
        return
    from shardwise.run.checks import check_output

    check_output(Path(config.train.output))
    with only_run_in(Path(config.train.output)):
        with interrupted_before_start():
            prepared = _prepared(config, plan, console, as_json=as_json, calibration=calibration)
        if dry_run:
            print_dry_run(prepared, console, as_json=as_json)
            return
        launch(prepared.job, master_port)
        _export(config, console, as_json=as_json)


def _export(config: Config, console: Console, *, as_json: bool) -> None:
    """Write the model where ``train.export`` asks for it."""
    if config.train.export is None:
        return
    from shardwise.cli.export_model import export_model

    export_model(config, console, as_json=as_json)


def given_plan(plan_file: Path, overrides: Sequence[str]) -> Plan:
    """Read the plan that is given in place of a search.

    Raises:
        PlanError: it cannot be read or run, or ``overrides`` name a strategy, too.
    """
    from shardwise.plan.plan import read_plan, runnable

    named = [item for item in overrides if item.startswith("parallel.strategy=")]
    if named:
        raise PlanError(f"--plan '{plan_file}' holds a strategy, and {named[-1]} names one too; leave one of them out")
    return runnable(read_plan(plan_file))


def _check_given(plan_file: Path, plan: Plan, config_file: Path, config: Config) -> str:
    """Check that a plan is for the config's optimizer and model; return a note on adapters of the plan alone.

    Raises:
        PlanError: it is for others.
    """
    from shardwise.cli.plan_question import check_planned_model, check_planned_optimizer, planned_adapters

    if config.optimizer.factory is None:
        check_planned_optimizer(plan_file, config.optimizer.name)
    check_planned_model(plan_file, config)
    return planned_adapters(plan_file, plan, config_file, config)


def _prepared(
    config: Config, plan: Plan | None, console: Console, *, as_json: bool, calibration: Path | None
) -> PreparedJob:
    """Prepare the job and print its plan."""
    from shardwise.plan.strategy import alias_note
    from shardwise.report.terminal import print_plan
    from shardwise.run.job import prepare_job

    def log(text: str) -> None:
        console.print(f"data: {text}", markup=False)

    command = ("shardwise", *sys.argv[1:])
    prepared = prepare_job(config, log, plan=plan, as_json=as_json, calibration=calibration, command=command)
    if (note := alias_note(config.parallel.strategy)) is not None:
        console.print(note, markup=False)
    print_plan(prepared.choice, prepared.spec, prepared.cluster, prepared.corpus, console, config)
    if plan is not None and (line := _other_memory(prepared)):
        console.print(line, markup=False)
    for note in prepared.notes:
        console.print(f"links: {note}", markup=False)
    return prepared


def _other_memory(prepared: PreparedJob) -> str:
    """Return why the memory differs from the one in a given plan's reason; empty where it does not."""
    from shardwise.cost.memory.framework_overhead import context_bytes
    from shardwise.cost.memory.local_shapes import layout_of
    from shardwise.units import bytes_text

    plan, own = prepared.job.plan, prepared.choice.estimate.device_bytes
    known = [bytes_text(own), bytes_text(own + context_bytes(layout_of(plan), prepared.cluster))]
    if "iB" not in plan.reason or any(text in plan.reason for text in known):
        return ""
    return (
        f"memory: {known[0]}, counted on the module that this run builds; the reason has what was known when the plan "
        "was made (shardwise plan counts a known configuration by a description of its layers)"
    )


def print_step_time(prepared: PreparedJob, console: Console) -> None:
    """Print what is known of the run's time."""
    from shardwise.units import counted, seconds_text

    job, time = prepared.job, prepared.job.step_time
    steps = job.config.train.steps
    if time is None:
        console.print("time of a step: unknown, because the device's or a link's speed is")
    else:
        span = f"{seconds_text(time.low_s)} to {seconds_text(time.high_s)} in 8 of 10 cases"
        run = "" if steps is None else f"; {counted(steps, 'step')} in {seconds_text(steps * time.step_s)}"
        console.print(f"time of a step: {seconds_text(time.step_s)} ({span}){run}")


def print_dry_run(prepared: PreparedJob, console: Console, *, as_json: bool) -> None:
    """Print what is known of the run's time, and that nothing was started."""
    job, time = prepared.job, prepared.job.step_time
    print_step_time(prepared, console)
    console.print("dry run: nothing was started", markup=False)
    if as_json:
        facts = {"plan": job.plan, "memory": job.estimate, "step_time": time}
        print(
            json.dumps({"schema": 1, **{k: v and v.model_dump(mode="json", by_alias=True) for k, v in facts.items()}})
        )


def _is_finished(config: Config, console: Console, *, as_json: bool) -> bool:
    """Return whether this run has done all its steps, and print it, except under a launcher."""
    with no_collector():  # looking for garbage takes a fifth of the import of torch
        from shardwise.run.run_summary import finished, loss_text

    done = finished(config)
    if done is None or rendezvous() is not None:
        return False
    console.print(
        f"finished: all {done['steps']} steps of '{config.train.output}' are done under {done['strategy']} "
        f"({loss_text(done)}); raise train.steps to go on, or choose another train.output",
        markup=False,
    )
    _export(config, console, as_json=as_json)
    if as_json:
        print(json.dumps(done))
    return True


def chosen(overrides: list[str] | None, **parallel: object) -> list[str]:
    """Append the options that set keys of the table ``[parallel]`` to ``overrides``, if given."""
    given = [f"parallel.{key}={value}" for key, value in parallel.items() if value is not None]
    return [*(overrides or []), *given]


def foresee(config: Config) -> None:
    """Preload the code of a Hugging Face model for the ranks, too; errors are reported later."""
    from shardwise.model.configuration import read_configuration

    server = fork_server.running()
    if server is None or config.model.config is None:
        return
    place = Path(config.model.config)
    with contextlib.suppress(UserError):
        kind = read_configuration(place / "config.json" if place.is_dir() else place, "model").get("model_type")
        server.preload([f"transformers.models.{kind}.modeling_{kind}"])


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Lock the run folder for this run; the lock ends with the process.

    Raises:
        ConfigError: another run has the lock.
    """
    with (folder / RunFile.LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"train.output '{folder}': another run is writing there now; wait for it, or choose another folder"
            ) from None
        yield


@contextmanager
def interrupted_before_start() -> Iterator[None]:
    """Say what an interrupt inside has left, while this process plans.

    Raises:
        Interrupted: by Ctrl-C.
        Preempted: by a scheduler's signal.
    """
    try:
        with terminated():
            yield
    except Terminated:
        raise Preempted(BEFORE_FIRST_STEP) from None
    except KeyboardInterrupt:
        raise Interrupted(BEFORE_FIRST_STEP) from None


def launch(job: Job, master_port: int) -> None:
    """Start one process for each rank of ``job`` and wait for them."""
    from shardwise.launch.local import run_local
    from shardwise.run.run_summary import keep_job

    output = Path(job.config.train.output)
    if job.plan.device != "cpu":  # CUDA does not outlive a fork
        fork_server.stop()
    file = keep_job(job)
    world = job.plan.dims.world_size
    if not job.as_json:
        print(f"starting {world} rank{'s' if world > 1 else ''} ...")
    sys.stdout.flush()
    try:
        run_local(
            [sys.executable, "-m", "shardwise.run.rank_main", str(file)],
            world,
            threads=threads(job),
            logs=output / "logs",
            master_port=master_port,
            preemptible=True,
            monitor=monitor(job),
        )
    except Interrupted as error:
        text = str(error)
        if text == BEFORE_WORK:
            raise type(error)(BEFORE_FIRST_STEP) from error
        if "the same command" in text:
            raise
        from shardwise.run.resume_command import how_to_resume

        raise type(error)(f"{text}\n{how_to_resume(job.config, job.command)}") from error
    except (OutOfMemory, RankError) as error:
        from shardwise.run.out_of_memory import ForeseenRun, Shortage
        from shardwise.run.resume_command import how_to_resume

        lines = [str(error)]
        if isinstance(error, KilledForMemory):
            lines += [f"  {line}" for line in ForeseenRun.of(job).fitting(Shortage())]
        raise type(error)("\n".join([*lines, how_to_resume(job.config, job.command)])) from error


def monitor(job: Job) -> Monitor | None:
    """Return the watchdog of the job's ranks, unless ``train.watch`` is off or there is but one."""
    from shardwise.watch.monitor import Monitor

    world = job.plan.dims.world_size
    if not job.config.train.watch or world == 1 or sys.platform != "linux":
        return None
    output = Path(job.config.train.output)
    shutil.rmtree(output / RunFile.HEARTBEATS, ignore_errors=True)
    (output / RunFile.WATCH).unlink(missing_ok=True)
    return Monitor(output / RunFile.HEARTBEATS, world, output / RunFile.WATCH)


def threads(job: Job) -> int:
    """Return the CPU threads of a rank: as configured, or the cores divided by the ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return job.config.parallel.threads or max(1, cores // job.plan.dims.world_size)
