"""Receipt lines on how a loop is set up: wrapper, sharding, optimizer, dtypes, micro batches, options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardwise.observation.expectation import Expectation
from shardwise.observation.loop_facts import LoopFacts, ParameterFacts
from shardwise.receipts.receipt import Line
from shardwise.units import bytes_text, counted

UNSTATED = "not stated"
_COMPUTE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "the optimizer", "other": "the loop's own code"}
_STAGES = {"zero1": 1, "zero2": 2, "fsdp": 3}  # of DeepSpeed
_SYNCED = 0.1  # of the gradient's elements: statistics of batch norm are reduced in a backward, too


def setup_lines(expected: Expectation, ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    """Yield the lines that compare settings with live objects."""
    yield _wrapper_line(expected, ranks)
    yield _sharding_line(expected, ranks)
    yield from _reshard_line(expected, ranks)
    yield _held_line(expected, ranks)
    yield _state_line(expected, ranks)
    yield from _dtype_lines(expected, ranks)
    yield _micro_line(expected, ranks)
    yield from _sync_lines(expected, ranks)
    yield from _traffic_lines(ranks)
    yield from _option_lines(expected, ranks)
    yield from _mode_lines(ranks)
    yield from _tied_lines(expected, ranks)


def names_text(names: Sequence[str]) -> str:
    """List the first three names, and count the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def one_of_each(
    name: str, planned: str, ranks: Sequence[LoopFacts], judge: Callable[[LoopFacts], tuple[str, bool | None]]
) -> Line:
    """Judge each rank, and show the first that is wrong, else the first."""
    found = [(facts.rank, *judge(facts)) for facts in ranks]
    rank, text, ok = next((one for one in found if one[2] is False), found[0])
    alike = {other for _, other, _ in found} == {text}
    return Line(name=name, planned=planned, found=text if alike else f"{text} (rank {rank})", ok=ok)


def _wrapper_line(expected: Expectation, ranks: Sequence[LoopFacts]) -> Line:
    strategy, wanted = expected.strategy, expected.wrapper
    if strategy is None:
        planned, kinds = UNSTATED, None
    elif wanted == "DeepSpeed":
        planned = f"DeepSpeed ZeRO-{_STAGES[strategy.base]}"
        kinds = {planned}
    elif wanted is not None:
        planned, kinds = wanted, {wanted}
    elif strategy.shards_parameters:
        planned, kinds = "FSDP2 or FSDP1", {"FSDP2", "FSDP1"}
    else:
        planned, kinds = "DDP", {"DDP"}
    full = _reduced_elements(ranks)

    def judge(facts: LoopFacts) -> tuple[str, bool | None]:
        units = f", {counted(facts.units, 'unit')}" if facts.units else ""
        text = f"{facts.wrapper}{units}"
        if facts.wrapper == "DeepSpeed ZeRO-0" and kinds == {"DDP"}:
            return text, True
        if facts.wrapper == "none" and facts.after_elements:
            text = "none; the loop reduces gradients after the backward"
            if kinds == {"DDP"}:
                return text, True
        elif facts.wrapper == "none" and sum(facts.backward_elements) >= full > 0:
            text = "none; hooks reduce gradients in the backward"
            if kinds == {"DDP"}:
                return text, True
        if kinds is None:
            return text, None
        kind = facts.wrapper if wanted == "DeepSpeed" else facts.wrapper.partition(" ")[0]
        return text, True if kind in kinds else None if facts.world_size == 1 else False

    return one_of_each("wrapper", planned, ranks, judge)


def _sharding_line(expected: Expectation, ranks: Sequence[LoopFacts]) -> Line:
    strategy, world = expected.strategy, ranks[0].world_size
    sharded = strategy is not None and strategy.shards_parameters
    if strategy is not None and strategy.engine == "deepspeed":
        sharded = strategy.base == "fsdp"  # its ZeRO-2 keeps whole parameters
    planned = UNSTATED
    if strategy is not None:
        planned = f"each over {'several' if strategy.base == 'hsdp' else world} ranks" if sharded else "on every rank"

    def is_right(p: ParameterFacts) -> bool:
        if strategy is not None and strategy.base == "hsdp":
            return p.shards > 1 and (p.shards < world or world < 4)
        return p.shards == (world if sharded else 1)

    def judge(facts: LoopFacts) -> tuple[str, bool | None]:
        full, here = sum(p.elements for p in facts.parameters), sum(p.local_elements for p in facts.parameters)
        kinds: dict[str, int] = {}
        for p in facts.parameters:
            kinds[p.placement] = kinds.get(p.placement, 0) + 1
        text = "; ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        text += f"; {here} of {full} elements here" if here != full else ""
        if strategy is None or world == 1:
            return text, None
        wrong = [p.name for p in facts.trained if not is_right(p)]
        which = names_text(wrong) if len(wrong) < len(facts.trained) else f"all {len(wrong)}"
        return (f"{text}; not as planned: {which}" if wrong else text), not wrong

    return one_of_each("parameters", planned, ranks, judge)


def _reshard_line(expected: Expectation, ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    """Compare all-gathers in the backward with ``reshard_after_forward``; the root's own are not a sign."""
    strategy = expected.strategy
    if not any(facts.wrapper == "FSDP2" for facts in ranks):
        return
    wanted = None if strategy is None or not strategy.shards_parameters else strategy.reshards_after_forward
    planned = UNSTATED if wanted is None else "yes" if wanted else "no"

    def judge(facts: LoopFacts) -> tuple[str, bool | None]:
        calls = sum(one.calls for one in facts.traffic if (one.name, one.phase) == ("all_gather", "backward"))
        text = f"{'yes' if calls else 'no'}, {counted(calls, 'all-gather')} in the backward"
        unclear = wanted is None or facts.units < 2 or facts.world_size == 1
        return text, None if unclear else bool(calls) == wanted

    yield one_of_each("resharded after forward", planned, ranks, judge)


def _held_line(expected: Expectation, ranks: Sequence[LoopFacts]) -> Line:
    judged = expected.strategy is not None

    def judge(facts: LoopFacts) -> tuple[str, bool | None]:
        missing = [p.name for p in facts.trained if p.held == 0]
        twice = [p.name for p in facts.trained if p.held > 1]
        text = f"{len(facts.trained) - len(missing)} of {len(facts.trained)} trainable parameters"
        text += f"; not {names_text(missing)}" if missing else ""
        text += f"; more than once {names_text(twice)}" if twice else ""
        text += f"; {facts.foreign} tensors that the model does not have" if facts.foreign else ""
        stale = bool(facts.foreign and missing)  # built before the model was sharded
        text += " (built before the model was wrapped?)" if stale else ""
        return text, not (missing or twice) if judged else None

    return one_of_each("held by the optimizer", "each trainable parameter once" if judged else UNSTATED, ranks, judge)


def _state_line(expected: Expectation, ranks: Sequence[LoopFacts]) -> Line:
    strategy, world = expected.strategy, ranks[0].world_size
    stated = {p.name for facts in ranks for p in facts.trained if p.has_state}
    full = sum(p.elements for p in ranks[0].trained if p.name in stated)
    kept = [sum(p.local_elements for p in facts.trained if p.has_state) for facts in ranks]
    if all(facts.state_elements for facts in ranks):
        kept, full = [facts.state_elements or 0 for facts in ranks], sum(p.elements for p in ranks[0].trained)
    found = f"at most {max(kept)} of {full} on a rank" if full else "none or unknown"
    if strategy is None or not full or world == 1:
        return Line(name="optimizer state", planned=UNSTATED, found=found, ok=None)
    if strategy.base == "ddp":
        return Line(name="optimizer state", planned="of all elements", found=found, ok=min(kept) == full)
    ok = sum(kept) < world * full
    return Line(name="optimizer state", planned="of a share of the elements", found=found, ok=ok)


def _dtype_lines(expected: Expectation, ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    own = sorted({p.dtype for facts in ranks for p in facts.parameters})
    yield Line(name="parameter dtype", planned=UNSTATED, found=", ".join(own), ok=None)
    wanted = None if expected.precision is None else _COMPUTE[expected.precision]
    wide = {"float64"} & set(own)  # a model in float64 computes in it where fp32 means without a lower precision

    def judge(facts: LoopFacts) -> tuple[str, bool | None]:
        seen = set(facts.product_dtypes)
        if not seen:
            return "unknown: no matrix product was seen", None
        text = ", ".join(sorted(seen))
        if wanted is None:
            return text, None
        return text, seen <= {"float32", *wide} if wanted == "float32" else wanted in seen

    yield one_of_each("compute dtype", wanted or UNSTATED, ranks, judge)
    for name, field in (
        ("gradient dtype", "gradient_dtypes"),
        ("reduction dtype", "reduction_dtypes"),
        ("optimizer state dtype", "state_dtypes"),
    ):
        seen = sorted({dtype for facts in ranks for dtype in getattr(facts, field)})
        nothing = "unknown: in the engine's buffers" if ranks[0].wrapper.startswith("DeepSpeed") else "none"
        yield Line(name=name, planned=UNSTATED, found=", ".join(seen) or nothing, ok=None)


def _micro_line(expected: Expectation, ranks: Sequence[LoopFacts]) -> Line:
    wanted = expected.grad_accum

    def judge(facts: LoopFacts) -> tuple[str, bool | None]:
        text = str(facts.micro_batches)
        text += f", with {facts.backwards} backwards" if facts.backwards > facts.micro_batches else ""
        return text, None if wanted is None else facts.micro_batches == wanted

    return one_of_each("micro batches per step", UNSTATED if wanted is None else str(wanted), ranks, judge)


def _sync_lines(expected: Expectation, ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    if ranks[0].world_size == 1:
        return
    full = _reduced_elements(ranks)
    judged = expected.strategy is not None

    def judge(facts: LoopFacts) -> tuple[str, bool | None]:
        synced = sum(number >= _SYNCED * full for number in facts.backward_elements)
        after = facts.after_elements >= _SYNCED * full
        text = f"in {synced} of {facts.backwards} backwards"
        text += ", and once after them" if after and synced else ", but once after them" if after else ""
        if facts.sync_refused:
            return f"{text}, {facts.sync_refused} of them although no_sync was on: it must surround the forward", False
        return text, bool(synced or after) if judged else None

    yield one_of_each("gradient reductions", "at least one per step" if judged else UNSTATED, ranks, judge)

    def judge_size(facts: LoopFacts) -> tuple[str, bool | None]:
        found = sum(facts.backward_elements) + facts.after_elements
        return str(found), found >= full if judged else None

    planned = f"at least {full}" if judged else UNSTATED
    yield one_of_each("elements reduced per step", planned, ranks, judge_size)

    def judge_way(facts: LoopFacts) -> tuple[str, bool | None]:
        if not facts.bypassed:
            return f"all {facts.forwards}", True
        return f"{facts.bypassed} of {facts.forwards} call the module inside, which reduces nothing", False

    if any(facts.wrapper == "DDP" for facts in ranks):
        yield one_of_each("forwards through DDP", "all", ranks, judge_way)


def _reduced_elements(ranks: Sequence[LoopFacts]) -> int:
    """Count the elements of trainable parameters that have a gradient on any rank."""
    used = {p.name for facts in ranks for p in facts.trained if p.norm is not None}  # none in DeepSpeed's buffers
    return sum(p.elements for p in ranks[0].trained if p.name in used or not used)


def _traffic_lines(ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    rows: dict[str, list[str]] = {}
    for one in ranks[0].traffic:
        text = f"{one.calls} in {_PHASES[one.phase]}, {bytes_text(one.num_bytes)}"
        rows.setdefault(one.name, []).append(text)
    for name, texts in sorted(rows.items()):
        yield Line(name=f"{name} per step", planned=UNSTATED, found="; ".join(texts), ok=None)


def _option_lines(expected: Expectation, ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    def judge_recompute(facts: LoopFacts) -> tuple[str, bool | None]:
        if not facts.products:
            return "unknown: no matrix product was seen", None
        text = f"{facts.recomputed} of {facts.products} matrix products of the forward run again in the backward"
        return text if facts.recomputed else "none", bool(facts.recomputed) if expected.recompute else None

    planned = {None: UNSTATED, True: "on", False: "off"}[expected.recompute]
    yield one_of_each("activation recompute", planned, ranks, judge_recompute)
    if all(facts.offloads is None for facts in ranks):
        return
    wanted = None if expected.strategy is None else expected.strategy.offload

    def judge_offload(facts: LoopFacts) -> tuple[str, bool | None]:
        where = ", ".join(facts.state_devices) or "nowhere"
        text = f"{'on' if facts.offloads else 'off'}; optimizer state on {where}"
        return text, None if wanted is None else facts.offloads == wanted

    yield one_of_each("offload", {None: UNSTATED, True: "on", False: "off"}[wanted], ranks, judge_offload)


def _mode_lines(ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    def judge(facts: LoopFacts) -> tuple[str, bool | None]:
        if facts.training is None:
            return "unknown: the model's own forward was not called", None
        if not facts.training:
            modules = counted(facts.dropouts, "module")
            return f"off, with {modules} of dropout or batch norm", False if facts.dropouts else None
        return (f"on, and off in {names_text(facts.quiet)}", None) if facts.quiet else ("on", True)

    yield one_of_each("training mode", "on", ranks, judge)


def _tied_lines(expected: Expectation, ranks: Sequence[LoopFacts]) -> Iterator[Line]:
    first = ranks[0]
    wanted = tuple(dict.fromkeys([*expected.tied, *first.tied_declared, *first.tied_before]))
    if not wanted:
        return

    def judge(facts: LoopFacts) -> tuple[str, bool | None]:
        apart = [group for group in wanted if not any(set(group) <= set(now) for now in facts.tied_now)]
        if apart:
            return "; ".join(" ≠ ".join(group) for group in apart), False
        return "; ".join(" = ".join(group) for group in wanted), True

    yield one_of_each("tied weights", "; ".join(" = ".join(group) for group in wanted), ranks, judge)
