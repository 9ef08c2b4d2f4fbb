"""What bf16 weights keep of small updates: rounding at random, Kahan's rest, masters, and what nearest loses."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.optim.low_precision import Keeps, LowPrecisionAdamW, low_precision_notes, round_stochastically
from shardwise.plan.plan import Plan


def rounded(values: torch.Tensor, key: int, begin: int = 0) -> torch.Tensor:
    found = values.clone()
    round_stochastically(found, begin, torch.tensor(key, dtype=torch.int32))
    return found


def test_rounding_at_random_is_right_in_the_mean_and_to_a_neighbour() -> None:
    number = 1 << 16
    for share in (0.0, 0.1, 0.5, 0.9):
        low, high = 1.0, 1.0 + 2**-7
        values = torch.full((number,), low + share * (high - low))
        found = rounded(values, 12345)
        assert set(found.tolist()) <= {low, high}
        up = float((found == high).double().mean())
        assert abs(up - share) <= 5 * math.sqrt(share * (1 - share) / number) + 2**-16
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, -1.5, 3.0])
    assert torch.equal(rounded(odd, 7).nan_to_num(9.0), odd.nan_to_num(9.0))


def test_a_shard_is_rounded_as_its_part_of_the_whole() -> None:
    values = torch.randn(5000)
    whole = rounded(values, -3)
    assert torch.equal(rounded(values[1700:].clone(), -3, begin=1700), whole[1700:])
    assert not torch.equal(rounded(values, -2), whole)
    # neighbours do not share their luck
    ups = (rounded(torch.full((1 << 16,), 1.0 + 2**-8), 99) > 1.0).double() - 0.5
    assert abs(float((ups[1:] * ups[:-1]).mean())) < 0.005


@pytest.mark.parametrize(("keeps", "moves"), [("masters", 1.0), ("kahan", 1.0), ("stochastic", 1.0), ("nearest", 0.0)])
def test_small_updates_add_up_unless_they_are_rounded_to_nearest(keeps: str, moves: float) -> None:
    """Steps of 1/2000 of a weight of 1, each less than half of bf16's last bit."""
    weight = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    kind = torch.optim.AdamW if keeps == "nearest" else LowPrecisionAdamW
    more = {} if keeps == "nearest" else {"keeps": keeps}
    optimizer = kind([weight], lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0, **more)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert float(1.0 - weight.detach().float().mean()) == pytest.approx(0.1 * moves, abs=0.01)


@pytest.mark.parametrize("keeps", ["masters", "kahan", "stochastic"])
def test_pytorchs_own_state_dict_goes_on_bit_for_bit_and_keeps_what_it_kept(keeps: Keeps) -> None:
    def steps(weight: nn.Parameter, optimizer: LowPrecisionAdamW, number: int) -> None:
        for index in range(number):
            weight.grad = torch.linspace(-1, 1, 64).to(torch.bfloat16) * (index + 1)
            optimizer.step()

    whole = nn.Parameter(torch.linspace(0.5, 2, 64).to(torch.bfloat16))
    first = LowPrecisionAdamW([whole], lr=1e-3, keeps=keeps)
    steps(whole, first, 3)
    again = nn.Parameter(whole.detach().clone())
    second = LowPrecisionAdamW([again], lr=1e-3, keeps=keeps)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(whole, first, 3)
    steps(again, second, 3)
    assert torch.equal(whole, again)
    for key, value in first.state[whole].items():
        assert value.dtype == second.state[again][key].dtype and torch.equal(value, second.state[again][key]), key
    other: Keeps = "kahan" if keeps == "stochastic" else "stochastic"
    with pytest.raises(ModelError, match=f"is of {keeps}, and this run keeps {other}"):
        LowPrecisionAdamW([again], keeps=other).load_state_dict(first.state_dict())
    with pytest.raises(ModelError, match="is of plain AdamW"):
        second.load_state_dict(torch.optim.AdamW([again]).state_dict())


def test_what_pure_bf16_costs_is_said() -> None:
    plan = Plan(strategy="ddp", precision="bf16", weights="compute")
    weight = [nn.Parameter(torch.ones(2))]
    usual, slow = (torch.optim.AdamW(weight, betas=(0.9, last)) for last in (0.95, 0.999))
    assert [note.split(":")[0] for note in low_precision_notes(usual, plan)] == [
        "weights = 'compute' rounds to nearest"
    ]
    assert "betas[1] = 0.999" in low_precision_notes(slow, plan)[1]
    kahan = plan.model_copy(update={"rounding": "kahan"})
    assert not low_precision_notes(usual, kahan) and len(low_precision_notes(slow, kahan)) == 1
    for kept in ({"weights": "masters"}, {"weights": "fp32"}):
        assert not low_precision_notes(slow, plan.model_copy(update=kept))
