"""fp8 products of experts in a list of linear layers: any number of rows, ranks on which an expert has no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.model.read import clean_name, read_model
from shardwise.parallel.fp8 import check_fp8, convert_unit
from shardwise.plan.plan import Plan
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.fp8 import use_torchao
from tests.models import VOCAB, ragged_batches
from tests.world.test_fp8 import OPTIONS, RECIPES, STEPS, WIDTH, Bits, bits, bits_of, plan_for
from tests.worlds import run_world

use_torchao()

EXPERTS, IDLE, ONLY_ON_RANK_0 = 4, 3, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """A router and its experts, one after the other; ``skips`` those without a token, or calls them without rows."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips, self.router = skips, nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        chosen = torch.arange(len(tokens)) % IDLE
        chosen = chosen.where((chosen != ONLY_ON_RANK_0) | (dist.get_rank() == 0), 1)
        weight = self.router(tokens).softmax(-1).gather(1, chosen[:, None])
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows) or not self.skips:
                out = out.index_add(0, rows, (expert(tokens[rows]) * weight[rows]).to(out.dtype))
        return x + out.reshape(x.shape)


class MixtureDecoder(nn.Module):
    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Mixture(skips) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gradients:
    """Keeps the whole gradients of the last step, of weights that have one."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def on_gradients(self, session: Any, step: Any) -> None:
        if step.number < STEPS:
            return
        named = session.module.named_parameters()
        self.found = bits_of({clean_name(name): p.grad for name, p in named if p.grad is not None})


def trained(strategy: str, recipe: str, skips: bool) -> tuple[Bits, Bits, dict[str, tuple[str, str]], list[str]]:
    """Weights, the last step's gradients, the receipt's lines on fp8, and the names of its false lines."""
    session = start(plan_for(strategy, recipe), device="cpu", receipts=False)
    torch.manual_seed(0)
    whole = MixtureDecoder(skips)
    model, optimizer = session.prepare(whole, torch.optim.AdamW(whole.parameters(), **OPTIONS))
    effects, gradients = EffectsRecorder(strict=False), Gradients()
    session.observers += [effects, gradients]
    for step in session.steps(ragged_batches(STEPS * session.ranks.world_size)):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    assert effects.receipt is not None
    lines = {one.name: (one.planned, one.found) for one in effects.receipt.lines if "fp8" in one.name}
    false = [f"{one.name}: {one.planned}, not {one.found}" for one in effects.receipt.lines if one.ok is False]
    found = bits(session.module)
    session.close()
    return found, gradients.found, lines, false


def all_of_them() -> dict[tuple[str, str, bool], Any]:
    return {
        (strategy, recipe, skips): trained(strategy, recipe, skips)
        for strategy in ("ddp", "fsdp")
        for recipe in RECIPES
        for skips in (True, False)
    }


@pytest.mark.timeout(200)
def test_an_expert_without_tokens_has_a_gradient_of_zero_and_ranks_stay_in_step() -> None:
    """Skipped or called without rows, on one rank or on both: the same bits, and the receipt says what was called."""
    ranks = run_world(all_of_them, 2, timeout_s=180)
    for (strategy, recipe, skips), (weights, gradients, lines, false) in ranks[0].items():
        case = (strategy, recipe, skips)
        assert not false, (case, false)
        assert lines["layers that multiply in fp8"] == ("16", "12 of 12 that were called" if skips else "16"), case
        assert lines["fp8 layers"][1].startswith(f"16 {recipe}, emulated; not 2 of a size that is no multiple"), case
        other = ranks[0][strategy, recipe, not skips]
        for name, value in weights.items():
            assert torch.equal(value, ranks[1][case][0][name]), (case, name)
            if f"experts.{IDLE}." not in name:  # skipped on all ranks it may have no gradient, as in one process
                assert torch.equal(value, other[0][name]) and torch.equal(gradients[name], other[1][name]), (case, name)
        for number in range(EXPERTS):
            grad = gradients.get(f"blocks.0.experts.{number}.up.weight")
            assert (grad is not None and bool(grad.any())) == (number != IDLE), (case, number)


class Products(TorchDispatchMode):
    """Keeps the sizes of each product: rows, what is summed over, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.sizes.append((*args[0].shape, args[1].shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seq_len", [None, 64])
@pytest.mark.parametrize("rows", [0, 1, 16, 37])
def test_any_number_of_rows(recipe: str, seq_len: int | None, rows: int) -> None:
    """Products sum over a multiple of 16, unless torchao pads them; rows that were added change nothing."""
    facts = {"precision": "bf16", "fp8": recipe, "fp8_emulate": True, "seq_len": seq_len, "device": "cpu"}
    plan, torchaos = Plan.model_validate(facts), Plan.model_validate({**facts, "seq_len": None})
    assert torchaos.seq_len is None
    results = []
    for one in (plan, torchaos):
        torch.manual_seed(0)
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64)) for _ in range(2))
        assert check_fp8(model, read_model(model), one, torch.device("cpu")) is not None
        convert_unit(model.blocks[0], one)
        x = torch.randn(rows, 32, dtype=torch.bfloat16, requires_grad=True)
        with Products() as products:
            out = model.blocks[0](x)
            out.float().square().sum().backward()
        layer = model.blocks[0][0]
        results.append((out, x.grad, layer.weight.grad, layer.bias.grad))
        assert out.shape == (rows, 64) and len(products.sizes) == 3
        if one.seq_len == 64:
            assert not any(summed % 16 for _, summed, _ in products.sizes), products.sizes
    for ours, other in zip(*results, strict=True):
        assert torch.allclose(ours.float(), other.float(), rtol=1e-5, atol=1e-5)
    assert bool(results[0][2].any()) == bool(rows)
