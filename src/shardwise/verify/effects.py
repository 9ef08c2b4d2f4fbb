"""The effects receipt: after the second step, what really took effect against what was planned.

`EffectsProbe` watches one step of a session on every rank. What it sees comes from live tensors and from PyTorch's
dispatcher; what it expects comes from the plan and the model's structure. A rank's finding is told to all ranks, so
that all of them go on or all of them stop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.utils import _pytree

from shardwise.cost.memory import held_elements, stepped_groups, zero1_shares
from shardwise.measure import state
from shardwise.measure.collectives import CollectiveRecorder
from shardwise.parallel.apply import parameter_names
from shardwise.parallel.group import gather_ints, gather_text
from shardwise.parallel.shard import reshard
from shardwise.spec.model import ModelSpec
from shardwise.spec.read import CHECKPOINT_WRAPPER_PART, clean_name
from shardwise.train.optimizer import workload_of
from shardwise.train.session import Micro, Session, Step
from shardwise.units import bytes_text
from shardwise.verify.expected import expected_block_calls, expected_traffic, units_of
from shardwise.verify.receipt import Line, Receipt

PROBED_STEP = 2  # counted from the start of this process: the first step still allocates
_COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}


class EffectsProbe:
    """Observes the second step of a session and makes the effects receipt of it.

    Args:
        on_receipt: called on rank 0 with the receipt, before a false line raises.
        strict: raise `ReceiptError` on all ranks when a line is false on any.
    """

    def __init__(self, on_receipt: Callable[[Receipt], None] | None = None, *, strict: bool = True) -> None:
        self.receipt: Receipt | None = None
        self._on_receipt = on_receipt
        self._strict = strict
        self._seen = 0
        self._recorder: CollectiveRecorder | None = None
        self._block_calls = 0
        self._hooks: list[Any] = []
        self._before: set[str] = set()
        self._gradient_lines: list[Line] = []

    def on_prepared(self, session: Session) -> None:
        """Nothing yet."""

    def on_step_start(self, session: Session, step: Step) -> None:
        """Start recording when it is the step to watch."""
        self._stop_recording()
        self._seen += 1
        if self._seen < PROBED_STEP:
            self._before = {_digest(micro) for micro in step.micros}
        if self.receipt is not None or self._seen < PROBED_STEP or not _has_stepped(session):
            return
        reshard(session.applied.outer)  # an evaluation may have left parameters gathered
        self._hooks = [inner.register_forward_pre_hook(self._count_call) for inner in _inner_blocks(session)]
        self._recorder = CollectiveRecorder(lambda: session.phase)
        self._recorder.__enter__()

    def on_gradients(self, session: Session, step: Step) -> None:
        """Nothing: the gradients are still there at the end of the step."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """Stop recording, compare, and tell."""
        if self._recorder is None:
            return
        recorder, calls = self._recorder, self._block_calls
        self._stop_recording()
        lines = [*effects_lines(session, step, recorder, calls), distinct_line(session, step.micros, self._before)]
        self.receipt = agree(session, "effects", lines)
        if self._on_receipt is not None and session.ranks.is_main:
            self._on_receipt(self.receipt)
        if self._strict:
            self.receipt.require()

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Stop recording; a later step is looked at instead."""
        self._stop_recording()

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._seen -= 1
        for hook in self._hooks:
            hook.remove()
        self._recorder, self._hooks, self._block_calls = None, [], 0

    def _count_call(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation inside the step is the user's own
            self._block_calls += 1


def _has_stepped(session: Session) -> bool:
    """False while fp16's scaler has skipped every step so far, so that there is no optimizer state to look at."""
    if session.scaler is None:
        return True
    stepped = any(True for _ in state.optimizer_tensors(session.optimizer))
    return any(row[0] for row in gather_ints([int(stepped)], session.ranks))


def agree(session: Session, title: str, lines: list[Line]) -> Receipt:
    """Rank 0's lines, where a line that is false on another rank is false, with that rank's finding and number."""
    texts = gather_text(json.dumps([line.model_dump() for line in lines]), session.ranks)
    merged = []
    for versions in zip(*(json.loads(text) for text in texts), strict=True):
        wrong = [(rank, version) for rank, version in enumerate(versions) if version["ok"] is False]
        chosen = dict(versions[0])
        if wrong and len(texts) > 1:
            rank, version = wrong[0]
            others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            chosen = {**version, "found": f"{version['found']} (rank {rank}{others})"}
        merged.append(Line(**chosen))
    return Receipt(title=title, lines=tuple(merged))


def effects_lines(session: Session, step: Step, recorder: CollectiveRecorder, block_calls: int) -> list[Line]:
    """Every line that this rank can judge alone."""
    return [
        *_batch_lines(session, step),
        *_dtype_lines(session, recorder),
        *_share_lines(session),
        *_traffic_lines(session, step, recorder),
        *_structure_lines(session, step, block_calls),
        *_offload_lines(session),
    ]


def used_spec(session: Session) -> ModelSpec:
    """The model's facts with parameters that got no gradient counted as frozen: nothing is reduced for them.

    A gradient that is there but was never reduced over the ranks is one all the same.
    """
    used = {clean_name(name) for name, p in session.module.named_parameters() if p.grad is not None}
    used |= set(_never_reduced(session.module))
    parameters = (p.model_copy(update={"trainable": p.trainable and p.name in used}) for p in session.spec.parameters)
    return session.spec.model_copy(update={"parameters": tuple(parameters)})


def _never_reduced(module: nn.Module) -> Iterator[str]:
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        group = _group(unit)
        for held in group.fsdp_params if group is not None else ():
            whole = getattr(held, "_unsharded_param", None)
            if held.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                yield clean_name(str(held._param_fqn))


def _same(name: str, planned: str, found: str) -> Line:
    return Line(name=name, planned=planned, found=found, ok=planned == found)


def _batch_lines(session: Session, step: Step) -> Iterator[Line]:
    planned, found = session.plan.grad_accum, len(step.micros)
    ok = None if found < planned else found == planned  # fewer only in the last, partial window of the data
    yield Line(name="micro batches per step", planned=str(planned), found=str(found), ok=ok)


def _dtype_lines(session: Session, recorder: CollectiveRecorder) -> Iterator[Line]:
    plan, spec, module = session.plan, used_spec(session), session.module
    own = ", ".join(sorted({p.dtype for p in spec.parameters}))
    trained = ", ".join(sorted({p.dtype for p in spec.parameters if p.trainable}))
    yield _same("parameter dtype", own, state.dtypes(module.parameters()))
    if recorder.matmul_dtypes:
        found = ", ".join(sorted(recorder.matmul_dtypes))
        yield _same("compute dtype", _COMPUTE.get(plan.precision, own), found)
    yield _same("gradient dtype", trained, state.dtypes(state.gradients(module)))
    reducing = {c.dtype for c in recorder.collectives if c.phase == "backward" and c.name != "all_gather"}
    if plan.dims.dp > 1:
        yield _same("reduction dtype", trained, ", ".join(sorted(reducing)) or "none")
    states = [t for t in state.optimizer_tensors(session.optimizer) if t.ndim]
    if states:
        yield _same("optimizer state dtype", trained, state.dtypes(states))


def _share_lines(session: Session) -> Iterator[Line]:
    plan, spec, module = session.plan, used_spec(session), session.module
    rank = session.ranks.rank % plan.dims.dp_shard
    held = {p.name: held_elements(p, plan, rank) for p in spec.parameters}
    trained = [p for p in spec.parameters if p.trainable]
    yield _share("parameters held", sum(held.values()), state.local_elements(module.parameters()), spec.num_parameters)
    expected = sum(held[p.name] for p in trained)
    found = state.local_elements(state.gradients(module))
    yield _share("gradients held", expected, found, spec.num_trainable)
    workload = workload_of(session.optimizer, parameter_names(module))
    if workload.optimizer_states is None:
        return
    groups = stepped_groups(spec, workload)
    mine = every = [p for group in groups for p in group if p.shape]
    if plan.parsed.base == "zero1" and plan.dims.dp > 1:
        mine = [p for p in zero1_shares(groups, plan.dims.dp)[session.ranks.rank] if p.shape]
    expected = sum(held[p.name] for p in mine) * workload.optimizer_states
    whole = sum(p.num_elements for p in every) * workload.optimizer_states
    states = [t for t in state.optimizer_tensors(session.optimizer) if t.ndim]
    yield _share("optimizer state held", expected, state.local_elements(states), whole)


def _share(name: str, planned: int, found: int, whole: int) -> Line:
    def text(elements: int) -> str:
        return f"{elements} of {whole} ({elements / whole:.1%})" if whole else str(elements)

    return Line(name=name, planned=text(planned), found=text(found), ok=planned == found)


def _traffic_lines(session: Session, step: Step, recorder: CollectiveRecorder) -> Iterator[Line]:
    expected = expected_traffic(used_spec(session), session.plan, len(step.micros))
    found = recorder.totals()
    for name in sorted({*expected, *found}):
        calls, size = found.get(name, (0, 0))
        if name not in expected:
            yield Line(name=f"{name} per step", planned="none", found=f"{calls} calls, {bytes_text(size)}", ok=False)
            continue
        traffic = expected[name]
        planned_calls = "" if traffic.calls is None else f"{_range(traffic.calls, str)} calls, "
        planned = planned_calls + _range(traffic.num_bytes, bytes_text)
        ok = traffic.num_bytes[0] <= size <= traffic.num_bytes[1]
        if traffic.calls is not None:
            ok = ok and traffic.calls[0] <= calls <= traffic.calls[1]
        yield Line(name=f"{name} per step", planned=planned, found=f"{calls} calls, {bytes_text(size)}", ok=ok)


def _range(ends: tuple[int, int], text: Callable[[int], str]) -> str:
    return text(ends[0]) if ends[0] == ends[1] else f"{text(ends[0])} to {text(ends[1])}"


def _structure_lines(session: Session, step: Step, block_calls: int) -> Iterator[Line]:
    plan, spec, module = session.plan, used_spec(session), session.module
    unused = session.spec.num_trainable - spec.num_trainable
    if unused:
        found = f"{unused} of {session.spec.num_trainable} trainable elements take no part in the loss"
        yield Line(name="gradients missing", planned="none", found=found, ok=None)
    if plan.parsed.shards_parameters:
        units = sum(isinstance(m, FSDPModule) and _holds_parameters(m) for m in module.modules())
        yield _same("sharding units", str(len(units_of(spec))), str(units))
    if spec.blocks:
        least, most = expected_block_calls(spec, plan, len(step.micros))
        planned = f"{_range((least, most), str)} (recompute {plan.recompute})"
        yield Line(
            name="block forwards per step", planned=planned, found=str(block_calls), ok=least <= block_calls <= most
        )
    if spec.tied:
        planned = ", ".join(" = ".join(names) for names in spec.tied)
        untied = [" ≠ ".join(names) for names in spec.tied if not _is_tied(module, names)]
        yield Line(name="tied parameters", planned=planned, found=", ".join(untied) or planned, ok=not untied)


def _holds_parameters(module: FSDPModule) -> bool:
    group = _group(module)
    return group is not None and bool(group.fsdp_params)


def _is_tied(module: nn.Module, names: Iterable[str]) -> bool:
    live = {clean_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
    return len({id(live.get(name)) for name in names}) == 1


def _offload_lines(session: Session) -> Iterator[Line]:
    plan, module = session.plan, session.module
    if not plan.parsed.shards_parameters:
        return
    units = [m for m in module.modules() if isinstance(m, FSDPModule) and _holds_parameters(m)]
    offloading = {isinstance(_group(m).offload_policy, CPUOffloadPolicy) for m in units}
    tensors = [*module.parameters(), *(t for t in state.optimizer_tensors(session.optimizer) if t.ndim)]
    where = state.devices(tensors)
    home = "cpu" if plan.parsed.offload else session.device.type
    planned = f"{home}, offload {'on' if plan.parsed.offload else 'off'}"
    found = f"{where}, offload {'/'.join(sorted('on' if o else 'off' for o in offloading))}"
    yield _same("state lives on", planned, found)


def _group(module: FSDPModule) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def _inner_blocks(session: Session) -> list[nn.Module]:
    name = CHECKPOINT_WRAPPER_PART.rstrip(".")
    return [getattr(block, name, block) for block in session.applied.blocks]


def distinct_line(session: Session, micros: list[Micro], before: set[str]) -> Line:
    """No micro batch of this step was given to two ranks: they are compared by hash.

    Where the data repeats itself from step to step (``before`` are the last step's hashes), as when one batch is
    overfitted on purpose, that is told and not held against the run.
    """
    mine = [_digest(micro) for micro in micros if not micro.filler]
    repeats = any(row[0] for row in gather_ints([int(bool(before & set(mine)))], session.ranks))
    everyone = [text.split() for text in gather_text(" ".join(mine), session.ranks)]
    holders: dict[str, list[int]] = {}
    for rank, digests in enumerate(everyone):
        for digest in digests:
            holders.setdefault(digest, []).append(rank)
    total = sum(len(digests) for digests in everyone)
    twice = [ranks for ranks in holders.values() if len(ranks) > 1]
    found = f"{len(holders)} distinct"
    if twice:
        found += f"; the same samples on ranks {', '.join(str(r) for r in sorted(set(twice[0])))}"
    if repeats:
        found += "; the data repeats itself from step to step"
    ok = None if repeats else not twice
    return Line(name="samples across ranks", planned=f"{total} distinct", found=found, ok=ok)


def _digest(micro: Micro) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in _pytree.tree_leaves((micro.inputs, micro.labels)):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().to("cpu").contiguous().flatten()
            digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
