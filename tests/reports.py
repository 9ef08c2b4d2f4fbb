"""Run folders for tests of the report: hand-made, with numbers that go together as a real run's do."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from shardwise.cost.link_calibration import CalibrationFile, MeasuredLink
from shardwise.cost.memory.estimate import Estimate, Phase
from shardwise.cost.time.step_time import StepTime
from shardwise.diagnosis.finding import Finding
from shardwise.measure.step_time.timing import PHASES, PhaseStats, Timing
from shardwise.measure.utilisation import Utilisation
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan

RANKS, GIB = 4, 2**30
# seconds of a step by part: rank 2 computes longer, and the others wait for it
MEANS = {
    "data": 0.0061,
    "transfer": 0.0008,
    "forward": 0.0712,
    "backward": 0.1485,
    "exposed_dp": 0.0324,
    "clip": 0.0021,
    "optimizer": 0.0113,
    "slowest_rank": 0.0372,
    "control": 0.0009,
    "other": 0.0025,
}
SLOW_S = 0.0496
PLAN = Plan(
    strategy="fsdp",
    dims=ParallelDims(dp_shard=RANKS),
    micro_batch=4,
    grad_accum=2,
    seq_len=2048,
    precision="bf16",
    device="cuda",
    reason="the fastest of 4 that fit",
)
ESTIMATE = Estimate(
    parameters=3 * GIB,
    gradients=3 * GIB,
    optimizer=6 * GIB,
    activations=21 * GIB,
    logits=2 * GIB,
    buffers=GIB,
    allocated=34 * GIB,
    reserved=36 * GIB,
    device=37 * GIB,
    phases=(
        Phase(name="forward", allocated=33 * GIB),
        Phase(name="backward", allocated=34 * GIB),
        Phase(name="optimizer", allocated=13 * GIB),
    ),
)
STEP_TIME = StepTime(step_s=0.265, low_s=0.24, high_s=0.31, mfu=0.44)
RECEIPTS = {
    "effects": {
        "ok": True,
        "lines": [
            {"name": "parameter dtype", "planned": "float32", "found": "float32", "ok": True},
            {"name": "all_gather per step", "planned": "66 calls, 5.81 GiB", "found": "66 calls, 5.81 GiB", "ok": True},
            {
                "name": "tied parameters",
                "planned": "model.embed_tokens.weight = lm_head.weight",
                "found": "the same",
                "ok": True,
            },
        ],
    },
    "fit": {
        "ok": True,
        "lines": [
            {"name": "parameters", "planned": "3.00 GiB", "found": "3.00 GiB", "ok": True},
            {"name": "peak allocated", "planned": "34.00 GiB", "found": "34.61 GiB (1.02 × plan)", "ok": None},
        ],
    },
}
USE = Utilisation(
    devices=RANKS,
    step_s=0.313,
    precision="bf16",
    model_flops_per_token=2.2e9,
    model_flops_per_s=1.157e14,
    executed_flops_per_s=1.157e14,
    peak_flops=3.12e14,
    peak_source="data sheet",
    mfu=0.371,
    hfu=0.371,
)
FINDINGS = (
    Finding(
        kind="straggler",
        level="alarm",
        text="Rank 2 is slower than the others, and all of them wait for it.",
        evidence=(
            "rank 2 came last in 94 % of the steps",
            "it computes 50 ms a step longer than the others, in forward and backward alike",
        ),
        fix="look at the clocks of its GPU with shardwise doctor; if it stays slow, take another device",
        seconds=SLOW_S,
        share=0.158,
        money=1.26,
        rank=2,
    ),
    Finding(
        kind="checkpoint-stall",
        level="hint",
        text="Training stands still for checkpoints 1.8 % of the time.",
        fix="set checkpoint.async_save = true",
        seconds=0.0056,
        share=0.018,
    ),
)


def timing() -> Timing:
    """Four ranks, of which rank 2 is slow."""
    ranks = []
    for rank in range(RANKS):
        mine = dict(MEANS)
        late = SLOW_S if rank == 2 else 0.0
        mine["forward"] += late * 0.33 - SLOW_S * 0.33 / RANKS
        mine["backward"] += late * 0.67 - SLOW_S * 0.67 / RANKS
        mine["slowest_rank"] = 0.0 if rank == 2 else MEANS["slowest_rank"] * RANKS / (RANKS - 1)
        ranks.append(mine)
    parts: dict[str, PhaseStats | None] = dict.fromkeys(PHASES)
    for part in MEANS:
        values = [rank[part] for rank in ranks]
        most = max(range(RANKS), key=lambda i: values[i])
        parts[part] = PhaseStats(
            mean_s=math.fsum(values) / RANKS, low_s=min(values), high_s=max(values), highest_rank=most
        )
    step_s = math.fsum(MEANS.values())
    return Timing(
        steps=115,
        warm_up=5,
        world_size=RANKS,
        step_s=step_s,
        median_step_s=step_s * 0.99,
        tokens_per_s=PLAN.micro_batch * PLAN.grad_accum * RANKS * 2048 / step_s,
        parts=parts,
        between_s={"checkpoint": 0.0056, "evaluation": 0.012},
        ranks=tuple(ranks),
        late_rank=2,
        late_share=0.94,
        unmeasured={"recompute": "nothing is computed again under recompute none", "exposed_tp": "no such axis"},
    )


def metrics(steps: int = 120, *, parts: bool = True) -> list[dict[str, Any]]:
    """Lines of a falling loss; a slow start, evaluations and checkpoints."""
    chance = random.Random(7)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        slow = 2.4 if step == 1 else 1.15 if step < 4 else 1.0
        mine = {part: seconds * slow * chance.uniform(0.94, 1.06) for part, seconds in MEANS.items()}
        seconds = math.fsum(mine.values())
        line = {
            "step": step,
            "loss": 7.9 * math.exp(-step / 40) + 2.9 + chance.gauss(0, 0.05),
            "learning_rate": 3e-4 * min(1.0, step / 10),
            "grad_norm": 4.0 / math.sqrt(step),
            "tokens": step * 65536,
            "step_time_s": seconds,
            "tokens_per_s": 65536 / seconds,
            "time": 1.76e9 + step * seconds,
        }
        lines.append(
            {**line, **({"parts": mine, "between_s": {"checkpoint": 0.0, "evaluation": 0.0}} if parts else {})}
        )
        if step % 40 == 0:
            lines.append(
                {"step": step, "checkpoint_bytes": 9 * GIB, "checkpoint_stall_s": 0.21, "checkpoint_write_s": 3.4}
            )
        if step % 30 == 0:
            lines.append({"step": step, "heldout_bits_per_byte": 4.1 - step / 100})
    return lines


def write_run(folder: Path, *, without: tuple[str, ...] = (), steps: int = 120, **changes: Any) -> Path:
    """A finished run in ``folder``; ``without`` names files to leave out, ``changes`` replace whole documents."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "schema": 1,
        "steps": steps,
        "tokens": steps * 65536,
        "loss": 3.4,
        "heldout_bits_per_byte": 2.9,
        "strategy": "fsdp",
        "receipts": RECEIPTS,
        "utilisation": USE.model_dump(mode="json"),
        "memory": {
            "parameters": 3 * GIB,
            "gradients": 3 * GIB,
            "optimizer": 6 * GIB,
            "peaks": {
                "start": 12 * GIB,
                "allocated": {"forward": 33.2 * GIB // 1, "backward": 34.6 * GIB // 1, "optimizer": 13.1 * GIB // 1},
                "reserved": {},
                "device": None,
            },
            "process_peak": 5 * GIB,
        },
    }
    job = {
        "config": {"model": {"config": "llama-1b"}, "train": {"steps": 120, "output": folder.name}},
        "plan": PLAN.model_dump(mode="json", by_alias=True),
        "estimate": ESTIMATE.model_dump(mode="json"),
        "step_time": STEP_TIME.model_dump(mode="json"),
        "cluster": {"device": "cuda", "device_memory_bytes": 80 * GIB, "price_per_device_hour": 2.0},
    }
    documents = {
        "summary.json": summary,
        "job.json": job,
        "timing.json": timing().model_dump(mode="json"),
        "findings.json": [finding.model_dump(mode="json") for finding in FINDINGS],
        "environment.json": {"Python": "3.12.3", "torch": "2.13.0", "GPU": "4 × A100-SXM-80GB", "driver": "580.65"},
    }
    documents |= {name.replace("_json", ".json"): document for name, document in changes.items()}
    for name, document in documents.items():
        if name not in without:
            (folder / name).write_text(json.dumps(document))
    if "metrics.jsonl" not in without:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(steps)))
    return folder


def write_scaling(folder: Path) -> Path:
    """A file of ``bench scaling``: two sizes measured, 80 % efficiency, and a curve beyond."""
    plan = Plan(micro_batch=4, seq_len=256)
    step = {"nodes": 1, "steps_s": [1.0, 1.0, 1.0, 1.0], "wall_s": 4.0, "threads": 1, "date": "2026-11-21"}
    samples = [
        {"mode": "weak", "devices": devices, "plan": plan.model_dump(mode="json", by_alias=True), "tokens": tokens}
        | step
        for devices, tokens in ((1, 4000), (2, 6400))
    ]
    points = [
        {"mode": "weak", "devices": n, "step_s": 1.3, "low_s": 1.1, "high_s": 1.6, "tokens_per_s": 780.0 * n}
        for n in (4, 8, 16, 32)
    ]
    subject = {
        "model": "llama-2m",
        "device": "CPU",
        "strategy": "ddp",
        "precision": "fp32",
        "recompute": "none",
        "compile": False,
        "seq_len": 256,
        "micro_batch": 4,
        "grad_accum": 1,
        "global_batch": 4,
        "optimizer": "adamw",
    }
    document = {
        "schema": 1,
        "subject": subject,
        "reference": plan.model_dump(mode="json", by_alias=True),
        "cluster": {"device": "cpu", "device_name": "CPU", "devices_per_node": 2},
        "samples": samples,
        "price_per_device_hour": 2.0,
        "curves": [{"mode": "weak", "points": points}],
    }
    path = folder / "scaling.json"
    path.write_text(json.dumps(document))
    return path


def write_links(folder: Path) -> Path:
    """A calibration file of ``bench comm``: all_reduce and all_gather at about 1 GB/s and 50 µs."""
    sizes = tuple(2**power for power in range(10, 25))
    measured = [
        MeasuredLink(
            collective=name,
            axis="dp_shard",
            where="node",
            ranks=2,
            per_node=2,
            latency_s=5e-5,
            latency_interval_s=(4.5e-5, 5.6e-5),
            bus_bytes_per_s=speed,
            bus_interval_bytes_per_s=(0.97 * speed, 1.02 * speed),
            sizes_bytes=sizes,
            median_s=tuple(5e-5 + size / speed if size < sizes[-1] else 0.016 for size in sizes),
        )
        for name, speed in (("all_reduce", 1.1e9), ("all_gather", 1.3e9))
    ]
    file = CalibrationFile(
        schema=1,
        kind="links",
        date="2026-11-21",
        device="cpu",
        device_name="CPU",
        nodes=1,
        devices_per_node=2,
        ranks=2,
        backend="gloo",
        strategy="fsdp",
        measured=tuple(measured),
    )
    path = folder / "calibration.toml"
    path.write_text(file.to_toml())
    return path
