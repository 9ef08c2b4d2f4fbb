"""Lean optimizers without ranks: blocks, codes, bytes, the config's rules, and plans that step in the backward."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.cost.memory.estimate_memory import estimate_memory
from shardwise.errors import ConfigError, PlanError
from shardwise.measure import state
from shardwise.model.read import read_model
from shardwise.optim import adamw8bit
from shardwise.optim.adafactor import Adafactor, state_shapes
from shardwise.optim.adamw8bit import BLOCK, AdamW8bit, Blocks, dequantised, quantised, require_bitsandbytes
from shardwise.optim.in_backward import InBackward
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan, runnable
from shardwise.train.config import Config, OptimizerTable, read_config
from shardwise.train.optimizer import build_optimizer, workload_of

SHAPES = ((64, 100), (30,), (5000,), (3, 7, 256), (1, 300), (16, 16))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def stepped(make: Any, held: list[nn.Parameter], steps: int = 4) -> torch.optim.Optimizer:
    optimizer = make(held)
    generator = torch.Generator().manual_seed(1)
    for number, p in itertools.product(range(steps), held):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if p is held[-1]:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + number)
            optimizer.step()
    return optimizer


def test_adamw8bit_is_that_of_bitsandbytes_bit_for_bit() -> None:
    import bitsandbytes

    ours, theirs = parameters(), parameters()
    stepped(lambda ps: AdamW8bit(ps, betas=(0.9, 0.95), weight_decay=0.1), ours)
    stepped(lambda ps: bitsandbytes.optim.AdamW8bit(ps, betas=(0.9, 0.95), weight_decay=0.1), theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_adamw8bit_follows_adamw_within_a_few_per_cent_of_what_it_moves() -> None:
    start, ours, wide = parameters(), parameters(), parameters()
    stepped(lambda ps: AdamW8bit(ps, betas=(0.9, 0.95), weight_decay=0.0), ours)
    stepped(lambda ps: torch.optim.AdamW(ps, betas=(0.9, 0.95), weight_decay=0.0), wide)
    for before, a, b in zip(start, ours, wide, strict=True):
        moved = (b - before).norm()
        assert (a - b).norm() < 0.05 * moved
        assert before.numel() < 4096 or not torch.equal(a, b)


def test_a_parameter_that_is_not_contiguous_is_stepped_as_one_that_is() -> None:
    plain = nn.Parameter(parameters()[0].detach().clone())
    turned = nn.Parameter(plain.detach().t().contiguous().t())
    assert not turned.is_contiguous()
    for held in (plain, turned):
        stepped(lambda ps: AdamW8bit(ps), [held])
    assert torch.equal(plain, turned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adafactor_on_one_rank_is_torchs_bit_for_bit(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    stepped(lambda ps: Adafactor(ps, weight_decay=0.1), ours)
    stepped(lambda ps: torch.optim.Adafactor(ps, weight_decay=0.1), theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_codes_are_the_nearest_and_as_good_as_said() -> None:
    from bitsandbytes.functional import create_dynamic_map

    generator = torch.Generator().manual_seed(2)
    for signed in (True, False):
        table = create_dynamic_map(signed=signed)
        values = torch.randn(5 * BLOCK + 17, generator=generator)
        values = values if signed else values.square()
        values[BLOCK : 2 * BLOCK] = 0.0
        codes, scales = quantised(values, table)
        assert codes.dtype == torch.uint8 and scales.shape == (6,) and scales[1] == 0
        each = scales.repeat_interleave(BLOCK)[: values.numel()]
        off = (dequantised(codes, each, table) - values).abs()
        assert (off <= table.diff().max() / 2 * each * (1 + 1e-5)).all()
        assert off.max() > 0
        best = ((values / each.clamp_min(1e-30))[:, None] - table).abs().argmin(dim=1)
        assert torch.equal(best[each > 0], codes.long()[each > 0])


def test_blocks_stay_where_parts_begin_at_multiples_of_256() -> None:
    full, even, odd = Blocks(4810, 4810), Blocks(5120, 2560), Blocks(4810, 2470)
    assert (even.parts, even.each, odd.parts, odd.each) == (2, 10, 2, 10)
    assert full.same_as(Blocks(4810, 4810)) and even.same_as(Blocks(5120, 5120)) and odd.same_as(odd)
    assert not odd.same_as(full) and not full.same_as(odd)
    elements = torch.tensor([0, 255, 256, 2469, 2470, 2725, 2726, 4809])
    assert odd.scale_of(elements).tolist() == [0, 0, 1, 9, 10, 10, 11, 19]
    assert full.scale_of(elements).tolist() == [0, 0, 1, 9, 9, 10, 10, 18]


@pytest.mark.parametrize("kind", [AdamW8bit, Adafactor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_takes_the_bytes_that_are_said(kind: Any, dtype: torch.dtype) -> None:
    model = nn.Module()
    for number, p in enumerate(parameters(dtype)):
        model.register_parameter(f"p{number}", p)
    optimizer = stepped(kind, list(model.parameters()), steps=1)
    estimate = estimate_memory(read_model(model), Plan(), workload_of(optimizer))
    assert estimate.optimizer == state.local_bytes(state.optimizer_tensors(optimizer))
    assert estimate.gradients == state.local_bytes(p.grad for p in model.parameters() if p.grad is not None)
    early = estimate_memory(read_model(model), Plan(optimizer_in_backward=True), workload_of(optimizer))
    assert (early.gradients, early.optimizer) == (0, estimate.optimizer)


def test_bytes_of_8_bit_state_and_of_factors() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(512, 256))
    elements = 512 * 256
    for make, expected in ((AdamW8bit, 2 * (elements + elements // 256 * 4)), (Adafactor, (512 + 256) * 4 + 4)):
        workload = workload_of(make(model.parameters()))
        assert estimate_memory(read_model(model), Plan(), workload).optimizer == expected
    shards = Plan(strategy="fsdp", dims=ParallelDims(dp_shard=4))
    for make, expected in ((AdamW8bit, 2 * (elements // 4 + elements // 1024 * 4)), (Adafactor, (128 + 256) * 4 + 4)):
        workload = workload_of(make(model.parameters()))
        assert estimate_memory(read_model(model), shards, workload).optimizer == expected
    assert state_shapes((4, 5, 6)) == {"row_var": (4, 5, 1), "col_var": (4, 1, 6)}
    assert state_shapes((4,)) == {"variance": (4,)}


def test_each_parameter_is_stepped_in_the_backward_with_the_rate_of_then() -> None:
    def loss(held: list[nn.Parameter]) -> torch.Tensor:
        return sum((p.square().sum() for p in held), torch.zeros(()))

    late, early = parameters(), parameters()
    options = {"weight_decay": 0.1}
    after = torch.optim.AdamW([{"params": late[:2]}, {"params": late[2:], "lr": 0.5}], **options)
    during = torch.optim.AdamW([{"params": early[:2]}, {"params": early[2:], "lr": 0.5}], **options)
    stepping = InBackward(during)
    for number in range(3):
        for optimizer in (after, during):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
        loss(late).backward()
        after.step()
        after.zero_grad()
        with stepping.running():
            loss(early).backward()
        assert stepping.stepped == {id(p) for p in early}
        assert all(p.grad is None for p in early)
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))
    loss(early).backward()  # not of a step: the gradient stays
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))
    assert all(p.grad is not None for p in early)
    assert [len(group["params"]) for group in during.param_groups] == [2, 4]
    stepping.remove()


def config(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(
        '[model]\nfactory = "a:b"\n[data]\npath = "x"\nseq_len = 8\n[train]\nsteps = 2\n[parallel]\nstrategy = "fsdp"\n'
    )
    return read_config(path, overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["optimizer.name=adafactor", "optimizer.eps=1e-6"],
            "'eps' does nothing for adafactor, only for adamw, adamw8bit and muon",
        ),
        (["optimizer.name=adamw8bit", "optimizer.momentum=0.9"], "'momentum' does nothing for adamw8bit, only for sgd"),
        (["optimizer.in_backward=true"], "'clip_norm' is 1; set optimizer.clip_norm=\"none\""),
        (["optimizer.name=adamw8bit", "parallel.strategy=fsdp+tp2"], "not for +tp: its blocks of 256"),
        (["optimizer.name=adafactor", "parallel.strategy=fsdp+tp2"], "not for +tp: its sums"),
    ],
)
def test_what_the_config_alone_refuses(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(tmp_path, *overrides)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.strategy=auto"], "'parallel.strategy' is auto; name one"),
        (["parallel.strategy=zero1"], "use zero2 or fsdp"),
        (["parallel.strategy=fsdp+tp2"], "gradients are final only after the backward"),
        (["train.grad_accum=2"], "grad_accum is 2; set grad_accum to 1"),
        (["parallel.precision=fp16"], "use precision bf16"),
    ],
)
def test_where_the_backward_may_not_step(tmp_path: Path, overrides: list[str], words: str) -> None:
    early = ["optimizer.in_backward=true", "optimizer.clip_norm=none"]
    assert config(tmp_path, *early).optimizer.in_backward
    with pytest.raises(ConfigError) as refused:
        config(tmp_path, *early, *overrides)
    assert words in str(refused.value)


def test_a_plan_says_so_too_and_old_plans_keep_their_fingerprint() -> None:
    plan = Plan(strategy="fsdp", dims=ParallelDims(dp_shard=2))
    early = plan.model_copy(update={"optimizer_in_backward": True})
    assert runnable(early) is early
    assert plan.fingerprint != early.fingerprint
    assert plan.fingerprint == plan.model_copy(update={"optimizer_in_backward": False}).fingerprint
    runnable(Plan(strategy="ddp", optimizer_in_backward=True))  # one rank reduces nothing
    with pytest.raises(PlanError, match="in buckets, later"):
        runnable(Plan(strategy="ddp", dims=ParallelDims(dp_replicate=2), optimizer_in_backward=True))


def test_a_missing_package_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[qlora\]'"):
        require_bitsandbytes()
    with pytest.raises(ConfigError, match="pip install"):
        build_optimizer(parameters(), OptimizerTable(name="adamw8bit"))


@pytest.mark.parametrize("chunk", [512, 700], ids=["the same blocks", "other blocks"])
def test_8_bit_state_is_regrouped_alike_in_slabs_of_any_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    old, parameter = adamw8bit.Blocks(5000, chunk), torch.empty(5000)
    codes = [torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=generator) for _ in range(2)]
    saved = {name: torch.rand(old.parts * old.each, generator=generator) for name in ("absmax1", "absmax2")}
    tables = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)
    found = []
    for slab in (adamw8bit.BLOCK, 4 * adamw8bit.BLOCK, adamw8bit._SLAB):
        monkeypatch.setattr(adamw8bit, "_SLAB", slab)
        values: dict[str, Any] = {"state1": codes[0].clone(), "state2": codes[1].clone()}
        values |= {name: adamw8bit.empty_scales(parameter) for name in saved}
        regrouping = adamw8bit.Regrouping(parameter, values, saved, old, adamw8bit.blocks_of(parameter), tables)
        regrouping.finish()
        found.append(values)
    assert regrouping.is_exact == (chunk == 512)
    for values in found[:2]:
        assert all(torch.equal(values[name], found[2][name]) for name in values)
