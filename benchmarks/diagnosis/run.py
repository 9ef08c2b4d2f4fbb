"""Put causes into real runs on gloo ranks, ask diagnosis, and count how often it is right.

``python benchmarks/diagnosis/run.py [--repeat N] [--only NAME ...]``: some 50 runs with a cause, more than 20 without
one, and some that follow the advice on data workers. Writes ``results.json`` (every run, with its timing and findings)
and ``README.md`` beside it. About 15 minutes; the machine must do nothing else, or its findings are about that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from shardwise.launch.local import run_local  # noqa: E402
from tests.injections import Case, Result, run_case  # noqa: E402
from tests.netns import two_hosts, why_not  # noqa: E402
from tests.worlds import run_world  # noqa: E402

HERE = Path(__file__).parent
GIGABIT = 125e6
WIDE = {"width": 320, "samples": 4, "steps": 12, "clean_steps": 6}
TOLERANCE = 0.10
UNCOUNTED = ("one core", "busy core")  # nobody knows how much of a step they take
QUIET = 0.25  # cores that others may keep busy

# name, how many runs of it, and the case
CAUSES: list[tuple[int, Case]] = [
    (4, Case(name="30 ms of data, 2 ranks", cause="data", expected="data-loader", seconds=0.03)),
    (2, Case(name="30 ms of data, 1 rank", cause="data", expected="data-loader", seconds=0.03, world=1)),
    (2, Case(name="30 ms of data, accumulation 4", cause="data", expected="data-loader", seconds=0.03, grad_accum=4,
             samples=4)),
    (4, Case(name="50 ms in forward of rank 1", cause="forward on one rank", expected="straggler", seconds=0.05)),
    (2, Case(name="50 ms in forward of rank 1, accumulation 4", cause="forward on one rank", expected="straggler",
             seconds=0.05, grad_accum=4, samples=4)),
    (2, Case(name="50 ms in forward of rank 1, fsdp", cause="forward on one rank", expected="straggler", seconds=0.05,
             strategy="fsdp", samples=16)),
    (3, Case(name="50 ms in the loop's code of rank 1", cause="code on one rank", expected="straggler", seconds=0.05)),
    (3, Case(name="50 ms of data of rank 1", cause="data on one rank", expected="straggler", seconds=0.05)),
    (4, Case(name="0.3 s more in each save", cause="save", expected="checkpoint-stall", seconds=0.3)),
    (1, Case(name="0.3 s more in each save, 1 rank", cause="save", expected="checkpoint-stall", seconds=0.3, world=1)),
    (4, Case(name="link at 1 Gbit/s", cause="link", expected="slow-link", rate="1gbit", **WIDE)),
    (4, Case(name="link at 100 Mbit/s", cause="link", expected="slow-link", rate="100mbit", **WIDE)),
    (1, Case(name="link at 1 Gbit/s, fsdp", cause="link", expected="slow-link", rate="1gbit", strategy="fsdp", **WIDE)),
    (5, Case(name="reduction after each of 4 micro batches", cause="early sync", expected="early-sync", grad_accum=4,
             link_speed=GIGABIT, **WIDE)),
    (5, Case(name="30 ms of rank 1's core taken away", cause="core taken", expected="cpu-oversubscription",
             seconds=0.03)),
    (3, Case(name="both ranks on one core", cause="one core", expected="cpu-oversubscription")),
    (3, Case(name="another process computes", cause="busy core", expected="cpu-oversubscription")),
]  # fmt: skip
CLEAN: list[tuple[int, Case]] = [
    (6, Case(name="clean, 1 rank", world=1)),
    (10, Case(name="clean, 2 ranks")),
    (3, Case(name="clean, 1 rank, accumulation 4", world=1, grad_accum=4, samples=4)),
    (6, Case(name="clean, 2 ranks, accumulation 4", grad_accum=4, samples=4)),
]
ADVICE: list[Case] = [
    Case(name="30 ms of data", cause="data", expected="data-loader", seconds=0.03, world=1),
    Case(name="60 ms of data", cause="data", expected="data-loader", seconds=0.06, world=1),
    Case(name="30 ms of data, 2 ranks", cause="data", expected="data-loader", seconds=0.03),
]


def main() -> None:
    """Run what is asked for, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=float, default=1.0, help="times the number of runs of each case")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name has one of these words")
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    os.environ["SHARDWISE_HISTORY"] = "off"
    results = []
    for case in wanted(options.repeat, options.only):
        try:
            found = run(case)
        except RuntimeError as error:  # a rank died: that is no verdict, and is said
            print(f"failed: {case.name}: {str(error)[-300:]}", flush=True)
            continue
        if found is None:
            print(f"left out: {case.name}: {why_not()}", flush=True)
            continue
        results.append(found)
        print(line(found), flush=True)
    advice = [] if options.only else [pair for case in ADVICE for pair in [follow(case)]]
    write(options.output, results, advice)


def wanted(repeat: float, only: Sequence[str]) -> Iterator[Case]:
    """The cases, each as often as it is to be run; taken in turn, so that a busy minute does not hit one of them."""
    rows = [(max(1, round(times * repeat)), case) for times, case in [*CAUSES, *CLEAN]]
    rows = [row for row in rows if not only or any(word in row[1].name for word in only)]
    for turn in range(max((times for times, _ in rows), default=0)):
        yield from (case for times, case in rows if turn < times)


def run(case: Case) -> Result | None:
    """One run, on two hosts where it is about their link; nothing where those cannot be made here."""
    if case.cause != "link" and case.link_speed is None:
        with tempfile.TemporaryDirectory() as folder:
            found: Result = run_world(run_case, case.world, case, folder)[0]
            return found
    if why_not() is not None:
        return None
    with two_hosts(rate="1gbit" if case.link_speed else None) as hosts, tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "case.json", Path(folder) / "result.json"
        question.write_text(case.model_dump_json())
        done = hosts.torchrun(["-m", "tests.injections", str(question), str(answer)], cwd=ROOT)
        if any(one.returncode for one in done):
            raise RuntimeError("\n".join(one.stderr[-2000:] for one in done))
        return Result.model_validate_json(answer.read_text())


def follow(case: Case) -> tuple[Result, Result]:
    """A run that waits for its data, and the same with as many workers as its finding asks for."""
    before = _with_workers(case)
    found = next(finding for finding in before.findings if finding.kind == "data-loader")
    asked = re.search(r"num_workers=(\d+)", found.fix)
    assert asked is not None
    after = _with_workers(case.model_copy(update={"workers": int(asked[1]), "expected": "healthy"}))
    print(f"{case.name}: {asked[1]} workers asked for, then {after.timing.seconds('data') * 1e3:.1f} ms of data a step")
    return before, after


def _with_workers(case: Case) -> Result:
    """In processes of their own, which may have data workers."""
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "case.json", Path(folder) / "result.json"
        question.write_text(case.model_dump_json())
        argv = [sys.executable, "-m", "tests.injections", str(question), str(answer)]
        before = Path.cwd()
        os.chdir(ROOT)
        try:
            run_local(argv, case.world, threads=1, logs=Path(folder) / "logs")
        finally:
            os.chdir(before)
        return Result.model_validate_json(answer.read_text())


def line(found: Result) -> str:
    """A run in a line."""
    verdict = "right" if found.right else f"WRONG ({', '.join(f'{f.level} {f.kind}' for f in found.findings[:3])})"
    return f"{found.case.name}: {verdict}{error_text(found)}{'' if quiet(found) else '; the machine was busy'}"


def error(found: Result) -> float | None:
    """How far off the seconds are that were put down to the cause; ``None`` where there was none."""
    if not found.injected_s or found.attributed_s is None:
        return None
    return found.attributed_s / found.injected_s - 1


def error_text(found: Result) -> str:
    """Injected and attributed, for the screen."""
    off = error(found)
    if off is None or found.injected_s is None or found.attributed_s is None:
        return ""
    return f"; {found.injected_s * 1e3:.1f} ms injected, {found.attributed_s * 1e3:.1f} ms attributed ({off:+.1%})"


def quiet(found: Result) -> bool:
    """Whether nobody else used the machine, as far as it is known."""
    return found.others is None or found.others < QUIET or found.case.cause == "busy core"


def write(output: Path, results: list[Result], advice: list[tuple[Result, Result]]) -> None:
    """``results.json`` and ``README.md``."""
    output.mkdir(parents=True, exist_ok=True)
    document = {
        "runs": [json.loads(found.model_dump_json()) for found in results],
        "advice": [[json.loads(one.model_dump_json()) for one in pair] for pair in advice],
    }
    (output / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    (output / "README.md").write_text(page(results, advice))


def page(results: list[Result], advice: list[tuple[Result, Result]]) -> str:
    """The page of this folder."""
    injected = [found for found in results if found.case.cause != "none"]
    clean = [found for found in results if found.case.cause == "none"]
    counted = [found for found in injected if found.case.cause not in UNCOUNTED]
    offs = [abs(off) for off in map(error, counted) if off is not None]
    within = sum(off <= TOLERANCE for off in offs)
    lines = [
        "<!-- written by run.py from the runs in results.json; edit run.py, not this file -->",
        "# How right diagnosis is",
        "",
        "`python benchmarks/diagnosis/run.py` puts one cause into the middle of a real training run on gloo ranks, and",
        "asks `diagnose` about that part of it. Right is a verdict whose only alarm is the cause, on the rank that has",
        "it. What was injected is known: the sleep, a stopwatch around the saves, or else what a step took longer than",
        "the clean steps before and after it.",
        "",
        f"- right verdicts with a cause: **{sum(f.right for f in injected)} of {len(injected)}**",
        f"- no alarm without one: **{sum(f.right for f in clean)} of {len(clean)}**",
        f"- seconds within {TOLERANCE:.0%} of what was injected: **{within} of {len(offs)}** runs"
        + (f", median error {statistics.median(offs):.1%}, worst {max(offs):.1%}" if offs else ""),
        f"- runs in which others kept more than {QUIET} cores busy: {sum(not quiet(f) for f in results)}",
        "",
        "Where both ranks share a core, or another process computes, what is injected is only known by the longer",
        "steps, and these are not longer by all the time that a rank had no core: alone on a processor's core a rank",
        "computes faster than beside a neighbour, and waits for cores and for ranks overlap. Those runs are in the",
        "table and left out of the count of seconds; where the core is taken for 30 ms, all of it is known.",
        "",
        "| run | right | injected a step | put down to it | median error | worst |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(found.case.name for found in results):
        lines.append(row(name, [found for found in results if found.case.name == name]))
    lines += ["", "## Following the advice", ""]
    lines += [
        "A run whose loader is too slow, and the same run with the number of workers that its finding asks for.",
        "",
        "| run | workers | data a step before | after | step before | after |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for before, after in advice:
        data = [one.timing.seconds("data") * 1e3 for one in (before, after)]
        step = [one.timing.step_s * 1e3 for one in (before, after)]
        lines.append(
            f"| {before.case.name} | {after.case.workers} | {data[0]:.1f} ms | {data[1]:.1f} ms | {step[0]:.1f} ms "
            f"| {step[1]:.1f} ms |"
        )
    return "\n".join(lines) + "\n"


def row(name: str, found: list[Result]) -> str:
    """A line of the table: all runs of a case."""
    right = f"{sum(f.right for f in found)} of {len(found)}"
    known = [(f.injected_s, f.attributed_s, abs(off)) for f in found if (off := error(f)) is not None]
    if not known:
        return f"| {name} | {right} | | | | |"
    middle = [statistics.median(values) for values in zip(*known, strict=True)]
    worst = max(off for _, _, off in known)
    assert not math.isnan(worst)
    return f"| {name} | {right} | {middle[0] * 1e3:.1f} ms | {middle[1] * 1e3:.1f} ms | {middle[2]:.1%} | {worst:.1%} |"


if __name__ == "__main__":
    main()
