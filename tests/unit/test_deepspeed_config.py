"""DeepSpeed's configuration as a plan and back: nothing is lost, nothing passed over, and DeepSpeed reads it alike."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.interop.deepspeed.batch_sizes import solve_batch
from shardwise.interop.deepspeed.export import beside, export_deepspeed, export_losses, export_notes, twin_problems
from shardwise.interop.deepspeed.import_config import (
    BESIDE,
    BESIDE_KEYS,
    Imported,
    import_deepspeed,
    read_document,
)
from shardwise.interop.deepspeed.keys import AUTO, TABLES, Key
from shardwise.interop.deepspeed.optimizer_section import read_training
from shardwise.parallel.engines import deepspeed_available
from shardwise.plan.deepspeed_stages import STAGES
from shardwise.plan.dims import ParallelDims, dims_for
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan, axis_problems, runnable
from shardwise.plan.strategy import parse_strategy
from shardwise.train.config import OptimizerTable
from shardwise.train.optimizer import learning_rate
from tests.worlds import run_world

FILES = Path(__file__).parents[1] / "deepspeed_configs"
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
TWINS = [f"deepspeed-zero{n}{more}" for n in (1, 2, 3) for more in ("", "+offload")]
TWINS += ["deepspeed-zero3+nvme", "deepspeed-zero3+offload+nvme", "zero1", "zero2", "fsdp", "zero3", "full_shard"]
TWINS += ["zero2+offload", "fsdp+offload", "fsdp+lora", "zero2+qlora", "deepspeed-zero3+lora"]
SAID = {"strategy", "dims", "micro_batch", "grad_accum", "precision", "nvme_path"}  # by DeepSpeed's own keys
NOT_COMPARED = {"schema_version", "reason", "program"}  # `program` says whose costs were predicted

# file, ranks, engine: strategy, precision, micro batch, accumulation, clip_norm
EXPECTED: dict[tuple[str, int, str | None], tuple[str, str, int, int, Any]] = {
    ("zero1-fp16", 2, "torch"): ("zero1", "fp16", 4, 4, 0.5),
    ("zero2-bf16", 4, None): ("deepspeed-zero2", "bf16", 8, 4, 1.0),
    ("zero2-offload", 2, None): ("deepspeed-zero2+offload", "bf16", 2, 8, "none"),
    ("zero2-old", 8, None): ("deepspeed-zero2+offload", "bf16", 4, 8, 1.0),
    ("zero3-bf16", 8, None): ("deepspeed-zero3", "bf16", 2, 4, 1.0),
    ("zero3-offload", 1, None): ("deepspeed-zero3+offload", "bf16", 1, 16, 1.0),
    ("zero3-nvme", 4, None): ("deepspeed-zero3+nvme", "bf16", 8, 2, 1.0),
    ("stage0-fp32", 2, None): ("ddp", "fp32", 4, 1, 1.0),
}


def plan_of(strategy: str, ranks: int = 2, **changes: Any) -> Plan:
    parsed = parse_strategy(strategy)
    if parsed.nvme:
        changes = {"nvme_path": "/local_nvme", **changes}
    fields = {"strategy": strategy, "dims": dims_for(parsed, ranks), "micro_batch": 3, "grad_accum": 2, **changes}
    return Plan.model_validate(fields)


def there_and_back(plan: Plan, **words: Any) -> Plan:
    """Written, read as JSON, and imported as on a machine that has the other device."""
    document = json.loads(json.dumps(export_deepspeed(plan, clip_norm=1.0)))
    here = "cpu" if plan.device == "cuda" else "cuda"
    return import_deepspeed(document, ranks=plan.dims.world_size, here=here, **words).plan


def from_file(name: str, ranks: int | None, engine: str | None = None) -> Imported:
    return import_deepspeed(read_document(FILES / f"{name}.json"), ranks=ranks, engine=engine)  # type: ignore[arg-type]


def problems(config: dict[str, Any], ranks: int | None = 2, **words: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        import_deepspeed({"train_batch_size": 8, **config}, ranks=ranks, **words)
    return list(caught.value.problems)


class TestRoundTrip:
    @pytest.mark.parametrize("strategy", TWINS)
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_every_plan_with_a_twin(self, strategy: str, precision: str, device: str) -> None:
        for ranks, steps, recompute, seq_len in ((1, 1, "none", None), (2, 1, "full", 128), (8, 4, "selective", 64)):
            options = {"grad_accum": steps, "recompute": recompute, "seq_len": seq_len}
            plan = plan_of(strategy, ranks, precision=precision, device=device, **options)
            back = there_and_back(plan)
            assert back.fingerprint == plan.fingerprint
            assert back.nvme_path == plan.nvme_path
            assert str(back.parsed) == str(plan.parsed)

    def test_nothing_of_a_plan_is_forgotten(self) -> None:
        """Another value for each field comes back, or the plan has no twin and it is said why."""
        others: dict[str, tuple[str, dict[str, Any]]] = {
            "strategy": ("fsdp", {}),
            "dims": ("deepspeed-zero2", {"dims": ParallelDims(dp_shard=4)}),
            "micro_batch": ("deepspeed-zero2", {"micro_batch": 7}),
            "grad_accum": ("deepspeed-zero2", {"grad_accum": 5}),
            "seq_len": ("deepspeed-zero2", {"seq_len": 77}),
            "precision": ("fsdp", {"precision": "fp16"}),
            "recompute": ("deepspeed-zero2", {"recompute": "full"}),
            "gradient_sync": ("fsdp", {"gradient_sync": "every"}),
            "compile": ("fsdp", {"compile": True}),
            "prefetch": ("fsdp", {"prefetch": 3}),
            "recompute_layers": ("deepspeed-zero2", {"recompute": "full", "recompute_layers": 2}),
            "offload_activations": ("fsdp", {"offload_activations": True}),
            "loss_chunks": ("fsdp", {"loss_chunks": 4}),
            "adapter": ("fsdp+lora", {"adapter": AdapterOptions(rank=4, targets=("q_proj",))}),
            "device": ("deepspeed-zero2", {"device": "cuda"}),
            "objective": ("deepspeed-zero2", {"objective": "dpo"}),
            "nvme_path": ("deepspeed-zero3+nvme", {"nvme_path": "/elsewhere"}),
        }
        refused: dict[str, Plan] = {
            "sequence_parallel": plan_of("fsdp+tp2", sequence_parallel=False),
            "loss_parallel": plan_of("fsdp+tp2", loss_parallel=True),
            "tp_styles": plan_of("fsdp+tp2", tp_styles={"a": "colwise"}),
            "async_tp": plan_of("fsdp+tp2", async_tp=True),
            "find_unused_parameters": plan_of("ddp", find_unused_parameters=True),
            "static_graph": plan_of("ddp", static_graph=True),
            "bucket_cap_mb": plan_of("ddp", bucket_cap_mb=5),
            "pipeline_schedule": plan_of("fsdp+pp2", pipeline_schedule="gpipe"),
            "virtual_stages": plan_of("fsdp+pp2", virtual_stages=2, pipeline_schedule="zbv"),
            "stage_blocks": plan_of("fsdp+pp2", stage_blocks=(2, 2)),
            "optimizer_in_backward": plan_of("fsdp", grad_accum=1, optimizer_in_backward=True),
            "weights": plan_of("fsdp", weights="compute"),
            "accumulate": plan_of("fsdp", weights="masters", accumulate="compute"),
            "reduce": plan_of("fsdp", reduce="compute"),
            "rounding": plan_of("fsdp", weights="compute", rounding="kahan"),
            "fp8": plan_of("fsdp", fp8="rowwise"),
            "fp8_emulate": plan_of("fsdp", fp8="rowwise", fp8_emulate=True),
        }
        assert set(others) | set(refused) | NOT_COMPARED == set(Plan.model_fields), (
            "a new field: say what becomes of it"
        )
        assert set(others) <= SAID | BESIDE_KEYS
        for field, (strategy, change) in others.items():
            plan = plan_of(strategy, **change)
            back = there_and_back(plan)
            assert back == plan.model_copy(update={"reason": "", "strategy": str(plan.parsed)}), field
        for field, plan in refused.items():
            assert twin_problems(plan), field

    @pytest.mark.parametrize("file", [name for name, _, _ in EXPECTED if name != "stage0-fp32"])
    def test_a_file_keeps_its_meaning(self, file: str) -> None:
        ranks, engine = next((ranks, engine) for name, ranks, engine in EXPECTED if name == file)
        first = from_file(file, ranks, engine)
        clip = first.keys["optimizer.clip_norm"]
        written = export_deepspeed(first.plan, clip_norm=None if clip == "none" else clip)
        second = import_deepspeed(written, ranks=ranks)
        assert second.plan.fingerprint == first.plan.fingerprint
        assert second.keys["optimizer.clip_norm"] == clip
        assert not second.not_taken or first.plan.parsed.engine == "torch", "our own values are our own"

    @pytest.mark.parametrize(
        ("strategy", "changes", "why"),
        [
            ("ddp", {}, "ZeRO stage 0 shards nothing"),
            ("hsdp", {}, "no replicas of shard groups"),
            ("fsdp+tp2", {}, r"for \+tp it needs"),
            ("fsdp+pp2", {}, r"for \+pp it needs"),
            ("fsdp+cp2", {}, r"for \+cp it needs"),
            ("fsdp", {"precision": "fp8"}, "fp8 has no key"),
            ("deepspeed-zero2", {"micro_batch": None}, "leaves the micro batch open"),
        ],
    )
    def test_a_plan_without_a_twin_is_refused(self, strategy: str, changes: dict[str, Any], why: str) -> None:
        with pytest.raises(PlanError, match=why):
            export_deepspeed(plan_of(strategy, 4, **changes), clip_norm=None)

    def test_all_reasons_at_once(self) -> None:
        with pytest.raises(PlanError) as caught:
            export_deepspeed(plan_of("hsdp+tp2+pp2", 8, micro_batch=None), clip_norm=None)
        assert len(caught.value.problems) == 4

    def test_what_is_not_said_by_deepspeed_is_said_in_words(self) -> None:
        plan = plan_of("fsdp+offload+lora", precision="bf16", recompute="full", seq_len=64, adapter=AdapterOptions())
        notes = "\n".join([*export_notes(plan), *export_losses(plan)])
        for key in set(beside(plan)) - {"device", "strategy"}:
            assert f"{key} " in notes
        assert "2 ranks" in notes
        assert "deepspeed-zero3" in notes

    def test_no_table_beside_for_what_deepspeed_says(self) -> None:
        assert beside(plan_of("deepspeed-zero2")) == {"device": "cpu"}


class TestFiles:
    @pytest.mark.parametrize("case", EXPECTED)
    def test_what_it_becomes(self, case: tuple[str, int, str | None]) -> None:
        name, ranks, engine = case
        found = from_file(name, ranks, engine)
        plan, clip = found.plan, found.keys["optimizer.clip_norm"]
        assert (plan.strategy, plan.precision, plan.micro_batch, plan.grad_accum, clip) == EXPECTED[case]
        assert plan.dims == dims_for(plan.parsed, ranks)
        assert plan.nvme_path == ("/local_nvme" if plan.parsed.nvme else None)

    @pytest.mark.parametrize("case", EXPECTED)
    def test_no_key_is_passed_over(self, case: tuple[str, int, str | None]) -> None:
        name, ranks, engine = case
        found = from_file(name, ranks, engine)
        rows = [*found.taken, *found.same, *found.not_taken, *found.no_effect, *found.open]
        named = {row.key: row for row in rows}
        for path, value in leaves(read_document(FILES / f"{name}.json")):
            above = next((p for p in (path, path.rpartition(".")[0]) if p in named), None)
            assert above is not None, f"{path} is in no row"
            assert above != path or named[path].value == value
        assert all(row.why for row in rows)

    def test_auto_is_refused_with_what_to_put(self) -> None:
        with pytest.raises(PlanError) as caught:
            from_file("hf-auto", 2)
        text = "\n".join(caught.value.problems)
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "bf16.enabled",
        ):
            assert f'{key} is "auto"' in text
            assert AUTO[key] in text

    def test_auto_where_the_plan_does_not_need_it_is_left_open(self) -> None:
        document = read_document(FILES / "hf-auto.json")
        document |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": 4}
        document |= {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
        found = import_deepspeed(document, ranks=2)
        said = {row.key: row.why for row in found.open}
        assert "learning_rate" in said["optimizer.params.lr"]
        assert "max_grad_norm" in said["gradient_clipping"]
        assert "auto" not in json.dumps(found.keys)
        assert "zero_optimization.reduce_bucket_size" in {row.key for row in found.not_taken}

    def test_everything_wrong_is_said_at_once(self) -> None:
        with pytest.raises(PlanError) as caught:
            from_file("not-run", 4)
        text = "\n".join(caught.value.problems)
        for words in (
            "did you mean 'gradient_clipping'?",
            "did you mean 'overlap_comm'?",
            "did you mean 'weight_decay'?",
            "tensor_parallel.autotp_size is 4",
            "pipeline.stages is 2",
            "zero_hpz_partition_size is 8",
            "zero_quantized_weights is true",
            "amp is",
            'gradient_allreduce_op is "sum"',
            "max_grad_norm",
            "both true",
            "add offload_param",
            "bf16_master_weights_and_grads",
            "64 is not train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 2 × ranks 4 = 32",
        ):
            assert words in text


def leaves(table: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """Dotted paths of all values that are no tables, and of empty tables."""
    found = []
    for name, value in table.items():
        where = f"{path}.{name}" if path else name
        found += leaves(value, where) if isinstance(value, dict) and value else [(where, value)]
    return found


class TestBatch:
    @pytest.mark.parametrize(
        ("given", "solved"),
        [
            ((64, 4, 4, 4), (4, 4, 4)),
            ((64, 4, None, 4), (4, 4, 4)),
            ((64, None, 4, 4), (4, 4, 4)),
            ((None, 4, 4, 4), (4, 4, 4)),
            ((64, None, None, 4), (16, 1, 4)),
            ((None, 4, None, 4), (4, 1, 4)),
            ((64, 4, 4, None), (4, 4, 4)),
        ],
    )
    def test_the_third_is_computed(self, given: tuple[Any, ...], solved: tuple[int, ...]) -> None:
        assert solve_batch(*given)[0] == solved

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ((64, 4, 2, 4), "train_batch_size 64 is not .* = 32; set train_batch_size to 32, or run on 8 ranks"),
            ((60, 4, 2, 4), "= 32; set train_batch_size to 32$"),
            (
                (60, 8, None, 4),
                "is not a multiple of train_micro_batch_size_per_gpu 8 × ranks 4 = 32; set it to 32 or 64",
            ),
            ((3, None, None, 4), "is not a multiple of ranks 4; set it to 4"),
            ((60, 8, 2, None), "is not a multiple of .* = 16; set it to 48 or 64"),
            ((None, None, 4, 4), "both missing"),
            ((64, None, 4, None), "number of ranks is not known"),
            ((None, 4, None, None), "number of ranks is not known"),
        ],
    )
    def test_what_has_no_solution(self, given: tuple[Any, ...], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            solve_batch(*given)

    @pytest.mark.parametrize("value", [0, -4, 2.5, "8", True, [4]])
    def test_no_whole_number(self, value: Any) -> None:
        assert any("must be an integer" in line for line in problems({"train_batch_size": value}))


class TestPlaces:
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    @pytest.mark.parametrize("state", ["none", "cpu", "nvme"])
    @pytest.mark.parametrize("weights", ["none", "cpu", "nvme"])
    def test_a_pair_is_a_plan_or_refused(self, stage: int, state: str, weights: str) -> None:
        """Every combination is either written again as it was, or no plan."""
        path = {"nvme_path": "/d"}
        tables = {"offload_optimizer": {"device": state, **(path if state == "nvme" else {})}}
        tables |= {"offload_param": {"device": weights, **(path if weights == "nvme" else {})}}
        config = {"train_batch_size": 8, "zero_optimization": {"stage": stage, **tables}}
        good = {0: [], 1: ["cpu none"], 2: ["cpu none"], 3: ["cpu cpu", "nvme nvme", "nvme cpu"]}[stage]
        if f"{state} {weights}" not in ["none none", *good]:
            assert any("is not a plan that Shardwise runs" in line for line in problems(config))
            return
        plan = import_deepspeed(config, ranks=2).plan
        if stage:
            written = export_deepspeed(plan, clip_norm=None)["zero_optimization"]
            assert written["stage"] == stage
            assert written.get("offload_optimizer", {}).get("device", "none") == state
            assert written.get("offload_param", {}).get("device", "none") == weights

    def test_nvme_needs_one_folder(self) -> None:
        tables = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "nvme_path": "/a"}}
        assert any("nvme_path is null" in line for line in problems({"zero_optimization": {"stage": 3, **tables}}))
        tables["offload_optimizer"] = {"device": "nvme", "nvme_path": "/b"}
        assert any("one folder" in line for line in problems({"zero_optimization": {"stage": 3, **tables}}))

    def test_the_old_switches(self) -> None:
        zero = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}
        config = {"train_batch_size": 8, "zero_optimization": zero}
        assert import_deepspeed(config, ranks=2).plan.strategy == "deepspeed-zero3+offload"
        assert import_deepspeed({"train_batch_size": 8, "zero_optimization": True}, ranks=2).plan.parsed.base == "zero1"
        text = "\n".join(problems({"zero_optimization": zero | {"cpu_offload": "yes", "offload_param": None}}))
        assert 'cpu_offload is "yes"; it must be true or false' in text
        assert "has both 'cpu_offload_param' and 'offload_param'" in text

    def test_wrong_words(self) -> None:
        zero = {"stage": 4, "offload_optimizer": {"device": "gpu"}}
        text = "\n".join(problems({"zero_optimization": zero}))
        assert "stage is 4; it must be 0, 1, 2 or 3" in text
        assert 'device is "gpu"; it must be none, cpu or nvme' in text


class TestBeside:
    def test_contradictions(self) -> None:
        table = {"device": "cuda", "strategy": "zero2", "seq_len": 8, "micro_batch": 4, "seqlen": 9}
        config = {"zero_optimization": {"stage": 3}, BESIDE: table}
        text = "\n".join(problems(config, device="cpu", given={"seq_len": 16}))
        assert "shardwise.device is 'cuda', but 'cpu' is asked for" in text
        assert "shardwise.strategy is 'zero2', but zero_optimization says fsdp" in text
        assert "shardwise.seq_len is 8, but 16 is asked for" in text
        assert "shardwise.micro_batch: DeepSpeed's own keys set it" in text
        assert "shardwise.seqlen: no such key of a plan (did you mean 'seq_len'?)" in text

    def test_wrong_values(self) -> None:
        assert any("shardwise.recompute" in line for line in problems({BESIDE: {"recompute": "all"}}))
        assert any("must be a table" in line for line in problems({BESIDE: 3}))

    def test_the_engine_can_be_chosen(self) -> None:
        plan = plan_of("fsdp+offload", precision="bf16")
        assert there_and_back(plan, engine="deepspeed").strategy == "deepspeed-zero3+offload"
        assert there_and_back(plan_of("deepspeed-zero2"), engine="torch").strategy == "zero2"

    def test_fp16_is_sent_to_pytorch(self) -> None:
        config = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
        assert any("--engine torch" in line for line in problems(config))
        assert import_deepspeed({"train_batch_size": 8, **config}, ranks=2, engine="torch").plan.precision == "fp16"

    @pytest.mark.parametrize(
        ("strategy", "twin"),
        [
            ("deepspeed-zero1", "zero1"),
            ("deepspeed-zero1+offload", "zero2+offload"),
            ("deepspeed-zero2+offload", "zero2+offload"),
            ("deepspeed-zero3", "fsdp"),
            ("deepspeed-zero3+nvme", "fsdp+offload"),
        ],
    )
    def test_fp16_names_the_strategy_that_runs_it(self, strategy: str, twin: str) -> None:
        """What is named is a plan that this version runs, whatever the engine's own words."""
        (line,) = axis_problems(plan_of(strategy, precision="fp16"))
        assert f"use precision bf16, or strategy {twin}, which runs fp16" in line
        runnable(Plan(strategy=twin, dims=dims_for(parse_strategy(twin), 2), precision="fp16"))

    def test_an_optimizer_offloaded_alone_is_sent_to_what_runs(self) -> None:
        """Each of the three ways that the message names is imported."""
        zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        (line,) = problems({"zero_optimization": zero})
        ways: dict[str, dict[str, Any]] = {
            "deepspeed-zero3+offload": zero | {"offload_param": {"device": "cpu"}},
            "deepspeed-zero2+offload": zero | {"stage": 2},
            "deepspeed-zero3": {"stage": 3},
        }
        for strategy, table in ways.items():
            assert f"({strategy})" in line
            found = import_deepspeed({"train_batch_size": 8, "zero_optimization": table}, ranks=2)
            assert found.plan.strategy == strategy


class TestOptimizer:
    @pytest.mark.parametrize(
        ("table", "keys"),
        [
            (
                {"type": "AdamW", "params": {"lr": 1e-4}},
                {"name": "adamw", "lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
            ),
            ({"type": "adam", "params": {"weight_decay": 0.1}}, {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}),
            ({"type": "AdamW", "params": {"torch_adam": True}}, {"name": "adamw", "weight_decay": 0.01}),
            ({"type": "Adam", "params": {"adam_w_mode": False}}, {"name": "adamw", "weight_decay": 0.0}),
            (
                {"type": "Adam", "params": {"adam_w_mode": False, "lr": 1e-3, "weight_decay": 0.1}},
                {"factory": "torch.optim:Adam", "lr": 1e-3, "kwargs.weight_decay": 0.1},
            ),
            ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, {"name": "sgd", "lr": 0.1, "momentum": 0.9}),
            (
                {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
                {"factory": "torch.optim:SGD", "kwargs.momentum": 0.9, "kwargs.nesterov": True},
            ),
            ({"type": "RMSprop", "params": {"lr": 0.1, "alpha": 0.9}}, {"factory": "torch.optim:RMSprop"}),
        ],
    )
    def test_an_optimizer_becomes_keys(self, table: dict[str, Any], keys: dict[str, Any]) -> None:
        found = read_training({"optimizer": table})
        assert not found.problems
        assert {f"optimizer.{key}": value for key, value in keys.items()}.items() <= found.keys.items()
        assert found.keys["optimizer.schedule"] == "constant"

    @pytest.mark.parametrize("name", ["Lamb", "OneBitAdam", "Muon"])
    def test_deepspeeds_own_are_said_to_be_missing(self, name: str) -> None:
        found = read_training({"optimizer": {"type": name, "params": {"lr": 1.0, "freeze_step": 2}}})
        assert {row.key for row in found.differs} == {
            f"optimizer.{key}" for key in ("type", "params.lr", "params.freeze_step")
        }
        assert "optimizer.name" not in found.keys

    def test_what_is_no_optimizer(self) -> None:
        assert "did you mean 'AdamW'?" in read_training({"optimizer": {"type": "AdmW", "params": {}}}).problems[0]
        assert read_training({"optimizer": "AdamW"}).problems
        assert read_training({"scheduler": {"type": "WarmUpLR"}}).problems
        assert read_training({"scheduler": {"type": "WarmupLR", "params": 3}}).problems
        assert read_training({"gradient_clipping": "much"}).problems

    @pytest.mark.parametrize(("value", "norm"), [(0, "none"), (0.0, "none"), (2, 2.0), (None, 1.0)])
    def test_clipping(self, value: float | None, norm: Any) -> None:
        config = {} if value is None else {"gradient_clipping": value}
        assert read_training(config).keys["optimizer.clip_norm"] == norm

    def test_what_the_config_file_would_refuse(self) -> None:
        config = {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "betas": [0.9]}}}
        text = "\n".join(problems(config))
        assert "optimizer.lr" in text
        assert "optimizer.betas" in text

    @needs_deepspeed
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize(
        ("name", "params", "late"),
        [
            ("WarmupLR", {}, 2),
            ("WarmupDecayLR", {"total_num_steps": 40}, 2),
            ("WarmupCosineLR", {"total_num_steps": 40, "cos_min_ratio": 0.1}, 1),
        ],
    )
    def test_the_schedule_is_deepspeeds_but_so_many_steps_later(
        self, name: str, params: dict[str, Any], late: int
    ) -> None:
        import torch
        from deepspeed.runtime import lr_schedules

        params = {**params, "warmup_num_steps": 10, "warmup_type": "linear"}
        params |= {} if name == "WarmupCosineLR" else {"warmup_max_lr": 0.5}
        table = {"type": name, "params": params}
        found = read_training({"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "scheduler": table})
        keys = {key.partition(".")[2]: value for key, value in found.keys.items() if key.startswith("optimizer.")}
        rate = learning_rate(OptimizerTable.model_validate(keys), found.keys.get("train.steps", 40))
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        theirs = getattr(lr_schedules, name)(optimizer, **params)
        rates = []
        for _ in range(40):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            theirs.step()
        warm = [0.0, *(rate(n) if n else 0.0 for n in range(12))]
        assert rates[:11] == pytest.approx(warm[:11]), "the warm-up is two steps late"
        assert rates[14:] == pytest.approx([rate(n + 1 - late) for n in range(14, 40)])


class TestAgainstDeepSpeed:
    """The same files under DeepSpeed's own class."""

    @needs_deepspeed
    @pytest.mark.filterwarnings("ignore")
    def test_the_tables_are_deepspeeds_fields_and_defaults(self) -> None:
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from deepspeed.runtime.zero.offload_config import (
            DeepSpeedZeroOffloadOptimizerConfig,
            DeepSpeedZeroOffloadParamConfig,
        )

        pairs = {
            "zero_optimization": DeepSpeedZeroConfig,
            "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
            "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
            "bf16": DeepSpeedBF16Config,
            "fp16": DeepSpeedFP16Config,
        }
        for path, theirs in pairs.items():
            names = {field.alias or name: field for name, field in theirs.model_fields.items()}
            missing = set(names) - set(TABLES[path])
            assert not missing, f"{path}: {missing}"
            for name, field in names.items():
                key: Key = TABLES[path][name]
                if key.default is not None:
                    assert key.default == field.default, f"{path}.{name}"

    @needs_deepspeed
    @pytest.mark.filterwarnings("ignore")
    def test_top_level_keys_are_all_known(self) -> None:
        from deepspeed.runtime import config, constants

        removed = config._REMOVED_TOP_LEVEL_CONFIG_KEYS
        assert {name for name, key in TABLES[""].items() if key.fate == "removed"} == set(removed)
        words = {
            getattr(constants, name.removesuffix("_FORMAT"))
            for name in dir(constants)
            if name.endswith("_FORMAT") and hasattr(constants, name.removesuffix("_FORMAT"))
        }
        assert len(words) > 10
        assert not words - set(TABLES[""])

    @needs_deepspeed
    def test_deepspeed_reads_what_is_written_and_the_files_alike(self) -> None:
        plans = [plan_of(strategy, ranks, precision="bf16") for strategy in TWINS for ranks in (2, 8)]
        plans += [plan_of(strategy, 2) for strategy in ("deepspeed-zero1", "fsdp")]
        written = [(export_deepspeed(plan, clip_norm=0.5), plan.dims.dp) for plan in plans]
        files = []
        for name, ranks, engine in EXPECTED:
            if name == "stage0-fp32":
                continue
            found = from_file(name, ranks, engine)
            clip = found.keys["optimizer.clip_norm"]
            files += [(read_document(FILES / f"{name}.json"), ranks)]
            files += [(export_deepspeed(found.plan, clip_norm=None if clip == "none" else clip), ranks)]
        read = run_world(effective, 2, written + files)
        assert read[0] == read[1]
        for plan, found in zip(plans, read[0], strict=False):
            strategy = plan.parsed
            assert found["batch"] == [plan.global_batch, plan.micro_batch, plan.grad_accum]
            assert found["stage"] == STAGES[strategy.base]
            assert found["precision"] == plan.precision
            assert found["clip"] == 0.5
            state = "nvme" if strategy.nvme else "cpu" if strategy.offload else "none"
            weights = "none" if strategy.base != "fsdp" else "cpu" if strategy.offload else state
            assert found["places"] == [state, weights]
            assert found["paths"] == [plan.nvme_path if place == "nvme" else None for place in found["places"]]
        rest = read[0][len(plans) :]
        assert rest[0::2] == rest[1::2], "a file and what it was written as again"


def effective(documents: list[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    """What DeepSpeed makes of each configuration with so many data-parallel ranks."""
    import warnings

    warnings.simplefilter("ignore")
    deepspeed = deepspeed_available.import_deepspeed()  # compiles no extension, which takes a minute
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.init_distributed("gloo", verbose=False)

    class Ranks:
        def __init__(self, number: int) -> None:
            self.number = number

        def get_data_parallel_world_size(self) -> int:
            return self.number

    results = []
    for document, ranks in documents:
        found = DeepSpeedConfig(document, mpu=None if ranks == 2 else Ranks(ranks))
        zero = found.zero_config
        offload = [zero.offload_optimizer, zero.offload_param]
        on = [
            name for name, table in (("bf16", found.bfloat16_config), ("fp16", found.float16_config)) if table.enabled
        ]
        results.append(
            {
                "batch": [
                    found.train_batch_size,
                    found.train_micro_batch_size_per_gpu,
                    found.gradient_accumulation_steps,
                ],
                "stage": int(zero.stage),
                "precision": on[0] if on else "fp32",
                "clip": found.gradient_clipping,
                "places": [
                    "none" if table is None else str(getattr(table.device, "value", table.device)) for table in offload
                ],
                "paths": [
                    None if table is None or table.nvme_path is None else str(table.nvme_path) for table in offload
                ],
            }
        )
    return results
