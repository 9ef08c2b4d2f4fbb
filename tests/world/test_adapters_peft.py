"""A model that its user has given peft's adapters: under plain strategies it trains as under one process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.contract import Watch, ragged, reference, worst
from tests.families import family
from tests.worlds import run_world

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def model_of_peft(seed: int, dtype: torch.dtype) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(
            family("llama", seed=seed, dtype=dtype), LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
        )
    for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.05
        parameter.data = noise.to(parameter.dtype)
    return model


def train(dtype: torch.dtype) -> dict[str, Any]:
    from shardwise.model.read import clean_name

    found = {}
    for strategy in STRATEGIES:
        session = start(strategy, grad_accum=2, receipts=False)
        watch, probe = Watch(), EffectsRecorder(strict=False)
        session.observers += [watch, probe]
        model = model_of_peft(0 if session.ranks.is_main else 7, dtype)
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = session.prepare(model, torch.optim.SGD(trained, lr=0.0, momentum=0.9))
        batches = ragged(2 * session.ranks.world_size)
        for _ in range(2):
            for step in session.steps(batches):
                for micro in step:
                    step.backward(token_loss_sum(model(micro.inputs), micro.labels), count=micro.num_tokens)
                step.update(optimizer, clip_norm=1e9)
        expected, _, _, _ = reference(model_of_peft(0, dtype), batches)
        error = worst(watch.raw, {clean_name(name): value for name, value in expected.items()})
        assert probe.receipt is not None
        alarms = [f"{x.name}: {x.planned}, {x.found}" for x in probe.receipt.lines if x.ok is False]
        found[strategy] = (*error, len(watch.raw), alarms)
        session.close()
    return found


def test_a_model_of_peft_has_the_gradient_of_one_process() -> None:
    for found in run_world(train, 2, torch.float64):
        for strategy, (error, name, gradients, alarms) in found.items():
            assert gradients == 16
            assert error < 1e-6, f"{strategy}: {error:.1e} at {name}"  # peft's adapters are fp32 beside a float64 base
            assert not alarms, f"{strategy}: {alarms}"


def test_fp32_adapters_of_peft_over_a_base_in_16_bits() -> None:
    for found in run_world(train, 2, torch.bfloat16):
        for strategy, (error, name, gradients, alarms) in found.items():
            assert gradients == 16
            assert error < 0.15, f"{strategy}: {error:.1e} at {name}"  # of single elements, each a sum of roundings
            assert not alarms, f"{strategy}: {alarms}"
