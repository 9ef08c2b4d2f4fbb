"""The file of ``bench comm``: read back as written, refused where it is another machine's, what costs make."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.cost.link_calibration import CalibrationFile, check_calibration, covers, read_calibration
from shardwise.cost.time.collective_time import (
    Calibration,
    CollectiveKind,
    Group,
    LinkFit,
    Measured,
    collective_s,
)
from shardwise.cost.time.machine import Machine
from shardwise.errors import ConfigError, PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.cpu import cores_here, processor_name
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.model.packed_mask import with_packed_mask
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.run import calibration as cli_calibration
from shardwise.run.calibration import corrected_costs, links_told, read_links
from shardwise.run.rank_main import remember_run
from shardwise.search.candidate import Pins
from shardwise.search.problem import ask

SIZES = (1000, 10_000, 100_000)
MEDIANS = (1e-3, 2e-3, 11e-3)
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def link(collective: str, where: str = "node", ranks: int = 2, **more: Any) -> dict[str, Any]:
    """One entry of the file."""
    return {
        "collective": collective,
        "axis": "dp",
        "where": where,
        "ranks": ranks,
        "per_node": ranks if where == "node" else 1,
        "latency_s": 1e-3,
        "bus_bytes_per_s": 1e7,
        "sizes_bytes": SIZES,
        "median_s": MEDIANS,
    } | more


def file_of(device: str = "cpu", links: list[dict[str, Any]] | None = None, **more: Any) -> CalibrationFile:
    """What ``bench comm`` would have written on this machine, or on a GPU."""
    facts: dict[str, Any] = {
        "schema": 1,
        "kind": "links",
        "date": "2026-11-21",
        "device": device,
        "device_name": "CPU" if device == "cpu" else "NVIDIA A100-SXM4-80GB",
        "processor": processor_name(),
        "cores_per_node": cores_here(),
        "nodes": 1,
        "devices_per_node": 2,
        "ranks": 2,
        "backend": "gloo" if device == "cpu" else "nccl",
        "versions": {"torch": "2.13.0"},
        "strategy": "ddp",
        "measured": links or [link(kind) for kind in KINDS],
    }
    return CalibrationFile.model_validate(facts | more)


def compute_of_ranks(**more: Any) -> dict[str, Any]:
    """What ``bench comm`` would have measured of the ranks' kernels: all at one speed."""
    curve = [(size, size * 1e-9) for size in (1000, 100_000)]
    forward = dict.fromkeys(("copy", "pointwise", "norm", "loss", "attention", "adamw"), curve)
    backward = dict.fromkeys(("pointwise", "norm", "loss", "attention"), curve)
    products = [(m, k, n, m * k * n * 1e-10) for m in (64, 256) for k in (64, 256) for n in (64, 256)]
    facts = {"threads": 1, "products": products, "launch_s": 1e-6, "comm_busy": 0.1}
    return facts | {"forward": forward, "backward": backward} | more


def seconds(file: CalibrationFile, kind: CollectiveKind, size: float, group: Group, cluster: ClusterSpec) -> float:
    return collective_s(kind, size, group, cluster, calibration=file.calibration())


CPUS = ClusterSpec(device="cpu", device_name="CPU", devices_per_node=2, cores_per_node=cores_here())
A100S = parse_cluster("8xA100-SXM-80GB")


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = file_of(links=[link("send", latency_interval_s=(9e-4, 2e-3)), link("all_reduce", latency_s=None)])
    path = tmp_path / "links.toml"
    path.write_text(file.to_toml())
    assert read_calibration(path) == file
    assert file.says() == "links measured 2026-11-21 with gloo (2 ranks)"


def test_costs_are_read_off_the_measured_curve() -> None:
    """At the sizes, between them, below and beyond; in a group of the measured shape."""
    expected = {1000: 1e-3, 10_000: 2e-3, 100_000: 11e-3, 5500: 1.5e-3, 10: 1e-3, 200_000: 11e-3 + 0.5 * 1e5 / 1e7}
    for size, took in expected.items():
        assert seconds(file_of(), "all_gather", size, Group(2, 2), CPUS) == pytest.approx(took), size
    lone = file_of(links=[link("all_gather", bus_bytes_per_s=None)])
    assert seconds(lone, "all_gather", 300_000, Group(2, 2), CPUS) == pytest.approx(31e-3), "no fit: on"
    flat = Measured("all_gather", 2, 2, ((1e3, 20e-3), (1e6, 21e-3)))
    assert flat.seconds(2e6) == pytest.approx(42e-3), "all is latency: in proportion, an upper bound"


def test_a_measured_reduce_scatter_is_not_doubled_again() -> None:
    """Gloo's sends as much as an all_reduce: the catalogue doubles it, what was measured has it already."""
    assert seconds(file_of(), "reduce_scatter", 100_000, Group(2, 2), CPUS) == pytest.approx(11e-3)


def test_sharded_gradients_are_exchanged_over_gloo_and_scattered_elsewhere() -> None:
    slow = [link(kind, median_s=(9e-3, 9e-3, 9e-3) if kind == "reduce_scatter" else MEDIANS) for kind in KINDS]
    machine = Machine(CPUS, None, None, calibration=file_of(links=slow).calibration())
    assert machine.reduce_scatter_s(10_000, 2, 2) == pytest.approx(2e-3)
    before = file_of(links=[one for one in slow if one["collective"] != "all_to_all"]).calibration()
    assert Machine(CPUS, None, None, calibration=before).reduce_scatter_s(10_000, 2, 2) == pytest.approx(9e-3)
    gpus = file_of("cuda", links=slow).calibration()
    assert Machine(A100S, None, None, calibration=gpus).reduce_scatter_s(10_000, 2, 2) == pytest.approx(9e-3)


def test_noise_does_not_make_larger_messages_faster() -> None:
    file = file_of(links=[link("send", median_s=(2e-3, 1e-3, 11e-3))])
    assert seconds(file, "send", 1000, Group(2, 2), CPUS) == pytest.approx(1.5e-3)
    assert seconds(file, "send", 10_000, Group(2, 2), CPUS) == pytest.approx(1.5e-3)
    assert seconds(file, "send", 100_000, Group(2, 2), CPUS) == pytest.approx(11e-3)


def test_one_outlier_does_not_stand_for_larger_messages() -> None:
    sizes, taken = (1000, 2000, 4000, 8000, 16000), (1e-3, 50e-3, 2e-3, 3e-3, 4e-3)
    file = file_of(links=[link("send", sizes_bytes=sizes, median_s=taken)])
    found = [seconds(file, "send", size, Group(2, 2), CPUS) for size in sizes]
    assert found == pytest.approx([1e-3, 3e-3, 3e-3, 3e-3, 4e-3])


def test_other_groups_of_gloo_take_the_steps_of_a_ring() -> None:
    """Four ranks take three steps for two ranks' one; a core each, so the bus bandwidth stays."""
    cpus = CPUS.model_copy(update={"devices_per_node": 4, "cores_per_node": 4})
    found = seconds(file_of(), "all_reduce", 100_000, Group(4, 4), cpus)
    assert found == pytest.approx(3e-3 + 1.5 * 100_000 / 1e7)
    nodes = file_of(links=[link("all_reduce", "network")])
    assert seconds(nodes, "all_reduce", 100_000, Group(8, 1), cpus) == pytest.approx(7e-3 + 1.75 * 100_000 / 1e7)
    pair = file_of(links=[link("send", "network")])
    assert seconds(pair, "send", 100_000, Group(2, 1), cpus) == pytest.approx(11e-3)


def test_other_groups_of_a_known_link_change_as_the_catalogue_has_it() -> None:
    file = file_of("cuda", links=[link("all_reduce", ranks=4, latency_s=1e-4, bus_bytes_per_s=100e9)])
    one_size = 1e9
    measured = 1e-4 + 1.5 * one_size / 100e9
    told = seconds(file, "all_reduce", one_size, Group(8, 8), A100S)
    ratio = collective_s("all_reduce", one_size, Group(8, 8), A100S) / collective_s(
        "all_reduce", one_size, Group(4, 4), A100S
    )
    assert told / measured == pytest.approx(ratio, rel=0.01)


def test_what_was_not_measured_stays_the_catalogues() -> None:
    file = file_of("cuda", links=[link("all_reduce", latency_s=None, bus_bytes_per_s=None)])
    for kind, group in (("all_gather", Group(2, 2)), ("all_reduce", Group(8, 8))):
        assert seconds(file, kind, 1e9, group, A100S) == collective_s(kind, 1e9, group, A100S)  # type: ignore[arg-type]


def test_of_two_axes_with_groups_of_one_shape_the_slower_counts() -> None:
    slow, fast = link("send", axis="tp", median_s=(2e-3, 4e-3, 22e-3)), link("send")
    for links in ([slow, fast], [fast, slow]):
        assert seconds(file_of(links=links), "send", 100_000, Group(2, 2), CPUS) == pytest.approx(22e-3)


REFUSED: list[tuple[str, Callable[[], CalibrationFile], ClusterSpec, str]] = [
    ("device", file_of, A100S, "the calibration was measured on CPUs, and the plan is for GPUs"),
    (
        "gpu",
        lambda: file_of("cuda"),
        parse_cluster("8xH100-SXM"),
        "measured on NVIDIA A100-SXM4-80GB, and the plan is for H100-SXM-80GB",
    ),
    ("processor", lambda: file_of(processor="Another"), CPUS, "measured on a machine with 'Another', and this one has"),
    ("cores", lambda: file_of(cores_per_node=999), CPUS, f"on 999 cores, and the ranks have {cores_here()}"),
    (
        "link",
        lambda: file_of("cuda", link="nvlink"),
        parse_cluster("8xA100-SXM-80GB@pcie4"),
        "measured over nvlink, and devices of the cluster are joined by pcie",
    ),
]


@pytest.mark.parametrize(("file", "cluster", "reason"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_another_machine_measured_is_refused(
    file: Callable[[], CalibrationFile], cluster: ClusterSpec, reason: str
) -> None:
    with pytest.raises(PlanError, match="measure this one with: shardwise bench comm") as refused:
        check_calibration(file(), cluster, processor=processor_name())
    assert reason in str(refused.value)


def test_the_same_gpu_under_another_name_is_taken() -> None:
    assert check_calibration(file_of("cuda"), A100S, processor="whatever") == []
    assert check_calibration(file_of("cuda", link="nvlink"), A100S, processor="whatever") == []


def test_what_is_not_covered_is_said() -> None:
    two = parse_cluster("2x8xA100-SXM-80GB")
    assert not covers(file_of("cuda"), two) and covers(file_of("cuda"), A100S)
    assert links_told(file_of("cuda"), two, name="links.toml") == [
        "times are over links measured 2026-11-21 with nccl (2 ranks)",
        "--calibration 'links.toml' has nothing between nodes; the catalogue stands in where it knows the link",
    ]
    some = file_of("cuda", links=[link(kind) for kind in ("all_reduce", "send")])
    assert "no latency or bandwidth of all_gather, reduce_scatter, all_to_all inside" in links_told(some, A100S)[1]
    no_fit = file_of("cuda", links=[link(kind, bus_bytes_per_s=None) for kind in KINDS])
    assert "but in groups of the very shape that was measured" in links_told(no_fit, A100S)[1]
    assert not covers(no_fit, A100S)
    assert links_told(file_of("cuda"), A100S) == ["times are over links measured 2026-11-21 with nccl (2 ranks)"]
    (told,) = links_told(file_of(), CPUS)
    assert told.startswith("--calibration has no effect on this plan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, ["schema"]),
        ({"kind": "rates"}, ["kind"]),
        ({"measured": []}, ["measured"]),
        ({"measured": [link("broadcast", ranks=1)]}, ["measured.0.collective", "measured.0.ranks"]),
        ({"measured": [link("send", median_s=(1e-3,))]}, ["3 sizes and 1 medians"]),
        ({"measured": [link("send", sizes_bytes=(1, 1, 2))]}, ["a size is there twice"]),
        ({"measured": [link("send", latency_s=float("inf"))]}, ["must be finite"]),
        ({"measured": [link("send", ranks=2, per_node=4)]}, ["4 of 2 ranks in a node"]),
        ({"measured": [link("send", median_s=(0.0, 1.0, 2.0))]}, ["above 0"]),
        ({"measured": [link("send", median_s=(1.0, 2.0, 1e300))]}, ["no message takes longer than 3,600 s"]),
        ({"measured": [link("send", latency_s=1e300)]}, ["no message takes longer than 3,600 s"]),
        ({"measured": [link("send", bus_bytes_per_s=1e-300)]}, ["measured.0.bus_bytes_per_s"]),
        ({"measured": [link("send", per_node=1)]}, ["1 of 2 ranks in a node, and where is 'node'"]),
        ({"measured": [link("send", "network", per_node=2)]}, ["2 of 2 ranks in a node, and where is 'network'"]),
        ({"measured": [link("send", ranks=4)]}, ["4 ranks in a node of 2"]),
        ({"compute": compute_of_ranks(products=compute_of_ranks()["products"][:5])}, ["5 shapes in 5 rows"]),
        ({"compute": compute_of_ranks(products=[(0, 64, 64, 1.0)])}, ["compute.products: sizes must be above 0"]),
        ({"compute": compute_of_ranks(products=[(64, 64, 64, s) for s in (1.0, 2.0)])}, ["1 shapes in 2 rows"]),
        ({"compute": compute_of_ranks(products=[(64, 64, 64, 1.0), (64, 64, 9, 1e300)])}, ["compute.products.1.3"]),
        (
            {"compute": compute_of_ranks(backward={"norm": [(1, 1.0)], "loss": [(1, 1.0)], "attention": []})},
            ["compute.backward: there is no pointwise", "compute.backward: there is no attention"],
        ),
        (
            {"compute": compute_of_ranks(forward=compute_of_ranks()["forward"] | {"copy": [(0, 1.0), (9, 1.0)]})},
            ["compute.forward.copy: sizes must be above 0"],
        ),
        (
            {"compute": compute_of_ranks(forward=compute_of_ranks()["forward"] | {"copy": [(9, 1.0), (9, 1.0)]})},
            ["compute.forward.copy: a size is there twice"],
        ),
    ],
)
def test_a_damaged_file_is_refused_with_all_that_is_wrong(
    change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    import tomli_w

    path = tmp_path / "links.toml"
    path.write_text(tomli_w.dumps(file_of().model_dump(mode="json", by_alias=True, exclude_none=True) | change))
    with pytest.raises(ConfigError) as refused:
        read_calibration(path)
    assert len(refused.value.problems) == len(words)
    for word in words:
        assert word in str(refused.value) and f"--calibration '{path}'" in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_calibration(tmp_path / "none.toml")
    text = tmp_path / "text.toml"
    text.write_text("not = = toml")
    with pytest.raises(ConfigError, match="is no TOML"):
        read_calibration(text)


def test_a_group_that_was_not_measured_is_scaled_from_one_with_a_fit() -> None:
    """And not from the catalogue, whose gloo is another machine's, because the nearest group has none."""
    links = [link(kind, bus_bytes_per_s=None) for kind in KINDS] + [link(kind, ranks=4) for kind in KINDS]
    eight = CPUS.model_copy(update={"devices_per_node": 8, "cores_per_node": 8})
    file = file_of(links=links, devices_per_node=8)
    assert covers(file, eight)
    found = seconds(file, "all_gather", 100_000, Group(3, 3), eight)
    assert found == pytest.approx(seconds(file_of(links=links[5:]), "all_gather", 100_000, Group(3, 3), eight))
    assert seconds(file, "all_gather", 10_000, Group(2, 2), eight) == pytest.approx(2e-3), "its own shape as it is"
    slower = link("all_gather", axis="tp", bus_bytes_per_s=None, median_s=(1.0, 2.0, 3.0))
    for links in ([link("all_gather"), slower], [slower, link("all_gather")]):
        both = file_of(links=links)
        assert seconds(both, "all_gather", 1000, Group(2, 2), CPUS) == pytest.approx(1.0)
        found = seconds(both, "all_gather", 1000, Group(3, 3), eight)
        assert found == pytest.approx(seconds(file_of(), "all_gather", 1000, Group(3, 3), eight)), "the fit there is"


def test_no_measurement_of_one_rank_is_advised() -> None:
    alone, file = CPUS.model_copy(update={"devices_per_node": 1}), file_of(compute=compute_of_ranks())
    (told,) = links_told(file, alone)
    assert told.endswith("it was measured with 2 ranks a node, and the plan has 1"), "bench comm needs two"


def test_what_other_threads_computed_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(file_of(compute=compute_of_ranks()).to_toml())
    for threads, known in ((None, True), (1, True), (2, False)):
        links, notes = read_links(path, CPUS, threads)
        assert (links.compute is not None) == known and ("no effect" in notes[0]) != known
    assert "measured with 1 thread a rank, and parallel.threads is 2" in notes[0]


@pytest.mark.parametrize(
    ("change", "strategy", "known"),
    [
        ({}, None, True),
        ({"optimizer": "sgd"}, None, True),
        ({"document_len": 512}, None, True),  # a document a sample
        ({"optimizer": "muon"}, None, False),  # its products took 700 ms where its bytes take 4
        ({"optimizer": "adafactor"}, None, False),
        ({"optimizer": "adamw8bit"}, None, False),
        ({"optimizer": None, "optimizer_states": None}, None, False),
        ({"document_len": 32}, None, False),
        ({}, "ddp+lora", True),
        ({}, "ddp+qlora", False),
    ],
)
def test_a_cpu_has_no_time_with_what_was_not_measured(
    change: dict[str, Any], strategy: str | None, known: bool
) -> None:
    profile = load_profile("llama-3.2-1b", seq_len=512)
    pins = Pins() if strategy is None else Pins(strategy=parse_strategy(strategy))
    costs = corrected_costs(CPUS, file_of(compute=compute_of_ranks()))
    workload = Workload.model_validate({"seq_len": 512, "global_batch": 8} | change)
    assert ask(profile, workload, CPUS, pins, costs=costs).timed == known


def test_packed_samples_have_no_time_on_a_cpu() -> None:
    """Attention with a mask took 1.5 times as long as causal attention, of 1,024 rows."""
    profile, workload = load_profile("llama-3.2-1b", seq_len=512), Workload(seq_len=512, global_batch=8)
    costs = corrected_costs(CPUS, file_of(compute=compute_of_ranks()))
    assert not ask(with_packed_mask(profile), workload, CPUS, Pins(), costs=costs).timed


@pytest.fixture
def no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_HISTORY", "off")


@pytest.mark.usefixtures("no_history")
def test_plans_are_timed_over_the_measured_links() -> None:
    profile = load_profile("llama-3.2-1b", seq_len=1024)
    plan = Plan(strategy="ddp", dims=ParallelDims(dp_replicate=8), micro_batch=1, precision="bf16", device="cuda")
    workload, file = Workload(seq_len=1024, global_batch=8), file_of("cuda")
    catalogue = corrected_costs(A100S).step_time(profile, plan, workload, A100S)
    measured = corrected_costs(A100S, file).step_time(profile, plan, workload, A100S)
    assert measured.step_s > 10 * catalogue.step_s, "10 MB/s for 300 GB/s"
    assert measured.calibrated == "published ampere steps; links measured 2026-11-21 with nccl (2 ranks)"
    assert file.says() not in catalogue.calibrated


@pytest.mark.usefixtures("no_history")
def test_measured_links_make_times_known_where_the_catalogue_has_none() -> None:
    profile = load_profile("llama-3.2-1b", seq_len=1024)
    unknown = A100S.model_copy(update={"link": None})
    workload = Workload(seq_len=1024, global_batch=8)
    full = file_of("cuda")
    part = file_of("cuda", links=[link("all_reduce")])
    assert not ask(profile, workload, unknown, Pins(), costs=corrected_costs(unknown)).timed
    assert ask(profile, workload, unknown, Pins(), costs=corrected_costs(unknown, full)).timed
    assert not ask(profile, workload, unknown, Pins(), costs=corrected_costs(unknown, part)).timed
    assert not math.isnan(collective_s("all_reduce", 1e6, Group(8, 8), unknown, calibration=full.calibration()))


def test_earlier_runs_correct_memory_and_not_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from shardwise.measure.history import Correction, Ratio

    more = Ratio(median=2.0, low=2.0, high=2.0, count=9)

    class Told:
        runs = (SimpleNamespace(base="ddp"),)

        def correction(self, device: str, base: str) -> Correction:
            return Correction(peak=more, step=more)

    monkeypatch.setattr(cli_calibration, "read_history", Told)
    profile = load_profile("llama-3.2-1b", seq_len=1024)
    plan = Plan(strategy="ddp", dims=ParallelDims(dp_replicate=8), micro_batch=1, precision="bf16", device="cuda")
    workload = Workload(seq_len=1024, global_batch=8)
    over = corrected_costs(A100S, file_of("cuda"))
    assert "step time ×" not in over.step_time(profile, plan, workload, A100S).calibrated
    assert "step time ×" in corrected_costs(A100S).step_time(profile, plan, workload, A100S).calibrated
    assert any("peak × 2" in note for note in over.estimate(profile, plan, workload, A100S).notes)


def test_a_calibration_is_equal_to_itself_alone() -> None:
    """It is a key of caches: hashing hundreds of samples for each collective would cost more than they save."""
    one = Calibration(measured=(Measured("send", 2, 2, ((1.0, 1.0),), LinkFit(0.0, 1.0)),))
    other = Calibration(measured=one.measured)
    assert one == one and one != other and len({one, other}) == 2


@pytest.mark.parametrize(("measured", "planned"), [(None, 2.0), ({}, None), ({"dp": (1e9, "bench comm")}, None)])
def test_history_has_no_time_over_measured_links(
    measured: dict[str, tuple[float, str]] | None,
    planned: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It corrects times with the catalogue's links; a calibration without a bandwidth is one, too."""
    kept = dict[str, Any]()
    monkeypatch.setattr("shardwise.measure.history.remember", lambda **facts: kept.update(facts) or "")
    job = mock.Mock(step_time=mock.Mock(step_s=2.0), measured_links=measured)
    job.config.train.output, job.estimate.unknown = str(tmp_path), ()
    session = mock.Mock(device=mock.Mock(type="cpu"), first_step=0)
    found = remember_run(job, session, mock.Mock(peaks=None), mock.Mock())
    assert kept["planned_step_s"] == planned and found["planned"] == 2.0
