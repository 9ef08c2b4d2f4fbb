"""``shardwise bench step``: prepare, start the ranks, show the ratios and keep the raw samples."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardwise.cli.job import Job, prepare_job
from shardwise.cli.train import launch
from shardwise.errors import UserError
from shardwise.launch.rank import guarded
from shardwise.train.config import read_config

CONTENDERS = ("ddp", "fsdp")


def run_bench_step(config_file: Path, overrides: list[str], *, steps: int, output: Path, as_json: bool) -> None:
    """The verb."""
    from shardwise.measure.step_bench import StepSamples

    console = Console(stderr=as_json, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(config_file, [*overrides, f"train.output={folder}", f"train.steps={steps}"])
        if config.parallel.precision != "fp32" or config.parallel.recompute != "none":
            raise UserError("bench step compares fp32 loops without recompute; leave both at their defaults")
        prepared = prepare_job(config, lambda text: console.print(f"data: {text}"), as_json=as_json)
        if prepared.job.plan.dims.world_size < 2:
            raise UserError("bench step compares distributed loops and needs 2 ranks or more; use --nproc 2")
        console.print(f"timing {steps} steps of each loop, turn by turn")
        launch(prepared.job, 0, module="shardwise.cli.bench")
        raw = json.loads((Path(folder) / "samples.json").read_text())
    samples = [StepSamples(**item) for item in raw["samples"]]
    table = Table(title="plain step time ÷ Shardwise step time (1.00 = no overhead)", title_justify="left")
    for column in ("strategy", "median", "quartiles", "plain median", "Shardwise median", "steps"):
        table.add_column(column, justify="right")
    for item in samples:
        ours, plain = sorted(item.shardwise_s), sorted(item.plain_s)
        table.add_row(
            item.strategy,
            f"{item.quantile(0.5):.3f}",
            f"{item.quantile(0.25):.3f} to {item.quantile(0.75):.3f}",
            f"{plain[len(plain) // 2] * 1e3:.1f} ms",
            f"{ours[len(ours) // 2] * 1e3:.1f} ms",
            str(len(ours)),
        )
    console.print(table)
    output.mkdir(parents=True, exist_ok=True)
    raw["median_ratio"] = {item.strategy: item.quantile(0.5) for item in samples}
    file = output / f"step_{raw['device'].replace(' ', '-').lower()}_{raw['date']}.json"
    file.write_text(json.dumps(raw, indent=1) + "\n")
    console.print(f"raw samples: {file}")
    if as_json:
        print(json.dumps({"schema": 1, **raw}))


def rank_main() -> int:
    """One rank of the bench; rank 0 writes ``samples.json`` into the job's output folder."""
    import datetime
    import platform
    from collections.abc import Iterator

    import torch

    from shardwise.measure.plain import Batch
    from shardwise.measure.step_bench import bench_step
    from shardwise.parallel.group import join, leave
    from shardwise.train.corpus import open_corpus
    from shardwise.train.model import model_factory
    from shardwise.train.order import Order, rank_ids
    from shardwise.train.samples import samples_for

    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    ranks, corpus = join(job.plan.device), open_corpus(job.corpus)
    data = samples_for(corpus.train, job.config.data, corpus.separator)
    order = Order(len(data), job.config.train.seed, job.config.data.shuffle)
    micro = job.plan.micro_batch or 1

    def batches() -> Iterator[Batch]:
        position = 0
        while True:
            inputs, labels = data.batch(rank_ids(order, position, ranks.world_size, ranks.rank, micro, 1)[0])
            yield inputs.to(ranks.device), labels.to(ranks.device)
            position += micro * ranks.world_size

    factory = model_factory(job.config, corpus.vocab_size)
    steps = job.config.train.steps or 1
    found = [bench_step(job.config, job.plan, factory, batches(), ranks, name, steps) for name in CONTENDERS]
    if ranks.is_main:
        document = {
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
            "ranks": ranks.world_size,
            "threads_per_rank": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "batch": job.plan.batch_equation(),
            "model": job.config.model.config or job.config.model.factory,
            "precision": job.plan.precision,
            "samples": [item.model_dump() for item in found],
        }
        (Path(job.config.train.output) / "samples.json").write_text(json.dumps(document))
    leave(ranks)
    return 0


if __name__ == "__main__":
    guarded(rank_main)
