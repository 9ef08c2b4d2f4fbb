"""LoRA and QLoRA under every plan that runs them: the same gradient as one process without Shardwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.parallel.lora.adapters import add_adapters, set_magnitudes
from shardwise.parallel.lora.quantize import pack, quantized_bytes
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.contract import CLIP, Case, Gradients, Watch, ragged, reference, worst
from tests.families import family
from tests.worlds import run_world

LIMIT = 1e-9


def _with_values(model: nn.Module) -> nn.Module:
    """B is zero at first, and then A has no gradient: both get values, the same ones on every rank."""
    with torch.no_grad():
        for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(index)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05
            parameter.add_(noise.to(parameter.dtype))
    return model


def _adapted(plan: Plan, name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = family(name, seed=seed, dtype=dtype)
    torch.manual_seed(seed)
    add_adapters(model, plan)
    return _with_values(model)


def train(case: Case, dtype: torch.dtype = torch.float64) -> tuple[float, str, int, int]:
    """The worst error of a window, where, how many gradients there are, and the packed bytes that rest here."""
    batches = ragged(case.plan.dims.dp * case.accum)
    watch = Watch()
    session = start(case.plan, receipts=True)
    session.observers.append(watch)
    model = _adapted(case.plan, case.model, 0 if session.ranks.is_main else 7, dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = session.prepare(model, torch.optim.SGD(trained, lr=0.0), batches[0][0])
    errors = [(0.0, "")]
    expected = _expected(case, batches, dtype)
    for _ in range(3):
        for step in session.steps(batches):
            step.run(model, token_loss_sum)
            step.update(optimizer, clip_norm=CLIP)
        errors += [worst(watch.raw, expected[0]), worst(watch.clipped, expected[1])]
    here = quantized_bytes(session.module) if case.plan.parsed.adapter == "qlora" else 0
    session.close()
    return *max(errors), len(watch.raw), here


def _expected(case: Case, batches: list, dtype: torch.dtype) -> tuple[Gradients, Gradients]:
    model = family(case.model, seed=0, dtype=dtype)
    torch.manual_seed(0)
    add_adapters(model, case.plan)
    if case.plan.parsed.adapter == "qlora":
        pack(model)
    set_magnitudes(model)
    raw, clipped, _, _ = reference(_in_order(model, case), batches)
    return _cleaned(raw), _cleaned(clipped)


def _in_order(model: nn.Module, case: Case) -> nn.Module:
    magnitudes = {n: p.detach().clone() for n, p in model.named_parameters() if "magnitude" in n}
    _with_values(model)
    with torch.no_grad():  # prepare sets them from the base
        for name, parameter in model.named_parameters():
            if name in magnitudes:
                parameter.copy_(magnitudes[name])
    return model


def _cleaned(gradients: Gradients) -> Gradients:
    from shardwise.model.read import clean_name

    return {clean_name(name): value for name, value in gradients.items()}


LORA = [
    Case(world, strategy, "llama", accum=2)
    for world in (1, 2, 4)
    for strategy in ("ddp+lora", "zero1+lora", "zero2+lora", "fsdp+lora", "hsdp+lora")
    if world > 1 or strategy != "zero1+lora"
]
MORE = [
    Case(2, "fsdp+lora", "gpt2", options={"adapter": AdapterOptions(targets=("mlp",), rslora=True)}),
    Case(2, "fsdp+lora", "qwen3", options={"adapter": AdapterOptions(dora=True, rank=3), "recompute": "full"}),
    Case(2, "ddp+lora", "own", options={"adapter": AdapterOptions(targets=("attention",)), "recompute": "full"}),
    Case(2, "fsdp+cp2+lora", "llama"),
]


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", [*LORA, *MORE], ids=str)
def test_lora_has_the_gradient_of_one_process(case: Case) -> None:
    for error, name, gradients, _ in run_world(train, case.world, case):
        assert gradients > 10
        assert error <= LIMIT, f"{case}: {error:.2e} at {name}"


QLORA = [Case(world, strategy, "wide-llama") for world in (1, 2) for strategy in ("ddp+qlora", "fsdp+qlora")]
QLORA += [
    Case(2, "zero2+qlora", "wide-llama"),
    Case(4, "hsdp+qlora", "wide-llama"),
    Case(2, "fsdp+qlora", "wide-llama", options={"adapter": AdapterOptions(dora=True), "recompute": "full"}),
]


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", QLORA, ids=str)
def test_qlora_has_the_gradient_of_one_process(case: Case) -> None:
    found = run_world(train, case.world, case)
    for error, name, gradients, _ in found:
        assert gradients > 10
        assert error <= 2e-6, f"{case}: {error:.2e} at {name}"  # packed layers compute in fp32
    full = {here for *_, here in run_world(train, 1, Case(1, "ddp+qlora", case.model))}.pop()
    parts = {"ddp": 1, "hsdp": 2}.get(case.plan.parsed.base, case.world)
    assert {here for *_, here in found} == {full // parts}
