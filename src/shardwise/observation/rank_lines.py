"""Receipt lines that compare ranks with each other: samples, gradients, their scaling, weights, buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardwise.observation.expectation import Expectation
from shardwise.observation.loop_facts import LoopFacts, ParameterFacts
from shardwise.observation.setup_lines import UNSTATED, names_text
from shardwise.receipts.receipt import Line

_EQUAL = "equal on ranks with the same part"
_ROUNDING = 1e-6  # largest relative difference of norms of equal gradients
_FACTOR = 1e-3  # largest relative difference of the factors by which ranks scale their gradients
_CLIPPED = 1e-2  # largest excess of a clipped norm, in bf16


def rank_lines(expected: Expectation, ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    """Yield the lines that need the facts of all ranks."""
    several = len(ranks) > 1
    if several:
        yield _sample_line(ranks)
        yield _gradient_line(expected, ranks)
        yield from _factor_line(ranks)
    yield from _norm_line(expected, ranks)
    if several:
        yield _weight_line(expected, ranks)
        yield from _buffer_lines(ranks)


def _sample_line(ranks: Sequence[LoopFacts]) -> Line:
    holders: dict[str, list[int]] = {}
    for facts in ranks:
        for digest in dict.fromkeys(facts.samples):  # SimCSE, R-Drop and SAM forward one input twice
            holders.setdefault(digest, []).append(facts.rank)
    total = sum(len(owners) for owners in holders.values())
    planned = f"{total} distinct inputs of the model"
    if not total:
        return Line(name="samples across ranks", planned=planned, found="unknown: no input tensor was seen", ok=None)
    twice = [sorted(owners) for owners in holders.values() if len(owners) > 1]
    found = f"{len(holders)} distinct"
    found += f"; the same on ranks {', '.join(map(str, twice[0]))}" if twice else ""
    repeats = any(set(facts.samples) & set(facts.earlier) for facts in ranks)
    found += "; the data repeats itself from step to step" if repeats else ""
    shared = any("tensor parallel" in facts.unknown for facts in ranks)  # ranks of a group have the same samples
    return Line(name="samples across ranks", planned=planned, found=found, ok=None if repeats or shared else not twice)


def _copies(ranks: Sequence[LoopFacts]) -> Iterator[list[tuple[int, ParameterFacts]]]:
    """Yield the ranks that have the same part of a parameter, for each part that several have."""
    parts: dict[tuple[str, str], list[tuple[int, ParameterFacts]]] = {}
    for facts in ranks:
        for p in facts.parameters:
            parts.setdefault((p.name, p.part), []).append((facts.rank, p))
    yield from (owners for owners in parts.values() if len(owners) > 1)


def _gradient_line(expected: Expectation, ranks: Sequence[LoopFacts]) -> Line:
    judged = expected.strategy is not None
    planned = _EQUAL if judged else UNSTATED
    apart, compared = [], 0
    for owners in _copies(ranks):
        norms = [p.norm for _, p in owners]
        if all(norm is None for norm in norms):
            continue
        compared += 1
        known = [norm for norm in norms if norm is not None]
        if len(known) < len(norms) or not _close(known):
            apart.append(owners)
    if not apart:
        nothing = "no gradient was seen on two ranks" if not compared else f"{compared} equal"
        return Line(
            name="gradients across ranks", planned=planned, found=nothing, ok=True if judged and compared else None
        )
    ends = ", ".join("none" if p.norm is None else f"{p.norm:.6g}" for _, p in apart[0][:2])
    found = f"{len(apart)} of {compared} differ: {names_text([owners[0][1].name for owners in apart])} (norms {ends})"
    return Line(name="gradients across ranks", planned=planned, found=found, ok=False if judged else None)


def _close(norms: Sequence[float]) -> bool:
    if not all(math.isfinite(norm) for norm in norms):
        return all(not math.isfinite(norm) for norm in norms)
    return max(norms) - min(norms) <= _ROUNDING * max(norms)


def _factor_line(ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    """Compare the factors by which ranks scale gradients between the backward and the step."""
    factors = {
        facts.rank: facts.norm_step / facts.norm_backward
        for facts in ranks
        if facts.norm_backward and facts.norm_step is not None and math.isfinite(facts.norm_backward)
    }
    if len(factors) < 2 or any(facts.after_elements for facts in ranks):  # a loop that reduces by itself changes them
        return
    least, most = min(factors, key=factors.__getitem__), max(factors, key=factors.__getitem__)
    ok = factors[most] - factors[least] <= _FACTOR * factors[most]
    found = f"× {factors[most]:.4g} on each"
    if not ok:
        found = f"× {factors[least]:.4g} on rank {least}, × {factors[most]:.4g} on rank {most}: clipped by local norms?"
    yield Line(name="gradient scaling", planned="the same factor on every rank", found=found, ok=ok)


def _norm_line(expected: Expectation, ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    """Compare the global norm at the step with the one that gradients are clipped to."""
    parts = {(p.name, p.part): p.norm for facts in ranks for p in facts.parameters if p.norm is not None}
    if not parts:
        return
    norm = math.sqrt(sum(part * part for part in parts.values()))
    wanted = expected.clip_norm
    ok = None if wanted is None else norm <= wanted * (1 + _CLIPPED)
    planned = UNSTATED if wanted is None else f"at most {wanted:g}"
    yield Line(name="gradient norm", planned=planned, found=f"{norm:.6g}", ok=ok)


def _weight_line(expected: Expectation, ranks: Sequence[LoopFacts]) -> Line:
    judged = expected.strategy is not None
    planned = _EQUAL if judged else UNSTATED
    copies = [owners for owners in _copies(ranks) if all(p.bits is not None for _, p in owners)]
    apart = [owners[0][1].name for owners in copies if len({p.bits for _, p in owners}) > 1]
    if not copies:
        return Line(name="weights across ranks", planned=planned, found="no part is on two ranks", ok=None)
    found = (
        f"{len(apart)} of {len(copies)} differ: {names_text(apart)}" if apart else f"{len(copies)} equal, bit by bit"
    )
    return Line(name="weights across ranks", planned=planned, found=found, ok=not apart if judged else None)


def _buffer_lines(ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    seen: dict[str, set[int]] = {}
    sent: set[str] = set()
    for facts in ranks:
        for buffer in facts.buffers:
            seen.setdefault(buffer.name, set()).add(buffer.bits)
            sent |= {buffer.name} if buffer.sent else set()
    if not seen:
        return
    apart = [name for name, bits in seen.items() if len(bits) > 1]
    drifting = [name for name in apart if name not in sent]
    if drifting:
        found = f"{len(drifting)} of {len(seen)} differ, and nothing sends them: {names_text(drifting)}"
    elif apart:
        found = f"{len(apart)} of {len(seen)} differ until the next forward, when rank 0's are sent"
    else:
        found = f"{len(seen)} equal, bit by bit"
    ok = False if drifting else None if apart else True
    yield Line(name="buffers across ranks", planned="equal, or rank 0's are sent", found=found, ok=ok)
