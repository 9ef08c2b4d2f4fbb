"""Where to run: the price catalogue, the arithmetic of spot and of bought nodes, deadline and budget."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import lru_cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.cli.plan_lists import print_list
from shardwise.cost.price import Prices, read_prices
from shardwise.cost.price_catalogue import READ_ON, SHIPPED, Instance, read_catalogue
from shardwise.errors import UserError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.plan.workload import Workload
from shardwise.report.where_report import compared_notes
from shardwise.search.candidate import SearchResult
from shardwise.search.search import search
from shardwise.search.where import Offered, SpotRuns, offers_at, owned_places, places_of

HEAD = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region\n"
ROWS = (
    "small,,,0.1,,a\n"
    "eight,A100,8,20,5,a\n"
    "eight,A100,8,16,4,b\n"
    "one,A100-80GB,1.0,2,,a\n"
    "dear,H100,1,,3,a\n"
    "other,Trainium2,16,30,,a\n"
)
NEVER = SpotRuns(None, 30, 10)


def catalogue(tmp_path: Path, rows: str = ROWS):
    file = tmp_path / "mine.csv"
    file.write_text(HEAD + rows)
    return read_catalogue(file)


@lru_cache(maxsize=64)
def planned(text: str) -> SearchResult:
    cluster = ClusterSpec.model_validate_json(text)
    workload = Workload(seq_len=512, global_batch=64, tokens=1e9)
    return search(load_profile("gpt2", seq_len=512), workload, cluster)


def plan(cluster: ClusterSpec) -> SearchResult:
    return planned(cluster.model_dump_json())


def offers(tmp_path: Path, runs: SpotRuns = NEVER, **more: float | None) -> list[Offered]:
    limits = {"deadline_hours": None, "budget": None} | more
    return offers_at(places_of(catalogue(tmp_path)), plan, runs, **limits)


def test_a_catalogue_of_skypilots_schema(tmp_path: Path) -> None:
    found = catalogue(tmp_path)
    assert found.unknown == ("Trainium2",)
    names = {one.name: one for one in found.instances}
    assert names.keys() == {"eight", "one", "dear"}
    assert names["eight"].gpu.name == "A100-SXM-40GB"  # SkyPilot's A100 is the small one
    assert (names["eight"].region, names["eight"].hour, names["eight"].spot_hour) == ("b", 16, 4)
    assert names["one"].gpu.name == "A100-SXM-80GB" and names["one"].spot_hour is None
    assert names["dear"].hour is None
    assert {one.cloud for one in found.instances} == {"mine"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", ["no column InstanceType, AcceleratorName, AcceleratorCount, Price, Region"]),
        (HEAD + "x,H100,8,cheap,,a\ny,H100,8,-1,,a\n", ["line 2: Price is 'cheap'", "line 3: Price is '-1'"]),
        ("", ["no column InstanceType"]),
        (HEAD, ["no instance to plan for: no row has a GPU"]),
        (HEAD + "x,T9000,8,3,,a\n", ["no instance to plan for: the hardware table lacks T9000"]),
    ],
)
def test_mistakes_in_a_catalogue_at_once(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text(text)
    with pytest.raises(UserError) as found:
        read_catalogue(file)
    for word in words:
        assert word in str(found.value)
    with pytest.raises(UserError, match="No such file"):
        read_catalogue(tmp_path / "absent.csv")


def test_the_catalogue_that_ships_is_facts_with_their_source() -> None:
    with SHIPPED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 50
    assert all(row["Snapshot"].startswith("catalogs/v8/") and "@" in row["Snapshot"] for row in rows)
    assert all(row["Cloud"] in row["Snapshot"] and (row["Price"] or row["SpotPrice"]) for row in rows)
    found = read_catalogue()
    assert not found.unknown
    assert len({one.gpu.name for one in found.instances}) >= 10


def test_full_nodes_make_clusters_and_prices_follow(tmp_path: Path) -> None:
    places = places_of(catalogue(tmp_path))
    sizes = {(place.instances, place.cluster.world_size): place for place in places if "eight" in place.label}
    assert set(sizes) == {(1, 8), (2, 16), (4, 32), (8, 64)}
    assert (sizes[4, 32].hour, sizes[4, 32].spot_hour) == (64, 16)
    assert sizes[4, 32].cluster.price_per_device_hour == 2


def test_the_cheapest_comes_first_and_unknown_prices_are_not_offered(tmp_path: Path) -> None:
    found = offers(tmp_path)
    paid = [offer.dollars for offer in found]
    assert None not in paid and paid == sorted(paid)
    assert [offer.kind for offer in found if "dear" in offer.place.label] == ["spot"]
    for offer in found:
        hour = offer.place.spot_hour if offer.kind == "spot" else offer.place.hour
        assert hour is not None and offer.best is not None and offer.best.hours is not None
        assert offer.dollars == pytest.approx(offer.best.hours * hour)


def test_spot_takes_as_much_longer_as_interruptions_lose(tmp_path: Path) -> None:
    runs = SpotRuns(6, 30, 15)  # a quarter of an interruption an hour, each of half an hour
    assert runs.slower(1) == pytest.approx(1.125)
    assert runs.slower(4) == pytest.approx(1.5)
    plain, longer = offers(tmp_path), offers(tmp_path, runs)
    spot = {offer.place.label: offer.hours for offer in plain if offer.kind == "spot"}
    for offer in longer:
        if offer.kind == "spot":
            assert offer.hours == pytest.approx(spot[offer.place.label] * runs.slower(offer.place.instances))


def test_at_its_break_even_spot_costs_as_much_as_on_demand(tmp_path: Path) -> None:
    even = next(offer for offer in offers(tmp_path) if offer.kind == "spot" and offer.place.instances == 2)
    assert even.break_even is not None
    there = offers(tmp_path, replace(NEVER, interruptions_per_day=even.break_even))
    same = {offer.kind: offer.dollars for offer in there if offer.place.label == even.place.label}
    assert same["spot"] == pytest.approx(same["on demand"])


def test_deadline_and_budget_say_why_not(tmp_path: Path) -> None:
    found = offers(tmp_path)
    hours = sorted(offer.hours for offer in found if offer.hours is not None)
    limit = hours[len(hours) // 2]
    late = offers(tmp_path, deadline_hours=limit)
    assert {offer.why_not for offer in late} == {"", "past the deadline"}
    assert all((offer.hours <= limit) == (not offer.why_not) for offer in late if offer.hours is not None)
    assert [bool(offer.why_not) for offer in late] == sorted(bool(offer.why_not) for offer in late)
    poor = offers(tmp_path, budget=0.0)
    assert {offer.why_not for offer in poor} == {"above the budget"}


def test_a_bought_node_costs_its_price_its_server_and_power() -> None:
    prices = Prices(buy={"H100-SXM": 30000}, host_price=48000, years=2, used_share=0.5, per_kwh=0.2)
    place = owned_places(prices)[0]
    hours = 2 * 8766 * 0.5
    assert place.cluster.world_size == 8
    assert place.hour == pytest.approx((8 * 30000 + 48000) / hours + 8 * 0.7 * 1.3 * 0.2)
    assert owned_places(Prices(buy={"B300": 1.0}))[0].hour is None  # its power is not known


def test_a_price_file_states_restarts(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("interruptions_per_day = 2\nsave_minutes = 20\nrestart_minutes = 5\nhost_price = 1000\n")
    found = read_prices(file)
    assert (found.interruptions_per_day, found.save_minutes, found.restart_minutes) == (2, 20, 5)
    file.write_text("interruptions_per_day = -1\nhost_price = 'much'\n")
    with pytest.raises(UserError) as wrong:
        read_prices(file)
    assert len(wrong.value.problems) == 2


def test_the_footer_of_several_clusters_says_what_is_missing_and_whose_prices_they_are() -> None:
    names = ["8xH100-SXM", "8xMI300X"]
    clusters = [parse_cluster(name) for name in names]
    clusters[1] = clusters[1].model_copy(update={"price_per_device_hour": None})
    found = [plan(clusters[0]).candidates[0]] * 2
    assert compared_notes(names, clusters, found, tokens=False) == [
        "hours need --tokens, and costs on 8xMI300X a price (--price)"
    ]
    assert compared_notes(names[:1], clusters[:1], found[:1], tokens=False) == ["hours and costs need --tokens"]
    missing, prices = compared_notes(names, clusters, found, tokens=True)
    assert missing == "costs on 8xMI300X need a price (--price)"
    assert "RunPod, March 2026; third-party page" in prices and READ_ON in prices
    own = [one.model_copy(update={"price_per_device_hour": 1.0}) for one in clusters]
    assert not compared_notes(names, own, found, tokens=True)
    console = Console(file=StringIO(), width=500)
    print_list("gpus", console)
    assert "RunPod, March 2026" in console.file.getvalue() and READ_ON in console.file.getvalue()


def test_an_instance_of_no_gpus_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row has a GPU"):
        catalogue(tmp_path, "odd,H100,0,1,,a\n")
    assert "odd" not in {one.name for one in catalogue(tmp_path, ROWS + "odd,H100,0,1,,a\n").instances}
    assert isinstance(catalogue(tmp_path).instances[0], Instance)
