"""`judge`: which rank the others wait for, and why, from what all of them say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import psutil

from shardwise.units import listed
from shardwise.watch.heartbeat import DONE, Beat
from shardwise.watch.lines import telling_line
from shardwise.watch.processes import GONE
from shardwise.watch.rank_facts import RankFacts
from shardwise.watch.rank_state import CollectiveCall, Frame, RankState

_SAME_SIZES = ("all_reduce", "allreduce", "broadcast", "all_gather", "allgather", "reduce", "barrier")
_PLURALS = {"is": "are", "has": "have", "does": "do", "waits": "wait"}
_DISTRIBUTED = "/torch/distributed/"
_HELD = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_LOADER, _DISK = ("/torch/utils/data/", "/shardwise/train/data/"), ("/shardwise/checkpoint/",)


class Reason(StrEnum):
    """Why the others wait."""

    STOPPED = "stopped"
    GONE = "gone"
    COLLECTIVES = "different collectives"
    SHAPES = "different shapes"
    BATCHES = "more batches"
    ORDER = "collectives in another order"
    LOADER = "data loader"
    DISK = "disk"
    CODE = "not joined"
    NATIVE = "native code"
    LINK = "link"
    DEVICE = "device lost"


CERTAIN = (Reason.COLLECTIVES, Reason.SHAPES, Reason.BATCHES, Reason.ORDER, Reason.GONE, Reason.DEVICE)
"""Reasons that no waiting can end."""
SLOW = (Reason.LOADER, Reason.DISK)
"""Reasons that may take long, and end by themselves."""


@dataclass(frozen=True)
class Verdict:
    """Ranks that the others wait for, why, and it in a sentence."""

    reason: Reason
    ranks: tuple[int, ...]
    text: str


def judge(facts: Sequence[RankFacts], silent: Sequence[int] | None = ()) -> Verdict | None:
    """Find who holds the ranks up; ``None`` where nobody seems to.

    ``facts`` are of ranks that do not move; ``silent`` are the other ranks of the run, of nodes that say nothing,
    or ``None`` if nothing is known of other nodes.
    """
    for test in (_gone, _left, _stopped, mismatched, _awaited, _piped):
        found = test(facts)
        if found is not None:
            return found
    if silent is None:
        return _link(facts, None) if any(one.unanswered for one in facts) else None
    return _link(facts, silent)


def ended(facts: Sequence[RankFacts]) -> Verdict | None:
    """Ranks whose process is gone, though they have not said that they end."""
    gone = [one for one in facts if one.status in GONE and one.beat.phase not in DONE]
    if not gone:
        return None
    pids = listed([str(one.beat.pid) for one in gone])
    process = "process" if len(gone) == 1 else "processes"
    return Verdict(
        Reason.GONE,
        _ranks(gone),
        f"{_who(gone)} {_verb(gone, 'has')} ended in {_phase(gone[0])} without a word ({process} {pids})",
    )


def went_on(beats: Sequence[Beat]) -> Verdict | None:
    """Ranks that failed in a step that no rank without a failure has come to: the others had ended, and were lost."""
    failed, done = [[one for one in beats if one.phase == phase] for phase in ("failed", "end")]
    if not failed or not done or min(one.step for one in failed) <= (last := max(one.step for one in done)):
        return None
    ranks, others = [[one.rank for one in some] for some in (failed, done)]
    return Verdict(
        Reason.BATCHES,
        tuple(ranks),
        f"{_named(ranks)} failed in step {failed[0].step}, and {_named(others)} had ended after step {last}: more "
        "batches than the others have",
    )


def _gone(facts: Sequence[RankFacts]) -> Verdict | None:
    found = ended(facts)
    if found is None or not _groups(facts):  # nobody waits: it had done its part
        return None
    gone = [one for one in facts if one.rank in found.ranks]
    return replace(found, text=f"{found.text}; the others wait for {_them(gone)}")


def _stopped(facts: Sequence[RankFacts]) -> Verdict | None:
    held = [one for one in facts if one.status in _HELD]
    if not held:
        return None
    how = "stopped (SIGSTOP)" if held[0].status == psutil.STATUS_STOPPED else "held by a debugger"
    pids = " ".join(str(one.beat.pid) for one in held)
    return Verdict(
        Reason.STOPPED,
        _ranks(held),
        f"{_who(held)} {_verb(held, 'is')} {how} in {_phase(held[0])}, and the others wait for {_them(held)}; "
        f"kill -CONT {pids} lets {_them(held)} go on",
    )


def mismatched(facts: Sequence[RankFacts]) -> Verdict | None:
    """Ranks in one place of a group's sequence with different collectives, or different shapes of one.

    Where all ranks have come through, the difference did no harm: a last batch may be smaller on one of them.
    """
    for group in _groups(facts):
        members = {one.rank: _sequence(one.state, group) for one in facts if one.state is not None}
        members = {rank: calls for rank, calls in members.items() if calls}
        pending = {call.number for calls in members.values() for call in calls.values() if call.pending}
        shared = pending.intersection(*(set(calls) for calls in members.values())) if len(members) > 1 else set()
        for number in sorted(shared):
            calls = {rank: calls[number] for rank, calls in members.items()}
            kinds = Counter(map(_signature, calls.values()))
            if len(kinds) < 2:
                continue
            usual, most = kinds.most_common(1)[0]
            odd = [rank for rank, call in calls.items() if _signature(call) != usual]
            blamed = odd if 2 * most > len(calls) else sorted(calls)
            names = {call.name for call in calls.values()}
            by_rank = {one.rank: one for one in facts}
            lines = [f"rank {rank} in {calls[rank].call} {_where(by_rank[rank])}" for rank in _few(calls, odd)]
            reason, ahead = (
                Reason.SHAPES if len(names) == 1 else Reason.COLLECTIVES,
                _ahead([by_rank[n] for n in calls]),
            )
            found = Verdict(
                reason,
                tuple(blamed),
                f"ranks are in different {'shapes of one collective' if len(names) == 1 else 'collectives'} (number "
                f"{number} of {_group(group, calls.values())}): {'; '.join(lines)}",
            )
            return replace(ahead, text=f"{found.text}; {ahead.text}") if ahead is not None else found
    return None


def _ahead(facts: Sequence[RankFacts]) -> Verdict | None:
    """Ranks in a later step than the others, which have come to the end of their batches."""
    last = max(one.beat.step for one in facts)
    ahead, others = [one for one in facts if one.beat.step == last], [one for one in facts if one.beat.step < last]
    if not others:
        return None
    return Verdict(
        Reason.BATCHES,
        _ranks(ahead),
        f"{_who(ahead)} {_verb(ahead, 'is')} in step {last}, and {_who(others)} in step {others[0].beat.step}: more "
        "batches than the others have, or a collective left out",
    )


def _left(facts: Sequence[RankFacts]) -> Verdict | None:
    """Ranks that have ended their loop, and are waited for: they had fewer batches."""
    left = [one for one in facts if one.status in GONE and one.beat.phase == "end"]
    for one in facts:
        call = _pending(one.state)
        if call is None or not (missing := _missing(call, left, set())):
            continue
        gone = [other for other in left if other.rank in missing]
        others = [other for other in facts if other not in left]
        return Verdict(
            Reason.BATCHES,
            _ranks(others),
            f"{_who(gone)} {_verb(gone, 'has')} ended after step {gone[0].beat.step}, and {_who(others)} "
            f"{_verb(others, 'waits')} for {_them(gone)} in step {one.beat.step} in {call.call} {_where(one)}: more "
            "batches than the others have",
        )
    return None


def _awaited(facts: Sequence[RankFacts]) -> Verdict | None:
    """Ranks that others wait for, directly or by ranks that wait themselves; or ranks that wait for each other."""
    calls = {one.rank: call for one in facts if (call := _pending(one.state)) is not None}
    waits_for = {rank: _missing(call, facts, set(calls)) for rank, call in calls.items()}
    if not any(waits_for.values()):
        return None
    by_rank = {one.rank: one for one in facts}
    for rank in sorted(waits_for, key=lambda rank: calls[rank].created_ns):
        awaited = _reached(rank, waits_for)
        if absent := sorted(awaited - set(calls)):
            if any(by_rank[other].beat.phase == "end" for other in absent):
                return None  # it is not watched any more, and may take its time
            one = by_rank[absent[0]]
            waiting = [by_rank[other] for other in sorted(waits_for) if _reached(other, waits_for) & set(absent)]
            first = next(other for other in waiting if waits_for[other.rank] & set(absent))
            alike = [by_rank[other] for other in absent if _why(by_rank[other]) == _why(one)]
            return _held_up(alike, waiting, first, calls[first.rank])
    cycle = [rank for rank in sorted(waits_for) if rank in _reached(rank, waits_for)]
    if not cycle:
        return None
    kinds = Counter(calls[rank].group for rank in cycle)
    usual, most = kinds.most_common(1)[0]
    odd = [rank for rank in cycle if calls[rank].group != usual]
    pair = [cycle[0], *(rank for rank in cycle if calls[rank].group != calls[cycle[0]].group)][:2]
    lines = [f"rank {n} in {calls[n].call} of {_group(calls[n].group, [calls[n]])} {_where(by_rank[n])}" for n in pair]
    return Verdict(
        Reason.ORDER, tuple(odd if 2 * most > len(cycle) else cycle), f"ranks wait for each other: {'; '.join(lines)}"
    )


def _missing(call: CollectiveCall, facts: Sequence[RankFacts], waiting: set[int]) -> set[int]:
    """Ranks that have not come to ``call``, of its members; of a send or a receive, those that wait for nobody."""
    if call.peer:
        return {one.rank for one in facts if one.rank in call.members and one.rank not in waiting}
    missing = set()
    for one in facts:
        calls = _sequence(one.state, call.group)
        member = one.rank in call.members if call.members else bool(calls) or one.state is None
        if member and max(calls, default=0) < call.number:
            missing.add(one.rank)
    return missing


def _reached(rank: int, waits_for: dict[int, set[int]]) -> set[int]:
    """All ranks that ``rank`` waits for, in any number of steps."""
    reached: set[int] = set()
    ahead = set(waits_for[rank])
    while ahead - reached:
        reached |= ahead
        ahead = {other for one in ahead for other in waits_for.get(one, ())}
    return reached


def _piped(facts: Sequence[RankFacts]) -> Verdict | None:
    """Ranks in other code while a pipeline's next stage waits; by the stacks, as gloo's sends are not recorded."""
    if any(_pending(one.state) is not None for one in facts):
        return None
    waiting = [one for one in facts if one.state is not None and _in_library(one.state)]
    absent = [one for one in facts if one.state is not None and not _in_library(one.state)]
    if not waiting or not absent:
        return None
    return _held_up(absent, waiting, waiting[0], None)


def _in_library(state: RankState) -> bool:
    return bool(state.stack) and _DISTRIBUTED in state.stack[-1].file


def _held_up(
    absent: Sequence[RankFacts], waiting: Sequence[RankFacts], first: RankFacts, call: CollectiveCall | None
) -> Verdict:
    """Ranks that ``waiting`` ones wait for, of which ``first`` is in ``call``."""
    one = absent[0]
    reason = _why(one)
    what = {
        Reason.LOADER: f"{_verb(absent, 'waits')} for {'its' if len(absent) == 1 else 'their'} data loader",
        Reason.DISK: f"{_verb(absent, 'waits')} for a disk",
        Reason.NATIVE: f"{_verb(absent, 'does')} not answer: native code holds the interpreter",
    }.get(reason, f"{_verb(absent, 'is')} in other code")
    if reason is Reason.CODE and one.state is not None and one.state.cuda:
        what += f", or {_verb(absent, 'waits')} for {'its' if len(absent) == 1 else 'their'} device,"
    line = "" if one.state is None else f" {_where(one)}"
    joined = "a send or a receive" if call is None else call.call
    return Verdict(
        reason,
        _ranks(absent),
        f"{_who(absent)} {what} in {_phase(one)}{line}; {_who(waiting)} {_verb(waiting, 'waits')} for {_them(absent)} "
        f"in {joined} {_where(first)}",
    )


def _link(facts: Sequence[RankFacts], silent: Sequence[int] | None) -> Verdict | None:
    """All ranks that are known wait in collectives, and none of them for another one of them."""
    calls = [call for one in facts if (call := _pending(one.state)) is not None]
    if len(calls) < len(facts) or not calls or (silent is not None and len(facts) + len(silent) < 2):
        return None
    first, call = facts[0], calls[0]
    peers = sorted({peer for one in facts for peer in one.unanswered})
    cut = [one for one in facts if one.unanswered] or list(facts)
    everybody = silent is not None and not silent
    what = f"in {call.call}" if len({(one.name, one.group) for one in calls}) == 1 else "in collectives"
    wait = "all ranks wait" if everybody else f"{_who(facts)} {_verb(facts, 'waits')}"
    said = [f"{wait} {what} {_where(first)}, which does not end"]
    if silent:
        said.append(f"nothing is heard from the node of {_named(silent)}: it is down, or a link to it is cut")
    if peers:
        said.append(f"nothing sent to {', '.join(peers)} is acknowledged: a link is cut")
    elif everybody:
        said.append("all have joined: the network is far slower than it was, or a link is cut")
    return Verdict(Reason.LINK, tuple(silent or ()) or _ranks(cut), "; ".join(said))


def _groups(facts: Iterable[RankFacts]) -> list[str]:
    """Groups in which a rank waits, those that have waited longest first."""
    first: dict[str, int] = {}
    for one in facts:
        for call in one.state.collectives if one.state is not None else ():
            if call.pending:
                first[call.group] = min(first.get(call.group, call.created_ns), call.created_ns)
    return sorted(first, key=lambda group: first[group])


def _sequence(state: RankState | None, group: str) -> dict[int, CollectiveCall]:
    calls = () if state is None else state.collectives
    return {call.number: call for call in calls if call.group == group and not call.peer}


def _pending(state: RankState | None) -> CollectiveCall | None:
    """Collective that a rank has waited in longest."""
    waits = [call for call in (state.collectives if state is not None else ()) if call.pending]
    return min(waits, key=lambda call: call.created_ns, default=None)


def _signature(call: CollectiveCall) -> tuple[object, ...]:
    compared = any(call.name.startswith(name) for name in _SAME_SIZES)
    return (call.name, call.dtypes, call.sizes) if compared else (call.name,)


def _why(one: RankFacts) -> Reason:
    if one.state is None:
        return Reason.NATIVE
    files = [frame.file for frame in one.state.stack]
    if one.beat.phase == "data" or any(part in file for file in files for part in _LOADER):
        return Reason.LOADER
    if one.status == psutil.STATUS_DISK_SLEEP or any(part in file for file in files for part in _DISK):
        return Reason.DISK
    return Reason.CODE


def _where(one: RankFacts) -> str:
    """Line on which the rank stands: the innermost of the user's own, or the innermost of all."""
    stack = () if one.state is None else one.state.stack
    frame = telling_line(stack, lambda frame: frame.file)
    return "" if frame is None else f"at {_line(frame)}"


def _line(frame: Frame) -> str:
    text = f" `{frame.text}`" if frame.text else ""
    here = f"{Path.cwd()}/"  # the ranks' folder, too
    return f"{frame.file.removeprefix(here)}:{frame.line} in {frame.function}{text}"


def _group(name: str, calls: Iterable[CollectiveCall]) -> str:
    label = next((call.label for call in calls if call.label not in ("", "undefined")), "")
    return "the default group" if label == "default_pg" else f"group {f'{label}, ' if label else ''}{name}"


def _phase(one: RankFacts) -> str:
    step = f"step {one.beat.step}, " if one.beat.step else ""
    return f"{step}phase {one.beat.phase}"


def _few(calls: dict[int, CollectiveCall], odd: Sequence[int]) -> list[int]:
    """One rank of the usual collective, and the odd ones."""
    usual = next(rank for rank in sorted(calls) if rank not in odd)
    return sorted([usual, *odd[:3]])


def _ranks(facts: Iterable[RankFacts]) -> tuple[int, ...]:
    return tuple(sorted(one.rank for one in facts))


def _who(facts: Sequence[RankFacts]) -> str:
    nodes = {one.node for one in facts if one.node}
    return _named(_ranks(facts)) + (f" on {listed(sorted(nodes))}" if nodes else "")


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks])}"


def _verb(facts: Sequence[RankFacts], singular: str) -> str:
    return singular if len(facts) == 1 else _PLURALS[singular]


def _them(facts: Sequence[RankFacts]) -> str:
    return "it" if len(facts) == 1 else "them"
