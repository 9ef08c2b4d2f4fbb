"""Products in fp8 by torchao, emulated on CPUs: the bits of a loop by hand, and what a checkpoint keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError, PlanError
from shardwise.model.read import clean_name
from shardwise.parallel.fp8 import gathered_scales
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.fp8 import use_torchao
from tests.models import VOCAB, ragged_batches
from tests.worlds import run_world

use_torchao()

WIDTH, STEPS = 32, 3
OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
RECIPES = ("tensorwise", "rowwise")
Bits = dict[str, torch.Tensor]


class Block(nn.Module):
    """Two products that torchao converts, with a bias and without, and two with an odd size that it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.odd, self.back = nn.Linear(WIDTH, WIDTH - 1), nn.Linear(WIDTH - 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.tanh(self.up(y))) + self.back(self.odd(y))


class Decoder(nn.Module):
    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


CONVERTED = {f"blocks.{block}.{name}" for block in range(2) for name in ("up", "down")}


def built(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder()


def plan_for(strategy: str, recipe: str, **options: Any) -> Plan:
    dims = dims_for(parse_strategy(strategy), dist.get_world_size(), devices_per_node=2)
    types = {"precision": "bf16", "fp8": recipe, "fp8_emulate": True}
    return Plan.model_validate({"strategy": strategy, "dims": dims} | types | options)


def prepared(plan: Plan, seed: int = 0) -> tuple[Any, nn.Module, Any]:
    session = start(plan, device="cpu", receipts=False)
    model = built(seed)
    return session, *session.prepare(model, torch.optim.AdamW(model.parameters(), **OPTIONS))


def bits(module: nn.Module) -> Bits:
    whole = ((name, p.full_tensor() if isinstance(p, DTensor) else p) for name, p in module.named_parameters())
    return {clean_name(name): p.detach().clone() for name, p in whole}


# by hand


def config(recipe: str) -> Any:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)


def converted(model: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(model, config=config(recipe), module_filter_fn=lambda _, name: name in CONVERTED)


def replicated(recipe: str) -> tuple[nn.Module, Any]:
    """A model under autocast, as under ddp and zero1, and how to call it; inputs are cast as under a GPU's autocast."""
    model = converted(built(), recipe)
    for name in CONVERTED:
        model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))

    def call(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids).float()

    return model, call


def as_gathered(recipe: str, wide: nn.Module, gathers: bool) -> nn.Module:
    """A copy with the weights that FSDP2 gathers: bf16, or fp8 cast from fp32 with the whole weight's scale."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    low = converted(built(), recipe)
    low.load_state_dict(wide.state_dict())
    low = low.bfloat16()
    for name in CONVERTED if gathers else ():
        weight, layer = wide.get_submodule(name).weight.detach(), low.get_submodule(name)
        scale = (torch.finfo(torch.float8_e4m3fn).max / weight.abs().max().double()).float()
        data = (weight * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        mm = layer.linear_mm_config
        cast = Float8TrainingTensor(data, scale, torch.bfloat16, mm, gemm_input_role=GemmInputRole.WEIGHT)
        layer.weight = nn.Parameter(cast)
    return low


def by_hand(recipe: str, *, sharded: bool, ranks: int) -> tuple[Bits, Bits]:
    """torchao in one process: each rank's micro batch in turn, their mean in fp32, and the step. Weights, gradients."""
    wide, call = replicated(recipe)
    optimizer = torch.optim.AdamW(wide.parameters(), **OPTIONS)
    batches, kept = ragged_batches(STEPS * ranks), {}
    for number in range(STEPS):
        given, rows = batches[number * ranks : (number + 1) * ranks], []
        tokens = sum(int((labels != -100).sum()) for _, labels in given)
        for ids, labels in given:
            model: nn.Module = as_gathered(recipe, wide, recipe == "tensorwise") if sharded else wide
            model.zero_grad()
            logits = model(ids).float() if sharded else call(ids)
            (token_loss_sum(logits, labels) * (ranks / tokens)).backward()
            rows.append({name: p.grad.float().clone() for name, p in model.named_parameters()})
        for name, weight in wide.named_parameters():
            weight.grad = kept[name] = sum(row[name] / ranks for row in rows)
        optimizer.step()
    return bits(wide), kept


class Gradients:
    """Keeps the whole gradients of the last step."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def on_gradients(self, session: Any, step: Any) -> None:
        if step.number < STEPS:
            return
        self.found = bits_of({clean_name(name): p.grad for name, p in session.module.named_parameters()})


def bits_of(named: dict[str, Any]) -> Bits:
    return {key: (g.full_tensor() if isinstance(g, DTensor) else g).detach().clone() for key, g in named.items()}


def trained(strategy: str, recipe: str) -> tuple[Bits, Bits, list[str]]:
    """Weights, the last step's gradients, and the receipt's false lines."""
    session, model, optimizer = prepared(plan_for(strategy, recipe))
    effects, gradients = EffectsRecorder(strict=False), Gradients()
    session.observers += [effects, gradients]
    for step in session.steps(ragged_batches(STEPS * session.ranks.world_size)):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    assert effects.receipt is not None
    false = [f"{one.name}: {one.planned}, not {one.found}" for one in effects.receipt.lines if one.ok is False]
    found = bits(session.module)
    session.close()
    return found, gradients.found, false


def several(strategies: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    return {(strategy, recipe): trained(strategy, recipe) for strategy in strategies for recipe in RECIPES}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("world", "strategies"), [(2, ("ddp", "zero1", "zero2", "fsdp")), (4, ("hsdp",))])
def test_weights_and_gradients_are_those_of_torchao_by_hand(world: int, strategies: tuple[str, ...]) -> None:
    """Bit for bit: scales of activations are of a rank's micro batch either way, those of weights of the whole weight.

    Four ranks add up gradients in another order: there within fp32 rounding, which the scales do not widen, as no fp8
    value depends on a sum over ranks before the first step has ended.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on a rank
    expected = {(r, s): by_hand(r, sharded=s, ranks=world) for r in RECIPES for s in (True, False)}
    torch.set_num_threads(threads)
    plain = dict(built().named_parameters())
    for (strategy, recipe), (weights, gradients, false) in run_world(several, world, strategies, timeout_s=180)[
        0
    ].items():
        case = (strategy, recipe)
        assert not false, (case, false)
        sharded = parse_strategy(strategy).shards_parameters
        for found, wanted in zip((weights, gradients), expected[recipe, sharded], strict=True):
            for name, value in found.items():
                if world == 2:
                    assert torch.equal(value, wanted[name]), (*case, name)
                else:
                    torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-7, msg=str((*case, name)))
        assert any(not torch.equal(value, plain[name]) for name, value in weights.items())
    apart = [expected[recipe, sharded][1]["blocks.0.up.weight"] for recipe in RECIPES for sharded in (True, False)]
    assert not any(torch.equal(one, other) for one in apart for other in apart if one is not other)


# checkpoints


def resumed(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    batches = ragged_batches(4 * dist.get_world_size())

    def run(session: Any, model: nn.Module, optimizer: Any, save_at: int | None) -> Bits:
        for step in session.steps(batches):
            step.run(model, token_loss_sum)
            step.update(optimizer)
            if step.number == save_at:
                session.save(folder)
        weights = bits(session.module)
        session.close()
        return weights

    whole = run(*prepared(plan_for("fsdp", "tensorwise")), 2)
    for strategy in ("fsdp", "zero2"):
        session, model, optimizer = prepared(plan_for(strategy, "tensorwise"), seed=7)
        session.load(folder)
        scales = {name: float(scale) for name, (_, scale) in gathered_scales(session.module).items()}
        weights = {name: session.module.get_submodule(name).weight.full_tensor() for name in scales}
        found[f"{strategy} scales"] = [
            name for name, scale in scales.items() if abs(scale * float(weights[name].abs().max()) / 448 - 1) > 1e-6
        ]
        again = run(session, model, optimizer, None)
        found[strategy] = [name for name in whole if not torch.equal(whole[name], again[name])]
    return found


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    for found in run_world(resumed, 2, str(tmp_path), timeout_s=100):
        assert len(found) == 4 and not any(found.values()), found


# what is refused


class Odd(nn.Module):
    """No product that fp8 can do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(31, 31), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


def refused() -> dict[str, str]:
    found = {}

    def told(name: str, what: Any) -> None:
        try:
            what()
        except (PlanError, ModelError) as error:
            found[name] = str(error)

    bf16 = {"precision": "bf16"}
    told("cpu", lambda: prepared(plan_for("ddp", "rowwise", fp8_emulate=False)))
    told("fp32", lambda: start("ddp", types={"fp8": "rowwise"}))
    told("tp", lambda: start("fsdp+tp2", types={"fp8": "rowwise"}, **bf16))
    told("lora", lambda: start("fsdp+lora", types={"fp8": "rowwise"}, **bf16))
    told("offload", lambda: start("fsdp+offload", types={"fp8": "rowwise"}, **bf16))
    told("deepspeed", lambda: start("deepspeed-zero2", types={"fp8": "rowwise"}, **bf16))
    told("nvfp4", lambda: start("fsdp", types={"fp8": "nvfp4"}, **bf16))
    told("blockwise", lambda: start("fsdp", types={"fp8": "blockwise"}, **bf16))
    told("pure bf16", lambda: start("fsdp", types={"fp8": "rowwise", "weights": "compute"}, **bf16))
    told("emulate", lambda: start("fsdp", types={"fp8_emulate": True}, **bf16))
    told("auto", lambda: start("auto", types={"fp8": "rowwise"}, **bf16))

    def odd() -> None:
        session = start(plan_for("ddp", "rowwise"), device="cpu", receipts=False)
        model = Odd()
        session.prepare(model, torch.optim.AdamW(model.parameters()))

    told("odd", odd)
    return found


def test_what_is_not_run_is_refused_by_name() -> None:
    found = run_world(refused, 1)[0]
    assert len(found) == 12, found
    assert (
        "compute capability 8.9 or newer, and this is a CPU; leave fp8 out, or set fp8_emulate = true" in found["cpu"]
    )
    assert "with precision fp32: a recipe converts products of a bf16 model; set precision to bf16" in found["fp32"]
    for case, strategy in (("tp", "fsdp+tp2"), ("lora", "fsdp+lora"), ("offload", "fsdp+offload")):
        assert f"runs under ddp, zero1, zero2, fsdp, hsdp, and is only planned for {strategy}" in found[case]
    assert "only planned for deepspeed-zero2" in found["deepspeed"]
    assert "fp8: 'nvfp4' is refused: what a step costs with it is unknown: no published run" in found["nvfp4"]
    assert "prototype.blockwise_fp8_training); take tensorwise or rowwise" in found["blockwise"]
    assert "a run casts fp32 weights to fp8; set weights to fp32" in found["pure bf16"]
    assert "fp8_emulate = true does nothing without fp8" in found["emulate"]
    assert "converts no layer" in found["odd"] and "(2 of a size that is no multiple of 16)" in found["odd"]
