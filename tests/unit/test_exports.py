"""Exports to Accelerate, Trainer, Fabric and torchtitan: each is loaded by the tool itself, and says what it lacks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.errors import PlanError
from shardwise.interop.accelerate_yaml import export_accelerate
from shardwise.interop.fabric_script import export_fabric
from shardwise.interop.plan_parts import parts_in_use
from shardwise.interop.pytorch.script_problems import script_problems
from shardwise.interop.targets import TARGETS, export_to
from shardwise.interop.titan_config import export_titan, titan_fields
from shardwise.interop.trainer_json import export_trainer
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.train.config import Config
from shardwise.train.optimizer import learning_rate

BASE = {"micro_batch": 2, "grad_accum": 4, "seq_len": 128, "device": "cuda"}


def plan_of(strategy: str = "fsdp", **keys: Any) -> Plan:
    sharded = not strategy.startswith("ddp")
    return Plan.model_validate(
        {**BASE, "strategy": strategy, "dims": {"dp_shard" if sharded else "dp_replicate": 8}, **keys}
    )


def config_of(**tables: dict[str, Any]) -> Config:
    document: dict[str, dict[str, Any]] = {
        "model": {"factory": "tests.models:byte_decoder"},
        "data": {"path": "python:json", "seq_len": 128},
        "train": {"steps": 100},
    }
    for table, keys in tables.items():
        document[table] = document.get(table, {}) | keys
        document[table] = {key: value for key, value in document[table].items() if value is not None}
    return Config.model_validate(document)


def lost(lines: list[str], *words: str) -> bool:
    return all(any(word in line for line in lines) for word in words)


class TestAccelerate:
    def read(self, plan: Plan, tmp_path: Path) -> tuple[Any, dict[str, str]]:
        """Accelerate's own reading of the file: the configuration, and the variables that its launcher sets."""
        from accelerate.commands.config.config_args import load_config_from_file
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_multi_gpu_env

        file = tmp_path / "accelerate.yaml"
        file.write_text(export_accelerate(plan, 1.0).text)
        config = load_config_from_file(str(file))
        arguments = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
        with (
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch("torch.cuda.device_count", return_value=8),
        ):
            arguments, _, _ = _validate_launch_command(arguments)
        with mock.patch.dict(os.environ):
            return config, prepare_multi_gpu_env(arguments)

    @pytest.mark.parametrize(("strategy", "reshards"), [("fsdp", True), ("zero2", False)])
    def test_fsdp2_as_the_plan_has_it(self, strategy: str, reshards: bool, tmp_path: Path) -> None:
        from accelerate.utils import FullyShardedDataParallelPlugin

        config, variables = self.read(plan_of(strategy, recompute="full", precision="bf16"), tmp_path)
        assert (config.num_processes, config.mixed_precision) == (8, "bf16")
        with mock.patch.dict(os.environ, variables):
            plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is reshards
        assert plugin.activation_checkpointing is True
        plugin.set_mixed_precision("bf16")
        assert plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16  # what `reduced_in_16_bits` says is lost

    def test_ddp_and_what_the_script_does(self, tmp_path: Path) -> None:
        config, _ = self.read(plan_of("ddp"), tmp_path)
        assert config.distributed_type.value == "MULTI_GPU"
        found = export_accelerate(plan_of("ddp"), 1.0)
        assert not found.lost
        assert lost(found.notes, "gradient_accumulation_steps=4", "batch_size=2", "clip_grad_norm_")

    def test_what_is_lost(self) -> None:
        found = export_accelerate(plan_of(precision="bf16", recompute="selective", loss_chunks=4, prefetch=2), None)
        assert lost(found.lost, "reduction in fp32", "recompute selective", "loss_chunks 4", "prefetch 2")
        assert lost(export_accelerate(plan_of(device="cpu"), None).lost, "runs DDP on a CPU")

    @pytest.mark.parametrize("strategy", ["zero1", "fsdp+pp2", "ddp+tp2", "ddp+cp2"])
    def test_without_an_equivalent(self, strategy: str) -> None:
        dims = {"pp": 2, "dp_shard": 4} if "pp" in strategy else {"dp_replicate": 8}
        dims = {"dp_replicate": 4, strategy[4:6]: 2} if strategy.startswith("ddp+") else dims
        with pytest.raises(PlanError, match=r"Accelerate|accelerate"):
            export_accelerate(plan_of(strategy, dims=dims), None)


class TestTrainer:
    def read(self, plan: Plan, config: Config) -> Any:
        from transformers import TrainingArguments

        document = export_trainer(plan, config, config.optimizer.clip_norm).document
        assert document is not None
        with mock.patch.dict(os.environ):  # they set variables for FSDP
            return TrainingArguments(**{**document, "use_cpu": True, "bf16": False, "report_to": "none"})

    def test_the_arguments(self) -> None:
        table = {"lr": 3e-4, "betas": [0.8, 0.9], "weight_decay": 0.1, "clip_norm": "none", "schedule": "linear"}
        arguments = self.read(plan_of("ddp", device="cpu"), config_of(optimizer=table, checkpoint={"every": 7}))
        assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 4)
        assert (arguments.learning_rate, arguments.adam_beta1, arguments.adam_beta2) == (3e-4, 0.8, 0.9)
        assert (arguments.max_grad_norm, arguments.max_steps, arguments.save_steps) == (0.0, 100, 7)
        assert arguments.average_tokens_across_devices is True

    @pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
    def test_fsdp2(self, strategy: str) -> None:
        arguments = self.read(plan_of(strategy), config_of())
        assert arguments.fsdp_plugin_args["fsdp_version"] == 2
        assert arguments.fsdp_plugin_args["reshard_after_forward"] is (strategy == "fsdp")

    @pytest.mark.parametrize(
        "table",
        [
            {"schedule": "cosine", "warmup_steps": 10},
            {"schedule": "cosine", "warmup_steps": 10, "min_lr_ratio": 0.1},
            {"schedule": "linear", "min_lr_ratio": 0.2},
            {"schedule": "constant", "warmup_steps": 5},
            {"schedule": "wsd", "warmup_steps": 5, "decay_fraction": 0.3},
        ],
    )
    def test_the_rates_come_one_step_later_as_is_said(self, table: dict[str, Any]) -> None:
        from transformers import get_scheduler

        config, plan = config_of(optimizer=table), plan_of("ddp")
        arguments = self.read(plan, config)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
        kind, more = arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs or {}
        scheduler = get_scheduler(kind, optimizer, int(arguments.warmup_steps), 100, scheduler_specific_kwargs=more)
        ours = learning_rate(config.optimizer, 100)
        theirs = []
        for _ in range(100):
            theirs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert theirs[1:] == pytest.approx([ours(step) for step in range(1, 100)], rel=1e-6, abs=1e-12)
        assert lost(export_trainer(plan, config, 1.0).lost, "a step later")

    def test_what_is_lost(self) -> None:
        keys = {"weight_decay": 0.1}
        train = {"ema_decay": 0.9, "z_loss": 1e-4}
        found = export_trainer(plan_of(precision="bf16"), config_of(optimizer=keys, train=train), 1.0)
        wsd = config_of(optimizer={"schedule": "wsd", "min_lr_ratio": 0.1, "warmup_steps": 5})
        assert lost(export_trainer(plan_of("ddp"), wsd, 1.0).lost, "warm-up begins at 0.1")
        assert lost(found.lost, "no biases and no norms", "train.ema_decay", "train.z_loss", "reduction in fp32")
        assert lost(export_trainer(plan_of(device="cpu"), config_of(), 1.0).lost, "DDP on a CPU")


@pytest.mark.filterwarnings("ignore:The `srun` command")
class TestFabric:
    @pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
    def test_it_trains(self, strategy: str) -> None:
        with mock.patch.dict(os.environ):  # Fabric makes this process the only rank
            self.train(strategy)

    def train(self, strategy: str) -> None:
        plan = plan_of(strategy, device="cpu", dims={"dp_shard": 1}, recompute="full")
        made: dict[str, Any] = {}
        exec(export_fabric(plan, 1.0).text, made)
        fabric = made["fabric"]()
        torch.manual_seed(0)
        fabric.launch()
        model = fabric.setup(Blocks())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().sum()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[2] < losses[0]
        kinds = {type(part).__name__ for part in model.modules()}
        assert any(name.startswith("FSDP") for name in kinds) == (strategy != "ddp")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def test_without_an_equivalent(self) -> None:
        with pytest.raises(PlanError, match="deepspeed"):
            export_fabric(plan_of("deepspeed-zero2"), None)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


class TestTitan:
    PLANS = (
        plan_of(precision="bf16", recompute="full"),
        plan_of("zero2", compile=True, recompute="selective"),
        plan_of("fsdp+tp2+pp2", dims={"dp_shard": 2, "tp": 2, "pp": 2}, pipeline_schedule="zbv", virtual_stages=2),
    )

    @pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.strategy)
    def test_the_file_is_python_with_the_plans_degrees(self, plan: Plan) -> None:
        found = export_titan(plan, config_of(), 1.0)
        compile(found.text, "titan.py", "exec")
        fields = titan_fields(plan, config_of(), 1.0)
        assert fields["training.global_batch_size"] == plan.global_batch
        assert fields["parallelism.data_parallel_shard_degree"] == plan.dims.dp_shard
        assert all(f"config.{name} = " in found.text for name in fields)

    @pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.strategy)
    def test_torchtitans_own_classes_have_the_fields(self, plan: Plan) -> None:
        configs = pytest.importorskip("torchtitan.config.configs", reason="torchtitan is not installed")
        scheduler = pytest.importorskip("torchtitan.components.optimizer.lr_scheduler", reason="torchtitan's packages")
        kinds = {
            "training": configs.TrainingConfig,
            "parallelism": configs.ParallelismConfig,
            "compile": configs.CompileConfig,
            "debug": configs.DebugConfig,
            "lr_scheduler": scheduler.LRSchedulersContainer.Config,
        }
        given: dict[str, dict[str, Any]] = {}
        for name, value in titan_fields(plan, config_of(), 1.0).items():
            table, _, key = name.partition(".")
            assert key in {field.name for field in dataclasses.fields(kinds[table])}, name
            given.setdefault(table, {})[key] = value
        for table, keys in given.items():
            kinds[table](**keys)

    def test_what_is_lost(self) -> None:
        train = {"steps": None, "epochs": 1, "z_loss": 1e-4}
        config = config_of(model={"freeze": ["*embed*"]}, train=train, optimizer={"name": "muon"})
        found = export_titan(plan_of(device="cpu", loss_chunks=2), config, None)
        assert lost(
            found.lost,
            "device cpu",
            "loss_chunks",
            "train.epochs",
            "train.z_loss",
            "muon",
            "no clipping",
            "model.freeze",
        )


def test_every_part_of_a_plan_is_kept_or_lost_somewhere() -> None:
    """A part that a plan gains later has to be thought of: `parts_in_use` finds it by its declaration."""
    plan = plan_of(recompute="full", loss_chunks=2, compile=True, prefetch=2, gradient_sync="every")
    assert set(parts_in_use(plan)) == {"recompute", "loss_chunks", "compile", "prefetch", "gradient_sync"}
    assert set(TARGETS) == {"pytorch", "accelerate", "trainer", "fabric", "torchtitan", "deepspeed"}


def test_some_recomputed_blocks_are_written_or_named() -> None:
    plan = plan_of(recompute="full", recompute_layers=2)
    assert "        if block in blocks[:2]:\n            checkpoint(block)\n" in export_fabric(plan, None).text
    titan = export_titan(plan, None, 1.0).lost
    for lines in (titan, export_accelerate(plan, None).lost, export_trainer(plan, config_of(), 1.0).lost):
        assert any(line.startswith("recompute_layers 2: ") for line in lines), lines


@pytest.mark.parametrize("name", [name for name in TARGETS if not TARGETS[name].needs_config])
def test_types_that_no_file_says_are_not_lost(name: str) -> None:
    plan = Plan(strategy="fsdp", dims=ParallelDims(dp_shard=2), micro_batch=1, weights="compute")
    with pytest.raises(PlanError, match=f"no file for {name} says"):
        export_to(name, plan, None, 1.0, None)


def test_arguments_of_the_script_are_names() -> None:
    config = config_of(model={"config": None, "factory": "a:b", "kwargs": {"x): print(1) #": 1, "width": 2, "for": 3}})
    wrong = [line for line in script_problems(Plan(strategy="ddp", dims=ParallelDims()), config) if "kwargs" in line]
    assert len(wrong) == 2 and "'for' is no name of an argument" in wrong[1]
