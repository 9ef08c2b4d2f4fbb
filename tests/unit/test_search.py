"""The search over stand-in costs: what is enumerated, what is chosen, and what is said of the others."""

from __future__ import annotations

import re
from itertools import product

import pytest

from shardwise.cli.explain import why_not
from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import ShardPlacement
from shardwise.cost.time.step_time import StepTime
from shardwise.errors import DoesNotFit, ModelError, PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import GpuSpec, Link
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.facts import ModelSpec, ParameterSpec
from shardwise.model.load_model import load_profile
from shardwise.model.profile import ModelProfile, Op, Unit, Weight
from shardwise.plan.plan import Plan, not_runnable
from shardwise.plan.program import SHARDWISE
from shardwise.plan.strategy import BASES, parse_strategy
from shardwise.plan.workload import Workload
from shardwise.search.advice import search_and_advise
from shardwise.search.candidate import Pins
from shardwise.search.choose import choose_profiled
from shardwise.search.enumerate import complexity, divisors, layouts, nearest_multiples
from shardwise.search.explain_plan import against
from shardwise.search.heuristics import rough_step_time_s, totals_of
from shardwise.search.problem import PLAIN_TIE, SAID_TIE, TIE, USABLE, Costs, ask, default_precision, precision_text
from shardwise.search.search import (
    LOWER_BOUND_SLACK,
    laid_out,
    plan_for,
    recomputes,
    search,
    syncs,
    time_of,
)
from shardwise.units import GIB

GPU = GpuSpec(name="Device", arch="none", memory_bytes=80 * GIB, peak_flops={"bf16": 1e14})
ELEMENTS = 10**9  # of one block


def model(blocks: int = 8, heads: int | None = 16, kv_heads: int | None = 8, seq_len: int | None = 4096):
    op = Op(name="all", kind="matmul", m=seq_len or 1, k=1000, n=1000, flops=1e12)
    block = Unit("block", "block", (Weight("w", (1000, ELEMENTS // 1000)),), (op,), 1000, count=blocks)
    return ModelProfile(
        name="stand-in",
        units=(block,),
        seq_len=seq_len,
        origin="catalogue",
        hidden_size=1024,
        vocab_size=100,
        heads=heads,
        kv_heads=kv_heads,
    )


def cluster(nodes: int = 1, per_node: int = 8, memory: int | None = 80 * GIB, gpu: GpuSpec | None = GPU, **more):
    link = Link(kind="nvlink", bytes_per_s=1e11)
    return ClusterSpec(
        **{"device": "cuda", **more},
        device_name="Device",
        nodes=nodes,
        devices_per_node=per_node,
        device_memory_bytes=memory,
        gpu=gpu,
        link=link,
        network=link,
        price_per_device_hour=2.0,
    )


def needs(profile, plan, workload) -> int:
    """16 bytes an element, cut by what the strategy cuts, and 1 GiB a sample that recompute divides."""
    strategy, dims = plan.parsed, plan.dims
    ways = dims.dp_shard if strategy.shards_parameters else 1
    held = 8 / ways + 8 / (dims.dp if strategy.base == "zero1" else ways)
    kept = {"none": 1.0, "selective": 0.5, "full": 0.1}[plan.recompute] * GIB * plan.micro_batch
    if strategy.offload:
        held = 0.0
    return int(profile.num_parameters * held / (dims.tp * dims.pp) + kept / (dims.tp * dims.cp))


def estimate(profile, plan, workload, cluster) -> Estimate:
    needed = needs(profile, plan, workload)
    activations = int(plan.micro_batch * GIB / plan.dims.tp)
    return Estimate(
        parameters=needed - activations,
        gradients=0,
        optimizer=0,
        activations=activations,
        logits=0,
        buffers=0,
        allocated=needed,
        reserved=needed,
        device=needed,
    )


def seconds(profile, plan, workload, cluster) -> StepTime:
    """Longer with every way to cut, and with recompute; larger micro batches are faster."""
    strategy = plan.parsed
    slow = 1.0 + 0.1 * BASES.index(strategy.base) + 0.5 * strategy.offload
    slow *= plan.dims.tp**0.2 * plan.dims.pp**0.2 * plan.dims.cp**0.2
    again = {"none": 0.0, "selective": 0.1, "full": 0.3}[plan.recompute]
    total = slow * (1 + again) + 0.01 * plan.grad_accum
    return StepTime(step_s=total, low_s=total * 0.9, high_s=total * 1.1, compute_s=1.0, exposed_dp_s=total - 1.0)


COSTS = Costs(estimate=estimate, peak_lower_bound=needs, step_time=seconds)
WORK = Workload(seq_len=4096, global_batch=64)


def found(profile=None, work=WORK, machine=None, pins=None, costs=COSTS):
    return search_and_advise(profile or model(), work, machine or cluster(), pins or Pins(), costs=costs)


class TestEnumerate:
    def names(self, *, profile=None, work=WORK, machine=None, pins=None):
        return {layout.name for layout in layouts(profile or model(), work, machine or cluster(), pins or Pins())[0]}

    def test_every_part_of_the_grammar_is_there(self):
        names = self.names(machine=cluster(nodes=2))
        assert {
            "ddp",
            "zero1",
            "zero2",
            "fsdp",
            "hsdp",
            "zero2+offload",
            "fsdp+tp2",
            "ddp+tp8+pp2",
            "fsdp+cp2",
        } <= names
        assert not any(word in name for name in names for word in ("lora", "deepspeed", "nvme"))

    def test_degrees_go_with_heads_blocks_and_length(self):
        names = self.names(profile=model(blocks=6, heads=12, kv_heads=4))
        assert "ddp+tp4" in names and not any("tp8" in name for name in names), "8 does not divide 12 heads"
        assert "ddp+pp2" in names and not any("pp4" in name for name in names), "6 blocks are no 4 equal stages"
        assert not any("tp" in name or "cp" in name for name in self.names(profile=model(heads=None, seq_len=None)))
        short = Workload(seq_len=2048, global_batch=64)
        assert not any("cp" in name for name in self.names(profile=model(seq_len=2048), work=short))

    def test_few_key_value_heads_are_repeated(self):
        assert "ddp+tp8" in self.names(profile=model(heads=16, kv_heads=2))

    def test_one_device_has_nothing_to_shard(self):
        names = self.names(machine=cluster(per_node=1))
        assert names == {"ddp", "fsdp", "zero2+offload", "fsdp+offload"}

    def test_hybrid_sharding_has_several_degrees(self):
        here = layouts(model(), WORK, cluster(nodes=4), Pins(strategy=parse_strategy("hsdp")))[0]
        assert {(one.dims.dp_replicate, one.dims.dp_shard) for one in here} == {(4, 8), (2, 16)}

    def test_simplest_first(self):
        order = [
            "ddp",
            "zero1",
            "zero2",
            "fsdp",
            "hsdp",
            "fsdp+offload",
            "ddp+tp2",
            "ddp+tp4",
            "fsdp+tp2",
            "ddp+tp2+pp2",
        ]
        weights = [complexity(parse_strategy(name)) for name in order]
        assert weights[:7] == sorted(weights[:7])
        assert complexity(parse_strategy("ddp+tp2")) < complexity(parse_strategy("ddp+tp4"))
        assert complexity(parse_strategy("fsdp+tp2")) < complexity(parse_strategy("ddp+tp2+pp2"))

    @pytest.mark.parametrize(
        ("strategy", "says"),
        [
            ("fsdp+tp3", "tp 3 does not divide 16 heads; use one of 2, 4, 8"),
            ("fsdp+tp16", "does not divide the 8 devices"),
            ("ddp+pp16", "pp 16 is more than the model's 8 repeated blocks; use pp 8 or less"),
            ("fsdp+cp3", "cp 3 does not divide the 16 heads(.|\\n)*which is 4096; use 4095 or 4098"),
            ("ddp+tp8+cp8", "cp 8 does not divide the 2 heads of a rank .16 over tp 8.*use 2"),
            ("hsdp+tp8", "no even split|not a multiple|dp 1"),
        ],
    )
    def test_pinned_degrees_that_cannot_be(self, strategy, says):
        if strategy == "hsdp+tp8":
            assert layouts(model(), WORK, cluster(), Pins(strategy=parse_strategy(strategy)))[0]
            return
        with pytest.raises(PlanError, match=says):
            layouts(model(), WORK, cluster(), Pins(strategy=parse_strategy(strategy)))

    def test_all_problems_of_a_pinned_strategy_at_once(self):
        with pytest.raises(PlanError) as raised:
            layouts(model(), WORK, cluster(), Pins(strategy=parse_strategy("fsdp+tp3+pp9+cp3")))
        assert len(raised.value.problems) == 4, "heads, blocks, length, devices"

    def test_a_batch_that_does_not_divide(self):
        odd = Workload(seq_len=4096, global_batch=60)
        with pytest.raises(PlanError, match=r"global batch 60 is not a multiple of dp 8; use 56 or 64"):
            layouts(model(), odd, cluster(), Pins(strategy=parse_strategy("fsdp")))
        assert "ddp" not in self.names(work=odd) and "ddp+tp2" in self.names(work=odd)
        with pytest.raises(PlanError, match=r"global batch 3 .*; use "):
            layouts(model(heads=None, blocks=1), Workload(seq_len=64, global_batch=3), cluster(), Pins())

    def test_micro_batches_solve_the_equation(self):
        (ddp,) = layouts(model(), WORK, cluster(), Pins(strategy=parse_strategy("ddp")))[0]
        assert ddp.micros == divisors(8) == (1, 2, 4, 8)
        pins = Pins(strategy=parse_strategy("ddp"), grad_accum=4)
        assert layouts(model(), WORK, cluster(), pins)[0][0].micros == (2,)
        with pytest.raises(PlanError, match="global batch 64 is not dp 8 × micro batch 3 × an integer; use 48 or 72"):
            layouts(model(), WORK, cluster(), Pins(strategy=parse_strategy("ddp"), micro_batch=3))
        both = Pins(
            strategy=parse_strategy("fsdp"), micro_batch=2, grad_accum=1, options={"optimizer_in_backward": True}
        )
        said = "accumulation 1; use global batch 16, or micro batch 8 .optimizer_in_backward steps after one backward"
        with pytest.raises(PlanError, match=said):
            layouts(model(), WORK, cluster(), both)

    def test_nearest(self):
        assert [nearest_multiples(n, 8) for n in (3, 9)] == ["8", "8 or 16"]


class TestChoice:
    def test_what_fits_is_not_sharded(self):
        best = found(machine=cluster(memory=200 * GIB)).candidates[0]
        assert best.plan.strategy == "ddp" and best.fits and best.reason == ""
        assert "the fastest of" in best.plan.reason

    def test_the_fastest_that_fits(self):
        result = found(machine=cluster(memory=60 * GIB))  # 119 GiB of state, 67 GiB with the optimizer's part sharded
        assert result.recommended == 0 and result.candidates[0].plan.strategy == "zero2"
        by_name = {c.plan.strategy: c for c in result.candidates}
        assert by_name["ddp"].fits is False
        assert by_name["ddp"].reason.startswith("needs 119.") and "usable" in by_name["ddp"].reason
        slower = by_name["fsdp"].time.step_s / by_name["zero2"].time.step_s - 1
        assert by_name["fsdp"].reason.startswith(f"{slower:.0%} slower: waits longer for data-parallel traffic")
        assert "GiB a step over nvlink" in by_name["fsdp"].reason

    def test_one_candidate_for_each_strategy_and_all_are_counted(self):
        result = found()
        names = [c.plan.strategy for c in result.candidates]
        assert len(names) == len(set(names)) and result.considered > 3 * len(names)

    def test_fitting_before_not_fitting_and_faster_before_slower(self):
        candidates = found().candidates
        verdicts = [c.fits for c in candidates]
        assert verdicts == sorted(verdicts, reverse=True) and False in verdicts
        times = [c.time.step_s for c in candidates if c.fits]
        assert times == sorted(times)

    @pytest.mark.parametrize(
        ("simple", "other", "gap", "chosen"),
        [
            ("ddp", "fsdp", PLAIN_TIE * 0.9, "ddp"),
            ("ddp", "fsdp", PLAIN_TIE * 1.1, "fsdp"),
            ("ddp+tp2", "ddp+tp4", TIE * 0.9, "ddp+tp2"),
            ("ddp+tp2", "ddp+tp4", TIE * 1.1, "ddp+tp4"),
        ],
    )
    def test_a_tie_goes_to_the_simpler(self, simple, other, gap, chosen):
        def close(profile, plan, workload, cluster):
            total = {simple: 1 + gap, other: 1.0}.get(plan.strategy, 9.0)
            return StepTime(step_s=total, low_s=total, high_s=total, compute_s=total)

        result = found(machine=cluster(memory=200 * GIB), costs=Costs(estimate, needs, close))
        assert result.candidates[0].plan.strategy == chosen
        left = next(c for c in result.candidates if c.plan.strategy in {simple, other} - {chosen})
        assert left.tie is (gap <= SAID_TIE) and ("a tie" in left.reason) is (chosen == simple)
        if chosen == simple:
            assert f"simpler than {other}" in result.candidates[0].plan.reason

    def test_recompute_only_where_it_is_needed(self):
        roomy = found(machine=cluster(memory=500 * GIB)).candidates[0].plan
        assert (roomy.recompute, roomy.micro_batch, roomy.grad_accum) == ("none", 8, 1)
        state = ELEMENTS * 8 * 16
        machine = cluster(memory=int((state + 0.3 * GIB) / USABLE["cuda"]))
        tight = found(machine=machine, pins=Pins(strategy=parse_strategy("ddp"))).candidates[0]
        assert tight.fits and (tight.plan.recompute, tight.plan.micro_batch) == ("full", 2)

    def test_the_estimate_has_the_last_word(self):
        """A screen that lets too much pass; the next option is taken."""

        def optimist(profile, plan, workload):
            return 0

        state = ELEMENTS * 8 * 16
        machine = cluster(memory=int((state + 1.5 * GIB) / USABLE["cuda"]))
        result = found(
            machine=machine, pins=Pins(strategy=parse_strategy("ddp")), costs=Costs(estimate, optimist, seconds)
        )
        assert result.candidates[0].fits and result.candidates[0].memory.device_bytes <= machine.device_memory_bytes

    def test_a_screen_may_be_a_little_high(self):
        needed = needs(model(), found(pins=Pins(strategy=parse_strategy("ddp"))).candidates[0].plan, WORK)

        def high(profile, plan, workload):
            return int(needs(profile, plan, workload) * (1 + 0.9 * (LOWER_BOUND_SLACK - 1)))

        machine = cluster(memory=int(needed / USABLE["cuda"]) + 1)
        assert (
            found(machine=machine, pins=Pins(strategy=parse_strategy("ddp")), costs=Costs(estimate, high, seconds))
            .candidates[0]
            .fits
        )

    def test_pinned_is_costed_as_given(self):
        pins = Pins(strategy=parse_strategy("ddp"), micro_batch=4, recompute="none", precision="fp32")
        result = found(pins=pins)
        (only,) = result.candidates
        assert only.fits is False and result.recommended is None and result.advice
        plan = only.plan
        assert (plan.strategy, plan.micro_batch, plan.recompute, plan.precision) == ("ddp", 4, "none", "fp32")
        fitting = found(pins=pins, machine=cluster(memory=500 * GIB))
        assert fitting.recommended == 0 and fitting.candidates[0].plan.reason == "asked for by name"

    def test_money(self):
        work = WORK.model_copy(update={"tokens": 1e9})
        best = found(work=work).candidates[0]
        hours = 1e9 / (64 * 4096) * best.time.step_s / 3600
        assert best.hours == pytest.approx(hours) and best.cost == pytest.approx(hours * 8 * 2.0)


class TestRunnable:
    """``zero1+tp2`` is planned and not run; here it is the fastest that fits by far."""

    def costs(self):
        def close(profile, plan, workload, cluster):
            total = {"zero1+tp2": 1.0, "fsdp": 2.0, "ddp+tp2": 3.0}.get(plan.strategy, 9.0)
            return StepTime(step_s=total, low_s=total, high_s=total, compute_s=total)

        return Costs(estimate, needs, close)

    def answer(self, **more):
        machine = cluster(memory=200 * GIB)
        return search_and_advise(model(), WORK, machine, more.pop("pins", Pins()), costs=self.costs(), **more)

    def test_a_plan_that_runs_is_recommended(self):
        result = self.answer()
        best, other = result.candidates[:2]
        assert best.plan.strategy == "fsdp" and best.runnable and best.why_not_runnable == ""
        assert "the fastest of" in best.plan.reason and "that fit and run" in best.plan.reason
        assert other.plan.strategy == "zero1+tp2" and other.fits and not other.runnable
        assert other.why_not_runnable == "zero1 with +tp2"
        assert other.reason == "planned, but not run by this version (zero1 with +tp2); 50.0% faster than fsdp"

    def test_those_that_are_not_run_take_no_places_of_those_that_are(self, monkeypatch):
        monkeypatch.setattr("shardwise.search.search.FULL", 2)
        times = {"zero1+tp2": 1.0, "zero1+tp4": 1.1, "fsdp+tp2": 2.0, "fsdp+tp4": 4.0}

        def close(profile, plan, workload, cluster):
            total = times.get(plan.strategy, 9.0)
            return StepTime(step_s=total, low_s=total, high_s=total, compute_s=total)

        result = search(model(), WORK, cluster(memory=200 * GIB), costs=Costs(estimate, needs, close))
        names = [c.plan.strategy for c in result.candidates]
        assert names[0] == "fsdp+tp2" and {"zero1+tp2", "zero1+tp4"} <= set(names)
        assert "fsdp+tp4" not in names, "what cannot be the fastest needs no estimate"

    def test_any(self):
        best = self.answer(any_plan=True).candidates[0]
        assert best.plan.strategy == "zero1+tp2" and "that fit:" in best.plan.reason

    def test_where_nothing_that_runs_fits(self):
        pins = Pins(strategy=parse_strategy("zero1+tp2"))
        assert self.answer(pins=pins).recommended == 0, "a pinned one is kept"
        result = self.answer(pins=Pins(precision="fp8"))
        assert result.recommended == 0 and {c.why_not_runnable for c in result.candidates} >= {"precision fp8"}
        assert not any(c.runnable for c in result.candidates)

    @pytest.mark.parametrize(
        ("strategy", "precision", "why"),
        [
            ("fsdp", "bf16", ""),
            ("fsdp+tp2+lora", "bf16", "+lora with +tp2"),
            ("zero1+pp2", "fp8", "zero1 with +pp2, precision fp8"),
            ("deepspeed-zero3+tp2", "bf16", "deepspeed with +tp2"),
        ],
    )
    def test_what_is_not_run(self, strategy, precision, why):
        plan = Plan(strategy=strategy, precision=precision)
        assert ", ".join(not_runnable(plan)) == why

    def test_the_whole_model(self):
        result = self.answer(pins=Pins(whole_model=True))
        assert not any(c.plan.dims.splits_model for c in result.candidates)


class TestUnknown:
    def test_memory(self):
        result = found(machine=cluster(memory=None))
        assert result.recommended == 0 and result.candidates[0].fits is None
        assert "device memory unknown" in result.candidates[0].plan.reason

    def test_speed(self):
        result = found(machine=cluster(gpu=None))
        best = result.candidates[0]
        assert best.time is None and best.plan.strategy == "zero1"
        assert best.plan.reason.startswith("the simplest that fits")
        order = [complexity(c.plan.parsed) for c in result.candidates if c.fits]
        assert order == sorted(order)
        assert next(c for c in result.candidates if c.plan.strategy == "fsdp").reason.startswith("not needed: ")

    def test_an_unknown_link_leaves_the_time_open(self):
        def refuse(profile, plan, workload, cluster):
            if plan.parsed.base != "fsdp":
                raise PlanError("the link is not known")
            return seconds(profile, plan, workload, cluster)

        result = found(machine=cluster(memory=500 * GIB), costs=Costs(estimate, needs, refuse))
        assert result.candidates[0].plan.strategy == "fsdp"
        assert next(c for c in result.candidates if c.plan.strategy == "ddp").time is None

    def test_an_unknown_network_leaves_every_time_open(self):
        """All plans send over it: none is preferred because its traffic was not counted."""
        machine = cluster(nodes=2, memory=500 * GIB).model_copy(update={"network": None})
        result = found(machine=machine)
        assert result.candidates[0].plan.strategy == "ddp"
        assert all(c.time is None for c in result.candidates)
        assert found(machine=machine.model_copy(update={"nodes": 1})).candidates[0].time is not None

    def test_the_simpler_one_is_not_called_less_simple(self):
        best = found().candidates[0]
        other = best.model_copy(update={"time": None, "plan": best.plan.model_copy(update={"strategy": "ddp"})})
        far = best.model_copy(update={"plan": best.plan.model_copy(update={"strategy": "fsdp+tp2"})})
        problem = ask(model(), WORK, cluster(), Pins(), costs=COSTS)
        assert against(problem, other, far) == "its speed is unknown, and that of fsdp+tp2 is not"

    def test_a_category(self):
        def partly(profile, plan, workload, cluster):
            full = estimate(profile, plan, workload, cluster)
            return full.model_copy(update={"optimizer": None})

        tight = found(machine=cluster(memory=140 * GIB), costs=Costs(partly, needs, seconds))
        ddp = next(c for c in tight.candidates if c.plan.strategy == "ddp")
        assert ddp.fits is None and tight.candidates[0].plan.strategy != "ddp", "more room is asked for"
        assert (
            found(machine=cluster(memory=500 * GIB), costs=Costs(partly, needs, seconds)).candidates[0].plan.strategy
            == "ddp"
        )

    def test_precision_by_what_the_device_has(self):
        assert default_precision(cluster()) == "bf16"
        assert default_precision(cluster(gpu=GPU.model_copy(update={"peak_flops": {"fp16": 1e14}}))) == "fp16"
        assert default_precision(cluster(gpu=None)) == "bf16"
        assert default_precision(cluster(gpu=None, device="cpu")) == "fp32"

    def test_the_reason_of_a_precision(self):
        volta = GPU.model_copy(update={"peak_flops": {"fp16": 1e14}})
        for machine, text in (
            (cluster(), "bf16 (Device has it)"),
            (cluster(gpu=volta), "fp16 (Device has no bf16)"),
            (cluster(gpu=None), "bf16 (whether Device has it is not known)"),
            (cluster(gpu=None, device="cpu"), "fp32 (the default on a CPU)"),
        ):
            assert precision_text(default_precision(machine), machine, named=False) == text
        assert precision_text("fp32", cluster(), named=True) == "fp32 (asked for by name)"

    def test_a_cpu_has_no_offload_and_no_time(self):
        result = found(machine=cluster(gpu=None, device="cpu", memory=500 * GIB))
        assert result.candidates[0].plan.strategy == "ddp" and result.candidates[0].time is None
        assert not any("offload" in c.plan.strategy for c in result.candidates)


class TestWhyNot:
    def problem(self):
        return ask(model(), WORK, cluster(), Pins(), costs=COSTS)

    def test_reasons_with_arithmetic(self):
        best = found().candidates[0]
        for name, says in (
            ("ddp", "not ddp: needs 119."),
            ("fsdp+tp2", "slower"),
            ("fsdp+tp3", "tp 3 does not divide 16 heads"),
            ("ddp+tp16", "does not divide the 8 devices"),
            (best.plan.strategy, "is the plan"),
        ):
            _, lines = why_not(self.problem(), parse_strategy(name), best)
            assert any(says in line for line in lines), (name, lines)

    def test_the_plan_itself(self):
        best = found(pins=Pins(strategy=parse_strategy("ddp"))).candidates[0]
        assert best.fits is False
        same, lines = why_not(self.problem(), parse_strategy("no_shard"), best)
        assert same is best and lines[0].startswith("ddp is the plan; it needs 119.")

    def test_a_faster_one_is_not_called_slower(self):
        """A plan that was pinned is kept, and adapters train something else."""
        slow = found(pins=Pins(strategy=parse_strategy("fsdp+offload"))).candidates[0]
        _, (line,) = why_not(self.problem(), parse_strategy("zero2"), slow)
        assert re.fullmatch(r"not zero2: \d+% faster, but fsdp\+offload is the plan that was kept; .*", line)
        lora = slow.model_copy(update={"plan": slow.plan.model_copy(update={"strategy": "zero2+lora"})})
        other = lora.model_copy(update={"time": lora.time.model_copy(update={"step_s": lora.time.step_s / 2})})
        text = against(self.problem(), other, slow)
        assert text == "50% faster, but it trains adapters only, which is another training; pin it"


class TestHostMemory:
    """Offload needs a node's host memory: 600 GiB here."""

    def costs(self):
        def away(profile, plan, workload, cluster):
            plain = estimate(profile, plan, workload, cluster)
            moved = {"offloaded_bytes": GIB, "host_bytes": 600 * GIB} if plan.parsed.offload else {}
            return plain.model_copy(update=moved)

        return Costs(away, needs, seconds)

    @pytest.mark.parametrize(("host", "fits"), [(500 * GIB, False), (700 * GIB, True), (None, True)])
    def test_offload(self, host, fits):
        machine = cluster(memory=14 * GIB, host_memory_bytes=host)  # too little for everything but offload
        for pins in (Pins(strategy=parse_strategy("fsdp+offload")), Pins(recompute="full")):
            result = found(machine=machine, pins=pins, costs=self.costs())
            candidate = next(c for c in result.candidates if c.plan.strategy == "fsdp+offload")
            assert candidate.fits is fits
            if not fits:
                assert candidate.reason == "needs 600.00 GiB of host memory on a node, which has 500.00 GiB"
                assert result.recommended is None or not result.candidates[0].plan.parsed.offload
        assert (host is None) == any("which is not known" in note for note in candidate.memory.notes)


class TestPruning:
    """What the guess leaves out is not better, by the package's own costs, than what the search finds."""

    @pytest.mark.turns(2)
    @pytest.mark.parametrize(
        ("name", "text", "length", "batch", "strategy"),
        [
            ("llama-3.1-8b", "2x8xH100-SXM", 4096, 64, None),
            ("llama-3.1-8b", "2x8xH100-SXM", 4096, 64, "fsdp"),
            ("llama-3.1-8b", "8xA100-40GB", 2048, 256, None),
            ("llama-3.2-3b", "2x4xRTX4090@pcie4/eth100", 4096, 32, None),
            ("llama-2-13b", "8xA100-80GB", 4096, 64, None),
        ],
    )
    def test_against_all_plans(self, name, text, length, batch, strategy):
        pins = Pins(strategy=None if strategy is None else parse_strategy(strategy))
        work = Workload(seq_len=length, global_batch=batch)
        problem = ask(load_profile(name, seq_len=length), work, parse_cluster(text), pins)
        result = search_and_advise(problem.profile, work, problem.cluster, pins)
        fastest = min(c.time.step_s for c in result.candidates if c.fits)
        assert fastest <= self.exhaustive(problem) * 1.005

    @pytest.mark.parametrize(
        ("name", "text", "length"),
        [("llama-3.1-8b", "2x8xH100-SXM", 4096), ("mixtral-8x7b", "2x8xA100-80GB", 2048), ("gpt2", "4xT4", 1024)],
    )
    def test_more_recompute_is_never_faster(self, name, text, length):
        work = Workload(seq_len=length, global_batch=64)
        problem = ask(load_profile(name, seq_len=length), work, parse_cluster(text), Pins())
        for layout in laid_out(problem)[0][::3]:
            for micro, sync in product(layout.micros[-2:], syncs(layout)):
                plans = [plan_for(problem, layout, micro, recompute, sync) for recompute in recomputes(problem)]
                times = [time_of(problem, plan).step_s for plan in plans]
                assert times == sorted(times)

    def test_options_that_are_not_timed_change_nothing(self, monkeypatch):
        work, machine = Workload(seq_len=8192, global_batch=2048), parse_cluster("2048x8xH100-SXM")
        profile = load_profile("llama-3.1-405b", seq_len=8192)
        result = search(profile, work, machine)
        monkeypatch.setattr("shardwise.search.search._least_recompute", list)
        assert result == search(profile, work, machine)

    def exhaustive(self, problem) -> float:
        """Seconds of the fastest plan that fits, of all."""
        timed = []
        for layout in laid_out(problem)[0]:
            for micro, recompute, sync in product(layout.micros, recomputes(problem), syncs(layout)):
                plan = plan_for(problem, layout, micro, recompute, sync)
                if problem.costs.peak_lower_bound(problem.profile, plan, problem.workload) <= problem.usable * 1.1:
                    timed.append((time_of(problem, plan).step_s, plan))
        for seconds_, plan in sorted(timed, key=lambda pair: pair[0]):
            memory = problem.costs.estimate(problem.profile, plan, problem.workload, problem.cluster)
            if memory.device_bytes <= problem.usable:
                return seconds_
        return float("inf")


class TestAdvice:
    def test_more_devices_with_numbers(self):
        big = model(blocks=64)  # 1 TB of state
        result = found(profile=big, pins=Pins(strategy=parse_strategy("fsdp")))
        assert result.recommended is None
        text = "\n".join(result.advice)
        assert "nearest: fsdp, micro batch 1, recompute full, is " in text
        assert "16 × Device (2 nodes) would do: fsdp, micro batch 1, recompute full: 59." in text
        assert "offload fits: fsdp+offload, " in text and "another strategy fits: zero2+offload, " in text

    @pytest.mark.parametrize(("fp8", "gpu"), [("rowwise", "L40"), ("none", "A100-SXM-40GB")])
    def test_a_larger_gpu_computes_in_the_types_that_were_asked_for(self, fp8, gpu):
        program = SHARDWISE.model_copy(update={"fp8": fp8})
        workload = Workload(seq_len=4096, global_batch=8, compiled=True, program=program)
        profile = load_profile("llama-2-13b", seq_len=4096)
        pins = Pins(strategy=parse_strategy("fsdp"))
        advice = search_and_advise(profile, workload, parse_cluster("8xRTX4090"), pins).advice
        assert f"8 × {gpu} would do: fsdp" in "\n".join(advice)

    def test_what_is_pinned_too_tightly(self):
        state = ELEMENTS * 8 * 16
        machine = cluster(memory=int((state + 1.2 * GIB) / USABLE["cuda"]))
        pins = Pins(strategy=parse_strategy("ddp"), micro_batch=8, recompute="none")
        text = "\n".join(found(machine=machine, pins=pins).advice)
        assert "micro batch 1 fits: ddp, micro batch 1, recompute none" in text
        assert "recompute full fits: ddp, micro batch 8, recompute full" in text
        assert "another strategy fits: zero1" in text

    def test_shorter_samples(self):
        def kept(profile, plan, workload, cluster):
            plain = estimate(profile, plan, workload, cluster)
            needed = plain.device + (workload.seq_len * GIB)
            return plain.model_copy(update={"device": needed})

        result = search_and_advise(
            model(),
            WORK,
            cluster(memory=2000 * GIB),
            Pins(),
            costs=Costs(kept, needs, seconds),
            shorter=lambda length: model(seq_len=length),
        )
        assert any(line.startswith("samples of 1024 tokens fit: ") for line in result.advice), result.advice


def test_plans_say_how_many_blocks_each_stage_has():
    pins = Pins(options={"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2})
    for asked, virtual in ((Pins(), 1), (pins, 2)):
        plans = [c.plan for c in found(pins=asked).candidates]
        pipelines = [plan for plan in plans if plan.dims.pp > 1 and not plan.parsed.not_runnable]
        assert pipelines
        for plan in pipelines:
            stages = plan.dims.pp * virtual
            assert plan.stage_blocks == (8 // stages,) * stages, "equal blocks, and nothing else"
        assert all(plan.stage_blocks is None for plan in plans if plan not in pipelines)


class TestOnThisMachine:
    """`choose_profiled`: what ``train --strategy auto`` asks."""

    SPEC = ModelSpec(
        parameters=tuple(
            ParameterSpec(
                name=f"blocks.{n}.w",
                shape=(1000, ELEMENTS // 1000),
                itemsize=4,
                dtype="float32",
                trainable=True,
                block=f"blocks.{n}",
            )
            for n in range(8)
        ),
        blocks=tuple(f"blocks.{n}" for n in range(8)),
    )

    def choice(self, memory: int, **pins):
        machine = cluster(memory=memory, gpu=None)
        return choose_profiled(model(), self.SPEC, WORK, machine, Pins.model_validate(pins), costs=COSTS)

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch):
        monkeypatch.setattr("shardwise.search.problem.default_costs", lambda rates=None: COSTS)

    def test_only_what_runs_and_exact_state(self):
        choice = self.choice(60 * GIB)
        assert choice.plan.strategy == "zero2"
        assert [name for name, why in choice.rejected] == ["ddp", "zero1"]
        assert all(why.startswith("needs ") for _, why in choice.rejected)
        assert choice.estimate.parameters == choice.estimate.gradients == ELEMENTS * 8 * 4 // 8
        assert choice.estimate.optimizer == ELEMENTS * 8 * 8 // 8 + 8 * 4, "two states and a step counter each"

    def test_nothing_fits(self):
        with pytest.raises(DoesNotFit, match=r"no plan fits 8 × Device:\n(.|\n)*ddp: needs") as raised:
            self.choice(GIB // 100)
        assert "ddp+tp8: needs" in str(raised.value), "what runs is tried"
        assert "zero1+tp" not in str(raised.value) and "would do: zero2+offload" in str(raised.value)

    def test_what_the_live_module_does_not_allow_is_passed_over(self):
        """Whole layers of one axis go together; what was asked for by name is refused."""
        seen = []

        def cut(plan):
            seen.append(plan.strategy)
            if plan.dims.tp > 1:
                raise ModelError("the model has a fused gate")
            return ShardPlacement(stages=(frozenset({"p"}),) * plan.dims.pp)

        machine = cluster(memory=15 * GIB, gpu=None)
        found = choose_profiled(model(), self.SPEC, WORK, machine, Pins(), costs=COSTS, check_sharding=cut)
        assert found.plan.dims.tp == 1
        assert ("ddp+tp8", "the model has a fused gate") in found.rejected or not seen
        with pytest.raises(ModelError, match="fused gate"):
            pins = Pins(strategy=parse_strategy("fsdp+tp2"))
            choose_profiled(model(), self.SPEC, WORK, machine, pins, costs=COSTS, check_sharding=cut)

    def test_a_named_strategy_is_kept(self):
        choice = self.choice(GIB, strategy=parse_strategy("ddp"))
        assert choice.plan.strategy == "ddp" and choice.plan.reason == "asked for by name"


def test_gradients_are_reduced_every_time_only_where_it_makes_room():
    """A stand-in whose sharded plans hold whole gradients while they accumulate."""

    def more(profile, plan, workload):
        waits = plan.parsed.shards_parameters and plan.grad_accum > 1 and plan.gradient_sync == "last"
        return needs(profile, plan, workload) + waits * 30 * GIB

    def same(profile, plan, workload, cluster):
        needed = more(profile, plan, workload)
        return estimate(profile, plan, workload, cluster).model_copy(update={"device": needed})

    pins = Pins(strategy=parse_strategy("fsdp"), micro_batch=2, recompute="none")
    for memory, sync in ((100, "last"), (30, "every")):
        result = found(machine=cluster(memory=memory * GIB), pins=pins, costs=Costs(same, more, seconds))
        assert result.candidates[0].fits and result.candidates[0].plan.gradient_sync == sync


class TestGuess:
    """What decides which plans are timed."""

    def seconds(self, name: str, kv_heads: int = 8, per_node: int = 8) -> float:
        machine = cluster(nodes=64 // per_node, per_node=per_node).model_copy(
            update={"network": Link(kind="network", bytes_per_s=5e9)}
        )
        profile = model(kv_heads=kv_heads)
        (layout,) = layouts(profile, WORK, machine, Pins(strategy=parse_strategy(name)))[0]
        return rough_step_time_s(totals_of(profile, WORK, machine, "bf16"), layout, 1, "none")

    def test_a_node_brings_all_its_network_adapters(self):
        assert self.seconds("ddp") < self.seconds("ddp", per_node=1) / 5

    def test_context_parallel_sends_fewer_bytes_with_fewer_key_value_heads(self):
        assert self.seconds("ddp+tp8+cp2", kv_heads=1) < self.seconds("ddp+tp8+cp2", kv_heads=16)


class TestSavingMemory:
    """Logits of 40 GiB a sample; chunks divide them by 8, the optimizer in the backward frees the gradients."""

    def costs(self, state: int = 10):
        def more(profile, plan, workload):
            logits = 40 * GIB * plan.micro_batch / plan.loss_chunks
            gradients = 0 if plan.optimizer_in_backward else 30 * GIB
            return int(logits + gradients + (state if workload.optimizer == "adamw" else 1) * GIB)

        def same(profile, plan, workload, cluster):
            needed = more(profile, plan, workload)
            return estimate(profile, plan, workload, cluster).model_copy(update={"device": needed})

        return Costs(same, more, seconds)

    def answer(self, memory: int, state: int = 10, **pins):
        machine, asked = cluster(memory=memory * GIB), Pins.model_validate(pins)
        work = Workload(seq_len=4096, global_batch=8)
        return search_and_advise(model(), work, machine, asked, costs=self.costs(state), saves_memory=True)

    def test_nothing_is_changed_where_there_is_room(self):
        best = self.answer(500).candidates[0].plan
        assert (best.loss_chunks, best.optimizer_in_backward) == (1, False)

    def test_chunks(self):
        result = self.answer(60)
        best = result.candidates[0]
        assert best.fits and best.plan.loss_chunks == 8 and not best.plan.optimizer_in_backward
        assert result.optimizer is None and "fastest of" in best.plan.reason

    def test_chunks_where_only_plans_that_are_not_run_have_room(self):
        """Here zero1+tp2 needs no logits, and is not run."""

        def less(profile, plan, workload):
            return GIB if plan.strategy == "zero1+tp2" else costs.peak_lower_bound(profile, plan, workload)

        def same(profile, plan, workload, cluster):
            update = {"device": less(profile, plan, workload)}
            return estimate(profile, plan, workload, cluster).model_copy(update=update)

        costs, machine = self.costs(), cluster(memory=60 * GIB)
        asked = (model(), Workload(seq_len=4096, global_batch=8), machine)
        for any_plan, runs, chunks in ((False, True, 8), (True, False, 1)):
            best = search_and_advise(
                *asked, costs=Costs(same, less, seconds), saves_memory=True, any_plan=any_plan
            ).candidates[0]
            assert (best.runnable, best.plan.loss_chunks) == (runs, chunks)

    def test_the_optimizer_in_the_backward(self):
        result = self.answer(30)
        best = result.candidates[0]
        assert best.fits and best.plan.optimizer_in_backward and best.plan.loss_chunks == 8
        assert result.optimizer is None

    def test_another_optimizer_is_named(self):
        result = self.answer(60, state=60)
        assert result.candidates[0].fits and result.optimizer == "adamw8bit"
        result = self.answer(4, state=60)
        assert result.recommended is None and result.optimizer is None and result.advice

    def test_a_pinned_strategy_gets_only_the_chunks(self):
        best = self.answer(60, strategy=parse_strategy("ddp")).candidates[0]
        assert best.fits and best.plan.strategy == "ddp" and best.plan.loss_chunks == 8
        assert self.answer(500, strategy=parse_strategy("ddp")).candidates[0].plan.loss_chunks == 1
        result = self.answer(30, strategy=parse_strategy("ddp"))
        assert result.recommended is None and not result.candidates[0].plan.optimizer_in_backward

    @pytest.mark.parametrize("strategy", [None, "ddp"])
    def test_one_chunk_that_is_asked_for_is_kept(self, strategy):
        pins = {"strategy": parse_strategy(strategy)} if strategy else {}
        result = self.answer(60, options={"loss_chunks": 1}, **pins)
        assert all(candidate.plan.loss_chunks == 1 for candidate in result.candidates)


@pytest.mark.parametrize("strategy", [None, "fsdp", "zero2"])
def test_pinning_what_the_search_chose_changes_nothing(strategy):
    asked = (load_profile("llama-3.1-8b", seq_len=4096), Workload(seq_len=4096, global_batch=64))
    pins = Pins(strategy=strategy and parse_strategy(strategy))
    free = search(*asked, parse_cluster("8xH100"), pins)
    plan = free.candidates[free.recommended].plan.model_copy(update={"reason": ""})
    again = search(*asked, parse_cluster("8xH100"), pins.model_copy(update={"micro_batch": plan.micro_batch}))
    assert again.candidates[again.recommended].plan.model_copy(update={"reason": ""}) == plan
