"""Receipt lines on the optimizer: its state, and where and when it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.cost.memory.estimate_memory import local_shape, stepped_groups, zero1_shares
from shardwise.measure import state
from shardwise.model.facts import ModelSpec, ParameterSpec
from shardwise.model.read import clean_name, dtype_name
from shardwise.parallel.ownership import ownership_of
from shardwise.plan.optimizers import OptimizerSpec, ParameterShard
from shardwise.plan.stored_types import extra_states, state_dtype
from shardwise.plan.traffic import data_traffic
from shardwise.plan.workload import Workload
from shardwise.receipts.expected import Range, Traffic
from shardwise.receipts.expected_experts import expert_names, expert_shape
from shardwise.receipts.expected_part import axis_of, shard_dim_of, shard_rank, used_spec
from shardwise.receipts.receipt import Line
from shardwise.train.session import Session
from shardwise.units import bytes_text


class OptimizerRecorder:
    """Recorder of an optimizer's step: parameters with a gradient, their devices, and phases."""

    def __init__(self, session: Session) -> None:
        self.phases: dict[int, str] = {}  # by the id of the parameter
        self.devices: set[str] = set()
        self.gradient_dtypes: set[str] = set()
        self._session = session
        self._hook = session.optimizer.register_step_pre_hook(self._see)

    def stop(self) -> None:
        """Stop; the records stay."""
        self._hook.remove()

    def _see(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.phases[id(parameter)] = self._session.phase
                    self.devices.add(state.local(parameter).device.type)
                    self.gradient_dtypes.add(dtype_name(parameter.grad.dtype))


def stepping_lines(session: Session, recorder: OptimizerRecorder) -> Iterator[Line]:
    """Yield lines on the step's device and on parameters stepped before the backward ends."""
    plan = session.plan
    if plan.parsed.engine != "torch":  # its own optimizer steps
        return
    planned = "cpu" if plan.parsed.offload else session.device.type
    found = ", ".join(sorted(recorder.devices)) or "nothing"
    yield Line(name="optimizer steps on", planned=planned, found=found, ok=planned == found)
    early = sum(phase == "backward" for phase in recorder.phases.values())
    if plan.optimizer_in_backward or early:
        full = sum(p.trainable for p in used_spec(session).parameters)
        planned = f"{full if plan.optimizer_in_backward else 0} of {full} parameters"
        found = f"{early} of {full} parameters"
        yield Line(name="stepped during backward", planned=planned, found=found, ok=planned == found)


def state_lines(session: Session, workload: Workload) -> Iterator[Line]:
    """Yield lines on the state's dtypes and size: elements, or bytes for other shapes."""
    states = [t for t in state.optimizer_tensors(session.optimizer) if t.ndim]
    spec = _with_state(session, used_spec(session))
    trained = {state_dtype(session.plan, p.dtype) for p in spec.parameters if p.trainable}
    mine, every = _stepped(session, spec, workload)
    custom = workload.custom_state
    if states:
        kinds = trained if custom is None else {d for p in mine for d in custom.state_dtypes(p.shape, p.dtype)}
        planned, found = ", ".join(sorted(kinds)), state.dtypes(states)
        yield Line(name="optimizer state dtype", planned=planned, found=found, ok=planned == found)
    if workload.optimizer_states is None:
        return
    local = {p.name: _local_shape(session, p) for p in every}
    if custom is None:
        number = workload.optimizer_states + extra_states(session.plan)
        expected = sum(_product(local[p.name]) for p in mine) * number
        seen, full = state.local_elements(states), sum(p.num_elements for p in every) * number
        texts = [f"{n} of {full} ({n / full:.1%})" if full else str(n) for n in (expected, seen)]
    else:
        sizes = {p.name: _state_bytes(session, p, local[p.name], custom) for p in mine}
        expected, seen = sum(sizes.values()), state.local_bytes(states)
        texts = [f"{custom.name}: {bytes_text(n)}" for n in (expected, seen)]
    yield Line(name="optimizer state held", planned=texts[0], found=texts[1], ok=expected == seen)


def _with_state(session: Session, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with parameters that already have state as trained; a step may skip them."""
    inner, ownership = getattr(session.optimizer, "optim", session.optimizer), ownership_of(session.module)
    kept = {clean_name(name) for name, p in session.module.named_parameters() if inner.state.get(p)}
    if ownership is not None:
        kept |= {ownership.canonical(name) for name in kept}
    trained = {p.name for p in session.spec.parameters if p.trainable}
    parameters = (
        p.model_copy(update={"trainable": p.trainable or (p.name in kept and p.name in trained)})
        for p in spec.parameters
    )
    return spec.model_copy(update={"parameters": tuple(parameters)})


def _stepped(session: Session, spec: ModelSpec, workload: Workload) -> tuple[list[ParameterSpec], list[ParameterSpec]]:
    """Return the parameters, with dimensions, whose state is local, and all that are stepped."""
    groups = stepped_groups(spec, workload)
    mine = every = [p for group in groups for p in group if p.shape]
    ranks = session.plan.dims.dp * session.plan.dims.cp
    if session.plan.parsed.base == "zero1" and ranks > 1:
        dealt = zero1_shares(stepped_groups(session.spec, workload), ranks)[session.ranks.rank]  # whether used or not
        here = {p.name for p in dealt}
        mine = [p for p in every if p.name in here]
    return mine, every


def _local_shape(session: Session, parameter: ParameterSpec, rank: int | None = None) -> tuple[int, ...]:
    if parameter.name in expert_names(session):
        return expert_shape(session, parameter, rank)
    return local_shape(
        parameter,
        session.plan,
        shard_rank(session) if rank is None else rank,
        shard_dim=shard_dim_of(session, parameter.name),
        tp_rank=session.place.tp,
    )


def _state_bytes(session: Session, parameter: ParameterSpec, local: tuple[int, ...], spec: OptimizerSpec) -> int:
    shard = ParameterShard(parameter.shape, local, _local_shape(session, parameter, 0), parameter.block is not None)
    return spec.state_bytes(shard, parameter.itemsize)


def _product(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def with_optimizer_traffic(session: Session, spec: ModelSpec, expected: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """``expected``, with what the optimizer itself adds up over the ranks that shard a parameter.

    One that does so has two methods: ``summed_elements``, the elements that a sharded parameter of a shape adds to each
    all-reduce of a step, and ``sharing``, the group of it. An all-reduce is for all parameters of a dtype together, or
    for each alone where they are stepped in the backward.
    """
    plan = session.plan
    optimizer: Any = getattr(session.optimizer, "optim", session.optimizer)
    summed = getattr(optimizer, "summed_elements", None)
    if summed is None or not plan.parsed.shards_parameters or data_traffic(plan).shards == 1:
        return dict(expected)
    trained = [p for p in spec.parameters if p.trainable]
    rounds = len(trained) if plan.optimizer_in_backward else len({p.dtype for p in trained})
    calls = rounds * max((len(summed(p.shape)) for p in trained), default=0)
    size = sum(sum(summed(p.shape)) * max(p.itemsize, 4) for p in trained)
    name = f"all_reduce{_over(session, optimizer.sharing)}"
    before = expected.get(name, Traffic((0, 0), (0, 0)))
    return {**expected, name: Traffic(_plus(before.calls, calls), _plus(before.num_bytes, size))}


def _over(session: Session, sharing: Callable[[torch.Tensor], dist.ProcessGroup | None]) -> str:
    """The axis that shards parameters, as lines of plans that cut the model name it."""
    axes = axis_of(session)
    groups = (sharing(p) for p in session.module.parameters() if p.requires_grad)
    group = next((group for group in groups if group is not None), None)
    if axes is None or group is None:
        return ""
    return f" over {axes('all_reduce', tuple(dist.get_process_group_ranks(group)))}"


def _plus(ends: Range | None, more: int) -> Range | None:
    return None if ends is None else (ends[0] + more, ends[1] + more)
