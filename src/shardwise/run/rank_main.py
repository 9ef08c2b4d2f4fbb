"""Entry point of a rank: join the others, train, and print the results on rank 0.

Started by ``shardwise train`` as ``python -m shardwise.run.rank_main job.json``, or entered under torchrun.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.environment import launched_by, node_name, record_collectives
from shardwise.errors import Interrupted, OutOfMemory, RankError
from shardwise.launch.crash import raised_at
from shardwise.launch.preemption import StopSignals
from shardwise.launch.rank import guarded, lost_peer
from shardwise.units import seconds_text


def main() -> int:
    """Read the job file named on the command line, and run it."""
    from shardwise.run.job import Job

    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    return run_job(job)


def run_job(job: Any, ranks: Any = None) -> int:
    """Train on this rank; return the exit code. ``ranks`` are given under another launcher, which watches nobody."""
    from shardwise.distributed.process_group import gather_text, join
    from shardwise.report.progress import ProgressReporter
    from shardwise.run.callbacks import RunRecorder
    from shardwise.run.out_of_memory import ForeseenRun, OutOfMemoryRecorder, is_out_of_memory
    from shardwise.run.run_summary import write_environment
    from shardwise.train.loop import TrainingRun
    from shardwise.train.session import Session
    from shardwise.train.tasks.registry import open_data
    from shardwise.watch.rank_watch import RankWatch

    launched = ranks is not None
    ranks = ranks or join(job.plan.device)
    reporter = ProgressReporter(as_json=job.as_json)
    alone = ranks.world_size == ranks.local_world_size
    nodes = [] if alone else list(dict.fromkeys(gather_text(node_name(), ranks)))
    if ranks.is_main:
        try:
            write_environment(Path(job.config.train.output), nodes)
        except OSError as error:  # the run's report lacks it, and says so
            reporter.log(f"the versions of this run are not kept: {error.strerror}")

    session = Session(ranks=ranks, planner=lambda *_: job.plan)
    stops = StopSignals(session.stop)
    watch = None
    if job.config.train.watch:
        watch = RankWatch(session, Path(job.config.train.output), beside=launched)
    recorder = RunRecorder(job, session, reporter.log, reporter.console)
    if watch is not None:
        watch.judge_speed(recorder.attribution, reporter.log)
    memory = OutOfMemoryRecorder(session, ForeseenRun.of(job))
    try:
        if ranks.is_main:
            reporter.announce("building the model ...")
        outcome = TrainingRun(job.config, job.plan, open_data(job.corpus), session, reporter, recorder).train()
        if ranks.is_main and not told_before(job, session, outcome, reporter):
            conclude(job, session, recorder, outcome, reporter)
    except Interrupted:
        stops.saved = True
        if ranks.is_main:
            so_far(job, recorder, reporter)
        raise
    except SystemExit as stop:
        raise left_early(stop, session) from stop
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(memory.explained(error)) from error
    finally:
        recorder.close()
        if watch is not None:
            watch.close()
    session.close()
    return 0


def left_early(stop: SystemExit, session: Any) -> BaseException:
    """Return the error of a rank whose code ends it as if the run were done; other exit codes speak for themselves."""
    if stop.code:
        return stop
    where = raised_at("".join(traceback.format_exception(stop)))
    return RankError(
        f"sys.exit was called in step {session.steps_done + 1}{f' at {where}' if where else ''}: "
        "it ended with exit code 0 in the middle of the run"
    )


def told_before(job: Any, session: Any, outcome: Any, reporter: Any) -> bool:
    """Return whether the run was finished by an earlier process, whose results stay."""
    from shardwise.run.run_summary import loss_text, summary_of

    found = summary_of(job.config)
    if session.steps_done > session.first_step or found is None or found[0].get("steps") != outcome.steps:
        return False
    reporter.log(f"finished before: all {outcome.steps} steps are done ({loss_text(found[0])})")
    if job.as_json:
        print(json.dumps(found[0]), flush=True)
    return True


def so_far(job: Any, recorder: Any, reporter: Any) -> None:
    """Report an interrupted run so far, on rank 0: its time, and its report."""
    from shardwise.report.html.page import write_report

    timing = recorder.timing()
    if timing is not None:
        recorder.write(timing, recorder.findings(timing, recorder.utilisation(timing)))
    page = write_report(Path(job.config.train.output), reporter.log)
    if page is not None:
        reporter.log(f"report: {page}")


def conclude(job: Any, session: Any, recorder: Any, outcome: Any, reporter: Any) -> None:
    """Print and store the results of the run, on rank 0; the last line is for programs."""
    from shardwise.report.html.page import write_report
    from shardwise.run.run_summary import identity, spread_of
    from shardwise.train.run_files import RunFile
    from shardwise.train.tasks.registry import noun_of, open_data

    folder = Path(job.config.train.output)
    step_time = remember_run(job, session, recorder.fit, reporter)
    timing = recorder.timing()
    use = None if timing is None else recorder.utilisation(timing)
    findings = () if timing is None else recorder.findings(timing, use)
    measured = recorder.fit.measurement
    receipts = {"effects": recorder.effects.receipt, "fit": recorder.fit.receipt}
    found = outcome.evaluation
    document = {
        "schema": 1,
        "steps": outcome.steps,
        **({"tokens": outcome.tokens} if noun_of(job.config) == "tokens" else {}),
        "labels": outcome.labels,
        "loss": finite(outcome.loss),
        "heldout_bits_per_byte": finite(None if found is None else found.bits_per_byte),
        "heldout_loss": finite(None if found is None else found.loss),
        "evaluation": None if found is None else {name: finite(value) for name, value in found.line().items()},
        "best": None if outcome.best is None else outcome.best.state(),
        **({} if found is None or found.is_of_text else {"heldout": found.labels()}),
        "strategy": job.plan.strategy,
        "step_time_s": step_time,
        "timing": None if timing is None else timing.model_dump(mode="json"),
        "utilisation": None if use is None else use.model_dump(mode="json"),
        "findings": [finding.model_dump(mode="json") for finding in findings],
        "memory": None if measured is None else measured.model_dump(mode="json"),
        "receipts": {name: receipt.to_dict() if receipt else None for name, receipt in receipts.items()},
        "output": job.config.train.output,
    }
    corpus = open_data(job.corpus)
    recorder.write(timing, findings)
    facts = {"config": identity(job.config), "spread": spread_of(job.config, job.plan), "corpus": corpus.fingerprint}
    recorder.keep(RunFile.SUMMARY, json.dumps({**document, **facts}))
    page = write_report(folder, reporter.log)
    reporter.finish(outcome, corpus, list(receipts.values()), job.config.train.output)
    reporter.time_spent(timing, use, findings, page)
    if job.as_json:
        print(json.dumps(document), flush=True)


def finite(value: float | None) -> float | None:
    """Return a finite number unchanged; ``None`` for others, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def remember_run(job: Any, session: Any, fit: Any, reporter: Any) -> dict[str, float | None]:
    """Add the run to this machine's history; return predicted and measured step seconds."""
    import torch

    from shardwise.measure.history import median_step_s, remember
    from shardwise.train.run_files import RunFile

    predicted = getattr(job, "step_time", None)
    planned = None if predicted is None else predicted.step_s
    found = median_step_s(Path(job.config.train.output) / RunFile.METRICS, session.first_step)
    estimate, peaks = job.estimate, fit.peaks
    full = estimate.device_bytes if estimate.allocated is None else estimate.allocated
    device = session.device
    problem = remember(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        base=job.plan.parsed.base,
        world_size=session.ranks.world_size,
        planned_peak=None if estimate.unknown else full,
        found_peak=None if peaks is None else max(peaks.allocated.values(), default=None),
        planned_step_s=planned if job.measured_links is None else None,  # it corrects the catalogue's times
        found_step_s=found,
    )
    if problem:
        reporter.log(problem)
    if planned is not None and found is not None:
        reporter.log(
            f"step time: {seconds_text(found)}, predicted {seconds_text(planned)} ({found / planned:.2f} × plan)"
        )
    return {"planned": planned, "found": found}


def run_under_launcher(
    config: Any,
    plan: Any,
    *,
    as_json: bool,
    calibration: Path | None = None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Run as a rank of torchrun, Slurm or similar: rank 0 prepares the job and sends it, and calls ``after`` it."""

    def inner() -> int:
        from shardwise.distributed.process_group import join, prepared_by_main
        from shardwise.run.job import Job, prepare_job
        from shardwise.run.run_summary import keep_job

        record_collectives()
        alike = {"": config.model_dump(mode="json"), "plan": None if plan is None else plan.model_dump(mode="json")}
        ranks = join(config.parallel.device, alike=alike)
        local = config.parallel.model_copy(update={"nproc": ranks.local_world_size})
        here = config.model_copy(update={"parallel": local})

        def prepare() -> str:
            nodes = max(1, ranks.world_size // ranks.local_world_size)
            prepared = prepare_job(
                here, _log, plan=plan, nodes=nodes, as_json=as_json, calibration=calibration, command=launched_by()
            )
            keep_job(prepared.job)
            _print_plan(prepared, as_json)
            return prepared.job.to_json()

        status = run_launched(Job.model_validate_json(prepared_by_main(prepare, ranks, "the run")), ranks)
        if ranks.is_main and not status:
            after()
        return status

    guarded(inner, Path(config.train.output) / "logs")


def run_launched(job: Any, ranks: Any) -> int:
    """Run as `run_job`; failures of a machine come with the command that resumes, as no launcher knows it."""
    from shardwise.run.resume_command import how_to_resume

    try:
        return run_job(job, ranks)
    except OutOfMemory as error:
        raise OutOfMemory(f"rank {ranks.rank}: {error}\n{how_to_resume(job.config, job.command)}") from error
    except RankError as error:
        raise RankError(f"{error}\n{how_to_resume(job.config, job.command)}") from error
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        raise RankError(
            f"rank {ranks.rank} lost another rank: its process was killed, or its node or link is gone; the launcher's "
            f"report shows which ended first ({' '.join(str(error).split()):.200})\n"
            f"{how_to_resume(job.config, job.command)}"
        ) from error


def _log(text: str) -> None:
    print(f"data: {text}", file=sys.stderr)


def _print_plan(prepared: Any, as_json: bool) -> None:
    from rich.console import Console

    from shardwise.report.terminal import print_plan

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    print_plan(prepared.choice, prepared.spec, prepared.cluster, prepared.corpus, console, prepared.job.config)
    for note in prepared.notes:
        console.print(f"links: {note}", markup=False)


if __name__ == "__main__":
    guarded(main)
