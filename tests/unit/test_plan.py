"""The decision: the strategy grammar, the degrees, the batch split, and plans that are read back."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from pydantic import ValidationError

from shardwise.errors import PlanError
from shardwise.plan.dims import ParallelDims, dims_for
from shardwise.plan.divisibility import expert_problem
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan, read_plan, split_batch
from shardwise.plan.strategy import ALIASES, BASES, Strategy, parse_strategy, runnable_strategy

FULL = Plan(
    strategy="fsdp+offload",
    dims=ParallelDims(dp_shard=4),
    micro_batch=2,
    grad_accum=3,
    seq_len=128,
    precision="bf16",
    recompute="full",
    device="cuda",
    reason='asked for by name: ünïcode "quotes"\n',
)
# another value for each field; reason apart, every field must change the fingerprint
OTHERS = {
    "objective": "dpo",
    "strategy": "zero2+offload",
    "dims": ParallelDims(dp_replicate=2, dp_shard=2),
    "micro_batch": 4,
    "grad_accum": 4,
    "seq_len": 129,
    "precision": "fp16",
    "recompute": "selective",
    "gradient_sync": "every",
    "sequence_parallel": False,
    "loss_parallel": True,
    "tp_styles": {"layers.*.up": "colwise"},
    "async_tp": True,
    "pipeline_schedule": "zbv",
    "virtual_stages": 2,
    "recompute_layers": 3,
    "offload_activations": True,
    "compile": True,
    "prefetch": 3,
    "optimizer_in_backward": True,
    "loss_chunks": 4,
    "adapter": AdapterOptions(rank=3),
    "stage_blocks": (2, 1),
    "nvme_path": "swap",
    "find_unused_parameters": True,
    "static_graph": True,
    "bucket_cap_mb": 5,
    "device": "cpu",
    "weights": "compute",
    "accumulate": "compute",
    "reduce": "compute",
    "rounding": "kahan",
    "fp8": "rowwise",
    "fp8_emulate": True,
    "program": "megatron",
    "reason": "",
}


class TestStrategy:
    @pytest.mark.parametrize("text", [*BASES, "zero2+offload", "fsdp+offload", "hsdp+offload"])
    def test_the_normal_form_is_read_and_written_alike(self, text):
        assert str(parse_strategy(text)) == text

    @pytest.mark.parametrize(
        ("text", "normal"),
        [
            ("zero3", "fsdp"),
            ("full_shard", "fsdp"),
            ("shard_grad_op", "zero2"),
            ("hybrid_shard", "hsdp"),
            ("no_shard", "ddp"),
            ("zero3+offload", "fsdp+offload"),
            (" FSDP + Offload ", "fsdp+offload"),
            ("DDP", "ddp"),
        ],
    )
    def test_other_names_of_the_same(self, text, normal):
        assert str(parse_strategy(text)) == normal

    def test_every_alias_leads_to_a_strategy(self):
        assert {str(parse_strategy(alias)) for alias in ALIASES} <= set(BASES)

    @pytest.mark.parametrize(
        ("base", "shards", "reshards"),
        [
            ("ddp", False, False),
            ("zero1", False, False),
            ("zero2", True, False),
            ("fsdp", True, True),
            ("hsdp", True, True),
        ],
    )
    def test_what_a_strategy_does_with_parameters(self, base, shards, reshards):
        strategy = parse_strategy(base)
        assert (strategy.shards_parameters, strategy.reshards_after_forward) == (shards, reshards)

    @pytest.mark.parametrize("text", ["ddp+offload", "zero1+offload", "no_shard+offload"])
    def test_offload_of_whole_parameters_is_refused(self, text):
        with pytest.raises(PlanError, match="use zero2\\+offload or fsdp\\+offload") as raised:
            parse_strategy(text)
        assert len(raised.value.problems) == 1

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("fdsp", "'fdsp' is none of ddp, zero1, zero2, fsdp, hsdp, auto (did you mean 'fsdp'?)"),
            ("zero_3", "(did you mean 'zero3'?)"),
            ("banana", "'banana' is none of ddp, zero1, zero2, fsdp, hsdp, auto"),
            ("", "'' is none of"),
            ("fsdp+ofload", "'+ofload' is not an option (did you mean 'offload'?); known are +offload, +nvme"),
            ("fsdp+ddp", "'+ddp' is not an option"),
            ("fsdp+", "'+' is not an option"),
            ("fsdp+tp", "'+tp' needs a degree of 1 or more; write +tp2"),
            ("fsdp+tp0", "'+tp0' needs a degree of 1 or more"),
            ("fsdp+tp2+tp4", "+tp2 and +tp4 contradict each other"),
            ("fsdp+lora+qlora", "+lora and +qlora exclude each other"),
            ("fsdp+ep", "'+ep' needs a degree of 1 or more; write +ep2"),
            ("fsdp+ep2+ep4", "+ep2 and +ep4 contradict each other"),
            ("fsdp+nvme", "only DeepSpeed's ZeRO-3 swaps to NVMe; use deepspeed-zero3+nvme, or fsdp+offload"),
            ("ddp+nvme", "only DeepSpeed's ZeRO-3 swaps to NVMe"),
            ("deepspeed-zero2+nvme", "only DeepSpeed's ZeRO-3 swaps to NVMe"),
        ],
    )
    def test_words_that_are_not_in_the_grammar(self, text, says):
        with pytest.raises(PlanError) as raised:
            parse_strategy(text)
        (problem,) = raised.value.problems
        assert problem.startswith(f"strategy '{text}': ") and says in problem

    def test_nothing_is_suggested_for_what_is_like_nothing(self):
        with pytest.raises(PlanError) as raised:
            parse_strategy("banana")
        assert "did you mean" not in str(raised.value)

    def test_all_wrong_words_are_told_at_once(self):
        with pytest.raises(PlanError) as raised:
            parse_strategy("fdsp+ofload+tq2")
        assert [re.search("'([^']*)' is", problem)[1] for problem in raised.value.problems] == [
            "fdsp",
            "+ofload",
            "+tq2",
        ]

    @pytest.mark.parametrize(
        "text",
        ["zero1+tp2+pp4+cp2", "hsdp+tp2+lora", "fsdp+pp2+qlora", "deepspeed-zero2+lora", "zero1+pp4", "ddp+ep8"],
    )
    def test_what_is_planned_is_written_as_it_was_read_and_refused_where_it_is_run(self, text):
        assert str(parse_strategy(text)) == text
        with pytest.raises(PlanError, match="can be planned but is not run by this version"):
            runnable_strategy(text)


class TestDims:
    def test_plain_strategies_use_one_axis(self):
        for world in range(1, 17):
            for base in ("ddp", "zero1"):
                assert dims_for(Strategy(base=base), world) == ParallelDims(dp_replicate=world)
            for base in ("zero2", "fsdp"):
                assert dims_for(Strategy(base=base), world) == ParallelDims(dp_shard=world)

    def test_degrees_multiply_to_the_world(self):
        for base, world, per_node in itertools.product(BASES, range(1, 25), [None, *range(1, 9)]):
            if (
                base == "hsdp"
                and world % 2
                and world > 1
                and not (per_node and per_node < world and world % per_node == 0)
            ):
                with pytest.raises(PlanError, match=f"hsdp on {world} ranks: no even split"):
                    dims_for(Strategy(base=base), world, devices_per_node=per_node)
                continue
            dims = dims_for(Strategy(base=base), world, devices_per_node=per_node)
            assert dims.world_size == dims.dp == dims.dp_replicate * dims.dp_shard == world

    @pytest.mark.parametrize(
        ("world", "per_node", "replicate", "shard"),
        [
            (1, None, 1, 1),
            (2, 2, 2, 1),
            (8, 8, 2, 4),
            (8, None, 2, 4),
            (16, 8, 2, 8),
            (32, 8, 4, 8),
            (9, 3, 3, 3),
            (6, 4, 2, 3),
        ],
    )
    def test_hsdp_shards_inside_a_node(self, world, per_node, replicate, shard):
        dims = dims_for(Strategy(base="hsdp"), world, devices_per_node=per_node)
        assert (dims.dp_replicate, dims.dp_shard) == (replicate, shard)

    @pytest.mark.parametrize("given", [{"dp_replicate": 4}, {"dp_shard": 2}, {"dp_replicate": 4, "dp_shard": 2}])
    def test_degrees_that_are_given_are_kept(self, given):
        dims = dims_for(Strategy(base="hsdp"), 8, devices_per_node=8, **given)
        assert (dims.dp_replicate, dims.dp_shard) == (4, 2)

    @pytest.mark.parametrize(
        ("base", "given"),
        [("ddp", {"dp_replicate": 4, "dp_shard": 1}), ("fsdp", {"dp_shard": 4}), ("zero2", {"dp_replicate": 1})],
    )
    def test_degrees_that_say_the_same_are_no_contradiction(self, base, given):
        assert dims_for(Strategy(base=base), 4, **given) == dims_for(Strategy(base=base), 4)

    @pytest.mark.parametrize(
        ("base", "given", "says"),
        [
            ("ddp", {"dp_shard": 4}, "dp_replicate 4 × dp_shard 4 is not the world size 4"),
            ("ddp", {"dp_replicate": 2}, "ddp on 4 ranks is dp_replicate 4 × dp_shard 1"),
            ("fsdp", {"dp_replicate": 2}, "fsdp on 4 ranks is dp_replicate 1 × dp_shard 4"),
            ("fsdp", {"dp_shard": 2}, "dp_replicate 1 × dp_shard 2 is not the world size 4"),
            ("hsdp", {"dp_replicate": 3}, "dp_replicate × dp_shard may be 1 × 4, 2 × 2, 4 × 1"),
            ("hsdp", {"dp_shard": 8}, "dp_replicate × dp_shard may be 1 × 4, 2 × 2, 4 × 1"),
            ("hsdp", {"dp_replicate": 2, "dp_shard": 4}, "dp_replicate 2 × dp_shard 4 is not the world size 4"),
        ],
    )
    def test_degrees_that_cannot_be(self, base, given, says):
        with pytest.raises(PlanError) as raised:
            dims_for(Strategy(base=base), 4, **given)
        assert says in str(raised.value)

    @pytest.mark.parametrize(
        ("text", "world", "ranks", "shards"),
        [
            ("fsdp+ep4", 8, 8, 2),
            ("fsdp+tp2+ep8", 16, 16, 2),
            ("fsdp+cp2+tp2+ep4", 16, 16, 4),
            ("hsdp+ep4", 16, 8, 2),  # inside a replica
            ("zero1+ep8+pp2", 32, 16, 2),
            ("ddp+tp2+ep2", 8, 8, 4),
        ],
    )
    def test_experts_take_no_ranks_of_their_own(self, text, world, ranks, shards):
        strategy = parse_strategy(text)
        dims = dims_for(strategy, world, devices_per_node=8)
        assert (dims.world_size, dims.ep, dims.expert_ranks, dims.expert_shards) == (world, strategy.ep, ranks, shards)
        for first in range(0, world, strategy.ep):  # consecutive ranks have all experts, of one stage and replica
            places = [dims.place(rank) for rank in range(first, first + strategy.ep)]
            assert [place.ep for place in places] == list(range(strategy.ep))
            assert len({(place.pp, place.dp // dims.dp_shard if dims.dp_shard > 1 else 0) for place in places}) == 1

    @pytest.mark.parametrize(
        ("text", "world", "says"),
        [
            (
                "fsdp+ep3",
                8,
                "fsdp+ep3: ep 3 must divide the dp_shard 8 ranks that experts are spread over; use one of 2, 4, 8",
            ),
            (
                "fsdp+tp4+ep2",
                16,
                "the dp_shard 4 × tp 4 = 16 ranks that experts are spread over, and be a multiple of 4",
            ),
            ("hsdp+ep16", 16, "dp_shard 8 ranks that experts are spread over; use one of 2, 4, 8"),
            ("ddp+ep2", 1, "dp_replicate 1 ranks that experts are spread over; leave +ep out"),
        ],
    )
    def test_degrees_that_experts_cannot_have(self, text, world, says):
        with pytest.raises(PlanError) as raised:
            dims_for(parse_strategy(text), world, devices_per_node=8)
        assert says in str(raised.value)

    @pytest.mark.parametrize(
        ("experts", "ep", "says"),
        [
            (8, 4, ""),
            (8, 1, ""),
            (0, 1, ""),
            (60, 8, "ep 8 does not divide the 60 experts of a layer; use one of 2, 3, 4, 5, 6, 10, 12, 15"),
            (8, 16, "ep 16 does not divide the 8 experts of a layer; use one of 2, 4, 8"),
            (0, 2, "ep 2 spreads experts over ranks, and this model has none; leave +ep out"),
        ],
    )
    def test_each_rank_has_as_many_experts(self, experts, ep, says):
        assert expert_problem(experts, ep) == says

    def test_proposed_degrees_are_multiples_of_the_ranks_of_a_sample(self):
        assert expert_problem(8, 3, 16, inner=4).endswith("; use one of 4, 8")

    def test_an_empty_world(self):
        with pytest.raises(PlanError, match="at least one rank"):
            dims_for(Strategy(base="ddp"), 0)

    def test_degrees_in_words(self):
        assert str(ParallelDims()) == "one rank"
        assert str(ParallelDims(dp_shard=4)) == "dp_shard=4"
        assert str(ParallelDims(dp_shard=4, dp_replicate=2)) == "dp_replicate=2 × dp_shard=4"
        assert ParallelDims(dp_replicate=2, dp_shard=3, tp=5, pp=7, cp=11).world_size == 2310
        with pytest.raises(ValidationError):
            ParallelDims(dp_shard=0)


class TestBatchSplit:
    def test_every_answer_solves_the_equation_and_every_refusal_is_right(self):
        some = [None, 1, 2, 3, 4, 6]
        for dp, full, micro, accum in itertools.product(range(1, 6), range(1, 40), some, some):
            solutions = {(m, a) for m in range(1, 40) for a in (full / dp / m,) if a == int(a) and a >= 1}
            solutions = {(m, a) for m, a in solutions if micro in (None, m) and accum in (None, a)}
            try:
                found = split_batch(dp, global_batch=full, micro_batch=micro, grad_accum=accum)
            except PlanError:
                assert not solutions
            else:
                assert found in solutions

    def test_what_is_suggested_instead_works_and_is_nearest(self):
        for dp, full, micro, accum in itertools.product(range(1, 6), range(1, 40), [None, 2, 3], [None, 2, 5]):
            divisor = dp * (micro or 1) * (accum or 1)
            if full % divisor == 0:
                continue
            with pytest.raises(PlanError) as raised:
                split_batch(dp, global_batch=full, micro_batch=micro, grad_accum=accum)
            said = [int(n) for n in re.findall(r"\d+", str(raised.value).rpartition("train.global_batch to")[2])]
            assert said == [n for n in (full // divisor * divisor, full // divisor * divisor + divisor) if n]

    def test_only_a_global_batch_is_one_micro_batch(self):
        assert split_batch(4, global_batch=32, micro_batch=None, grad_accum=None) == (8, 1)

    @pytest.mark.parametrize(
        ("micro", "accum", "found"), [(None, None, (1, 1)), (3, None, (3, 1)), (None, 5, (1, 5)), (3, 5, (3, 5))]
    )
    def test_without_a_global_batch_what_is_given_holds(self, micro, accum, found):
        assert split_batch(7, global_batch=None, micro_batch=micro, grad_accum=accum) == found

    def test_three_numbers_that_contradict(self):
        with pytest.raises(PlanError, match="micro batch 2 × accumulation 2 × dp 2 = 8; leave one of the three out"):
            split_batch(2, global_batch=16, micro_batch=2, grad_accum=2)


class TestPlan:
    @pytest.mark.parametrize("plan", [Plan(), FULL, FULL.model_copy(update={"micro_batch": None, "seq_len": None})])
    @pytest.mark.parametrize("kind", ["toml", "json"])
    def test_a_plan_is_read_back_as_it_was(self, tmp_path, plan, kind):
        file = tmp_path / f"plan.{kind}"
        file.write_text(plan.to_toml() if kind == "toml" else plan.to_json())
        assert read_plan(file) == plan
        assert read_plan(file).fingerprint == plan.fingerprint
        assert "schema_version" not in file.read_text()

    def test_json_is_one_line(self):
        assert len(FULL.to_json().splitlines()) == 1
        assert json.loads(FULL.to_json())["schema"] == 1

    def test_the_fingerprint_is_of_what_is_computed(self):
        assert re.fullmatch("[0-9a-f]{16}", FULL.fingerprint)
        assert set(OTHERS) == set(Plan.model_fields) - {"schema_version"}
        prints = {name: FULL.model_copy(update={name: value}).fingerprint for name, value in OTHERS.items()}
        assert prints.pop("reason") == prints.pop("nvme_path") == FULL.fingerprint
        assert len({FULL.fingerprint, *prints.values()}) == len(prints) + 1

    def test_the_fingerprint_is_the_same_in_every_process_and_version(self):
        """Checkpoints and receipts name plans by it."""
        assert Plan().fingerprint == "5d4aafa746ba9d7b"
        assert FULL.fingerprint == "ff481b8be1482fa6"

    def test_stages_are_data_of_the_plan(self, tmp_path):
        """A plan file from before they were is read as ever, and its fingerprint is the same."""
        old = Plan(strategy="ddp+pp2", dims=ParallelDims(pp=2), grad_accum=4)
        (tmp_path / "old.json").write_text('{"strategy": "ddp+pp2", "dims": {"pp": 2}, "grad_accum": 4, "schema": 1}')
        assert read_plan(tmp_path / "old.json") == old
        assert old.stage_blocks is None
        staged = old.model_copy(update={"stage_blocks": (3, 1)})
        assert staged.fingerprint != old.fingerprint
        for name, text in (("plan.toml", staged.to_toml()), ("plan.json", staged.to_json())):
            (tmp_path / name).write_text(text)
            assert read_plan(tmp_path / name) == staged

    def test_other_stages_do_not_keep_the_blocks_of_these(self):
        plan = Plan(strategy="ddp+pp2", dims=ParallelDims(pp=2), stage_blocks=(3, 1))
        for name, value in (("strategy", "ddp"), ("dims", ParallelDims(pp=4)), ("virtual_stages", 2)):
            assert plan.model_copy(update={name: value}).stage_blocks is None
        assert plan.model_copy(update={"virtual_stages": 1, "grad_accum": 8}).stage_blocks == (3, 1)
        assert plan.model_copy(update={"virtual_stages": 2, "stage_blocks": (1,) * 4}).stage_blocks == (1,) * 4

    def test_experts_are_data_of_the_plan(self, tmp_path):
        """A plan from before they were spread has the fingerprint that it had."""
        spread = FULL.model_copy(update={"strategy": "fsdp+ep2", "dims": ParallelDims(dp_shard=4, ep=2)})
        narrow = spread.model_copy(update={"dims": ParallelDims(dp_shard=4, ep=4)})
        assert len({spread.fingerprint, narrow.fingerprint, FULL.fingerprint}) == 3
        for name, text in (("plan.toml", spread.to_toml()), ("plan.json", spread.to_json())):
            (tmp_path / name).write_text(text)
            assert read_plan(tmp_path / name) == spread
        assert json.loads(spread.to_json())["dims"]["ep"] == 2

    def test_two_names_of_one_strategy_are_one_plan(self):
        assert Plan(strategy="zero3").fingerprint == Plan(strategy="fsdp").fingerprint

    def test_a_plan_cannot_be_changed(self):
        with pytest.raises(ValidationError):
            FULL.grad_accum = 7

    def test_the_global_batch(self):
        assert FULL.global_batch == 2 * 3 * 4
        assert FULL.model_copy(update={"dims": ParallelDims(dp_replicate=2, dp_shard=4, tp=2)}).global_batch == 48
        assert Plan(grad_accum=2).global_batch is None

    def test_the_batch_in_words(self):
        assert FULL.batch_equation() == (
            "global batch 24 = micro batch 2 × accumulation 3 × dp 4  (24 × 128 = 3,072 tokens a step)"
        )
        assert Plan(grad_accum=2, seq_len=9).batch_equation() == (
            "global batch ? = micro batch the loader's × accumulation 2 × dp 1"
        )
        assert Plan(micro_batch=5).batch_equation() == "global batch 5 = micro batch 5 × accumulation 1 × dp 1"


class TestReading:
    def problems(self, tmp_path, text, name="plan.toml"):
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(PlanError) as raised:
            read_plan(file)
        assert all(problem.startswith(f"plan '{file}'") for problem in raised.value.problems), raised.value.problems
        return [problem.removeprefix(f"plan '{file}': ") for problem in raised.value.problems]

    def test_all_problems_are_told_at_once(self, tmp_path):
        text = 'micro_batch = 0\nprecison = "bf16"\nrecompute = "some"\nschema = 2\n[dims]\ndp_shard = "many"\n'
        problems = self.problems(tmp_path, text)
        assert len(problems) == 5
        said = {problem.partition(":")[0]: problem for problem in problems}
        assert set(said) == {"micro_batch", "precison", "recompute", "schema", "dims.dp_shard"}
        assert "(did you mean 'precision'?)" in said["precison"]
        assert "got 0" in said["micro_batch"] and "got 'many'" in said["dims.dp_shard"]
        assert not any("did you mean" in said[key] for key in said if key != "precison")

    def test_a_wrong_strategy_is_told_with_the_rest(self, tmp_path):
        assert len(self.problems(tmp_path, 'strategy = "fdsp"\nmicro_batch = 0\n')) == 2

    def test_only_recipes_that_run_are_offered(self, tmp_path):
        (problem,) = self.problems(tmp_path, 'fp8 = "nvfp5"\n')
        assert problem == "fp8: must be 'none', 'tensorwise' or 'rowwise', got 'nvfp5'"
        (problem,) = self.problems(tmp_path, 'fp8 = "mxfp8"\n')
        assert problem.startswith("fp8: 'mxfp8' is refused: what a step costs with it is unknown")
        assert problem.endswith("(prototype.moe_training); take tensorwise or rowwise")

    def test_a_wrong_strategy_alone(self, tmp_path):
        file = tmp_path / "plan.toml"
        file.write_text('strategy = "fdsp"\n')
        with pytest.raises(PlanError, match="did you mean 'fsdp'"):
            read_plan(file)

    @pytest.mark.parametrize("strategy", ["ddp", "zero1"])
    def test_whole_parameters_have_no_axis_to_be_sharded_over(self, tmp_path, strategy):
        (problem,) = self.problems(tmp_path, f'strategy = "{strategy}"\n[dims]\ndp_shard = 2\n')
        assert problem == f"{strategy} has no dp_shard axis, but dims say dp_shard 2"

    @pytest.mark.parametrize(
        ("strategy", "dims"),
        [
            ("fsdp", "dp_replicate = 2"),
            ("zero2", "dp_replicate = 2\ndp_shard = 2"),
            ("ddp", "dp_replicate = 2\ntp = 2"),
            ("fsdp", "dp_shard = 2\npp = 2"),
            ("hsdp", "dp_replicate = 2\ndp_shard = 2\ncp = 2"),
        ],
    )
    def test_degrees_that_no_strategy_here_has(self, tmp_path, strategy, dims):
        """They would be computed as something else than planned."""
        self.problems(tmp_path, f'strategy = "{strategy}"\n[dims]\n{dims}\n')

    def test_a_wrong_key_of_dims_names_the_nearest(self, tmp_path):
        (problem,) = self.problems(tmp_path, "[dims]\ndp_shrad = 2\n")
        assert "(did you mean" in problem and "dp_shard" in problem

    @pytest.mark.parametrize(
        ("name", "text"), [("plan.toml", "strategy = "), ("plan.json", "{"), ("plan.json", 'strategy = "ddp"')]
    )
    def test_a_file_that_is_not_what_its_name_says(self, tmp_path, name, text):
        (problem,) = self.problems(tmp_path, text, name)
        assert "is not readable: " in problem

    def test_a_document_that_is_no_table(self, tmp_path):
        assert len(self.problems(tmp_path, "[1, 2]", "plan.json")) == 1

    def test_bytes_that_are_no_text(self, tmp_path):
        (tmp_path / "plan.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(PlanError, match="is not readable"):
            read_plan(tmp_path / "plan.toml")

    def test_a_file_that_is_missing_or_a_folder(self, tmp_path):
        with pytest.raises(PlanError, match=r"no\.toml': No such file or directory; give the path of a plan file"):
            read_plan(tmp_path / "no.toml")
        with pytest.raises(PlanError, match="Is a directory"):
            read_plan(tmp_path)
