"""Verb ``shardwise doctor``: check this machine, or every host of a launcher's world."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from shardwise.cli.arguments import Json
from shardwise.environment import Rendezvous, rendezvous
from shardwise.errors import AnswerIsNo, UserError
from shardwise.launch.rank import guarded
from shardwise.units import counted


def run_doctor(
    nproc: Annotated[int | None, typer.Option(help="Ranks; default: one per GPU, or 2 on CPU.", min=1)] = None,
    folder: Annotated[Path, typer.Option(help="Folder for checkpoints, whose disk is checked.")] = Path("."),
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Timeout for answers of ranks, in seconds.", min=1, max=86400)
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Run ``shardwise doctor``. Under a launcher it checks all hosts and tests its ranks.

    Raises:
        UserError: ``folder`` is a file; more ranks than GPUs are requested; ranks are requested under a launcher.
        AnswerIsNo: a check is an error.
    """
    place = rendezvous()
    if place is not None:
        if nproc is not None:
            started = counted(place.world_size, "rank")
            raise UserError(f"--nproc {nproc}: the launcher has started {started} already; leave it out")
        guarded(lambda: run_under_launcher(place, folder, timeout_s, as_json))
    from shardwise.doctor.checks.ranks import check_ranks_test
    from shardwise.doctor.machine_facts import inspect_host
    from shardwise.doctor.run_checks import examine
    from shardwise.doctor.start_ranks import check_ranks
    from shardwise.doctor.table import print_doctor, summary, to_document

    facts = inspect_host(nproc, folder)
    device: Literal["cpu", "cuda"] = "cuda" if _cuda() else "cpu"
    if device == "cuda" and nproc is not None and nproc > len(facts.gpus.gpus):
        raise UserError(f"--nproc {nproc}: there are {len(facts.gpus.gpus)} GPUs, and a rank needs one of its own")
    checks = examine(facts)
    threads = max(1, facts.cores // facts.ranks)
    test = check_ranks(facts.ranks, device, timeout_s, threads=threads)
    checks += check_ranks_test(test, facts)
    print_doctor(checks, facts, _console(as_json))
    if as_json:
        print(json.dumps(to_document(checks, facts, test)), flush=True)
    if any(check.level == "error" for check in checks):
        wrong = dict.fromkeys(check.name for check in checks if check.level == "error")
        raise AnswerIsNo(f"{summary(checks)}: {', '.join(wrong)}; the fixes stand above")


def run_under_launcher(place: Rendezvous, folder: Path, timeout_s: float, as_json: bool) -> int:
    """Run as a rank: the first of each host checks it, all are tested, the first answer prints."""
    from shardwise.doctor.check import Check
    from shardwise.doctor.checks.ranks import check_ranks_test
    from shardwise.doctor.machine_facts import inspect_host
    from shardwise.doctor.rank_self_test import self_test
    from shardwise.doctor.run_checks import examine
    from shardwise.doctor.table import print_doctor, to_document

    facts, note = None, ""
    if place.local_rank == 0:
        facts = inspect_host(place.local_world_size, folder)
        note = json.dumps([check.model_dump(mode="json") for check in examine(facts)])
    stop_event = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_event.set())  # the launcher ends the world: report the results first
    test = self_test(place, "cuda" if _cuda() else "cpu", timeout_s, note=note, stop_event=stop_event)
    checks = [
        Check.model_validate(found).model_copy(update={"host": answer.host})
        for answer in test.answers
        if answer.note
        for found in json.loads(answer.note)
    ]
    checks += check_ranks_test(test, facts)
    speaks = place.rank == next((answer.rank for answer in test.answers if answer.word is not None), None)
    if speaks:
        print_doctor(checks, facts, _console(as_json))
        if as_json:
            print(json.dumps(to_document(checks, facts, test)), flush=True)
    return AnswerIsNo.exit_code if any(check.level == "error" for check in checks) else 0


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _console(as_json: bool) -> Console:
    stream = sys.stderr if as_json else sys.stdout
    return Console(stderr=as_json, highlight=False, width=None if stream.isatty() else 132)
