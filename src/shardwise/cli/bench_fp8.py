"""``shardwise bench step --fp8``: whether the config's recipe of fp8 products is faster than bf16 on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shardwise.bench.step.fp8_probe import NOT_HERE, Fp8Samples, Fp8Task, probed_plan
from shardwise.cli.train import threads
from shardwise.launch.on_ranks import on_ranks
from shardwise.run.job import prepare_job

if TYPE_CHECKING:
    from shardwise.train.config import Config

WORK = "shardwise.bench.step.fp8_probe:time_fp8"


def bench_fp8(config: Config, steps: int, output: Path, *, as_json: bool) -> None:
    """Measure ``steps`` steps of each, print which is faster, and keep the samples.

    Ranks whose products are emulated are not measured.

    Raises:
        UserError: the config has no recipe, or one that is not run here.
    """
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
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
