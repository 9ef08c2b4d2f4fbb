"""Facts of a model and of a machine, read and never guessed."""

from __future__ import annotations

import os

import psutil
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from shardwise.errors import PlanError
from shardwise.hardware import cluster
from shardwise.hardware.cluster import ClusterSpec, detect
from shardwise.model.facts import ParameterSpec, itemsize_of
from shardwise.model.read import clean_name, dtype_name, find_blocks, read_model
from shardwise.parallel.activation_checkpointing import apply_recompute
from shardwise.parallel.meta_parameters import parameters_on_meta
from shardwise.plan.workload import Workload
from tests.models import VOCAB, WIDTH, Block, Decoder


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.BatchNorm2d(after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else None


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 7)


class Albert(nn.Module):
    """One block, called three times, under three names."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([block, block, block])


def from_configuration(kind: str, **options: int | bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, vocab_size=32, **options)
    auto = transformers.AutoModelForMaskedLM if kind in ("bert", "albert") else transformers.AutoModelForCausalLM
    with parameters_on_meta():
        return auto.from_config(config)


def numbered(path: str, number: int) -> list[str]:
    return [f"{path}.{index}" for index in range(number)]


class TestBlocks:
    @pytest.mark.parametrize(
        ("kind", "options", "blocks"),
        [
            (
                "llama",
                {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3},
                numbered("model.layers", 3),
            ),
            ("gpt2", {"n_embd": 16, "n_head": 2, "n_layer": 3}, numbered("transformer.h", 3)),
            (
                "bert",
                {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2},
                numbered("bert.encoder.layer", 2),
            ),
        ],
    )
    def test_of_a_transformers_model(self, kind, options, blocks):
        module = from_configuration(kind, **options)
        assert find_blocks(module) == blocks
        inside = sum(p.numel() for block in blocks for p in module.get_submodule(block).parameters())
        spec = read_model(module)
        assert sum(p.num_elements for p in spec.parameters if p.block in blocks) == inside
        assert {p.block for p in spec.parameters} == {None, *blocks}

    def test_of_torchs_own_transformer(self):
        module = nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=8, batch_first=True)
        assert find_blocks(module) == numbered("encoder.layers", 2) + numbered("decoder.layers", 3)

    def test_a_plain_stack_of_leaves(self):
        module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
        assert find_blocks(module) == ["0", "2", "5"], "what has no parameter or no like is no block"

    def test_leaves_count_only_where_there_is_nothing_better(self):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()]))
        assert find_blocks(module) == ["2.0", "2.1"]

    def test_a_first_block_of_another_kind_is_left_out(self):
        module = nn.Sequential(Stem(), Residual(8, 8), Residual(8, 8))
        assert find_blocks(module) == ["1", "2"]

    def test_a_first_block_of_the_same_kind_but_another_shape_is_one_of_them(self):
        module = nn.Module()
        module.stem = nn.Conv2d(3, 8, 7)
        module.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        module.layer2 = nn.Sequential(Residual(8, 16), Residual(16, 16))
        module.head = nn.Linear(16, 10)
        assert find_blocks(module) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]

    def test_two_kinds_that_alternate(self):
        module = nn.ModuleList([Block(), Residual(8, 8), Block(), Residual(8, 8), Stem()])
        assert find_blocks(module) == ["0", "1", "2", "3"]

    def test_the_outermost_repetition_wins(self):
        module = nn.Module()
        module.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
        assert find_blocks(module) == ["stages.0", "stages.1"]

    def test_a_dict_of_blocks(self):
        assert find_blocks(nn.ModuleDict({"a": Block(), "b": Block()})) == ["a", "b"]

    def test_one_of_a_kind_is_not_repeated_but_looked_into(self):
        module = nn.ModuleList([nn.ModuleDict({"inner": nn.ModuleList([Block(), Block()])})])
        assert find_blocks(module) == ["0.inner.0", "0.inner.1"]

    @pytest.mark.parametrize(
        "module", [nn.Linear(2, 2), Block(), nn.ModuleList([Block()]), nn.Module(), nn.Sequential()]
    )
    def test_nothing_is_repeated(self, module):
        assert find_blocks(module) == []

    def test_blocks_without_parameters_are_none(self):
        assert find_blocks(nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Tanh()) for _ in range(3))) == []

    def test_one_block_under_many_names_is_left_whole(self):
        assert find_blocks(Albert()) == []
        module = nn.Module()
        module.first = nn.ModuleList([Block(), Block()])
        module.second = nn.ModuleList([Block(), module.first[0]])
        assert find_blocks(module) == ["first.1", "second.0"]

    def test_a_real_albert(self):
        module = from_configuration(
            "albert", embedding_size=8, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=3
        )
        assert find_blocks(module) == []

    def test_blocks_that_are_tied_to_each_other_are_left_whole(self):
        module = nn.ModuleList(Block() for _ in range(4))
        module[2].up.weight = module[0].up.weight
        assert find_blocks(module) == ["1", "3"]

    def test_a_block_that_is_tied_to_the_outside_is_left_whole(self):
        module = Decoder()
        module.blocks[1].norm.weight = nn.Parameter(torch.ones(WIDTH))
        module.final = nn.LayerNorm(WIDTH)
        module.final.weight = module.blocks[1].norm.weight
        assert find_blocks(module) == ["blocks.0", "blocks.2"]

    def test_a_tie_inside_a_block_does_not_matter(self):
        module = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        module[0][1].weight = module[0][0].weight
        assert find_blocks(module) == ["0", "1"]

    @pytest.mark.parametrize("mode", ["full", "selective"])
    @pytest.mark.parametrize("make", [Decoder, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))])
    def test_recompute_wrapping_changes_no_fact(self, mode, make):
        module = make()
        before = read_model(module)
        assert before.blocks
        apply_recompute(module, mode, before.blocks)
        assert any("_checkpoint_wrapped_module" in name for name, _ in module.named_parameters())
        assert read_model(module) == before
        assert tuple(find_blocks(module)) == before.blocks

    def test_a_block_that_the_user_has_wrapped_is_like_the_others(self):
        module = Decoder(num_blocks=2)
        apply_recompute(module, "full", ["blocks.1"])
        assert find_blocks(module) == ["blocks.0", "blocks.1"]
        module.blocks.append(Stem())
        apply_recompute(module, "full", ["blocks.2"])
        assert find_blocks(module) == ["blocks.0", "blocks.1"], "a wrapper makes no likeness"


class TestModel:
    def test_every_parameter_once_with_its_shape_and_block(self):
        module = Decoder(num_blocks=2)
        spec = read_model(module)
        assert [p.name for p in spec.parameters] == [name for name, _ in module.named_parameters()]
        for parameter, (name, real) in zip(spec.parameters, module.named_parameters(), strict=True):
            assert parameter.shape == tuple(real.shape) and parameter.num_elements == real.numel()
            assert (parameter.itemsize, parameter.dtype) == (4, "float32")
            assert parameter.block == (name[:8] if name.startswith("blocks.") else None)
        assert spec.num_parameters == spec.num_trainable == sum(p.numel() for p in module.parameters())
        assert spec.blocks == ("blocks.0", "blocks.1") and spec.tied == () and spec.batch_norms == ()

    def test_tied_parameters_are_one(self):
        plain, tied = read_model(Decoder()), read_model(Decoder(tied=True))
        assert tied.tied == (("embed.weight", "head.weight"),)
        assert plain.num_parameters - tied.num_parameters == VOCAB * WIDTH
        assert "head.weight" not in [p.name for p in tied.parameters]

    def test_one_block_under_many_names_counts_once(self):
        spec = read_model(Albert())
        assert spec.num_parameters == sum(p.numel() for p in Albert().parameters())
        assert ("blocks.0.up.weight", "blocks.1.up.weight", "blocks.2.up.weight") in spec.tied
        assert {p.block for p in spec.parameters} == {None}

    def test_frozen_parameters_are_held_but_not_trained(self):
        module = Decoder(frozen=True)
        spec = read_model(module)
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        assert frozen and {p.name for p in spec.parameters if not p.trainable} == frozen
        assert spec.num_trainable == sum(p.numel() for p in module.parameters() if p.requires_grad)
        assert spec.num_parameters == read_model(Decoder()).num_parameters

    def test_batch_norms_that_need_the_whole_batch(self):
        module = nn.Module()
        module.stem = nn.BatchNorm1d(4)
        module.stages = nn.ModuleList([Residual(8, 8), Residual(8, 8)])
        module.other = nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm2d(4))
        module.synced = nn.SyncBatchNorm(4)
        assert read_model(module).batch_norms == ("stem", "stages.0.norm", "stages.1.norm")
        apply_recompute(module, "full", ["stages.0", "stages.1"])
        assert read_model(module).batch_norms == ("stem", "stages.0.norm", "stages.1.norm")

    def test_the_meta_device_is_enough(self):
        with torch.device("meta"):
            module = Decoder(tied=True, frozen=True)
        assert read_model(module) == read_model(Decoder(tied=True, frozen=True))

    def test_types_and_sizes(self):
        module = nn.Module()
        module.scalar = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        module.empty = nn.Parameter(torch.ones(0, 3, dtype=torch.bfloat16))
        found = {p.name: (p.num_elements, p.itemsize, p.dtype) for p in read_model(module).parameters}
        assert found == {"scalar": (1, 8, "float64"), "empty": (0, 2, "bfloat16")}

    def test_reading_changes_nothing(self):
        module = Decoder(tied=True)
        before = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
        read_model(module)
        assert {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)} == before

    def test_names_and_sizes_in_words(self):
        assert clean_name("a._checkpoint_wrapped_module.b._checkpoint_wrapped_module.c") == "a.b.c"
        assert dtype_name(torch.bfloat16) == "bfloat16"
        assert [itemsize_of(precision) for precision in ("fp32", "bf16", "fp16")] == [4, 2, 2]

    def test_facts_are_frozen(self):
        spec = read_model(Decoder())
        with pytest.raises(ValidationError):
            spec.parameters[0].trainable = False
        with pytest.raises(ValidationError):
            Workload(optimizer_state=2)
        assert ParameterSpec(name="a", shape=(2, 3, 4), itemsize=4, dtype="x", trainable=True).num_elements == 24


class TestMachine:
    GPUS = (("Some GPU", 80 * 2**30), ("Some GPU", 80 * 2**30))

    def cores(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    def test_the_cpu_is_what_psutil_says_and_ranks_share_it(self):
        total = psutil.virtual_memory().total
        found = detect("cpu", 3)
        assert found == ClusterSpec(
            device="cpu",
            device_name="CPU",
            devices_per_node=3,
            device_memory_bytes=total // 3,
            host_memory_bytes=total,
            cores_per_node=self.cores(),
        )
        assert found.world_size == 3

    def test_a_few_ranks_where_nobody_says_how_many(self):
        assert detect("cpu").devices_per_node == min(2, self.cores())

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_gpus_are_used_where_there_are_some(self, monkeypatch, device):
        monkeypatch.setattr(cluster, "_nvml_devices", lambda: list(self.GPUS))
        found = detect(device)
        assert (found.device, found.device_name, found.devices_per_node) == ("cuda", "Some GPU", 2)
        assert found.device_memory_bytes == 80 * 2**30, "each GPU has its own"
        assert found.host_memory_bytes == psutil.virtual_memory().total
        assert detect(device, 1).devices_per_node == 1
        assert detect(device, 1).device_memory_bytes == 80 * 2**30

    def test_gpus_are_not_looked_at_for_the_cpu(self, monkeypatch):
        monkeypatch.setattr(cluster, "_nvml_devices", lambda: pytest.fail("looked"))
        assert detect("cpu").device == "cpu"

    def test_auto_without_a_gpu_is_the_cpu(self, monkeypatch):
        monkeypatch.setattr(cluster, "_nvml_devices", list)
        assert detect("auto").device == "cpu"

    def test_cuda_without_a_gpu_is_refused(self, monkeypatch):
        monkeypatch.setattr(cluster, "_nvml_devices", list)
        with pytest.raises(PlanError, match="cuda"):
            detect("cuda")

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_more_ranks_than_gpus_are_refused(self, monkeypatch, device):
        monkeypatch.setattr(cluster, "_nvml_devices", lambda: list(self.GPUS))
        with pytest.raises(PlanError, match="3 ranks on 2 × Some GPU"):
            detect(device, 3)

    def test_the_driver_is_asked_for_name_and_memory(self, monkeypatch):
        import pynvml

        closed = []
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: closed.append(True))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: f"GPU {handle}")
        memory = type("Memory", (), {"total": 7, "free": 1, "used": 6})
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: memory)
        assert cluster._nvml_devices() == [("GPU 0", 7), ("GPU 1", 7)]
        assert closed == [True]

    def test_without_a_driver_there_are_no_gpus(self, monkeypatch):
        import pynvml

        def init() -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(pynvml, "nvmlInit", init)
        assert cluster._nvml_devices() == []

    def test_nodes_multiply(self):
        assert ClusterSpec(device="cpu", device_name="CPU", nodes=3, devices_per_node=4).world_size == 12
        assert ClusterSpec(device="cpu", device_name="CPU").device_memory_bytes is None
