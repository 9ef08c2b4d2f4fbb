"""Dry run of the training step on fake tensors, as one rank of a world of any size.

It needs no device and no data, and runs in a child process, so that the caller never has a process group. All
allocations, frees and collectives are counted; see `rehearse` for the program, `record` for the counting.

Exact: every tensor visible to PyTorch's operators and collectives. Not counted: workspaces inside kernels
(convolutions, matrix products), the device's context and communicator buffers, and host memory. For ``cuda`` the CPU's
operators are used: attention saves as the fused kernels do, autocast follows the CPU's list.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from shardwise import errors
from shardwise.cost.memory.estimate import Phase
from shardwise.errors import MachineError, ModelError, PlanError
from shardwise.plan.plan import Plan, runnable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.dryrun.rehearse import Rehearsal

_CHILD = "shardwise.dryrun.child"
_BLOCKS_WORTH_IT = 8  # shallower models are traced completely


class ModelSource(BaseModel):
    """Importable model: ``package.module:function``, or the keys of a Hugging Face config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    factory: str | None = None
    kwargs: dict[str, Any] = {}
    config: dict[str, Any] | None = None

    def builder(self) -> Callable[[], nn.Module]:
        """Return the function that builds it.

        Raises:
            UserError: there is no such factory or configuration.
        """
        if self.factory is not None:
            from shardwise.import_object import load_object

            made = load_object(self.factory, "the model's factory")
            return lambda: made(**self.kwargs)
        return _config_builder(dict(self.config or {}))


class PhasePeak(BaseModel):
    """Peak of a phase: live bytes, their categories at that moment, and bytes reserved so far.

    ``step`` is 0 while the model is put in place, then counts from 1; clipping belongs to the optimizer's phase.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    name: str
    allocated: int
    reserved: int | None = None
    parts: dict[str, int] = {}


class CollectiveTotal(BaseModel):
    """Calls and bytes of one kind of collective in a step; bytes are those of the full tensor."""

    model_config = ConfigDict(frozen=True)

    name: str
    calls: int
    num_bytes: int


class DryRun(BaseModel):
    """Result of a dry run of one rank over two steps.

    In bytes; ``reserved`` is ``None`` where the depth was extrapolated. ``reserved`` is the caching allocator's with
    fixed segments, ``reserved_expandable`` with growing ones. ``categories`` are the maxima over time. ``blocks`` is
    the number of traced blocks. ``alike``: every rank has the same shards and does the same work.
    """

    model_config = ConfigDict(frozen=True)

    rank: int
    world_size: int
    phases: tuple[PhasePeak, ...]
    categories: dict[str, int]
    allocated: int
    reserved: int | None
    reserved_expandable: int | None
    collectives: tuple[CollectiveTotal, ...]
    events: int
    seconds: float
    extrapolated: bool = False
    blocks: int | None = None
    alike: bool = False

    def peak(self, phase: str, step: int | None = None) -> int:
        """Return the peak of live bytes of a phase, in one step or in any."""
        return max(p.allocated for p in self.phases if p.name == phase and step in (None, p.step))

    def estimate_phases(self) -> tuple[Phase, ...]:
        """Return the phases as in an `Estimate`."""
        names = ("load", "forward", "backward", "optimizer")
        first = [p for p in self.phases if p.step == 1]
        found = [p for p in self.phases if p.step != 1]
        rows = [p.model_copy(update={"name": name}) for name in names for p in found if p.name == name]
        if first:
            fullest = max(first, key=lambda p: p.allocated)
            rows.append(fullest.model_copy(update={"name": "first_step"}))
        return tuple(Phase.model_validate(p.model_dump(include={"name", "allocated", "reserved"})) for p in rows)


class DryRunRequest(BaseModel):
    """Request to the child process."""

    model_config = ConfigDict(extra="forbid")

    source: ModelSource
    plan: Plan
    optimizer: dict[str, Any] = {}
    clip_norm: float | None = 1.0
    rank: int = 0
    extrapolate: bool = False


def dry_run(
    build: Callable[[], nn.Module] | ModelSource,
    plan: Plan,
    *,
    optimizer: Mapping[str, Any] | None = None,
    clip_norm: float | None = 1.0,
    rank: int = 0,
    extrapolate: bool = False,
    batch: Callable[[int], tuple[Any, Any]] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    timeout_s: float = 600.0,
) -> DryRun:
    """Run two training steps of one rank on fake tensors in a child process.

    Args:
        build: a source, or a function; one that cannot be imported by name is passed by a fork.
        plan: its micro batch, length, precision, recompute and device are used.
        optimizer: keys of the config's ``[optimizer]`` table.
        extrapolate: trace a few blocks and extend to all of them, where that is exact; else trace all.
        batch: makes a micro batch ``(inputs, labels)`` of a number of samples; token ids by default.
        loss: summed loss of outputs and labels; cross-entropy over tokens by default.

    Raises:
        PlanError: this version does not run the plan, or cannot run one rank of it alone (a pipeline).
        ModelError: the model does not run on fake tensors, or not under this plan.
        MachineError: the child died.
    """
    runnable(plan)
    if plan.dims.pp > 1:
        from shardwise.dryrun.rehearse import rehearsable

        rehearsable(plan)
    if batch is None and plan.seq_len is None:
        raise PlanError("a dry run on tokens needs the plan's seq_len; set it, or give a function that builds a batch")
    source = build if isinstance(build, ModelSource) else _by_name(build)
    options: dict[str, Any] = {
        "optimizer": dict(optimizer or {}),
        "clip_norm": clip_norm,
        "rank": rank,
        "extrapolate": extrapolate,
    }
    if source is None or batch is not None or loss is not None:
        builder = build.builder() if isinstance(build, ModelSource) else build
        return _answer(_forked(lambda: answer(builder, plan, batch=batch, loss=loss, **options), timeout_s))
    request = DryRunRequest.model_validate({"source": source, "plan": plan, **options})
    return _answer(_spawned(request.model_dump_json(by_alias=True), timeout_s))


def prove(
    build: Callable[[], nn.Module] | ModelSource, plan: Plan, *, ranks: tuple[int, ...] | None = None, **options: Any
) -> tuple[DryRun, ...]:
    """Dry-run the full model for the ranks with different shards: the first, and the last if different.

    Sharding gives the first ranks the larger chunks; with ``zero1`` each rank steps other parameters, so that ``ranks``
    should name the one with the largest share. The first rank of a tensor-parallel group uses most memory.
    """
    if ranks is not None:
        return tuple(dry_run(build, plan, rank=rank, **options) for rank in dict.fromkeys(ranks))
    first = dry_run(build, plan, **options)
    last = plan.dims.world_size - 1
    return (first,) if first.alike else (first, dry_run(build, plan, rank=last, **options))


def answer(build: Callable[[], nn.Module], plan: Plan, *, extrapolate: bool = False, **options: Any) -> str:
    """Run in the child: return the dry run, or the error, as JSON."""
    try:
        found = _extended(build, plan, **options) if extrapolate else None
        if found is None:
            found = _full(build, plan, **options)
    except errors.UserError as error:
        return json.dumps({"error": type(error).__name__, "problems": list(error.problems)})
    return found.model_dump_json()


def _full(build: Callable[[], nn.Module], plan: Plan, **options: Any) -> DryRun:
    from shardwise.dryrun.rehearse import rehearse

    return _summarize(rehearse(build, plan, **options), plan, options.get("rank", 0))


def _summarize(found: Rehearsal, plan: Plan, rank: int) -> DryRun:
    from shardwise.dryrun.record import peaks_of, totals

    peaks, most = peaks_of(found.events, found.categories)
    growing, _ = peaks_of(found.events, found.categories, expandable=True)
    sent = totals(found.sent, step=max((p.step for p in peaks), default=0))
    return DryRun(
        rank=rank,
        world_size=plan.dims.world_size,
        phases=tuple(
            PhasePeak(step=p.step, name=p.phase, allocated=p.allocated, reserved=p.reserved, parts=p.parts)
            for p in peaks
        ),
        categories=most,
        allocated=max(p.allocated for p in peaks),
        reserved=max(p.reserved for p in peaks),
        reserved_expandable=max(p.reserved for p in growing),
        collectives=tuple(CollectiveTotal(name=n, calls=c, num_bytes=b) for n, (c, b) in sorted(sent.items())),
        events=len(found.events),
        seconds=found.seconds,
        blocks=found.blocks,
        alike=found.alike,
    )


def _extended(build: Callable[[], nn.Module], plan: Plan, **options: Any) -> DryRun | None:
    """Extrapolate from a few blocks to all; ``None`` where model or traces do not allow it."""
    from shardwise.dryrun.extrapolate import LARGEST, SMALLEST, Key, Traced, extended, live_by_phase
    from shardwise.dryrun.rehearse import count_blocks, rehearse

    depth = count_blocks(build)
    if depth is None or depth < _BLOCKS_WORTH_IT:
        return None
    traces: list[Traced] = []
    seconds = 0.0
    for blocks in range(SMALLEST, LARGEST + 1):
        try:
            found = rehearse(build, plan, blocks=blocks, **options)
        except ModelError:  # its forward may need every block
            return None
        found_run = _summarize(found, plan, options.get("rank", 0))
        seconds += found.seconds
        others: dict[Key, int] = {("category", name): size for name, size in found_run.categories.items()}
        others |= {("calls", item.name): item.calls for item in found_run.collectives}
        others |= {("bytes", item.name): item.num_bytes for item in found_run.collectives}
        traces.append(Traced(blocks, live_by_phase(found.events), others | {("events", ""): found_run.events}))
        numbers = extended(traces, depth)
        if numbers is not None:
            return _renumbered(found_run, numbers, blocks, seconds)
    return None


def _renumbered(found_run: DryRun, numbers: Mapping[tuple[str, ...], int], blocks: int, seconds: float) -> DryRun:
    phases = tuple(
        PhasePeak(step=p.step, name=p.name, allocated=numbers[str(p.step), p.name]) for p in found_run.phases
    )
    sent = tuple(
        CollectiveTotal(name=item.name, calls=numbers["calls", item.name], num_bytes=numbers["bytes", item.name])
        for item in found_run.collectives
    )
    return DryRun(
        rank=found_run.rank,
        world_size=found_run.world_size,
        phases=phases,
        categories={name: numbers["category", name] for name in found_run.categories},
        allocated=max(p.allocated for p in phases),
        reserved=None,
        reserved_expandable=None,
        collectives=sent,
        events=numbers["events", ""],
        seconds=seconds,
        extrapolated=True,
        blocks=blocks,
        alike=found_run.alike,
    )


def _by_name(build: Callable[[], nn.Module]) -> ModelSource | None:
    """Return ``build`` as an importable name; ``None`` for closures and the like."""
    module, name = getattr(build, "__module__", None), getattr(build, "__qualname__", "")
    found = getattr(sys.modules.get(module or ""), name, None) if name.isidentifier() else None
    return ModelSource(factory=f"{module}:{name}") if found is build and module != "__main__" else None


def _config_builder(config: dict[str, Any]) -> Callable[[], nn.Module]:
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ModelError("a Hugging Face configuration needs transformers; pip install 'shardwise[hf]'") from None
    kind = config.pop("model_type", None)
    try:
        facts = AutoConfig.for_model(str(kind), **config)
    except Exception as error:  # its checks raise classes of several packages
        raise ModelError(f"model_type '{kind}' cannot be built from its keys: {error}; repair the config") from None
    facts.use_cache = False
    return lambda: AutoModelForCausalLM.from_config(facts, dtype=torch.float32, trust_remote_code=False)


def _spawned(request: str, timeout_s: float) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", _CHILD], input=request, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"the dry run did not end within {timeout_s:.0f} s; trace fewer ranks or blocks") from None
    if done.returncode or not done.stdout.strip():
        last = " ".join(done.stderr.split())[-300:]
        raise MachineError(f"the dry run's process ended with code {done.returncode}: {last or 'it printed nothing'}")
    return done.stdout.splitlines()[-1]


def _forked(call: Callable[[], str], timeout_s: float) -> str:
    import multiprocessing

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        import torch

        torch.set_num_threads(1)
        there.send_bytes(call().encode())

    process = context.Process(target=run, daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(timeout_s):
            raise MachineError(f"the dry run did not end within {timeout_s:.0f} s; trace fewer ranks or blocks")
        return here.recv_bytes().decode()
    except EOFError:
        process.join(5)
        raise MachineError(f"the dry run's process ended with code {process.exitcode} before it answered") from None
    finally:
        here.close()
        if process.is_alive():
            process.join(2)
        if process.is_alive():
            process.kill()
        process.join()


def _answer(text: str) -> DryRun:
    found = json.loads(text)
    if "error" in found:
        raise getattr(errors, found["error"], ModelError)(*found["problems"])
    return DryRun.model_validate(found)
