"""JSON document of ``shardwise plan --serve``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from shardwise.cost.memory.serving_memory import Quantization
from shardwise.cost.time.serving_time import SPREAD
from shardwise.report.plan_json import ClusterFacts, Facts, ModelFacts, cluster_facts, model_facts
from shardwise.report.serving_sentences import answer, served_notes
from shardwise.search.serving_options import KvType, ServingOption, ServingRequest, ServingResult


class DecodeParts(Facts):
    """Seconds of a decode step; they add up to ``step_s``."""

    weights: float
    cache: float
    arithmetic: float
    all_reduce: float
    launch: float


class OptionEntry(Facts):
    """One way to serve: bytes of one device; sequences and rates of all replicas together."""

    tp: int
    replicas: int
    fits: bool | None
    weight_bytes: int
    cache_bytes: int = Field(description="of the replica's share of the sequences, each with its full context")
    workspace_bytes: int
    usable_bytes: int | None
    most_sequences: int | None = Field(description="of the full context")
    first_token_s: float | None = Field(description="of a prompt that fills the context, on an idle replica")
    step_s: float | None = Field(description="one token for each sequence, with all contexts full")
    step_parts_s: DecodeParts | None
    bottleneck: str | None
    tokens_per_s: float | None
    tokens_per_s_low: float | None = Field(description="8 of 10 published measurements lie between low and high")
    tokens_per_s_high: float | None
    tokens_per_s_each: float | None
    dollars_per_million_tokens: float | None
    note: str


class ServingDocument(Facts):
    """Full answer of ``--serve``; ``recommended`` is an index into ``options``, null if nothing fits."""

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    model: ModelFacts
    cluster: ClusterFacts
    context: int
    concurrency: int
    quant: Quantization | None
    kv_cache: KvType
    cache_bytes_of_a_sequence: int = Field(description="all heads, before tensor parallel divides or repeats them")
    cache_origin: str
    recommended: int | None
    options: list[OptionEntry]
    answer: list[str]
    advice: list[str]
    notes: list[str]


def serving_document(request: ServingRequest, result: ServingResult, notes: Sequence[str]) -> ServingDocument:
    """Build the document."""
    return ServingDocument(
        model=model_facts(request.profile),
        cluster=cluster_facts(request.cluster),
        context=request.context,
        concurrency=request.concurrency,
        quant=request.quant,
        kv_cache=request.kv_type,
        cache_bytes_of_a_sequence=request.cache.sequence_bytes(request.context, request.kv_itemsize),
        cache_origin=request.cache.origin,
        recommended=result.recommended,
        options=[_entry(option) for option in result.options],
        answer=answer(request, result),
        advice=list(result.advice),
        notes=[*notes, *served_notes(request, result)],
    )


def _entry(option: ServingOption) -> OptionEntry:
    decode, rate = option.decode, option.tokens_per_s
    parts = None
    if decode is not None:
        parts = DecodeParts(
            weights=decode.weights_s,
            cache=decode.cache_s,
            arithmetic=decode.arithmetic_s,
            all_reduce=decode.all_reduce_s,
            launch=decode.launch_s,
        )
    found = option.bottleneck
    return OptionEntry(
        tp=option.tp,
        replicas=option.replicas,
        fits=option.fits,
        weight_bytes=option.weight_bytes,
        cache_bytes=option.cache_bytes,
        workspace_bytes=option.workspace_bytes,
        usable_bytes=option.usable_bytes,
        most_sequences=option.most,
        first_token_s=option.prefill_s,
        step_s=None if decode is None else decode.step_s,
        step_parts_s=parts,
        bottleneck=None if found is None else found[0],
        tokens_per_s=rate,
        tokens_per_s_low=None if rate is None else rate / SPREAD[1],
        tokens_per_s_high=None if rate is None else rate / SPREAD[0],
        tokens_per_s_each=option.each_per_s,
        dollars_per_million_tokens=option.dollars_per_million,
        note=option.note,
    )
