"""Divisibility rules of ``+tp``, ``+cp``, ``+pp`` and ``+ep``, each with values that would work.

The planner rejects plans by them before anything runs. Live modules are checked separately (``parallel``) for facts
beyond sizes: fused projections, operations on tokens, unsharded parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def one_of(values: Sequence[int]) -> str:
    """``one of 2, 4``, or the only value."""
    return str(values[0]) if len(values) == 1 else f"one of {', '.join(map(str, values))}"


def kv_repeats(kv_heads: int, degree: int) -> int:
    """Return the smallest repetition of key-value heads that is divisible by ``degree``."""
    return degree // math.gcd(kv_heads, degree)


def tensor_fits(heads: int, kv_heads: int, tp: int) -> bool:
    """Return whether each of ``tp`` ranks gets complete heads, and its queries their keys."""
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def context_fits(heads: int, kv_heads: int, tp: int, cp: int) -> bool:
    """Return whether the heads of one of ``tp`` ranks can be exchanged for tokens among ``cp``."""
    local, keys = heads // tp, max(1, kv_heads // tp)
    return heads % tp == 0 and local % cp == 0 and local % (keys * kv_repeats(keys, cp)) == 0


def tensor_problem(heads: int, kv_heads: int, tp: int, widths: Collection[int] = ()) -> str:
    """Explain why ``tp`` is invalid, with valid values; empty if it is valid.

    ``widths`` are the inputs of row-sharded layers.
    """
    wrong = [width for width in widths if width % tp]
    if tensor_fits(heads, kv_heads, tp) and not wrong:
        return ""
    what = f"{heads} heads" if heads % tp else f"{kv_heads} key-value heads"
    if tensor_fits(heads, kv_heads, tp):
        what = f"the {wrong[0]} inputs of a row-parallel layer"
    works = [n for n in range(2, heads + 1) if tensor_fits(heads, kv_heads, n) and not any(w % n for w in widths)]
    fix = f"use {one_of(works[:6])}" if works else "leave +tp out"
    return f"tp {tp} does not divide {what}; {fix}"


def context_problem(heads: int, kv_heads: int, tp: int, cp: int) -> str:
    """Explain why ``cp`` with ``tp`` is invalid, with valid values; empty if it is valid."""
    if heads % tp or context_fits(heads, kv_heads, tp, cp):
        return ""
    works = [n for n in range(2, heads // tp + 1) if context_fits(heads, kv_heads, tp, n)]
    fix = f"use {one_of(works[:6])}" if works else "leave +cp out"
    each = f" of a rank ({heads} over tp {tp})" if tp > 1 else ""
    return f"cp {cp} does not divide the {heads // tp} heads{each}, and each rank attends with complete heads; {fix}"


def expert_problem(experts: int, ep: int, ranks: int = 0, inner: int = 1) -> str:
    """Explain why ``ep`` ranks cannot have equally many of a layer's experts, with valid values; else empty.

    Values that do not divide the ``ranks`` that experts are spread over, where they are given, are not proposed, nor
    are those that are no multiple of ``inner``, the ranks of a sample (tp × cp).
    """
    if ep == 1 or (experts and experts % ep == 0):
        return ""
    if experts < 2:
        return f"ep {ep} spreads experts over ranks, and this model has none; leave +ep out"
    works = [n for n in range(2, experts + 1) if experts % n == 0 and ranks % n == 0 and n % inner == 0]
    fix = f"use {one_of(works[:8])}" if works else "leave +ep out"
    return f"ep {ep} does not divide the {experts} experts of a layer; {fix}"


def length_problem(seq_len: int, tp: int, cp: int) -> str:
    """Explain why ``cp`` (or ``tp`` with sequence parallel) cannot divide the length; else empty."""
    step = tp * cp
    if step == 1 or seq_len % step == 0:
        return ""
    who = " × ".join(f"{axis} {n}" for axis, n in (("cp", cp), ("tp", tp)) if n > 1)
    full = f"{who} = {step}" if tp > 1 and cp > 1 else who
    below, above = seq_len // step * step, (seq_len // step + 1) * step
    nearest = f"{below} or {above}" if below else str(above)
    fix = f"use {nearest}" + (", or turn sequence_parallel off" if tp > 1 and cp == 1 else "")
    return f"{full} shards samples along their length, which is {seq_len}; {fix}"
