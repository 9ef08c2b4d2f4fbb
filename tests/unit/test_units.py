"""Numbers as people read them."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.price import Prices, offers
from shardwise.cost.time.step_time import StepTime
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.profile import ModelProfile, Unit, Weight
from shardwise.plan.plan import Plan
from shardwise.report.candidates import print_candidates, print_recommendation
from shardwise.search.candidate import Candidate, SearchResult
from shardwise.units import bytes_text, count_text, counted, hours_text, money_text, number_text, seconds_text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**20 - 2**14, "1008.00 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2240 * 2**30, "2.19 TiB"),
        (2**41, "2.00 TiB"),
        (-(2**20), "-1.00 MiB"),
        (-5, "-5 B"),
    ],
)
def test_bytes(number, text):
    assert bytes_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0, "0 ms"),
        (0.00008, "80 µs"),
        (0.0009996, "1 ms"),
        (0.0014, "1 ms"),
        (0.25, "250 ms"),
        (0.9996, "1.0 s"),
        (1, "1.0 s"),
        (12.34, "12.3 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min 00 s"),
        (60, "1 min 00 s"),
        (184, "3 min 04 s"),
        (119.7, "2 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7384, "2 h 03 min"),
        (100 * 3600, "100 h 00 min"),
        (20_000 * 3600, "20,000 h 00 min"),
    ],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "unknown"),
        (0, "0"),
        (512, "512"),
        (1000, "1.0 k"),
        (12_000, "12.0 k"),
        (1_900_000, "1.9 M"),
        (7.2e9, "7.2 B"),
        (1.5e13, "15.0 T"),
        (-2000, "-2.0 k"),
        (0.5, "0.5"),
        (582.669, "583"),
        (999.7, "1.0 k"),
        (999_960, "1.0 M"),
        (58.2669, "58.3"),
    ],
)
def test_counts(number, text):
    assert count_text(number) == text


@pytest.mark.parametrize(
    ("dollars", "text"),
    [
        (None, "unknown"),
        (0, "$0.00"),
        (3.5, "$3.50"),
        (0.179, "$0.18"),
        (0.0021, "$0.0021"),
        (0.000021, "$0.000021"),
        (0.0996, "$0.10"),
        (0.6, "$0.60"),
        (12.3, "$12.30"),
        (99.999, "$100"),
        (245.3, "$245"),
        (1230.4, "$1,230"),
        (197_512, "$197.5 k"),
        (1.908e8, "$190.8 M"),
    ],
)
def test_money(dollars, text):
    assert money_text(dollars) == text


def test_one_is_not_several():
    assert [counted(n, "rank") for n in (0, 1, 1200)] == ["0 ranks", "1 rank", "1,200 ranks"]
    assert [counted(n, "micro batch") for n in (1, 2)] == ["1 micro batch", "2 micro batches"]


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (None, "unknown"),
        (0.0004, "1.4 s"),
        (0.05, "3 min 00 s"),
        (1.0, "1 hour"),
        (1.6, "1.6 hours"),
        (23.4, "23.4 hours"),
        (24, "24 hours (1.0 days)"),
        (1234.4, "1,234 hours (51.4 days)"),
    ],
)
def test_length_of_a_run(hours, text):
    assert hours_text(hours) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "unknown"), (0.042, "0.042"), (0.1256, "0.126"), (12.34, "12.3"), (99.96, "100"), (1440.2, "1,440")],
)
def test_three_digits_or_an_integer(number, text):
    assert number_text(number) == text


def priced(hours: float) -> Candidate:
    time = StepTime(step_s=0.5, low_s=0.4, high_s=0.6, compute_s=0.5, tokens_per_s_per_device=0.4)
    plan = Plan(strategy="ddp", micro_batch=1, seq_len=1, device="cuda", reason="asked for by name")
    memory = Estimate(parameters=1, gradients=1, optimizer=1, activations=1, logits=1, buffers=1)
    return Candidate(plan=plan, fits=True, reason="", memory=memory, time=time, hours=hours, cost=hours * 0.6)


@pytest.mark.parametrize(
    ("hours", "column", "cells", "sentence"),
    [
        (0.0004, "seconds", "1.44  $0.00024", "The full run takes 1.4 s for $0.00024."),
        (0.05, "minutes", "3.00  $0.03", "The full run takes 3 min 00 s for $0.03."),
        (1.5, "hours", "1.50  $0.90", "The full run takes 1.5 hours for $0.90."),
        (480, "days", "20.0  $288", "The full run takes 480 hours (20.0 days) for $288."),
    ],
)
def test_the_answer_of_plan(hours, column, cells, sentence):
    """A run of any length has a unit in which it is not zero, and one of a thing is one."""
    machine = ClusterSpec(device="cuda", device_name="Card", devices_per_node=1, device_memory_bytes=2**34, nodes=1)
    profile = ModelProfile(
        name="tiny", units=(Unit("b", "block", (Weight("w", (8, 8)),), (), 8),), seq_len=1, origin="config"
    )
    result = SearchResult(candidates=(priced(hours),), recommended=0, considered=1)
    out = io.StringIO()
    console = Console(file=out, width=132, highlight=False)
    print_candidates(profile, machine, result, console)
    print_recommendation(profile, machine, result, Prices(), console)
    said = " ".join(out.getvalue().split())
    assert f"MFU {column} cost" in said and " ".join(cells.split()) in said and sentence in said
    assert "64 parameters, 1 block, 1 token a sample" in said and "1 plan considered" in said
    assert ", 0.4 tokens/s a device" in said and "(1 × 1 = 1 token a step)" in said


def test_prices_with_cents_and_one_year():
    machine = parse_cluster("1xRTX4090").model_copy(update={"price_per_device_hour": 0.6})
    demand, _, own = offers(2.0, machine, Prices(hour={"RTX4090": 0.6}, years=1, per_kwh=0.1))
    assert demand.assumption.startswith("$0.60 an hour and GPU")
    assert "over 1 year, 100% of the time in use, and power at $0.10/kWh" in own.assumption
    assert re.search(r"after \d+ months? of that", own.assumption)
    soon = offers(2.0, machine, Prices(hour={"RTX4090": 0.6}, buy={"RTX4090": 20.0}))[2]
    assert soon.assumption.endswith("after 1 month of that")
