"""Verb ``shardwise launch``: plan for the machines that are asked for, render an engine's file, submit it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shardwise.cli.arguments import ConfigPath, Json, Overrides
from shardwise.cli.launch_options import with_engine_options
from shardwise.errors import DataError, MachineError, ModelError, UserError

if TYPE_CHECKING:
    from shardwise.cli.launch_checks import Launch
    from shardwise.run.job import PreparedJob

ENGINE_NAMES = "torchrun, slurm, kubernetes or skypilot"


@with_engine_options
def run_launch(
    of_engines: Mapping[str, Any],
    config_file: ConfigPath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Machines.", min=1, max=1024)] = 1,
    via: Annotated[str, typer.Option(metavar="ENGINE", help=f"{ENGINE_NAMES}.", show_default=False)] = "",
    nproc: Annotated[int | None, typer.Option(help="Ranks on each machine; default: its GPUs.", min=1)] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU of the machines, such as H100-SXM or A100-80GB@nvlink/ib200.")
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="Strategy, as of train; default: that of the plan.")] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Use this plan file instead of a search.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; default: that of the run folder.")] = None,
    interface: Annotated[str | None, typer.Option(help="Network interface of the ranks, such as eth0.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="Environment variable of the ranks, as NAME=VALUE; repeatable.")
    ] = None,
    cores: Annotated[
        int | None, typer.Option("--cpus", help="CPU cores of each machine; default: 8 per GPU.", min=1)
    ] = None,
    python: Annotated[str | None, typer.Option(help="Python on the machines; default: this one, if shared.")] = None,
    restarts: Annotated[
        int | None,
        typer.Option(help="How often the run may be restarted; default: 10; torchrun, fixed nodes: 0.", min=0),
    ] = None,
    grace_s: Annotated[
        int, typer.Option("--grace", help="Seconds that a run may save in before it is stopped.", min=40, max=86400)
    ] = 120,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; default: NAME.sbatch etc.")] = (
        None
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write and print the file, and submit nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run ``shardwise launch``.

    Raises:
        UserError: every problem of the command, at once.
        MachineError: the engine's client refused the file.
    """
    from shardwise.cli.launch_checks import LaunchWords, checked
    from shardwise.cli.train import chosen
    from shardwise.plan.strategy import complete_strategy

    named = None if strategy is None else complete_strategy(strategy)[0]
    words = LaunchWords(
        config_file, chosen(overrides, strategy=named), nodes, via, nproc, gpu, plan_file, name, interface,
        env or [], cores, python, restarts, grace_s, output, dry_run, as_json,
    )  # fmt: skip
    start(checked(words, of_engines))


def start(launch: Launch) -> None:
    """Plan, render, and submit unless it is a dry run."""
    words = launch.words
    console = Console(stderr=words.as_json, highlight=False, soft_wrap=True)
    for note in launch.notes:
        console.print(note, markup=False)
    prepared = planned(launch, console)
    request = launch.request(None if prepared is None else prepared.job.plan.strategy)
    file = words.output or Path(f"{request.name}{launch.engine.suffix}")
    text = launch.engine.render(request, str(file), launch.header(request))
    try:
        file.write_text(text)
    except OSError as error:
        raise UserError(f"-o '{file}' cannot be written: {error.strerror}; choose another file") from None
    console.print(f"file: {file}", markup=False)
    submitted: str | None = None
    runs_here = words.via == "torchrun" and not words.dry_run and request.options["hosts"]
    if words.dry_run or (words.via == "torchrun" and not runs_here):
        console.print(f"\n{text}", markup=False, soft_wrap=True)
        console.print(
            "dry run: nothing was submitted"
            if words.dry_run
            else f"nothing was started: run sh {file} NUMBER on each node, or give --hosts to start them over ssh",
            markup=False,
        )
    elif not runs_here:
        assert launch.engine.submit is not None and launch.engine.follow is not None
        submitted = submit(launch.engine.submit(request, file), console, as_json=words.as_json)
        console.print(f"output: {launch.engine.follow(request, submitted)}", markup=False)
    if runs_here:
        from shardwise.launch.engines.torchrun import run_over_ssh

        run_over_ssh(request, to_stderr=words.as_json)
    if words.as_json:
        print(json.dumps(document(launch, file, prepared, submitted)), flush=True)


def planned(launch: Launch, console: Console) -> PreparedJob | None:
    """Plan for the asked machines as ``train --dry-run`` does, and print it.

    None where data or model are on the machines only: the ranks plan when they start.
    """
    from shardwise.cli.train import only_run_in, print_step_time
    from shardwise.report.terminal import print_plan
    from shardwise.run.checks import check_output
    from shardwise.run.job import prepare_job

    def log(text: str) -> None:
        console.print(f"data: {text}", markup=False)

    config = launch.config
    with TemporaryDirectory(prefix="shardwise-launch-") as scratch:
        if not launch.engine.shares_files:  # the run folder is on the machines
            config = config.model_copy(update={"train": config.train.model_copy(update={"output": scratch})})
        check_output(Path(config.train.output))
        with only_run_in(Path(config.train.output)):
            try:
                prepared = prepare_job(config, log, plan=launch.plan, cluster=launch.cluster)
            except (DataError, ModelError) as error:
                if launch.engine.shares_files:
                    raise
                console.print(f"plan: unknown here ({error.problems[0]}); the ranks plan when they start", markup=False)
                return None
    facts = (prepared.choice, prepared.spec, prepared.cluster, prepared.corpus, console, prepared.job.config)
    print_plan(*facts)
    print_step_time(prepared, console)
    return prepared


def submit(command: list[str], console: Console, *, as_json: bool) -> str:
    """Run the engine's client; returns its answer.

    Raises:
        MachineError: it refused.
    """
    console.print(f"submit: {shlex.join(command)}", markup=False)
    asks = command[0] == "sky"  # for the price; its questions and answers go to the terminal
    out = (sys.stderr if as_json else None) if asks else subprocess.PIPE
    done = subprocess.run(command, stdout=out, stderr=None if asks else subprocess.PIPE, text=True)
    answer = (done.stdout or "").strip()
    if done.returncode:
        said = "" if asks else f": {(done.stderr or answer).strip()}"
        said += "\ngive this one another --name, or delete that one first" if "AlreadyExists" in said else ""
        raise MachineError(f"{shlex.join(command)} ended with {done.returncode}{said}")
    if done.stderr:
        console.print(done.stderr.strip(), markup=False)  # warnings
    if answer:
        console.print(f"submitted: {answer}", markup=False)
    return answer


def document(launch: Launch, file: Path, prepared: PreparedJob | None, submitted: str | None) -> dict[str, Any]:
    """Return what was launched, for programs."""
    return {
        "schema": 1,
        "via": launch.words.via,
        "nodes": launch.words.nodes,
        "nproc": launch.nproc,
        "world_size": launch.words.nodes * launch.nproc,
        "strategy": None if prepared is None else prepared.job.plan.strategy,
        "file": str(file),
        "submitted": submitted,
        "notes": list(launch.notes),
    }
