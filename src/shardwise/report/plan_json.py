"""JSON document of ``shardwise plan``, versioned; see ``docs/plan-json.md``.

Keys may be added.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwise.cost.flops import palm_flops
from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.price import Offer, Prices, dollars_per_million_tokens, offers
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.dims import ParallelDims
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.objective import Objective
from shardwise.plan.parallel_options import GradientSync
from shardwise.plan.plan import Precision, Recompute
from shardwise.plan.tensor_types import Fp8Recipe, GradientType, WeightType
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Candidate, SearchResult
from shardwise.search.problem import usable_bytes


class Facts(BaseModel):
    """Base of all parts of the document."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelFacts(Facts):
    """Facts of the model.

    Counts are elements, tied weights once, FLOPs those of a sample forward and backward.
    """

    name: str
    origin: str
    source: str
    parameters: int
    active_parameters: int = Field(description="that one token uses: of experts those it is routed to")
    experts: int = Field(description="of a layer; 0 without")
    trainable: int
    blocks: int
    hidden_size: int | None
    vocab_size: int | None
    heads: int | None
    kv_heads: int | None
    max_seq_len: int | None
    flops_per_sample: float = Field(description="forward and backward, the full attention square (PaLM's convention)")
    unknown: list[str]


class ClusterFacts(Facts):
    """Facts of the cluster; bytes are per device, ``usable_bytes`` those available to a plan."""

    device: str
    device_name: str
    nodes: int
    devices_per_node: int
    devices: int
    device_memory_bytes: int | None
    usable_bytes: int | None
    host_memory_bytes: int | None
    link: str | None
    link_bytes_per_s: float | None
    network_bytes_per_s: float | None
    nvme_bytes_per_s: float | None = Field(description="of a node's drives together")
    price_per_device_hour: float | None


class WorkloadFacts(Facts):
    """Facts of the workload, independent of the plan."""

    seq_len: int | None
    global_batch: int | None
    tokens: float | None
    optimizer: str | None
    precision: Precision | None
    compiled: bool
    fused_loss: bool = Field(description="the loss never widens the logits to fp32")
    framework_overhead: bool
    program: str = Field(description="whose costs are predicted: this package's, or another program's")
    document_len: int | None = Field(description="mean tokens of documents packed into a sample")
    objective: Objective = Field(description="lm, or dpo: a sample is a pair, beside a frozen reference; planned only")


class MemoryBytes(Facts):
    """Bytes of the fullest device; each category at its own peak, null if unknown."""

    parameters: int
    gradients: int
    optimizer: int | None
    activations: int | None
    logits: int | None
    buffers: int
    temporaries: int
    context: int
    allocated: int | None = Field(description="peak of live bytes")
    reserved: int | None = Field(description="what the caching allocator takes for them")
    device: int = Field(description="reserved + context: what must be under the device's memory")
    offloaded: int = Field(description="of parameters, gradients and optimizer state, in host memory")
    offloaded_activations: int = Field(description="of what blocks save for the backward, in host memory")
    host: int | None = Field(description="host memory of a node, all its ranks together")


class PhaseBytes(Facts):
    """Live and reserved bytes of one phase of a run."""

    name: str
    allocated: int
    reserved: int | None


class TimeParts(Facts):
    """Seconds of a step; the parts add up to ``step_time_s``."""

    compute: float
    recompute: float
    data_parallel: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline: float
    optimizer: float
    offload: float
    host: float


class CandidateEntry(Facts):
    """Candidate plan with its costs."""

    strategy: str
    fits: bool | None
    runnable: bool = Field(description="this version runs it, and does not only plan it")
    why_not_runnable: str = Field(description="what of it is not run; empty if it runs")
    reason: str = Field(description="why it is not the recommended plan; empty for that one")
    tie: bool
    dims: ParallelDims
    micro_batch: int | None
    grad_accum: int
    stage_blocks: list[int] | None = Field(description="blocks of each pipeline stage; null without a pipeline")
    global_batch: int | None
    recompute: Recompute
    offload_activations: bool = Field(description="what blocks save for the backward is in host memory until then")
    recompute_layers: int | None = Field(description="first blocks of each stage that are recomputed; null is all")
    gradient_sync: GradientSync
    loss_chunks: int = Field(description="parts in which logits and their loss are made")
    optimizer_in_backward: bool = Field(description="each weight is stepped as its gradient is done")
    adapter: AdapterOptions | None = Field(description="what is trained under +lora and +qlora")
    precision: Precision
    weights: WeightType = Field(description="stored as fp32, compute (pure bf16) or masters (beside fp32 ones)")
    accumulate: GradientType = Field(description="type of gradients beside masters")
    reduce: GradientType = Field(description="type in which gradients are reduced")
    fp8: Fp8Recipe = Field(description="torchao's recipe for the products of the blocks; none: they are in precision")
    memory_bytes: MemoryBytes
    phases: list[PhaseBytes]
    step_time_s: float | None
    step_time_low_s: float | None
    step_time_high_s: float | None
    time_parts_s: TimeParts | None
    samples_per_s_per_device: float | None
    tokens_per_s_per_device: float | None = Field(description="null where a sample is no sequence")
    mfu: float | None
    hours: float | None
    cost: float | None
    dollars_per_million_tokens: float | None
    notes: list[str]


class PlanDocument(Facts):
    """Full answer; ``recommended`` is an index into ``candidates``, null if nothing fits."""

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    model: ModelFacts
    cluster: ClusterFacts
    workload: WorkloadFacts
    recommended: int | None
    considered: int = Field(description="plans considered, including those excluded by an argument")
    candidates: list[CandidateEntry]
    offers: list[Offer] = Field(description="what --tokens cost with the recommended plan: on demand, spot and own")
    recommendation: str | None = Field(description="why the recommended plan is recommended")
    advice: list[str] = Field(description="what would fit, if nothing does")
    other_trainings: list[str] = Field(
        description="cheaper ones, where the recommended plan offloads or cuts the model"
    )
    notes: list[str] = Field(
        description="what was not given and filled in, what was given without effect, and what of the model is "
        "counted otherwise or left out"
    )
    proof: dict[str, Any] | None = Field(default=None, description="what --prove found")


def json_schema() -> str:
    """Return the JSON schema of the document."""
    return json.dumps(PlanDocument.model_json_schema(by_alias=True), indent=2)


def document(
    profile: ModelProfile,
    cluster: ClusterSpec,
    workload: Workload,
    result: SearchResult,
    proof: dict[str, Any] | None = None,
    *,
    notes: Sequence[str] = (),
    prices: Prices | None = None,
) -> PlanDocument:
    """Build the document; ``notes`` are defaults that were used and options without effect, beside the model's own."""
    precision = result.candidates[0].plan.precision if result.candidates else None
    chosen = None if result.recommended is None else result.candidates[result.recommended]
    return PlanDocument(
        model=model_facts(profile),
        cluster=cluster_facts(cluster),
        workload=WorkloadFacts(
            precision=precision,
            **workload.model_dump(
                include={
                    "seq_len",
                    "global_batch",
                    "tokens",
                    "optimizer",
                    "compiled",
                    "fused_loss",
                    "framework_overhead",
                    "objective",
                    "document_len",
                }
            ),
            program=workload.program.name,
        ),
        recommended=result.recommended,
        considered=result.considered,
        candidates=[_entry(candidate, cluster) for candidate in result.candidates],
        offers=[*offers(chosen.hours, cluster, prices or Prices())] if chosen is not None and chosen.hours else [],
        recommendation=chosen.plan.reason if chosen else None,
        advice=list(result.advice),
        other_trainings=list(result.other_trainings),
        notes=[*dict.fromkeys((*notes, *profile.unknown))],
        proof=proof,
    )


def model_facts(profile: ModelProfile) -> ModelFacts:
    """Return a model's facts."""
    return ModelFacts(
        name=profile.name,
        origin=profile.origin,
        source=profile.source,
        parameters=profile.num_parameters,
        active_parameters=round(profile.num_active),
        experts=profile.experts,
        trainable=profile.num_trainable,
        blocks=profile.num_blocks,
        hidden_size=profile.hidden_size,
        vocab_size=profile.vocab_size,
        heads=profile.heads,
        kv_heads=profile.kv_heads,
        max_seq_len=profile.max_seq_len,
        flops_per_sample=palm_flops(profile),
        unknown=list(profile.unknown),
    )


def cluster_facts(cluster: ClusterSpec) -> ClusterFacts:
    """Return a cluster's facts."""
    return ClusterFacts(
        **cluster.model_dump(
            include={
                "device",
                "device_name",
                "nodes",
                "devices_per_node",
                "device_memory_bytes",
                "host_memory_bytes",
                "nvme_bytes_per_s",
                "price_per_device_hour",
            }
        ),
        devices=cluster.world_size,
        usable_bytes=usable_bytes(cluster),
        link=cluster.link.kind if cluster.link else None,
        link_bytes_per_s=cluster.link.bytes_per_s if cluster.link else None,
        network_bytes_per_s=cluster.network.bytes_per_s if cluster.network else None,
    )


def _memory(memory: Estimate) -> MemoryBytes:
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "temporaries", "context")
    return MemoryBytes(
        **{name: getattr(memory, name) for name in names},
        allocated=memory.allocated,
        reserved=memory.reserved,
        device=memory.device_bytes,
        offloaded=memory.offloaded_bytes,
        offloaded_activations=memory.offloaded_activations,
        host=memory.host_bytes,
    )


def _entry(candidate: Candidate, cluster: ClusterSpec) -> CandidateEntry:
    plan, time = candidate.plan, candidate.time
    speed = time.tokens_per_s_per_device if time else None
    return CandidateEntry(
        strategy=plan.strategy,
        fits=candidate.fits,
        weights=candidate.plan.weights,
        accumulate=candidate.plan.accumulate,
        reduce=candidate.plan.reduce,
        fp8=candidate.plan.fp8,
        runnable=candidate.runnable,
        why_not_runnable=candidate.why_not_runnable,
        reason=candidate.reason,
        tie=candidate.tie,
        dims=plan.dims,
        micro_batch=plan.micro_batch,
        grad_accum=plan.grad_accum,
        stage_blocks=None if plan.stage_blocks is None else list(plan.stage_blocks),
        global_batch=plan.global_batch,
        recompute=plan.recompute,
        recompute_layers=plan.recompute_layers,
        offload_activations=plan.offload_activations,
        gradient_sync=plan.gradient_sync,
        loss_chunks=plan.loss_chunks,
        optimizer_in_backward=plan.optimizer_in_backward,
        adapter=plan.adapter,
        precision=plan.precision,
        memory_bytes=_memory(candidate.memory),
        phases=[PhaseBytes(**phase.model_dump()) for phase in candidate.memory.phases],
        step_time_s=time.step_s if time else None,
        step_time_low_s=time.low_s if time else None,
        step_time_high_s=time.high_s if time else None,
        time_parts_s=None
        if time is None
        else TimeParts(
            compute=time.compute_s,
            recompute=time.recompute_s,
            data_parallel=time.exposed_dp_s,
            tensor_parallel=time.exposed_tp_s,
            context_parallel=time.exposed_cp_s,
            expert_parallel=time.exposed_ep_s,
            pipeline=time.pipeline_s,
            optimizer=time.optimizer_s,
            offload=time.offload_s,
            host=time.host_s,
        ),
        samples_per_s_per_device=time.samples_per_s_per_device if time else None,
        tokens_per_s_per_device=speed,
        mfu=time.mfu if time else None,
        hours=candidate.hours,
        cost=candidate.cost,
        dollars_per_million_tokens=dollars_per_million_tokens(speed, cluster.price_per_device_hour),
        notes=list(candidate.memory.notes),
    )
