"""Explain gradient differences: factors of a degree, missing sums, misplaced rows.

It uses only the plan's degrees and the gradients: nothing is run here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.gradcheck.compare import Difference, Gradients, factor_of
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan

NEARLY_ALL = 0.9  # of the elements that have a gradient
SAME = 1e-4  # tolerance for equal factors
MOST_PARAMETERS = 3  # reported row by row
UNEVEN = "micro batches are not weighted by their tokens"


@dataclass(frozen=True)
class CauseContext:
    """Context of a strategy's factors: its plan, and the key-value heads of a projection."""

    plan: Plan
    key_value_heads: int = 0
    head_dim: int = 0
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class FactorCause:
    """Factor of a known error, the axis with that degree, and the error in words."""

    factor: float
    what: str
    why: str


def candidates(plan: Plan) -> list[FactorCause]:
    """List the factors of errors with the plan's degrees: each degree, inverses, usual products."""
    dims, accumulation = plan.dims, plan.grad_accum
    found: list[FactorCause] = []

    def add(degree: int, what: str, large: str, small: str) -> None:
        if degree > 1:
            found.append(FactorCause(float(degree), f"{what} {degree}", large))
            found.append(FactorCause(1.0 / degree, f"{what} {degree}", small))

    add(
        dims.tp,
        "tp",
        "the loss (or its gradient) is counted once for each rank of tp",
        "the loss (or its gradient) is averaged over tp, whose ranks have one and the same loss",
    )
    for axis, degree in (("dp", dims.dp), ("cp", dims.cp)):
        add(
            degree,
            axis,
            f"gradients are added up over {axis}, where the mean is to be taken (or the loss is weighted by {axis} "
            "twice)",
            f"the mean over {axis} is taken of gradients that are divided by the global tokens already (the loss is "
            f"not weighted by {axis})",
        )
    add(
        dims.pp,
        "pp",
        "the loss (or its gradient) is counted once for each stage of pp",
        "the gradient is averaged over the stages of pp",
    )
    if accumulation > 1:
        batches = "micro batches of the pipeline" if dims.pp > 1 else "accumulation"
        add(
            accumulation,
            batches,
            "the gradients of micro batches are added up as if each were a global batch",
            "gradients are divided by the number of micro batches once too often",
        )
    add_product = _products(dims)
    for what, degree in add_product:
        add(degree, what, f"counted once for each rank of {what}", f"averaged over {what} once too often")
    return found


def _products(dims: ParallelDims) -> list[tuple[str, int]]:
    degrees = {"dp": dims.dp, "cp": dims.cp, "tp": dims.tp, "pp": dims.pp}
    used = {axis: degree for axis, degree in degrees.items() if degree > 1}
    pairs = [(f"{a} × {b}", used[a] * used[b]) for i, a in enumerate(used) for b in list(used)[i + 1 :]]
    if len(used) > 2:
        pairs.append((" × ".join(used), math.prod(used.values())))
    return pairs


def name_factor(factor: float, plan: Plan) -> str:
    """Describe a factor: ``2.00 × too large: tp 2: the loss is counted ...``.

    Names all axes with that degree.
    """
    size = factor if abs(factor) >= 1.0 else 1.0 / factor if factor else 0.0
    if factor < 0 or not factor:
        text = "zero" if not factor else f"{factor:.4g} × what one process computes (the sign is wrong)"
        return f"{text}: no degree of the plan explains that"
    message = f"{size:.4g} × too {'large' if factor > 1 else 'small'}"
    matching = [c for c in candidates(plan) if abs(c.factor - factor) <= SAME * c.factor]
    simple = [c for c in matching if " × " not in c.what] or matching
    if not simple:
        degrees = ", ".join(dict.fromkeys(c.what for c in candidates(plan) if " × " not in c.what)) or "none above 1"
        return f"{message}: no degree of the plan explains that ({degrees})"
    if len(simple) == 1:
        return f"{message}: {simple[0].what}: {simple[0].why}"
    return f"{message}, the degree of {' and of '.join(c.what for c in simple)}: either " + "; or ".join(
        c.why for c in simple
    )


def explain(
    reference: Gradients,
    found: Gradients,
    differences: Sequence[Difference],
    setting: CauseContext,
    *,
    tolerance: float,
    parts: Sequence[Gradients] = (),
    contributions: Mapping[tuple[int, int], Gradients] | None = None,
    tokens: Mapping[tuple[int, int], int] | None = None,
    brief: bool = False,
    noise: float = 0.0,
) -> tuple[str, ...]:
    """Explain why ``found`` differs from ``reference``, most informative first; empty if equal.

    Args:
        reference: of one process over the global batch.
        found: of the strategy.
        differences: result of `compare`.
        setting: the plan.
        tolerance: relative error up to which a gradient is correct.
        parts: each rank's view of the gradients; a rank omits parameters that it does not have.
        contributions: of each (data-parallel rank, micro batch) the gradient of its summed loss, in one process.
        tokens: labels that count in each of these.
        brief: the forward is known to differ: omit factors and rows of single parameters.
        noise: relative error of ``found`` by its own rounding.
    """
    wrong = [d for d in differences if not d.error <= tolerance]
    if not wrong:
        return ()
    missing = [d.name for d in wrong if d.missing]
    lines = [_missing(missing, reference)] if missing else []
    rest = [d for d in wrong if not d.missing]
    if not rest:
        return tuple(lines)
    shared = _shared_factor(rest, reference)
    if shared is not None:
        return (*lines, f"gradients are {name_factor(shared, setting.plan)}")
    unsummed, rest = _unsummed(rest, reference, parts, setting.plan.dims, noise / 100 if noise else tolerance)
    lines += unsummed
    by_factor = all(d.factor is not None for d in rest)  # equal weights carry no information about tokens
    if rest and contributions and tokens and not by_factor:
        weighed = _weights(rest, found, contributions, tokens, noise)
        if weighed:
            return (*lines, weighed)
    if brief:
        return tuple(lines)
    lines += _partial_factors(rest, setting.plan)
    unnamed = [d for d in rest if d.factor is None]
    if unnamed:
        lines += [*_suspects(setting.plan), *_rows(unnamed, reference, found, setting, tolerance)]
    return tuple(lines)


def explain_weights(
    reference: Gradients, found: Gradients, differences: Sequence[Difference], setting: CauseContext
) -> tuple[str, ...]:
    """Name the weights that are not on the ranks as they are in the model."""
    wrong = [d for d in differences if d.error > 0]
    rows = _rows(wrong, reference, found, setting, 0.0)
    return tuple(f"the weights on the ranks are not the model's: {row}" for row in rows)


def explain_loss(found: float, expected: float, plan: Plan) -> str:
    """Explain a wrong loss by the axes that shard a forward."""
    dims = plan.dims
    suspects = {
        f"tp {dims.tp} (heads or the parts of a fused projection split at the wrong place)": dims.tp,
        f"cp {dims.cp} (tokens that attend to the wrong ones, or have the wrong places)": dims.cp,
        f"pp {dims.pp} (a block omitted, run twice, or out of order)": dims.pp,
    }
    named = [text for text, degree in suspects.items() if degree > 1]
    message = f"the loss is {found:.6g} where one process has {expected:.6g}: the forward itself differs"
    return (
        f"{message}, by {' or by '.join(named)}" if named else f"{message}, though no axis of {plan.strategy} cuts it"
    )


def explain_norm(found: float, expected: float, plan: Plan) -> str:
    """Explain a wrong norm over correct gradients."""
    factor = found / expected if expected else math.inf
    degrees = {"tp": plan.dims.tp, "dp": plan.dims.dp, "cp": plan.dims.cp, "pp": plan.dims.pp}
    exact = [axis for axis, n in degrees.items() if n > 1 and abs(factor - math.sqrt(n)) <= SAME * factor]
    less = [axis for axis, n in degrees.items() if n > 1 and abs(factor * math.sqrt(n) - 1) <= SAME]
    message = f"the gradients are right, but their norm is {factor:.4g} ×"
    if exact:
        return (
            f"{message} the right one, the root of {' or '.join(exact)}: all parameters count once for each rank there"
        )
    if less:
        return f"{message} the right one, 1 / the root of {' or '.join(less)}: it is that of one rank's shard there"
    most = [axis for axis, n in degrees.items() if n > 1 and 1 < factor < math.sqrt(n)]
    if most:
        return f"{message} the right one: some parameters count once for each rank of {' or '.join(most)}"
    return f"{message} the right one: parameters are missing in it"


def pattern_of(names: Sequence[str], most: int = 3) -> str:
    """Return ``layers.*.q_norm.weight`` for the names of all blocks; the first few patterns."""
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    more = f" and {len(patterns) - most} more" if len(patterns) > most else ""
    return ", ".join(patterns[:most]) + more


def _suspects(plan: Plan) -> list[str]:
    """List options that change a backward.

    For a correct forward, where no factor explains the gradient.
    """
    named = []
    if plan.dims.pp > 1:
        frees = (
            f" where {plan.parsed.base} frees weights after the forward" if plan.parsed.reshards_after_forward else ""
        )
        named.append(f"pipeline_schedule {plan.pipeline_schedule}{frees}")
    if plan.dims.tp > 1 and plan.sequence_parallel:
        named.append("sequence_parallel")
    if plan.recompute != "none":
        named.append(f"recompute {plan.recompute_words}")
    if plan.syncs_every_micro_batch:
        named.append("gradient_sync every")
    return (
        [f"the loss is right, the backward is not: of {plan.strategy} that is {', or '.join(named)}"] if named else []
    )


def _missing(names: Sequence[str], reference: Gradients) -> str:
    number = sum(g is not None for g in reference.values())
    if len(names) == number:
        return (
            "no parameter has a gradient: none was reduced over the ranks (did the last micro batch synchronise?), or "
            "none flows back from the loss"
        )
    many = f"{len(names)} of {number} parameters"
    return f"no gradient: {pattern_of(names)} ({many}): none flows back, or none was reduced"


def _shared_factor(wrong: Sequence[Difference], reference: Gradients) -> float | None:
    """Return one factor of nearly all elements that have a gradient, if there is one."""
    full = sum(g.numel() for g in reference.values() if g is not None and bool(g.count_nonzero()))
    factors = [d.factor for d in wrong if d.factor is not None]
    if not factors or not full:
        return None
    middle = sorted(factors)[len(factors) // 2]
    alike = [d for d in wrong if d.factor is not None and abs(d.factor - middle) <= SAME * abs(middle)]
    covered = sum(g.numel() for d in alike if (g := reference[d.name]) is not None)
    return middle if covered >= NEARLY_ALL * full else None


def _unsummed(
    wrong: Sequence[Difference],
    reference: Gradients,
    parts: Sequence[Gradients],
    dims: ParallelDims,
    tolerance: float,
) -> tuple[list[str], list[Difference]]:
    """Find parameters whose shards along one axis add up to the full gradient; and the rest."""
    if not parts:
        return [], list(wrong)
    by_axis: dict[tuple[str, str], list[str]] = {}
    rest = []
    for difference in wrong:
        axis = _axis_of_parts(difference.name, reference[difference.name], parts, dims, max(100 * tolerance, 1e-7))
        if axis is None:
            rest.append(difference)
        else:
            by_axis.setdefault(axis, []).append(difference.name)
    lines = []
    for (along, how), names in by_axis.items():
        many = f" ({len(names)} parameters)" if len(names) > 1 else ""
        holds = "each stage has a part of it" if along == "pp" else "each rank has a part of it"
        if how == "averaged":
            holds = "each rank has that of its own samples or tokens alone"
        lines.append(f"the gradient of {pattern_of(names)}{many} is not {how} over {along}: {holds}")
    return lines, rest


def _axis_of_parts(
    name: str, full: torch.Tensor | None, parts: Sequence[Gradients], dims: ParallelDims, within: float
) -> tuple[str, str] | None:
    if full is None:
        return None
    holders = [rank for rank, part in enumerate(parts) if part.get(name) is not None]
    if not holders:
        return None
    start = dims.place(holders[0])
    for axes in (("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp")):
        fixed = [axis for axis in ("tp", "cp", "dp", "pp") if axis not in axes]
        group = [r for r in holders if all(getattr(dims.place(r), a) == getattr(start, a) for a in fixed)]
        tensors = [t for rank in group if (t := parts[rank].get(name)) is not None]
        if len(tensors) < 2:
            continue
        total = torch.stack(tensors).sum(0)
        scale = float(full.abs().max()) or 1.0
        for how, value in (("summed", total), ("averaged", total / len(tensors))):
            if float((value - full).abs().max()) <= within * scale:
                return " × ".join(axes), how
    return None


def _weights(
    wrong: Sequence[Difference],
    found: Gradients,
    contributions: Mapping[tuple[int, int], Gradients],
    tokens: Mapping[tuple[int, int], int],
    noise: float = 0.0,
) -> str:
    """Describe the micro batches' weights in ``found``; empty where it is not a weighted sum."""
    names = [d.name for d in wrong if found.get(d.name) is not None]
    keys = [key for key in contributions if tokens[key]]
    if not names or not keys:
        return ""

    def flat(gradients: Gradients) -> torch.Tensor:
        numbers = [(gradients.get(name), found[name]) for name in names]
        return torch.cat([(torch.zeros_like(f) if g is None else g).flatten() for g, f in numbers if f is not None])

    target = flat(found)
    matrix = torch.stack([flat(contributions[key]) for key in keys], 1)
    solved = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    if float((matrix @ solved - target).norm()) > max(1e-6, noise) * float(target.norm()):
        return ""
    total = sum(tokens[key] for key in keys)
    weight = {key: float(value) * total for key, value in zip(keys, solved, strict=True)}  # 1 where it is correct
    return _name_weights(weight, {key: tokens[key] for key in keys}, total, max(SAME, noise))


def _name_weights(
    weight: Mapping[tuple[int, int], float], tokens: Mapping[tuple[int, int], int], total: int, within: float
) -> str:
    ranks = sorted({rank for rank, _ in weight})
    micros = sorted({micro for _, micro in weight})
    dead = [rank for rank in ranks if all(abs(weight[key]) < within for key in weight if key[0] == rank)]
    if dead:
        which = ", ".join(map(str, dead))
        return f"the samples of data-parallel rank {which} do not count: gradients are not reduced over dp"
    lost = [micro for micro in micros if all(abs(weight[key]) < within for key in weight if key[1] == micro)]
    if lost:
        which = ", ".join(map(str, lost))
        return f"micro batch {which} (of {micros[-1] + 1}) does not count: what accumulates before the last one is lost"
    own = {rank: sum(n for key, n in tokens.items() if key[0] == rank) for rank in ranks}
    if _constant([weight[key] * tokens[key] for key in weight], within):
        return (
            "each micro batch is averaged over its own tokens (a mean of means), where the tokens of the global batch "
            f"({total}) are to be divided by: right only where all have the same number"
            + _scaled([weight[key] * tokens[key] for key in weight], total, within)
        )
    if _constant([weight[key] * own[key[0]] for key in weight], within):
        return (
            "each rank divides by its own tokens "
            f"({', '.join(str(own[rank]) for rank in ranks)}) where the tokens of the global batch ({total}) are to be "
            "divided by: right only where all ranks have the same number"
            + _scaled([weight[key] * own[key[0]] for key in weight], total * len(weight) / len(ranks), within)
        )
    shown = ", ".join(f"rank {r} micro batch {m}: {w:.3g} ×" for (r, m), w in list(weight.items())[:6])
    return f"{UNEVEN}: {shown}"


def _scaled(shares: Sequence[float], total: float, within: float) -> str:
    """Return the factor of all shares, which should sum to ``total``; empty where there is none."""
    factor = sum(shares) / total
    if abs(factor - 1) <= within:
        return ""
    size = f"{factor:.4g} × too large" if factor > 1 else f"{1 / factor:.4g} × too small" if factor > 0 else "negative"
    return f"; beside that, the gradient is {size}"


def _constant(numbers: Sequence[float], within: float) -> bool:
    return max(numbers) - min(numbers) <= within * max(map(abs, numbers))


def _partial_factors(wrong: Sequence[Difference], plan: Plan) -> list[str]:
    """List factors of only some parameters, each with their names."""
    groups: dict[float, list[str]] = {}
    for difference in wrong:
        if difference.factor is not None:
            near = next((f for f in groups if abs(f - difference.factor) <= SAME * abs(f)), difference.factor)
            groups.setdefault(near, []).append(difference.name)
    return [
        f"the gradient of {pattern_of(names)} ({len(names)} parameters) is {name_factor(factor, plan)}"
        for factor, names in list(groups.items())[:4]
    ]


def _rows(
    wrong: Sequence[Difference], reference: Gradients, found: Gradients, setting: CauseContext, tolerance: float
) -> list[str]:
    """Describe the differing rows of the first parameters, and whether they belong elsewhere."""
    lines = []
    for difference in wrong[:MOST_PARAMETERS]:
        expected, seen = reference[difference.name], found.get(difference.name)
        if expected is None or seen is None or expected.shape != seen.shape or not expected.ndim:
            shape = "nothing" if seen is None else f"shape {list(seen.shape)}"
            lines.append(f"{difference.name}: {shape} where one process has another")
            continue
        bound = max(tolerance, 1e-9) * (float(expected.abs().max()) or 1.0)
        by_row = (seen - expected).abs().reshape(len(expected), -1).amax(1)
        bad = (by_row > bound).nonzero().flatten().tolist()
        if len(bad) == len(expected):
            text = f"all {len(expected)} rows differ, by no one factor"
        else:
            text = f"{_row_text(bad, len(expected))} differ, the others are right"
        moved = _moved(bad, expected, seen, bound)
        split = _heads(bad, len(expected), setting) if moved or len(bad) < len(expected) else ""
        lines.append(f"{difference.name}: {text}{moved}{split}")
    more = len(wrong) - MOST_PARAMETERS
    return [*lines, f"and {more} more parameters"] if more > 0 else lines


def _row_text(rows: Sequence[int], full: int) -> str:
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row - 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    shown = ", ".join(f"{a} to {b}" if a != b else f"{a}" for a, b in ranges[:4])
    more = " and more" if len(ranges) > 4 else ""
    return f"rows {shown}{more} of {full}"


def _moved(bad: Sequence[int], expected: torch.Tensor, seen: torch.Tensor, bound: float) -> str:
    """Describe whether the differing rows are rows of the reference from other positions."""
    if not bad or expected.ndim < 2 or len(bad) > 512:
        return ""
    index = torch.tensor(bad)
    distance = torch.cdist(seen[index].flatten(1), expected[index].flatten(1), p=math.inf)
    nearest = distance.min(1)
    if bool((nearest.values > bound).any()):
        return ""
    source = index[nearest.indices]
    return f"; rows from {bad[0]} on contain what belongs to rows from {int(source[0])} on: they are in the wrong place"


def _heads(bad: Sequence[int], rows: int, setting: CauseContext) -> str:
    heads, size = setting.key_value_heads, setting.head_dim
    if not bad or not heads or not size or rows != heads * size:
        return ""
    hit = sorted({row // size for row in bad})
    return f" (key/value heads {', '.join(map(str, hit))} of {heads}: does the split over ranks keep heads complete?)"


def summary_factor(difference: Difference, reference: torch.Tensor | None, found: torch.Tensor | None) -> float | None:
    """Return the best-fitting factor, even if it does not explain all elements; else ``None``."""
    if difference.factor is not None or reference is None or found is None or reference.shape != found.shape:
        return difference.factor
    return factor_of(reference, found, within=math.inf)
