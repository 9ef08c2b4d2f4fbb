"""``shardwise plan --list``: the models and GPUs that are known by name."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwise.errors import UserError, did_you_mean
from shardwise.units import bytes_text, count_text

LISTS = ("models", "gpus")


def print_list(kind: str, console: Console) -> None:
    """Print the names of a kind with a few facts.

    Raises:
        UserError: there is no such list.
    """
    if kind not in LISTS:
        raise UserError(f"--list '{kind}' must be one of {', '.join(LISTS)}{did_you_mean(kind, LISTS)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(_HEADS[kind]):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in _models() if kind == "models" else _gpus():
        table.add_row(*row)
    console.print(table)
    if kind == "gpus":
        console.print(_price_note(), markup=False)


_HEADS = {
    "models": ("model", "parameters", "positions"),
    "gpus": ("gpu", "memory", "bf16 TFLOP/s", "$/h on demand", "$/h spot"),
}


def _models() -> list[tuple[str, ...]]:
    from shardwise.model.architecture import parameter_count
    from shardwise.model.catalogue import catalogue_names, find_architecture

    rows: list[tuple[str, ...]] = []
    for name in catalogue_names():
        found = find_architecture(name)
        if found is None:
            rows.append((name, "reads images", ""))
            continue
        rows.append((name, count_text(parameter_count(found)), str(found.max_seq_len or "")))
    return rows


def _price_note() -> str:
    from shardwise.cost.price import price_sources
    from shardwise.hardware.gpus import find_gpu, gpu_names
    from shardwise.report.where_report import OTHER_PRICES

    return f"prices: {price_sources(map(find_gpu, gpu_names()))}; {OTHER_PRICES}"


def _gpus() -> list[tuple[str, ...]]:
    from shardwise.hardware.gpus import find_gpu, gpu_names

    rows: list[tuple[str, ...]] = []
    for gpu in filter(None, map(find_gpu, gpu_names())):
        peak = gpu.peak_flops.get("bf16")
        prices = (gpu.price_per_hour, gpu.spot_price_per_hour)
        cells = ["–" if price is None else f"{price:.2f}" for price in prices]
        rows.append((gpu.name, bytes_text(gpu.memory_bytes), "–" if peak is None else f"{peak / 1e12:.0f}", *cells))
    return rows
