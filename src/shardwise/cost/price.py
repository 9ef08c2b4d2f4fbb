"""Hours and money of a training run. Prices are US dollars; unknown prices are not guessed.

Counted: the time of optimizer steps. Not counted: start-up, evaluation, checkpoints, failures and restarts, storage,
traffic out of the cloud, people.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from shardwise.document import read_toml
from shardwise.errors import UserError, did_you_mean

HOURS_PER_MONTH = 8766 / 12  # a Julian year
POWER_OVERHEAD = 1.3  # cooling and the server around the GPU, relative to the GPU's power
DOLLARS_PER_KWH = 0.12


class Prices(BaseModel):
    """Dollars by GPU name: for one GPU-hour, and for one GPU with its share of the server."""

    model_config = ConfigDict(frozen=True)

    hour: dict[str, float] = {}
    buy: dict[str, float] = {}
    per_kwh: float = DOLLARS_PER_KWH


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
    saved = price_per_hour - power_w * POWER_OVERHEAD / 1000 * per_kwh
    return purchase_price / (saved * used_share * HOURS_PER_MONTH) if saved > 0 else None


def read_prices(path: Path, known: tuple[str, ...] = ()) -> Prices:
    """Read dollars from TOML: ``A100-80GB = 1.89`` per hour, optional ``[buy]`` and ``per_kwh``.

    Raises:
        UserError: the file is missing, is not TOML, or contains a value that is not a price; all problems at once.
    """
    try:
        data = read_toml(path)
    except OSError as error:
        raise UserError(f"--price '{path}': {error.strerror}; give the path of a TOML file with NAME = $/h") from None
    except ValueError as error:
        raise UserError(f"--price '{path}' is not TOML: {error}; write lines such as A100-80GB = 1.89") from None
    buy = data.pop("buy", {})
    per_kwh = data.pop("per_kwh", DOLLARS_PER_KWH)
    if not isinstance(buy, dict):
        raise UserError(f"--price '{path}': buy is {buy!r}; it must be a table [buy] of lines NAME = $")
    tables = {"": data, "buy.": buy}
    problems = [
        f"--price '{path}': {prefix}{name} is {value!r}; it must be dollars, 0 or more"
        for prefix, table in (*tables.items(), ("", {"per_kwh": per_kwh}))
        for name, value in table.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf")
    ]
    if known and not problems:
        problems += [
            f"--price '{path}': no GPU is called '{name}'{did_you_mean(name, known)}"
            for table in tables.values()
            for name in table
            if not _same(name, known)
        ]
    if problems:
        raise UserError(*problems)
    return Prices(hour=data, buy=buy, per_kwh=per_kwh)


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
