"""The effects receipt on adapters: silent where all is right, and loud on each way in which they do not take effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.parallel.apply as apply_module
import shardwise.parallel.data_parallel.fsdp as shard_module
import shardwise.parallel.lora.adapters as adapters_module
import shardwise.parallel.lora.quantize as quantise_module
from shardwise.parallel.lora.adapters import adapted_layers
from shardwise.plan.lora_options import AdapterOptions
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests.contract import ragged
from tests.families import family
from tests.turns import by_turns
from tests.worlds import run_each, run_world

OPTIONS = AdapterOptions(rank=4, dropout=0.1)


def run(strategy: str, after: Callable[[Session], None] | None = None, **options: Any) -> list[str]:
    """Some steps with AdamW; the receipt's false lines."""
    session = start(strategy, lora=OPTIONS, receipts=False, grad_accum=2, **options)
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    model = family("wide-llama", dtype=torch.float32)
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if after is not None:
        after(session)
    number = 14 if options.get("precision") == "fp16" else 3  # fp16's scaler skips steps until its scale fits
    for step in session.steps(ragged(2 * number * session.ranks.world_size)):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
    assert probe.receipt is not None
    found = [
        f"{line.name}: planned {line.planned}, found {line.found}" for line in probe.receipt.lines if line.ok is False
    ]
    names = {line.name for line in probe.receipt.lines}
    assert {"adapters", "base weights"} <= names
    assert ("packed weights held" in names) == ("qlora" in strategy)
    session.close()
    return found


CLEAN = [
    ("ddp+lora", "fp32", "none"),
    ("zero1+lora", "bf16", "full"),
    ("fsdp+lora", "fp16", "none"),
    ("ddp+qlora", "bf16", "selective"),
    ("zero2+qlora", "fp32", "none"),
    ("fsdp+qlora", "bf16", "full"),
]


def clean(cases: list[tuple[str, str, str]]) -> dict[str, list[str]]:
    found = {}
    for strategy, precision, recompute in cases:
        found[f"{strategy} {precision}"] = run(strategy, precision=precision, recompute=recompute)
    return found


@pytest.mark.turns(1)
@pytest.mark.parametrize("world", [1, 2])
def test_no_alarm_when_all_is_right(world: int) -> None:
    for alarms in run_world(clean, world, by_turns(CLEAN, 2, f"{world} ranks"), timeout_s=150):
        assert not {case: lines for case, lines in alarms.items() if lines}


def _first(session: Session) -> Any:
    return next(iter(adapted_layers(session.module).values()))


def rank_differs(strategy: str) -> list[str]:
    original = adapters_module._inject
    adapters_module._inject = lambda module, options, targets: original(
        module, options.model_copy(update={"rank": 2}), targets
    )
    return run(strategy)


def scale_differs(strategy: str) -> list[str]:
    def rescale(session: Session) -> None:
        for layer in adapted_layers(session.module).values():
            layer.scaling["default"] *= 2

    return run(strategy, rescale)


def one_layer_without(strategy: str) -> list[str]:
    original = adapters_module._inject
    adapters_module._inject = lambda module, options, targets: original(module, options, targets[:-1])
    return run(strategy)


def dropout_off(strategy: str) -> list[str]:
    def off(session: Session) -> None:
        for layer in adapted_layers(session.module).values():
            layer.lora_dropout["default"] = nn.Identity()

    return run(strategy, off)


def disabled(strategy: str) -> list[str]:
    """Adapters are there and get gradients in one layer alone: the others are passed by."""

    def disable(session: Session) -> None:
        _first(session)._disable_adapters = True

    return run(strategy, disable)


def base_trained(strategy: str) -> list[str]:
    original = apply_module._adapters

    def thaw(module: nn.Module, plan: Any) -> Any:
        found = original(module, plan)
        next(p for n, p in module.named_parameters() if n.endswith("norm.weight")).requires_grad_(True)
        return found

    apply_module._adapters = thaw
    return run(strategy)


def base_not_narrowed(strategy: str) -> list[str]:
    adapters_module._narrow = lambda module, plan: None
    return run(strategy, precision="bf16")


def left_unpacked(strategy: str) -> list[str]:
    quantise_module.pack = lambda unit: None
    return run(strategy)


def packed_in_another_type(strategy: str) -> list[str]:
    original = quantise_module.packed
    quantise_module.packed = lambda weight, nested, kind: original(weight, nested, "fp4")
    return run(strategy)


def scales_not_packed(strategy: str) -> list[str]:
    original = quantise_module.packed
    quantise_module.packed = lambda weight, nested, kind: original(weight, False, kind)
    return run(strategy)


def packed_and_whole(strategy: str) -> list[str]:
    """Packed weights are not sharded: each rank holds all of them."""
    original = shard_module.fully_shard

    def leave_packed(module: nn.Module, **options: Any) -> Any:
        packed = {p for p in module.parameters() if p.dtype == torch.uint8}
        return original(module, ignored_params=packed, **options)

    shard_module.fully_shard = leave_packed
    return run(strategy)


SABOTAGES: list[tuple[Callable[[str], list[str]], str, str]] = [
    (rank_differs, "ddp+lora", "adapters"),
    (scale_differs, "ddp+lora", "adapters"),
    (scale_differs, "fsdp+qlora", "adapters"),
    (one_layer_without, "fsdp+lora", "adapters"),
    (dropout_off, "fsdp+lora", "adapters"),
    (disabled, "fsdp+lora", "adapters"),
    (base_trained, "ddp+lora", "base weights"),
    (base_not_narrowed, "fsdp+lora", "base weights"),
    (base_not_narrowed, "ddp+qlora", "base weights"),
    (left_unpacked, "ddp+qlora", "packed weights held"),
    (packed_in_another_type, "ddp+qlora", "packed weights held"),
    (scales_not_packed, "fsdp+qlora", "packed weights held"),
    (packed_and_whole, "fsdp+qlora", "packed weights held"),
]


HEALED = ("ddp+lora", "fsdp+qlora")
PATCHED = (apply_module, adapters_module, quantise_module, shard_module)


def and_back(sabotage: Callable[[str], list[str]], strategy: str) -> list[str]:
    """The false lines under a sabotage, which is undone for the next one."""
    before = [dict(vars(place)) for place in PATCHED]
    try:
        return sabotage(strategy)
    finally:
        for place, names in zip(PATCHED, before, strict=True):
            vars(place).update(names)


@pytest.fixture(scope="module")
def alarms() -> list[list[list[str]]]:
    """What each sabotage raises, by rank, and in the end no sabotage; all in one world, one after the other."""
    calls = [(sabotage, strategy) for sabotage, strategy, _ in SABOTAGES] + [(run, name) for name in HEALED]
    return run_each(and_back, 2, calls, timeout_s=170)


@pytest.mark.parametrize("number", range(len(SABOTAGES)), ids=[f"{s.__name__}-{name}" for s, name, _ in SABOTAGES])
def test_each_sabotage_is_caught(number: int, alarms: list[list[list[str]]]) -> None:
    line = SABOTAGES[number][2]
    for found in alarms[number]:
        assert any(alarm.startswith(f"{line}:") for alarm in found), found


def test_nothing_is_left_of_them(alarms: list[list[list[str]]]) -> None:
    """Else one sabotage would be caught by the alarm of another."""
    assert alarms[len(SABOTAGES) :] == [[[], []]] * len(HEALED)
