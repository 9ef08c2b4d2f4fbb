"""The tables of ``docs/choosing-a-plan.md``, worked out by the planner.

``python benchmarks/rules/rules.py --write`` puts them into the document; without it they are only compared.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from shardwise.cost.memory.estimate_memory import estimate
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.model.profile import ModelProfile, Unit, Weight
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.program import SHARDWISE
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.traffic import sent_bytes
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Candidate, Pins
from shardwise.search.search import search

DOCUMENT = Path(__file__).parents[2] / "docs" / "choosing-a-plan.md"
GB = 1e9
LENGTH = 4096
RUNS = ("ddp", "zero1", "zero2", "fsdp")


def nominal(elements: float, blocks: int = 50) -> ModelProfile:
    """A model of that many elements in equal blocks, and nothing else."""
    weight = Weight("weight", (int(elements / blocks) // 1000, 1000))
    block = Unit("block", "block", (weight,), (), 0, count=blocks)
    return ModelProfile(name="nominal", units=(block,), seq_len=None, origin="catalogue")


@lru_cache(maxsize=64)
def profile(name: str, length: int = LENGTH) -> ModelProfile:
    """A model of the catalogue."""
    return load_profile(name, seq_len=length)


def state_gb(model: ModelProfile, strategy: str, world: int) -> tuple[float, float]:
    """GB at rest of a device (weights, gradients, optimizer state), and of what is gathered or copied beside them."""
    cluster = parse_cluster("8xA100-80GB").model_copy(update={"nodes": max(1, world // 8)})
    plan = Plan(
        strategy=strategy,
        dims=dims_for(parse_strategy(strategy), world, devices_per_node=8),
        micro_batch=1,
        precision="bf16",
        device="cuda",
    )
    found = estimate(model, plan, Workload(), cluster)
    return (found.parameters + found.gradients + (found.optimizer or 0)) / GB, found.buffers / GB


def pinned(
    name: str, cluster: str, strategy: str | None, batch: int, length: int = LENGTH, **pins: object
) -> Candidate:
    """The best plan of one strategy, or of all that run."""
    question = Workload(seq_len=length, global_batch=batch)
    parsed = None if strategy is None else parse_strategy(strategy)
    result = search(
        profile(name, length),
        question,
        parse_cluster(cluster),
        Pins.model_validate({"strategy": parsed, **pins}),
        only_runnable=True,
    )
    return result.candidates[0]


def rows(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, figures to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def sixteen() -> str:
    """The 16-bytes rule."""
    lines = []
    for label, model in (("7 B", nominal(7e9)), *((name, profile(name)) for name in BIG)):
        held, _ = state_gb(model, "ddp", 1)
        lines.append(
            [label, f"{model.num_parameters / GB:.2f} B", f"{model.num_parameters * 16 / GB:.1f}", f"{held:.1f}"]
        )
    return rows(("model", "parameters", "16 bytes each, GB", "the planner, GB"), lines)


BIG = ("llama-3.2-1b", "llama-2-7b", "llama-3.1-8b", "llama-2-13b", "llama-3.1-70b")


def zero() -> str:
    """Weights, gradients and state over world sizes, for the 7.5 B of the ZeRO paper's first figure."""
    model = nominal(7.5e9)
    lines = []
    for world in (1, 8, 64, 512):
        line = [str(world)]
        for strategy in RUNS:
            held, beside = state_gb(model, strategy, world)
            line.append(f"{held:.1f}" + (f" + {beside:.1f}" if strategy in ("zero2", "fsdp") and world > 1 else ""))
        lines.append(line)
    return rows(("devices", *RUNS), lines)


def ddp_or_fsdp() -> str:
    """What the planner takes among the strategies that run, by model size and GPU."""
    lines = []
    for name in ("gpt2-xl", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-2-13b"):
        line = [name]
        length = 1024 if name == "gpt2-xl" else LENGTH
        for gpu in GPUS:
            line.append(_choice(pinned(name, f"8x{gpu}", None, 64, length)))
        lines.append(line)
    return rows(("8 ×", *GPUS), lines)


GPUS = ("RTX-4090", "A100-SXM-40GB", "A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM-180GB")


def _choice(candidate: Candidate) -> str:
    plan = candidate.plan
    if candidate.fits is False:
        return "does not fit"
    again = "" if plan.recompute == "none" else f", {plan.recompute_words}"
    return f"{plan.strategy}, {plan.micro_batch}×{plan.grad_accum}{again}"


def links() -> str:
    """The same GPUs joined by NVLink and by PCIe."""
    lines = []
    for name in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"):
        for strategy in ("ddp", "fsdp"):
            with_link, without = (pinned(name, f"8xA100-SXM-80GB@{link}", strategy, 64) for link in ("nvlink", "pcie4"))
            if with_link.fits is False or without.fits is False:
                lines.append([name, strategy, "does not fit", "does not fit", ""])
                continue
            a, b = _step_s(with_link), _step_s(without)
            lines.append([name, strategy, f"{a:.1f} s", f"{b:.1f} s", f"{b / a - 1:+.0%}"])
    return rows(("model", "strategy", "NVLink", "PCIe 4", ""), lines)


def _step_s(candidate: Candidate) -> float:
    assert candidate.time is not None
    return candidate.time.step_s


def nodes() -> str:
    """Full sharding across nodes against sharding inside each."""
    lines = []
    for count in (2, 8, 32):
        found = [pinned("llama-3.1-8b", f"{count}x8xA100-SXM-80GB", name, count * 8) for name in ("fsdp", "hsdp")]
        cells = ["does not fit" if c.fits is False else f"{_step_s(c):.1f} s, {gib(c):.0f} GiB" for c in found]
        lines.append([f"{count} × 8", *cells])
    return rows(("A100-80GB", "fsdp", "hsdp"), lines)


def gib(candidate: Candidate) -> float:
    """GiB of a device."""
    return candidate.memory.device_bytes / 2**30


def recompute() -> str:
    """What recompute costs and saves."""
    lines = []
    for mode in ("none", "selective", "full"):
        candidate = pinned("llama-3.1-8b", "8xH100-SXM-80GB", "fsdp", 8, recompute=mode, micro_batch=1)
        lines.append([mode, f"{gib(candidate):.0f} GiB", f"{_step_s(candidate):.2f} s"])
    return rows(("recompute", "memory of a device", "a step"), lines)


def sent() -> str:
    """Bytes that a device sends in a step."""
    lines = []
    cluster = parse_cluster("8xA100-80GB")
    for strategy in RUNS:
        cells = [strategy]
        for precision, accum in (("fp32", 1), ("bf16", 1), ("bf16", 8)):
            plan = _plan(strategy, cluster, precision, accum)
            cells.append(f"{sent_bytes(profile('llama-3.1-8b'), plan, SHARDWISE)['dp'] / GB:.0f}")
        lines.append(cells)
    return rows(("strategy", "fp32", "bf16", "bf16, accumulation 8"), lines)


def _plan(strategy: str, cluster: ClusterSpec, precision: str, accum: int) -> Plan:
    dims = dims_for(parse_strategy(strategy), cluster.world_size, devices_per_node=cluster.devices_per_node)
    return Plan.model_validate(
        {
            "strategy": strategy,
            "dims": dims,
            "micro_batch": 1,
            "grad_accum": accum,
            "seq_len": LENGTH,
            "precision": precision,
            "device": "cuda",
        }
    )


def left_out() -> str:
    """The state that the 16-bytes rule knows, and all that a device holds."""
    lines = []
    for name, cluster in (
        ("llama-3.2-1b", "8xA100-80GB"),
        ("llama-3.1-8b", "8xA100-80GB"),
        ("llama-2-70b", "8x8xA100-80GB"),
    ):
        candidate = pinned(name, cluster, "fsdp", parse_cluster(cluster).world_size, micro_batch=1, recompute="none")
        memory = candidate.memory
        state = memory.parameters + memory.gradients + (memory.optimizer or 0)
        share = memory.device_bytes
        parts = [memory.activations or 0, memory.logits or 0, memory.buffers]
        lines.append([f"{name} on {cluster}", *(f"{n / 2**30:.1f}" for n in (state, *parts, share))])
    return rows(("fsdp, GiB a device", "weights, gradients, state", "activations", "logits", "buffers", "total"), lines)


def fine_tuning() -> str:
    """All weights, adapters, adapters on 4-bit weights: what a device holds, and a step."""
    lines = []
    for name, cluster, batch in (
        ("llama-3.1-8b", "1xRTX-4090", 8),
        ("llama-3.1-8b", "8xA100-SXM-40GB", 16),
        ("llama-3.1-70b", "2xRTX-3090", 4),
        ("llama-3.1-70b", "8xA100-SXM-80GB", 16),
    ):
        cells = []
        for adapter in ("", "+lora", "+qlora"):
            found = [_tuned(name, cluster, f"{base}{adapter}", batch) for base in TUNED]
            fitting = [c for c in found if c is not None and c.fits]
            best = min(fitting, key=_step_s, default=None)
            cells.append("does not fit" if best is None else f"{best.plan.strategy}, {gib(best):.0f} GiB, {_s(best)}")
        lines.append([f"{name} on {cluster}", *cells])
    return rows(("2048 tokens a sample", "all weights", "LoRA", "QLoRA"), lines)


TUNED = ("ddp", "fsdp", "fsdp+offload")


def _tuned(name: str, cluster: str, strategy: str, batch: int) -> Candidate | None:
    parsed = parse_strategy(strategy)
    question = Workload(seq_len=2048, global_batch=batch)
    pins = Pins(strategy=parsed, options={"loss_chunks": 8})
    result = search(profile(name, 2048), question, parse_cluster(cluster), pins)
    return None if result.recommended is None else result.candidates[result.recommended]


def _s(candidate: Candidate) -> str:
    return f"{_step_s(candidate):.2g} s" if _step_s(candidate) < 10 else f"{_step_s(candidate):.0f} s"


def lean() -> str:
    """What spares memory and leaves the weights that are trained: Llama-3.1-8B under ``fsdp``."""
    cluster, lines = parse_cluster("8xA100-SXM-40GB"), []
    for label, optimizer, options in (
        ("AdamW", "adamw", {}),
        ("AdamW, the loss in 8 chunks", "adamw", {"loss_chunks": 8}),
        ("AdamW, in the backward", "adamw", {"optimizer_in_backward": True}),
        ("8-bit AdamW", "adamw8bit", {}),
        ("Adafactor", "adafactor", {}),
        ("Adafactor, 8 chunks, in the backward", "adafactor", {"loss_chunks": 8, "optimizer_in_backward": True}),
    ):
        states = {"optimizer_states": 0, "optimizer_temporaries": 0, "loop_temporaries": 2}
        more = states if optimizer == "adafactor" else {}
        question = Workload.model_validate({"seq_len": LENGTH, "global_batch": 8, "optimizer": optimizer} | more)
        pins = Pins(strategy=parse_strategy("fsdp"), recompute="full", options=options)
        found = search(profile("llama-3.1-8b"), question, cluster, pins).candidates[0]
        memory = found.memory
        parts = (memory.gradients, memory.optimizer or 0, memory.logits or 0, memory.device_bytes)
        lines.append([label, *(f"{n / 2**30:.1f}" for n in parts), _s(found)])
    return rows(("fsdp, GiB a device", "gradients", "state", "logits", "total", "a step"), lines)


def offloading() -> str:
    """Where a step's time goes when weights and state rest in host memory or on its drives: eight A100-80GB."""
    cluster = parse_cluster("8xA100-SXM-80GB").model_copy(update={"nvme_bytes_per_s": 12e9})
    lines = []
    for strategy in ("fsdp", "fsdp+offload", "deepspeed-zero3+offload", "deepspeed-zero3+nvme"):
        line = [strategy]
        for batch in (8, 64):
            question = Workload(seq_len=LENGTH, global_batch=batch)
            pins = Pins(strategy=parse_strategy(strategy), recompute="full", grad_accum=1)
            found = search(profile("llama-3.1-8b"), question, cluster, pins).candidates[0]
            away = found.time.offload_s if found.time is not None else 0.0
            line += [f"{gib(found):.0f}", f"{_s(found)}", f"{away / _step_s(found):.0%}"]
        lines.append(line)
    header = ("one sample a device, or eight", *("GiB", "a step", "of it the way to the host") * 2)
    return rows(header, lines)


TABLES: dict[str, Callable[[], str]] = {
    "sixteen": sixteen,
    "zero": zero,
    "left-out": left_out,
    "ddp-or-fsdp": ddp_or_fsdp,
    "links": links,
    "nodes": nodes,
    "recompute": recompute,
    "sent": sent,
    "fine-tuning": fine_tuning,
    "lean": lean,
    "offloading": offloading,
}


def filled(text: str) -> str:
    """The document with every table worked out anew."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        made = table()
        text, found = pattern.subn(lambda match, made=made: match[1] + made + "\n" + match[2], text)
        if found != 1:
            raise SystemExit(f"{DOCUMENT}: table '{name}' has {found} places, it must have one")
    return text


def main() -> None:
    """Write the tables, or say that they are old."""
    old = DOCUMENT.read_text()
    new = filled(old)
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(new)
    elif new != old:
        raise SystemExit(f"{DOCUMENT} is old; write it anew with --write")


if __name__ == "__main__":
    main()
