"""Utilisation from plain facts: peaks, axes and their links, and what stays unknown."""

from __future__ import annotations

import pytest

from shardwise.cost.flops import palm_flops
from shardwise.hardware.gpus import find_gpu
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.measure.utilisation import (
    StepWork,
    axis_uses,
    group_of,
    peak_of,
    utilisation,
    utilisation_lines,
)
from shardwise.model.load_model import load_profile
from shardwise.plan.dims import AXES, ParallelDims

WORK = StepWork(parameters=10**9, tokens=2**20, model_flops=8e15, executed_flops=10e15)
NODES = parse_cluster("2x8xH100-SXM")


def test_mfu_and_hfu_are_parts_of_the_peak_of_all_devices():
    found = utilisation(WORK, 2.0, ParallelDims(dp_shard=16), "bf16", NODES)
    assert found.peak_flops == pytest.approx(989e12, rel=0.01)
    assert found.model_flops_per_s == 8e15 / 2 / 16 and found.executed_flops_per_s == 10e15 / 2 / 16
    assert found.mfu == pytest.approx(8e15 / 2 / 16 / found.peak_flops)
    assert found.hfu == pytest.approx(1.25 * found.mfu)
    assert found.model_flops_per_token == 8e15 / 2**20
    assert not found.unknown


def test_on_a_cpu_flops_are_said_and_no_part_of_a_peak():
    found = utilisation(WORK, 2.0, ParallelDims(dp_replicate=2), "fp32", parse_cluster("2xcpu"))
    assert found.mfu is None and found.hfu is None and found.peak_flops is None
    assert found.model_flops_per_s == 2e15
    assert "CPU" in found.unknown["peak"]
    text = "\n".join(utilisation_lines(found))
    assert "2 PFLOP/s a device" in text and "peak unknown: no peak is known for a CPU" in text and "MFU" not in text


def test_fewer_hardware_flops_than_model_flops_are_explained():
    usual = utilisation(WORK, 2.0, ParallelDims(dp_replicate=2), "fp32")
    assert "embeddings" not in "".join(utilisation_lines(usual))
    fewer = utilisation(WORK.model_copy(update={"executed_flops": 6e15}), 2.0, ParallelDims(dp_replicate=2), "fp32")
    line = next(line for line in utilisation_lines(fewer) if line.startswith("hardware FLOPs"))
    assert "fewer than the model FLOPs" in line and "embeddings that are only looked up" in line


def test_what_was_not_counted_stays_unknown_with_its_reason():
    work = StepWork(parameters=5, tokens=None, model_flops=None, executed_flops=None, unknown={"model FLOPs": "why"})
    found = utilisation(work, 1.0, ParallelDims(), "bf16", NODES)
    assert found.mfu is None and found.executed_flops_per_s is None and found.model_flops_per_token is None
    assert utilisation_lines(found) == ["model FLOPs unknown: why"]


def test_fp32_on_tensor_cores_is_held_against_their_peak():
    gpu = find_gpu("A100-80GB")
    assert peak_of(gpu, "fp32")[0] == pytest.approx(19.5e12, rel=0.01)
    assert peak_of(gpu, "fp32", tf32=True)[0] == pytest.approx(156e12, rel=0.01)
    assert peak_of(gpu, "bf16", tf32=True)[0] == peak_of(gpu, "bf16")[0]
    assert peak_of(gpu, "fp8")[0] == peak_of(gpu, "bf16")[0]
    assert "A100" in peak_of(gpu, "bf16")[1]
    assert peak_of(None, "bf16") == (None, "")
    assert peak_of(find_gpu("V100"), "bf16") == (None, "")


@pytest.mark.parametrize("dims", [ParallelDims(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2), ParallelDims(dp_shard=4)])
def test_groups_are_the_ranks_that_differ_on_their_axis_alone(dims):
    places = {rank: dims.place(rank) for rank in range(dims.world_size)}
    for axis in ("pp", "cp", "tp", "dp"):
        others = [name for name in ("pp", "cp", "tp", "dp") if name != axis]
        same = [rank for rank in places if all(getattr(places[rank], name) == 0 for name in others)]
        assert group_of(axis, dims) == tuple(same)
    assert len(group_of("dp_shard × cp", dims)) == dims.dp_shard * dims.cp
    assert set(group_of("dp_replicate", dims)) <= set(group_of("dp", dims))
    full = " × ".join(AXES)
    assert group_of(full, dims) == tuple(range(dims.world_size))
    assert group_of("other ranks", dims) is None


def test_an_axis_is_held_against_the_link_that_it_goes_over():
    dims = ParallelDims(dp_replicate=2, tp=8)
    uses = {
        use.axis: use for use in axis_uses({"dp": {"all_reduce": 10**9}, "tp": {"all_gather": 10**9}}, 0.5, dims, NODES)
    }
    assert uses["dp"].link.startswith("network") and uses["tp"].link == "node, nvlink"
    assert uses["dp"].wire_bytes == 1e9  # 2 (n − 1) / n of the message
    assert uses["tp"].wire_bytes == pytest.approx(7 / 8 * 1e9)
    assert uses["tp"].use == pytest.approx(7 / 8 * 1e9 / 0.5 / NODES.link.bytes_per_s)


def test_messages_count_once():
    dims = ParallelDims(pp=4)
    (use,) = axis_uses({"pp": {"send": 100, "recv": 100, "broadcast": 50}}, 1.0, dims, None)
    assert use.wire_bytes == 150 and use.use is None and use.link == "unknown"


def test_axes_without_a_name_or_without_peers_are_left_out():
    assert axis_uses({"other ranks": {"all_reduce": 5}, "tp": {"all_reduce": 5}}, 1.0, ParallelDims(dp_shard=2)) == ()


@pytest.mark.parametrize(("model", "length"), [("llama-3.1-8b", 1024), ("llama-3.1-8b", 4096), ("gpt2", 1024)])
def test_the_plan_counts_by_the_same_convention(model, length):
    """6 N + 12 L h s by hand from published shapes, against what `plan` predicts MFU with."""
    parameters, layers, width = {"llama-3.1-8b": (8.03e9, 32, 4096), "gpt2": (124.4e6, 12, 768)}[model]
    by_hand = (6 * parameters + 12 * layers * width * length) * length
    assert palm_flops(load_profile(model, seq_len=length)) == pytest.approx(by_hand, rel=2e-3)
