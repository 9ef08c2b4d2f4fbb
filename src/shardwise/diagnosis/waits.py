"""Losses on a rank's host: data, cores, throttling, checkpoints, a slow rank. No torch.

Each rule checks one cause and yields nothing where it does not apply.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from shardwise.diagnosis.finding import Finding, Level
from shardwise.diagnosis.observed import DeviceState, HostUse
from shardwise.diagnosis.weight import ALARM, CROWD, HINT, STEADY, Case, percent, ranks_text, span
from shardwise.units import bytes_text, counted

WORK = ("data", "transfer", "forward", "backward", "recompute", "clip", "optimizer", "other")
"""Parts of a step without waiting for other ranks."""
COMPUTE = ("forward", "backward", "recompute", "clip", "optimizer")
MOST_WORKERS = 64
"""Maximum of recommended loader processes per rank: beyond it the loader itself is too slow."""
CALM_STALL = 0.02
"""Maximum share of time for checkpoints at the recommended interval."""
OWN_LOOP_S, OWN_LOOP_SHARE = 0.02, 0.1
"""Minimum of what one rank loses in the loop of ``shardwise train``: nobody can change that code, and less is noise."""
THERMAL = ("thermal", "slowdown", "brake")
_PLACES = {
    "data": "while it waits for its data",
    "transfer": "while it copies its batch to the device",
    "forward": "in forward",
    "backward": "in backward",
    "recompute": "in recomputed forwards",
    "clip": "while it clips",
    "optimizer": "in the optimizer",
    "other": "in the loop's own code between forward, backward and update",
}
_LOOK = {
    "data": "check what only this rank's loader reads: its disk or mount, its share of long samples",
    "transfer": "check this rank's PCIe link (shardwise doctor) and whether its batches are in pinned memory",
    "other": "look for what only this rank does in the loop: logging, printing, evaluating, writing files",
}

_COMPARE = (
    "look at this rank's device and host beside the others' (shardwise doctor), and at whether its samples are longer; "
    "equal work that stays slower there is a reason to take that device out"
)


def data_loader(case: Case) -> Iterator[Finding]:
    """Report waits for batches on at least three quarters of the ranks.

    A single rank is a straggler.
    """
    spread = case.timing.parts.get("data")
    if spread is None:
        return
    column = sorted(_column(case, "data")) or [spread.low_s]
    seconds = min(spread.mean_s, 2 * statistics.median(column))
    level = case.level(seconds)
    if level is None or (case.timing.world_size > 1 and column[len(column) // 4] < spread.mean_s / 2):
        return
    rest = max(case.timing.step_s - spread.high_s, 1e-9)
    have = case.observed.loader_workers
    evidence = [
        f"a rank waits {span(spread.low_s)} to {span(spread.high_s)} for its batches in each step, and is done with "
        f"them in {span(rest)}",
    ]
    if have is not None:
        evidence.append(f"{have or 'no'} worker process{'es' if have != 1 else ''} of its loader")
    yield case.finding(
        "data-loader",
        level,
        f"The loader is slower than the devices: they wait for data {case.of_step(seconds)}.",
        seconds=seconds,
        evidence=evidence,
        fix=_loader_fix(case, workers_needed(spread.high_s, case.timing.step_s, have)),
    )


def workers_needed(waits_s: float, step_s: float, workers: int | None) -> int:
    """Return the loader processes that keep up with a rank.

    Its steps take ``step_s``, with ``waits_s`` of it waiting for batches. Without workers the wait is the time to
    create a step's batches. With ``w`` busy workers, ``w`` steps' batches are created in ``step_s``. The rest of the
    step must be at least the creation time divided by the workers. Assumes that workers do not slow each other down:
    each needs a free core.
    """
    making = waits_s if not workers else workers * step_s
    return max((workers or 0) + 1, math.ceil(making / max(step_s - waits_s, 1e-9) - 1e-6))


def _loader_fix(case: Case, needed: int) -> str:
    host, have = case.observed.host, case.observed.loader_workers
    if needed > MOST_WORKERS:
        return (
            f"making a batch takes so much longer than using it that it would take {needed} processes: prepare samples "
            "beforehand, read them from a faster disk, or do less for each of them"
        )
    text = (
        f"make batches in {needed} process{'es' if needed != 1 else ''} beside the rank: "
        f"DataLoader(num_workers={needed}, persistent_workers=True)"
    )
    if have is None:
        text += (
            " in a loop of your own; how this loader makes them is not known, and is taken to be in the rank itself: "
            "a faster disk or samples prepared beforehand help too"
        )
    if host is not None and needed * host.local_ranks > host.cores:
        text += (
            f"; for {host.local_ranks} rank{'s' * (host.local_ranks > 1)} that is {needed * host.local_ranks} "
            f"processes on {host.cores} cores: enough if they wait for a disk or a network, not if they compute"
        )
    return text


def oversubscription(case: Case) -> Iterator[Finding]:
    """Report ranks that are ready to run but get no core.

    Where a single rank waits, only its excess over the others counts.
    """
    waited = case.timing.cpu_wait_s
    if waited is None:
        return
    lonely = case.timing.world_size > 1 and waited.low_s < waited.high_s / 3
    seconds = waited.high_s - waited.low_s if lonely else waited.high_s
    level = case.level(seconds, ALARM if lonely else CROWD)
    if level is None:
        return
    host, evidence = case.observed.host, []
    evidence.append(
        f"the main thread was ready to run and had no core for {span(waited.low_s)} to {span(waited.high_s)} a step, "
        f"longest on rank {waited.highest_rank}"
    )
    why, fix = "", "give the ranks more cores, or stop what else runs on this machine"
    if host is not None:
        why, fix = _crowd(host, case.observed.configured)
        evidence += _host_lines(host)
    who = f"rank {waited.highest_rank}" if lonely else "a rank"
    yield case.finding(
        "cpu-oversubscription",
        level,
        f"{'There are too few CPU cores' if level == 'alarm' else 'CPU cores are scarce'}{why}: {who} could compute "
        f"and has no core for {case.of_step(seconds)}.",
        seconds=seconds,
        evidence=evidence,
        fix=fix,
        rank=waited.highest_rank if lonely else None,
    )


def _crowd(host: HostUse, configured: bool) -> tuple[str, str]:
    """Return the cause of the contention, for the sentence, and the fix."""
    key, also = ("parallel.threads", " (OMP_NUM_THREADS)") if configured else ("OMP_NUM_THREADS", "")
    if host.local_ranks > host.cores:
        return (
            f" ({counted(host.local_ranks, 'rank')} on {host.cores})",
            f"start no more than {host.cores} rank{'s' * (host.cores > 1)} here, or give them more cores",
        )
    if host.threads * host.local_ranks > host.cores:
        fit = max(1, host.cores // host.local_ranks)
        return (
            f" ({counted(host.local_ranks, 'rank')} × {host.threads} threads on {host.cores})",
            f"set {key}={fit}{also}, so that threads and cores are as many",
        )
    if host.others is not None and host.others >= 0.2:
        return (
            f" (other processes keep {host.others:.1f} of {host.machine_cores} busy)",
            "stop the other processes, or give the ranks cores of their own",
        )
    if host.cores < host.machine_cores:
        return (
            f" (the ranks may use {host.cores} of {host.machine_cores})",
            "give the job more cores (taskset, cgroup, --cpus-per-task)",
        )
    return "", "start fewer data workers or ranks, or give the job more cores"


def _host_lines(host: HostUse) -> list[str]:
    lines = [
        f"{counted(host.local_ranks, 'rank')} × {host.threads} thread{'s' * (host.threads > 1)} on {host.cores} of "
        f"{host.machine_cores} cores"
    ]
    if host.own is not None and host.others is not None:
        lines.append(f"cores kept busy: {host.own:.1f} by this run, {host.others:.1f} by others")
    return lines


def checkpoint_stall(case: Case) -> Iterator[Finding]:
    """Report training stalls during checkpoints."""
    seconds = case.timing.between_s.get("checkpoint", 0.0)
    level = case.level(seconds)
    if level is None:
        return
    saves = case.observed.saves
    evidence = [f"checkpoints took {span(seconds * case.timing.steps)} of {case.timing.steps} steps"]
    fix = "save less often (checkpoint.every)"
    if saves:
        stall = statistics.fmean(save.stall_s for save in saves)
        evidence.append(f"{len(saves)} saves, each stalled the steps for {span(stall)}" + _written(case))
        every = max(1, math.ceil(stall / (CALM_STALL * case.timing.step_s)))
        if case.observed.save_every is not None:
            evidence.append(f"checkpoint.every is {case.observed.save_every}")
        fix = f"checkpoint.every={every} makes it {percent(CALM_STALL)}"
    if saves and not all(save.background for save in saves):
        fix = f"checkpoint.async_save=true: only the copy of the state stalls steps then; or {fix}"
    elif saves:
        fix += "; saving is in the background already, so what is left is the copy, or a disk that is still busy with "
        fix += "the save before"
    yield case.finding(
        "checkpoint-stall",
        level,
        f"Saving stalls the training: {case.of_step(seconds)}.",
        seconds=seconds,
        evidence=evidence,
        fix=fix,
    )


def _written(case: Case) -> str:
    known = [(s.num_bytes, s.write_s) for s in case.observed.saves if s.num_bytes and s.write_s]
    if not known:
        return ""
    size, took = sum(n for n, _ in known), sum(t for _, t in known)
    return f" and wrote {bytes_text(size / len(known))} at {size / took / 1e6:.3g} MB/s"


def straggler(case: Case) -> Iterator[Finding]:
    """Report one rank that computes longer than its peers, which wait for it."""
    timing = case.timing
    late = _latest(case)
    if late is None:
        yield from _taking_turns(case)
        return
    rank, excess, parts = late
    level = case.level(excess)
    if level is None:
        return
    if timing.late_rank is not None and (timing.late_rank != rank or (timing.late_share or 0.0) < STEADY):
        level = "hint"
    worst = max(parts, key=lambda part: parts[part])
    own_loop = worst == "other" and case.observed.own_loop
    if own_loop and (excess < OWN_LOOP_S or case.share(excess) < OWN_LOOP_SHARE):
        return
    evidence = [f"{_short(part)}: {span(more)} more than the other ranks" for part, more in _sorted(parts, case)]
    if timing.late_rank == rank and timing.late_share is not None:
        evidence.append(f"it came last in {percent(timing.late_share)} of the steps")
    spread = timing.parts.get("slowest_rank")
    if spread is not None:
        evidence.append(f"the others wait up to {span(spread.high_s)} a step for the slowest rank")
    yield case.finding(
        "straggler",
        level,
        f"Rank {rank} is slower than the others by {case.of_step(excess)}, {_PLACES[worst]}; all wait for it.",
        seconds=excess,
        evidence=evidence,
        fix=_COMPARE if own_loop else _LOOK.get(worst, _COMPARE),
        rank=rank,
    )


def late_by(case: Case) -> dict[int, float]:
    """Return each rank's extra seconds over the median of its peers (same pipeline stage)."""
    rows, dims = case.timing.ranks, case.observed.plan.dims
    work = [sum(row.get(part, 0.0) for part in WORK) for row in rows]
    stage = [dims.place(rank).pp if dims.world_size == len(rows) else 0 for rank in range(len(rows))]
    found = {}
    for rank, mine in enumerate(work):
        peers = [w for other, w in enumerate(work) if other != rank and stage[other] == stage[rank]]
        if peers:
            found[rank] = mine - statistics.median(peers)
    return found


def _latest(case: Case) -> tuple[int, float, dict[str, float]] | None:
    """Return the latest rank, its delay, and the parts; ``None`` below the threshold."""
    late = late_by(case)
    if not late:
        return None
    rank = max(late, key=lambda r: late[r])
    if case.level(late[rank]) is None:
        return None
    rows, dims = case.timing.ranks, case.observed.plan.dims
    peers = [r for r in late if r != rank and dims.place(r).pp == dims.place(rank).pp]
    parts = {
        part: rows[rank].get(part, 0.0) - statistics.median(rows[r].get(part, 0.0) for r in peers) for part in WORK
    }
    waited = [rows[r]["slowest_rank"] for r in peers if "slowest_rank" in rows[r]]
    seconds = min(late[rank], max(waited)) if waited else late[rank]
    return rank, seconds, parts


def _taking_turns(case: Case) -> Iterator[Finding]:
    """Report waits for whichever rank is last, where no rank is persistently slow."""
    spread = case.timing.parts.get("slowest_rank")
    if spread is None or case.level(spread.mean_s) is None or case.share(spread.mean_s) < ALARM:
        return
    yield case.finding(
        "straggler",
        "hint",
        f"The ranks take turns in being late: they wait for the slowest {case.of_step(spread.mean_s)}.",
        seconds=spread.mean_s,
        evidence=[
            "no rank works longer than its peers on average"
            if late_by(case)
            else "every rank has a stage of the pipeline to itself, so that none can be compared with a peer"
        ],
        fix="even out what differs from step to step: samples of very different lengths, other processes on the cores",
    )


def throttling(case: Case) -> Iterator[Finding]:
    """Report devices below their clock: one finding for hot ones, one for power-capped ones.

    A step waits for the slowest of them, so their seconds do not add up: the worst one counts.
    """
    for hot in (True, False):
        found = [finding for was_hot, finding in _throttled(case) if was_hot is hot]
        if not found:
            continue
        worst = max(found, key=lambda one: one.seconds or 0.0)
        others = [one.rank for one in found if one is not worst and one.rank is not None]
        more = (f"so do {len(others)} more: {ranks_text(others)}",) if others else ()
        yield worst.model_copy(update={"evidence": (*worst.evidence, *more)})


def _throttled(case: Case) -> Iterator[tuple[bool, Finding]]:
    """Yield each significantly throttled device, and whether heat is the reason."""
    compute = sum(case.timing.seconds(part) for part in COMPUTE)
    for gpu in case.observed.gpus:
        reference, of_what = _reference(case, gpu)
        share = max(gpu.throttled.values(), default=0.0)
        if gpu.clock is None or reference is None or share < HINT:
            continue
        seconds = compute * max(0.0, 1 - gpu.clock / reference)
        level = case.level(seconds)
        hot = any(word in reason for reason in gpu.throttled for word in THERMAL)
        if level is None:
            if not hot or share < ALARM:
                continue
            level = "hint"
        found = case.finding(
            "throttling",
            level if hot or of_what.startswith("the other") else _at_most_hint(level),
            f"The {gpu.name} of rank {gpu.rank} reduces its clock {'for its heat' if hot else 'for its power'}: "
            f"{gpu.clock / 1e6:.0f} MHz, and {of_what} {reference / 1e6:.0f} MHz; that is {case.of_step(seconds)}.",
            seconds=seconds,
            evidence=_device_lines(gpu),
            fix=_cooling(gpu, hot),
            rank=gpu.rank,
        )
        yield hot, found


def _reference(case: Case, gpu: DeviceState) -> tuple[float | None, str]:
    """Return the expected clock: the median of unthrottled devices, else the device's maximum."""
    free = [g.clock for g in case.observed.gpus if g.clock and max(g.throttled.values(), default=0.0) < HINT]
    if free:
        return statistics.median(free), "the others run at"
    return gpu.max_clock, "its highest is"


def _device_lines(gpu: DeviceState) -> list[str]:
    lines = [f"{reason}: {percent(share)} of the time" for reason, share in gpu.throttled.items() if share >= HINT]
    if gpu.temperature is not None:
        limit = "" if gpu.slowdown_temperature is None else f", it slows down at {gpu.slowdown_temperature:.0f} °C"
        lines.append(f"{gpu.temperature:.0f} °C{limit}")
    if gpu.power is not None and gpu.power_limit is not None:
        lines.append(f"{gpu.power:.0f} W of {gpu.power_limit:.0f} W")
    return lines


def _cooling(gpu: DeviceState, hot: bool) -> str:
    if hot:
        return "check its fans, its airflow and the heat of its neighbours (shardwise doctor)"
    return "raise its power limit (nvidia-smi -pl) if the supply allows it, or count with this clock"


def _at_most_hint(level: Level) -> Level:
    return "hint" if level == "alarm" else level


def _column(case: Case, part: str) -> list[float]:
    return [row[part] for row in case.timing.ranks if part in row]


def _sorted(parts: dict[str, float], case: Case) -> list[tuple[str, float]]:
    """Return parts significantly longer on the late rank, longest first; at least one."""
    rows = sorted(parts.items(), key=lambda item: -item[1])
    return [row for row in rows if case.share(row[1]) >= HINT] or rows[:1]


def _short(part: str) -> str:
    return {"data": "waiting for data", "transfer": "host to device", "other": "the loop's own code"}.get(part, part)
