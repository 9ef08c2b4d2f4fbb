"""Answer of ``shardwise plan --serve``: sentences and a table of tensor-parallel degrees."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwise.cost.memory.serving_memory import ENGINE_SHARE
from shardwise.report.serving_sentences import answer, served_notes
from shardwise.search.serving_options import ServingRequest, ServingResult
from shardwise.units import bytes_text, count_text, number_text, seconds_text

MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "?"}
HEADS = ("tp", "replicas", "weights", "KV cache", "of usable", "at most", "first token", "tokens/s", "each")


def print_serving(request: ServingRequest, result: ServingResult, console: Console) -> None:
    """Print the sentence, the model and cluster, the table, and what the figures leave out."""
    for line in answer(request, result):
        console.print(line, markup=False)
    console.print()
    for line in _facts(request):
        console.print(line, markup=False)
    console.print(_table(result))
    for note in served_notes(request, result):
        console.print(note, markup=False)


def _facts(request: ServingRequest) -> list[str]:
    profile, cluster, cache = request.profile, request.cluster, request.cache
    active = f", {count_text(round(profile.num_active))} of them for one token" if profile.experts else ""
    token = cache.sequence_bytes(request.context, request.kv_itemsize)
    windows = sum(layer.count for layer in cache.layers if layer.window is not None)
    states = sum(layer.count for layer in cache.layers if layer.state_bytes)
    kinds = [f"{windows} of {profile.num_blocks} layers keep a window" if windows else ""]
    kinds += [f"{states} of {profile.num_blocks} layers keep a state of fixed size" if states else ""]
    kinds += ["of latents" if cache.shared else ""]
    beside = "; ".join(kind for kind in kinds if kind)
    link = f", {cluster.link.kind}" if cluster.link and cluster.devices_per_node > 1 else ""
    return [
        f"model: {profile.name}, {count_text(profile.num_parameters)} parameters{active}",
        f"KV cache: {bytes_text(token)} a sequence, {request.kv_type}" + (f"; {beside}" if beside else ""),
        f"cluster: {cluster.world_size} × {cluster.device_name}, {bytes_text(cluster.device_memory_bytes)} each, "
        f"{ENGINE_SHARE:.0%} of it usable{link}",
    ]


def _table(result: ServingResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    for number, option in enumerate(result.options):
        best = number == result.recommended
        table.add_row(
            "[bold green]▶[/]" if best else MARKS[option.fits],
            str(option.tp),
            str(option.replicas),
            bytes_text(option.weight_bytes),
            bytes_text(option.cache_bytes),
            "unknown" if option.usable_bytes is None else f"{option.device_bytes / option.usable_bytes:.0%}",
            "unknown" if option.most is None else f"{option.most:,}",
            seconds_text(option.prefill_s),
            number_text(option.tokens_per_s),
            number_text(option.each_per_s),
        )
    return table
