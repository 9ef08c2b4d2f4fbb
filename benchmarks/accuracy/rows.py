"""Published measurements as typed inputs of the cost model: what was run, on what, and what was measured."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.architecture import Architecture
from shardwise.model.catalogue import find_architecture
from shardwise.model.profile import ModelProfile
from shardwise.model.transformer import profile_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.program import SHARDWISE, ProgramTraits, find_program
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.search.cost_inputs_of_plan import adapted

DATA = Path(__file__).parent / "data" / "published.csv"
HELD_BACK = DATA.with_name("megatron_bridge.csv")  # a source that is kept apart
OWN_PROGRAMS = DATA.with_name("programs")  # files of traits, as ``--program`` takes them
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"gated": True, "norm": "rms", "positions": "rope"},
    "gpt": {
        "gated": False,
        "norm": "layer",
        "norm_bias": True,
        "positions": "learned",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tied": True,
    },
    "mpt": {"gated": False, "norm": "layer", "positions": "alibi", "tied": True},
    "qwen": {"gated": True, "norm": "rms", "positions": "rope", "fused_qkv": True, "qkv_bias": True},
    "internlm": {
        "gated": True,
        "norm": "rms",
        "positions": "rope",
        "fused_qkv": True,
        "qkv_bias": True,
        "output_bias": True,
    },
}


# Mixtures with fewer layers than the catalogue's: the model, and how many of the layers have no experts. SimuMax's
# ``configs/models`` has one such layer of DeepSeek-V2's; of its four layers of V3 it is one by the bytes at rest.
CUT_MIXTURES = {"deepseekv2-L4": ("deepseek-v2", 1), "deepseekv3-L4": ("deepseek-v3", 1)}

# The program that each source measured, as ``--program`` takes it.
PROGRAMS = {
    "torchtitan": "torchtitan",
    "torchao_float8": "torchtitan",
    "llama3_paper": "torchtitan",
    "llm_foundry_mpt": "llm-foundry",
    "llm_foundry_mpt_history": "llm-foundry",
    "vtrain_ground_truth": "megatron-2022",
    "korthikanti_2022": "megatron-2022",
    "megatron_sc21": "megatron-2022",
    "dlperf_gpt_v100": "megatron-2022",
    "simumax_b200": "megatron",
    "nemo_2412": "megatron-bridge",
    "litgpt": "litgpt",
    "torchtune": "torchtune",
    "answerai_fsdp_qlora": "fsdp-qlora",
    "misc_small": "shardwise",
    "megatron_bridge": "megatron-bridge",
    "llm_foundry_h100": "llm-foundry",
    "qwen_2023": "trl",  # and DeepSpeed where a row says so
    "internevo": str(OWN_PROGRAMS / "internevo.toml"),
    "fms_fsdp": str(OWN_PROGRAMS / "fms-fsdp.toml"),
}
# ``--lora-rank`` and ``--lora-targets`` of the code and configurations that their pages name (data/README.md).
ADAPTERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "litgpt": (8, ("q", "v", "qkv")),
    "torchtune": (8, ("q", "v", "o", "mlp")),
    "torchtune llama3.1-70b": (16, ("q", "v", "o", "mlp")),
    "nemo_2412": (16, ("q", "k", "v", "qkv")),  # nemo/collections/llm/recipes: peft.target_modules = ['linear_qkv']
    "answerai_fsdp_qlora": (64, ("q", "k", "v", "gate", "up", "down")),
    "qwen_2023": (64, ("qkv", "o", "mlp")),  # finetune.py: c_attn, c_proj (of attention and MLP), w1, w2
}


@dataclass(frozen=True)
class Row:
    """One measurement. ``memory_bytes`` is of ``memory_kind``; ``reserved_bytes`` where the source has both.

    ``profile``, ``plan`` and ``workload`` are those of the program that was measured (``--program``).
    """

    source: str
    model: str
    framework: str
    base: ModelProfile
    profile: ModelProfile
    plan: Plan
    workload: Workload
    cluster: ClusterSpec
    gpu: str
    gpus: int
    step_time_s: float | None
    memory_bytes: int | None
    memory_kind: str
    reserved_bytes: int | None
    oom: bool

    def default(self) -> Row:
        """The same row asked without ``--program``: this package's own."""
        types = {name: Plan.model_fields[name].default for name in ("program", "weights", "accumulate", "reduce")}
        axes = {"sequence_parallel": True, "async_tp": False}
        compiled = self.workload.compiled or self.workload.program.fused_kernels
        workload = self.workload.model_copy(update={"program": SHARDWISE, "compiled": compiled})
        plan = self.plan.model_copy(update=types | axes)
        return replace(self, plan=plan, workload=workload, profile=_adapted(self.base, plan, workload))

    @property
    def label(self) -> str:
        """A short description for tables."""
        plan = self.plan
        compiled = " compiled" if self.workload.compiles(plan) else ""
        return (
            f"{self.source} {self.model} {self.gpus}x{self.gpu} {plan.strategy} s{plan.seq_len} "
            f"b{plan.micro_batch}x{plan.grad_accum} {plan.recompute} {plan.precision}{compiled}"
        )

    @property
    def group(self) -> tuple[object, ...]:
        """Rows of one group compute the same thing on the same GPUs by different plans."""
        return (self.source, self.model, self.gpu, self.gpus, self.plan.seq_len, self.plan.global_batch)


def load_rows(*sources: str) -> list[Row]:
    """All rows, or those of ``sources``, in the order of the file. Rows of unknown models are left out."""
    return _rows(DATA, sources)


def load_held_back() -> list[Row]:
    """Rows of the source that is kept apart."""
    return _rows(HELD_BACK, ())


def _rows(path: Path, sources: Sequence[str]) -> list[Row]:
    with path.open(newline="") as file:
        records = [r for r in csv.DictReader(file) if not sources or r["source"] in sources]
    return [row for record in records if (row := _row(record)) is not None]


def records_left_out() -> list[dict[str, str]]:
    """Source and model of each record that `load_rows` leaves out, and why."""
    with DATA.open(newline="") as file:
        records = [record for record in csv.DictReader(file) if _row(record) is None]
    return [{"source": r["source"], "model": r["model"], "reason": "shape not stated"} for r in records]


def _row(record: dict[str, str]) -> Row | None:
    architecture = _architecture(record)
    if architecture is None:
        return None
    strategy = parse_strategy(record["strategy"])
    seq_len, compiled = int(record["seq_len"]), record["compiled"] == "yes"
    gpus, per_node = int(record["gpus"]), int(record["gpus_per_node"])
    dims = dims_for(strategy, gpus, devices_per_node=per_node)
    program = _program(record)
    every = strategy.shards_parameters and strategy.pp == 1 and program.gradient_sync != "last"
    options = dict(program.plan_options) if strategy.tp > 1 else {}
    if record["source"] == "korthikanti_2022" and strategy.tp > 1:  # it introduces sequence parallelism, in half
        options["sequence_parallel"] = record["recompute"] == "selective"
    virtual = int(record["virtual_stages"])
    options |= {"virtual_stages": virtual, "pipeline_schedule": "interleaved-1f1b"} if virtual > 1 else {}
    narrow = record["precision"] != "fp32"
    plan = Plan.model_validate(
        {
            "strategy": str(strategy),
            "dims": dims,
            "micro_batch": int(record["micro_batch"]),
            "grad_accum": int(record["grad_accum"]),
            "seq_len": seq_len,
            "precision": record["precision"],
            "recompute": record["recompute"],
            "loss_parallel": strategy.tp > 1,
            "loss_chunks": 8 if "chunks" in record["framework"] else 1,
            "device": "cuda",
            "gradient_sync": "every" if every else "last",
            "program": program.name,
            "weights": program.weights if narrow else "fp32",
            "accumulate": program.accumulate if narrow else "fp32",
            "reduce": program.reduce if narrow else "fp32",
        }
        | options
    )
    rank, targets = _adapters(record, architecture)
    workload = Workload.model_validate(
        {
            "optimizer": record["optimizer"],
            "seq_len": seq_len,
            "global_batch": plan.global_batch,
            "compiled": compiled and not program.fused_kernels,
            "program": program,
            "lora_rank": rank,
            "lora_targets": targets,
            "double_quant": "nf4 without" not in record["framework"],
            "modules_to_save": ("embed_tokens", "lm_head") if "trains embedding" in record["framework"] else (),
        }
    )
    base = _profile(architecture, seq_len, compiled)
    return Row(
        source=record["source"],
        model=record["model"],
        framework=record["framework"],
        base=base,
        profile=_adapted(base, plan, workload),
        plan=plan,
        workload=workload,
        cluster=_cluster(record["gpu"], gpus, per_node, record["network_gbit_per_node"]),
        gpu=record["gpu"],
        gpus=gpus,
        step_time_s=float(record["step_time_s"]) if record["step_time_s"] else None,
        memory_bytes=int(record["memory_bytes"]) if record["memory_bytes"] else None,
        memory_kind=record["memory_kind"],
        reserved_bytes=int(record["reserved_bytes"]) if record["reserved_bytes"] else None,
        oom=record["status"] == "oom",
    )


def _program(record: dict[str, str]) -> ProgramTraits:
    """The program that a row measured; torchtitan compiles its loss since 2025."""
    name, framework = PROGRAMS[record["source"]], record["framework"]
    recent = any(word in framework for word in ("2025", "torch 2.8", "torch 2.9"))
    if name == "megatron-bridge" and "overlaps dispatch" in framework:
        name = "megatron-bridge-overlap"
    if "; DeepSpeed" in framework:
        name = "deepspeed"
    program = find_program("torchtitan-2024" if name == "torchtitan" and not recent else name)
    return program.model_copy(update={"expert_dispatch": "copies"}) if "alltoall" in framework else program


def _adapted(base: ModelProfile, plan: Plan, workload: Workload) -> ModelProfile:
    return base if plan.parsed.adapter == "none" else adapted(base, plan.parsed, workload, plan.precision)


def _cut_mixture(record: dict[str, str]) -> Architecture | None:
    """The mixture of a row with the layers that the row states, the first ones without experts."""
    name, dense = CUT_MIXTURES.get(record["model"], ("", 0))
    known, layers = find_architecture(name), int(record["layers"] or 0)
    if known is None or known.mixture is None:
        return None
    mixture = known.mixture.model_copy(update={"sparse": tuple(layer >= dense for layer in range(layers))})
    return known.model_copy(update={"name": record["model"], "layers": layers, "mixture": mixture})


def _architecture(record: dict[str, str]) -> Architecture | None:
    if (cut := _cut_mixture(record)) is not None:
        return cut
    known = find_architecture(record["model"])
    shape = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    if known is not None and all(not record[key] or int(record[key]) == getattr(known, key) for key in shape):
        return known
    if not all(record[key] for key in shape):
        return None
    numbers = {key: int(record[key]) for key in shape}
    return Architecture.model_validate(
        {"name": record["model"], "family": record["family"], "head_dim": numbers["hidden"] // numbers["heads"]}
        | {"max_seq_len": int(record["seq_len"])}
        | numbers
        | FAMILIES[record["family"]]
    )


def _adapters(record: dict[str, str], architecture: Architecture) -> tuple[int, tuple[str, ...]]:
    """Rank and targets of this row's adapters; a model has either a fused projection or three."""
    rank, targets = ADAPTERS.get(f"{record['source']} {record['model']}", ADAPTERS.get(record["source"], (16, ())))
    left_out = ("q", "k", "v") if architecture.fused_qkv else ("qkv",)
    return rank, tuple(name for name in targets if name not in left_out)


@lru_cache(maxsize=512)
def _profile(architecture: Architecture, seq_len: int, compiled: bool) -> ModelProfile:
    return profile_of(architecture, seq_len, compiled=compiled)


@lru_cache(maxsize=256)
def _cluster(gpu: str, gpus: int, per_node: int, network_gbit_per_node: str) -> ClusterSpec:
    nodes = gpus // per_node
    cluster = parse_cluster(f"{nodes}x{per_node}x{gpu}" if nodes > 1 else f"{gpus}x{gpu}")
    if network_gbit_per_node and nodes > 1:
        per_device = float(network_gbit_per_node) * 1e9 / 8 / per_node
        rate = {"kind": "network", "bytes_per_s": per_device, "source": "published"}
        network = (cluster.network or cluster.link).model_copy(update=rate)
        cluster = cluster.model_copy(update={"network": network})
    return cluster
