"""Mixtures of experts of transformers: the gradient of one process with eager experts and its routers' losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.cost.memory.estimate_memory import estimate
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.measure.state import local, measure_state
from shardwise.model.architecture import architecture_from_config
from shardwise.model.transformer import profile_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.router_terms import RouterTerms
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.contract import LIMIT, Still
from tests.experts import NONE, TERMS, against_one_process, batches, mixture, routers
from tests.world.zoo.families import LENGTH
from tests.world.zoo.families_table import quiet
from tests.worlds import run_world

GROUPED = 2e-5  # of fp32
WHOLE: dict[str, Any] = {"masked": False}
DEEPSEEK: dict[str, Any] = {"terms": NONE, **WHOLE}
Case = tuple[str, str, dict[str, Any]]
CASES: dict[int, list[Case]] = {
    2: [
        *((name, "fsdp", {}) for name in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")),
        *(("mixtral", strategy, {"missing": 1}) for strategy in ("ddp", "zero1", "zero2", "hsdp", "fsdp+ep2")),
        *(("qwen3_moe", strategy, WHOLE) for strategy in ("ddp+tp2", "ddp+pp2", "ddp+cp2")),
        ("qwen3_moe", "ddp+tp2", {**WHOLE, "sequence_parallel": False}),
        *(("deepseek_v3", strategy, DEEPSEEK) for strategy in ("ddp+pp2", "ddp+cp2")),
        *(("deepseek_v3", strategy, {"terms": NONE, "starved": True}) for strategy in ("ddp", "fsdp", "fsdp+ep2")),
        ("mixtral", "fsdp+tp2+ep2", {**WHOLE, "sequence_parallel": False}),
        *((name, "fsdp+ep2", DEEPSEEK) for name in ("glm4_moe", "minimax_m2", "lfm2_moe", "phimoe")),
        ("mixtral", "fsdp", {"grouped": True, "recompute": "full"}),
        ("mixtral", "fsdp+ep2", {"grouped": True, "recompute": "full"}),
    ],
    4: [
        ("mixtral", "fsdp+ep2", {"missing": 3}),
        ("qwen3_moe", "fsdp+ep4", {}),
        ("gpt_oss", "zero2+ep2", {"gradient_sync": "every"}),
        ("mixtral", "hsdp+ep2", {}),
        ("deepseek_v3", "fsdp+ep4", {"terms": NONE, "starved": True}),
        ("deepseek_v3", "hsdp+ep2", DEEPSEEK),
        ("mixtral", "fsdp+tp2+ep2", WHOLE),
        ("qwen3_moe", "fsdp+tp2+ep4", WHOLE),
        ("deepseek_v3", "fsdp+tp2+ep2", {**DEEPSEEK, "sequence_parallel": False}),
        ("mixtral", "fsdp+pp2+ep2", WHOLE),
        ("deepseek_v3", "fsdp+pp2+ep2", DEEPSEEK),
        ("olmoe", "fsdp+cp2+ep4", WHOLE),
        ("qwen3_moe", "fsdp+pp2", WHOLE),
    ],
    8: [
        ("mixtral", "fsdp+ep4", {}),
        ("qwen3_moe", "hsdp+ep4", {}),
        ("deepseek_v3", "fsdp+ep2", DEEPSEEK),
        ("mixtral", "hsdp+tp2+ep2", WHOLE),
        ("qwen3_moe", "fsdp+pp2+ep4", WHOLE),
        ("deepseek_v3", "fsdp+tp2+pp2+ep2", {**DEEPSEEK, "sequence_parallel": False}),
    ],
}


def each(world: int) -> dict[str, tuple[float, str]]:
    return {
        f"{name} {strategy} {options}": against_one_process(name, strategy, **{"terms": TERMS, **options})
        for name, strategy, options in CASES[world]
    }


@pytest.mark.timeout(500)
@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_the_gradient_is_that_of_one_process(world: int) -> None:
    ranks = run_world(each, world, world, timeout_s=480)
    wrong = {
        case: rows[case]
        for rows in ranks
        for case in rows
        if not rows[case][0] <= (GROUPED if "grouped" in case else LIMIT)
    }
    assert not wrong


def moved(strategy: str) -> list[torch.Tensor]:
    """The biases of the routers on this rank after three steps of DeepSeek's update."""
    quiet()
    session = start(strategy, receipts=False)
    session.routing.terms = RouterTerms(bias_rate=0.01)
    model = mixture("deepseek_v3", dtype=torch.float32)
    model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0))
    for step in session.steps([(inputs["input_ids"], labels) for inputs, labels in batches(12)]):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    found = [router.e_score_correction_bias.clone() for router in routers(session.module)]
    session.close()
    return found


def several() -> list[Any]:
    return [moved(strategy) for strategy in ("ddp", "fsdp+ep2")]


def by_hand() -> list[torch.Tensor]:
    """The same by one process and a formula: twelve micro batches, four a step."""
    model = mixture("deepseek_v3", dtype=torch.float32)
    found = routers(model)
    seen: list[torch.Tensor] = []
    for router in found:
        router.register_forward_hook(lambda _, __, out: seen.append(out[2]))
    given = batches(12)
    for begin in range(0, 12, 4):
        seen.clear()
        with torch.no_grad():
            for inputs, _ in given[begin : begin + 4]:
                model(inputs["input_ids"])
        for at, router in enumerate(found):
            load = torch.bincount(torch.cat(seen[at :: len(found)]).flatten(), minlength=router.num_experts).float()
            router.e_score_correction_bias += 0.01 * (load.mean() - load).sign()
    return [router.e_score_correction_bias for router in found]


@pytest.mark.timeout(200)
def test_the_bias_moves_by_the_load_of_all_ranks() -> None:
    expected = by_hand()
    assert any(bool(bias.any()) for bias in expected)
    ranks = run_world(several, 4, timeout_s=150)
    for found in ranks:
        for biases in found:  # four batches a step
            assert all(torch.equal(mine, bias) for mine, bias in zip(biases, expected, strict=True))


FEW = {"num_local_experts": 3}


def stored(strategies: tuple[str, ...]) -> dict[str, tuple[list[int], list[int], int]]:
    """By strategy: this rank's bytes of weights and of optimizer state, the plan's, and its elements of experts."""
    quiet()
    found = {}
    for strategy in strategies:
        model = mixture("mixtral", dtype=torch.float32, **FEW)
        dims = dims_for(parse_strategy(strategy), dist.get_world_size())
        plan = Plan(strategy=strategy, dims=dims, micro_batch=2, seq_len=LENGTH)
        architecture = architecture_from_config(model.config.to_dict())
        assert architecture is not None
        planned = estimate(profile_of(architecture, LENGTH), plan, Workload(), parse_cluster("4xcpu"))
        session = start(plan, receipts=False)
        model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.0))
        for step in session.steps([(b[0]["input_ids"], b[1]) for b in batches(dims.dp)]):
            step.run(model, token_loss_sum)
            step.update(optimizer)
        state = measure_state(session.module, session.optimizer)
        stacked = sum(local(p).numel() for n, p in session.module.named_parameters() if ".experts." in n)
        found[strategy] = ([state.parameters, state.optimizer], [planned.parameters, planned.optimizer or 0], stacked)
        session.close()
    return found


@pytest.mark.timeout(200)
def test_ranks_beyond_the_number_of_experts_hold_none() -> None:
    """FSDP2 shards stacked experts with their block, along dim 0: one whole expert a rank, and none on the last."""
    ranks = run_world(stored, 4, ("fsdp", "zero2", "ddp"), timeout_s=150)
    for strategy, (_, planned, stacked) in ranks[0].items():
        measured = [max(row[strategy][0][at] for row in ranks) for at in (0, 1)]
        assert measured == planned, strategy
        assert ranks[3][strategy][2] == (stacked if strategy == "ddp" else 0)
