"""Effects receipt under DeepSpeed, which shards, reduces and updates by itself.

Findings come from its live objects; expectations come from the plan and the model's structure, by ZeRO's arithmetic as
DeepSpeed documents it: under ZeRO-1 and 2 the trained parameters of a group are flattened, padded to a multiple of
twice the ranks and sharded; under ZeRO-3 each parameter is flattened, padded to a multiple of the ranks and sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.measure import state
from shardwise.model.read import clean_name
from shardwise.parallel.engines.engine import Engine, EngineTensors
from shardwise.plan.deepspeed_stages import Location, Swapped, optimizer_place, parameter_place, swapped, zero_stage
from shardwise.receipts.expected_part import recomputed_blocks
from shardwise.receipts.lines.option_lines import compute_line
from shardwise.receipts.lines.structure_lines import block_line, recomputed_line
from shardwise.receipts.receipt import Line
from shardwise.receipts.recorder import StepRecorder
from shardwise.train.optimizer import workload_of
from shardwise.train.session import Session
from shardwise.train.step import Step
from shardwise.units import bytes_text

_COMPUTE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WHERE: dict[Location, str] = {"device": "the device", "cpu": "host memory", "nvme": "NVMe"}


@dataclass(frozen=True)
class SeenGradients:
    """Gradients of an engine before the update: elements on this rank, and dtypes."""

    elements: int
    dtypes: str

    @staticmethod
    def of(engine: Engine) -> SeenGradients:
        """Record the current gradients."""
        local = engine.local_tensors()
        return SeenGradients(state.local_elements(local.gradients), state.dtypes(local.gradients))


def engine_lines(session: Session, step: Step, recorder: StepRecorder, seen: SeenGradients | None) -> Iterator[Line]:
    """Yield every line that this rank can check alone; ``seen`` are the recorded gradients."""
    engine: Any = session.applied.engine
    local = engine.local_tensors()
    plan = session.plan
    yield _same("engine", f"DeepSpeed, ZeRO-{zero_stage(plan)}", f"DeepSpeed, ZeRO-{engine.live_stage()}")
    yield from _batch_lines(session, step, engine)
    yield from _dtype_lines(session, recorder, local, seen)
    yield from _share_lines(session, engine, local, seen)
    yield from _place_lines(session, engine, local)
    yield from _structure_lines(session, step, recorder)
    yield from _traffic_lines(session, step, recorder)


def _same(name: str, planned: str, found: str) -> Line:
    return Line(name=name, planned=planned, found=found, ok=planned == found)


def _batch_lines(session: Session, step: Step, engine: Any) -> Iterator[Line]:
    planned, found = session.plan.grad_accum, len(step.micros)
    ok = None if found < planned else found == planned  # fewer only in the last, partial window of the data
    yield Line(name="micro batches per step", planned=str(planned), found=str(found), ok=ok)
    asked = "off" if step.clip_norm is None else f"{step.clip_norm:g}"
    clips = float(engine.zero.clip_grad)
    yield _same("gradient clipping", asked, f"{clips:g}" if clips else "off")


def _dtype_lines(
    session: Session, recorder: StepRecorder, local: EngineTensors, seen: SeenGradients | None
) -> Iterator[Line]:
    compute = _COMPUTE[session.plan.precision]
    if local.parameters:
        yield _same("parameter dtype", compute, state.dtypes(local.parameters))
    if recorder.recorder.matmul_dtypes:
        yield compute_line({compute}, recorder.recorder, casts_weights=True)
    if local.masters:
        yield _same("fp32 weights' dtype", "float32", state.dtypes(local.masters))
    if seen is not None:
        yield _same("gradient dtype", "float32", seen.dtypes)
    reducing = {item.dtype for item in recorder.recorder.collectives if _reduces(item)}
    if session.dp > 1:
        yield _same("reduction dtype", "float32", ", ".join(sorted(reducing)) or "none")
    if local.states:
        yield _same("optimizer state dtype", "float32", state.dtypes(local.states))


@dataclass(frozen=True)
class PlannedElements:
    """Planned elements on a rank, with padding: compute parameters, and the optimizer's share."""

    parameters: int
    stepped: int


def planned_elements(session: Session, groups: tuple[tuple[str, ...], ...]) -> PlannedElements:
    """Compute ZeRO's shards from the model's structure; ``groups`` are names by optimizer group."""
    plan, ranks, spec = session.plan, session.dp, session.spec
    sizes = {name: p.num_elements for p in spec.parameters for name in (p.name, *p.aliases)}
    trained = {name for p in spec.parameters if p.trainable for name in (p.name, *p.aliases)}
    if zero_stage(plan) == 3:
        shares = {p.name: math.ceil(p.num_elements / ranks) for p in spec.parameters}
        stepped = sum(math.ceil(sizes[name] / ranks) for group in groups for name in group if name in trained)
        return PlannedElements(sum(shares.values()), stepped)
    full = [sum(sizes[name] for name in group if name in trained) for group in groups]
    return PlannedElements(spec.num_parameters, sum(2 * math.ceil(number / (2 * ranks)) for number in full))


def _share_lines(session: Session, engine: Any, local: EngineTensors, seen: SeenGradients | None) -> Iterator[Line]:
    spec = session.spec
    planned, away = planned_elements(session, engine.groups), _planned_swap(session, engine)
    there = " in memory" if session.plan.parsed.nvme else ""
    found = state.local_elements(local.parameters)
    yield _share(f"parameters held{there}", planned.parameters - away.parameters, found, spec.num_parameters)
    stepped = planned.stepped - away.stepped
    yield _share(f"fp32 weights held{there}", stepped, state.local_elements(local.masters), spec.num_trainable)
    if seen is not None:
        yield _share("gradients held", planned.stepped, seen.elements, spec.num_trainable)
    states = workload_of(session.optimizer).optimizer_states
    if states is not None:
        found = state.local_elements(local.states)
        yield _share(f"optimizer state held{there}", stepped * states, found, spec.num_trainable * states)


def _planned_swap(session: Session, engine: Any) -> Swapped:
    """Return the planned data on the drive."""
    spec = session.spec
    sizes = {name: p.num_elements for p in spec.parameters for name in (p.name, *p.aliases)}
    trained = {name for p in spec.parameters if p.trainable for name in (p.name, *p.aliases)}
    groups = [[sizes[name] for name in group if name in trained] for group in engine.groups]
    return swapped(session.plan, (p.num_elements for p in spec.parameters), groups)


def _place_lines(session: Session, engine: Any, local: EngineTensors) -> Iterator[Line]:
    """Yield lines on the storage of state and parameters, by DeepSpeed's settings and by files."""
    plan = session.plan
    state_at, weights_at = engine.places()
    yield _same("optimizer state rests in", _WHERE[optimizer_place(plan)], _WHERE[state_at])
    if zero_stage(plan) == 3:
        yield _same("parameters rest in", _WHERE[parameter_place(plan)], _WHERE[weights_at])
    if plan.device == "cuda" and optimizer_place(plan) != "nvme":
        home = "cpu" if plan.parsed.offload else "cuda"
        yield _same("optimizer state's device", home, state.devices([*local.masters, *local.states]))
    if plan.parsed.nvme:
        yield _swap_line(session, engine, local)


def _swap_line(session: Session, engine: Any, local: EngineTensors) -> Line:
    """Check that this rank's swap files contain at least the bytes to be swapped."""
    plan, states = session.plan, workload_of(session.optimizer).optimizer_states or 0
    expected = _planned_swap(session, engine).num_bytes(plan, states)
    inside = [path for path in local.swapped if plan.nvme_path and path.is_relative_to(plan.nvme_path)]
    found = sum(path.stat().st_size for path in inside if path.is_file())
    small = "" if expected else ": no part is large enough for DeepSpeed to swap (1 MiB on a rank)"
    return Line(
        name="swapped to NVMe",
        planned=f"≥ {bytes_text(expected)} under {plan.nvme_path}{small}",
        found=f"{bytes_text(found)} in {len(inside)} files",
        ok=found >= expected if expected else None,
    )


def _structure_lines(session: Session, step: Step, recorder: StepRecorder) -> Iterator[Line]:
    plan, spec, module = session.plan, session.spec, session.module
    if spec.blocks:
        again = recomputed_blocks(session)
        text = plan.recompute if plan.recompute_layers is None else f"{plan.recompute} of {len(again)} blocks"
        yield block_line(spec, again, len(step.micros), recorder.forwards, text)
        if plan.recompute_layers is not None:
            yield recomputed_line(session, len(again))
    if spec.tied:
        live = {clean_name(n): id(p) for n, p in module.named_parameters(remove_duplicate=False)}
        planned = ", ".join(" = ".join(names) for names in spec.tied)
        untied = [" ≠ ".join(names) for names in spec.tied if len({live.get(name) for name in names}) > 1]
        yield Line(name="tied parameters", planned=planned, found=", ".join(untied) or planned, ok=not untied)


def _reduces(item: Any) -> bool:
    return item.phase == "backward" and item.name != "all_gather" and item.name != "broadcast"


def _traffic_lines(session: Session, step: Step, recorder: StepRecorder) -> Iterator[Line]:
    """Yield lines on traffic: ZeRO-1 reduces once a step, ZeRO-2 and 3 after each micro batch."""
    if session.dp == 1:
        return
    times = 1 if zero_stage(session.plan) == 1 else len(step.micros)
    found = sum(item.num_bytes for item in recorder.recorder.collectives if _reduces(item))
    least = session.spec.num_trainable * 4 * times
    most = least + sum(4 * 2 * session.dp * times for p in session.spec.parameters if p.trainable)
    yield Line(
        name="gradients reduced per step",
        planned=f"{bytes_text(least)} ({times} × fp32), and padding",
        found=bytes_text(found),
        ok=least <= found <= most,
    )
    gathered = sum(item.num_bytes for item in recorder.recorder.collectives if item.name == "all_gather")
    yield Line(name="all_gather per step", planned="DeepSpeed decides", found=bytes_text(gathered), ok=None)


def _share(name: str, planned: int, found: int, full: int) -> Line:
    def text(elements: int) -> str:
        return f"{elements} of {full} ({elements / full:.1%})" if full else str(elements)

    return Line(name=name, planned=text(planned), found=text(found), ok=planned == found)
