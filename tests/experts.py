"""Tiny mixtures of experts, what one process computes of them with the routers' losses, and a plan against it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardwise.errors import ShardwiseError
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.router_terms import RouterTerms
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests.contract import CLIP, Gradients, Still, Watch, decided_once, gradients_here, worst
from tests.kept import kept
from tests.world.zoo.exact import Float64
from tests.world.zoo.families import FAMILIES, LENGTH, VOCAB, family
from tests.world.zoo.families_table import quiet

_TINY: dict[str, Any] = {**FAMILIES["llama"], "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MORE: dict[str, dict[str, Any]] = {  # families that only mixtures are tested of
    "glm4_moe": {**_TINY, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "minimax_m2": {**_TINY, "num_local_experts": 4},
    "phimoe": {**_TINY, "num_local_experts": 4},
    "lfm2_moe": {**_TINY, "num_experts": 4, "layer_types": ["full_attention"] * 2, "num_dense_layers": 1},
}
TERMS = RouterTerms(aux_loss=0.5, z_loss=0.1)
NONE = RouterTerms()
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def batches(number: int) -> list[Batch]:
    """Micro batches of two samples, the first padded at its end, with ragged labels."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index in range(number):
        ids = torch.randint(3, VOCAB, (2, LENGTH + 1), generator=generator)
        labels, mask = ids[:, 1:].clone(), torch.ones(2, LENGTH, dtype=torch.int64)
        labels[0, LENGTH - 3 - index % 4 :] = -100
        mask[0, LENGTH - 3 - index % 4 :] = 0
        found.append(({"input_ids": ids[:, :-1].contiguous(), "attention_mask": mask}, labels))
    return found


def routers(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if type(part).__name__.endswith(("TopKRouter", "TopkRouter"))]


def routers_loss(rows: list[tuple[torch.Tensor, torch.Tensor]], top_k: int, terms: RouterTerms) -> torch.Tensor:
    """The losses of logits [tokens, experts] and masks [tokens], as the papers write them."""
    logits, mask = torch.cat([one for one, _ in rows]).double(), torch.cat([one for _, one in rows]).double()
    share, number = logits.softmax(-1), logits.shape[-1]
    chosen = functional.one_hot(share.topk(top_k).indices, number).sum(1).double()
    f, p = (chosen.T @ mask) / mask.sum(), (share.T @ mask) / mask.sum()
    z = (logits.logsumexp(-1).square() * mask).sum() / mask.sum()
    return terms.aux_loss * number * (f * p).sum() + terms.z_loss * z


def mixture(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, starved: bool = False, **keys: Any
) -> nn.Module:
    """A tiny model of a family; ``starved``: one expert of each layer never gets a token.

    PhiMoE's router draws experts at random while it trains (SparseMixer), as dropout draws masks: its gradient is
    compared in evaluation.
    """
    model = family(name, seed=seed, dtype=dtype, **{**MORE.get(name, {}), **keys})
    model.train(name != "phimoe")
    for router in routers(model) if starved else ():
        router.e_score_correction_bias[1] = -10.0
    return model


def one_process(
    name: str, given: list[Batch], ranks: int, terms: RouterTerms, masked: bool, starved: bool, dtype: torch.dtype
) -> tuple[Gradients, float]:
    """The gradient of a step in one process without Shardwise, with eager experts, and the routers' loss."""
    model, logits = mixture(name, dtype=dtype, starved=starved), []
    for router in routers(model):
        router.register_forward_hook(lambda _, __, found: logits.append(found[0]))
    count, rows, total, losses = sum(int((b[1] != -100).sum()) for b in given), [], 0.0, []
    with Float64():
        for index, (inputs, labels) in enumerate(given):
            logits.clear()
            found = model(**inputs).logits if masked else model(inputs["input_ids"]).logits
            total = total + functional.cross_entropy(found.flatten(0, -2), labels.flatten(), reduction="sum") / count
            mask = inputs["attention_mask"] if masked else torch.ones_like(inputs["attention_mask"])
            rows += [(one, mask.flatten()) for one in logits]
            if (index % ranks == ranks - 1 or index == len(given) - 1) and terms.has_loss:
                losses.append(routers_loss(rows, model.config.num_experts_per_tok, terms))
                rows = []
        routed = sum(losses) / len(losses) if losses else torch.zeros(())
        (total + routed).backward()
    gradients = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}
    return gradients, float(routed)


def against_one_process(
    name: str,
    strategy: str,
    terms: RouterTerms = NONE,
    *,
    masked: bool = True,
    missing: int = 0,
    starved: bool = False,
    grouped: bool = False,
    **options: Any,
) -> tuple[float, str]:
    """The largest relative error of a gradient that is on this rank, and where; infinite with a sentence if refused.

    ``missing``: batches that the last ranks do not get. ``grouped``: fp32 with transformers' grouped products.
    """
    accum, dtype = 2, torch.float32 if grouped else torch.float64
    quiet()
    dims = dims_for(parse_strategy(strategy), dist.get_world_size())
    plan = Plan(strategy=strategy, dims=dims, grad_accum=accum, **options)
    given = batches(dims.dp * accum - missing)
    expected, routed = kept(
        ("experts", name, len(given), dims.dp, str(terms), masked, starved, grouped),
        lambda: one_process(name, given, dims.dp, terms, masked, starved, dtype),
    )
    session, watch = start(plan, receipts=False), Watch(gradients_here)
    session.observers.append(watch)
    session.routing.terms = terms
    model = mixture(name, seed=dist.get_rank(), dtype=dtype, starved=starved)
    model.config._experts_implementation = "grouped_mm" if grouped else "eager"
    shown = [batch if masked else (batch[0]["input_ids"], batch[1]) for batch in given]
    with Float64():
        try:
            with decided_once(f"experts: {name} {dtype}"):
                model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0), given[0][0]["input_ids"])
        except ShardwiseError as error:
            return float("inf"), str(error)
        for step in session.steps(shown):
            step.run(model, token_loss_sum)
            result = step.update(optimizer, clip_norm=CLIP)
    norm = float(torch.stack([value.square().sum() for value in expected.values()]).sum().sqrt())
    clipped = {key: value * min(1.0, CLIP / (norm + 1e-6)) for key, value in expected.items()}
    found = max(worst(watch.raw, expected), worst(watch.clipped, clipped))
    found = max(found, (abs(float(result.grad_norm or 0.0) / norm - 1.0), "norm"))
    missing = [key for key in expected if key not in watch.raw and bool(expected[key].any())]
    if missing and dims.pp == 1:
        found = (float("inf"), f"no gradient of {missing[0]}")
    found = max(found, (abs(session.routing.loss - routed) / max(routed, 1e-30) if routed else 0.0, "routers' loss"))
    _counts(session, shown)
    session.close()
    return found


def _counts(session: Session, given: list[Any]) -> None:
    """Every token of every layer has chosen its experts, once."""
    routing = session.routing
    top_k = session.module.config.num_experts_per_tok if session.plan.dims.pp == 1 else 2
    masks = [b[0]["attention_mask"] if isinstance(b[0], dict) else torch.ones_like(b[0]) for b in given]
    tokens = sum(int(mask.sum()) for mask in masks)
    assert routing.tokens.tolist() == [tokens] * len(routing.names), (routing.tokens, tokens)
    assert (routing.counts.sum(-1) == top_k * routing.tokens).all()
