"""Hours, dollars, price files, and when buying pays."""

from __future__ import annotations

import pytest

from shardwise.cost.price import (
    HOURS_PER_MONTH,
    POWER_OVERHEAD,
    break_even_months,
    dollars_per_million_tokens,
    price_of,
    read_prices,
    training_cost,
    training_hours,
)
from shardwise.errors import UserError
from shardwise.hardware.gpus import gpu_names


def test_hours_and_cost():
    hours = training_hours(3.6e9, 1e6, 2.0)  # 3600 steps of 2 s
    assert hours == 2.0
    assert training_cost(hours, 8, 1.5) == 24.0


@pytest.mark.parametrize("facts", [(None, 1e6, 2.0), (1e9, None, 2.0), (1e9, 1e6, None), (1e9, 0, 2.0)])
def test_unknown_stays_unknown(facts):
    assert training_hours(*facts) is None
    assert training_cost(None, 8, 1.0) is None and training_cost(1.0, 8, None) is None
    assert dollars_per_million_tokens(None, 1.0) is None and dollars_per_million_tokens(10.0, None) is None


def test_a_million_tokens():
    assert dollars_per_million_tokens(1000.0, 3.6) == pytest.approx(1.0)


def test_break_even():
    price = 2.0 * HOURS_PER_MONTH
    assert break_even_months(price, 1.0, 0.0) == pytest.approx(2.0)
    assert break_even_months(price, 1.0, 0.0, used_share=0.5) == pytest.approx(4.0)
    power = 0.5 / POWER_OVERHEAD * 1000 / 0.1  # half a dollar an hour at 0.1 $/kWh
    assert break_even_months(price, 1.0, power, per_kwh=0.1) == pytest.approx(4.0)
    assert break_even_months(price, 0.4, power, per_kwh=0.1) is None, "power costs more than rent"
    assert break_even_months(None, 1.0, 400) is None


class TestPriceFile:
    def test_read(self, tmp_path):
        name = gpu_names()[0]
        file = tmp_path / "prices.toml"
        file.write_text(f'per_kwh = 0.2\n"{name}" = 1.89\n[buy]\n"{name}" = 15000\n')
        prices = read_prices(file, gpu_names())
        assert price_of(prices.hour, name) == 1.89 and price_of(prices.buy, name) == 15000
        assert prices.per_kwh == 0.2
        assert price_of(prices.hour, "Some other") is None

    def test_all_problems_at_once(self, tmp_path):
        file = tmp_path / "prices.toml"
        file.write_text('A100-80GB = "cheap"\nH100-SXM = -1\n')
        with pytest.raises(UserError) as raised:
            read_prices(file, gpu_names())
        assert len(raised.value.problems) == 2 and "'cheap'; it must be dollars" in raised.value.problems[0]

    def test_a_misspelt_setting_is_named_beside_a_wrong_one(self, tmp_path):
        file = tmp_path / "prices.toml"
        file.write_text("interuptions_per_day = 3\nyears = 0\n")
        with pytest.raises(UserError) as raised:
            read_prices(file, gpu_names())
        assert [line.partition(": ")[2] for line in raised.value.problems] == [
            "years is 0; it must be above 0 and at most 100",
            "no GPU or setting is called 'interuptions_per_day' (did you mean 'interruptions_per_day'?)",
        ]

    def test_unknown_name(self, tmp_path):
        file = tmp_path / "prices.toml"
        file.write_text("A100-80BG = 1\n")
        with pytest.raises(UserError, match="no GPU or setting is called 'A100-80BG'"):
            read_prices(file, ("A100-80GB",))

    @pytest.mark.parametrize(
        ("text", "says"), [(None, "No such file"), ("A100 80 = 1", "is not TOML"), ("#", "is empty")]
    )
    def test_no_file(self, tmp_path, text, says):
        file = tmp_path / "prices.toml"
        if text:
            file.write_text(text)
        with pytest.raises(UserError, match=says):
            read_prices(file)
