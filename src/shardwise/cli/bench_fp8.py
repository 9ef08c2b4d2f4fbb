"""``shardwise bench step --fp8``: whether the config's recipe of fp8 products is faster than bf16 on this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from rich.console import Console

from shardwise.bench.step.fp8_probe import NOT_HERE, Fp8Samples, Fp8Task, probed_plan
from shardwise.cli.train import threads
from shardwise.errors import UserError
from shardwise.launch.on_ranks import on_ranks
from shardwise.run.job import prepare_job
from shardwise.train.config import read_config
from shardwise.train.config_tasks import refuse_other_tasks

WORK = "shardwise.bench.step.fp8_probe:time_fp8"


def bench_fp8(config_file: Path, words: list[str], steps: int, output: Path, *, alone: bool, as_json: bool) -> None:
    """Measure ``steps`` steps of each, print which is faster, and keep the samples.

    Ranks whose products are emulated are not measured. ``alone``: nothing else is asked for.

    Raises:
        UserError: the config has no recipe, or one that is not run here, or more is asked for.
    """
    if not alone:
        raise UserError("--fp8 compares the config's own plan with bf16; leave --against, --bubble, --strategy out")
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(config_file, [*words, f"train.output={folder}", f"train.steps={steps}"])
        refuse_other_tasks(config, "bench step")
        job = prepare_job(config, lambda text: console.print(f"data: {text}"), as_json=as_json).job
        plan = probed_plan(job)
        if plan.fp8_emulate:
            console.print(NOT_HERE)
            if as_json:
                print(json.dumps({"schema": 1, "samples": None}))
            return
        console.print(f"timing {steps} steps of {plan.strategy} with fp8 = '{plan.fp8}' and in bf16, turn by turn")
        raw = on_ranks(WORK, Fp8Task(job=job), plan.dims.world_size, device=plan.device, threads=threads(job))[0]
    console.print(Fp8Samples(**raw["samples"]).verdict)
    output.mkdir(parents=True, exist_ok=True)
    file = output / f"fp8_{raw['device'].replace(' ', '-').lower()}_{raw['date']}.json"
    file.write_text(json.dumps(raw, indent=1) + "\n")
    console.print(f"raw samples: {file}")
    if as_json:
        print(json.dumps({"schema": 1, **raw}))
