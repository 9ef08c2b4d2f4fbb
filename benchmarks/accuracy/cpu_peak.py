"""Predicted against measured peaks on real gloo ranks.

Strategy × recompute × micro batch × accumulation × optimizer × precision × world.

Predicted by `shardwise.dryrun.rehearse` (the program on fake tensors). Measured from the records that torch's own CPU
allocator gives its profiler, by none of the predictor's code: the total that the allocator counts, at every
allocation, from before the model is built. torch counts frees of other threads (gloo's) only with its flag
``caffe2_report_cpu_memory_usage``, which is set in the ranks. Those threads give a collective's buffers back by
chance a little late, so the median over steps 2 to 6 is compared with the prediction of step 2; every step's peak is
kept, and ``worst_single_step`` says how far the worst one of all was off.

    .venv/bin/python -m benchmarks.accuracy.cpu_peak [--quick]

Writes results/cpu_peak.json with every sample; prints the table, the worst first.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardwise.dryrun.record import peaks_of
from shardwise.dryrun.rehearse import rehearse
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from tests.worlds import run_world

RESULTS = Path(__file__).parent / "results" / "cpu_peak.json"
LENGTH, STEPS = 128, 6  # from the second step on all are alike
PHASES = ("load", "forward", "backward", "optimizer")
SIZES = {
    "gpt": {"vocab": 2048, "width": 256, "heads": 4, "blocks": 4},
    "wide": {"vocab": 515, "width": 384, "heads": 6, "blocks": 2},
    "deep": {"vocab": 1024, "width": 192, "heads": 3, "blocks": 8},
}


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """A small decoder."""

    def __init__(self, vocab: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def measured_peaks(document: str, optimizer: dict[str, Any], size: dict[str, int]) -> dict[str, int]:
    """On one rank: train, and give the most bytes that torch's allocator held, by step and phase."""
    from torch.autograd.profiler import record_function
    from torch.profiler import ProfilerActivity, profile

    from shardwise.distributed.process_group import join
    from shardwise.parallel.materialize import build
    from shardwise.train.config import OptimizerTable
    from shardwise.train.loss import token_loss_sum
    from shardwise.train.optimizer import build_optimizer
    from shardwise.train.session import Session

    library = ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so")
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    plan, ranks = Plan.model_validate_json(document), join("cpu")
    generator = torch.Generator().manual_seed(ranks.rank)

    def enter(name: str) -> None:
        with record_function(f"phase {name}"):
            pass

    def windows() -> Iterator[list[Any]]:
        for number in range(1, STEPS + 1):
            enter(f"{number} forward")
            shape = (plan.micro_batch or 1, LENGTH)
            ids = [torch.randint(500, shape, generator=generator) for _ in range(plan.grad_accum)]
            yield [(part, part.clone()) for part in ids]

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        enter("0 load")
        session = Session(ranks=ranks, planner=lambda *_: plan)
        model = build(functools.partial(Transformer, **size), 0, real=ranks.is_main)
        made = build_optimizer(model.parameters(), OptimizerTable(**optimizer))
        outer, made = session.prepare(model, made)
        del model
        for step in session.run_windows(windows()):
            for micro in step:
                enter(f"{step.number} forward")
                loss = token_loss_sum(outer(micro.inputs), micro.labels)
                enter(f"{step.number} backward")
                step.backward(loss)
                del loss
            enter(f"{step.number} optimizer")
            step.update(made, clip_norm=1.0)
    session.close()
    return peaks_in(profiled.profiler.kineto_results.experimental_event_tree())


def peaks_in(roots: list[Any]) -> dict[str, int]:
    """The allocator's largest total in each phase, from a profile's events."""
    nodes, waiting = [], list(roots)
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children)
        nodes.append(node)
    peaks: dict[str, int] = {}
    phase, total = "", 0
    for node in sorted(nodes, key=lambda node: node.start_time_ns):
        fields = node.extra_fields
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation):
            total = fields.total_allocated
        elif node.name.startswith("phase "):
            phase = node.name.removeprefix("phase ")
        peaks[phase] = max(peaks.get(phase, 0), total)
    return peaks


def predicted_peaks(plan: Plan, optimizer: dict[str, Any], size: dict[str, int], rank: int) -> dict[str, int]:
    """The same by rehearsal."""
    found = rehearse(functools.partial(Transformer, **size), plan, optimizer=optimizer, rank=rank)
    return {f"{p.step} {p.phase}": p.allocated for p in peaks_of(found.events, found.categories)[0]}


def configurations() -> list[dict[str, Any]]:
    """Every strategy with every world it makes sense on, the other choices in turn so that each meets each."""
    choices = itertools.cycle(
        itertools.product(("none", "full", "selective"), ("fp32", "bf16"), ("adamw", "sgd"), (1, 4), (1, 2))
    )
    stride = 5  # no divisor of 48, so that the cycle visits all
    found = []
    worlds = [("ddp", 1), ("fsdp", 1), *((s, w) for w in (2, 4) for s in ("ddp", "zero1", "zero2", "fsdp", "hsdp"))]
    for turn in range(6):
        for index, (strategy, world) in enumerate(worlds):
            recompute, precision, optimizer, micro, accum = next(itertools.islice(choices, stride - 1, None))
            size = list(SIZES)[(turn + index) % len(SIZES)]
            found.append(
                {
                    "strategy": strategy,
                    "world": world,
                    "model": size,
                    "recompute": recompute,
                    "precision": precision,
                    "optimizer": optimizer,
                    "micro_batch": micro,
                    "grad_accum": accum,
                }
            )
    return found


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """One configuration, with what was predicted and measured on its first and last rank."""
    world, size = row["world"], SIZES[row["model"]]
    optimizer = {"name": row["optimizer"]} | ({"momentum": 0.9} if row["optimizer"] == "sgd" else {})
    plan = Plan(
        strategy=row["strategy"],
        dims=dims_for(parse_strategy(row["strategy"]), world),
        micro_batch=row["micro_batch"],
        grad_accum=row["grad_accum"],
        seq_len=LENGTH,
        precision=row["precision"],
        recompute=row["recompute"],
    )
    real = run_world(measured_peaks, world, plan.to_json(), optimizer, size)
    samples = []
    for rank in sorted({0, world - 1}):
        said = predicted_peaks(plan, optimizer, size, rank)
        samples.append({"rank": rank, "predicted": said, "measured": typical(real[rank]), "steps": real[rank]})
    return row | {"samples": samples, "error": max((error_of(sample) for sample in samples), key=abs)}


def typical(peaks: dict[str, int]) -> dict[str, int]:
    """The peaks while loading, in step 1, and the median of the steps that follow."""
    found = {name: size for name, size in peaks.items() if name[0] in "01"}
    for phase in PHASES[1:]:
        found[f"2 {phase}"] = int(statistics.median(peaks[f"{step} {phase}"] for step in range(2, STEPS + 1)))
    return found


def error_of(sample: dict[str, Any], measured: str = "measured") -> float:
    """Relative error of the peak of all phases after loading."""
    said, has = (max(v for k, v in sample[name].items() if not k.endswith("load")) for name in ("predicted", measured))
    return said / has - 1.0


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the table's foot."""
    errors = [row["error"] for row in rows]
    by_phase: dict[str, list[float]] = {}
    for row, phase in itertools.product(rows, PHASES):
        for sample in row["samples"]:
            for key, has in sample["measured"].items():
                if key.endswith(phase):
                    by_phase.setdefault(phase, []).append(sample["predicted"][key] / has - 1.0)
    return {
        "configurations": len(rows),
        "median_abs_error": statistics.median(map(abs, errors)),
        "worst_abs_error": max(map(abs, errors)),
        "mean_signed_error": statistics.fmean(errors),
        "worst_single_step": min(error_of(sample, "steps") for row in rows for sample in row["samples"]),
        "over": sum(e > 1e-6 for e in errors),
        "under": sum(e < -1e-6 for e in errors),
        "worst_by_phase": {phase: max(found, key=abs) for phase, found in by_phase.items()},
        "torch": torch.__version__,
    }


def main() -> None:
    """Run, write, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one configuration in nine; writes nothing")
    chosen = configurations()
    quick = parser.parse_args().quick
    rows = []
    for row in chosen[::9] if quick else chosen:
        rows.append(compare(row))
        print(f"{len(rows)} of {len(chosen)}", file=sys.stderr)
    rows.sort(key=lambda row: -abs(row["error"]))
    for row in rows:
        facts = " ".join(str(value) for key, value in row.items() if key not in ("samples", "error"))
        print(f"{row['error']:+9.4%}  {facts}")
    foot = summary(rows)
    print(json.dumps(foot, indent=1))
    if not quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"schema": 1, "summary": foot, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
