"""Published measurements as typed inputs of the cost model: what was run, on what, and what was measured."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from shardwise.cost.memory.local_shapes import Framework
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.architecture import Architecture
from shardwise.model.catalogue import find_architecture
from shardwise.model.lora import AdapterFacts, with_adapters
from shardwise.model.profile import ModelProfile
from shardwise.model.transformer import profile_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.search.cost_inputs_of_plan import adapted

DATA = Path(__file__).parent / "data" / "published.csv"
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
}


# Mixtures with fewer layers than the catalogue's: the model, and how many of the layers have no experts. SimuMax's
# ``configs/models`` has one such layer of DeepSeek-V2's; of its four layers of V3 it is one by the bytes at rest.
CUT_MIXTURES = {"deepseekv2-L4": ("deepseek-v2", 1), "deepseekv3-L4": ("deepseek-v3", 1)}

# What the programs that were measured put beside the base, from the code and configurations that their pages name
# (data/README.md has the addresses). ``--lora-rank`` and ``--lora-targets`` can say the first two; the rest is told.
ADAPTERS: dict[str, AdapterFacts] = {
    "litgpt": AdapterFacts(rank=8, targets=("q", "v", "qkv"), dropout=True, adapter_bytes=2.0, keeps_inputs=True),
    "torchtune": AdapterFacts(rank=8, targets=("q", "v", "o", "mlp"), adapter_bytes=2.0),
    "torchtune llama3.1-70b": AdapterFacts(rank=16, targets=("q", "v", "o", "mlp"), adapter_bytes=2.0),
    "answerai_fsdp_qlora": AdapterFacts(
        rank=64, targets=("q", "k", "v", "gate", "up", "down"), dropout=True, adapter_bytes=2.0, keeps_inputs=True
    ),
}
OTHER_ADAPTERS = AdapterFacts()


@dataclass(frozen=True)
class Row:
    """One measurement. ``memory_bytes`` is of ``memory_kind``; ``reserved_bytes`` where the source has both.

    ``profile`` has what the command's options can say of adapters, ``told_profile`` what their program does besides.
    """

    source: str
    model: str
    framework: str
    profile: ModelProfile
    told_profile: ModelProfile
    plan: Plan
    workload: Workload
    cluster: ClusterSpec
    gpu: str
    gpus: int
    virtual_stages: int
    step_time_s: float | None
    memory_bytes: int | None
    memory_kind: str
    reserved_bytes: int | None
    oom: bool

    @property
    def cost_framework(self) -> Framework:
        """Whose program runs where an axis cuts the model: Megatron-LM's for whole weights, else PyTorch's parts."""
        return "torchtitan" if self.plan.parsed.shards_parameters else "megatron"

    @property
    def label(self) -> str:
        """A short description for tables."""
        plan = self.plan
        compiled = " compiled" if self.workload.compiled else ""
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
    with DATA.open(newline="") as file:
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
            "device": "cuda",
            # published sharded runs reduce after each micro batch, but for those in a pipeline and for litgpt's, which
            # accumulates under ``no_backward_sync``
            "gradient_sync": "every"
            if strategy.shards_parameters and strategy.pp == 1 and record["source"] != "litgpt"
            else "last",
        }
    )
    workload = Workload.model_validate(
        {
            "optimizer": record["optimizer"],
            "seq_len": seq_len,
            "global_batch": plan.global_batch,
            "compiled": compiled,
        }
    )
    told = _adapters(record, architecture)
    workload = workload.model_copy(update={"lora_rank": told.rank, "lora_targets": told.targets})
    plain = _profile(architecture, seq_len)
    return Row(
        source=record["source"],
        model=record["model"],
        framework=record["framework"],
        profile=plain if strategy.adapter == "none" else adapted(plain, strategy, workload, plan.precision),
        told_profile=with_adapters(plain, strategy.adapter, facts=told),
        plan=plan,
        workload=workload,
        cluster=_cluster(record["gpu"], gpus, per_node, record["network_gbit_per_node"]),
        gpu=record["gpu"],
        gpus=gpus,
        virtual_stages=int(record["virtual_stages"]),
        step_time_s=float(record["step_time_s"]) if record["step_time_s"] else None,
        memory_bytes=int(record["memory_bytes"]) if record["memory_bytes"] else None,
        memory_kind=record["memory_kind"],
        reserved_bytes=int(record["reserved_bytes"]) if record["reserved_bytes"] else None,
        oom=record["status"] == "oom",
    )


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


def _adapters(record: dict[str, str], architecture: Architecture) -> AdapterFacts:
    """What stands beside this row's base; a model has either a fused projection or three."""
    found = ADAPTERS.get(record["source"], OTHER_ADAPTERS)
    found = ADAPTERS.get(f"{record['source']} {record['model']}", found)
    left_out = ("q", "k", "v") if architecture.fused_qkv else ("qkv",)
    targets = tuple(name for name in found.targets if name not in left_out)
    return replace(found, targets=targets, double_quant="nf4 without" not in record["framework"])


@lru_cache(maxsize=512)
def _profile(architecture: Architecture, seq_len: int) -> ModelProfile:
    return profile_of(architecture, seq_len)


@lru_cache(maxsize=256)
def _cluster(gpu: str, gpus: int, per_node: int, network_gbit_per_node: str) -> ClusterSpec:
    nodes = gpus // per_node
    cluster = parse_cluster(f"{nodes}x{per_node}x{gpu}" if nodes > 1 else f"{gpus}x{gpu}")
    if network_gbit_per_node and nodes > 1:
        per_device = float(network_gbit_per_node) * 1e9 / 8 / per_node
        network = (cluster.network or cluster.link).model_copy(update={"kind": "network", "bytes_per_s": per_device})
        cluster = cluster.model_copy(update={"network": network})
    return cluster
