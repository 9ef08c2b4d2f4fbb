"""``docs/what-tutorials-say.md``: popular claims about memory and speed, with the planner's figure and verdict.

``python benchmarks/tutorials/tutorials.py --write`` writes the page; without it the page is only compared. Verdicts
are worked out from the figures: a change of the cost model that turns one over changes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.cost.memory.serving_memory import served_weights
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.kv_cache import load_kv_cache
from shardwise.model.load_model import load_profile
from shardwise.model.profile import ModelProfile
from shardwise.plan.program import find_program
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Candidate, Pins
from shardwise.search.search import search
from shardwise.search.serving_options import ServingRequest, find_serving
from shardwise.units import GIB, bytes_text, seconds_text

PAGE = Path(__file__).parents[2] / "docs" / "what-tutorials-say.md"
GB = 1e9
SMALL, LARGE = "llama-2-7b", "llama-3.1-70b"


@lru_cache(maxsize=32)
def profile(name: str, length: int) -> ModelProfile:
    """A model of the catalogue."""
    return load_profile(name, seq_len=length)


def pinned(
    name: str, cluster: str, strategy: str, batch: int, length: int, options: dict[str, Any] | None = None, **pins: Any
) -> Candidate:
    """The best plan of one strategy."""
    found = search(
        profile(name, length),
        Workload(seq_len=length, global_batch=batch, **(options or {})),
        parse_cluster(cluster),
        Pins.model_validate({"strategy": parse_strategy(strategy), **pins}),
    )
    return found.candidates[0]


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, figures to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def fitting(name: str, cluster: str, strategies: Sequence[str], length: int) -> tuple[str, dict[str, Candidate]]:
    """A row for each strategy at one sample a device: what a device needs, and whether it fits."""
    here = parse_cluster(cluster)
    found = {one: pinned(name, cluster, one, here.world_size, length) for one in strategies}
    lines = [
        [
            one,
            bytes_text(best.memory.device_bytes),
            f"{(here.device_memory_bytes or 0) / GIB:.2f} GiB",
            "yes" if best.fits else "no",
            seconds_text(best.time.step_s) if best.fits and best.time else "–",
        ]
        for one, best in found.items()
    ]
    return table((cluster, "needs", "has", "fits", "step"), lines), found


def verdict(is_true: bool, true: str, false: str) -> str:
    """One of two verdicts."""
    return f"**True**: {true}" if is_true else f"**False**: {false}"


def large_on_four() -> str:
    """Full fine-tuning, adapters and inference of 70B on four A100-80GB."""
    rows, found = fitting(LARGE, "4xA100-80GB", ("fsdp", "fsdp+offload", "fsdp+lora", "fsdp+qlora"), 4096)
    length = 4096
    request = ServingRequest(profile(LARGE, length), load_kv_cache(LARGE), parse_cluster("4xA100-80GB"), length, 1)
    option = find_serving(request).options[-1]
    said = verdict(
        found["fsdp"].fits is True,
        "a full fine-tuning fits.",
        "not a full fine-tuning without the host's memory. Adapters fit, and inference does: "
        f"{option.weight_bytes / GIB:.1f} GiB of weights on each, and room for {option.most} sequences of {length} "
        "tokens (`--serve`).",
    )
    return f"{rows}\n\n{said}"


def small_by_ddp() -> str:
    """DDP of 7B on four cards of 24 GB."""
    rows, found = fitting(SMALL, "4xRTX4090", ("ddp", "fsdp", "fsdp+offload", "ddp+lora", "ddp+qlora"), 2048)
    said = verdict(
        found["ddp"].fits is True,
        "it fits.",
        "each card would hold everything, "
        f"{found['ddp'].memory.device_bytes / 24 / GIB:.1f} times what it has. With adapters DDP does fit, and that is "
        "often what is meant.",
    )
    return f"{rows}\n\n{said}"


def small_by_fsdp() -> str:
    """FSDP of 7B on two cards of 40 GB."""
    rows, found = fitting(SMALL, "2xA100-40GB", ("fsdp", "zero2", "fsdp+offload"), 2048)
    time = found["fsdp+offload"].time
    said = verdict(
        found["fsdp"].fits is True,
        "it fits.",
        "half of the state alone is more than 40 GB: 16 bytes for each of 6.7 B parameters are 108 GB, 54 on each. "
        f"With `+offload` it fits, at {seconds_text(None if time is None else time.step_s)} a step of two samples.",
    )
    return f"{rows}\n\n{said}"


def state_bytes(options: dict[str, Any]) -> float:
    """Bytes of weights, gradients and optimizer state for a parameter."""
    name = "llama-3.2-1b"
    found = pinned(name, "1xB200", "ddp", 1, 512, options, precision="bf16").memory
    return (found.parameters + found.gradients + (found.optimizer or 0)) / profile(name, 512).num_parameters


def own(**types: Any) -> dict[str, Any]:
    """Options of this package's program with other types of tensors."""
    optimizer = types.pop("optimizer", "adamw")
    return {"program": find_program("shardwise").model_copy(update=types), "optimizer": optimizer}


def four_hundred() -> str:
    """What 70B needs by recipe."""
    number = profile(LARGE, 512).num_parameters
    recipes = {
        "AdamW, fp32 weights under autocast": own(),
        "AdamW, bf16 weights, masters and state in fp32 (DeepSpeed)": {"program": find_program("deepspeed")},
        "AdamW, all in bf16": own(weights="compute"),
        "8-bit AdamW, weights and gradients in bf16": own(weights="compute", optimizer="adamw8bit"),
    }
    each = {name: state_bytes(options) for name, options in recipes.items()}
    lines = [[name, f"{one:.1f}", f"{one * number / GB:,.0f}"] for name, one in each.items()]
    lines.append(["inference, bf16", "2.0", f"{served_weights(profile(LARGE, 512), None, 1).held_bytes / GB:,.0f}"])
    near = [name for name, one in each.items() if abs(one * number / GB / 420 - 1) < 0.05]
    said = verdict(
        bool(near) and near[0].startswith("AdamW, fp32"),
        "that is the usual recipe.",
        "for the usual recipes it is 1.1 TB. 420 GB are 6 bytes a parameter: "
        + (f"{near[0]}, before activations." if near else "no recipe of the planner."),
    )
    return f"{table(('weights, gradients, state of 70.6 B', 'bytes each', 'GB'), lines)}\n\n{said}"


def sixty_four() -> str:
    """What sharding divides by."""
    lines, factors = [], {}
    for devices in (1, 8, 64):
        nodes = max(1, devices // 8)
        cluster = f"{nodes}x{min(devices, 8)}xA100-80GB"
        found = pinned(SMALL, cluster, "fsdp" if devices > 1 else "ddp", devices, 2048, micro_batch=1).memory
        held = found.parameters + found.gradients + (found.optimizer or 0)
        factors[devices] = held
        lines.append([str(devices), f"{held / GB:.1f}", f"{factors[1] / held:.0f} ×"])
    said = verdict(
        factors[1] / factors[8] > 60,
        "eight are enough.",
        "sharding divides by the number of devices: 8 devices give 8 ×, and 64 × takes 64 (the figure of the ZeRO "
        "paper, with its 64 devices left out).",
    )
    return f"{table(('devices', 'state of 7B on each, GB', 'less'), lines)}\n\n{said}"


def eight_gb() -> str:
    """QLoRA of 7B by length."""
    lines, needs = [], {}
    for length in (512, 2048, 4096):
        found = pinned(SMALL, "1xRTX4090", "ddp+qlora", 1, length, micro_batch=1, recompute="full")
        needs[length] = found.memory.device_bytes
        lines.append([f"{length}", bytes_text(found.memory.device_bytes), f"{found.memory.device_bytes / GB:.1f}"])
    most = max((length for length, needed in needs.items() if needed < 7.6 * GIB), default=0)
    said = verdict(
        most >= 512,
        f"with one sample, full recompute and up to {most} tokens (a card of 8 GB has some 7.6 GiB). Without "
        "recompute, or with a larger vocabulary, it is more.",
        "it needs more at any length.",
    )
    return f"{table(('tokens of a sample', 'needs', 'GB'), lines)}\n\n{said}"


def slow_links() -> str:
    """FSDP against ZeRO-2 and DDP by link."""
    lines, ratios = [], []
    model = "llama-3.2-3b"
    clusters = {
        "8 × A100, NVLink": "8xA100-80GB",
        "8 × A100, PCIe 4": "8xA100-80GB@pcie4",
        "2 × 8 × A100, 200 Gbit/s each": "2x8xA100-80GB/ib200",
        "2 × 8 × A100, 25 Gbit/s each": "2x8xA100-80GB/eth25",
        "2 × 8 × A100, 10 Gbit/s a node": "2x8xA100-80GB/10g",
    }
    for name, cluster in clusters.items():
        times = {}
        for strategy in ("ddp", "zero2", "fsdp"):
            found = pinned(model, cluster, strategy, 64, 4096)
            times[strategy] = found.time.step_s if found.fits and found.time else float("nan")
        ratio = times["fsdp"] / times["zero2"] - 1
        ratios.append(ratio)
        cells = [seconds_text(times[one]) for one in ("ddp", "zero2", "fsdp")]
        lines.append([name, *cells, f"{ratio:+.0%}", f"{times['fsdp'] / times['ddp'] - 1:+.0%}"])
    slowest, others = ratios[-1], max(ratios[:-1])
    if slowest > 0.2 > others:
        said = (
            f"**Half true**: with 10 Gbit/s a node ZeRO-3 is {slowest:+.0%} against ZeRO-2, which sends a third less; "
            f"with 25 Gbit/s a device and more, PCIe included, it is at most {others:+.0%}, because its traffic hides "
            "under the computation. Where memory decides the micro batch, as here, it is faster than DDP. "
            "`shardwise bench comm` measures your link."
        )
    else:
        said = verdict(others > 0.2, "on most links here.", f"at most {max(ratios):+.0%} against ZeRO-2 here.")
    header = (f"{model}, 64 samples of 4096", "ddp", "zero2", "fsdp", "fsdp against zero2", "against ddp")
    return f"{table(header, lines)}\n\n{said}"


def bytes_of_a_parameter() -> str:
    """What programs hold for a parameter."""
    programs = {
        "Shardwise, torchtitan, Accelerate's FSDP, TRL": "shardwise",
        "DeepSpeed, Megatron-Bridge": "deepspeed",
        "Megatron-LM (fp32 gradients)": "megatron",
        "torchtune, LitGPT (all bf16)": "torchtune",
    }
    lines = []
    for name, program in programs.items():
        found = pinned("llama-3.2-1b", "1xB200", "ddp", 1, 512, {"program": find_program(program)}, precision="bf16")
        number, memory = profile("llama-3.2-1b", 512).num_parameters, found.memory
        parts = [memory.parameters / number, memory.gradients / number, (memory.optimizer or 0) / number]
        lines.append([name, *(f"{part:.0f}" for part in parts), f"{sum(parts):.0f}"])
    said = (
        "**16 and 18 are both true**, of different programs; 8 is, too. No program that the planner knows holds "
        "**20**: that is 16-bit gradients kept beside fp32 ones (2 + 2 + 4 + 12), and whether yours does is for its "
        "source to say."
    )
    return f"{table(('AdamW', 'weights', 'gradients', 'state', 'together'), lines)}\n\n{said}"


def weights_alone() -> str:
    """Weights of 7B."""
    lines = [
        [name, f"{served_weights(profile(SMALL, 512), quant, 1).held_bytes / GB:.1f}"]
        for name, quant in (("bf16", None), ("int8", "int8"), ("int4", "int4"))
    ]
    lines.append(["bf16 with gradients and fp32 state", f"{16 * profile(SMALL, 512).num_parameters / GB:.1f}"])
    held = served_weights(profile(SMALL, 512), None, 1).held_bytes / GB
    said = verdict(
        abs(held / 56 - 1) < 0.1,
        "that is what they take.",
        f"the weights take {held:.1f} GB; 56 GB are 8 bytes a parameter, a training all in bf16.",
    )
    return f"{table(('7B', 'GB'), lines)}\n\n{said}"


def large_on_two() -> str:
    """QLoRA of 70B on two cards of 24 GB."""
    rows, found = fitting(LARGE, "2xRTX4090", ("fsdp+qlora", "fsdp+offload+qlora"), 512)
    plain, offloaded = found["fsdp+qlora"], found["fsdp+offload+qlora"]
    if plain.fits is False and offloaded.fits:
        host = bytes_text(offloaded.memory.host_bytes)
        said = f"**Half true**: with the weights in the host's memory ({host}), which the short form leaves out."
    else:
        said = verdict(plain.fits is True, "it fits as it is.", "neither with nor without offload, says the planner.")
    return f"{rows}\n\n{said}"


CLAIMS = (
    (
        "“A full fine-tuning of 70B needs 4 × A100-80GB” (or: fits them comfortably)",
        "[truetech.dev](https://truetech.dev/ai-development/services/llm/llama-fine-tuning.html): 4×A100 or 8×A6000",
        large_on_four,
    ),
    ("“DDP trains 7B on 4 × 24 GB”", "Often said; the short form of an adapter tutorial.", small_by_ddp),
    ("“FSDP trains 7B on 2 × 40 GB”", "Often said.", small_by_fsdp),
    ("“Training 70B takes 420 GB”", "Often said, without a recipe.", four_hundred),
    ("“ZeRO-3 needs 64 times less memory with 8 GPUs”", "Often said, after the ZeRO paper.", sixty_four),
    (
        "“QLoRA of 7B runs in 8 GB”",
        "[spheron.network](https://www.spheron.network/blog/gpu-vram-requirements-fine-tune-llm-2026/): ~8 GB",
        eight_gb,
    ),
    ("“ZeRO-3 is 30 % slower on slow links”", "Often said.", slow_links),
    (
        "“16 bytes a parameter” – or 18, or 20",
        "[lynx-cortex](https://lynx-cortex.pages.dev/phase-28-lora-qlora/theory/03-memory-footprint/): 16.",
        bytes_of_a_parameter,
    ),
    (
        "“A full bf16 fine-tuning of 7B needs 56 GB just to hold the weights”",
        "[theailabs.us](https://theailabs.us/blog/how-to-fine-tune-llm-a100-walkthrough)",
        weights_alone,
    ),
    (
        "“48 GB are enough to fine-tune 70B: two cards of 24 GB, FSDP and QLoRA”",
        "[singularityfeed.com](https://singularityfeed.com/multi-gpus-fine-tuning-for-llama-3-1-70b-with-fsdp-and-qlora)",
        large_on_two,
    ),
)
TEXT = """<!-- written by benchmarks/tutorials/tutorials.py; edit that, not this file -->
# What tutorials say

Popular claims, with the planner's figure and a verdict. Models are Llama-2-7B and Llama-3.1-70B where a table names no
other. A row is the best plan of its strategy with one sample a device, of 2,048 tokens (70B: 4,096; QLoRA on two cards:
512), in bf16, with what PyTorch, CUDA and NCCL take. The figures are predictions, and
[benchmarks/accuracy](../benchmarks/accuracy/README.md) has their errors.

{claims}

## Where the planner cannot say

- **Quality**: that LoRA or 4-bit weights train as well as a full fine-tuning. It predicts memory, time and money.
- **“Unsloth halves memory”**, and other custom kernels: it counts the operations of PyTorch and of the programs in
  `--program`, not others'.
- **Peaks of the first step**, fragmentation beyond the allocator's rules, what an evaluation loop or a logger keeps.
- **Whether a host has the memory** that offload needs, unless `--cluster` is a file that states it.

Try a claim of your own: `shardwise plan MODEL --cluster CLUSTER --strategy STRATEGY`.
"""


def page() -> str:
    """The whole page."""
    parts = [f"## {claim}\n\n{source}\n\n{made()}" for claim, source, made in CLAIMS]
    return TEXT.format(claims="\n\n".join(parts))


def main() -> None:
    """Write the page, or say that it is old."""
    new = page()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(new)
    elif PAGE.read_text() != new:
        raise SystemExit(f"{PAGE} is old; write it anew with --write")


if __name__ == "__main__":
    main()
