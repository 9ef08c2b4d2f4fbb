"""Hours and money of a training run. Prices are US dollars; unknown prices are not guessed.

Counted: the time of optimizer steps. Not counted: start-up, evaluation, checkpoints, failures and restarts, storage,
traffic out of the cloud, people.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardwise.document import read_toml
from shardwise.errors import UserError, did_you_mean
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import GpuSpec
from shardwise.units import counted, money_text

HOURS_PER_MONTH = 8766 / 12  # a Julian year
POWER_OVERHEAD = 1.3  # cooling and the server around the GPU, relative to the GPU's power
DOLLARS_PER_KWH = 0.12
YEARS = 3.0  # that a bought device is used
SAVE_MINUTES, RESTART_MINUTES = 30.0, 10.0  # of a run on spot instances; assumptions, a price file states yours
# Of a price file, beside its prices.
NUMBERS: dict[str, float | None] = {
    "per_kwh": DOLLARS_PER_KWH,
    "used_share": 1.0,
    "years": YEARS,
    "host_price": 0.0,
    "interruptions_per_day": None,
    "save_minutes": SAVE_MINUTES,
    "restart_minutes": RESTART_MINUTES,
}


class Prices(BaseModel):
    """Dollars by GPU name: of one GPU's hour, on demand and as spot, and of buying one with its share of the server.

    A bought GPU is used for ``years``, ``used_share`` of the time; ``host_price`` is that of a node's server where
    the GPU's price does not include it. The last three are of spot instances: how often one is interrupted (``None`` is
    unknown), minutes between checkpoints and to restart.
    """

    model_config = ConfigDict(frozen=True)

    hour: dict[str, float] = {}
    spot: dict[str, float] = {}
    buy: dict[str, float] = {}
    per_kwh: float = DOLLARS_PER_KWH
    used_share: float = 1.0
    years: float = YEARS
    host_price: float = 0.0
    interruptions_per_day: float | None = None
    save_minutes: float = SAVE_MINUTES
    restart_minutes: float = RESTART_MINUTES


class Offer(BaseModel):
    """What a run costs one way, and what that assumes; ``None`` where the price is not known."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["on demand", "spot", "own"]
    dollars: float | None
    per_device_hour: float | None
    assumption: str


def offers(hours: float, cluster: ClusterSpec, prices: Prices) -> tuple[Offer, ...]:
    """Return what ``hours`` on ``cluster`` cost on demand, as spot and on bought devices."""
    gpu, name, devices = cluster.gpu, cluster.device_name, cluster.world_size
    source = f"{gpu.price_source.partition('; purchase')[0]}" if gpu is not None else ""
    hourly = cluster.price_per_device_hour
    own_spot = price_of(prices.spot, name)
    spot = own_spot if own_spot is not None or gpu is None else gpu.spot_price_per_hour
    listed = {"on demand": gpu is not None and hourly == gpu.price_per_hour, "spot": own_spot is None}
    found = []
    rented: tuple[tuple[Literal["on demand", "spot"], float | None, str], ...]
    rented = (("on demand", hourly, ""), ("spot", spot, "; as if never interrupted"))
    for kind, price, beside in rented:
        whose = source if listed[kind] else "as given"
        known = (
            f"{money_text(price)} an hour and GPU ({whose}){beside}"
            if price is not None
            else NO_PRICE.format(name=name)
        )
        found.append(
            Offer(
                kind=kind,
                dollars=training_cost(hours, devices, price),
                per_device_hour=price,
                assumption=known,
            )
        )
    return (*found, _own(hours, cluster, prices))


def price_sources(gpus: Iterable[GpuSpec | None]) -> str:
    """Return where the hardware table's prices of these GPUs are from, with their date; empty where it has none."""
    priced = [gpu for gpu in gpus if gpu is not None and gpu.price_per_hour is not None]
    return "; ".join(dict.fromkeys(gpu.price_source.partition("; purchase")[0] for gpu in priced))


NO_PRICE = "no source gives a price of {name}; give one with --price"


def _own(hours: float, cluster: ClusterSpec, prices: Prices) -> Offer:
    gpu, name = cluster.gpu, cluster.device_name
    given = price_of(prices.buy, name)
    price = given if given is not None or gpu is None else gpu.purchase_price
    watts = gpu.tdp_w if gpu is not None else None
    if price is None or watts is None:
        missing = "no source gives a price to buy {name} at; give one in a table [buy] of --price"
        return Offer(kind="own", dollars=None, per_device_hour=None, assumption=missing.format(name=name))
    each = own_device_hour(price, watts, prices, cluster.devices_per_node)
    months = break_even_months(
        price, cluster.price_per_device_hour, watts, per_kwh=prices.per_kwh, used_share=prices.used_share
    )
    pays = "" if months is None else f"; cheaper than on demand after {counted(math.ceil(months), 'month')} of that"
    years = f"{prices.years:g} year{'s' * (prices.years != 1)}"
    return Offer(
        kind="own",
        dollars=training_cost(hours, cluster.world_size, each),
        per_device_hour=each,
        assumption=(
            f"${price:,.0f} a GPU ({'as given' if given is not None else 'launch price'}) over {years}, "
            f"{prices.used_share:.0%} of the time in use, and power at {money_text(prices.per_kwh)}/kWh{pays}"
        ),
    )


def own_device_hour(price: float, watts: float, prices: Prices, devices_per_node: int) -> float:
    """Return the dollars of a used hour of a bought device: its price and its share of the server, and power."""
    used_hours = prices.years * 12 * HOURS_PER_MONTH * prices.used_share
    return (price + prices.host_price / devices_per_node) / used_hours + _power(watts, prices.per_kwh)


def _power(watts: float, per_kwh: float) -> float:
    """Dollars of an hour's power."""
    return watts * POWER_OVERHEAD / 1000 * per_kwh


def training_hours(tokens: float | None, tokens_per_step: float | None, step_s: float | None) -> float | None:
    """Hours to train ``tokens`` tokens; ``None`` where an input is unknown."""
    if tokens is None or not tokens_per_step or step_s is None:
        return None
    return tokens / tokens_per_step * step_s / 3600


def training_cost(hours: float | None, devices: int, price_per_device_hour: float | None) -> float | None:
    """Dollars of ``devices`` for ``hours``."""
    return None if hours is None or price_per_device_hour is None else hours * devices * price_per_device_hour


def dollars_per_million_tokens(
    tokens_per_s_per_device: float | None, price_per_device_hour: float | None
) -> float | None:
    """Dollars for a million trained tokens."""
    if not tokens_per_s_per_device or price_per_device_hour is None:
        return None
    return price_per_device_hour / 3600 / tokens_per_s_per_device * 1e6


def break_even_months(
    purchase_price: float | None,
    price_per_hour: float | None,
    power_w: float | None,
    *,
    per_kwh: float = DOLLARS_PER_KWH,
    used_share: float = 1.0,
) -> float | None:
    """Months until a bought device costs less than a rented one; ``None`` if never or unknown.

    ``used_share`` is the fraction of the time it is used: rent and power are paid for that fraction only. Not counted:
    housing, network, staff, resale value, and interest on the purchase price.
    """
    if purchase_price is None or price_per_hour is None or power_w is None:
        return None
    saved = price_per_hour - _power(power_w, per_kwh)
    return purchase_price / (saved * used_share * HOURS_PER_MONTH) if saved > 0 else None


def read_prices(path: Path, known: tuple[str, ...] = ()) -> Prices:
    """Read a TOML file of dollars: ``A100-80GB = 1.89`` is an hour.

    Optional are tables ``[spot]`` and ``[buy]``, and the keys of `NUMBERS`.

    Raises:
        UserError: the file is missing, is not TOML, or contains a value that is not a price; all problems at once.
    """
    try:
        data = read_toml(path)
    except OSError as error:
        raise UserError(f"--price '{path}': {error.strerror}; give the path of a TOML file with NAME = $/h") from None
    except ValueError as error:
        raise UserError(f"--price '{path}' is not TOML: {error}; write lines such as A100-80GB = 1.89") from None
    if not data:
        raise UserError(f"--price '{path}' is empty; write lines such as A100-80GB = 1.89")
    numbers = {key: data.pop(key, usual) for key, usual in NUMBERS.items()}
    spot, buy = data.pop("spot", {}), data.pop("buy", {})
    for key, table in (("spot", spot), ("buy", buy)):
        if not isinstance(table, dict):
            raise UserError(f"--price '{path}': {key} is {table!r}; it must be a table [{key}] of lines NAME = $")
    tables = {"": data, "spot.": spot, "buy.": buy}
    problems = [
        f"--price '{path}': {prefix}{name} is {value!r}; it must be dollars, 0 or more"
        for prefix, table in (*tables.items(), ("", {key: numbers[key] for key in ("per_kwh", "host_price")}))
        for name, value in table.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf")
    ]
    for key, most in (("used_share", 1.0), ("years", 100.0)):
        value = numbers[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            problems.append(f"--price '{path}': {key} is {value!r}; it must be above 0 and at most {most:g}")
    for key in ("interruptions_per_day", "save_minutes", "restart_minutes"):
        value = numbers[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < float("inf")):
            problems.append(f"--price '{path}': {key} is {value!r}; it must be a number, 0 or more")
    if known:
        problems += [
            f"--price '{path}': no GPU or setting is called '{name}'{did_you_mean(name, (*known, *NUMBERS))}"
            for table in tables.values()
            for name in table
            if not _same(name, known)
        ]
    if problems:
        raise UserError(*problems)
    return Prices(hour=data, spot=spot, buy=buy, **numbers)


def _same(name: str, known: tuple[str, ...]) -> bool:
    from shardwise.hardware.gpus import find_gpu

    try:
        return find_gpu(name) is not None
    except NotImplementedError:
        return name in known


def price_of(table: dict[str, float], gpu_name: str) -> float | None:
    """Price in ``table`` of a GPU, by any of its names."""
    from shardwise.hardware.gpus import find_gpu

    for name, price in table.items():
        found = find_gpu(name)
        if name == gpu_name or (found is not None and found.name == gpu_name):
            return price
    return None
