"""Verb ``shardwise verify``: select strategies, shrink the model, start ranks, report."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardwise.cli.arguments import ConfigPath, Json, Overrides
from shardwise.collector import no_collector
from shardwise.environment import rendezvous
from shardwise.errors import AnswerIsNo, Interrupted, MachineError, ModelError, RankError, ShardwiseError, UserError
from shardwise.launch import fork_server
from shardwise.launch.on_ranks import on_ranks
from shardwise.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.distributed.process_group import Ranks
    from shardwise.gradcheck.run import StrategyResult, VerifyTask
    from shardwise.plan.plan import Plan
    from shardwise.run.strategy_lineup import VerifyJob

TIMEOUT_S = 300.0
PIPED = 132


def run_verify(
    config_file: ConfigPath,
    overrides: Overrides = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="Verify only this strategy, such as fsdp+tp2; repeatable.",
            show_default=False,
        ),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of CPU ranks; default: 2 and 4.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Run ``shardwise verify``.

    Raises:
        UserError: the config is invalid, or no strategy could be verified.
        AnswerIsNo: a strategy does not verify.
        RankError: a rank failed; earlier results are printed.
    """
    if rendezvous() is not None:
        raise UserError("shardwise verify starts ranks of its own, on CPU; run it as it is, without torchrun or srun")
    from shardwise.train.config import read_config

    config = read_config(config_file, overrides or ())
    fork_server.start()  # it imports torch for the ranks of each world, while this process inspects the model
    with no_collector():  # looking for garbage takes a fifth of the import of torch
        from shardwise.report.gradcheck_report import print_heading, print_rows, to_document
        from shardwise.run.strategy_lineup import MICRO_BATCH, asked_for, prepare_verify

    asked = asked_for(strategies or ())
    stream = sys.stderr if as_json else sys.stdout
    width = None if stream.isatty() else PIPED
    console = Console(stderr=as_json, highlight=False, soft_wrap=width is not None, width=width)
    prepared = prepare_verify(config, asked, nproc, lambda text: console.print(text, markup=False))
    shrunk, seq_len = prepared.shrunk, prepared.seq_len
    print_heading(shrunk, seq_len, MICRO_BATCH, config, console)
    rows, failure = run_worlds(prepared)
    rows += prepared.lineup.refused
    print_rows(rows, console)
    if as_json:
        print(json.dumps(to_document(rows, shrunk, seq_len, None if failure is None else str(failure))), flush=True)
    if failure is not None:
        raise failure
    failed = [row for row in rows if row.status == "failed"]
    if failed:
        names = ", ".join(f"{row.strategy} on {counted(row.ranks, 'rank')}" for row in failed)
        raise AnswerIsNo(f"{names}: not verified; what differs stands above")
    if not any(row.status == "verified" for row in rows):
        raise ModelError(
            *dict.fromkeys(f"{row.strategy} on {counted(row.ranks, 'rank')}: {row.reason}" for row in rows)
        )


def run_worlds(prepared: VerifyJob) -> tuple[list[StrategyResult], ShardwiseError | None]:
    """Start the ranks of each world once; return the results, and the error that ended them."""
    rows: list[StrategyResult] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as references:
        for world, plans in sorted(prepared.lineup.plans.items()):
            found, failure = _run_world(prepared, world, plans, Path(references))
            rows += found
            if failure is not None:
                return rows, failure
    return rows, None


def _run_world(
    prepared: VerifyJob, world: int, plans: Sequence[Plan], references: Path
) -> tuple[list[StrategyResult], ShardwiseError | None]:
    from shardwise.gradcheck.reference import write_references
    from shardwise.gradcheck.run import StrategyResult

    results = references / f"{world}-rows.jsonl"
    task = prepared.task(world, results, references)
    write_references(task.model, task.data, task.plans, references)  # here, where there is no process group
    failure: ShardwiseError | None = None
    try:
        on_ranks(f"{__name__}:verify_world", task, world, device="cpu", timeout_s=TIMEOUT_S)
    except ShardwiseError as error:
        failure = error
    lines = results.read_text().splitlines() if results.exists() else []
    rows = [StrategyResult.model_validate_json(line) for line in lines]
    if failure is not None:
        undone = plans[len(rows)].strategy if len(rows) < len(plans) else "the end"
        failure = _during(failure, f"{undone} on {world} ranks")
    return rows, failure


def _during(failure: ShardwiseError, what: str) -> ShardwiseError:
    """Add the current task to a failure, as a `RankError`, `MachineError` or `Interrupted`.

    A user's error would be a row instead.
    """
    if isinstance(failure, MachineError | Interrupted):
        return type(failure)(f"{what}: {failure}")
    return RankError(f"{what}: {failure}")


def _print_result(row: StrategyResult) -> None:
    """Print a progress line to stderr."""
    print(f"{row.strategy} on {counted(row.ranks, 'rank')}: {row.status}", file=sys.stderr, flush=True)


def verify_world(task: VerifyTask, ranks: Ranks) -> None:
    """Verify every strategy of one world in turn. Collective."""
    import logging

    from shardwise.gradcheck.run import verify_all

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # performance hints
    verify_all(task, ranks, _print_result if sys.stderr.isatty() else None)
