"""What attribution, the checks of each step, of gradients, or the watchdog cost: with and without, on real gloo ranks.

    python benchmarks/attribution/overhead.py --steps 60 --output benchmarks/attribution
    python benchmarks/attribution/overhead.py --of checks --steps 60 --output benchmarks/attribution
    python benchmarks/attribution/overhead.py --of watch --steps 60 --output benchmarks/watch
    python benchmarks/attribution/overhead.py --of gradients --steps 60 --output benchmarks/watch

Samples are kept, of contenders that take turns. ``watch`` is a rank's part of the watchdog, ``gradients`` a check in
each step for parameters that have lost their gradient (a run makes it so rarely that it takes a thousandth). ``checks``
are those of `shardwise.train.agreement`, `shardwise.parallel.data_parallel.unit_order` and what a session looks at by
itself (hooks, the model's structure): the plain contender reduces its loss as before and leaves FSDP2 as it is.

Steps of a machine scatter by more than is looked for, so the CPU time of the thread that trains is compared, too: what
the clock costs is work of that thread. Checks and the watchdog cost less than even that resolves, and cost the same
whatever the width of the model: they are also timed on a model of as many layers and parameters with a few elements
each, and ``cost_ratio`` is their time there beside the CPU time of the whole model's plain step. Also how well the
parts of attribution add up: the sum of all parts of each run over a stopwatch around the same steps.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

STRATEGIES = ("ddp", "fsdp", "zero1", "ddp+tp2", "ddp+pp2")
WARM_UP = 10


def main() -> None:
    """Start two ranks for each strategy, and write what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each contender")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/attribution"))
    parser.add_argument("--of", choices=("attribution", "checks", "watch", "gradients"), default="attribution")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank(arguments.of, arguments.rank_of, arguments.steps, arguments.output)
        return
    import torch

    found: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
            asked = ["--of", arguments.of, "--rank-of", strategy, "--steps", str(arguments.steps), "--output", folder]
            subprocess.run([*command, *asked], check=True)
            found.append(json.loads((Path(folder) / "samples.json").read_text()))
        item = found[-1]
        print(
            f"{strategy}: with {arguments.of} {item['median_ratio']:.4f} of without "
            f"(quartiles {item['quartiles'][0]:.4f} to {item['quartiles'][1]:.4f}); "
            f"of the CPU time of the training thread {item['cpu_ratio']:.4f}"
            + (f"; {1e3 * item['cost_s']:.2f} ms, {item['cost_ratio']:.4f}" if "cost_s" in item else "")
            + (f"; parts add up to {item['adds_up']:.4f} of a stopwatch" if "adds_up" in item else "")
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
    name = "overhead" if arguments.of == "attribution" else arguments.of
    (arguments.output / f"{name}_cpu_{date}.json").write_text(json.dumps(document, indent=1) + "\n")


def rank(of: str, strategy: str, steps: int, output: Path) -> None:
    """Two sessions of one plan take turns; the clock is off while the plain one has its turn."""
    import torch
    import torch.distributed as dist

    from shardwise.bench.step.step_bench import session_loop
    from shardwise.distributed.comm_timer import COMM_TIMER
    from shardwise.distributed.process_group import join, leave
    from shardwise.measure.step_time.attribution import Attribution
    from shardwise.plan.dims import dims_for
    from shardwise.plan.plan import Plan
    from shardwise.plan.strategy import parse_strategy
    from shardwise.receipts.lost_gradients import LostGradients
    from shardwise.watch.rank_watch import RankWatch

    torch.set_num_threads(1)
    ranks = join("cpu")
    accum = 4 if "pp" in strategy else 1
    plan = Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), 2), micro_batch=4 // accum, grad_accum=accum)
    listener = COMM_TIMER.listener

    def turns(model_of: Any, length: int, number: int) -> tuple[Any, Any, list[Any]]:
        """Seconds of each step with and without, as wall time and as CPU time of this thread."""
        nonlocal listener
        batch = torch.randint(0, 256, (4 // accum, length), generator=torch.Generator().manual_seed(0))
        loops, keepers = [], []
        for watched in (True, False):
            session, run = session_loop(plan, ranks, 1.0)
            keepers += [Attribution.attach(session)] if watched and of == "attribution" else []
            if watched and of == "watch":
                RankWatch(session, output)
            if watched and of == "gradients":
                LostGradients.attach(session, share=1e9)
            model = model_of()
            with nullcontext() if watched or of != "checks" else without_checks(session):
                prepared, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch)
            loops.append((run, prepared, optimizer))
        listener = COMM_TIMER.listener
        times: tuple[list[float], list[float]] = ([], [])
        cpu: tuple[list[float], list[float]] = ([], [])
        for turn in range(WARM_UP + number):
            for contender in (0, 1) if turn % 2 else (1, 0):
                COMM_TIMER.listener = listener if contender == 0 else None
                run, prepared, optimizer = loops[contender]
                dist.barrier()
                begin, worked = time.perf_counter(), time.thread_time()
                run(prepared, optimizer, [(batch, batch)] * accum)
                if turn >= WARM_UP:
                    times[contender].append(time.perf_counter() - begin)
                    cpu[contender].append(time.thread_time() - worked)
        COMM_TIMER.listener = listener
        for keeper in keepers:
            keeper.finish()
        return times, cpu, keepers

    times, cpu, keepers = turns(decoder, 256, steps)
    narrow = turns(functools.partial(decoder, narrow=True), 16, 4 * steps)[1] if of != "attribution" else ()
    if ranks.is_main:
        ratios = sorted(ours / plain for ours, plain in zip(*times, strict=True))
        document = {
            "strategy": strategy,
            "with_s": times[0],
            "without_s": times[1],
            "with_cpu_s": cpu[0],
            "without_cpu_s": cpu[1],
            "cpu_ratio": statistics.median(cpu[0]) / statistics.median(cpu[1]),
            "median_ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        }
        if narrow:
            cost = statistics.median(ours - plain for ours, plain in zip(*narrow, strict=True))
            document |= {"narrow_with_cpu_s": narrow[0], "narrow_without_cpu_s": narrow[1], "cost_s": cost}
            document["cost_ratio"] = 1 + cost / statistics.median(cpu[1])
        for timing in filter(None, (keeper.timing() for keeper in keepers)):
            document["adds_up"] = (timing.step_s + sum(timing.between_s.values())) / timing.stopwatch_s
        (output / "samples.json").write_text(json.dumps(document))
    leave(ranks)


@contextmanager
def without_checks(plain_session: Any) -> Iterator[None]:
    """Inside, ``plain_session`` is prepared so that it reduces its loss and checks nothing."""
    import torch
    import torch.distributed as dist

    from shardwise.parallel import apply as split
    from shardwise.parallel.data_parallel import fsdp as shard
    from shardwise.train import session
    from shardwise.train.agreement import Agreement
    from shardwise.train.hooks import ParameterHooks

    class Loss(Agreement):
        def finish_backward(self) -> None: ...

        def send(self, loss_sum: torch.Tensor) -> None:
            self.work = dist.all_reduce(loss_sum, async_op=True)

        def arrive(self) -> None:
            self.work.wait()

        def settle(self, loss_sum: torch.Tensor) -> torch.Tensor:
            self.work.wait()
            return loss_sum

    plain = shard.keep_order, split.keep_order, session.Agreement
    shard.keep_order = split.keep_order = lambda *args, **options: None
    session.Agreement = Loss
    try:
        yield
    finally:
        shard.keep_order, split.keep_order, session.Agreement = plain
    plain_session.observers.clear()  # the looks at hooks and at the model's structure
    plain_session.header[:] = [one for one in plain_session.header if not isinstance(one, ParameterHooks)]


def decoder(*, narrow: bool = False) -> Any:
    """The model of ``examples/stdlib.toml``, seeded; ``narrow``: as many layers and parameters, of a few elements."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    folder = Path(__file__).parents[2] / "examples" / "llama-2m"
    config = AutoConfig.from_pretrained(folder, vocab_size=256)
    if narrow:
        config.update({"hidden_size": 24, "intermediate_size": 32, "head_dim": 4})
    return AutoModelForCausalLM.from_config(config)


if __name__ == "__main__":
    main()
