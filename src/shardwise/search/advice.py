"""What would fit where nothing does: each way that works, with its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardwise.errors import PlanError
from shardwise.plan.strategy import SHARDED, Strategy
from shardwise.search.candidate import Candidate, Pins
from shardwise.search.enumerate import divisors
from shardwise.search.explain import room_text
from shardwise.search.search import Question, ask, simplest_fit, usable_bytes
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.hardware import find_gpu, gpu_names
from shardwise.spec.profile import ModelProfile
from shardwise.units import bytes_text

MOST_NODES = 4096
SHORTEST = 256


def advice(
    question: Question, candidates: Sequence[Candidate], shorter: Callable[[int], ModelProfile] | None
) -> tuple[str, ...]:
    """Ways to make it fit, in words, the cheapest first."""
    lines: list[str] = []
    nearest = min(candidates, key=lambda c: c.memory.device_bytes, default=None)
    if nearest is not None and question.usable is not None:
        over = nearest.memory.device_bytes - question.usable
        if over > 0:
            lines.append(
                f"nearest: {nearest.plan.strategy}, micro batch {nearest.plan.micro_batch}, recompute "
                f"{nearest.plan.recompute}, is {bytes_text(over)} over the {bytes_text(question.usable)} usable"
            )
    for way in (_unpin, _offload, _adapters, _other_gpu):
        lines += way(question)
    if shorter is not None:
        lines += _shorter(question, shorter)
    lines += _more_devices(question)
    return tuple(lines) or ("no way was found; the model is too large for every device of the table",)


def _fit(question: Question, **changes: object) -> Candidate | None:
    """The simplest plan that fits the changed question."""
    facts = {"profile": question.profile, "workload": question.workload, "cluster": question.cluster}
    try:
        fixed = {"costs": question.costs, "only_runnable": question.only_runnable}
        asked = ask(**{**facts, "pins": question.pins, **fixed, **changes})  # type: ignore[arg-type]
        return simplest_fit(asked)
    except PlanError:
        return None


def _told(candidate: Candidate, cluster: ClusterSpec) -> str:
    plan = candidate.plan
    return (
        f"{plan.strategy}, micro batch {plan.micro_batch}, recompute {plan.recompute}: "
        f"{room_text(candidate.memory, usable_bytes(cluster))}"
    )


def _unpin(question: Question) -> Iterator[str]:
    """What is pinned, left free one by one."""
    pins = question.pins
    smaller = [n for n in reversed(divisors(pins.micro_batch or 1)) if n < (pins.micro_batch or 1)]
    for micro in smaller:
        if found := _fit(question, pins=pins.model_copy(update={"micro_batch": micro, "grad_accum": None})):
            yield f"micro batch {micro} fits: {_told(found, question.cluster)}"
            break
    if pins.recompute not in (None, "full") and (
        found := _fit(question, pins=pins.model_copy(update={"recompute": "full"}))
    ):
        yield f"recompute full fits: {_told(found, question.cluster)}"
    free = {"strategy": None, "dp_replicate": None, "dp_shard": None}
    if pins.strategy is not None and (found := _fit(question, pins=pins.model_copy(update=free))):
        yield f"another strategy fits: {_told(found, question.cluster)}"
    if pins.model_copy(update=free) != Pins() and (found := _fit(question, pins=Pins(precision=pins.precision))):
        yield f"with nothing pinned it fits: {_told(found, question.cluster)}"


def _offload(question: Question) -> Iterator[str]:
    strategy = question.pins.strategy
    if question.cluster.device == "cpu" or strategy is None or strategy.offload:
        return
    base = strategy.base if strategy.base in SHARDED else "fsdp"
    pins = question.pins.model_copy(update={"strategy": strategy.model_copy(update={"base": base, "offload": True})})
    if found := _fit(question, pins=pins):
        host = f", {bytes_text(found.memory.host_bytes)} of host memory" if found.memory.host_bytes else ""
        yield f"offload fits: {_told(found, question.cluster)}{host}"


def _adapters(question: Question) -> Iterator[str]:
    """Fine-tuning adapters only: another thing is trained, so this is advice and never chosen."""
    strategy = question.pins.strategy
    if question.only_runnable or (strategy is not None and strategy.adapter != "none"):
        return
    for adapter in ("lora", "qlora"):
        for base in ("ddp", "fsdp"):
            strategy = Strategy.model_validate({"base": base, "adapter": adapter})
            pins = question.pins.model_copy(update={"strategy": strategy, "dp_replicate": None, "dp_shard": None})
            if found := _fit(question, pins=pins):
                yield f"training adapters only fits: {_told(found, question.cluster)}"
                return


def _other_gpu(question: Question) -> Iterator[str]:
    """The GPU of the table with the least memory that is enough, as many of them."""
    cluster = question.cluster
    if cluster.device != "cuda":
        return
    gpus = [gpu for name in gpu_names() if (gpu := find_gpu(name)) is not None]
    larger = [gpu for gpu in gpus if gpu.memory_bytes > (cluster.device_memory_bytes or 0)]
    for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes):
        other = cluster.model_copy(
            update={
                "device_name": gpu.name,
                "device_memory_bytes": gpu.memory_bytes,
                "gpu": gpu,
                "link": gpu.nvlink or gpu.pcie,
            }
        )
        if found := _fit(question, cluster=other):
            yield f"{cluster.world_size} × {gpu.name} would do: {_told(found, other)}"
            return


def _shorter(question: Question, shorter: Callable[[int], ModelProfile]) -> Iterator[str]:
    length = (question.workload.seq_len or question.profile.seq_len or 0) // 2
    while length >= SHORTEST:
        workload = question.workload.model_copy(update={"seq_len": length})
        if found := _fit(question, profile=shorter(length), workload=workload):
            yield f"samples of {length} tokens fit: {_told(found, question.cluster)}"
            return
        length //= 2


def _more_devices(question: Question) -> Iterator[str]:
    """More of the same devices: fill the node first, then double the nodes, then look between the last two."""
    cluster, previous = question.cluster, question.cluster.nodes
    typical = cluster.gpu.devices_per_node if cluster.gpu else None
    if typical and cluster.nodes == 1 and cluster.devices_per_node < typical:
        whole = cluster.model_copy(update={"devices_per_node": typical})
        if found := _fit_with_batch(question, whole):
            yield f"{typical} × {cluster.device_name} would do: {_told(found, whole)}{_batch_note(question, found)}"
            return
        cluster = whole
    nodes = cluster.nodes * 2
    while nodes <= MOST_NODES:
        larger = cluster.model_copy(update={"nodes": nodes})
        if found := _fit_with_batch(question, larger):
            between = (nodes + previous) // 2
            smaller = cluster.model_copy(update={"nodes": between})
            if between > previous and (fewer := _fit_with_batch(question, smaller)):
                larger, found = smaller, fewer
            yield (
                f"{larger.world_size} × {cluster.device_name} ({larger.nodes} nodes) would do: "
                f"{_told(found, larger)}{_batch_note(question, found)}"
            )
            return
        previous, nodes = nodes, nodes * 2


def _fit_with_batch(question: Question, cluster: ClusterSpec) -> Candidate | None:
    """On more devices; where the global batch has no sample for each, with one that has."""
    found = _fit(question, cluster=cluster)
    if found is not None or question.workload.global_batch is None:
        return found
    unit = cluster.world_size * (question.pins.micro_batch or 1) * (question.pins.grad_accum or 1)
    batch = -(-question.workload.global_batch // unit) * unit
    return _fit(question, cluster=cluster, workload=question.workload.model_copy(update={"global_batch": batch}))


def _batch_note(question: Question, candidate: Candidate) -> str:
    batch = candidate.plan.global_batch
    return "" if batch == question.workload.global_batch else f", global batch {batch}"
