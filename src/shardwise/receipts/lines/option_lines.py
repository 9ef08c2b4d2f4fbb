"""Receipt lines on plan options, each false if its option did not take effect."""

from __future__ import annotations

from collections.abc import Iterator, Set

from shardwise.measure.collectives import CollectiveRecorder
from shardwise.parallel.data_parallel.ddp import Replicated
from shardwise.parallel.data_parallel.fsdp import gathered_ahead
from shardwise.plan.parallel_options import OPTION_SPECS
from shardwise.plan.plan import Plan
from shardwise.receipts.expected_part import planned_stages, root_units, run_micros, tokens_of, used_spec
from shardwise.receipts.lines.logit_lines import logits_line
from shardwise.receipts.receipt import Line
from shardwise.receipts.recorder import StepRecorder
from shardwise.train.session import Session
from shardwise.train.step import Step
from shardwise.units import bytes_text

_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


def option_lines(session: Session, step: Step, recorder: StepRecorder) -> Iterator[Line]:
    """Yield the lines that this rank can check alone."""
    dims = session.plan.dims
    if dims.splits_model:
        yield _mesh_line(session)
    if dims.tp > 1:
        yield from _tensor_lines(session, step, recorder)
    if dims.pp > 1:
        yield _schedule_line(session, step, recorder)
    if session.plan.compile or recorder.compiled is not None:
        yield _compile_line(session, recorder)
    if session.plan.async_tp:
        import torch._inductor.config

        yield _option("async_tp", "on", "on" if torch._inductor.config._micro_pipeline_tp else "off")
    if session.applied.on_host is not None or session.plan.offload_activations:
        yield _offloaded_line(session, step, recorder)
    if session.plan.prefetch > 1:
        yield _prefetch_line(session, recorder)
    if isinstance(session.applied.outer, Replicated):
        yield from _ddp_lines(session.plan, session.applied.outer)
    if session.plan.loss_chunks > 1:
        yield logits_line(session, step, recorder.head)


def _mesh_line(session: Session) -> Line:
    """Compare the actual mesh axes with the degrees of the plan."""
    dims, meshes = session.plan.dims, session.applied.meshes
    planned = {"pp": dims.pp, "dp": dims.dp, "cp": dims.cp, "tp": dims.tp}
    found = dict.fromkeys(planned, 1)
    if meshes is not None:
        found |= {axis: mesh.size() for axis in ("pp", "cp", "tp") if (mesh := getattr(meshes, axis)) is not None}
        found["dp"] = meshes.data_ranks // found["cp"]
    return _same(
        "mesh", *(" × ".join(f"{axis} {degree}" for axis, degree in sizes.items()) for sizes in (planned, found))
    )


def _schedule_line(session: Session, step: Step, recorder: StepRecorder) -> Line:
    """Check the schedule by its class, and by the most micro batches in flight in a stage."""
    plan, pipeline = session.plan, session.applied.pipeline
    number, stages = len(run_micros(session, step)), plan.dims.pp * plan.virtual_stages
    flies: int | None = None
    if plan.virtual_stages == 1:
        gpipe = plan.pipeline_schedule == "gpipe"
        flies = number if gpipe else min(number, plan.dims.pp - session.place.pp)
    name = _SCHEDULES[plan.pipeline_schedule]
    if name == "Schedule1F1B" and number < stages:  # both are the same then, and torch's 1F1B refuses
        name = "ScheduleGPipe"
    used = None if pipeline is None else pipeline._schedules.get(number)
    most = flying = 0
    for span in recorder.spans:
        flying += {"forward": 1, "backward": -1, "backward-input": -1}.get(span.kind, 0)
        most = max(most, flying)
    tail = " micro batches in flight"
    planned = name if flies is None else f"{name}, {flies}{tail}"
    found = type(used).__name__ if flies is None else f"{type(used).__name__}, {most}{tail}"
    return _option("pipeline_schedule", planned, found)


def _compile_line(session: Session, recorder: StepRecorder) -> Line:
    """Check that every forward of a block was one compiled graph."""
    blocks = len(session.applied.blocks) if session.plan.compile else 0
    calls, runs = recorder.compiled_calls
    graphs = 0 if recorder.compiled is None else recorder.compiled.blocks
    planned = f"{blocks}, one graph for each of {recorder.block_calls} forwards" if blocks else "none"
    return _option("compile", planned, f"{graphs}, one graph for each of {runs} forwards" if calls else "none")


def _offloaded_line(session: Session, step: Step, recorder: StepRecorder) -> Line:
    """Compare what blocks saved with what was copied to host memory, and came back.

    Nothing is judged where nothing came by: a recomputed block's input, say, that is passed by keyword. A frozen block,
    or one whose result is unused, need not ask for all that it saved. The predicted bytes are beside them and are not
    judged: what a model saves of constants, such as masks, depends on the number of samples.
    """
    saved, moved, returned = recorder.offloaded
    ran = session.applied.on_host is not None and session.applied.on_host.forwards > 0
    foreseen = (session.saved_on_host or 0) * len(run_micros(session, step))
    predicted = f"; {bytes_text(foreseen)} predicted" if foreseen else ""
    return Line(
        name=OPTION_SPECS["offload_activations"].receipt,
        planned=f"{bytes_text(saved)} (all that blocks saved{predicted})",
        found=f"{bytes_text(moved)}, {bytes_text(returned)} came back",
        ok=None if not saved and ran else 0 < saved == moved and 0 < returned <= moved,
    )


def _prefetch_line(session: Session, recorder: StepRecorder) -> Line:
    """Compare FSDP2's prefetch depth with the units gathered when the first block ran."""
    depth, forward = session.plan.prefetch, gathered_ahead(session.module)[0]
    if session.plan.dims.pp > 1:  # stages run in turn
        return _option("prefetch", str(min(depth, _longest(session))), str(forward))
    spec, tail = used_spec(session), "gathered when the first one ran"
    ahead = min(depth, len(spec.blocks))
    units = len(root_units(session, spec)) + min(len(spec.blocks), 1 + depth)
    found = f"{forward}, {recorder.gathers_before_first} units {tail}"
    return _option("prefetch", f"{ahead}, {units} units {tail}", found)


def _ddp_lines(plan: Plan, outer: Replicated) -> Iterator[Line]:
    """Compare the options of DDP with what its reducer has."""
    facts = outer._get_ddp_logging_data()
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(plan, option):
            yield _option(option, "on", "on" if facts.get(option) else "off")
    if plan.bucket_cap_mb is not None:
        found = int(facts["bucket_cap_bytes"]) / 2**20
        yield _option("bucket_cap_mb", f"{plan.bucket_cap_mb} MiB", f"{found:g} MiB")


def _longest(session: Session) -> int:
    """Count the blocks of the longest local stage, the largest possible prefetch depth."""
    return max(len(blocks) for blocks in planned_stages(session).values())


def _same(name: str, planned: str, found: str) -> Line:
    return Line(name=name, planned=planned, found=found, ok=planned == found)


def _option(option: str, planned: str, found: str) -> Line:
    return _same(OPTION_SPECS[option].receipt, planned, found)


def _tensor_lines(session: Session, step: Step, recorder: StepRecorder) -> Iterator[Line]:
    plan, decision = session.plan, session.applied.decision
    layout = None if decision is None else decision.layout
    if layout is None:
        return
    known = tokens_of(step.micros)
    if recorder.lengths and known is not None:
        lengths = {length for _, length in known}
        full = recorder.lengths <= lengths
        sharded = recorder.lengths <= {length // plan.dims.tp for length in lengths} and not full
        found = (
            "on"
            if sharded
            else "off"
            if full
            else f"blocks are given {sorted(recorder.lengths)} of {sorted(lengths)} tokens"
        )
        yield _option("sequence_parallel", "on" if plan.sequence_parallel else "off", found)
    if recorder.logits and layout.vocab:
        widths = ", ".join(str(width) for width in sorted(recorder.logits))
        found = "off" if layout.vocab in recorder.logits else "on"
        planned = "on" if plan.loss_parallel else "off"
        yield Line(
            name=OPTION_SPECS["loss_parallel"].receipt,
            planned=planned,
            found=f"{found} (logits of {widths} of {layout.vocab} on a rank)",
            ok=planned == found,
        )


def compute_line(planned: Set[str], recorder: CollectiveRecorder, *, casts_weights: bool) -> Line:
    """Compare product dtypes with the plan.

    Others are the model's own, except of uncast weights.

    If the plan casts weights (``casts_weights``), a weight that is multiplied in another dtype without a copy was
    not cast. Autocast casts the operands of each product: it is on if any product has the planned dtype; elsewhere
    a part of the model has turned it off or casts afterwards (attention or a router in fp32 on purpose).
    """
    seen, wanted = recorder.matmul_dtypes, ", ".join(sorted(planned))
    own = seen - planned
    missed = recorder.weight_dtypes - planned if casts_weights else set()
    found = ", ".join(sorted(seen))
    if own and not missed and seen & planned:
        found = f"{', '.join(sorted(seen & planned))}; {', '.join(sorted(own))} where the model casts itself"
    return Line(name="compute dtype", planned=wanted, found=found, ok=bool(seen & planned) and not missed)
