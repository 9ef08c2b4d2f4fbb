"""Rules on the loss: a run that does not learn. No torch here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from shardwise.diagnosis.finding import Finding
from shardwise.diagnosis.observed import LossSpike, LostGradient
from shardwise.diagnosis.weight import AT_CHANCE, CHANCE_STEPS, LOST, NAMES, RISE, RISE_LINES, SAMPLES, SPIKES, Case


def loss_at_chance(case: Case) -> Iterator[Finding]:
    """Report a loss that stands at ln(vocabulary), which a model without knowledge has."""
    losses, vocabulary = case.observed.losses, case.observed.vocab_size
    if not losses or vocabulary is None or vocabulary < 2 or losses[-1][0] < CHANCE_STEPS:
        return
    chance, last = math.log(vocabulary), losses[-1][0]
    recent = [loss for step, loss in losses if step > last - CHANCE_STEPS]
    if len(recent) < 2 or any(abs(loss - chance) > AT_CHANCE * chance for loss in recent):
        return
    yield case.finding(
        "loss-at-chance",
        "alarm",
        f"The model does not learn: after {last} steps its loss is {statistics.median(recent):.3f}, and guessing among "
        f"{vocabulary} tokens has ln({vocabulary}) = {chance:.3f}.",
        seconds=case.whole_s,
        evidence=[f"losses logged in the last {CHANCE_STEPS} steps: {_span(recent)}"],
        fix="check that labels belong to their inputs (shifted by one place, once), that no trained part is frozen "
        "(model.freeze) and that optimizer.lr is large enough; a few documents must be learnt by heart first",
    )


def loss_rises(case: Case) -> Iterator[Finding]:
    """Report a loss that ends above its beginning."""
    losses = [loss for _, loss in case.observed.losses]
    if len(losses) < RISE_LINES:
        return
    first, recent = losses[: RISE_LINES // 4], losses[-max(RISE_LINES // 4, len(losses) // 10) :]
    began, ended = statistics.median(first), statistics.median(recent)
    if ended <= began * RISE:
        return
    least = min(losses)
    step = case.observed.losses[losses.index(least)][0]
    yield case.finding(
        "loss-rises",
        "alarm",
        f"The loss rises: it is {ended:.3f} at the end and was {began:.3f} at the beginning.",
        seconds=case.whole_s,
        evidence=[
            f"medians of the first {len(first)} logged losses and of the last {len(recent)}",
            f"lowest: {least:.3f} after step {step}",
        ],
        fix="lower optimizer.lr (a tenth shows whether it is that), give it more optimizer.warmup_steps, or clip "
        "gradients (optimizer.clip_norm=1.0)",
    )


def loss_spikes(case: Case) -> Iterator[Finding]:
    """Report losses far above those before them, with the samples of their steps; all of a run in one finding."""
    found = sorted(case.observed.spikes, key=lambda one: one.loss - one.median, reverse=True)
    if not found:
        return
    first, more = found[0], f" There are {len(found)} such steps in all." if len(found) > 1 else ""
    yield case.finding(
        "loss-spike",
        "hint",
        f"The loss of step {first.step} is {first.loss:.3f}, the median of those before it {first.median:.3f}.{more}",
        seconds=None,
        evidence=[_samples(one) for one in found[:SPIKES]],
        fix="look at these samples; if they are sound, lower optimizer.lr or clip gradients (optimizer.clip_norm=1.0)",
    )


def lost_gradients(case: Case) -> Iterator[Finding]:
    """Report parameters that trained and do not any more; all of a run in one finding."""
    found = case.observed.lost_gradients
    if not found:
        return
    names = [name for one in found for name in one.parameters]
    yield case.finding(
        "lost-gradient",
        "hint",
        f"{len(names)} parameter{' has' if len(names) == 1 else 's have'} no gradient any more: the loss stopped "
        f"depending on {'it' if len(names) == 1 else 'them'} in step {found[0].since}.",
        seconds=None,
        evidence=[_lost(one) for one in found[:LOST]],
        fix="freeze what is to stay as it is (requires_grad_(False)); else look for a detach, a no_grad, a branch that "
        "is not taken any more, units that are always off, or gradients too small for their type",
    )


def _lost(one: LostGradient) -> str:
    more = f" and {len(one.parameters) - NAMES} more" if len(one.parameters) > NAMES else ""
    return f"since step {one.since}: {', '.join(one.parameters[:NAMES])}{more}"


def _samples(one: LossSpike) -> str:
    replicas = [
        f"{', '.join(map(str, ids[:SAMPLES]))}{f' and {len(ids) - SAMPLES} more' if len(ids) > SAMPLES else ''}"
        for ids in one.samples
    ]
    each = "; ".join(f"replica {number}: {text}" for number, text in enumerate(replicas[:SAMPLES]))
    return f"step {one.step}, loss {one.loss:.3f}, samples of {each}"


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"
