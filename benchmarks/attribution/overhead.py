"""What attribution costs: steps with and without it, turn by turn in one run of real gloo ranks, all samples kept.

    python benchmarks/attribution/overhead.py --steps 60 --output benchmarks/attribution

Steps of a machine scatter by more than is looked for, so the CPU time of the thread that trains is compared, too: what
the clock costs is work of that thread. Also how well the parts add up: the sum of all parts of each run over a
stopwatch around the same steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STRATEGIES = ("ddp", "fsdp", "zero1", "ddp+tp2", "ddp+pp2")
WARM_UP = 6


def main() -> None:
    """Start two ranks for each strategy, and write what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each contender")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/attribution"))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank(arguments.rank_of, arguments.steps, arguments.output)
        return
    import torch

    found: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
            subprocess.run(
                [*command, "--rank-of", strategy, "--steps", str(arguments.steps), "--output", folder], check=True
            )
            found.append(json.loads((Path(folder) / "samples.json").read_text()))
        item = found[-1]
        print(
            f"{strategy}: with attribution {item['median_ratio']:.4f} of without "
            f"(quartiles {item['quartiles'][0]:.4f} to {item['quartiles'][1]:.4f}); "
            f"of the CPU time of the training thread {item['cpu_ratio']:.4f}; "
            f"parts add up to {item['adds_up']:.4f} of a stopwatch"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    document = {
        "date": date,
        "device": "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "steps": arguments.steps,
        "samples": found,
    }
    (arguments.output / f"overhead_cpu_{date}.json").write_text(json.dumps(document, indent=1) + "\n")


def rank(strategy: str, steps: int, output: Path) -> None:
    """Two sessions of one plan take turns; the clock is off while the plain one has its turn."""
    import torch
    import torch.distributed as dist

    from shardwise.measure.attribution import Attribution
    from shardwise.measure.step_bench import session_loop
    from shardwise.parallel.group import join, leave
    from shardwise.parallel.waits import WAITS
    from shardwise.plan.dims import dims_for
    from shardwise.plan.plan import Plan
    from shardwise.plan.strategy import parse_strategy

    torch.set_num_threads(1)
    ranks = join("cpu")
    accum = 4 if "pp" in strategy else 1
    plan = Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), 2), micro_batch=4 // accum, grad_accum=accum)
    batch = torch.randint(0, 256, (4 // accum, 256), generator=torch.Generator().manual_seed(0))
    loops, keepers = [], []
    for watched in (True, False):
        session, run = session_loop(plan, ranks, 1.0)
        keepers += [Attribution.attach(session)] if watched else []
        model = decoder()
        prepared, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch)
        loops.append((run, prepared, optimizer))
    listener, keeper = WAITS.listener, keepers[0]
    times: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + steps):
        for contender in (0, 1) if turn % 2 else (1, 0):
            WAITS.listener = listener if contender == 0 else None
            run, prepared, optimizer = loops[contender]
            dist.barrier()
            begin, worked = time.perf_counter(), time.thread_time()
            run(prepared, optimizer, [(batch, batch)] * accum)
            if turn >= WARM_UP:
                times[contender].append(time.perf_counter() - begin)
                cpu[contender].append(time.thread_time() - worked)
    WAITS.listener = listener
    keeper.finish()
    timing = keeper.timing()
    if timing is not None:
        ratios = sorted(ours / plain for ours, plain in zip(*times, strict=True))
        whole = timing.step_s + sum(timing.between_s.values())
        document = {
            "strategy": strategy,
            "with_s": times[0],
            "without_s": times[1],
            "with_cpu_s": cpu[0],
            "without_cpu_s": cpu[1],
            "cpu_ratio": statistics.median(cpu[0]) / statistics.median(cpu[1]),
            "median_ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
            "adds_up": whole / timing.stopwatch_s,
        }
        (output / "samples.json").write_text(json.dumps(document))
    leave(ranks)


def decoder() -> Any:
    """The model of ``examples/stdlib.toml``, seeded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    folder = Path(__file__).parents[2] / "examples" / "llama-2m"
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, vocab_size=256))


if __name__ == "__main__":
    main()
