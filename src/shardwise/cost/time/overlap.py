"""Overlap of communication with computation: two streams and one wire.

The program's order is kept: the weights of the next unit are gathered while the current one computes (one unit ahead,
as FSDP2 prefetches), gradients of a unit are reduced after its backward. Gathers and reductions share the link, so they
queue on one wire. Runs of equal units are followed until their increments repeat, then multiplied.

Hidden communication has a cost: its kernels take multiprocessors and memory bandwidth from the computation.
``contention`` is the fraction of the hidden seconds by which the computation grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CONTENTION = 0.15  # seconds that computation grows by for each second of hidden communication; assumed, not fitted
_CLOSE = 1e-9  # seconds; two increments that differ by less are equal


@dataclass(frozen=True, slots=True)
class UnitRun:
    """Run of ``count`` equal units; seconds of each one's computation, gather and reduction."""

    count: int
    compute_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0


def elapsed_s(runs: Iterable[UnitRun], *, contention: float = 0.0, ahead: bool = True) -> float:
    """Seconds until the last unit has computed and the last gradient is reduced.

    ``ahead`` False gathers a unit only when the one before it has computed.
    """
    wire = compute = before = pending = 0.0  # ends of the wire's and of the computation's work; a reduction to queue
    work = traffic = 0.0
    for run in runs:
        count = run.count
        work += count * run.compute_s
        traffic += count * (run.gather_s + run.reduce_s)
        last = (-1.0, -1.0)
        while count:
            was = (wire, compute)
            gathered = 0.0
            if run.gather_s:
                gathered = wire = max(wire, before if ahead else compute) + run.gather_s
            if pending:
                wire = max(wire, compute) + pending
            before = compute
            compute = max(compute, gathered) + run.compute_s
            pending = run.reduce_s
            count -= 1
            step = (wire - was[0], compute - was[1])
            if abs(step[0] - last[0]) < _CLOSE and abs(step[1] - last[1]) < _CLOSE:
                wire, compute, before = wire + count * step[0], compute + count * step[1], before + count * step[1]
                break
            last = step
    if pending:
        wire = max(wire, compute) + pending
    end = max(wire, compute)
    return end + contention * max(0.0, traffic - (end - work))
