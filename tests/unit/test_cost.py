"""Predicted bytes against real tensors, and the choice that is made by them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import (
    estimate_memory,
    local_elements,
    stepped_groups,
    unit_elements,
    zero1_shares,
)
from shardwise.cost.memory.framework_overhead import context_bytes
from shardwise.cost.memory.local_shapes import layout_of
from shardwise.errors import DoesNotFit, PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.facts import ModelSpec, ParameterSpec
from shardwise.model.read import read_model
from shardwise.plan.dims import ParallelDims, dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.search.choose import SIMPLEST_FIRST, choose
from shardwise.search.problem import USABLE
from shardwise.train.optimizer import workload_of
from shardwise.units import bytes_text
from tests.models import Decoder, decoder, ragged_batches
from tests.worlds import run_world

EXACT = ("parameters", "gradients", "optimizer")
VARIANTS: dict[str, dict[str, bool]] = {"plain": {}, "tied": {"tied": True}, "frozen": {"frozen": True, "tied": True}}


def parameter(name: str, *shape: int, trainable: bool = True, block: str | None = None) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, itemsize=4, dtype="float32", trainable=trainable, block=block)


def plan_for(strategy: str, world: int, **options: Any) -> Plan:
    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), world), **options)


def tensor_bytes(tensors: Any) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in local}.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What this rank's optimizer really keeps; ZeroRedundancyOptimizer keeps it in another one."""
    inner = getattr(optimizer, "optim", optimizer)
    return [tensor for state in inner.state.values() for tensor in state.values() if isinstance(tensor, torch.Tensor)]


# blocks of 60 and 40 elements, 100 outside; one of them frozen
SMALL = ModelSpec(
    parameters=(
        parameter("embed", 10, 5),
        parameter("blocks.0.up", 10, 6, block="blocks.0"),
        parameter("blocks.1.up", 10, 4, block="blocks.1"),
        parameter("blocks.2.up", 3, 4, block="blocks.2"),
        parameter("head", 5, 10, trainable=False),
    ),
    blocks=("blocks.0", "blocks.1", "blocks.2"),
)
DEEP = ModelSpec(
    parameters=tuple(parameter(f"blocks.{index}.up", 40, 25, block=f"blocks.{index}") for index in range(16)),
    blocks=tuple(f"blocks.{index}" for index in range(16)),
)
DRAFT = Plan(device="cuda")
KNOWN = Workload(optimizer_states=2, scalar_states=1, activation_bytes={"none": 1000, "full": 10}, logits_bytes=100)


class TestHeldElements:
    @pytest.mark.parametrize("strategy", ["zero2", "fsdp", "hsdp"])
    def test_a_rank_holds_what_torch_chunk_gives_it(self, strategy):
        for rows, inner, ranks in itertools.product(range(20), [(), (3,), (2, 5)], range(1, 9)):
            full = torch.empty(rows, *inner)
            chunks = [chunk.numel() for chunk in torch.chunk(full, ranks)] + [0] * ranks
            plan = Plan(strategy=strategy, dims=ParallelDims(dp_replicate=3, dp_shard=ranks))
            found = [local_elements(parameter("p", rows, *inner), plan, rank) for rank in range(ranks)]
            assert found == chunks[:ranks]
            assert sum(found) == full.numel() and max(found) == local_elements(parameter("p", rows, *inner), plan)

    @pytest.mark.parametrize("strategy", ["ddp", "zero1"])
    def test_whole_parameters_are_held_whole(self, strategy):
        assert [local_elements(parameter("p", 7, 3), plan_for(strategy, 4), rank) for rank in range(4)] == [21] * 4

    def test_a_scalar_cannot_be_cut(self):
        assert local_elements(parameter("p"), plan_for("fsdp", 4), 3) == 1


class TestEstimate:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_of_one_process_it_is_what_real_tensors_take(self, variant, kind, dtype):
        model = Decoder(**VARIANTS[variant]).to(dtype)
        optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.1)
        inputs, labels = ragged_batches(1)[0]
        torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        found = estimate_memory(read_model(model), Plan(), workload_of(optimizer))
        assert found.parameters == tensor_bytes(model.parameters())
        assert found.gradients == tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)
        assert found.optimizer == tensor_bytes(state_tensors(optimizer))
        assert found.device_bytes == found.parameters + found.gradients + found.optimizer

    def test_activations_grow_with_the_micro_batch(self):
        plan = Plan(micro_batch=3, grad_accum=7)
        found = estimate_memory(SMALL, plan, KNOWN)
        assert (found.activations, found.logits) == (3000, 300)
        assert found.unknown == ()
        assert estimate_memory(SMALL, plan.model_copy(update={"recompute": "full"}), KNOWN).activations == 30
        assert estimate_memory(SMALL, Plan(), KNOWN).activations == 1000, "the loader's micro batch counts as one"

    def test_what_is_not_known_is_not_invented(self):
        found = estimate_memory(SMALL, Plan(recompute="selective"), Workload(optimizer_states=None))
        assert (found.optimizer, found.activations, found.logits) == (None, None, None)
        assert found.unknown == ("optimizer", "activations", "logits")
        assert found.device_bytes == found.parameters + found.gradients

    def test_sharded_state_of_the_fullest_rank(self):
        found = estimate_memory(SMALL, plan_for("fsdp", 4), KNOWN)
        rows = {"embed": 3 * 5, "up0": 3 * 6, "up1": 3 * 4, "up2": 1 * 4, "head": 2 * 10}
        trained = sum(rows.values()) - rows["head"]
        assert found.parameters == 4 * sum(rows.values())
        assert found.gradients == 4 * trained
        assert found.optimizer == 2 * 4 * trained + 4 * 4, "four step counters, one for each trained parameter"

    def test_zero1_is_the_share_of_the_rank_with_most(self):
        """60 | 50, 40 → 60 | 90, then 12 → 72 | 90."""
        found = estimate_memory(SMALL, plan_for("zero1", 2), KNOWN)
        assert found.parameters == 4 * 212 and found.gradients == 4 * 162
        assert found.optimizer == 2 * 4 * 90 + 2 * 4

    @pytest.mark.parametrize(
        ("strategy", "options", "elements_and_bytes"),
        [
            ("ddp", {}, [(0, 4)]),
            ("ddp", {"precision": "bf16"}, [(212, 2)]),
            ("zero1", {"precision": "fp16"}, [(212, 2)]),
            ("fsdp", {}, [(100 + 60 + 40, 4), (100, 4)]),
            ("hsdp", {}, [(100 + 60 + 40, 4), (100, 4)]),
            ("zero2", {}, [(212, 4), (100, 4)]),
            ("fsdp", {"precision": "bf16"}, [(200, 2), (100, 4)]),
            ("fsdp", {"grad_accum": 2}, [(200, 4), (100, 4), (162, 4)]),
        ],
    )
    def test_short_lived_copies(self, strategy, options, elements_and_bytes):
        """Gathered units, one unit's whole gradient, and the gradients that wait for the last micro batch."""
        found = estimate_memory(SMALL, plan_for(strategy, 4, **options), KNOWN)
        assert found.buffers == sum(elements * size for elements, size in elements_and_bytes)

    def test_offloaded_bytes_are_not_on_the_device(self):
        here = estimate_memory(SMALL, plan_for("fsdp", 4, device="cuda"), KNOWN)
        there = estimate_memory(SMALL, plan_for("fsdp+offload", 4, device="cuda"), KNOWN)
        assert there.offloaded_bytes == here.parameters + here.gradients + here.optimizer
        assert there.device_bytes == here.activations + here.logits + here.buffers
        assert here.offloaded_bytes == 0
        on_a_cpu = estimate_memory(SMALL, plan_for("fsdp+offload", 4, device="cpu"), KNOWN)
        assert on_a_cpu == here, "there it is the same memory"

    def test_units(self):
        assert unit_elements(SMALL) == {None: 100, "blocks.0": 60, "blocks.1": 40, "blocks.2": 12}


def measure_world(world: int) -> dict[str, Any]:
    """On each rank: the names that its ZeRO-1 optimizer steps, and the bytes it holds after a step."""
    from shardwise.run.start import start
    from shardwise.train.loss import token_loss_sum

    steps: dict[str, list[str]] = {}
    held: dict[str, tuple[int, ...]] = {}
    for strategy, variant in [
        *itertools.product(["zero1"], [*VARIANTS, "groups"]),
        *itertools.product(["fsdp", "hsdp"], VARIANTS),
    ]:
        session = start(strategy, receipts=False)
        model = decoder(**VARIANTS.get(variant, {}))
        groups: Any = model.parameters()
        if variant == "groups":
            groups = [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
            groups += [{"params": [p for p in model.parameters() if p.ndim > 1]}]
        model, optimizer = session.prepare(model, torch.optim.AdamW(groups, lr=0.1))
        bytes_held = [0, 0, 0]
        for step in session.steps(ragged_batches(world)):
            for micro in step:
                step.backward(token_loss_sum(model(micro.inputs), micro.labels))
            bytes_held[1] = tensor_bytes(p.grad for p in session.module.parameters() if p.grad is not None)
            step.update(optimizer)
        bytes_held[0] = tensor_bytes(session.module.parameters())
        bytes_held[2] = tensor_bytes(state_tensors(optimizer))
        held[f"{strategy} {variant}"] = tuple(bytes_held)
        if strategy == "zero1":
            names = {id(p): name for name, p in session.module.named_parameters()}
            steps[variant] = [names[id(p)] for group in optimizer.optim.param_groups for p in group["params"]]
    return {"steps": steps, "held": held}


@pytest.fixture(scope="module", params=[2, 4])
def measured(request):
    return run_world(measure_world, request.param, request.param)


class TestAgainstRanks:
    @pytest.mark.turns(3)
    @pytest.mark.parametrize("variant", [*VARIANTS, "groups"])
    def test_zero1_shares_are_those_of_zero_redundancy_optimizer(self, measured, variant):
        spec = read_model(decoder(**VARIANTS.get(variant, {})))
        names = [
            [p.name for p in spec.parameters if len(p.shape) < 2],
            [p.name for p in spec.parameters if len(p.shape) > 1],
        ]
        groups = tuple(map(tuple, names)) if variant == "groups" else None
        stepped = stepped_groups(spec, Workload(parameter_groups=groups))
        planned = [[p.name for p in share] for share in zero1_shares(stepped, len(measured))]
        assert planned == [rank["steps"][variant] for rank in measured]

    @pytest.mark.parametrize("strategy", ["zero1", "fsdp", "hsdp"])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_the_fullest_rank_holds_what_was_predicted(self, measured, strategy, variant):
        spec = read_model(decoder(**VARIANTS[variant]))
        found = estimate_memory(spec, plan_for(strategy, len(measured)), Workload())
        most = [
            max(column) for column in zip(*(rank["held"][f"{strategy} {variant}"] for rank in measured), strict=True)
        ]
        assert most == [getattr(found, name) for name in EXACT]

    def test_every_trained_parameter_is_stepped_by_one_rank(self, measured):
        for variant, options in VARIANTS.items():
            stepped = [name for rank in measured for name in rank["steps"][variant]]
            assert sorted(stepped) == sorted(p.name for p in read_model(decoder(**options)).parameters if p.trainable)


class TestChoose:
    def machine(self, memory: int | None, nodes: int = 1, per_node: int = 4, device: str = "cuda") -> ClusterSpec:
        return ClusterSpec(
            device=device, device_name="Device", nodes=nodes, devices_per_node=per_node, device_memory_bytes=memory
        )

    def needs(self, name: str, world: int, workload: Workload = KNOWN) -> int:
        plan = plan_for(name, world, device="cuda")
        context = context_bytes(layout_of(plan), self.machine(None, per_node=world))
        return estimate_memory(DEEP, plan, workload).device_bytes + context

    @pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp", "zero2+offload", "fsdp+offload"])
    def test_the_first_that_fits_is_taken_and_the_simpler_ones_keep_their_reason(self, name):
        needed = self.needs(name, 4)
        memory = math.ceil(needed / USABLE["cuda"])
        choice = choose(DRAFT, DEEP, KNOWN, self.machine(memory))
        assert choice.plan.strategy == name
        assert choice.plan.dims == plan_for(name, 4).dims
        assert choice.estimate == estimate_memory(DEEP, choice.plan, KNOWN)
        usable = bytes_text(int(memory * USABLE["cuda"]))
        assert choice.plan.reason == f"the simplest that fits: {bytes_text(needed)} of {usable} usable"
        simpler = SIMPLEST_FIRST[: SIMPLEST_FIRST.index(name)]
        assert [passed for passed, _ in choice.rejected] == list(simpler)
        for passed, why in choice.rejected:
            if passed == "hsdp":
                assert why == "one node: nothing to gain over fsdp"
            else:
                assert why == f"needs {bytes_text(self.needs(passed, 4))}, {usable} usable"

    def test_one_byte_less_and_it_does_not_fit(self):
        needed = self.needs("ddp", 4)
        below = int(needed / USABLE["cuda"]) - 2  # a few steps from there
        fits = next(memory for memory in itertools.count(below) if int(memory * USABLE["cuda"]) == needed)
        assert choose(DRAFT, DEEP, KNOWN, self.machine(fits)).plan.strategy == "ddp"
        assert choose(DRAFT, DEEP, KNOWN, self.machine(fits - 1)).plan.strategy == "zero1"

    def test_what_is_not_known_needs_more_room(self):
        unknown = Workload(optimizer_states=2)
        needed = self.needs("ddp", 4, unknown)
        assert choose(DRAFT, DEEP, unknown, self.machine(math.ceil(needed / 0.6))).plan.strategy == "ddp"
        with pytest.raises(DoesNotFit, match="ddp: needs"):
            choose(DRAFT, DEEP, unknown, self.machine(math.ceil(needed / USABLE["cuda"])))

    def test_unknown_memory_is_enough(self):
        choice = choose(DRAFT, DEEP, KNOWN, self.machine(None))
        assert choice.plan.strategy == "ddp" and choice.rejected == ()
        assert choice.plan.reason.endswith("device memory unknown")

    def test_nothing_fits(self):
        with pytest.raises(DoesNotFit) as raised:
            choose(DRAFT, DEEP, KNOWN, self.machine(1000))
        lines = str(raised.value).splitlines()
        assert lines[0] == "no plan fits 4 × Device:"
        assert [line.split(":")[0].strip() for line in lines[1:-1]] == list(SIMPLEST_FIRST)
        for line, name in zip(lines[1:-1], SIMPLEST_FIRST, strict=True):
            if name != "hsdp":
                assert line == f"  {name}: needs {bytes_text(self.needs(name, 4))}, 970 B usable"
        assert "smaller micro batch" in lines[-1] and raised.value.exit_code == 1

    def test_a_strategy_asked_for_by_name_is_kept_fitting_or_not(self):
        choice = choose(DRAFT, DEEP, KNOWN, self.machine(10), strategy="zero3+offload")
        assert choice.plan.strategy == "fsdp+offload"
        assert (choice.plan.reason, choice.rejected) == ("asked for by name", ())

    def test_the_draft_is_kept(self):
        draft = Plan(micro_batch=2, grad_accum=3, seq_len=7, precision="bf16", recompute="full", device="cuda")
        plan = choose(draft, DEEP, KNOWN, self.machine(None, nodes=2), strategy="hsdp").plan
        assert plan.model_copy(update={"strategy": "ddp", "dims": ParallelDims(), "reason": ""}) == draft
        assert plan.dims == ParallelDims(dp_replicate=2, dp_shard=4), "a node is a shard group"

    @pytest.mark.parametrize(("strategy", "degrees"), [("ddp", {"dp_shard": 4}), ("fsdp", {"dp_replicate": 2})])
    def test_degrees_that_do_not_go_with_the_strategy(self, strategy, degrees):
        with pytest.raises(PlanError, match="is not the world size 4"):
            choose(DRAFT, DEEP, KNOWN, self.machine(None), strategy=strategy, **degrees)

    def test_degrees_leave_out_what_they_do_not_go_with(self):
        choice = choose(DRAFT, DEEP, KNOWN, self.machine(None, nodes=2, per_node=2), dp_shard=2)
        assert choice.plan.strategy == "hsdp"
        assert choice.plan.dims == ParallelDims(dp_replicate=2, dp_shard=2)
        assert [name for name, _ in choice.rejected] == ["ddp", "zero1", "zero2", "fsdp"]
        assert all("is not the world size 4" in why for _, why in choice.rejected)

    def test_degrees_on_one_node(self):
        assert choose(DRAFT, DEEP, KNOWN, self.machine(None), dp_shard=2).plan.strategy == "hsdp"

    def test_offload_makes_no_room_on_a_cpu(self):
        memory = math.ceil(self.needs("fsdp+offload", 4) / USABLE["cpu"]) // 10**6
        with pytest.raises(DoesNotFit):
            choose(Plan(device="cpu"), DEEP, KNOWN, self.machine(memory, device="cpu"))


def test_an_estimate_adds_up():
    found = Estimate(
        parameters=1, gradients=10, optimizer=100, activations=1000, logits=None, buffers=10000, offloaded_bytes=11
    )
    assert found.device_bytes == 11100 and found.unknown == ("logits",)
