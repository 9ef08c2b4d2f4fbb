"""``shardwise bench choice``: is the plan that ``--strategy auto`` takes the fastest of those that fit?"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.cli.train import launch
from shardwise.errors import DoesNotFit, PlanError, UserError
from shardwise.launch.rank import guarded
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import BASES
from shardwise.run.job import Job, prepare_job
from shardwise.train.config import read_config
from shardwise.units import seconds_text

PLANS, TIMES = "plans.json", "times.json"
NEAR = 1.10  # the chosen plan's time over the best one's that is aimed at


def run_bench_choice(
    configs: list[Path], overrides: list[str], *, worlds: list[int], steps: int, output: Path, as_json: bool
) -> None:
    """The verb: every configuration at every number of ranks.

    Raises:
        UserError: a configuration or the folder for the samples cannot be; said before anything is measured.
    """
    _check(configs, overrides, output)
    console = Console(stderr=as_json, highlight=False)
    cases = []
    for file in configs:
        for world in worlds:
            console.print(f"{file.stem} on {world} ranks: {steps} steps of each strategy, turn by turn", markup=False)
            cases.append(_case(file, overrides, world, steps))
    table = Table(title="chosen plan against the fastest, medians of a step", title_justify="left")
    for name in ("case", "ranks", "chosen", "its step", "fastest", "its step", "chosen / fastest"):
        table.add_column(name, justify="left" if name in ("case", "chosen", "fastest") else "right")
    for case in cases:
        table.add_row(
            case["model"],
            str(case["ranks"]),
            case["chosen"],
            seconds_text(case["median_s"][case["chosen"]]),
            case["fastest"],
            seconds_text(case["median_s"][case["fastest"]]),
            f"{case['ratio']:.3f}",
        )
    console.print(table)
    near = sum(case["ratio"] <= NEAR for case in cases)
    console.print(f"{near} of {len(cases)} within 10 % of the fastest")
    output.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "steps": steps,
        "cases": cases,
    }
    device = str(cases[0]["device"]).replace(" ", "-").lower()
    raw = output / f"choice_{device}_{document['date']}.json"
    raw.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"raw samples: {raw}")
    if as_json:
        print(json.dumps(document))


def _check(configs: list[Path], overrides: list[str], output: Path) -> None:
    problems: list[str] = []
    for file in configs:
        try:
            read_config(file, overrides)
        except UserError as error:
            problems += error.problems
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not existing.is_dir():
        problems.append(f"--output '{output}': '{existing}' is a file; give a folder")
    elif not os.access(existing, os.W_OK):
        problems.append(f"--output '{output}': '{existing}' cannot be written; give another folder")
    if problems:
        raise UserError(*problems)


def _case(file: Path, overrides: list[str], world: int, steps: int) -> dict[str, Any]:
    """Choose, lay out every other strategy that fits, and time all of them on the same ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*overrides, f"train.output={folder}", f"train.steps={steps}", f"parallel.nproc={world}"]
        config = read_config(file, [*words, "parallel.strategy=auto"])
        job = prepare_job(config, lambda text: None).job
        plans = {job.plan.strategy: job.plan}
        for base in BASES:
            if (base != job.plan.strategy) and (plan := _pinned(file, [*words, f"parallel.strategy={base}"])):
                plans[base] = plan
        chosen = job.plan.strategy
        (Path(folder) / PLANS).write_text(json.dumps([json.loads(plan.to_json()) for plan in plans.values()]))
        launch(job, 0, module="shardwise.cli.choice")
        found = json.loads((Path(folder) / TIMES).read_text())
    samples = dict(zip(plans, found["seconds"], strict=True))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    fastest = min(medians, key=lambda name: medians[name])
    return {
        "model": file.stem,
        "ranks": world,
        "device": found["device"],
        "threads_per_rank": found["threads"],
        "chosen": chosen,
        "reason": job.plan.reason,
        "fastest": fastest,
        "ratio": medians[chosen] / medians[fastest],
        "median_s": medians,
        "seconds": samples,
    }


def _pinned(file: Path, words: list[str]) -> Plan | None:
    """The plan of one strategy; ``None`` where it cannot be laid out."""
    try:
        return prepare_job(read_config(file, words), lambda text: None).job.plan
    except (PlanError, DoesNotFit):
        return None


def rank_main() -> int:
    """One rank of one case; rank 0 writes the times into the job's output folder."""
    from collections.abc import Iterator

    import torch

    from shardwise.bench.step.choice_bench import time_plans
    from shardwise.bench.step.plain import Batch
    from shardwise.distributed.process_group import join, leave
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.data.order import Order, rank_ids
    from shardwise.train.data.samples import samples_for
    from shardwise.train.model import model_factory

    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    output = Path(job.config.train.output)
    plans = [Plan.model_validate(item) for item in json.loads((output / PLANS).read_text())]
    ranks, corpus = join(job.plan.device), open_corpus(job.corpus)
    data = samples_for(corpus.train, job.config.data, corpus.separator)
    order = Order(len(data), job.config.train.seed, job.config.data.shuffle)
    share = (job.plan.global_batch or ranks.world_size) // ranks.world_size

    def batches() -> Iterator[Batch]:
        position = 0
        while True:
            inputs, labels = data.batch(rank_ids(order, position, ranks.world_size, ranks.rank, share, 1)[0])
            yield inputs.to(ranks.device), labels.to(ranks.device)
            position += share * ranks.world_size

    factory = model_factory(job.config, corpus.vocab_size)
    seconds = time_plans(job.config, plans, factory, batches(), ranks, job.config.train.steps or 1)
    if ranks.is_main:
        device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
        facts = {"device": device, "threads": torch.get_num_threads(), "seconds": seconds}
        (output / TIMES).write_text(json.dumps(facts))
    leave(ranks)
    return 0


if __name__ == "__main__":
    guarded(rank_main)
