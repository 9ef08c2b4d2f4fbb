"""Answer of ``shardwise plan --serve`` in sentences, for the terminal, the page and ``--json``."""

from __future__ import annotations

from shardwise.cost.time.serving_time import SPREAD
from shardwise.search.serving_options import ServingRequest, ServingResult
from shardwise.units import bytes_text, counted, money_text, number_text, seconds_text


def answer(request: ServingRequest, result: ServingResult) -> list[str]:
    """Say what to use and what it does, or what would fit."""
    what, bits = _what(request), request.quant or "16-bit"
    if result.recommended is None:
        name = f"{request.cluster.world_size} × {request.cluster.device_name}"
        return [
            f"{name} cannot hold {what} in {bits} weights. What would fit:",
            *(f"  {line}" for line in result.advice),
        ]
    best = result.options[result.recommended]
    replicas = "" if best.replicas == 1 else f", {counted(best.replicas, 'replica')}"
    room = "whether it fits is unknown: the device's memory is"
    if best.most is not None:
        room = (
            f"a device needs {bytes_text(best.device_bytes)} of {bytes_text(best.usable_bytes)}, and {best.most:,} fit"
        )
    lines = [f"Use tp={best.tp}{replicas} with {bits} weights for {what}: {room}."]
    found = best.bottleneck
    if best.decode is None or best.tokens_per_s is None or best.each_per_s is None or found is None:
        return [*lines, f"Its speed is unknown, because that of {request.cluster.device_name} is."]
    low, high = SPREAD
    rate = f"{number_text(best.tokens_per_s / high)} to {number_text(best.tokens_per_s / low)} in 8 of 10 cases"
    lines.append(
        f"With all contexts full it generates {number_text(best.tokens_per_s)} tokens/s ({rate}), "
        f"{number_text(best.each_per_s)} for each sequence, and a prompt of {request.context:,} tokens takes "
        f"{seconds_text(best.prefill_s)} to its first token."
    )
    dollars = best.dollars_per_million
    price = "" if dollars is None else f" A million generated tokens cost {money_text(dollars)}."
    lines.append(
        f"What limits a decode step is {found[0]} ({found[1]:.0%} of {seconds_text(best.decode.step_s)}).{price}"
    )
    return lines


def _what(request: ServingRequest) -> str:
    return f"{counted(request.concurrency, 'sequence')} of {request.context:,} tokens"


def served_notes(request: ServingRequest, result: ServingResult) -> list[str]:
    """Say what the figures leave out."""
    best = result.options[result.recommended or 0]
    notes = [best.note] if best.note else []
    peaks = request.cluster.gpu.peak_flops if request.cluster.gpu is not None else {}
    if request.quant == "fp8" and peaks and "fp8" not in peaks:
        notes.append(f"{request.cluster.device_name} has no fp8 units: weights have 8 bits, products 16")
    elif request.quant in ("int8", "int4"):
        notes.append(f"{request.quant} is counted for the weights; products are 16-bit")
    notes += [f"unknown: {line}" for line in request.profile.unknown if "full attention" not in line]
    return [
        *notes,
        "a step with all contexts full is the slowest; prompts read in between and the host's time come on top",
    ]
