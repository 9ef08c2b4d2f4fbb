"""`diagnose`: time losses of a run, and a loss that does not fall, in sentences. No torch here.

The rules are in the sibling files, one function per cause. This file combines them: root causes come first, and their
consequences become hints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.diagnosis import learning, links, waits
from shardwise.diagnosis import plan_causes as plan
from shardwise.diagnosis.finding import Finding
from shardwise.diagnosis.observed import Observed
from shardwise.diagnosis.weight import HINT, MIN_STEPS, Case, percent, span
from shardwise.measure.step_time.timing import NAMES, Timing

RULES: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    learning.loss_at_chance,
    learning.loss_rises,
    learning.loss_spikes,
    learning.lost_gradients,
    waits.throttling,
    waits.oversubscription,
    waits.data_loader,
    waits.straggler,
    waits.checkpoint_stall,
    links.early_sync,
    links.communication,
    links.pipeline_bubble,
    plan.recompute,
    plan.needless_sharding,
    plan.small_micro_batch,
)
_LEVELS = ("alarm", "hint", "fine")
_SAME_WAIT = (("slow-link", "needless-sharding"), ("needless-sharding", "communication"))
EXPLAINED = 0.5
"""A cause that explains this share of another one's seconds is its root."""


def diagnose(observed: Observed) -> tuple[Finding, ...]:
    """Return the causes of lost time, most expensive first, or ``healthy`` first without an alarm.

    Empty where there are fewer than `MIN_STEPS` steps to judge (see `why_nothing`).
    """
    if observed.timing.steps < MIN_STEPS:
        return ()
    case = Case(observed)
    found = [finding for rule in RULES for finding in rule(case)]
    found = [_demoted(finding, found, case) for finding in found]
    found.sort(key=lambda f: (_LEVELS.index(f.level), -(f.seconds or 0.0)))
    if any(finding.level == "alarm" for finding in found):
        return tuple(found)
    return (healthy(case), *found)


def why_nothing(timing: Timing) -> str:
    """Return why there is no diagnosis, in a sentence; empty where there is one."""
    if timing.steps >= MIN_STEPS:
        return ""
    return (
        f"no diagnosis: {timing.steps} step{'s' * (timing.steps != 1)} after {timing.warm_up} of warm-up, and it takes "
        f"{MIN_STEPS} to distinguish a cause from chance"
    )


def _demoted(finding: Finding, all_found: list[Finding], case: Case) -> Finding:
    """Demote a finding to a hint that names its root, where another finding explains it."""
    root = _root(finding, all_found, case)
    if root is None or finding.level != "alarm":
        return finding
    why = f"follows from the {root.kind.replace('-', ' ')} above, as far as can be determined"
    return finding.model_copy(update={"level": "hint", "evidence": (*finding.evidence, why)})


def _root(finding: Finding, all_found: list[Finding], case: Case) -> Finding | None:
    """Return the root of a finding.

    A slow rank follows from its device or its cores, slow collectives from missing cores. Needless sharding, a slow
    link and long waits all count the same wait: only one of them is reported as an alarm.
    """
    for root in all_found:
        if root.level == "alarm" and (root.kind, finding.kind) in _SAME_WAIT and links.is_of_dp(root, finding):
            return root
    needed, waited = EXPLAINED * (finding.seconds or 0.0), case.timing.cpu_wait_s
    for root in all_found:
        if root.level != "alarm" or root.kind not in ("throttling", "cpu-oversubscription"):
            continue
        alike = finding.rank is None or root.rank in (None, finding.rank)
        if finding.kind == "straggler" and root.kind == "throttling" and root.rank == finding.rank:
            return root
        if root.kind == "cpu-oversubscription" and waited is not None:
            if finding.kind == "straggler" and alike and waited.high_s - waited.low_s >= needed:
                return root
            sends = finding.kind == "communication" or (finding.kind == "slow-link" and case.observed.backend == "gloo")
            if sends and waited.high_s >= needed:
                return root  # the sending threads had no core either
    return None


def healthy(case: Case) -> Finding:
    """Report a healthy run: its time breakdown and the largest remaining component."""
    timing = case.timing
    compute = sum(timing.seconds(part) for part in waits.COMPUTE)
    spent = {part: timing.seconds(part) for part in timing.parts if timing.parts[part] is not None} | timing.between_s
    rest = {NAMES[part]: seconds for part, seconds in spent.items() if part not in waits.COMPUTE}
    largest = max(rest, key=lambda name: rest[name], default="")
    text = f"Healthy: {percent(case.share(compute))} of a step of {span(case.whole_s)} is computation"
    if largest and rest[largest] > 0:
        size = f"{span(rest[largest])} ({percent(case.share(rest[largest]))})"
        text += f"; the largest remaining component is {largest}, {size}"
    seen = f"{timing.steps} steps after {timing.warm_up} of warm-up, {timing.world_size} rank"
    evidence = [seen + "s" * (timing.world_size > 1)]
    waited = timing.cpu_wait_s
    if waited is not None and case.share(waited.mean_s) >= HINT:
        evidence.append(f"{case.of_step(waited.mean_s)} without a core count as the part that waits for one")
    if case.observed.mfu is not None:
        evidence.append(f"MFU {percent(case.observed.mfu)}")
    return case.finding("healthy", "fine", text + ".", seconds=None, evidence=evidence)
