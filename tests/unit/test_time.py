"""Step time: its parts, what must make it longer or shorter, and that a search can afford it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from shardwise.cost.flops import mfu, palm_flops
from shardwise.cost.memory.local_shapes import with_stages
from shardwise.cost.time import layer_time
from shardwise.cost.time.collective_time import Calibration, LinkFit
from shardwise.cost.time.cpu_time import SHARED_REDUCE
from shardwise.cost.time.estimate_time import Rates, step_time
from shardwise.cost.time.layer_time import unit_time
from shardwise.cost.time.machine import machine_of
from shardwise.cost.time.step_time import StepTime
from shardwise.cost.time.work_split import WorkSplit
from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import generations
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.architecture import Architecture
from shardwise.model.convnet import RESNET_50, convnet_profile
from shardwise.model.lora import with_adapters
from shardwise.model.profile import ModelProfile
from shardwise.model.transformer import profile_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.program import ProgramTraits
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload

PARTS = (
    "compute_s",
    "recompute_s",
    "exposed_dp_s",
    "exposed_tp_s",
    "exposed_cp_s",
    "pipeline_s",
    "optimizer_s",
    "offload_s",
    "host_s",
)
KERNELS = ("copy", "pointwise", "norm", "loss", "adamw")


def rates(flops_per_s: float = 5e10, bytes_per_s: float = 1e10) -> Rates:
    """A device of one speed whatever the shape."""
    sizes = (64.0, 1024.0)
    curves = (*((name, tuple((size, size / bytes_per_s) for size in (1e4, 1e7))) for name in KERNELS),)
    curves += (("attention", tuple((rows, 256 * rows**2 / flops_per_s) for rows in sizes)),)
    return Rates(
        products=tuple((m, k, n, 2 * m * k * n / flops_per_s) for m in sizes for k in sizes for n in sizes),
        forward=curves,
        backward=curves,
        launch_s=1e-5,
    )


CPU = ClusterSpec(device="cpu", device_name="CPU", devices_per_node=2)


def model(layers: int = 32, hidden: int = 4096, seq_len: int = 4096) -> ModelProfile:
    architecture = Architecture(
        name="test",
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=hidden // 128,
        kv_heads=8,
        head_dim=128,
        ffn=hidden * 7 // 2,
        vocab=128256,
        max_seq_len=131072,
    )
    return profile_of(architecture, seq_len)


SMALL = model()


def predict(
    strategy: str,
    cluster: ClusterSpec | str = "8xA100-80GB",
    profile: ModelProfile = SMALL,
    *,
    micro_batch: int = 1,
    grad_accum: int = 1,
    workload: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **plan: Any,
) -> StepTime:
    found = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    dims = dims_for(parse_strategy(strategy), found.world_size, devices_per_node=found.devices_per_node)
    made = Plan.model_validate(
        {"strategy": strategy, "dims": dims, "micro_batch": micro_batch, "grad_accum": grad_accum}
        | {"seq_len": profile.seq_len, "precision": "bf16", "device": found.device, "loss_parallel": dims.tp > 1}
        | plan
    )
    measured = {key: value for key, value in (options or {}).items() if key in ("rates", "calibration")}
    traits = {key: value for key, value in (options or {}).items() if key not in measured}
    program = {"program": ProgramTraits.model_validate(traits)} if traits else {}
    return step_time(profile, made, Workload.model_validate((workload or {}) | program), found, **measured)


def test_parts_add_up_whatever_the_plan() -> None:
    plans = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp+tp4", "ddp+tp2+pp4", "fsdp+cp2", "fsdp+offload")
    for strategy in (*plans, "zero1+tp2+pp2+cp2", "zero2+pp4"):
        for cluster in ("2x8xA100-80GB", "2x8xH100-SXM"):
            for recompute in ("none", "selective", "full"):
                found = predict(strategy, cluster, micro_batch=2, grad_accum=4, recompute=recompute)
                parts = [getattr(found, part) for part in PARTS]
                assert min(parts) >= -1e-9, (strategy, parts)
                assert sum(parts) == pytest.approx(found.step_s, rel=1e-9), strategy
                assert found.low_s < found.step_s < found.high_s


def test_more_work_takes_longer() -> None:
    base = predict("fsdp").step_s
    assert predict("fsdp", micro_batch=2).step_s > 1.5 * base
    assert predict("fsdp", profile=model(layers=64)).step_s > 1.7 * base
    assert predict("fsdp", profile=model(seq_len=8192)).step_s > 1.9 * base


def test_full_recompute_is_one_more_forward_of_the_blocks() -> None:
    none, full = predict("fsdp", micro_batch=4), predict("fsdp", micro_batch=4, recompute="full")
    selective = predict("fsdp", micro_batch=4, recompute="selective")
    assert none.recompute_s == 0
    assert full.compute_s == pytest.approx(none.compute_s)
    assert 0.2 < full.recompute_s / none.compute_s < 0.4  # a forward is a third of forward and backward
    assert 0 < selective.recompute_s < full.recompute_s


def test_faster_links_never_slow_a_plan_down() -> None:
    cluster = parse_cluster("2x8xA100-80GB")
    assert cluster.network is not None and cluster.link is not None
    for strategy in ("ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp+tp8", "ddp+pp4", "fsdp+cp4"):
        times = []
        for factor in (0.1, 1.0, 10.0):
            link, network = (
                x.model_copy(update={"bytes_per_s": (x.bytes_per_s or 0.0) * factor})
                for x in (cluster.link, cluster.network)
            )
            times.append(predict(strategy, cluster.model_copy(update={"link": link, "network": network})).step_s)
        assert times[0] > times[1] >= times[2], strategy


def test_fsdp_hides_its_gathers_where_there_is_enough_to_compute() -> None:
    short, long = predict("fsdp", micro_batch=1), predict("fsdp", micro_batch=8)
    assert long.exposed_dp_s / long.step_s < 0.05
    assert long.exposed_dp_s / long.step_s < short.exposed_dp_s / short.step_s
    assert predict("fsdp", "8xRTX4090", model(layers=8), micro_batch=1).exposed_dp_s > 0


def test_gradients_are_reduced_once_and_weights_gathered_every_micro_batch() -> None:
    one, many = (predict("ddp", "4x8xA100-80GB", grad_accum=n) for n in (1, 8))
    assert many.exposed_dp_s - one.exposed_dp_s < 0.03 * many.step_s
    slow = parse_cluster("8xRTX4090")
    profile = model(layers=8)
    fsdp = [predict("fsdp", slow, profile, grad_accum=n).exposed_dp_s for n in (2, 3, 4)]
    zero2 = [predict("zero2", slow, profile, grad_accum=n).exposed_dp_s for n in (2, 3, 4)]
    assert fsdp[2] - fsdp[1] == pytest.approx(fsdp[1] - fsdp[0], rel=1e-6)
    assert 0 < zero2[2] - zero2[1] < fsdp[2] - fsdp[1]  # zero2 gathers once a micro batch, fsdp twice


def test_a_pipeline_has_its_bubble() -> None:
    found = [predict("ddp+pp8", grad_accum=n, workload={"framework_overhead": False}) for n in (1, 8, 64)]
    shares = [one.pipeline_s / (one.step_s - one.optimizer_s) for one in found]
    assert shares[0] > 0.75 and shares[0] > shares[1] > shares[2]
    assert shares[2] < 7 / 71 + 0.02  # the head unbalances the stages, which shrinks the others' share
    interleaved = predict("ddp+pp8", grad_accum=8, virtual_stages=4)
    assert interleaved.pipeline_s < found[1].pipeline_s


def test_the_blocks_of_each_stage_are_those_that_run():
    plan = Plan(strategy="ddp+pp4", dims=dims_for(parse_strategy("ddp+pp4"), 8), micro_batch=1, grad_accum=16)
    own = with_stages(SMALL, plan).stage_blocks
    assert own is not None and own != (8, 8, 8, 8), "the head counts, so its stage has fewer blocks"
    free, same, even, odd = (
        predict("ddp+pp4", grad_accum=16, stage_blocks=blocks).step_s
        for blocks in (None, own, (8, 8, 8, 8), (2, 2, 2, 26))
    )
    assert free == same < even and odd > 2 * even
    round_robin = predict("ddp+pp2", grad_accum=16, virtual_stages=2, stage_blocks=(8, 7, 9, 8)).compute_s
    assert round_robin == pytest.approx(predict("ddp+pp2", grad_accum=16, stage_blocks=(17, 15)).compute_s)
    there_and_back = {"pipeline_schedule": "zbv", "virtual_stages": 2, "stage_blocks": (8, 8, 8, 8)}
    ends_together, apart = (
        predict("ddp+pp2", grad_accum=16, **options) for options in (there_and_back, {"stage_blocks": (16, 16)})
    )
    assert ends_together.compute_s > apart.compute_s, "the embedding and the head are on one rank"


def test_stages_of_as_many_blocks_may_have_others():
    layers = [replace(unit, count=1) for unit in SMALL.units for _ in range(unit.count)]
    dear = replace(layers[1], name="dear", ops=layers[1].ops * 3)
    blocks = tuple(dear if at in (11, 12) else unit for at, unit in enumerate(layers))  # of the sixth stage
    usual, slow = (
        predict("ddp+pp16", "2x8xA100-80GB", profile, grad_accum=8, stage_blocks=(2,) * 16).compute_s
        for profile in (SMALL, replace(SMALL, units=blocks))
    )
    assert slow > 1.2 * usual, "which is of the stage with the head"


def test_tensor_parallel_divides_work_and_pays_for_it() -> None:
    one, two = predict("fsdp", micro_batch=2), predict("fsdp+tp2", micro_batch=2)
    assert one.exposed_tp_s == 0 and two.exposed_tp_s > 0
    assert 0.5 < two.compute_s / one.compute_s < 0.65
    assert predict("fsdp+tp2", micro_batch=2, async_tp=True).step_s < two.step_s
    across = predict("fsdp+tp8", parse_cluster("4x2xA100-80GB"))  # tensor parallel over the network
    assert across.exposed_tp_s > 3 * predict("fsdp+tp8").exposed_tp_s


def test_programs_of_before_sequence_parallel_and_flash_attention() -> None:
    new = predict("ddp+tp8", micro_batch=4)
    plain = predict("ddp+tp8", micro_batch=4, sequence_parallel=False)
    assert plain.compute_s > new.compute_s  # norms and residuals are whole on every rank
    slow = predict("ddp+tp8", profile=model(layers=4, seq_len=128), sequence_parallel=False)
    assert slow.exposed_tp_s < predict("ddp+tp8", profile=model(layers=4, seq_len=128)).exposed_tp_s  # half the starts
    unfused = predict("ddp+tp8", micro_batch=4, options={"attention": "unfused"})
    assert unfused.compute_s > 1.1 * new.compute_s
    assert unfused.exposed_tp_s == new.exposed_tp_s


def test_megatron_hides_reductions_that_pytorch_waits_for() -> None:
    hopper = parse_cluster("8xH100-SXM")
    megatron, ours = (
        predict("ddp+tp8", hopper, micro_batch=4, options={"modules": stack}) for stack in ("megatron", "shardwise")
    )
    assert megatron.exposed_tp_s < 0.9 * ours.exposed_tp_s
    assert megatron.compute_s < ours.compute_s  # cuDNN's attention
    flash = {"modules": "megatron", "attention": "flash"}
    assert predict("ddp+tp8", hopper, micro_batch=4, options=flash).compute_s > megatron.compute_s
    not_run, named = (predict("zero1+tp2", hopper, options=o) for o in ({}, {"modules": "megatron"}))
    assert not_run == named, "what this version does not run is timed as Megatron-LM does it"


def test_context_parallel_waits_for_exchanges_that_a_ring_hides() -> None:
    """Long samples over NVLink: a ring computes while it sends; an exchange has nothing beside it, but moves less."""
    ours, ring = (
        predict("fsdp+cp4", "8xH100-SXM", model(layers=4, seq_len=65536), options={"modules": stack})
        for stack in ("shardwise", "torchtitan")
    )
    assert ring.exposed_cp_s == 0 < ours.exposed_cp_s < 0.1 * ours.step_s


def test_whole_weights_beside_an_axis_are_copied_for_each_micro_batch() -> None:
    """FSDP2 over shards of one rank sends nothing to gather, and copies."""
    ours, theirs = (
        predict("ddp+tp2", "8xH100-SXM", micro_batch=1, grad_accum=8, options={"modules": stack, "attention": "flash"})
        for stack in ("shardwise", "megatron")
    )
    assert ours.compute_s > 1.02 * theirs.compute_s


def test_logits_that_are_not_cut_are_gathered() -> None:
    cut, full = (
        predict("fsdp+tp8", "8xA100-80GB", model(layers=2), micro_batch=4, loss_parallel=cut) for cut in (True, False)
    )
    assert full.exposed_tp_s > 1.2 * cut.exposed_tp_s


def test_a_vocabulary_is_padded_where_it_is_said() -> None:
    odd = profile_of(Architecture(
        name="odd", family="gpt", layers=2, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=50257,
    ), 1024)  # fmt: skip
    assert (
        predict("ddp", profile=odd, options={"pads_vocab": True}).compute_s
        < 0.9 * predict("ddp", profile=odd).compute_s
    )


def test_large_products_are_held_back_by_power_only_where_sweeps_do_not_show_it() -> None:
    machine, lasting = machine_of(parse_cluster("A100-80GB"), "bf16"), generations()["ampere"].lasting_flops
    assert 2 * 16384**3 / machine.matmul_s(16384, 16384, 16384, "bf16") < lasting
    assert lasting * 0.9 < 2 * 16384**3 / machine.matmul_s(16384, 16384, 16384, "bf16")
    weak = machine_of(parse_cluster("A100-PCIe-80GB"), "bf16")
    assert weak.matmul_s(16384, 16384, 16384, "bf16") > machine.matmul_s(16384, 16384, 16384, "bf16")


def test_fp8_casts_weights_once_or_every_time_and_leaves_small_products_alone() -> None:
    hopper = parse_cluster("8xH100-SXM")
    times = [predict("ddp", hopper, micro_batch=4, precision=kind).compute_s for kind in ("bf16", "fp8")]
    assert 0.5 < times[1] / times[0] < 0.85
    thin = model(layers=2, hidden=1024, seq_len=64)
    few = [predict("fsdp", hopper, thin, precision=kind).compute_s for kind in ("bf16", "fp8")]
    assert few[1] <= few[0] * 1.001
    machine, block = machine_of(hopper, "fp8"), SMALL.units[1]
    split = WorkSplit(tp=1, cp=1, micro=1, precision="fp8", recompute="none", compiled=True)
    once = unit_time(machine, block, replace(split, casts_weights=False))
    assert once.forward_s < unit_time(machine, block, split).forward_s


def test_small_work_waits_for_the_host() -> None:
    tiny = model(layers=8, hidden=1024, seq_len=128)
    found = predict("ddp", profile=tiny)
    assert found.host_s > 0.3 * found.step_s
    assert predict("ddp", profile=tiny, workload={"compiled": True}).host_s < found.host_s
    assert predict("ddp", profile=tiny, workload={"framework_overhead": False}).host_s == 0
    large = predict("ddp", profile=model(layers=8), micro_batch=8)
    assert large.host_s < 0.05 * large.step_s


def test_compiling_fuses_what_moves_memory() -> None:
    assert predict("fsdp", workload={"compiled": True}).compute_s < 0.98 * predict("fsdp").compute_s


def test_autocast_casts_weights_of_whole_copies() -> None:
    plain, cast = predict("ddp", weights="masters"), predict("ddp")
    assert cast.compute_s > plain.compute_s
    narrow = {"options": {"modules": "megatron"}}
    assert predict("ddp+tp2", **narrow) == predict("ddp+tp2", weights="masters", **narrow)


def test_the_optimizer_moves_its_share() -> None:
    assert predict("fsdp").optimizer_s < predict("ddp").optimizer_s / 4
    assert predict("zero1").optimizer_s < predict("ddp").optimizer_s / 2
    assert predict("ddp", workload={"optimizer": "sgd"}).optimizer_s < predict("ddp").optimizer_s
    lora = predict("ddp", profile=with_adapters(SMALL, "lora"))
    assert lora.optimizer_s < predict("ddp").optimizer_s / 10


def test_zero1_sends_what_each_rank_has_updated() -> None:
    slow = parse_cluster("8xRTX4090")
    ddp, zero1 = (predict(strategy, slow, model(layers=8)).exposed_dp_s for strategy in ("ddp", "zero1"))
    assert zero1 > 1.3 * ddp  # an all-gather is half an all-reduce


def test_offload_pays_for_the_bus_and_the_host() -> None:
    found = predict("fsdp+offload", micro_batch=2)
    assert found.offload_s > predict("fsdp", micro_batch=2).optimizer_s and found.optimizer_s == 0
    assert predict("fsdp+offload", micro_batch=2, grad_accum=4).offload_s > found.offload_s
    node = parse_cluster("8xA100-80GB").model_copy(update={"nvme_bytes_per_s": 6e9})
    disk, host = (predict(f"deepspeed-zero3+{where}", node, micro_batch=2) for where in ("nvme", "offload"))
    assert disk.offload_s > 2 * host.offload_s and disk.optimizer_s == 0  # a drive is slower than memory


def test_replicas_across_nodes_spare_the_network() -> None:
    slow = parse_cluster("4x8xA100-80GB")
    assert slow.network is not None
    slow = slow.model_copy(update={"network": slow.network.model_copy(update={"bytes_per_s": 1.5e9})})
    times = [predict(strategy, slow, grad_accum=8).exposed_dp_s for strategy in ("hsdp", "fsdp")]
    assert times[0] < times[1] / 2


def test_an_unaligned_vocabulary_costs() -> None:
    full = Architecture(
        name="gpt", family="gpt", layers=12, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=50304
    )
    odd = full.model_copy(update={"vocab": 50257})
    times = [predict("ddp", profile=profile_of(one, 1024), micro_batch=8).step_s for one in (full, odd)]
    assert times[1] > 1.05 * times[0]


def test_flops_follow_their_convention() -> None:
    tokens = 4096
    square = 12 * 32 * 4096 * 4096  # layers · hidden · length, a token
    assert palm_flops(SMALL) == pytest.approx(tokens * (6 * SMALL.num_parameters + square))
    gpu = parse_cluster("8xA100-80GB").gpu
    assert gpu is not None
    used = mfu(SMALL, gpu, "bf16", 0.5)
    assert used == pytest.approx(palm_flops(SMALL) * 0.5 / 312e12)
    assert mfu(SMALL, None, "bf16", 1.0) is None


def test_throughput_and_utilisation_are_of_the_step() -> None:
    found = predict("fsdp", micro_batch=2, grad_accum=3)
    assert found.tokens_per_s_per_device == pytest.approx(6 * 4096 / found.step_s)
    assert found.mfu is not None and 0.3 < found.mfu < 0.75


@pytest.mark.parametrize(
    ("gpu", "precision", "images_per_s"),
    [
        ("A100-80GB", "bf16", 2470),  # NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, container 21.03, AMP
        ("V100-16GB", "fp16", 1200),  # the same table
        ("RTX-3090", "bf16", 1181.9),  # server-gear.com, tf_cnn_benchmarks, fp16, batch 256
        ("RTX-4090", "bf16", 1776.4),  # the same page
    ],
)
def test_a_resnet_passes_its_images_through_memory_once_a_layer(gpu: str, precision: str, images_per_s: float) -> None:
    found = predict("ddp", f"1x{gpu}", convnet_profile(RESNET_50), micro_batch=256, precision=precision)
    assert found.tokens_per_s_per_device is None and found.samples_per_s_per_device is not None
    assert 0.65 < found.samples_per_s_per_device / images_per_s < 1.05


def test_measured_rates_take_the_place_of_the_table() -> None:
    tiny = model(layers=4, hidden=512, seq_len=64)
    with pytest.raises(PlanError, match="'CPU' has no known speed"):
        predict("ddp", CPU, tiny, precision="fp32")
    found = predict("ddp", CPU, tiny, precision="fp32", options={"rates": rates()})
    twice = predict("ddp", CPU, tiny, precision="fp32", options={"rates": rates(flops_per_s=1e11)})
    slow = predict("ddp", CPU, tiny, precision="fp32", options={"rates": rates(bytes_per_s=1e9)})
    assert twice.compute_s < found.compute_s < slow.compute_s and found.optimizer_s < slow.optimizer_s
    assert found.mfu is None and found.calibrated
    alone = CPU.model_copy(update={"devices_per_node": 1})
    assert predict("ddp", alone, tiny, precision="fp32", options={"rates": rates()}).exposed_dp_s == 0
    assert found.exposed_dp_s > 0  # hidden traffic slows the cores that compute


def test_measured_kernels_are_read_between_their_sizes() -> None:
    measured = rates()
    for shape in ((64, 64, 64), (100, 700, 256), (32, 4096, 100)):  # one rate: also between and beyond the shapes
        assert measured.product_s(*shape) == pytest.approx(2.0 * math.prod(shape) / 5e10)
    assert measured.kernel_s("copy", 1e5) == pytest.approx(1e5 / 1e10)
    assert measured.kernel_s("copy", 1e9) == pytest.approx(1e9 / 1e10)
    assert measured.kernel_s("copy", 10.0) == pytest.approx(1e4 / 1e10)  # the call itself
    faster = replace(measured, products=tuple((m, k, n, s / (2 if m > 64 else 1)) for m, k, n, s in measured.products))
    between = faster.product_s(256, 64, 64)
    assert measured.product_s(256, 64, 64) / 2 < between < measured.product_s(256, 64, 64)
    assert between == pytest.approx(2.0 * 256 * 64 * 64 / 5e10 / 2**0.5)  # halfway by logarithm


def test_attention_beyond_the_longest_measured_rows_is_a_line_and_a_square() -> None:
    """Milliseconds of 512 to 4,096 rows of four heads on one thread of a Xeon: no proportion, and no plain square."""
    took = {512: 2.37e-3, 1024: 6.89e-3, 2048: 22.6e-3, 4096: 80.4e-3}
    rows = tuple((float(n), seconds) for n, seconds in took.items())
    measured = replace(rates(), forward=(("attention", rows[:2]),))
    for n in (2048, 4096):
        assert measured.kernel_s("attention", n) == pytest.approx(took[n], rel=0.05)
    assert replace(rates(), forward=(("attention", rows[:1]),)).kernel_s("attention", 1024) == 4 * 2.37e-3
    falling = replace(rates(), forward=(("attention", ((512.0, 3e-3), (1024.0, 3e-3))),))
    assert falling.kernel_s("attention", 4096) == pytest.approx(4 * 3e-3), "noise: no less than in proportion"
    steep = replace(rates(), forward=(("attention", ((512.0, 1e-6), (1024.0, 3e-3))),))
    assert steep.kernel_s("attention", 4096) == pytest.approx(16 * 3e-3), "noise: no more than a square"


@pytest.mark.parametrize(("strategy", "nodes", "across"), [("zero1", 1, 0), ("zero1+tp2", 2, 1), ("zero1+tp2", 1, 0)])
def test_zero1s_messages_have_the_delay_of_the_link_between_its_ranks(strategy: str, nodes: int, across: int) -> None:
    """Between nodes where tensor parallel fills a node, and none where a rank has no other."""
    cluster = CPU.model_copy(update={"nodes": nodes})
    tiny = model(layers=2, hidden=512, seq_len=64)
    kinds = [(kind, where) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
             for where in ("node", "network")]  # fmt: skip

    def host_s(node_s: float, network_s: float) -> float:
        delays = {("send", "node"): node_s, ("send", "network"): network_s}
        fits = tuple((key, LinkFit(delays.get(key, 0.0), 1e10)) for key in kinds)
        options = {"rates": rates(), "calibration": Calibration(fits=fits)}
        return predict(strategy, cluster, tiny, precision="fp32", options=options).host_s

    assert (host_s(0.0, 1.0) > host_s(0.0, 0.0)) == bool(across)
    assert (host_s(1.0, 0.0) > host_s(0.0, 0.0)) == (strategy == "zero1")


@pytest.mark.parametrize(
    ("nodes", "per_node", "strategy", "part"),
    [
        (1, 4, "ddp+pp4", 0),
        (2, 2, "ddp+pp4", 1 / 3),
        (2, 2, "ddp+pp2", 1),
        (2, 2, "ddp+tp2+pp2", 1),
        (4, 1, "ddp+pp4", 1),
    ],
)
def test_a_pipeline_of_cpus_waits_for_the_transfers_between_nodes(
    nodes: int, per_node: int, strategy: str, part: float
) -> None:
    """Those of one micro batch through all stages; inside a node nothing takes long, and elsewhere a second."""
    cluster = CPU.model_copy(update={"nodes": nodes, "devices_per_node": per_node})
    tiny = model(layers=4, hidden=512, seq_len=64)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    fits = tuple(((kind, where), LinkFit(0.0, 1e10)) for kind in kinds for where in ("node", "network"))

    def idle_s(delay: float) -> float:
        delays = ((("send", "node"), LinkFit(0.0, 1e10)), (("send", "network"), LinkFit(delay, 1e10)))
        options = {"rates": rates(), "calibration": Calibration(fits=(*fits, *delays))}
        return predict(strategy, cluster, tiny, precision="fp32", options=options).pipeline_s

    hops = 2 * (4 - 1 if strategy == "ddp+pp4" else 1)
    assert idle_s(1.0) - idle_s(0.0) == pytest.approx(hops * part * 2 * 1.0, abs=1e-6), "there and back, each twice"


def test_buckets_of_ddp_wait_for_the_gradients_that_fill_them() -> None:
    """A model below 25 MB sends a first bucket of 1 MiB behind its backward, and the rest when that has ended."""
    tiny = profile_of(
        Architecture(
            name="tiny", family="llama", layers=8, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=384, vocab=256,
            max_seq_len=64,
        ),
        64,
    )  # fmt: skip
    measured = replace(rates(), contention=0.0)
    alone = predict("ddp", CPU.model_copy(update={"devices_per_node": 1}), tiny, precision="fp32",
                    options={"rates": measured})  # fmt: skip
    sent = 4.0 * tiny.num_trainable
    assert 2 * 2**20 < sent < 25 * 2**20
    bytes_per_s = sent / (0.3 * alone.compute_s)  # units that were reduced one by one would hide nearly all of it
    links = Calibration(fits=((("all_reduce", "node"), LinkFit(0.0, bytes_per_s)),))

    def exposed_s(ranks: int) -> float:
        cluster = CPU.model_copy(update={"devices_per_node": ranks})
        options = {"rates": measured, "calibration": links}
        return predict("ddp", cluster, tiny, precision="fp32", options=options).exposed_dp_s

    assert exposed_s(8) == pytest.approx(2 * 7 / 8 * (sent - 2**20) / bytes_per_s, rel=0.02)
    assert exposed_s(2) == pytest.approx(SHARED_REDUCE * sent / bytes_per_s, rel=0.02), "at the end, in shared memory"


@pytest.mark.parametrize(
    ("strategy", "delays"),
    [
        ("ddp", 2),  # ranks agree on the step's data and on its gradients
        ("fsdp", 2 + 1),  # also on their norm
        ("ddp+pp2", 2 + 1 + 2 * 2),  # there and back; gloo sends once the receiver has said that it waits
    ],
)
def test_each_message_that_a_cpu_step_waits_for_costs_the_delay_of_its_link(strategy: str, delays: int) -> None:
    tiny, delay = model(layers=4, hidden=512, seq_len=64), 0.5
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")

    def step_s(delay_s: float) -> float:
        fits = tuple(((kind, "node"), LinkFit(delay_s, 1e10)) for kind in kinds)
        options = {"rates": replace(rates(), contention=0.0), "calibration": Calibration(fits=fits)}
        found = predict(strategy, CPU, tiny, precision="fp32", options=options)
        return found.step_s - found.exposed_dp_s  # buckets and units are not looked at here

    assert step_s(delay) - step_s(0.0) == pytest.approx(delays * delay, rel=0.02)


def test_an_unknown_precision_or_link_is_said() -> None:
    with pytest.raises(PlanError, match="in fp8"):
        predict("fsdp", precision="fp8")
    cluster = parse_cluster("2x8xA100-80GB").model_copy(update={"network": None})
    with pytest.raises(PlanError, match="bandwidth"):
        predict("fsdp", cluster)


def test_a_search_can_afford_it() -> None:
    profile, cluster = model(layers=126, hidden=16384), parse_cluster("2048x8xH100-SXM")
    plans = [("fsdp+tp8+pp16", 1, n) for n in (8, 16, 32, 64)] + [("fsdp+tp8", 1, n) for n in (1, 2)]
    for strategy, micro, accum in plans:
        predict(strategy, cluster, profile, micro_batch=micro, grad_accum=accum)
    start = time.process_time()
    for strategy, micro, accum in plans * 20:
        predict(strategy, cluster, profile, micro_batch=micro, grad_accum=accum)
    each = (time.process_time() - start) / (20 * len(plans))
    assert each < 5e-3  # an order above what it takes, for slow machines


def test_a_frozen_base_in_16_bits_is_not_copied() -> None:
    """Autocast copies fp32 weights in each micro batch; adapters train over a base that needs none of it."""
    wide = layer_time.unit_elements(SMALL.units[1], 1, 1)
    frozen = layer_time.unit_elements(with_adapters(SMALL, "lora").units[1], 1, 1)
    assert wide.wide == wide.elements > 0
    assert frozen.wide == frozen.trainable and 0 < frozen.wide < frozen.elements / 4


def test_zero_3_of_deepspeed_gathers_by_hooks_of_the_host() -> None:
    unit, machine = SMALL.units[1], machine_of(parse_cluster("8xA100-SXM-80GB"), "bf16")
    plain = WorkSplit(tp=1, cp=1, micro=1, precision="bf16", recompute="full", compiled=False)
    one, other = (unit_time(machine, unit, replace(plain, gathers_modules=hooks)) for hooks in (False, True))
    modules = len({weight.name.rpartition(".")[0] for weight in unit.weights})
    assert modules > 5
    assert other.host_forward_s - one.host_forward_s == pytest.approx(modules * layer_time.GATHERED_MODULE_S)
    assert other.host_backward_s - one.host_backward_s == pytest.approx(2 * modules * layer_time.GATHERED_MODULE_S)
