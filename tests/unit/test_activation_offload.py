"""Activations in host memory: each storage once, weights never; and what the planner takes it to cost."""

from __future__ import annotations

import copy
import gc
import json

import pytest
import torch
from torch import nn

from shardwise.cost.memory.estimate_memory import estimate, peak_lower_bound
from shardwise.cost.memory.offloaded_activations import offloaded_activations
from shardwise.cost.time.estimate_time import step_time
from shardwise.cost.time.optimizer_time import PCIE_SHARE
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.parallel.activation_checkpointing import apply_recompute
from shardwise.parallel.activation_offload import SavedOnHost
from shardwise.parallel.precision import apply_autocast
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan, axis_problems
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Pins
from shardwise.search.search import search
from tests.cli.test_plan_command import command
from tests.models import LENGTH, WIDTH, decoder

LLAMA = load_profile("llama-3.1-8b", seq_len=4096)
NODE = parse_cluster("8xA100-80GB")
WORK = Workload()
CPU = torch.device("cpu")
GIB = 2**30


class Changing(nn.Module):
    """Changes in place what it has saved, or saves a view that has no bytes of its own."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("scale", torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "conjugate":
            return x * x.conj()
        out = x.exp() if self.what == "result" else x * self.scale
        (out if self.what == "result" else self.scale).mul_(2)
        return out


class TestHooks:
    def gradients(self, samples: int, recompute: str | None = None, layers: int | None = None):
        """Gradients of a model of three blocks, and the hooks of its blocks."""
        model, hooks = decoder(), SavedOnHost(CPU)
        ids = torch.arange(samples * LENGTH).view(samples, LENGTH) % 23
        if recompute is not None:
            for block in apply_recompute(model, recompute, [f"blocks.{n}" for n in range(3)], layers=layers):
                hooks.attach(block)
        loss = model(ids).square().sum()
        assert hooks.returned == 0 and hooks.saved == hooks.moved
        loss.backward()
        return [p.grad for p in model.parameters()], hooks

    @pytest.mark.parametrize(("recompute", "layers"), [("none", None), ("full", None), ("full", 1)])
    def test_the_bytes_are_those_of_what_blocks_save_and_gradients_are_the_same(self, recompute, layers):
        found, hooks = self.gradients(5, recompute, layers)
        rows = 5 * LENGTH * WIDTH * 8
        inputs = rows  # of a block
        # cumsum / positions (input of the norm), its result (of up), tanh's result, which down saves, too
        whole = rows + rows + 3 * rows
        again = 3 if layers is None and recompute == "full" else layers or 0
        assert hooks.counts == (again * inputs + (3 - again) * whole,) * 3
        expected, _ = self.gradients(5)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    def test_host_memory_is_given_back(self):
        _, hooks = self.gradients(5, "none")
        gc.collect()
        assert not hooks._live

    def test_a_storage_that_several_operations_save_moves_once_for_all(self):
        hooks, block = SavedOnHost(CPU), nn.Module()
        table = torch.randn(64, 64)

        def forward(x):
            return (x * table).sin() * x[:32].repeat(2, 1) + (x.t() * table).t()

        block.forward = forward
        hooks.attach(block)
        x = torch.randn(64, 64, requires_grad=True)
        (block(x) + block(x)).sum().backward()
        sizes = 64 * 64 * 4
        # the table once for both calls; of each call the product, its sine and the repeated rows
        assert hooks.counts == ((1 + 2 * 3) * sizes,) * 3
        plain = x.detach().clone().requires_grad_()
        (forward(plain) + forward(plain)).sum().backward()
        assert torch.equal(x.grad, plain.grad)

    def test_a_storage_that_was_written_to_moves_again(self):
        hooks, block = SavedOnHost(CPU), nn.Module()
        x = torch.randn(64, 64, requires_grad=True)
        state = torch.ones(64, 64)

        def forward(x):
            first = x * state
            state.mul_(3.0)
            return first + x * state

        block.forward = forward
        hooks.attach(block)
        block(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 4.0)), "plain autograd refuses this; a copy has the old values"
        assert hooks.saved == 2 * 64 * 64 * 4

    def test_weights_stay_also_casts_of_them(self):
        hooks, block = SavedOnHost(CPU), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
        hooks.attach(block)
        x = torch.randn(256, 64, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x)
        y.sum().backward()
        assert hooks.saved == 2 * 256 * 64 * 2, "two inputs in bf16"

    def test_a_second_backward_finds_it(self):
        hooks, block = SavedOnHost(CPU), nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        hooks.attach(block)
        x = torch.randn(64, 64, requires_grad=True)
        y = block(x).sum()
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(y, x)[0], first)

    @pytest.mark.parametrize("what", ["result", "buffer"])
    def test_what_stays_and_is_changed_in_place_is_told_as_by_autograd(self, what):
        block = Changing(what)
        SavedOnHost(CPU).attach(block)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            block(torch.ones(10, requires_grad=True)).sum().backward()

    def test_a_copy_of_a_block_computes_with_its_own_weights(self):
        block = nn.Linear(8, 8)
        SavedOnHost(CPU).attach(block)
        other = copy.deepcopy(block)
        nn.init.zeros_(other.weight), nn.init.zeros_(other.bias)
        assert not other(torch.ones(2, 8)).any() and block(torch.ones(2, 8)).any()

    def test_so_does_a_copy_of_a_model_under_autocast(self):
        model = nn.Sequential(nn.Linear(8, 8))
        apply_autocast(model, Plan(strategy="ddp", dims=dims_for(parse_strategy("ddp"), 2), precision="bf16"))
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        assert not other(torch.ones(2, 8)).any() and model(torch.ones(2, 8)).any()

    def test_casts_of_frozen_weights_stay_and_conjugate_views_pass(self):
        block, hooks = nn.Linear(64, 64).requires_grad_(False), SavedOnHost(CPU)
        hooks.attach(block)
        with torch.autocast("cpu", torch.bfloat16):
            block(torch.ones(8, 64, requires_grad=True)).sum().backward()
        assert hooks.saved == 0
        block = Changing("conjugate")
        hooks.attach(block)
        values = torch.ones(256, dtype=torch.complex64, requires_grad=True)
        block(values).real.sum().backward()
        assert torch.equal(values.grad, torch.full_like(values, 2.0))


def plan_of(strategy: str = "fsdp", **options) -> Plan:
    usual = {"micro_batch": 1, "grad_accum": 4, "seq_len": 4096, "precision": "bf16", "device": "cuda"}
    dims = dims_for(parse_strategy(strategy), 8, devices_per_node=8)
    return Plan(strategy=strategy, dims=dims, **usual | options)


class TestCosts:
    @pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2+tp2", "fsdp+pp2"])
    @pytest.mark.parametrize("recompute", ["none", "full"])
    def test_a_device_holds_those_of_a_block_and_the_host_the_rest(self, strategy, recompute):
        plans = [plan_of(strategy, recompute=recompute, offload_activations=away) for away in (False, True)]
        here, there = (estimate(LLAMA, plan, WORK, NODE) for plan in plans)
        saved = offloaded_activations(LLAMA, plans[1], WORK)
        assert here.offloaded_activations == 0 and there.offloaded_activations == int(saved) * plans[0].dims.pp
        held = there.host_bytes - here.host_bytes
        assert there.offloaded_activations * 8 <= held < 2 * 8 * there.offloaded_activations, (
            "in powers of two of bytes"
        )
        left = here.activations - there.activations
        assert 0.85 * there.offloaded_activations < left <= there.offloaded_activations
        assert there.device < here.device
        bounds = [peak_lower_bound(LLAMA, plan, WORK) for plan in plans]
        assert bounds[1] < bounds[0] and bounds[1] <= there.allocated

    def test_the_inputs_of_recomputed_blocks(self):
        plan = plan_of(recompute="full", offload_activations=True, micro_batch=2)
        assert offloaded_activations(LLAMA, plan, WORK) == 32 * 2 * 4096 * 4096 * 2
        three = plan.model_copy(update={"micro_batch": 3})
        assert estimate(LLAMA, three, WORK, NODE).host_bytes == 4 * LLAMA.num_parameters + 8 * 32 * 4 * 4096 * 4096 * 2
        some = plan.model_copy(update={"recompute_layers": 8})
        none = plan.model_copy(update={"recompute": "none"})
        counts = [offloaded_activations(LLAMA, one, WORK) for one in (plan, some, none)]
        assert counts[1] == pytest.approx(counts[0] / 4 + counts[2] * 3 / 4)

    def test_it_takes_the_wire_there_and_back(self):
        plans = [plan_of(offload_activations=away) for away in (False, True)]
        here, there = (step_time(LLAMA, plan, WORK, NODE) for plan in plans)
        moved = 2 * 4 * offloaded_activations(LLAMA, plans[1], WORK)
        assert there.offload_s - here.offload_s == pytest.approx(moved / (NODE.gpu.pcie.bytes_per_s * PCIE_SHARE))
        assert there.step_s - here.step_s == pytest.approx(there.offload_s)

    def test_on_a_cpu_it_makes_no_room(self):
        cluster = parse_cluster("8xcpu")
        plans = [plan_of(offload_activations=away, device="cpu", precision="fp32") for away in (False, True)]
        here, there = (estimate(LLAMA, plan, WORK, cluster) for plan in plans)
        assert here.allocated == there.allocated and here.host_bytes == there.host_bytes

    @pytest.mark.parametrize(("host", "fits"), [(100 * GIB, False), (2000 * GIB, True)])
    def test_the_host_must_have_room(self, host, fits):
        cluster = NODE.model_copy(update={"host_memory_bytes": host})
        pins = Pins(
            strategy=parse_strategy("fsdp"), micro_batch=1, recompute="none", options={"offload_activations": True}
        )
        found = search(LLAMA, Workload(seq_len=4096, global_batch=64), cluster, pins).candidates[0]
        assert found.fits is fits
        if not fits:
            assert found.reason.endswith("of host memory on a node, which has 100.00 GiB")


class TestWords:
    WORDS = ("plan", "llama-3.1-8b", "--cluster", "8xA100-40GB", "--seq-len", "8k", "--global-batch", "64")

    def test_asked_for(self, capsys, tmp_path):
        file = tmp_path / "plan.toml"
        words = [*self.WORDS, "--strategy", "fsdp", "--recompute", "full", "--offload-activations"]
        out, _ = command(capsys, *words, "-o", str(file))
        text = " ".join(out.split())
        assert "with full recompute, activations of blocks in host memory: asked for by name." in text
        assert "(a node's host " in text and "offload_activations = true\n" in file.read_text()
        entry = json.loads(command(capsys, *words, "--json")[0])["candidates"][0]
        assert entry["offload_activations"] and entry["memory_bytes"]["offloaded_activations"] > 0

    def test_what_train_refuses_is_not_planned(self, capsys):
        words = ("--offload-activations", "--recompute", "selective", "--compile", "--strategy", "deepspeed-zero3")
        _, err = command(capsys, *self.WORDS, *words, exit_code=2)
        assert err.count("  - --offload-activations ") == 3 and "with recompute = 'selective'" in err
        _, err = command(capsys, *self.WORDS, "--offload-activations", "--compile", exit_code=2)
        assert "--offload-activations with compile = true: what compiled blocks save" in err

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"recompute": "selective"}, "set recompute to full or none"),
            ({"compile": True}, "leave one out"),
            ({"strategy": "deepspeed-zero3", "device": "cpu"}, "is not for deepspeed-zero3"),
        ],
    )
    def test_what_cannot_be(self, options, says):
        problems = axis_problems(plan_of(**{"strategy": "fsdp"} | options, offload_activations=True))
        assert any(says in line for line in problems), problems
