"""Optimizers, what they will keep, and the learning rate as a pure function of the step."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.import_object import load_object
from shardwise.train.config import OptimizerTable
from shardwise.train.optimizer import build_optimizer, learning_rate, set_learning_rate, workload_of

HERE = "tests.unit.test_optimizer"


def weights(number: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)) for _ in range(number)]


def not_an_optimizer(params, lr):
    return {"lr": lr}


def two_groups(params, lr, ratio=10.0):
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": lr * ratio}], lr=lr)


def rates(total: int, **options) -> list[float]:
    rate = learning_rate(OptimizerTable(**options), total)
    return [rate(step) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_climbs_in_equal_parts_to_the_full_rate(schedule):
    found = rates(20, lr=0.8, warmup_steps=4, schedule=schedule)
    assert found[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert max(found) == pytest.approx(0.8)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 5, 19])
def test_a_schedule_falls_and_ends_at_its_minimum(schedule, ratio, warmup):
    found = rates(20, lr=0.5, warmup_steps=warmup, schedule=schedule, min_lr_ratio=ratio)
    assert found[-1] == pytest.approx(0.5 * ratio, abs=1e-15)
    after = found[warmup:]
    assert all(a > b or ratio == 1.0 for a, b in itertools.pairwise(after))
    assert all(rate >= 0.5 * ratio - 1e-15 for rate in after)


def test_cosine_is_a_cosine_and_linear_a_line():
    cosine = rates(8, lr=1.0, schedule="cosine", min_lr_ratio=0.2)
    assert cosine == pytest.approx([0.2 + 0.4 * (1 + math.cos(math.pi * step / 8)) for step in range(1, 9)])
    assert cosine[3] == pytest.approx(0.6), "half way is in the middle"
    linear = rates(8, lr=1.0, schedule="linear", min_lr_ratio=0.2)
    assert linear == pytest.approx([1 - 0.8 * step / 8 for step in range(1, 9)])
    warm = rates(10, lr=1.0, schedule="linear", warmup_steps=2)
    assert warm[2:] == pytest.approx([1 - step / 8 for step in range(1, 9)]), "the fall starts after the warm-up"


def test_wsd_warms_up_stays_and_falls_in_a_line():
    found = rates(20, lr=1.0, schedule="wsd", warmup_steps=4, decay_fraction=0.25, min_lr_ratio=0.5)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4:15] == [1.0] * 11
    assert found[15:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])
    late = rates(10, lr=1.0, schedule="wsd", warmup_steps=6, decay_fraction=0.9)
    assert late[5:] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0]), "the fall waits for the end of the warm-up"
    longer = rates(40, lr=1.0, schedule="wsd", warmup_steps=4, decay_fraction=0.25)
    assert longer[:15] == found[:15], "a longer run is the same one up to the fall"


def test_constant_is_constant():
    assert rates(6, lr=0.3, schedule="constant", warmup_steps=1) == [0.3] * 6


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (5, 5), (9, 5), (5, 6)])
def test_short_runs_have_a_rate_too(schedule, warmup, total):
    rate = learning_rate(OptimizerTable(lr=1.0, schedule=schedule, warmup_steps=warmup), total)
    for step in range(1, total + 4):  # a run that goes on beyond its schedule
        assert 0.0 <= rate(step) <= 1.0
    assert [rate(step) for step in range(1, min(warmup, total) + 1)] == pytest.approx(
        [step / warmup for step in range(1, min(warmup, total) + 1)]
    )


def test_adamw_of_the_config():
    table = OptimizerTable(lr=0.01, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.3)
    params = weights()
    made = build_optimizer(params, table)
    assert type(made) is torch.optim.AdamW
    (group,) = made.param_groups
    assert all(a is b for a, b in zip(group["params"], params, strict=True))
    assert {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "fused")} == {
        "lr": 0.01,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.3,
        "fused": True,
    }


def test_sgd_of_the_config():
    made = build_optimizer(weights(), OptimizerTable(name="sgd", lr=0.01, momentum=0.7, weight_decay=0.3))
    assert type(made) is torch.optim.SGD
    (group,) = made.param_groups
    assert [group[key] for key in ("lr", "momentum", "weight_decay")] == [0.01, 0.7, 0.3]
    assert not group["fused"], "PyTorch has no fused SGD for sharded parameters"


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_is_that_of_the_plain_optimizer(name):
    """Fused is a matter of speed only."""
    torch.manual_seed(0)
    ours, plain = nn.Linear(5, 3), nn.Linear(5, 3)
    plain.load_state_dict(ours.state_dict())
    made = build_optimizer(ours.parameters(), OptimizerTable(name=name, lr=0.1, weight_decay=0.1))
    kind, options = (
        (torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8}) if name == "adamw" else (torch.optim.SGD, {})
    )
    other = kind(plain.parameters(), lr=0.1, weight_decay=0.1, foreach=False, **options)
    for _ in range(3):
        for model, optimizer in ((ours, made), (plain, other)):
            model(torch.linspace(-1, 1, 10).reshape(2, 5)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.weight, plain.weight)


def test_frozen_parameters_are_left_out():
    params = weights()
    params[1].requires_grad_(False)
    held = build_optimizer(params, OptimizerTable()).param_groups[0]["params"]
    assert [id(p) for p in held] == [id(params[0]), id(params[2])]


def test_an_optimizer_of_the_users_own():
    made = build_optimizer(weights(), OptimizerTable(factory=f"{HERE}:two_groups", lr=0.5, kwargs={"ratio": 4.0}))
    assert [group["lr"] for group in made.param_groups] == [0.5, 2.0]
    adadelta = build_optimizer(weights(), OptimizerTable(factory="torch.optim:Adadelta", lr=0.5, kwargs={"rho": 0.7}))
    assert type(adadelta) is torch.optim.Adadelta and adadelta.param_groups[0]["rho"] == 0.7


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (f"{HERE}:not_an_optimizer", "returned a dict; it must return an Optimizer"),
        ("torch.optim", "is neither package.module:function nor file.py:function"),
        ("torch.optim:", "is neither package.module:function nor file.py:function"),
        ("torch.optim:AdamWW", r"has no 'AdamWW' \(did you mean 'AdamW'\?\)"),
        ("no_such_module_of_ours:make", "no module named 'no_such_module_of_ours'"),
    ],
)
def test_a_factory_that_is_none(path, says):
    with pytest.raises(ConfigError, match=says) as raised:
        build_optimizer(weights(), OptimizerTable(factory=path))
    assert str(raised.value).startswith(f"optimizer.factory '{path}'")


def test_a_factory_is_found_where_the_user_stands(tmp_path, monkeypatch):
    (tmp_path / "made_by_the_user.py").write_text("def make():\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_object("made_by_the_user:make", "model.factory")() == 7
    del sys.modules["made_by_the_user"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.RAdam, {}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.NAdam, {}),
    ],
)
def test_what_an_optimizer_will_keep(kind, options):
    """Against the states it really makes."""
    params = weights(1)
    optimizer = kind(params, lr=0.1, **options)
    workload = workload_of(optimizer)
    params[0].grad = torch.ones(2, 2)
    optimizer.step()
    kept = [tensor for tensor in optimizer.state[params[0]].values() if isinstance(tensor, torch.Tensor)]
    assert workload.optimizer_states == sum(tensor.shape == (2, 2) for tensor in kept)
    assert workload.scalar_states == sum(tensor.ndim == 0 for tensor in kept)


def test_of_an_optimizer_not_known_here_nothing_is_claimed():
    assert workload_of(torch.optim.Adagrad(weights())).optimizer_states is None


def test_groups_keep_the_ratio_of_their_rates():
    optimizer = two_groups(weights(), lr=0.5, ratio=0.1)
    for rate in (0.25, 0.5, 0.0, 0.125):
        set_learning_rate(optimizer, rate, base=0.5)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate, rate / 10])


def test_one_group_gets_the_rate_itself():
    optimizer = torch.optim.SGD(weights(), lr=3e-4)
    rate = learning_rate(OptimizerTable(lr=3e-4, schedule="cosine"), 7)
    for step in range(1, 8):
        set_learning_rate(optimizer, rate(step), base=3e-4)
        assert optimizer.param_groups[0]["lr"] == rate(step)


@pytest.mark.parametrize(
    ("optimizer", "device", "together", "each"),
    [
        (torch.optim.AdamW(weights(), fused=True), "cuda", 0.0, 0.0),
        (torch.optim.AdamW(weights()), "cuda", 1.0, 0.0),
        (torch.optim.AdamW(weights()), "cpu", 0.0, 2.0),
        (torch.optim.AdamW(weights(), foreach=True), "cpu", 1.0, 0.0),
        (torch.optim.AdamW(weights(), foreach=False), "cuda", 0.0, 2.0),
        (torch.optim.Adam(weights(), weight_decay=0.1), "cpu", 0.0, 3.0),
        (torch.optim.SGD(weights(), momentum=0.9), "cpu", 0.0, 0.0),
        (torch.optim.SGD(weights(), momentum=0.9, weight_decay=0.1), "cpu", 0.0, 1.0),
        (torch.optim.SGD(weights(), momentum=0.9, weight_decay=0.1), "cuda", 1.0, 0.0),
        (torch.optim.SGD(weights(), momentum=0.9, weight_decay=0.1, nesterov=True), None, 0.0, 2.0),
    ],
)
def test_tensors_that_live_only_while_it_steps(optimizer, device, together, each):
    workload = workload_of(optimizer, device=device)
    assert (workload.optimizer_temporaries, workload.loop_temporaries) == (together, each)
