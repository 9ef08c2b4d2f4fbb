"""How far a step may be from what is predicted, by the model's errors on published measurements."""

from __future__ import annotations

from shardwise.cost.time.cpu_time import SPREAD_CPU
from shardwise.cost.time.machine import Machine
from shardwise.hardware.gpus import generation_name, generations

# `Generation.spread` of generations without one: the interval of the five sources predicted by the factors of no
# source (Ada's, CDNA 3's, Volta's, GeForce's and SimuMax's B200), each counting the same; kernel and host constants and
# the known constants of each program had seen them. Ada and CDNA 3 have one small source each.
SPREAD_OTHERS = (0.85, 1.63)
# The interval of a program without a published step on this generation is so much wider on both sides. An estimate: the
# medians of the sources' errors lie within 8 % of each other, and were seen.
UNSEEN_PROGRAM = 1.1


def interval_of(machine: Machine, program: str, *, experts: bool) -> tuple[float, float]:
    """Measured over predicted, the middle 80 %: the generation's, wider for a program that it has no step of.

    ``experts`` are spread over ranks: the upper end is the generation's for those (`Generation.spread_experts`).
    """
    if machine.rates is not None:
        return SPREAD_CPU
    found = generations().get(_generation(machine))
    low, high = SPREAD_OTHERS if found is None or found.spread is None else found.spread
    wider = 1.0 if found is not None and program in found.programs else UNSEEN_PROGRAM
    return low / wider, high * wider * (found.spread_experts if found is not None and experts else 1.0)


def calibration_text(machine: Machine) -> str:
    """Sources of the fitted constants; empty for a generation without a published step."""
    generation = _generation(machine)
    found = generations().get(generation)
    return f"published {generation} steps" if found is not None and found.in_step is not None else ""


def _generation(machine: Machine) -> str:
    """Generation of the GPU; empty where rates were measured instead."""
    if machine.gpu is None or machine.rates is not None:
        return ""
    return generation_name(machine.gpu.arch, machine.gpu.name) or ""
