"""What follows from samples of several sizes: efficiency, losses, the last device, the curve. No ranks."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwise.bench.plots import draw_scaling
from shardwise.bench.scaling.predict import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    HOST_COPY_BYTES_PER_S,
    SHARD_COPIES,
    Links,
    cluster_at,
    curve_of,
    ddp_buckets,
    predict,
    slowest_of,
    units_of,
)
from shardwise.bench.scaling.scaling_plans import default_sizes, plan_at, plans_of
from shardwise.bench.scaling.scaling_report import print_scaling
from shardwise.bench.scaling.scaling_sizes import FILE, ScalingRequest, document_of, finish, stored
from shardwise.cost.time.collective_time import Calibration, LinkFit, Measured
from shardwise.errors import PlanError, UserError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.measure.scaling_facts import LeftOut, Mode, Sample, Scaling, Subject, UnitTraffic, rows_of, warnings_of
from shardwise.measure.step_time.timing import PHASES, PhaseStats, Timing
from shardwise.model.load_model import load_profile
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy

CPU = ClusterSpec(device="cpu", device_name="CPU", devices_per_node=2, cores_per_node=2)
LATENCY_S, BYTES_PER_S = 1e-3, 100e6
MIB = 1 << 20


def plan_for(strategy: str = "ddp", devices: int = 2, **changes: Any) -> Plan:
    facts: dict[str, Any] = {"micro_batch": 4, "grad_accum": 2, "seq_len": 16, **changes}
    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), devices), **facts)


def timing(step_s: float, world: int, **parts: float) -> Timing:
    """A timing whose named parts are as given, and ``forward`` the rest."""
    seconds: dict[str, float | None] = dict.fromkeys(PHASES)
    seconds.update(parts)
    seconds["forward"] = step_s - sum(parts.values())
    spreads = {
        part: None if s is None else PhaseStats(mean_s=s, low_s=s, high_s=s, highest_rank=0)
        for part, s in seconds.items()
    }
    ranks = tuple({part: s or 0.0 for part, s in seconds.items()} for _ in range(world))
    return Timing(
        steps=4,
        warm_up=3,
        world_size=world,
        step_s=step_s,
        median_step_s=step_s,
        parts=spreads,
        between_s={},
        ranks=ranks,
    )


def sample(mode: Mode, plan: Plan, step_s: float, *, jitter: float = 0.0, **parts: float) -> Sample:
    """A sample with four steps around ``step_s`` in a machine of 2 cores."""
    steps = tuple(step_s * (1 + jitter * sign) for sign in (-1, 1, -1, 1))
    return Sample(
        mode=mode,
        devices=plan.dims.world_size,
        nodes=1,
        plan=plan,
        steps_s=steps,
        wall_s=4 * step_s,
        tokens=4 * (plan.global_batch or 0) * 16,
        threads=1,
        cores=2,
        load=0.5,
        date="2026-01-01",
        timing=timing(step_s, plan.dims.world_size, **parts),
    )


def scaling(*samples: Sample, reference: Plan | None = None, cluster: ClusterSpec = CPU, **more: Any) -> Scaling:
    plan = reference or plan_for()
    subject = Subject(
        model="m", device="CPU", strategy=plan.strategy, precision="fp32", recompute="none", compile=False, seq_len=16,
        micro_batch=4, grad_accum=2, global_batch=16, optimizer="adamw",
    )  # fmt: skip
    return Scaling(subject=subject, reference=plan, cluster=cluster, samples=samples, **more)


def two(mode: Mode = "weak") -> Scaling:
    """One device at 100 ms and two at 125 ms, of which 20 ms are traffic and 5 ms a slower backward."""
    one = sample(mode, plan_at(plan_for(), 1, mode), 0.1, jitter=0.02, backward=0.06, optimizer=0.01)
    parts = {"backward": 0.065, "optimizer": 0.01, "exposed_dp": 0.02}
    pair = sample(mode, plan_at(plan_for(), 2, mode), 0.125, jitter=0.02, **parts)
    return scaling(one, pair)


# sizes


def test_weak_sizes_keep_a_ranks_batch_and_strong_sizes_the_global_one() -> None:
    reference = plan_for(devices=2)
    weak = [plan_at(reference, n, "weak") for n in (1, 2, 8)]
    assert [(p.micro_batch, p.grad_accum, p.global_batch) for p in weak] == [(4, 2, 8), (4, 2, 16), (4, 2, 64)]
    strong = [plan_at(reference, n, "strong") for n in (1, 2, 4, 8, 16)]
    assert [(p.micro_batch, p.grad_accum) for p in strong] == [(4, 4), (4, 2), (4, 1), (2, 1), (1, 1)]
    assert {p.global_batch for p in strong} == {16}
    with pytest.raises(PlanError, match=r"global batch 16 is no multiple of that; set train.global_batch=18"):
        plan_at(reference, 3, "strong")


@pytest.mark.parametrize(
    ("strategy", "devices", "sizes"),
    [("ddp", 2, [1, 2]), ("ddp", 6, [1, 2, 4, 6]), ("fsdp+tp2", 8, [2, 4, 8]), ("ddp+tp2+pp2", 4, [4])],
)
def test_sizes_are_doublings_of_what_the_model_is_cut_over(strategy: str, devices: int, sizes: list[int]) -> None:
    assert default_sizes(plan_for(strategy, devices), devices) == sizes


def test_a_size_that_is_named_and_cannot_be_is_refused_and_others_are_left_out() -> None:
    with pytest.raises(UserError, match=r"--size 3: fsdp\+tp2"):
        plans_of(plan_for("fsdp+tp2", 4), [2, 3], ("weak", "strong"), named=True)
    plans, left_out = plans_of(plan_for(devices=2), [1, 3], ("weak", "strong"), named=True)
    assert set(plans) == {("weak", 1), ("strong", 1), ("weak", 3)}
    assert [(one.mode, one.devices) for one in left_out] == [("strong", 3)]


def test_hsdp_keeps_its_sharding_groups() -> None:
    reference = plan_for("hsdp", 8)
    assert (reference.dims.dp_replicate, reference.dims.dp_shard) == (2, 4)
    found = [plan_at(reference, n, "weak").dims for n in (1, 2, 4, 8, 32)]
    assert [(d.dp_replicate, d.dp_shard) for d in found] == [(1, 1), (1, 2), (1, 4), (2, 4), (8, 4)]


# what is lost


def test_weak_efficiency_and_its_losses_add_up() -> None:
    first, second = rows_of(two("weak").samples, price=2.0)
    assert (first.efficiency, first.low, first.lost_s) == (1.0, 1.0, 0.0)
    assert second.efficiency == pytest.approx(0.8)
    assert second.speedup == pytest.approx(1.6)
    assert second.ideal_s == pytest.approx(0.1) and second.lost_s == pytest.approx(0.025)
    assert second.low < second.efficiency < second.high
    assert second.losses is not None
    lost = {one.part: one.seconds for one in second.losses}
    assert lost == {"exposed_dp": pytest.approx(0.02), "backward": pytest.approx(0.005)}
    assert sum(one.seconds for one in second.losses) == pytest.approx(second.lost_s)
    assert sum(one.share for one in second.losses) == pytest.approx(1 - second.efficiency)


def test_strong_ideals_shrink_with_the_work_and_what_does_not_is_a_loss() -> None:
    """Half of the samples should take half of the optimizer's time, too, and cannot."""
    _, second = rows_of(two("strong").samples, price=None)
    assert second.speedup == pytest.approx(0.8) and second.efficiency == pytest.approx(0.4)
    assert second.ideal_s == pytest.approx(0.05)
    lost = {one.part: one.seconds for one in second.losses or ()}
    assert lost["optimizer"] == pytest.approx(0.005)
    assert lost["backward"] == pytest.approx(0.035)
    assert sum(lost.values()) == pytest.approx(second.lost_s) == pytest.approx(0.075)


def test_what_the_parts_do_not_say_is_said_as_such() -> None:
    one, pair = two().samples
    pair = pair.model_copy(update={"timing": timing(0.12, 2, backward=0.06, exposed_dp=0.02, optimizer=0.01)})
    lost = {item.part: item.seconds for item in rows_of([one, pair], None)[1].losses or ()}
    assert lost["untold"] == pytest.approx(0.005)
    unknown = rows_of([one, pair.model_copy(update={"timing": None})], None)[1]
    assert unknown.losses is None


def test_the_last_device_has_a_worth_and_a_price() -> None:
    first, second = rows_of(two("weak").samples, price=3.6)
    each = first.tokens_per_s
    assert first.added_tokens_per_s is None
    assert second.added_tokens_per_s == pytest.approx(0.6 * each) and second.worth == pytest.approx(0.6)
    assert second.dollars_per_hour == pytest.approx(7.2)
    assert first.dollars_per_million_tokens == pytest.approx(1e6 * 0.001 / each)
    assert second.dollars_per_million_tokens == pytest.approx(1e6 * 0.001 / (0.8 * each))
    assert second.added_dollars_per_million_tokens == pytest.approx(1e6 * 0.001 / (0.6 * each))
    free = rows_of(two("weak").samples, price=None)[1]
    assert (free.dollars_per_hour, free.dollars_per_million_tokens) == (None, None)
    worse = rows_of(two("strong").samples, price=3.6)[1]
    assert worse.added_tokens_per_s is not None and worse.added_tokens_per_s < 0
    assert worse.added_dollars_per_million_tokens is None


def test_ranks_that_share_cores_are_told() -> None:
    four = sample("weak", plan_at(plan_for(), 4, "weak"), 0.2)
    assert four.crowded and not two().samples[1].crowded
    assert rows_of([*two().samples, four], None)[-1].crowded
    said = warnings_of(two().merged([four]))
    assert len(said) == 1 and said[0].startswith("4 ranks share 2 cores")
    other = four.model_copy(update={"threads": 2, "load": 5.0, "date": "2026-01-02"})
    said = warnings_of(two().merged([other]))
    assert [next(word for word in ("share", "threads", "days", "load") if word in text) for text in said] == [
        "share", "threads", "days", "load",
    ]  # fmt: skip


def test_a_size_measured_again_takes_the_place_of_the_older_one() -> None:
    again = two().samples[1].model_copy(update={"wall_s": 1.0})
    gone = LeftOut(mode="weak", devices=8, reason="no")
    found = two().merged([again], [gone])
    assert [one.devices for one in found.samples] == [1, 2]
    assert found.samples[1].wall_s == 1.0 and found.left_out == (gone,)
    eight = sample("weak", plan_at(plan_for(), 8, "weak"), 0.2)
    assert found.merged([eight]).left_out == ()


# what is predicted


def links(plan: Plan, ranks: int, *, kinds: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter")) -> Links:
    """A ring of ``LATENCY_S`` and ``BYTES_PER_S`` of bus bandwidth, for any number of ranks."""
    fit = LinkFit(LATENCY_S, BYTES_PER_S)
    calibration = Calibration(fits=tuple(((kind, "node"), fit) for kind in kinds))
    return Links(cluster=CPU.model_copy(update={"devices_per_node": ranks}), plan=plan, calibration=calibration)


def unit(name: str, share: float, mib: float, *, count: int = 1, block: bool = False) -> UnitTraffic:
    size = mib * MIB
    return UnitTraffic(name=name, count=count, block=block, share=share, gather_bytes=size, reduce_bytes=size)


UNITS = (unit("embed", 0.0, 4), unit("block", 0.2, 8, count=4, block=True), unit("head", 0.2, 4))


def seconds(mib: float, factor: float) -> float:
    """Of one collective over two ranks that puts ``factor`` of the message on the wire."""
    return LATENCY_S + factor * mib * MIB / BYTES_PER_S


def test_buckets_fill_in_the_order_of_gradients() -> None:
    buckets = ddp_buckets(UNITS, 1.0)
    assert [size for _, size in buckets] == [FIRST_BUCKET_BYTES, BUCKET_BYTES, 14 * MIB]
    first, second, last = (ready for ready, _ in buckets)
    assert first == pytest.approx(0.2 * 1 / 4)
    assert second == pytest.approx(0.2 + 0.2 * (26 - 4) / 8)
    assert last == 1.0
    assert sum(size for _, size in buckets) == sum(u.count * u.reduce_bytes for u in UNITS)
    small = ddp_buckets((unit("all", 1.0, 0.5),), 1.0)
    assert small == [(1.0, 0.5 * MIB)]


def test_ddp_shows_what_the_last_backward_does_not_hide() -> None:
    base = sample("weak", plan_at(plan_for(), 1, "weak"), 2.0, backward=1.2)
    plan = plan_at(plan_for(), 2, "weak")
    found = predict(base, UNITS, plan, links(plan, 2))
    backward = 1.2 / 2  # of the last of two micro batches
    ready = [moment for moment, _ in ddp_buckets(UNITS, backward)]
    wire = 0.0
    for moment, mib in zip(ready, (1, 25, 14), strict=True):
        wire = max(wire, moment) + seconds(mib, 1.0)
    control = 2 * (LATENCY_S + 512 / BYTES_PER_S)
    assert found.links_s == pytest.approx(wire - backward + control)
    assert found.own_s == pytest.approx(2.0)
    assert found.slowest_s == 0.0, "the steps were all alike"


@pytest.mark.parametrize(("strategy", "gathers"), [("fsdp", 2), ("zero2", 1)])
def test_sharded_units_talk_one_by_one_and_gloo_hides_nothing(strategy: str, gathers: int) -> None:
    reference = plan_for(strategy, 2)
    base = sample("weak", plan_at(reference, 1, "weak"), 2.0, backward=1.2, optimizer=0.2)
    plan = plan_at(reference, 2, "weak")
    found = predict(base, UNITS, plan, links(plan, 2))
    # each of two micro batches gathers root and last block once, other blocks once or twice; gradients are reduced last
    each = seconds(8, 0.5) + SHARD_COPIES * 8 * MIB / HOST_COPY_BYTES_PER_S
    gathered = 2 * (each + gathers * 3 * each + each)
    reduced = each + 4 * each
    control = 3 * (LATENCY_S + 512 / BYTES_PER_S)
    assert found.links_s == pytest.approx(gathered + reduced + control)
    assert found.own_s == pytest.approx(2.0 - 0.1), "each rank steps half of the weights"


def test_a_gpu_hides_what_gloo_cannot() -> None:
    reference = plan_for("fsdp", 2, device="cuda")
    base = sample("weak", plan_at(reference, 1, "weak"), 2.0, backward=1.2)
    cluster = parse_cluster("8xA100-80GB")
    plan = plan_at(reference, 8, "weak")
    hidden = predict(base, UNITS, plan, Links(cluster=cluster, plan=plan))
    slow = parse_cluster("8xA100-80GB@pcie3x1")
    shown = predict(base, UNITS, plan, Links(cluster=slow, plan=plan))
    assert 0 < hidden.links_s < 0.01 < shown.links_s


def test_the_slowest_of_many_is_the_mean_of_the_largest_draw() -> None:
    assert slowest_of((1.0,), 8) == slowest_of((1.0, 2.0), 1) == 0.0
    assert slowest_of((1.0, 3.0), 2) == pytest.approx((0.25 * 1 + 0.75 * 3) / 2 - 1)
    assert slowest_of((1.0, 3.0), 1 << 20) == pytest.approx(0.5)


def test_strong_scaling_leaves_a_rank_with_less_work() -> None:
    base = sample("strong", plan_at(plan_for(), 1, "strong"), 2.0, backward=1.2, optimizer=0.2, data=0.1)
    plan = plan_at(plan_for(), 4, "strong")
    assert predict(base, UNITS, plan, links(plan, 4)).own_s == pytest.approx(1.8 / 4 + 0.2)


def test_a_bubble_is_as_long_with_fewer_micro_batches() -> None:
    reference = plan_for("ddp+pp2", 2, micro_batch=2, grad_accum=8)
    base = sample("strong", reference, 0.1, backward=0.05, pipeline=0.02)
    for devices, work in ((4, 1 / 2), (8, 1 / 4), (32, 1 / 16)):
        plan = plan_at(reference, devices, "strong")
        bubble = 0.02 * (plan.micro_batch or 0) / 2
        assert predict(base, UNITS, plan, links(plan, devices)).own_s == pytest.approx(0.08 * work + bubble)
    assert plan_at(reference, 32, "strong").micro_batch == 1, "the last of them has smaller micro batches"


def test_no_size_is_predicted_to_do_better_than_the_best_that_was_measured() -> None:
    reference = plan_for("zero1", 2)
    one = sample("weak", plan_at(reference, 1, "weak"), 10.0, jitter=0.02, backward=1.0, optimizer=8.5)
    pair = sample("weak", reference, 9.5, jitter=0.02, backward=1.0, optimizer=4.25)
    points = curve_of(scaling(one, pair, reference=reference, units=UNITS), "weak", 64).points
    for point in points:
        assert point.step_s and point.low_s and point.high_s and point.efficiency and point.low and point.high
        assert point.low <= point.efficiency <= point.high and point.low_s <= point.step_s <= point.high_s
        assert point.efficiency * point.step_s == pytest.approx(10.0)
        assert point.devices <= 2 or point.efficiency < 1.10, "a shard of the optimizer that shrinks on and on"


def test_a_base_of_two_ranks_has_its_own_traffic_taken_out() -> None:
    base = sample("weak", plan_at(plan_for(), 2, "weak"), 2.0, backward=1.2, exposed_dp=0.3, slowest_rank=0.1)
    plan = plan_at(plan_for(), 4, "weak")
    assert predict(base, UNITS, plan, links(plan, 4)).own_s == pytest.approx(1.6)


def test_the_curve_goes_through_the_largest_size_that_had_its_own_cores() -> None:
    found = two().model_copy(update={"units": UNITS})
    crowded = found.merged([sample("weak", plan_at(plan_for(), 4, "weak"), 9.0)])
    curve = curve_of(crowded, "weak", 64)
    assert curve.anchor == 2 and curve.measured_over_model is not None
    points = {point.devices: point for point in curve.points}
    assert sorted(points) == [1, 2, 4, 8, 16, 32, 64]
    assert points[2].step_s == pytest.approx(0.125)
    assert points[2].model_s == pytest.approx(0.125 / curve.measured_over_model)
    for point in points.values():
        assert point.step_s and point.low_s and point.high_s and point.efficiency and point.low and point.high
        assert point.low_s <= point.step_s <= point.high_s
        assert point.low <= point.efficiency <= point.high
        if point.devices > 2:
            assert point.efficiency < points[2].efficiency  # type: ignore[operator]
            assert point.high <= rows_of(found.samples, None)[1].high * 1.0001
    assert any("each with cores of its own" in text for text in curve.assumptions)
    assert any("good to a factor of 2" in text for text in curve.assumptions)


def test_what_cannot_be_predicted_says_why() -> None:
    found = two("strong").model_copy(update={"units": UNITS})
    curve = curve_of(found, "strong", 64)
    assert [point.devices for point in curve.points if point.step_s] == [1, 2, 4, 8, 16]
    assert {point.reason for point in curve.points if point.devices > 16} == {
        "a global batch of 16 has no sample for each data-parallel rank"
    }
    blind = curve_of(two(), "weak", 4)
    assert {point.reason for point in blind.points} == {"the model cannot be traced"}
    one_gpu = parse_cluster("2xT4").model_copy(update={"gpu": None, "link": None, "network": None})
    reference = plan_for(device="cuda")
    base = sample("weak", plan_at(reference, 1, "weak"), 2.0, backward=1.2)
    alone = scaling(base, reference=reference, cluster=one_gpu, units=UNITS)
    reasons = {point.devices: point.reason for point in curve_of(alone, "weak", 4).points}
    assert not reasons[1] and "--calibration" in reasons[2] and "--calibration" in reasons[4]


def test_the_network_beyond_a_node() -> None:
    found = scaling(cluster=parse_cluster("8xH100-SXM"))
    inside, nothing = cluster_at(found, 4, None)
    assert (inside.nodes, inside.devices_per_node, nothing) == (1, 4, "")
    across, assumed = cluster_at(found, 64, None)
    assert (across.nodes, across.devices_per_node) == (8, 8) and across.network is not None
    assert "typical network" in assumed
    one = Measured("all_reduce", 2, 1, ((1e3, 1e-3), (1e6, 1e-2)), LinkFit(1e-3, 1e8))
    measured, assumed = cluster_at(scaling(), 8, Calibration(measured=(one,)))
    assert (measured.nodes, measured.devices_per_node, assumed) == (4, 2, "")


def test_units_are_read_off_a_profile() -> None:
    profile = load_profile("gpt2", seq_len=128)
    units = units_of(profile, plan_for())
    assert sum(u.count * u.reduce_bytes for u in units) == 4 * profile.num_trainable
    assert sum(u.count * u.share for u in units) == pytest.approx(1.0)
    blocks = [u for u in units if u.block]
    assert sum(u.count for u in blocks) == 12
    half = units_of(profile, plan_for("ddp+tp2", 2, precision="bf16"))
    assert sum(u.count * u.gather_bytes for u in half) < 0.6 * 2 * profile.num_parameters
    assert units_of(None, plan_for()) == ()


# the file, the words, the plot


def request(folder: Path, **changes: Any) -> ScalingRequest:
    facts: dict[str, Any] = {
        "modes": ("weak", "strong"), "sizes": (), "steps": 4, "beyond": 16, "calibration": None, "price": 1.5,
    }  # fmt: skip
    return ScalingRequest(**{**facts, **changes}, output=folder)


def test_sizes_come_together_in_one_file(tmp_path: Path) -> None:
    full = two().model_copy(update={"units": UNITS})
    one, pair = full.samples
    console = Console(file=io.StringIO(), width=100, markup=False, soft_wrap=True)
    empty = full.model_copy(update={"samples": ()})
    finish(empty, [one], [], request(tmp_path), console)
    document = finish(empty, [pair], [LeftOut(mode="strong", devices=2, reason="not now")], request(tmp_path), console)
    kept = json.loads((tmp_path / FILE).read_text())
    assert kept == json.loads(json.dumps(document))
    assert kept["schema"] == 1 and [item["devices"] for item in kept["samples"]] == [1, 2]
    assert [row["efficiency"] for row in kept["rows"]] == [1.0, pytest.approx(0.8)]
    assert [point["devices"] for point in kept["curves"][0]["points"]] == [1, 2, 4, 8, 16]
    assert (tmp_path / "scaling.png").stat().st_size > 5_000
    assert stored(tmp_path / FILE) == full.merged([], [LeftOut(mode="strong", devices=2, reason="not now")])
    said = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "2 devices: loses 25.0 ms of a step: exposed communication, dp +20.0 ms (+16.0%), backward +5.0 ms",
        "the last of 2 devices adds 768 tokens/s, 60% of what one of the first adds: for $1.50 an hour, $0.54",
        "left out: 2 devices, strong: not now",
        "moved by ",
    ):
        assert words in said, said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"subject": 3}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match=r"is no file of bench scaling .* choose another --output"):
        stored(tmp_path / FILE)
    assert stored(tmp_path / "none.json") is None


def printed(full: Scaling, price: float | None) -> str:
    console = Console(file=io.StringIO(), width=100, markup=False, soft_wrap=True)
    modes: list[Mode] = sorted({one.mode for one in full.samples})
    rows = [row for mode in modes for row in rows_of(full.of(mode), price)]
    print_scaling(full, rows, [curve_of(full, mode, 8) for mode in modes], price, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_unknown_is_said(tmp_path: Path) -> None:
    said = printed(two(), None)
    assert "money: unknown, give --price" in said
    assert "1 to 8 devices: unknown; the model cannot be traced" in said
    assert "unknown" in next(line for line in said.splitlines() if "125.0 ms" in line)
    worse = printed(two("strong"), 2.0)
    assert "tokens/s away, for $2.00 an hour" in worse
    assert "nan" not in worse and "None" not in worse + said


def test_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = two().model_copy(update={"units": UNITS})
    sizes = {}
    for name, one in {"both": full.merged(two("strong").samples), "one": full.merged([])}.items():
        modes: list[Mode] = ["weak", "strong"] if name == "both" else ["weak"]
        rows = [row for mode in modes for row in rows_of(one.of(mode), None)]
        document = document_of(one, rows, [curve_of(one, mode, 64) for mode in modes], None)
        assert draw_scaling(json.loads(json.dumps(document)), tmp_path / f"{name}.png")
        sizes[name] = (tmp_path / f"{name}.png").stat().st_size
    assert sizes["both"] > sizes["one"] > 5_000
    alone = scaling(two().samples[0], units=UNITS)
    document = document_of(alone, rows_of(alone.samples, None), [curve_of(alone, "weak", 1)], None)
    assert draw_scaling(json.loads(json.dumps(document)), tmp_path / "alone.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw_scaling(document, tmp_path / "none.png")
