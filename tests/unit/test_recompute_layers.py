"""Recompute of the first blocks only: memory and time between none and all, and the fewest that fit."""

from __future__ import annotations

import json
import shlex

import pytest

from shardwise.cost.memory.estimate_memory import estimate, peak_lower_bound
from shardwise.cost.memory.local_shapes import layout_of, stage_pieces, with_stages
from shardwise.cost.time.estimate_time import step_time
from shardwise.errors import PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan, axis_problems
from shardwise.plan.program import SHARDWISE
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.traffic import sent_bytes
from shardwise.plan.workload import Workload
from shardwise.run.resume_command import with_plan
from shardwise.search.candidate import Pins
from shardwise.search.problem import ask
from shardwise.search.recompute_layers import ROOM
from shardwise.search.search import cost_of, search
from shardwise.train.config import read_config
from tests.cli import configs
from tests.cli.test_plan_command import command

LLAMA = load_profile("llama-3.1-8b", seq_len=4096)
NODE = parse_cluster("8xA100-80GB")
WORK = Workload()
STRATEGIES = ["fsdp", "ddp", "zero2+tp2", "fsdp+pp2", "ddp+pp2"]


def plan_of(strategy: str, layers: int | None = None, recompute: str = "full", **options) -> Plan:
    return Plan(
        strategy=strategy,
        dims=dims_for(parse_strategy(strategy), 8, devices_per_node=8),
        **{"micro_batch": 1, "grad_accum": 4, "seq_len": 4096, "precision": "bf16", "device": "cuda"} | options,
        recompute=recompute,
        recompute_layers=layers,
    )


class TestCosts:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("recompute", ["full", "selective"])
    def test_each_more_block_takes_less_memory_and_more_time(self, strategy, recompute):
        stage = max(with_stages(LLAMA, plan_of(strategy)).stage_blocks or (32,))
        plans = [plan_of(strategy, None, "none"), *(plan_of(strategy, n, recompute) for n in (1, 2, 5, stage // 2))]
        plans.append(plan_of(strategy, stage, recompute))
        memory = [estimate(LLAMA, plan, WORK, NODE) for plan in plans]
        kept = [one.activations for one in memory]
        assert sorted(kept, reverse=True) == kept and len(set(kept)) == len(kept)
        devices = [one.device for one in memory]
        assert sorted(devices, reverse=True) == devices and devices[-1] < devices[0]
        bounds = [peak_lower_bound(LLAMA, plan, WORK) for plan in plans]
        assert sorted(bounds, reverse=True) == bounds
        assert all(bound <= one.allocated for bound, one in zip(bounds, memory, strict=True))
        seconds = [step_time(LLAMA, plan, WORK, NODE).step_s for plan in plans]
        assert sorted(seconds) == seconds and len(set(seconds)) == len(seconds)
        whole = plan_of(strategy, None, recompute)
        assert estimate(LLAMA, whole, WORK, NODE) == memory[-1]
        assert step_time(LLAMA, whole, WORK, NODE) == step_time(LLAMA, plans[-1], WORK, NODE)

    def test_the_extra_forward_is_that_share_of_all(self):
        whole, some = (step_time(LLAMA, plan_of("fsdp", n), WORK, NODE) for n in (None, 12))
        assert some.recompute_s == pytest.approx(whole.recompute_s * 12 / 32)
        none = step_time(LLAMA, plan_of("fsdp", recompute="none"), WORK, NODE)
        assert some.compute_s == pytest.approx(none.compute_s)

    def test_activations_are_inputs_of_some_blocks_and_all_of_the_others(self):
        found = {
            n: estimate(LLAMA, plan_of("fsdp", n or None, "full" if n else "none"), WORK, NODE).activations
            for n in (0, 4, 8, 12, 20)
        }
        steps = {found[n] - found[n + 4] for n in (0, 4, 8)}
        assert max(steps) - min(steps) <= 12, "each block saves the same, up to rounding of its tensors to bytes"
        assert found[12] - found[20] == pytest.approx(2 * max(steps), rel=1e-6)

    def test_of_each_virtual_stage(self):
        plan = plan_of("ddp+pp2", 3, pipeline_schedule="interleaved-1f1b", virtual_stages=2)
        pieces = stage_pieces(LLAMA, layout_of(plan), 0, plan.recompute, plan.recompute_layers)
        blocks = [(piece.count, piece.recompute) for piece in pieces if piece.is_block]
        assert blocks == [(3, "full"), (6, "none"), (3, "full"), (5, "none")], "the head weighs a block"

    def test_tokens_are_sent_to_experts_again_for_that_share(self):
        mixtral = load_profile("mixtral-8x7b", seq_len=4096)
        sent = [sent_bytes(mixtral, plan_of("fsdp+ep8", n), SHARDWISE)["ep"] for n in (8, 16, None)]
        none = sent_bytes(mixtral, plan_of("fsdp+ep8", None, "none"), SHARDWISE)["ep"]
        more = sent[2] - none
        assert [one - none for one in sent] == pytest.approx([more / 4, more / 2, more])


class TestSearch:
    def test_the_fewest_that_fit(self):
        pins = Pins(strategy=parse_strategy("fsdp"))
        profile, work = load_profile("llama-2-70b", seq_len=4096), Workload(seq_len=4096, global_batch=64)
        cluster = parse_cluster("4x8xH100-SXM")
        best = search(profile, work, cluster, pins).candidates[0]
        problem = ask(profile, work, cluster, pins)
        layers, limit = best.plan.recompute_layers, problem.usable * ROOM
        assert best.plan.recompute == "full" and 40 < layers < 80
        fewer = cost_of(problem, best.plan.model_copy(update={"recompute_layers": layers - 1}))
        assert best.memory.device_bytes <= limit < fewer.memory.device_bytes
        whole = search(profile, work, cluster, pins.model_copy(update={"recompute": "full"})).candidates[0]
        assert whole.plan.recompute_layers is None, "a pinned recompute is taken as it is"
        assert best.time.step_s < whole.time.step_s

    def test_less_sharding_does_not_pay_for_recompute_that_fills_the_memory(self):
        """Recompute of 8 of 40 blocks lets zero2 fit, within a tie of fsdp, which recomputes nothing."""
        work = Workload(seq_len=4096, global_batch=64)
        best = search(load_profile("llama-2-13b", seq_len=4096), work, NODE).candidates[0].plan
        assert (best.strategy, best.recompute) == ("fsdp", "none")

    def test_other_programs_are_left_alone(self):
        from shardwise.plan.program import find_program

        work = Workload(seq_len=4096, global_batch=64, program=find_program("torchtitan"))
        pins = Pins(strategy=parse_strategy("fsdp"))
        found = search(load_profile("llama-2-70b", seq_len=4096), work, parse_cluster("4x8xH100-SXM"), pins)
        assert all(one.plan.recompute_layers is None for one in found.candidates)


class TestWords:
    WORDS = ("plan", "llama-3.1-8b", "--cluster", "8xA100-80GB", "--seq-len", "4k", "--global-batch", "64")

    def test_asked_for(self, capsys, tmp_path):
        file = tmp_path / "plan.toml"
        words = [*self.WORDS, "--strategy", "fsdp", "--micro-batch", "1", "--recompute-layers", "12", "-o", str(file)]
        out, _ = command(capsys, *words)
        assert "with recompute of 12 of 32 blocks: asked for by name." in " ".join(out.split())
        assert 'recompute = "full"\n' in file.read_text() and "recompute_layers = 12\n" in file.read_text()
        out, _ = command(capsys, *words[:-2], "--json")
        entry = json.loads(out)["candidates"][0]
        assert (entry["recompute"], entry["recompute_layers"]) == ("full", 12)
        out, _ = command(capsys, "explain", str(file))
        assert "of the first 12; every operation's saved tensors of the others" in " ".join(out.split())

    def test_all_are_asked_for(self, capsys):
        """Without it the planner takes fewer, where that is faster and fits."""
        found, everything = [], ("--recompute-layers", "all")
        cases = (
            ("zero2", ("--loss-chunks", "1")),
            ("zero2", everything),
            ("fsdp", (*everything, "--recompute", "selective")),
        )
        for strategy, more in cases:
            out, _ = command(capsys, *self.WORDS, "--strategy", strategy, "--micro-batch", "4", "--json", *more)
            entry = json.loads(out)["candidates"][0]
            found.append((entry["recompute"], entry["recompute_layers"]))
        assert found[0][1] is not None and found[1:] == [("full", None), ("selective", None)], found
        out, _ = command(capsys, "plan", "--help")
        assert "blocks, of each pipeline stage, or all" in " ".join(out.replace("│", " ").split())

    def test_of_each_stage(self, capsys):
        out, _ = command(capsys, *self.WORDS, "--strategy", "fsdp+pp2", "--recompute-layers", "1")
        assert "with recompute of the first 1 block of each stage: asked for" in " ".join(out.split())

    def test_of_all_of_a_stage_is_said(self, capsys):
        out, _ = command(capsys, *self.WORDS, "--strategy", "fsdp+pp4", "--recompute-layers", "12")
        assert "full recompute (of 12 blocks of each stage; none has more than 9)" in " ".join(out.split())

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("33",), "--recompute-layers 33 is more than the 32 blocks of llama-3.1-8b; give at most 32, or"),
            (("al",), "--recompute-layers 'al' must be all, or a whole number from 1 to 65536"),
            (("0",), "--recompute-layers '0' must be all, or a whole number from 1 to 65536"),
            (("all", "--recompute", "none"), "--recompute-layers all: set recompute to full or selective, or leave it"),
            (("3", "--recompute", "none"), "--recompute-layers 3: set recompute to full or selective, or leave it out"),
        ],
    )
    def test_what_cannot_be(self, capsys, words, says):
        _, err = command(capsys, *self.WORDS, "--recompute-layers", *words, exit_code=2)
        assert says in err

    def test_a_plan_without_recompute(self):
        (problem,) = axis_problems(plan_of("fsdp", 3, "none"))
        assert problem.startswith("recompute_layers does nothing without recompute; set recompute to full")
        with pytest.raises(PlanError, match="recompute_layers does nothing"):
            from shardwise.plan.plan import runnable

            runnable(plan_of("fsdp", 3, "none"))


def test_a_command_for_another_plan_says_all_blocks_where_the_config_says_some(tmp_path):
    file = configs.write_config(tmp_path, parallel={"strategy": "ddp", "recompute": "full", "recompute_layers": 2})
    config, plan = read_config(file), plan_of("fsdp", None).model_copy(update={"offload_activations": True})
    words = shlex.split(with_plan(["shardwise", "train", str(file)], config, plan))
    assert "parallel.recompute_layers=all" in words and "parallel.offload_activations=true" in words
    again = read_config(file, [word for word in words if word.startswith("parallel.")]).parallel
    assert again.recompute_layers is None and again.offload_activations
    assert not [word for word in words if "fp8" in word or "weights" in word]
