"""Run the training step on fake tensors, as one rank of a fake world, and record its memory.

It runs the code of ``shardwise train``: `parallel.apply`, `Session`, its optimizer, its loss and its clipping.
A process runs one dry run at a time, and must not have a process group.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwise.dryrun.record import (
    Sent,
    StorageEvent,
    StorageRecorder,
    answer_reductions,
    fake_world,
    naming_shards,
    recording,
    sharding_units,
    stream_name,
    swapped,
    tensors_of,
)
from shardwise.errors import ModelError, PlanError, ShardwiseError
from shardwise.plan.plan import Plan, runnable

if TYPE_CHECKING:
    import torch
    from torch import nn

STEPS = 2  # the first creates the optimizer's state, the second starts with it


@dataclass(frozen=True)
class Rehearsal:
    """Record of one rank: its events, the category of each storage, and its collectives."""

    events: list[StorageEvent]
    categories: dict[int, str]
    sent: list[Sent]
    seconds: float
    blocks: int | None = None
    alike: bool = False


_PHASES = {"forward": "forward", "backward": "backward", "clip": "optimizer", "optimizer": "optimizer"}
# category of each session phase; any other phase counts as the previous one


@dataclass
class _Clock:
    step: int = 0
    session: Any = None
    module: Any = None
    last: str = "load"
    blocks: int | None = None
    alike: bool = False
    streams: dict[int, str] = field(default_factory=dict)

    def phase(self) -> tuple[int, str]:
        found = "" if self.session is None else self.session.phase
        self.last = _PHASES.get(found, self.last)
        return self.step, self.last

    def stream(self) -> str:
        import torch

        key = id(torch.cpu.current_stream())
        if key not in self.streams:
            self.streams[key] = stream_name(self.module)
        return self.streams[key]


def rehearse(
    build: Callable[[], nn.Module],
    plan: Plan,
    *,
    optimizer: Mapping[str, Any] | None = None,
    clip_norm: float | None = 1.0,
    rank: int = 0,
    steps: int = STEPS,
    blocks: int | None = None,
    batch: Callable[[int], tuple[Any, Any]] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Rehearsal:
    """Train ``steps`` steps of the model that ``build`` creates.

    Args:
        optimizer: keys of the config's ``[optimizer]`` table.
        blocks: keep only this many of the model's repeated blocks.
        batch: makes a micro batch ``(inputs, labels)`` of a number of samples; token ids by default.
        loss: summed loss of outputs and labels; cross-entropy over tokens by default.

    Raises:
        PlanError: this version does not run the plan, or cannot run one rank of it alone (a pipeline).
        ModelError: the model cannot be trained under this plan, or does not run on fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from shardwise.train import step
    from shardwise.train.session import Session

    rehearsable(plan)
    if batch is None and plan.seq_len is None:
        raise PlanError("a dry run on tokens needs the plan's seq_len; set it, or give a function that builds a batch")
    began = time.perf_counter()
    clock = _Clock()
    recorder = StorageRecorder(clock.phase, clock.stream)
    gloo = plan.device == "cpu" and plan.dims.world_size > 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with (
                fake_world(plan.dims.world_size, rank),
                _decided(build, plan, blocks, batch),
                swapped(step, "check_finite", lambda *_, **__: None),  # fake tensors have no values to check
                swapped(Session, "marks", lambda *_: [0, 0]),
                swapped(Session, "sync_rng_state", lambda *_: None),
                naming_shards(recorder),
                FakeTensorMode(allow_non_fake_inputs=True),
            ):
                script = _Script(plan, dict(optimizer or {}), clip_norm, rank, steps, blocks, batch, loss)
                script.run(build, recorder, clock, gloo)
        except ModelError as error:
            if plan.dims.cp > 1 and "explicit mask" in str(error):
                raise ModelError(
                    f"{plan.strategy} cannot be rehearsed with this model: without values it makes a mask that it does "
                    "not make on real ones, and context parallel cuts no mask; rehearse the same plan without +cp"
                ) from None
            raise
        except ShardwiseError:
            raise
        except Exception as error:  # anything that fake tensors do not support
            text = " ".join(str(error).split())
            values = "DataDependent" in type(error).__name__ or "Dynamic" in type(error).__name__
            raise ModelError(
                f"the model does not run on fake tensors: {type(error).__name__}: {text:.300}; "
                + (
                    "a forward that looks at values (.item(), if tensor:) cannot be rehearsed"
                    if values
                    else "see that one step of it runs with real ones, on inputs of this shape"
                )
            ) from error
    seconds = time.perf_counter() - began
    return Rehearsal(recorder.events, recorder.categories(), recorder.sent, seconds, clock.blocks, clock.alike)


def rehearsable(plan: Plan) -> None:
    """Check that one rank of ``plan`` can run alone.

    Raises:
        PlanError: this version does not run it, or its ranks depend on each other (pipeline).
    """
    runnable(plan)
    if plan.dims.pp > 1:
        raise PlanError(
            f"{plan.strategy} cannot be rehearsed: one rank runs alone on fake tensors, and a pipeline's stages wait "
            "for what others compute; rehearse the same plan without +pp, or train three steps of it, which measures it"
        )


@contextmanager
def _decided(
    build: Callable[[], nn.Module], plan: Plan, blocks: int | None, batch: Callable[[int], tuple[Any, Any]] | None
) -> Iterator[None]:
    """Fix the sharding decisions in advance: making them needs values, which fake tensors lack."""
    import torch

    from shardwise.dryrun.extrapolate import shorten
    from shardwise.model.read import read_model
    from shardwise.parallel import apply, materialize
    from shardwise.parallel.decide import decide

    if not plan.dims.splits_model and plan.loss_chunks == 1:
        yield
        return
    module, size = materialize.build(build, 0, real=False), plan.micro_batch or 1
    if blocks is not None:
        shorten(module, blocks)
    sample = torch.zeros(size, plan.seq_len or 1, dtype=torch.int64) if batch is None else batch(size)[0]
    found = decide(module, read_model(module), plan, sample)
    with swapped(apply, "decide", lambda *_: found):
        yield


def count_blocks(build: Callable[[], nn.Module]) -> int | None:
    """Return the number of equal repeated blocks that can be truncated; else ``None``."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from shardwise.dryrun.extrapolate import depth_of
    from shardwise.parallel import materialize

    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")
        return depth_of(materialize.build(build, 0, real=False))


@dataclass(frozen=True)
class _Script:
    plan: Plan
    optimizer: dict[str, Any]
    clip_norm: float | None
    rank: int
    steps: int
    blocks: int | None
    batch: Callable[[int], tuple[Any, Any]] | None
    loss: Callable[[Any, Any], torch.Tensor] | None

    def run(self, build: Callable[[], nn.Module], recorder: StorageRecorder, clock: _Clock, gloo: bool) -> None:
        from shardwise.dryrun.extrapolate import shorten
        from shardwise.model.read import find_blocks
        from shardwise.parallel import materialize
        from shardwise.train.config import OptimizerTable
        from shardwise.train.optimizer import build_optimizer
        from shardwise.train.session import Session

        on_host = self.plan.device != "cpu"  # a unit's weights reach the device when the unit is placed on it
        run_plan = self.plan.model_copy(update={"device": "cpu"})
        model = materialize.build(build, 0, real=self.rank == 0 and not on_host)
        if self.blocks is not None:
            shorten(model, self.blocks)
        clock.blocks = len(find_blocks(model))
        clock.alike = self._ranks_alike(model)
        with recording(recorder, gloo=gloo, on_cpu=not on_host):
            recorder.name(model.buffers(), "buffers")
            recorder.name(model.parameters(), "temporaries")
            clock.module = model
            session = Session(ranks=self._ranks(), planner=lambda *_: run_plan)
            made = build_optimizer(model.parameters(), OptimizerTable(**self.optimizer), model)
            outer, made = session.prepare(model, made)
            del model
            answer_reductions(outer)
            self._name_state(session, recorder)
            clock.session = session
            session.observers.append(_Namer(recorder))
            self._steps(session, outer, made, recorder, clock)
            recorder.close()
            session.close()

    def _steps(self, session: Any, outer: Any, optimizer: Any, recorder: StorageRecorder, clock: _Clock) -> None:
        loss = _named_loss(self._loss(), recorder)

        def window() -> list[Any]:
            return [self._micro(recorder) for _ in range(self.plan.grad_accum)]

        for step in session.run_windows(_windows(window, self.steps, clock), count=_count):
            for micro in step:
                recorder.forward_from = recorder.next_number
                step.backward(loss(outer(micro.inputs), micro.labels))
                recorder.name((p.grad for p in session.module.parameters() if p.grad is not None), "gradients")
            step.update(optimizer, clip_norm=self.clip_norm)
            self._name_units(session, recorder)

    def _micro(self, recorder: StorageRecorder) -> tuple[Any, Any]:
        import torch

        size = self.plan.micro_batch or 1
        if self.batch is not None:
            made = self.batch(size)
        else:
            ids = torch.zeros(size, self.plan.seq_len or 1, dtype=torch.int64)
            made = ids, torch.zeros_like(ids)
        recorder.name(tensors_of(made), "activations")
        return made

    def _loss(self) -> Callable[[Any, Any], torch.Tensor]:
        from shardwise.train.loss import token_loss_sum

        return self.loss or token_loss_sum

    def _ranks(self) -> Any:
        import torch

        from shardwise.distributed.process_group import Ranks

        world = self.plan.dims.world_size
        # no control group: there are no other ranks
        return Ranks(self.rank, world, 0, world, torch.device("cpu"), None, owns_group=False, owns_control=False)

    def _ranks_alike(self, model: nn.Module) -> bool:
        world, strategy = self.plan.dims.world_size, self.plan.parsed
        if world == 1 or not (strategy.shards_parameters or strategy.base == "zero1"):
            return True
        shard = self.plan.dims.dp_shard
        return strategy.shards_parameters and all(p.shape[0] % shard == 0 for p in model.parameters())

    def _name_state(self, session: Any, recorder: StorageRecorder) -> None:
        recorder.name(session.module.buffers(), "buffers")
        recorder.name(session.module.parameters(), "parameters")
        for unit in sharding_units(session.module):
            recorder.name((fsdp_param._sharded_param_data for fsdp_param in unit.fsdp_params), "parameters")

    def _name_units(self, session: Any, recorder: StorageRecorder) -> None:
        for unit in sharding_units(session.module):
            for fsdp_param in unit.fsdp_params:
                recorder.name(fsdp_param.all_gather_outputs, "buffers")


class _Namer:
    """Session observer that categorizes tensors."""

    def __init__(self, recorder: StorageRecorder) -> None:
        self.recorder = recorder

    def on_prepared(self, session: Any) -> None:
        pass

    def on_step_start(self, session: Any, step: Any) -> None:
        pass

    def on_gradients(self, session: Any, step: Any) -> None:
        self.recorder.name((p.grad for p in session.module.parameters() if p.grad is not None), "gradients")

    def on_step_end(self, session: Any, step: Any) -> None:
        inner = getattr(session.optimizer, "optim", session.optimizer)
        self.recorder.name((t for state in inner.state.values() for t in tensors_of(state)), "optimizer")

    def on_step_abandoned(self, session: Any, step: Any) -> None:
        pass


def _named_loss(
    loss: Callable[[Any, Any], torch.Tensor], recorder: StorageRecorder
) -> Callable[[Any, Any], torch.Tensor]:
    """Wrap ``loss`` to categorize the forward's tensors.

    Logits from the model's output on, activations before.
    """

    def named(outputs: Any, labels: Any) -> torch.Tensor:
        recorder.name_numbers(recorder.live_since(recorder.forward_from), "activations")
        full = outputs if not hasattr(outputs, "logits") else outputs.logits
        recorder.name([t for t in tensors_of(full) if recorder.category_of(t) == "activations"], "logits")
        first = recorder.next_number
        result = loss(outputs, labels)
        recorder.name_numbers(recorder.live_since(first), "logits")
        return result

    return named


def _windows(make: Callable[[], list[Any]], steps: int, clock: _Clock) -> Iterator[list[Any]]:
    """Yield the micro batches of each step."""
    for number in range(1, steps + 1):
        clock.step, clock.last = number, "forward"
        yield make()


def _count(labels: Any) -> int:
    return int(labels.numel())
