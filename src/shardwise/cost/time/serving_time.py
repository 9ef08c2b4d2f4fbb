"""Seconds of serving by a roofline: a prompt's prefill, and a decode step of a batch.

A decode step reads the weights once and each sequence's cache once; products run at the rate of large ones where the
batch is large enough that arithmetic takes longer than reading. Tensor parallel adds two all-reduces for each layer, by
a one-shot kernel for small messages as serving engines have. ``benchmarks/inference`` fits the constants on published
measurements and prints their errors.

Not modelled: the scheduler's and the tokenizer's time on the host, prompts that are read between decode steps,
speculative decoding, attention kernels that lose to short or ragged sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.memory.serving_memory import CHUNK_TOKENS, Quantization, ServedWeights
from shardwise.cost.time.machine import Machine
from shardwise.model.kv_cache import KvCache
from shardwise.model.profile import ModelProfile

READ_PART = 0.8  # of the data sheet's bandwidth, that a decode step reads weights and cache with
LAYER_S = 40e-6  # of a layer's kernels beside what they read: start, end, norms, rotation
ALL_REDUCE_S = 12e-6  # of a one-shot all-reduce inside a node, beside the bytes
# Middle 80 % of measured over predicted seconds of the published rows (benchmarks/inference/README.md).
SPREAD = (0.9, 1.45)
FIRST_TOKEN_S = 3e-3  # of a prompt beside its kernels: scheduling, sampling, the first launch
LARGE = 8192  # rows, columns and contraction of the product whose rate counts as sustained


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Seconds of one decode step on each rank."""

    weights_s: float
    cache_s: float
    arithmetic_s: float  # of both, beyond reading
    all_reduce_s: float
    launch_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.weights_s + self.cache_s + self.arithmetic_s + self.all_reduce_s + self.launch_s

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what takes them, in words for people."""
        return {
            "reading the weights": self.weights_s,
            "reading the KV cache": self.cache_s,
            "arithmetic": self.arithmetic_s,
            "all-reduces": self.all_reduce_s,
            "kernel starts": self.launch_s,
        }


@dataclass(frozen=True, slots=True)
class Server:
    """One replica: a model on ``tp`` ranks of a node, 16-bit or quantized, with keys and values of ``kv_itemsize``."""

    profile: ModelProfile
    cache: KvCache
    weights: ServedWeights
    machine: Machine
    tp: int
    quant: Quantization | None = None
    kv_itemsize: float = 2.0

    @property
    def precision(self) -> str:
        """Precision of products: fp8 where weights are and the GPU has units for it, else 16-bit."""
        peaks = self.machine.gpu.peak_flops if self.machine.gpu is not None else {}
        if self.quant == "fp8" and "fp8" in peaks:
            return "fp8"
        return "bf16" if "bf16" in peaks else "fp16"

    def decode(self, batch: int, context: int) -> DecodeTime:
        """Seconds of a step of ``batch`` sequences that have ``context`` tokens each."""
        assert self.machine.gpu is not None and self.machine.gpu.memory_bytes_per_s is not None
        read = self.machine.gpu.memory_bytes_per_s * READ_PART
        weights_s = self.weights.read_bytes(batch) / read
        cache_s = batch * self.cache.sequence_bytes(context, self.kv_itemsize, self.tp) / read
        products_s = 2.0 * self.weights.active_elements * batch / self.flops_per_s(self.precision)
        scores_s = batch * self._score_flops(context) / self.tp / self.flops_per_s(self._wide)
        return DecodeTime(
            weights_s=weights_s,
            cache_s=cache_s,
            arithmetic_s=max(0.0, products_s - weights_s) + max(0.0, scores_s - cache_s),
            all_reduce_s=2 * self.profile.num_blocks * self._all_reduce_s(batch),
            launch_s=LAYER_S * self.profile.num_blocks,
        )

    def prefill_s(self, tokens: int, batch: int = 1) -> float:
        """Seconds to read ``batch`` prompts of ``tokens`` each, until their first token."""
        w, rows = self.weights, tokens * batch
        products = 2.0 * (w.active_elements - w.head_elements) * rows / self.flops_per_s(self.precision)
        chunk = min(rows, CHUNK_TOKENS)
        chunks = -(-rows // CHUNK_TOKENS)
        assert self.machine.gpu is not None and self.machine.gpu.memory_bytes_per_s is not None
        reading = chunks * w.read_bytes(chunk) / (self.machine.gpu.memory_bytes_per_s * READ_PART)
        blocks = self.profile.num_blocks
        shared = chunks * (2 * self._all_reduce_s(chunk) + LAYER_S) * blocks
        return max(products, reading) + self._attention_s(tokens, batch) + shared + FIRST_TOKEN_S

    @property
    def _wide(self) -> str:
        return "bf16" if self.precision == "fp8" else self.precision

    def flops_per_s(self, precision: str) -> float:
        """Return the rate of a large product."""
        return 2.0 * LARGE**3 / self.machine.matmul_s(LARGE, LARGE, LARGE, precision)

    def _attention_s(self, tokens: int, batch: int) -> float:
        """Seconds of a prompt's attention; a window sees that part of the causal half."""
        seen = [layer.count * _seen(tokens, layer.window) for layer in self.cache.layers if layer.heads]
        part = sum(seen) / max(1, sum(layer.count for layer in self.cache.layers if layer.heads))
        seconds = 0.0
        for unit in self.profile.units:
            for op in unit.ops:
                if op.kind == "attention":
                    seconds += unit.count * self.machine.attention_s(
                        batch=batch,
                        heads=max(1, op.heads // self.tp),
                        kv_heads=max(1, op.kv_heads // self.tp),
                        head_dim=op.head_dim,
                        rows=tokens,
                        causal=True,
                        precision=self._wide,
                        backward=False,
                    )
        return seconds * part

    def _score_flops(self, context: int) -> float:
        """Return the arithmetic of one token's attention: both products over the kept tokens."""
        kept = [layer.count * layer.tokens(context) for layer in self.cache.layers if layer.heads]
        layers = max(1, sum(layer.count for layer in self.cache.layers if layer.heads))
        total = 0.0
        for unit in self.profile.units:
            for op in unit.ops:
                if op.kind == "attention":
                    width = self.cache.layers[0].width if self.cache.shared else op.head_dim
                    total += unit.count * 4.0 * op.heads * width
        return total * sum(kept) / layers

    def _all_reduce_s(self, rows: int) -> float:
        """Seconds of one all-reduce over ``rows`` hidden rows: one-shot where that is faster than NCCL's."""
        if self.tp == 1:
            return 0.0
        message = rows * (self.profile.hidden_size or 0) * 2
        whole = self.machine.collective_s("all_reduce", message, self.tp, self.tp)
        link = self.machine.cluster.link
        if link is None or link.bytes_per_s is None or link.kind == "pcie":
            return whole
        return min(whole, ALL_REDUCE_S + message * (self.tp - 1) / link.bytes_per_s)


def _seen(tokens: int, window: int | None) -> float:
    """Return the part of the causal half that a window leaves."""
    if window is None or tokens <= window:
        return 1.0
    return (window * tokens - window * window / 2) / (tokens * tokens / 2)
