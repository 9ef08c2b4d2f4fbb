"""How unevenly a router loads the ranks that experts are spread over, as a quantile of a stated distribution.

Tokens choose experts, so ranks of an expert-parallel group get different numbers of rows; the fullest one sets time and
memory. The load of one expert over the mean is taken as normal with deviation `EXPERT_SPREAD`, independently; a rank
has ``experts / ep`` of them, and the quantile is that of the fullest of ``ep`` ranks. Auxiliary losses hold experts to
that: the busiest of 64, of which a token takes 6, had 1.5 to 1.7 times the mean (MaxVio 0.52 and 0.72 in table 2 of
arXiv 2408.15664), which is 2.4 deviations. Where a token takes a larger share of the experts, loads differ less: the
deviation goes with that of one choice, ``sqrt((1 - share) / share)``, an assumption that is not followed upwards. A
program that is forced to balance, as benchmarks are, and one that drops what exceeds a capacity have no such spread.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

EXPERT_SPREAD = 0.25  # deviation of one expert's load, of the mean; from the paper's two sizes 0.22 and 0.30
MEASURED_SHARE = 6 / 64  # of its experts that a token takes, there
TIME_QUANTILE = 0.5  # of the fullest rank's load: a step in the middle
MEMORY_QUANTILE = 0.99  # a step of a hundred needs more


@lru_cache(maxsize=4096)
def fullest_load(
    experts: int, ep: int, quantile: float, capacity_factor: float | None = None, *, share: float = MEASURED_SHARE
) -> float:
    """Rows of the fullest rank, of the mean over ``ep`` ranks that share ``experts``; a token takes ``share`` of them.

    A capacity is computed in full by every expert, whatever it gets (Switch Transformer, GShard, DeepSpeed-MoE).
    """
    if capacity_factor is not None:
        return capacity_factor
    if ep <= 1 or experts <= 0:
        return 1.0
    of_one = math.sqrt((1 - share) / share / ((1 - MEASURED_SHARE) / MEASURED_SHARE)) if share > MEASURED_SHARE else 1.0
    each = EXPERT_SPREAD * of_one * math.sqrt(ep / experts)
    highest = NormalDist().inv_cdf(quantile ** (1.0 / ep))
    return min(float(ep), 1.0 + max(0.0, each * highest))
