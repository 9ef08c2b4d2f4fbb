"""`WorkSplit`: what a plan and its program leave of a unit's work to one rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.time.expert_time import load_of
from shardwise.model.profile import Op
from shardwise.plan.plan import Precision, Recompute
from shardwise.plan.program import AttentionKernel
from shardwise.plan.tensor_types import Fp8Recipe


@dataclass(frozen=True, slots=True)
class WorkSplit:
    """Factors of a unit's work: degrees, samples of the micro batch, precision, recompute.

    ``sequence_parallel`` False leaves norms and residuals replicated on every tensor-parallel rank. ``padded`` rounds
    the vocabulary up to a multiple of 128, as Megatron-LM does; where tensor parallel shards it that is always done.
    ``hides_reduction``: backward's reduction of an input gradient runs beside the product for the weight gradient, as
    in Megatron-LM and not in PyTorch. ``casts_weights``: fp8 copies of weights are made in every micro batch, as by
    torchao, and not once a step, as by Transformer Engine. ``ring``: context parallel passes keys and values around its
    ranks, as Megatron-LM and torchtitan do, instead of exchanging tokens for heads. ``shards_ends``: embedding and head
    work on sharded sequences, as in these two, while here they work on full ones. ``document`` is the mean length of
    packed documents that attention stays inside of. ``host`` scales the host's time, which ``compiled_host`` shortens;
    kernels that are fused by hand do not. ``gathers_modules``: weights are gathered one module at a time, by hooks.
    ``weighs_early``: routing weights multiply inside the experts, so that recompute ends in front of the exchange of
    their results, which is not saved.
    ``once_each_rank``: a token is sent once to each rank and node, without a copy for each of its experts.
    ``hidden_dispatch`` is the part of what experts exchange that other micro batches can hide. ``recipe`` is torchao's
    for the blocks' products, and ``gathers_fp8`` gathers their weights in fp8, so that no product casts them.
    """

    tp: int
    cp: int
    micro: int
    precision: Precision
    recompute: Recompute
    compiled: bool
    attention: AttentionKernel = "flash"
    sequence_parallel: bool = True
    padded: bool = False
    hides_reduction: bool = False
    casts_weights: bool = True
    ring: bool = False
    shards_ends: bool = False
    loss_parallel: bool = True
    document: int | None = None
    host: float = 1.0
    compiled_host: bool = False
    gathers_modules: bool = False
    ep: int = 1
    capacity_factor: float | None = None
    balanced_experts: bool = False
    weighs_early: bool = False
    once_each_rank: bool = False
    hidden_dispatch: float = 0.0
    recipe: Fp8Recipe = "none"
    gathers_fp8: bool = False

    def experts_of(self, op: Op) -> tuple[float, int]:
        """Return how a rank's rows of experts compare to those of a sample, and how many local experts have them."""
        load = load_of(op, self.ep, self.capacity_factor, balanced=self.balanced_experts)
        ranks = self.cp * (self.tp if self.ep > 1 else 1)
        return self.micro * load / ranks, max(1, op.experts // self.ep)
