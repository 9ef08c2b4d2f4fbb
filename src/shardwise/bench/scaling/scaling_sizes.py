"""Measure the sizes of ``bench scaling``: each in a new world; under torchrun, in its world.

All sizes of one question are stored in one file, ``scaling.json`` in the output folder, and later runs add to it: so a
cluster's sizes are collected job by job.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from torch import nn

from shardwise.bench.plots import draw_scaling
from shardwise.bench.scaling.predict import ScalingCurve, curve_of, units_of
from shardwise.bench.scaling.scaling_plans import default_sizes, plans_of
from shardwise.bench.scaling.scaling_report import print_scaling
from shardwise.cost.link_calibration import check_calibration, read_calibration
from shardwise.distributed.process_group import Ranks
from shardwise.environment import visible_devices
from shardwise.errors import MachineError, UserError
from shardwise.hardware.cluster import ClusterSpec, detect
from shardwise.hardware.cpu import processor_name
from shardwise.launch.on_ranks import as_rank, on_ranks
from shardwise.measure.scaling_facts import (
    MODES,
    LeftOut,
    Mode,
    Sample,
    Scaling,
    ScalingRow,
    Subject,
    dumped,
    rows_of,
    warnings_of,
)
from shardwise.measure.step_time.attribution import WARM_UP, Attribution
from shardwise.parallel.materialize import build
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.run.inspect_model import traced_profile
from shardwise.run.job import Job, PreparedJob, prepare_job
from shardwise.search.cost_inputs_of_plan import adapted, with_plan
from shardwise.train.config import Config
from shardwise.train.loss import token_loss_sum
from shardwise.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from shardwise.train.session import Session

if TYPE_CHECKING:
    from shardwise.cost.time.collective_time import Calibration
    from shardwise.distributed.process_group import Ranks

FILE = "scaling.json"
SCHEMA = 1


class ScalingRequest(BaseModel):
    """User's request, equal on every rank."""

    model_config = ConfigDict(frozen=True)

    modes: tuple[Mode, ...]
    sizes: tuple[int, ...]
    steps: int
    beyond: int
    calibration: Path | None
    price: float | None
    output: Path


class SizeTask(BaseModel):
    """Task of the ranks of one size: ``plans`` by mode, ``steps`` of each."""

    model_config = ConfigDict(frozen=True)

    config: Config
    corpus: Path
    plans: dict[Mode, Plan]
    steps: int


def read_links(file: Path | None, cluster: ClusterSpec) -> Calibration | None:
    """Read the links that ``bench comm`` has measured; ``None`` without a file.

    Raises:
        ConfigError: the file is not a calibration file.
        PlanError: it was measured on other devices than ``cluster`` has.
    """
    if file is None:
        return None
    found = read_calibration(file)
    check_calibration(found, cluster, processor=processor_name(), name=str(file))
    return found.calibration()


def measure_here(config: Config, request: ScalingRequest, console: Console) -> dict[str, Any]:
    """Measure every size on this machine, each in a separate world; returns the document."""
    prepared = prepare_job(config, lambda text: console.print(f"data: {text}"))
    sizes = request.sizes or tuple(default_sizes(prepared.job.plan, prepared.cluster.world_size))
    largest = detect(config.parallel.device, max(sizes), visible=visible_devices())
    cores = largest.cores_per_node or 1
    threads = config.parallel.threads or max(1, cores // largest.devices_per_node)
    fair = largest
    if largest.device == "cpu":  # ranks that share cores are not devices to predict from
        fair = largest.model_copy(update={"devices_per_node": max(1, min(largest.devices_per_node, cores // threads))})
    scaling = _begun(request, _about(prepared, fair), config)
    plans, left_out = plans_of(scaling.reference, sizes, request.modes, named=bool(request.sizes))
    if config.parallel.strategy == "auto":
        console.print(f"strategy auto: {scaling.reference.strategy}, at every size")
    if largest.device == "cpu":
        console.print(
            f"each rank has {threads} CPU thread{'s' if threads > 1 else ''} at every size: a rank is a device"
        )
        _warn_of_crowds(plans, threads, largest.cores_per_node, console)
    samples: list[Sample] = []
    for size in sorted({size for _, size in plans}):
        mine = {mode: plan for (mode, at), plan in plans.items() if at == size}
        batches = ", ".join(f"{mode} ({plan.batch_equation()})" for mode, plan in mine.items())
        console.print(f"{size} device{'s' if size > 1 else ''}: {request.steps} steps {batches}")
        try:
            samples += _started(prepared.job, mine, size, threads, request.steps)
        except MachineError as error:
            left_out += [LeftOut(mode=mode, devices=size, reason=f"failed: {_first(error)}") for mode in mine]
            console.print(f"{size} devices failed: {error}")
    if not samples:
        raise MachineError(f"no size could be measured; the last: {left_out[-1].reason}")
    return finish(scaling, samples, left_out, request, console)


def _first(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _warn_of_crowds(plans: dict[tuple[Mode, int], Plan], threads: int, cores: int | None, console: Console) -> None:
    crowded = sorted({size for _, size in plans if cores is not None and size * threads > cores})
    if crowded:
        console.print(
            f"warning: {', '.join(str(size) for size in crowded)} ranks of {threads} thread(s) on {cores} cores: they "
            "take turns, and efficiency there says how cores are shared, not how the job scales"
        )


def _about(prepared: PreparedJob, cluster: ClusterSpec) -> Scaling:
    """Build the `Scaling` without samples, before the measurement."""
    from shardwise.parallel.materialize import build
    from shardwise.train.model import model_factory

    job = prepared.job
    config, plan = job.config, job.plan
    module = build(model_factory(config, prepared.corpus.vocab_size), config.train.seed, real=False)
    profile = traced_profile(
        module, config.data.seq_len, prepared.corpus.vocab_size, precision=plan.precision, device=plan.device
    )
    if profile is not None:
        profile = adapted(profile, plan.parsed, with_plan(Workload(), plan), plan.precision, plan.device)
    optimizer = config.optimizer.name if config.optimizer.factory is None else config.optimizer.factory
    subject = Subject(
        model=str(config.model.config or config.model.factory),
        device=cluster.device_name,
        strategy=plan.strategy,
        precision=plan.precision,
        recompute=plan.recompute,
        compile=plan.compile,
        seq_len=config.data.seq_len,
        micro_batch=plan.micro_batch or 1,
        grad_accum=plan.grad_accum,
        global_batch=plan.global_batch or plan.dims.dp,
        optimizer=optimizer,
    )
    return Scaling(subject=subject, reference=plan, cluster=cluster, units=units_of(profile, plan))


def _started(job: Job, plans: dict[Mode, Plan], size: int, threads: int, steps: int) -> list[Sample]:
    """Start ``size`` ranks that measure each of ``plans``, and return their samples."""
    parallel = job.config.parallel.model_copy(update={"nproc": size, "threads": threads})
    config = job.config.model_copy(update={"parallel": parallel})
    task = SizeTask(config=config, corpus=job.corpus, plans=plans, steps=steps)
    found = on_ranks(f"{__name__}:measure", task, size, device=job.plan.device, threads=threads)[0]
    return [Sample.model_validate(item) for item in found]


def measure(task: SizeTask, ranks: Ranks) -> list[Sample]:
    """Measure each plan on this world, equal plans once; samples on rank 0. Collective."""
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.data.samples import order_for, samples_for, step_batches
    from shardwise.train.model import model_factory

    config, opened = task.config, open_corpus(task.corpus)
    factory = model_factory(config, opened.vocab_size)
    data = samples_for(opened, config)
    order = order_for(data, config, endless=True)
    known: dict[str, Sample | None] = {}  # None on ranks that do not report
    found: list[Sample] = []
    for mode, plan in task.plans.items():
        if plan.fingerprint not in known:
            feed = step_batches(data, order, plan, ranks.rank)
            known[plan.fingerprint] = measure_size(config, plan, mode, factory, feed, ranks, task.steps)
            forget(ranks)
        sample = known[plan.fingerprint]
        if sample is not None:
            found.append(sample.model_copy(update={"mode": mode}))
    return found


# under torchrun, Slurm and the like


def measure_under_launcher(config: Config, request: ScalingRequest, console: Console, *, as_json: bool) -> None:
    """Run as a rank: rank 0 prepares, all measure, rank 0 adds the samples. Does not return."""

    def inner(config: Config, ranks: Ranks) -> None:
        from shardwise.distributed.process_group import prepared_by_main

        if config.parallel.threads is not None and ranks.device.type == "cpu":
            _set_threads(config.parallel.threads)
        mine: list[tuple[Scaling, list[LeftOut]]] = []  # of rank 0

        def prepare() -> str:
            scaling, plans, left_out, corpus = _prepared_here(config, request, ranks, console)
            mine.append((scaling, left_out))
            task = SizeTask(config=config, corpus=corpus, plans=plans, steps=request.steps)
            return task.model_dump_json(by_alias=True, exclude_unset=True)

        task = SizeTask.model_validate_json(prepared_by_main(prepare, ranks, "the measurement"))
        samples = measure(task, ranks)
        for scaling, left_out in mine:
            document = finish(scaling, samples, left_out, request, console)
            if as_json:
                print(json.dumps(document), flush=True)

    as_rank(inner, config, config.parallel.device)


def _set_threads(number: int) -> None:
    import torch

    torch.set_num_threads(number)


def _prepared_here(
    config: Config, request: ScalingRequest, ranks: Ranks, console: Console
) -> tuple[Scaling, dict[Mode, Plan], list[LeftOut], Path]:
    """Prepare the `Scaling` and the plans for this world.

    Later sizes are derived from the same reference as earlier ones.
    """
    nodes = max(1, ranks.world_size // ranks.local_world_size)
    local = config.parallel.model_copy(update={"nproc": ranks.local_world_size})
    here = config.model_copy(update={"parallel": local})
    prepared = prepare_job(here, lambda text: console.print(f"data: {text}"), nodes=nodes)
    scaling = _begun(request, _about(prepared, prepared.cluster), config)
    plans, left_out = plans_of(scaling.reference, [ranks.world_size], request.modes, named=True)
    return scaling, {mode: plan for (mode, _), plan in plans.items()}, left_out, prepared.job.corpus


# the file, and the results computed from it


def stored(file: Path) -> Scaling | None:
    """Read earlier measurements; ``None`` without a file.

    Raises:
        UserError: the file has other content.
    """
    try:
        document = json.loads(file.read_text())
        return Scaling.model_validate({key: document[key] for key in Scaling.model_fields})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise UserError(
            f"'{file}' is no file of bench scaling ({_first(error)}); move it away, or choose another --output"
        ) from None


def _begun(request: ScalingRequest, scaling: Scaling, config: Config) -> Scaling:
    """Return ``scaling`` with the samples of the file; samples of another question are rejected.

    Settings that the config derives from the number of ranks are those of the first size.

    Raises:
        UserError: the samples are of another question, or the links were measured on other devices.
    """
    read_links(request.calibration, scaling.cluster)
    earlier = stored(request.output / FILE)
    if earlier is None:
        return scaling
    train, left_open = config.train, ["strategy"] if config.parallel.strategy == "auto" else []
    left_open += ["global_batch"] if train.global_batch is None else []
    left_open += ["micro_batch", "grad_accum"] if None in (train.micro_batch, train.grad_accum) else []
    asked = scaling.subject.model_copy(update={name: getattr(earlier.subject, name) for name in left_open})
    other = asked.differences(earlier.subject)
    if other:
        raise UserError(
            f"'{request.output / FILE}' holds samples of another question: this one has {', '.join(other)}; "
            "choose another --output, or move the file away"
        )
    larger = max(scaling.cluster, earlier.cluster, key=lambda one: (one.world_size, one is scaling.cluster))
    return earlier.model_copy(update={"cluster": larger, "units": scaling.units or earlier.units})


def finish(
    scaling: Scaling, samples: Sequence[Sample], left_out: Sequence[LeftOut], request: ScalingRequest, console: Console
) -> dict[str, Any]:
    """Add the samples to the file, compute, print and draw the results; returns the document."""
    file = request.output / FILE
    with _alone(request.output):
        full = (stored(file) or scaling).model_copy(update={"cluster": scaling.cluster, "units": scaling.units})
        full = full.merged(samples, left_out)
        price = request.price if request.price is not None else full.cluster.price_per_device_hour
        rows = [row for mode in MODES for row in rows_of(full.of(mode), price)]
        calibration = read_links(request.calibration, full.cluster)
        modes = [mode for mode in MODES if full.of(mode)]
        curves = [curve_of(full, mode, request.beyond, calibration) for mode in modes]
        document = document_of(full, rows, curves, price)
        _write(file, json.dumps(document, indent=1) + "\n")
    print_scaling(full, rows, curves, price, console)
    console.print(f"raw samples: {file}")
    plot = file.with_suffix(".png")
    console.print(f"plot: {plot}" if draw_scaling(document, plot) else "no plot: matplotlib is not installed")
    return document


def document_of(
    scaling: Scaling, rows: Sequence[ScalingRow], curves: Sequence[ScalingCurve], price: float | None
) -> dict[str, Any]:
    """Build the file's content and the answer of ``--json``; see docs/scaling.md."""
    return {
        "schema": SCHEMA,
        "date": max((sample.date for sample in scaling.samples), default=""),
        **dumped(scaling),
        "price_per_device_hour": price,
        "warnings": warnings_of(scaling),
        "rows": [dumped(row) for row in rows],
        "curves": [dumped(curve) for curve in curves],
    }


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder's file: jobs of several sizes may end at the same time."""
    with (folder / f".{FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(file)
    except OSError as error:
        raise MachineError(
            f"'{file}' cannot be written: {error.strerror}; make room, or choose another --output"
        ) from None


def measure_size(
    config: Config,
    plan: Plan,
    mode: Mode,
    factory: Callable[[], nn.Module],
    feed: Iterable[list[Any]],
    ranks: Ranks,
    steps: int,
) -> Sample | None:
    """Time ``steps`` optimizer steps after a warm-up; ``None`` except on rank 0. Collective.

    ``feed`` yields this rank's micro batches of each step. All ranks and devices are synchronized before the first
    timed step and after the last one; in between only training itself synchronizes.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    session = Session(ranks=ranks, planner=lambda *_: plan)
    attribution = Attribution.attach(session)
    try:
        model = build(factory, config.train.seed, real=ranks.is_main)
        sample = torch.zeros(plan.micro_batch or 1, config.data.seq_len, dtype=torch.int64)
        model, optimizer = session.prepare(model, build_optimizer(model.parameters(), config.optimizer, model), sample)
        rate = learning_rate(config.optimizer, WARM_UP + steps)
        ends: list[float] = []
        tokens = 0
        for step in session.run_windows(feed, limit=WARM_UP + steps):
            step.run(model, token_loss_sum)
            set_learning_rate(optimizer, rate(step.number), config.optimizer.lr)
            result = step.update(optimizer, clip_norm=config.optimizer.clip_norm)
            if step.number == WARM_UP:
                _meet(ranks)
            elif step.number == WARM_UP + steps:
                _wait_for_device(ranks)
            if step.number >= WARM_UP:
                ends.append(time.perf_counter())
            tokens += result.tokens if step.number > WARM_UP else 0
        attribution.finish()
        timing = attribution.timing()
    finally:
        attribution.detach()
    if not ranks.is_main:
        return None
    return Sample(
        mode=mode,
        devices=ranks.world_size,
        nodes=max(1, ranks.world_size // ranks.local_world_size),
        plan=plan,
        steps_s=tuple(after - before for before, after in pairwise(ends)),
        wall_s=ends[-1] - ends[0],
        tokens=tokens,
        threads=torch.get_num_threads(),
        cores=_cores() if ranks.device.type == "cpu" else None,
        load=load,
        date=datetime.date.today().isoformat(),
        timing=timing,
    )


def forget(ranks: Ranks) -> None:
    """Free the memory of the last measured model: only the collector finds its hooks' cycles."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def _wait_for_device(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


def _meet(ranks: Ranks) -> None:
    _wait_for_device(ranks)
    if ranks.world_size > 1:
        dist.barrier(group=ranks.control)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
