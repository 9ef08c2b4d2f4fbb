"""Numbers as people read them."""

from __future__ import annotations

import pytest

from shardwise.units import bytes_text, count_text, counted, money_text, seconds_text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1024.00 KiB"),
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
        (0.25, "250 ms"),
        (1, "1.0 s"),
        (12.34, "12.3 s"),
        (59.9, "59.9 s"),
        (60, "1 min 00 s"),
        (184, "3 min 04 s"),
        (119.7, "2 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7384, "2 h 03 min"),
        (100 * 3600, "100 h 00 min"),
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
        (999.7, "1000"),
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
        (12.3, "$12.30"),
        (1230.4, "$1,230"),
    ],
)
def test_money(dollars, text):
    assert money_text(dollars) == text


def test_one_is_not_several():
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
